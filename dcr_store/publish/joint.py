"""A transaction of several writers: each writes its slices and seals; the one that began it commits for all.

No writer talks to another: all they share is the store. What is in no slice is written as residual. Whatever each
element's way, it has to come from exactly one writer: the committer refuses anything else, naming it. A writer that
has ended goes on as another incarnation and stores nothing twice; a committer that has ended is followed by another
attempt, for which the writers that are still there seal again.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dcr_store import events
from dcr_store.errors import (
    ConflictError,
    DcrError,
    FencedError,
    InvalidInputError,
    LagError,
)
from dcr_store.format.documents import ObjectRef
from dcr_store.format.names import TransactionKeys, new_incarnation, version_name
from dcr_store.format.rows import VersionRow
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.coverage import Holding
from dcr_store.layout.layout import Layout
from dcr_store.layout.pieces import Piece
from dcr_store.log.fold import LineState, OpenTransaction
from dcr_store.log.line import LineLog
from dcr_store.payload.contributions import Rows
from dcr_store.payload.version import read_manifest
from dcr_store.publish.ending import Ending
from dcr_store.publish.joint_commit import JointCommit
from dcr_store.publish.journaled import read_earlier
from dcr_store.publish.opening import LIVE
from dcr_store.publish.ownership import Ownership, ones_of, owned_box
from dcr_store.publish.partitions import PartitionWriter
from dcr_store.publish.seals import SealWatch, read_seal, same_bits
from dcr_store.publish.slice_baseline import SliceBaseline
from dcr_store.publish.slice_bits import SliceBits
from dcr_store.publish.slice_writer import SliceWriter
from dcr_store.publish.spool import ChunkSpool
from dcr_store.publish.waiting import tries
from dcr_store.publish.written import Written, cut_slice, of_fragment, of_slice
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.info import VersionInfo, info_of
from dcr_store.wording import first_of

Slices = Sequence[AffineMap] | Callable[[Layout], Sequence[AffineMap]]
"""What a writer is going to write: maps, or what makes them for the layout of the transaction."""


class SliceTransaction(Ending):
    """One writer's part of an open transaction. Not thread-safe; use one thread.

    Leaving it as a context manager without an exception commits it, or, for a writer that did not begin it, seals and
    waits for the outcome. An exception aborts it for all writers.

    Attributes
    ----------
    line : str
    version : str
        Which one this will be, as ``line@number``.
    txid : str
        Of the transaction: by it others join this one and no other.
    attempt : int
        How often the transaction was taken up again; a writer seals for an attempt.
    writer : str
        The name of this one.
    is_committer : bool
        Whether it began the transaction, or took it up, and commits for all.
    layout : Layout
        Names, dtypes, shapes and addresses of the version's tensors.
    """

    def __init__(
        self,
        catalog: Catalog,
        log: LineLog,
        pending: OpenTransaction,
        writer: str,
        baseline: SliceBaseline,
        release: Callable[[], None],
        *,
        is_committer: bool,
        slices: Slices | None,
    ) -> None:
        super().__init__()
        self.line, self.txid, self.attempt, self.writer = log.line, pending.txid, pending.attempt, writer
        self.version = version_name(log.line, pending.version)
        self.is_committer = is_committer
        self._catalog, self._log, self._pending, self._baseline = catalog, log, pending, baseline
        self._release = release
        self._keys = TransactionKeys(log.line, pending.version, pending.txid)
        self._held: dict[str, Holding] = {}
        self._used: dict[str, SliceBits] = {}
        self._committed: VersionInfo | None = None
        self._has_advanced = False
        self._rows: Mapping[str, Rows] = {}
        self._ownership: tuple[bytes, ObjectRef] | None = None
        if is_committer:
            weakref.finalize(self, LIVE.discard, (pending.txid, pending.attempt))
        if writer not in pending.writers:
            raise InvalidInputError(
                "the transaction was begun for other writers", key=writer, expected=list(pending.writers)
            )
        if pending.layout is None:
            raise InvalidInputError(
                f"the transaction for {self.version} was begun by a sole writer; nobody can join it", key=self.txid
            )
        self.layout: Layout = catalog.layout(pending.layout)
        head = None if pending.base is None else log.row(pending.version - 1)
        is_delta = head is not None and head.layout == pending.layout
        self._base = Located(log.line, head) if head is not None and is_delta else None
        self._joint_commit: JointCommit | None = None
        if is_committer:
            self._joint_commit = JointCommit(
                catalog, log, self._keys, pending, self.layout, self._base, baseline, self._require_ours
            )
        baseline.bring_to(self._base)
        announced = slices(self.layout) if callable(slices) else slices
        self._announced: dict[str, Sequence[Piece]] = {}
        expected = None if announced is None else self._expected(announced)
        if self._base is None:
            baseline.expect(self._announced)
        earlier = read_earlier(catalog.objects, self._keys, writer)
        document = catalog.document
        partitions = PartitionWriter(
            catalog.objects,
            self._keys,
            writer,
            new_incarnation(),
            self.attempt,
            document.codec,
            document.chunk_elements,
            earlier.durable,
            ChunkSpool(),
            keep=False,
            bound=earlier,
        )
        self._writer = SliceWriter(partitions, self.layout, self._heal, is_anchor=self._base is None, expected=expected)

    def _expected(self, slices: Sequence[AffineMap]) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        for mapped in slices:
            _require_map(mapped, "slices")
            cut = partial(cut_slice, mapped, self.layout, self._chunk_elements)
            self._announced[mapped.digest] = self._baseline.pieces_of(mapped.digest, cut)
            for piece in self._announced[mapped.digest]:
                place = (piece.space, piece.chunk)
                found[place] = found.get(place, 0) + piece.n_elements
        return found

    @property
    def _chunk_elements(self) -> int:
        return self._catalog.document.chunk_elements

    # ------------------------------------------------------------------ writing

    def write_slice(self, tensor: object, mapped: AffineMap) -> None:
        """Write what a slice holds of canonical tensors. It may change when this returns.

        Parameters
        ----------
        tensor : numpy.ndarray or torch.Tensor
            Of the map's dtype and shape; any strides, any device.
        mapped : AffineMap

        Raises
        ------
        InvalidInputError
            If tensor and map, or map and layout, do not fit, or an element was written before.
        """
        self._require_unsealed()
        _require_map(mapped, "mapped")
        self._write(of_slice(tensor, mapped, self.layout, self._chunk_elements))

    def write_residual(self, name: str, fragment: object, offset: int = 0) -> None:
        """Write adjacent values of a canonical tensor that no slice holds bit for bit, as the exporter gives them.

        Parameters
        ----------
        name : str
            The canonical tensor.
        fragment : numpy.ndarray or torch.Tensor
            Of its dtype and any shape; the values `offset`, `offset` + 1, … of the tensor in C order.
        offset : int
            In values; of packed ones, where a byte begins.

        Raises
        ------
        InvalidInputError
            If it does not fit the tensor, or an element was written before.
        """
        self._require_unsealed()
        self._write(of_fragment(name, fragment, offset, self.layout, self._chunk_elements))

    def _write(self, part: Written) -> None:
        for name, boxes in part.held.items():
            if (twice := self._held.setdefault(name, Holding(name)).doubled(boxes)) is not None:
                raise InvalidInputError(f"writer {self.writer} wrote {twice} before in this transaction", key=name)
        with self._whole():
            for name, boxes in part.held.items():
                self._held[name].add(boxes)
            if self._base is None:
                bits = self._baseline.blank(self._baseline.pieces_of(part.key, part.cut))
            else:
                if part.key not in self._baseline.slices:
                    # With all others that will be needed: many small ones are in the same chunks.
                    wanted = {**self._announced, part.key: self._baseline.pieces_of(part.key, part.cut)}
                    if self._baseline.read(self._catalog, wanted) and self._announced:
                        self._baseline.note()
                bits = self._baseline.slices[part.key]
            self._used[part.key] = bits
            self._writer.write(part.key, bits, part.local, is_residual=part.is_residual)

    def _heal(self, bits: SliceBits, index: int) -> None:
        """Read a piece of the baseline from the store again; called from workers' threads."""
        self._baseline.heal(self._catalog, bits, index)

    # ------------------------------------------------------------------ sealing

    def seal(self) -> None:
        """Say that this writer has written all of its part, durably. Does nothing if that was said."""
        if self._state == "sealed":
            return
        self._require_unsealed()
        with self._whole():
            self._rows = self._writer.finish()
            ownership = self._store_ownership()
            self._writer.partitions.seal(self.layout.spaces, self._rows, [], self._writer.n_changed, ownership)
        self._state = "sealed"

    def _store_ownership(self) -> ObjectRef:
        """Store what this writer owns, unless the base has the same."""
        boxes = {name: tuple(map(owned_box, holding.boxes())) for name, holding in self._held.items()}
        known = self._baseline.owned
        if known is None or (known.layout, known.writer, known.boxes) != (self.layout.sha256, self.writer, boxes):
            ones = ones_of(self.layout, boxes, self._chunk_elements)
            known = self._baseline.owned = Ownership(self.layout.sha256, self.writer, boxes, ones)
        data = known.to_bytes()
        self._ownership = self._baseline.ownership
        if self._ownership is None or self._ownership[0] != data:
            self._ownership = data, self._writer.partitions.put_now("ownership.json", data)
        return self._ownership[1]

    def commit(self, *, timeout_s: float | None = None) -> VersionInfo:
        """Seal, and wait until the version is in the store. The writer that began the transaction puts it there.

        Parameters
        ----------
        timeout_s : float, optional
            How long to wait for the other writers; for ever by default.

        Raises
        ------
        LagError
            If it took longer; names who has not sealed, or that the committer has not committed. ``commit`` again goes
            on waiting; ``abort`` gives up for all.
        IntegrityError
            If an element was written by nobody, or by several writers, or a writer saw another base.
        FencedError
            If the transaction was taken over or aborted: nothing was committed.
        ConflictError
            If the version was committed with other bits that another process sealed under this writer's name.
        OutcomeUnknownError
            If the answer was lost for good: look at the log before anything else.
        """
        if self._committed is not None:
            return self._committed
        self._require_own_process()
        if self._state == "open":
            self.seal()
        elif self._state != "sealed":
            raise InvalidInputError(f"the transaction for {self.version} is {self._state}", key=self.txid)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            decide = self._await_outcome if self._joint_commit is None else self._joint_commit.commit
            located = Located(self.line, decide(deadline, timeout_s))
        except FencedError:
            self._state = "fenced"
            self._close()
            raise
        self._require_counted(located)
        # Until here nothing has changed: where an answer was lost, ``commit`` again finds the same outcome.
        found = info_of(Located(self.line, self._log.complete(located.row)))
        if not self._closed:  # else the baseline serves another transaction, which brings it to its base
            try:
                self._advance(located)
            except BaseException:
                self._close()  # what changed in part must not be changed again: whoever uses it next proves it
                raise
        self._state, self._committed = "committed", found
        self._close()
        return found

    def _await_outcome(self, deadline: float | None, timeout_s: float | None) -> VersionRow:
        events.reached("publish.outcome.awaited", self.version)
        for _ in tries(deadline):
            state = self._log.refresh()
            pending = state.open
            if pending is not None and pending.txid == self.txid:
                if pending.attempt != self.attempt:
                    self._writer.partitions.reseal(pending.attempt)
                    self.attempt = pending.attempt
                    events.reached("publish.resealed", self.version)
                continue
            row = self._log.row(self._pending.version)
            if row is not None and row.txid == self.txid:
                return row
            raise FencedError(
                f"the transaction for {self.version} was aborted; nothing was committed{self._why()}", key=self.txid
            )
        raise LagError(
            f"{self.version} is sealed by writer {self.writer}, and not committed after {timeout_s:g} s: "
            f"{self._awaited()}",
            key=self.txid,
            advice="commit again to go on waiting, or abort",
        )

    def _why(self) -> str:
        """Return what the log says of the transaction's end, for an error that is raised anyway."""
        with contextlib.suppress(DcrError):
            reason = self._log.abort_reason(self._pending)
            return "" if reason is None else f": {reason}"
        return ""

    def _awaited(self) -> str:
        """Name whom the transaction waits for, for an error that is raised anyway."""
        watch = SealWatch(self._catalog.objects, self._keys, self._pending.writers)
        with contextlib.suppress(DcrError):
            watch.look()
            missing = watch.missing(self.attempt)
            return f"not sealed by {first_of(missing, 8)}" if missing else "the writer that began it is to commit"
        return "who has not sealed cannot be read"

    def _require_counted(self, located: Located) -> None:
        """Refuse a version that has, of this writer, other bits: those of a process that used its name as well."""
        proposal = None if self._joint_commit is None else self._joint_commit.proposal
        if proposal is not None and proposal.ref == located.row.manifest:
            manifest = proposal.manifest
        else:
            manifest = read_manifest(self._catalog.objects, located.row.manifest)
        seal = next(seal for seal in manifest.seals if seal.writer == self.writer)
        if seal.incarnation == self._writer.partitions.incarnation:
            return
        if same_bits(self._rows, read_seal(self._catalog.objects, seal)):
            self._ownership = None  # where this incarnation stored it, no version names it
            return
        self._baseline.bring_to(None)
        self._state = "fenced"
        self._close()
        raise ConflictError(
            f"{self.version} was committed with what another process sealed as writer {self.writer}; the weights of "
            "this one are others, and are not in it: end one of the two, then publish them as the next version",
            key=seal.ref.key,
            expected=f"incarnation {self._writer.partitions.incarnation}",
            found=f"incarnation {seal.incarnation}",
        )

    def _advance(self, located: Located) -> None:
        """Bring the baseline to the version: known to be committed."""
        if self._has_advanced:
            return  # not to the end: slices that are half there are not kept, and the masks are not for them any more
        self._has_advanced = True
        # Not before: what a transaction stored that ends without a version may be deleted.
        self._baseline.ownership = self._ownership
        if self._base is None:
            self._baseline.adopt(located, self._used)
        else:
            self._baseline.advance(located, self._used, self._writer.changes)
        events.reached("publish.baseline.advanced", self.version)

    # ------------------------------------------------------------------ ending

    def abort(self, reason: str = "aborted by a writer") -> None:
        """End the transaction without a version, for all writers. Does nothing if it has ended already."""
        self._abort(reason)

    @property
    def _has_proposed(self) -> bool:
        return self._joint_commit is not None and self._joint_commit.proposal is not None

    @property
    def _is_undecided(self) -> bool:
        return self._state in ("open", "sealed")

    def _require_abortable(self, state: LineState) -> None:
        pending = state.open
        if pending is None or pending.txid != self.txid:
            raise FencedError(f"the transaction for {self.version} has ended", key=self.txid)
        if self.is_committer:
            self._require_ours(state)  # a committer that was taken over has nothing to say any more

    def _commit_at_exit(self) -> None:
        self.commit()

    def _reason(self, error: BaseException) -> str:
        return f"writer {self.writer}: {super()._reason(error)}"

    def _require_unsealed(self) -> None:
        self._require_own_process()
        if self._state != "open":
            raise InvalidInputError(
                f"writer {self.writer} can add nothing to {self.version}: it is {self._state}", key=self.txid
            )
        if self._spoiled is not None:
            raise InvalidInputError(
                f"{self.version} cannot go on: part of it could not be taken ({self._spoiled}); join again, or abort",
                key=self.txid,
            )

    def _close(self) -> None:
        if self.is_committer:
            LIVE.discard((self.txid, self.attempt))
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._used = {}  # what the baseline does not keep can go
        self._baseline.n_doubts = 0 if self._committed is not None else self._baseline.n_doubts + 1
        self._release()


def _require_map(mapped: object, key: str) -> None:
    if not isinstance(mapped, AffineMap):
        raise InvalidInputError(
            "is no affine map of a slice; make one with dcr_store.layout.slices, or by discover",
            key=key,
            expected="an AffineMap" + (", after the tensor" if key == "mapped" else ", in a list"),
            found=type(mapped).__name__,
        )
