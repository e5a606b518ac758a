"""A transaction of several writers: each writes its slices and seals; the one that began it commits for all.

No writer talks to another: all they share is the store. What is in no slice is written as residual. Whatever each
element's way, it has to come from exactly one writer: the committer refuses anything else, naming it. A writer that
has ended goes on as another incarnation and stores nothing twice; a committer that has ended is followed by another
attempt, for which the writers that are still there seal again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from dcr_store import events
from dcr_store.errors import (
    ConflictError,
    FencedError,
    InvalidInputError,
    LagError,
)
from dcr_store.format import canonical
from dcr_store.format.documents import CheckpointFile, ObjectRef
from dcr_store.format.names import TransactionKeys, new_incarnation, version_name
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Box, Dim, box
from dcr_store.layout.coverage import doubled
from dcr_store.layout.dtypes import DTYPES, Bits
from dcr_store.layout.entry import TensorEntry
from dcr_store.layout.layout import Layout
from dcr_store.layout.pieces import Piece, in_elements, pieces, require_entry
from dcr_store.layout.tensors import as_bits
from dcr_store.log.fold import LineState, OpenTransaction, VersionRow
from dcr_store.log.line import LineLog
from dcr_store.payload.contributions import Rows
from dcr_store.payload.version import read_manifest
from dcr_store.publish.committing import Proposal, Sealed, append_commit, propose, store_proposal
from dcr_store.publish.ending import Ending
from dcr_store.publish.opening import LIVE
from dcr_store.publish.owner import is_dead
from dcr_store.publish.ownership import Ownership, check_ownership, ones_of, owned_box
from dcr_store.publish.partitions import PartitionWriter, read_earlier
from dcr_store.publish.seals import SealWatch, read_seal, same_bits
from dcr_store.publish.slice_baseline import SliceBaseline, SliceBits
from dcr_store.publish.slice_writer import SliceWriter
from dcr_store.publish.spool import ChunkSpool
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.info import VersionInfo, info_of

_FIRST_DELAY_S: Final = 0.02
_LONGEST_DELAY_S: Final = 0.5

Slices = Sequence[AffineMap] | Callable[[Layout], Sequence[AffineMap]]
"""What a writer is going to write: maps, or what makes them for the layout of the transaction."""


class SliceTransaction(Ending):
    """One writer's part of an open transaction. Not thread-safe; use one thread.

    Leaving it as a context manager without an exception commits it, or, for a writer that did not begin it, seals and
    waits for the outcome. An exception aborts it for all writers.
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
        self._held: dict[str, list[Box]] = {}
        self._used: dict[str, SliceBits] = {}
        self._committed: VersionInfo | None = None
        self._proposed: tuple[int, list[Sealed], Proposal] | None = None
        self._rows: Mapping[str, Rows] = {}
        self._ownership: tuple[bytes, ObjectRef] | None = None
        if is_committer:
            weakref.finalize(self, LIVE.discard, pending.txid)
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
        baseline.bring_to(self._base)
        announced = slices(self.layout) if callable(slices) else slices
        expected = None if announced is None else self._expected(announced)
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
            bound=earlier,
        )
        self._writer = SliceWriter(partitions, self.layout, self, is_anchor=self._base is None, expected=expected)

    def _expected(self, slices: Sequence[AffineMap]) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        for mapped in slices:
            for piece in self._pieces(mapped.digest, mapped):
                place = (piece.space, piece.chunk)
                found[place] = found.get(place, 0) + piece.n_elements
        return found

    def _pieces(self, key: str, mapped: AffineMap) -> Sequence[Piece]:
        return self._baseline.pieces_of(key, lambda: tuple(pieces(mapped, self.layout, self._writer_chunk)))

    @property
    def _writer_chunk(self) -> int:
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
        data = as_bits(", ".join(mapped.tensors) or "the slice", tensor)
        if (data.dtype, tuple(data.shape)) != (mapped.dtype, mapped.shape):
            raise InvalidInputError(
                "the slice is not what its map is of",
                key=", ".join(mapped.tensors) or None,
                expected=f"{mapped.dtype} {list(mapped.shape)}",
                found=f"{data.dtype} {list(data.shape)}",
            )
        held = {}
        for name, boxes in mapped.boxes.items():
            entry = require_entry(self.layout, name, mapped)
            held[entry.name] = in_elements(boxes, mapped.dtype)
        self._write(mapped.digest, held, lambda: self._pieces(mapped.digest, mapped), data.bits, is_residual=False)

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
        entry = self.layout.entry(name)
        data = as_bits(name, fragment)
        row = DTYPES[entry.dtype]
        start, rest = divmod(offset * row.bits, 8 * row.width) if isinstance(offset, int) else (-1, 0)
        if data.dtype != entry.dtype or rest or not 0 <= start <= start + len(data.bits) <= entry.n_elements:
            raise InvalidInputError(
                "the fragment does not fit the tensor",
                key=name,
                expected=f"{entry.dtype}, within {list(entry.shape)}",
                found=f"{data.dtype} {list(data.shape)} at {offset}",
            )
        n = len(data.bits)
        held = {entry.name: (box(0, start, [Dim(n, 1, 1)]),) if n else ()}
        key = f"residual {entry.name} {start} {n}"
        self._write(key, held, lambda: self._fragment_pieces(key, entry, start, n), data.bits, is_residual=True)

    def _fragment_pieces(self, key: str, entry: TensorEntry, start: int, n: int) -> Sequence[Piece]:
        size = self._writer_chunk

        def cut() -> tuple[Piece, ...]:
            low, high = entry.start + start, entry.start + start + n
            found = []
            for chunk in range(low // size, -(-high // size)) if n else ():
                a, b = max(low, chunk * size), min(high, (chunk + 1) * size)
                found.append(Piece(entry.space, chunk, (box(a - low, a - chunk * size, [Dim(b - a, 1, 1)]),)))
            return tuple(found)

        return self._baseline.pieces_of(key, cut)

    def _write(
        self,
        key: str,
        held: Mapping[str, Sequence[Box]],
        cut: Callable[[], Sequence[Piece]],
        local: Bits,
        *,
        is_residual: bool,
    ) -> None:
        for name, boxes in held.items():
            if (part := doubled(name, [*self._held.get(name, ()), *boxes])) is not None:
                raise InvalidInputError(f"writer {self.writer} wrote {part} before in this transaction", key=name)
        with self._whole():
            for name, boxes in held.items():
                self._held.setdefault(name, []).extend(boxes)
            if self._base is None:
                bits = SliceBits.blank(cut())
            else:
                if key not in self._baseline.slices:
                    self._baseline.read(self._catalog, {key: cut()})
                bits = self._baseline.slices[key]
            self._used[key] = bits
            self._writer.write(key, bits, local, is_residual=is_residual)

    def heal(self, bits: SliceBits, index: int) -> None:
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
        boxes = {name: tuple(owned_box(item) for item in items) for name, items in self._held.items()}
        known = self._baseline.owned
        if known is None or (known.layout, known.writer, known.boxes) != (self.layout.sha256, self.writer, boxes):
            ones = ones_of(self.layout, boxes, self._writer_chunk)
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
            decide = self._commit_all if self.is_committer else self._await_outcome
            located = Located(self.line, decide(deadline, timeout_s))
        except FencedError:
            self._state = "fenced"
            self._close()
            raise
        self._require_counted(located)
        # Until here nothing has changed: where an answer was lost, ``commit`` again finds the same outcome.
        found = info_of(Located(self.line, self._log.complete(located.row)))
        if not self._closed:  # else the baseline serves another transaction, which brings it to its base
            self._advance(located)
        self._state, self._committed = "committed", found
        self._close()
        return found

    def _commit_all(self, deadline: float | None, timeout_s: float | None) -> VersionRow:
        if self._proposed is None:
            watch = SealWatch(self._catalog.objects, self._keys, self._pending.writers)
            events.reached("publish.seals.awaited", self.version)
            for _ in _tries(deadline):
                watch.look()
                if not watch.missing(self.attempt):
                    break
                self._require_ours(self._log.refresh())
            missing = watch.missing(self.attempt)
            if missing:
                raise LagError(
                    f"{len(missing)} of {len(watch.writers)} writers have not sealed {self.version} after "
                    f"{timeout_s:g} s: {', '.join(missing[:8])}",
                    key=self.txid,
                    advice="commit again to go on waiting, or abort",
                )
            events.reached("publish.seals.found", self.version)
            found = watch.sealed(self.attempt)
            self._check_ownership([owned for _, owned in found])
            sealed = [item for item, _ in found]
            base = None if self._base is None else (self._base.base, self._catalog.tables(self._base))
            files = self._files()
            proposal = propose(self._keys, self.attempt, self.layout, base, sealed, files, self._writer_chunk)
            self._proposed = self.attempt, sealed, proposal
        _, sealed, proposal = self._proposed
        store_proposal(self._catalog.objects, self._keys, sealed, proposal)
        return append_commit(self._log, proposal, self._require_ours)

    def _check_ownership(self, found: Sequence[Ownership]) -> None:
        """Check who owns what, unless the same was found right for the version before."""
        proof = tuple(canonical.sha256(item.to_bytes()) for item in found)
        if self._baseline.proven != (self.layout.sha256, proof):
            check_ownership(self.layout, found, self._writer_chunk)
            self._baseline.proven = self.layout.sha256, proof

    def _files(self) -> Sequence[CheckpointFile]:
        """Return the files of the base: headers and side files go on with the layout."""
        return () if self._base is None else self._catalog.contents(self._base).manifest.files

    def _await_outcome(self, deadline: float | None, timeout_s: float | None) -> VersionRow:
        events.reached("publish.outcome.awaited", self.version)
        for _ in _tries(deadline):
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
            raise FencedError(f"the transaction for {self.version} was aborted; nothing was committed", key=self.txid)
        raise LagError(
            f"{self.version} is sealed by writer {self.writer}, and not committed after {timeout_s:g} s",
            key=self.txid,
            advice="commit again to go on waiting, or abort",
        )

    def _require_counted(self, located: Located) -> None:
        """Refuse a version that has, of this writer, other bits: those of a process that used its name as well."""
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
        # Not before: what a transaction stored that ends without a version may be deleted.
        self._baseline.ownership = self._ownership
        if self._base is None:
            self._baseline.slices = dict(self._used)
        else:
            for key, index, change in self._writer.changed():
                self._baseline.change(self._used[key], index, change)
        self._baseline.keep(self._used)
        self._baseline.at = located
        events.reached("publish.baseline.advanced", self.version)

    # ------------------------------------------------------------------ ending

    def _require_ours(self, state: LineState) -> None:
        pending = state.open
        if pending is None or (pending.txid, pending.attempt) != (self.txid, self.attempt):
            raise FencedError(
                f"the transaction for {self.version} was taken over or aborted; nothing was committed: look at the "
                "log, then begin again",
                key=self.txid,
                expected=f"attempt {self.attempt} open",
                found="no open transaction" if pending is None else f"{pending.txid} attempt {pending.attempt}",
            )

    def abort(self, reason: str = "aborted by a writer") -> None:
        """End the transaction without a version, for all writers. Does nothing if it has ended already."""
        self._abort(reason)

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
            LIVE.discard(self.txid)
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._baseline.is_doubtful |= self._committed is None
        self._release()


def awaited(
    log: LineLog, txid: str | None, last: str | None, timeout_s: float | None, writers: tuple[str, ...] | None = None
) -> OpenTransaction:
    """Return the transaction that is open on a line: `txid`, or else the next one that is not `last`.

    With `writers`, one that was begun for these, and not by a process that is known to be gone.

    Raises
    ------
    LagError
        If it was not begun in time.
    FencedError
        If `txid` has ended.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for _ in _tries(deadline):
        pending = log.refresh().open
        if pending is not None and (
            pending.txid == txid or (txid is None and pending.txid != last and _is_of(pending, writers))
        ):
            return pending
        if txid is not None:
            raise FencedError("the transaction is not open any more", key=txid)
    raise LagError(
        f"nobody has begun a transaction on {log.line} for {timeout_s:g} s", key=log.line, advice="join again"
    )


def _is_of(pending: OpenTransaction, writers: tuple[str, ...] | None) -> bool:
    return writers is None or (pending.writers == writers and not is_dead(pending.owner))


def _tries(deadline: float | None) -> Iterator[None]:
    """Yield until the deadline, at longer and longer intervals; at least once, and once after it."""
    delay_s = _FIRST_DELAY_S
    while True:
        yield
        left_s = delay_s if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(delay_s, left_s))
        delay_s = min(1.5 * delay_s, _LONGEST_DELAY_S)
