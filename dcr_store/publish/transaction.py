"""A transaction: write tensors or a checkpoint, commit or abort (docs/spec/v1.md §8, §9).

A version is exactly what its transaction wrote. Where that has the base's layout it is stored as a delta, otherwise
as an anchor, without the caller doing anything. Refuses to write a tensor twice, to mix tensors with a checkpoint, to
commit nothing, and to go on once fenced.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dcr_store import events
from dcr_store.errors import FencedError, IntegrityError, InvalidInputError
from dcr_store.format.documents import CheckpointFile, ObjectRef
from dcr_store.format.names import TransactionKeys, new_incarnation, version_name
from dcr_store.layout.dtypes import Bits, shown, uint_dtype
from dcr_store.layout.entry import name_problem
from dcr_store.layout.from_dtensor import is_dtensor
from dcr_store.layout.layout import Layout, LayoutBuilder, TensorEntry
from dcr_store.layout.tensors import as_bits, memory_key
from dcr_store.log.fold import OpenTransaction
from dcr_store.log.line import LineLog
from dcr_store.publish.baseline import Baseline
from dcr_store.publish.chunks import ReadInto
from dcr_store.publish.committing import Proposal, Sealed, append_commit, missing_if_ended, propose, store_proposal
from dcr_store.publish.ending import Ending
from dcr_store.publish.flow import Flow
from dcr_store.publish.journaled import read_durable
from dcr_store.publish.opening import LIVE, WRITER
from dcr_store.publish.partitions import PartitionWriter
from dcr_store.publish.spool import ChunkSpool
from dcr_store.publish.state import AnchorWriter, DeltaWriter, StateWriter
from dcr_store.targets.checkpoint import Checkpoint
from dcr_store.targets.dcp import open_source
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.info import VersionInfo, info_of
from dcr_store.versions.moving import while_kept

_COMPARE_ELEMENTS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What ``write_checkpoint`` took. ``left_out`` holds (path, reason)."""

    n_tensors: int
    nbytes: int
    left_out: tuple[tuple[str, str], ...]


