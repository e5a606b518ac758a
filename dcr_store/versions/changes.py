"""What a version changes, tensor by tensor: masks, and overwrites where it has them. Reads partitions, no state.

Partitions are proven by their SHA-256 and each chunk's masks by the contributions sealed with them, before anything of
the chunk is passed on. Refuses a version whose partitions do not add up, or that change what belongs to no tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec import kernels
from dcr_store.codec.digest import crc64, linear
from dcr_store.codec.portable import get_codec
from dcr_store.errors import FormatError, IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import TensorEntry
from dcr_store.objects.threads import Threads
from dcr_store.payload.version import SealedPartition, VersionContents, fetch
from dcr_store.ports import ObjectStore
from dcr_store.versions.prefetch import Fetch, Prefetch
from dcr_store.versions.workers import n_workers, scratch, worker_pool

_N_FETCHERS: Final = 8
Positions = NDArray[np.int64]
Encoded = tuple[SealedPartition, memoryview]


@dataclass(frozen=True, slots=True)
class ChunkChanges:
    """What a version changes in one chunk. Its state is ``base ^ masks``, then `values` where `written`.

    Attributes
    ----------
    space, chunk : str, int
        Where.
    positions : ndarray of int64, shape (n,)
        Elements that have a mask, counted from the chunk's first, ascending.
    masks : ndarray of uintN, shape (n,)
        New bits XOR base bits; none is zero.
    written : ndarray of int64, shape (m,)
        Elements that are overwritten, ascending; none of them is in `positions`.
    values : ndarray of uintN, shape (m,)
        New bits there, which may be those of the base.
    """

    space: str
    chunk: int
    positions: Positions
    masks: Bits
    written: Positions
    values: Bits


@dataclass(frozen=True, slots=True)
class TensorChanges:
    """What a version changes in one tensor. Its state is ``base ^ masks``, then `values` where `written`.

    Attributes
    ----------
    entry : TensorEntry
        The tensor.
    positions : ndarray of int64, shape (n,)
        Its elements that have a mask, in row-major order, ascending.
    masks : ndarray of uintN, shape (n,)
        New bits XOR base bits; none is zero. For an anchor, whose base is zeros, the new bits.
    written : ndarray of int64, shape (m,)
        Its elements that are overwritten, ascending; none of them is in `positions`.
    values : ndarray of uintN, shape (m,)
        New bits there, which may be those of the base.
    """

    entry: TensorEntry
    positions: Positions
    masks: Bits
    written: Positions
    values: Bits


def iter_changes(
    objects: ObjectStore,
    contents: VersionContents,
    chunk_elements: int,
    *,
    fetcher: Fetch | None = None,
    tensors: Container[str] | None = None,
) -> Iterator[TensorChanges]:
    """Yield the changes of each tensor that a version changes, in the order of the spaces and addresses.

    Memory holds the partitions that meet at one place, some ahead, and the changes of one tensor.

    Parameters
    ----------
    chunk_elements : int
        Elements of a chunk, as in the store's document.
    fetcher : callable, optional
        Returns a partition's verified bytes; by default from `objects`.
    tensors : container of str, optional
        Names or aliases; only partitions that hold changes of these are fetched. All by default.

    Raises
    ------
    IntegrityError
        If an object is missing or damaged, or the masks are not those that were sealed. What was yielded before is
        right.
    """
    chunks: dict[str, set[int]] | None = None
    if tensors is not None:
        chunks = {space: set() for space in SPACES}
        for entry in contents.layout.tensors:
            if _is_in(entry, tensors):
                chunks[entry.space].update(entry.chunks(chunk_elements))
    gather = _Gather(contents, chunk_elements, tensors)
    for changes in iter_chunk_changes(objects, contents, chunk_elements, fetcher=fetcher, chunks=chunks):
        yield from gather.add(changes)
    yield from gather.finish()


def iter_chunk_changes(
    objects: ObjectStore,
    contents: VersionContents,
    chunk_elements: int,
    *,
    fetcher: Fetch | None = None,
    chunks: Mapping[str, Container[int]] | None = None,
) -> Iterator[ChunkChanges]:
    """Yield the changes of each chunk that a version changes, in the order of the spaces and addresses.

    Parameters
    ----------
    chunks : mapping of str to container of int, optional
        By space; only partitions that hold changes of these are fetched. All by default.
    objects, contents, chunk_elements, fetcher
        As of ``iter_changes``, which says also what is raised.
    """
    read = fetcher or (lambda item: fetch(objects, item.ref))
    steps = [
        step for space in SPACES for step in _steps(contents, space, None if chunks is None else chunks.get(space, ()))
    ]
    with Threads(_N_FETCHERS) as fetchers, worker_pool() as workers:
        queue = Prefetch(fetchers, read, [item for step in steps for item in step.first])
        decoded: deque[Future[ChunkChanges]] = deque()
        live: dict[str, dict[int, memoryview]] = {}
        try:
            for step in steps:
                for item, blob in zip(step.first, queue.take(step.first), strict=True):
                    live[item.key] = item.parse(blob)
                found = [(item, live[item.key][step.chunk]) for item in step.items if step.chunk in live[item.key]]
                decoded.append(workers.submit(decode_chunk, contents, step.space, step.chunk, found, chunk_elements))
                for item in step.last:
                    del live[item.key]
                if len(decoded) > 2 * n_workers():
                    yield decoded.popleft().result()
            while decoded:
                yield decoded.popleft().result()
        finally:
            queue.cancel()
            for task in decoded:
                task.cancel()


def require_consistent(base: VersionContents, following: Iterable[VersionContents]) -> None:
    """Refuse versions, each a delta against the one before, whose changes do not lead to the digests recorded for them.

    By the digests alone: what is sealed is compared, no bits. That two writers of one element undo each other's change
    is seen here.

    Raises
    ------
    IntegrityError
        Names the first version that is defective.
    """
    for contents in following:
        for space in SPACES:
            expected, found = contents.tables[space], base.tables[space].copy()
            for chunk, (mask, overwrite) in contents.touched[space].items():
                found[chunk] ^= np.uint64(mask ^ overwrite)
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                chunk = int(wrong[0])
                raise IntegrityError(
                    f"the stored version is defective in chunk {chunk} of {space}: what its writers sealed does not "
                    "give the recorded bits; publish the state again as a new version",
                    key=contents.name,
                    expected=f"{int(expected[chunk]):016x}",
                    found=f"{int(found[chunk]):016x}",
                )
        base = contents


@dataclass(frozen=True, slots=True)
class _Step:
    """A chunk to decode: the partitions that may hold it, those needed for the first time, those for the last."""

    space: str
    chunk: int
    items: list[SealedPartition] = field(default_factory=list)
    first: list[SealedPartition] = field(default_factory=list)
    last: list[SealedPartition] = field(default_factory=list)


def _steps(contents: VersionContents, space: str, chunks: Container[int] | None) -> list[_Step]:
    touched = [chunk for chunk in contents.touched[space] if chunks is None or chunk in chunks]
    steps = {chunk: _Step(space, chunk) for chunk in sorted(touched)}
    for item in contents.partitions:
        if item.array.array.startswith(f"{space}/"):
            mine = [
                steps[chunk] for chunk in range(item.first_chunk, item.first_chunk + item.n_chunks) if chunk in steps
            ]
            for step in mine:
                step.items.append(item)
            if mine:
                mine[0].first.append(item)
                mine[-1].last.append(item)
    return list(steps.values())


def _is_in(entry: TensorEntry, tensors: Container[str]) -> bool:
    return any(name in tensors for name in (entry.name, *entry.aliases))


def decode_chunk(
    contents: VersionContents, space: str, chunk: int, found: Sequence[Encoded], chunk_elements: int
) -> ChunkChanges:
    """Return what all writers change in one chunk, proven by the contributions.

    Parameters
    ----------
    found : sequence of (SealedPartition, memoryview)
        The encoded chunk in each partition that has it.

    Raises
    ------
    IntegrityError
        If a chunk cannot be decoded, or its mask is not the one that was sealed.
    """
    mask = scratch(space, chunk_elements)
    mask.fill(0)
    for item, data in found:
        if item.array.array.endswith("/mask"):
            try:
                get_codec(item.array.codec).apply(data, mask)
            except FormatError as error:
                raise IntegrityError(f"chunk {chunk} cannot be decoded: {error}", key=item.key) from error
    sealed_mask, sealed_overwrite = contents.touched[space][chunk]
    has_mask = linear(crc64(mask), mask.nbytes)
    if has_mask != sealed_mask:
        raise _unsealed(contents, space, chunk, f"{sealed_mask:016x}", f"{has_mask:016x}")
    written, values = overwrites(found, space, chunk, chunk_elements)
    if sealed_overwrite and not len(written):
        raise _unsealed(contents, space, chunk, "overwrites", "none")
    mask[written] = 0  # overwrites have the last word
    positions, masks = kernels.engine(mask.nbytes).find_nonzero(mask)
    return ChunkChanges(space, chunk, positions.astype(np.int64), masks, written, values)


def _unsealed(contents: VersionContents, space: str, chunk: int, expected: str, found: str) -> IntegrityError:
    return IntegrityError(
        f"the stored version is defective in chunk {chunk} of {space}: verified objects are not the "
        "changes that its writers sealed; publish the state again as a new version",
        key=contents.name,
        expected=expected,
        found=found,
    )


def overwrites(found: Sequence[Encoded], space: str, chunk: int, chunk_elements: int) -> tuple[Positions, Bits]:
    """Return the overwrites of one chunk, of all writers.

    Parameters
    ----------
    found : sequence of (SealedPartition, memoryview)
        The encoded chunk in each partition that has it; masks are passed over.

    Returns
    -------
    positions : ndarray of int64, shape (n,)
        Ascending, counted from the first element of the chunk.
    values : ndarray of uintN, shape (n,)

    Raises
    ------
    IntegrityError
        If a chunk cannot be decoded; names the object.
    """
    by_writer: dict[str, dict[str, Bits]] = {}
    for item, data in found:
        kind = item.array.array.partition("/")[2]
        if kind != "mask":
            dtype = np.dtype(np.uint8) if kind == "present" else uint_dtype(space)
            try:
                decoded = get_codec(item.array.codec).decode(data, dtype, chunk_elements)
            except FormatError as error:
                raise IntegrityError(f"chunk {chunk} cannot be decoded: {error}", key=item.key) from error
            # By writer, not by key: values and presence may be of two incarnations.
            by_writer.setdefault(item.writer, {})[kind] = decoded
    parts = [(arrays["present"], arrays.get("value")) for arrays in by_writer.values() if "present" in arrays]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, uint_dtype(space))
    anywhere = np.zeros(chunk_elements, bool)
    bits = np.zeros(chunk_elements, uint_dtype(space))
    for present, value in parts:
        where = present != 0
        bits[where] = 0 if value is None else value[where]
        anywhere |= where
    positions = np.flatnonzero(anywhere)
    return positions, bits[positions]


class _Part(NamedTuple):
    """The changes of one tensor in one chunk, positions counted from the tensor's first element."""

    positions: Positions
    masks: Bits
    written: Positions
    values: Bits


