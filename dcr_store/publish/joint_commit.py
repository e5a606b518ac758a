"""The commit of a transaction of several writers, by the one that began it (docs/spec/v1.md §8).

It waits until all have sealed, checks who owns what, and appends the record that is the commit. Refuses elements that
nobody owns, or several writers, and base bits that are not the base's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dcr_store import events
from dcr_store.errors import LagError
from dcr_store.format.documents import Base, CheckpointFile, ObjectRef
from dcr_store.format.names import TransactionKeys, version_name
from dcr_store.format.rows import VersionRow
from dcr_store.layout.layout import Layout
from dcr_store.log.fold import LineState, OpenTransaction
from dcr_store.log.line import LineLog
from dcr_store.objects.threads import Threads
from dcr_store.payload.version import Table
from dcr_store.publish.committing import Proposal, Sealed, append_commit, missing_if_ended, propose, store_proposal
from dcr_store.publish.ownership import check_ownership
from dcr_store.publish.seals import SealWatch
from dcr_store.publish.slice_baseline import SliceBaseline
from dcr_store.publish.waiting import tries
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept
from dcr_store.wording import first_of


class JointCommit:
    """What the committer has come to; asked again after an error, it goes on from there.

    Parameters
    ----------
    base : Located or None
        What the version is a delta against; None for an anchor.
    baseline : SliceBaseline
        The committer's: it remembers whose ownership was found to fit last.
    require_ours : callable
        Raises ``FencedError`` where the attempt is not the last any more.
    """

    def __init__(
        self,
        catalog: Catalog,
        log: LineLog,
        keys: TransactionKeys,
        pending: OpenTransaction,
        layout: Layout,
        base: Located | None,
        baseline: SliceBaseline,
        require_ours: Callable[[LineState], None],
    ) -> None:
        self._proposed: tuple[list[Sealed], Proposal] | None = None
        self._catalog, self._log, self._keys, self._pending = catalog, log, keys, pending
        self._layout, self._base, self._baseline = layout, base, baseline
        self._require_ours = require_ours
        self._version = version_name(log.line, pending.version)

    def commit(self, deadline: float | None, timeout_s: float | None) -> VersionRow:
        """Commit as soon as all writers have sealed; return the version.

        Parameters
        ----------
        deadline, timeout_s : float or None
            Until when to wait for them, by the monotonic clock, and how long that was from the beginning.

        Raises
        ------
        LagError
            If they have not sealed by then; names them.
        FencedError, IntegrityError, ConflictError, OutcomeUnknownError
            As of ``SliceTransaction.commit``.
        """
        if self._proposed is None:
            # Each is a chain of requests, and neither needs the other.
            pool = Threads(1, "dcr-base")
            try:
                reading = None if self._catalog.objects.is_local else pool.submit(self._of_base)
                sealed = self._await_seals(deadline, timeout_s)
                base, files = self._of_base() if reading is None else reading.result()
            finally:
                pool.shutdown(wait=False)  # what only reads need not hold up who gives up
            chunk_elements, attempt = self._catalog.document.chunk_elements, self._pending.attempt
            proposal = propose(self._keys, attempt, self._layout, base, sealed, files, chunk_elements)
            self._proposed = sealed, proposal
        sealed, proposal = self._proposed
        with missing_if_ended(self._log, self._require_ours):
            store_proposal(self._catalog.objects, self._keys, sealed, proposal)
        return append_commit(self._log, proposal, self._require_ours)

    @property
    def proposal(self) -> Proposal | None:
        """What was proposed, None if nothing was yet."""
        return None if self._proposed is None else self._proposed[1]

    def _await_seals(self, deadline: float | None, timeout_s: float | None) -> list[Sealed]:
        """Return what all writers have sealed, once they have."""
        attempt = self._pending.attempt
        watch = SealWatch(self._catalog.objects, self._keys, self._pending.writers)
        events.reached("publish.seals.awaited", self._version)
        for _ in tries(deadline):
            watch.look()
            if not watch.missing(attempt):
                break
            self._require_ours(self._log.refresh())
        missing = watch.missing(attempt)
        if missing:
            raise LagError(
                f"{len(missing)} of {len(watch.writers)} writers have not sealed {self._version} after "
                f"{timeout_s:g} s: {first_of(missing, 8)}",
                key=self._keys.txid,
                advice="commit again to go on waiting, or abort",
            )
        events.reached("publish.seals.found", self._version)
        with missing_if_ended(self._log, self._require_ours):
            found = watch.sealed(attempt)
            self._check_ownership(watch, found)
        return [item for item, _ in found]

    def _check_ownership(self, watch: SealWatch, found: Sequence[tuple[Sealed, ObjectRef]]) -> None:
        """Check who owns what, unless the same documents of the same writers were found right before.

        Then they are not even read: those of thousands of writers took longer than all else in a commit.
        """
        proof = tuple(f"{item.seal.writer} {ref.sha256}" for item, ref in found)
        if self._baseline.proven != (self._layout.sha256, proof):
            check_ownership(self._layout, watch.ownership(found), self._catalog.document.chunk_elements)
            self._baseline.proven = self._layout.sha256, proof

    def _of_base(self) -> tuple[tuple[Base, Mapping[str, Table]] | None, Sequence[CheckpointFile]]:
        """Return what a proposal takes of the base, and its files: headers and side files go on with the layout."""
        base = self._base
        if base is None:
            return None, ()
        contents = while_kept(self._catalog, [base], lambda: self._catalog.contents(base))
        return (base.base, contents.tables), contents.manifest.files