class Transaction(Ending):
    """An open transaction of one writer. Not thread-safe; use one thread.

    Leaving it as a context manager without an exception commits it if nothing has been decided yet; an exception, also
    one of that commit, aborts it. Only a commit of unknown outcome is left as it is: the next one to begin finds out,
    or ``commit``, called again.
    """

    def __init__(
        self, catalog: Catalog, log: LineLog, pending: OpenTransaction, baseline: Baseline, release: Callable[[], None]
    ) -> None:
        super().__init__()
        self.line, self.txid, self.attempt = log.line, pending.txid, pending.attempt
        self.version = version_name(log.line, pending.version)
        self._catalog, self._log, self._pending, self._baseline = catalog, log, pending, baseline
        self._release = release
        self._keys = TransactionKeys(log.line, pending.version, pending.txid)
        self._written: dict[str, TensorEntry] = {}
        self._taken: set[int] = set()  # places of the base's layout that were written, by one of their names
        self._memory: dict[object, tuple[str, weakref.ref[Any]]] = {}
        self._files: list[CheckpointFile] = []
        self._stored_files: list[ObjectRef] = []
        self._builder = LayoutBuilder()
        self._proposed: tuple[Sealed, Proposal] | None = None
        self._committed: VersionInfo | None = None
        weakref.finalize(self, LIVE.discard, (pending.txid, pending.attempt))
        self._base: Located | None = None
        self._base_layout: Layout | None = None
        self._base_names: frozenset[str] = frozenset()
        self._writer: DeltaWriter | AnchorWriter
        self._durable = read_durable(catalog.objects, self._keys, WRITER) if pending.attempt else {}
        head = log.state.head
        if head is None:
            self._writer = self._anchor_writer()
            return
        base = Located(log.line, head)
        try:
            self._base_layout = catalog.layout(head.layout)
            baseline.use(catalog, base)
        except IntegrityError as error:
            # The history is damaged, and a state stored whole is what ends that.
            warnings.warn(f"{self.version} is stored whole, because its base cannot be read: {error}", stacklevel=3)
            self._base_layout = None
            self._writer = self._anchor_writer()
            return
        self._base = base
        self._base_names = frozenset(self._base_layout.names())
        self._writer = DeltaWriter(self._partition_writer(ChunkSpool()), self._base_layout, baseline)

    def _partition_writer(self, spool: ChunkSpool | None) -> PartitionWriter:
        document = self._catalog.document
        return PartitionWriter(
            self._catalog.objects,
            self._keys,
            WRITER,
            new_incarnation(),
            self.attempt,
            document.codec,
            document.chunk_elements,
            self._durable,
            spool,
        )

    def _anchor_writer(self) -> AnchorWriter:
        self._baseline.drop_staging()
        return AnchorWriter(self._partition_writer(None), self._baseline)

    # ------------------------------------------------------------------ writing

    def write(self, name: str, tensor: object) -> None:
        """Add one tensor, whole, to the version.

        Parameters
        ----------
        name : str
            Its name, unique within the version.
        tensor : ndarray or torch.Tensor
            Any shape, dtype of format 1, any memory order or device. Not kept; may change after the call.

        Raises
        ------
        InvalidInputError
            If the tensor cannot be stored or was written already.
        """
        self._require_unsealed()
        if self._files:
            raise InvalidInputError(
                f"tensor {name!r} cannot be added: {self.version} was written from a checkpoint", key=name
            )
        problem = name_problem(name)
        if problem is not None:
            raise InvalidInputError(f"{shown(name)} cannot name a tensor: {problem}")
        if is_dtensor(tensor):
            raise InvalidInputError(
                "is a DTensor, of which a rank has a part; publish the module from all ranks, with"
                " dcr_store.publish.torch.publish_module, or write its full_tensor()",
                key=name,
                expected="a whole tensor",
                found=type(tensor).__name__,
            )
        data = as_bits(name, tensor)
        bits = data.bits
        self._require_new(name)
        with self._whole():
            self._add(name, data.dtype, data.shape, lambda a, b, out: np.copyto(out, bits[a:b]), tensor)
            self._writer.settle()

    def write_checkpoint(self, directory: str | os.PathLike[str]) -> CheckpointSummary:
        """Add all tensors, side files and file structure of a checkpoint.

        Parameters
        ----------
        directory : path
            An HF directory, one safetensors file, or a folder that torch.distributed.checkpoint wrote, however it was
            sharded; of that, entries that are no tensors are left out. Must not change during the call.

        Raises
        ------
        InvalidInputError, NotFoundError, FormatError
            If it is no checkpoint; names the file.
        """
        self._require_unsealed()
        if self._written:
            raise InvalidInputError(
                f"a checkpoint cannot be added to {self.version}, which has tensors already; use one for each",
                key=str(directory),
            )
        with open_source(directory) as checkpoint, self._whole():
            self._write_tensors(checkpoint)
            self._write_files(checkpoint)
            nbytes = sum(file.nbytes for file in self._files)
            return CheckpointSummary(
                len(checkpoint.tensors), nbytes, tuple((item.path, item.reason) for item in checkpoint.left_out)
            )

    def _write_tensors(self, checkpoint: Checkpoint) -> None:
        names = list(checkpoint.tensors)
        if self._base_layout is not None:
            there = {entry.name for entry in self._base_layout.tensors}
            if set(names) != set(self._base_layout.names()) or any(
                self._fits(name, tensor.dtype, tensor.shape) is None for name, (_, tensor) in checkpoint.tensors.items()
            ):
                self._convert()
            else:
                order = {name: i for i, name in enumerate(self._base_layout.names())}
                names.sort(key=lambda name: (name not in there, order[name]))
        total = sum(tensor.end - tensor.begin for _, tensor in checkpoint.tensors.values())
        done = 0
        for name in names:
            tensor = checkpoint.tensors[name][1]
            self._add(name, tensor.dtype, tensor.shape, _reader(checkpoint, name), None)
            done += tensor.end - tensor.begin
            events.progress(f"publish {self.version}", done, total)
        self._writer.drain()

    def _write_files(self, checkpoint: Checkpoint) -> None:
        known: dict[str, ObjectRef] = {}
        if self._base is not None:
            base = self._base
            files = while_kept(self._catalog, [base], lambda: self._catalog.contents(base).manifest.files)
            known = {file.ref.sha256: file.ref for file in files}

        def keep(data: bytes) -> ObjectRef:
            ref = ObjectRef.of("", data)
            if ref.sha256 not in known:
                known[ref.sha256] = self._writer.partitions.put_file(data)
                self._stored_files.append(known[ref.sha256])
            return known[ref.sha256]

        for weights in checkpoint.files:
            self._files.append(CheckpointFile(weights.path, "weights", keep(weights.header.raw), weights.header.nbytes))
        for side in checkpoint.side_files:
            ref = keep(checkpoint.read_side_file(side.path))
            self._files.append(CheckpointFile(side.path, "side", ref, ref.nbytes))
        checkpoint.check_unchanged()

    def _fits(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry | None:
        """Return the place of a tensor in the base's layout, None if it has none."""
        assert self._base_layout is not None
        if name not in self._base_names:
            return None
        entry = self._base_layout.entry(name)
        return entry if (entry.dtype, entry.shape) == (dtype, tuple(shape)) else None

    def _require_new(self, name: str) -> None:
        if name in self._written:
            raise InvalidInputError(f"tensor {name!r} was already written in this transaction", key=name)

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], read: ReadInto, tensor: object) -> None:
        """Take one tensor; `tensor` is the caller's object, None for one from a file."""
        if isinstance(self._writer, DeltaWriter):
            entry = self._fits(name, dtype, shape)
            if entry is not None:
                if id(entry) not in self._taken:
                    self._taken.add(id(entry))
                    self._written[name] = entry
                    self._writer.write(entry, read, settles=tensor is not None)
                    return
                if self._same_bits(entry, read):
                    self._written[name] = entry
                    return
            self._convert()
        memory, owner = memory_key(tensor), _owner(tensor)
        first, alive = self._memory.get(memory, (None, None))
        # Memory of an object that is gone may have been given to this one: then they are not tied.
        if (
            first is not None
            and alive is not None
            and alive() is not None
            and self._same_bits(self._written[first], read)
        ):
            self._builder.add_alias(name, first)
            self._written[name] = self._written[first]
            return
        entry = self._builder.add(name, dtype, shape)
        self._written[name] = entry
        if memory is not None and owner is not None:
            self._memory[memory] = (name, owner)
        self._writer.write(entry, read, settles=tensor is not None)

    def _same_bits(self, entry: TensorEntry, read: ReadInto) -> bool:
        """Whether what `read` gives is what was written at `entry`: then the two names are tied."""
        return _equal(entry, read, _current(self._writer, entry))

    def _convert(self) -> None:
        """Go on as an anchor: what was written so far moves to addresses of a new layout."""
        delta = self._writer
        assert isinstance(delta, DeltaWriter)
        delta.drain()
        events.reached("publish.converted", self.version)
        written, self._written = self._written, {}
        anchor = self._anchor_writer()
        self._writer = anchor
        firsts: dict[int, str] = {}
        for name, entry in written.items():
            first = firsts.setdefault(id(entry), name)
            if first != name:
                self._builder.add_alias(name, first)
                self._written[name] = self._written[first]
                continue
            placed = self._builder.add(name, entry.dtype, entry.shape)
            self._written[name] = placed
            anchor.write(placed, _current(delta, entry), settles=True)
            anchor.drain()
        delta.close()

    # ------------------------------------------------------------------ deciding

    def commit(self, *, wait_for: Iterable[str] = (), timeout_s: float | None = None) -> VersionInfo:
        """Make the version. Returns once it is in the store.

        The baseline advances in the background; the next ``begin`` with it, ``Store.close`` and the end of the process
        wait for that.

        Parameters
        ----------
        wait_for : iterable of str
            Names of groups: return when each has promoted this version, or one after it.
        timeout_s : float, optional
            How long to wait for them; for ever by default.

        Returns
        -------
        VersionInfo
            The committed version; again the same if it was committed already.

        Raises
        ------
        FencedError
            If the transaction was taken over or aborted: nothing was committed.
        OutcomeUnknownError
            If the answer was lost for good: look at the log before anything else.
        LagError
            If a group took longer than `timeout_s`: the version is committed; ``commit`` again goes on waiting.
        """
        flow = Flow(self._catalog, self.line, wait_for)
        if timeout_s is not None and not (flow.groups and isinstance(timeout_s, int | float) and timeout_s >= 0):
            raise InvalidInputError(
                "timeout_s is how long to wait for groups",
                key="timeout_s",
                expected="0 or more, and wait_for",
                found=timeout_s,
            )
        flow.require_followers()
        info = self._commit()
        flow.wait(self._pending.version, timeout_s)
        return info

    def _commit(self) -> VersionInfo:
        if self._committed is not None:
            return self._committed
        self._require_open()
        if not self._written:
            raise InvalidInputError(f"{self.version} has no tensors; write at least one, or abort", key=self.line)
        with self._whole():
            if isinstance(self._writer, DeltaWriter) and len(self._written) < len(self._base_names):
                self._convert()
            writer = self._writer
            layout = self._base_layout if isinstance(writer, DeltaWriter) else self._builder.build()
            assert layout is not None
            if self._proposed is None:
                self._proposed = self._propose(layout)
        sealed, proposal = self._proposed
        try:
            with missing_if_ended(self._log, self._require_ours):
                store_proposal(self._catalog.objects, self._keys, [sealed], proposal)
            row = append_commit(self._log, proposal, self._require_ours)
        except FencedError:
            self._state = "fenced"
            self._close()
            raise
        self._state = "committed"
        located = Located(self.line, row)
        self._committed = info_of(Located(self.line, self._log.complete(row)))
        if self._closed:
            return self._committed  # the baseline was given back; it is brought up to date when it is used next
        # A crash from here on leaves chunks of both versions; who uses the baseline next tells them by their digests.
        if isinstance(writer, DeltaWriter):
            self._baseline.advance(located, writer.hand_over(), writer.codec)
        else:
            self._baseline.adopt(located, layout)
        self._close()
        return self._committed

    def _propose(self, layout: Layout) -> tuple[Sealed, Proposal]:
        """Seal what was written and make the version of it."""
        writer = self._writer
        rows = writer.finish()
        seal = writer.partitions.seal(layout.spaces, rows, self._stored_files, writer.n_changed)
        sealed = Sealed(seal, writer.partitions.sealed_objects(), rows, writer.n_changed, writer.partitions.n_sealed)
        base = None
        if isinstance(writer, DeltaWriter) and self._base is not None:
            before = self._base
            base = (before.base, while_kept(self._catalog, [before], lambda: self._catalog.tables(before)))
        chunk_elements = self._catalog.document.chunk_elements
        return sealed, propose(self._keys, self.attempt, layout, base, [sealed], self._files, chunk_elements)

    def abort(self, reason: str = "aborted by its publisher") -> None:
        """End the transaction without a version. Does nothing if it has ended already."""
        self._abort(reason)

    @property
    def _has_proposed(self) -> bool:
        return self._proposed is not None

    def _commit_at_exit(self) -> None:
        self.commit()

    def _require_open(self) -> None:
        self._require_own_process()
        if self._state != "open":
            raise InvalidInputError(
                f"the transaction for {self.version} is {self._state}; begin another one", key=self.txid
            )
        if self._spoiled is not None:
            raise InvalidInputError(
                f"{self.version} cannot go on: part of it could not be taken ({self._spoiled}); abort, and begin again",
                key=self.txid,
            )

    def _require_unsealed(self) -> None:
        self._require_open()
        if self._has_proposed:
            raise InvalidInputError(
                f"nothing can be added to {self.version}, whose commit was tried already; call commit again, or abort",
                key=self.txid,
            )

    def _close(self) -> None:
        """Let go of everything, once: by then the baseline may serve another transaction."""
        LIVE.discard((self.txid, self.attempt))
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._baseline.drop_staging()
        release, self._release = self._release, lambda: None
        release()


def _owner(tensor: object) -> weakref.ref[Any] | None:
    """Return a reference to the object that owns a tensor's memory; None if none can be had."""
    while getattr(tensor, "base", None) is not None and isinstance(tensor, np.ndarray):
        tensor = tensor.base
    try:
        return None if tensor is None else weakref.ref(tensor)
    except TypeError:
        return None


def _reader(checkpoint: Checkpoint, name: str) -> ReadInto:
    return lambda start, stop, out: checkpoint.read_into(name, start, stop, out)


def _current(writer: StateWriter, entry: TensorEntry) -> ReadInto:
    return lambda start, stop, out: writer.current(entry, start, stop, out)


def _equal(entry: TensorEntry, a: ReadInto, b: ReadInto) -> bool:
    for start in range(0, entry.n_elements, _COMPARE_ELEMENTS):
        stop = min(start + _COMPARE_ELEMENTS, entry.n_elements)
        one: Bits = np.empty(stop - start, uint_dtype(entry.space))
        two: Bits = np.empty_like(one)
        a(start, stop, one)
        b(start, stop, two)
        if not np.array_equal(one, two):
            return False
    return True