class _Gather:
    """Collects the changes of chunks into those of tensors. Chunks come in the order of their addresses."""

    def __init__(self, contents: VersionContents, chunk_elements: int, tensors: Container[str] | None) -> None:
        self._contents = contents
        self._chunk_elements = chunk_elements
        self._tensors = tensors
        self._space = ""
        self._open: dict[str, tuple[TensorEntry, list[_Part]]] = {}

    def add(self, changes: ChunkChanges) -> Iterator[TensorChanges]:
        """Take one chunk; yield the tensors that end in it, or ended before it."""
        space, start = changes.space, changes.chunk * self._chunk_elements
        yield from self.finish(None if space != self._space else start)
        self._space = space
        n_found = 0
        for entry, first, last, offset in self._contents.layout.pieces(space, start, start + self._chunk_elements):
            stop = offset + last - first
            masked = slice(*np.searchsorted(changes.positions, (offset, stop)).tolist())
            written = slice(*np.searchsorted(changes.written, (offset, stop)).tolist())
            part = _Part(
                changes.positions[masked] + (first - offset),
                changes.masks[masked],
                changes.written[written] + (first - offset),
                changes.values[written],
            )
            n_changes = len(part.positions) + len(part.written)
            n_found += n_changes
            if n_changes and (self._tensors is None or _is_in(entry, self._tensors)):
                self._open.setdefault(entry.name, (entry, []))[1].append(part)
        if n_found != len(changes.positions) + len(changes.written):
            raise _unsealed(self._contents, space, changes.chunk, "changes of tensors only", "changes between them")
        yield from self.finish(start + self._chunk_elements)

    def finish(self, before: int | None = None) -> Iterator[TensorChanges]:
        """Yield the tensors that end at address `before` at the latest; all by default."""
        done = [name for name, (entry, _) in self._open.items() if before is None or entry.stop <= before]
        for name in done:
            entry, parts = self._open.pop(name)
            yield TensorChanges(
                entry,
                np.concatenate([part.positions for part in parts]),
                np.concatenate([part.masks for part in parts]),
                np.concatenate([part.written for part in parts]),
                np.concatenate([part.values for part in parts]),
            )
