"""What an engine's patch API takes: per tensor the indices that change between two versions, and the new values there.

New values are not in the store: masks say how bits change, not what they become. So the chunks that differ are rebuilt,
a bounded number at a time, proven by their digests, and compared. Refuses versions whose bits cannot be proven.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec.chunk import find_changes
from dcr_store.codec.digest import crc64
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import DTYPES, Bits, uint_dtype, width
from dcr_store.layout.layout import Layout, TensorEntry
from dcr_store.layout.tensors import to_array
from dcr_store.payload.version import SealedPartition, fetch
from dcr_store.ports import ObjectStore, Target
from dcr_store.targets.state_dict import state_target
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import everywhere, replay
from dcr_store.versions.route import Route, route

BATCH_NBYTES: Final = 64 << 20  # of chunks that are compared at once
KEPT_NBYTES: Final = 128 << 20  # of partitions, which hold chunks of several batches
Framework = Literal["numpy", "torch"]
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """What changes in one tensor.

    Attributes
    ----------
    name : str
        Its name; `aliases` are further names of the same storage.
    dtype : str
        As in safetensors.
    shape : tuple of int
        Of the tensor, in values.
    indices : ndarray or torch.Tensor of int32 or int64, shape (n,), or None
        Of the values that change, in row-major order, ascending; int32 where all of them fit. None if `values` is the
        whole tensor: where it is new, packed (F4, F6), or smaller so than as a list of changes.
    values : ndarray or torch.Tensor
        New values, in the tensor's dtype: of shape (n,), or of the tensor's shape where there are no indices.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    indices: Any | None
    values: Any


def patches(
    catalog: Catalog, base: Located, goal: Located, *, state: object = None, framework: Framework = "numpy"
) -> Iterator[TensorPatch]:
    """Yield what changes from `base` to `goal`, tensor by tensor, in the order of the spaces and addresses.

    Tensors that do not change, and those that only the base has, are left out. Memory holds some partitions, the
    chunks that are compared, and one tensor.

    Parameters
    ----------
    state : mapping of str to ndarray or torch.Tensor, or torch.nn.Module, optional
        Tensors that hold `base`, such as an engine's own: then only what lies between the versions is read, not the
        history since the anchor. Chunks of it that are not the base's, or not any more because a patch was applied
        there already, are rebuilt, as all are without it.
    framework : {"numpy", "torch"}
        Of what is yielded.

    Raises
    ------
    InvalidInputError
        If `state` has not the base's tensors.
    IntegrityError
        If the store is damaged; names the key. What was yielded before is right.
    """
    chunk_elements = catalog.document.chunk_elements
    old, new = catalog.layout(base.row.layout), catalog.layout(goal.row.layout)
    source = None if state is None else state_target(state, old, chunk_elements)
    versions = _Versions(catalog, base, goal, source)
    gather = _Gather(old, new, chunk_elements, versions, framework)
    for places in _batches(versions.places(), chunk_elements):
        yield from gather.compare(places)
    yield from gather.finish()


def _batches(places: Iterable[Place], chunk_elements: int) -> Iterator[list[Place]]:
    """Cut places into runs of one space that are small enough."""
    batch: list[Place] = []
    for place in places:
        n_most = max(1, BATCH_NBYTES // (chunk_elements * width(place[0])))
        if batch and (batch[-1][0] != place[0] or len(batch) >= n_most):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


class _Chunks:
    """Some chunks in memory, zeros until they are written; satisfies ``ports.Target``."""

    def __init__(self, bits: dict[Place, Bits] | None = None) -> None:
        self.bits = {} if bits is None else dict(bits)

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        held = self.bits.get((space, chunk))
        out[:] = 0 if held is None else held

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        self.bits[space, chunk] = bits.copy()


class _Kept:
    """Fetches partitions and keeps those used last: batches meet in them."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __call__(self, item: SealedPartition) -> bytes:
        with self._lock:
            if item.key in self._blobs:
                self._blobs.move_to_end(item.key)
                return self._blobs[item.key]
        blob = fetch(self._objects, item.ref)
        with self._lock:
            if item.key not in self._blobs:
                self._blobs[item.key] = blob
                self._nbytes += len(blob)
            while self._nbytes > KEPT_NBYTES and len(self._blobs) > 1:
                self._nbytes -= len(self._blobs.popitem(last=False)[1])
        return blob


class _Versions:
    """Chunks of two versions, proven by their digests."""

    def __init__(self, catalog: Catalog, base: Located, goal: Located, source: Target | None) -> None:
        self._catalog = catalog
        self._base, self._goal = base, goal
        self._source = source
        self._fetcher = _Kept(catalog.objects)
        self._to_base = route(catalog, base)
        self.is_one_layout = base.row.layout == goal.row.layout
        self._to_goal = route(catalog, goal, [base] if self.is_one_layout else [])

    def places(self) -> Iterator[Place]:
        """Yield the chunks of the goal that may differ."""
        old, new = self._catalog.tables(self._base), self._catalog.tables(self._goal)
        for space in SPACES:
            differs = old[space] != new[space] if self.is_one_layout else np.ones(len(new[space]), bool)
            yield from ((space, int(chunk)) for chunk in np.flatnonzero(differs))

    def of_base(self, places: Sequence[Place]) -> dict[Place, Bits]:
        """Return chunks of the base."""
        found: dict[Place, Bits] = {}
        table = self._catalog.tables(self._base)
        for space, chunk in places if self._source is not None else ():
            assert self._source is not None
            bits = np.empty(self._catalog.document.chunk_elements, uint_dtype(space))
            self._source.read_chunk(space, chunk, bits)
            if crc64(bits) == int(table[space][chunk]):
                found[space, chunk] = bits
        rest = [place for place in places if place not in found]
        return found | self._replay(self._to_base, rest, {})

    def of_goal(self, places: Sequence[Place], base: dict[Place, Bits]) -> dict[Place, Bits]:
        """Return chunks of the goal, from those of the `base` where a way leads on from there."""
        index = self._to_goal.places.get(self._base.name) if self.is_one_layout else None
        path = self._to_goal.path
        starts = {
            place: index
            for place in places
            if index is not None and (index <= path.goal or path.reversible(*place, index))
        }
        return self._replay(self._to_goal, places, starts, base)

    def _replay(
        self, way: Route, places: Sequence[Place], starts: dict[Place, int], base: dict[Place, Bits] | None = None
    ) -> dict[Place, Bits]:
        path = way.path
        states = everywhere(path, path.goal)
        for space, chunk in places:
            states[space][chunk] = starts.get((space, chunk), ZERO)
        held = {place: base[place] for place in starts} if base else {}
        target = _Chunks(held)
        if places:
            replay(self._catalog.objects, path, target, states, fetcher=self._fetcher)
        zeros = {space: np.zeros(path.chunk_elements, uint_dtype(space)) for space, _ in places}
        return {place: target.bits.get(place, zeros[place[0]]) for place in places}


@dataclass(slots=True)
class _Growing:
    """A tensor of which chunks have been compared.

    Attributes
    ----------
    bits : ndarray of uintN, shape (n_elements,)
        New bits, where chunks were compared: memory that was never written to takes no room.
    positions : list of ndarray of int64
        Elements that change.
    seen : set of int
        Chunks that were compared.
    """

    entry: TensorEntry
    is_new: bool
    bits: Bits
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)


class _Gather:
    """Compares chunks and makes patches of tensors. Chunks come in the order of their addresses."""

    def __init__(
        self, old: Layout, new: Layout, chunk_elements: int, versions: _Versions, framework: Framework
    ) -> None:
        self._old, self._new = old, new
        self._chunk_elements = chunk_elements
        self._versions = versions
        self._framework = framework
        self._space = ""
        self._open: dict[str, _Growing] = {}

    def compare(self, places: Sequence[Place]) -> Iterator[TensorPatch]:
        """Take chunks of one space; yield the tensors that end in them, or ended before."""
        space, n = places[0][0], self._chunk_elements
        yield from self._finished(None if space != self._space else places[0][1] * n)
        self._space = space
        pieces = [
            (chunk, piece) for _, chunk in places for piece in self._new.pieces(space, chunk * n, (chunk + 1) * n)
        ]
        needed: set[Place] = set()
        for _, (entry, first, last, _) in pieces:
            before = self._before(entry)
            if before is not None:
                start = before.start
                needed.update((space, chunk) for chunk in range((start + first) // n, (start + last - 1) // n + 1))
        base = self._versions.of_base(sorted(needed))
        goal = self._versions.of_goal(places, base)
        for chunk, (entry, first, last, offset) in pieces:
            before = self._before(entry)
            bits = goal[space, chunk][offset : offset + last - first]
            if before is None:
                self._growing(entry, is_new=True).bits[first:last] = bits
                continue
            positions, _ = find_changes(self._elements(base, space, before.start + first, before.start + last), bits)
            growing = self._growing(entry, is_new=False)
            growing.bits[first:last] = bits
            growing.seen.add(chunk)
            growing.positions.append(positions.astype(np.int64) + first)
        del base, goal
        yield from self._finished((places[-1][1] + 1) * n)

    def finish(self) -> Iterator[TensorPatch]:
        """Yield the tensors that are left, and the new ones that have no values."""
        yield from self._finished(None)
        for entry in self._new.tensors:
            if entry.n_elements == 0 and self._before(entry) is None:
                yield self._patch(self._growing(entry, is_new=True))

    def _before(self, entry: TensorEntry) -> TensorEntry | None:
        """Return the base's tensor of the same name, if it is of the same dtype and shape."""
        found = self._old.find(entry.name)
        return found if found is not None and (found.dtype, found.shape) == (entry.dtype, entry.shape) else None

    def _growing(self, entry: TensorEntry, *, is_new: bool) -> _Growing:
        if entry.name not in self._open:
            bits = np.empty(entry.n_elements, uint_dtype(entry.space))
            self._open[entry.name] = _Growing(entry, is_new, bits)
        return self._open[entry.name]

    def _elements(self, chunks: dict[Place, Bits], space: str, start: int, stop: int) -> Bits:
        """Return the elements at addresses of a space, of chunks in memory."""
        n = self._chunk_elements
        parts = [
            chunks[space, chunk][max(start - chunk * n, 0) : min(stop - chunk * n, n)]
            for chunk in range(start // n, (stop - 1) // n + 1)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _finished(self, before: int | None) -> Iterator[TensorPatch]:
        done = [name for name, item in self._open.items() if before is None or item.entry.stop <= before]
        for name in done:
            growing = self._open.pop(name)
            if growing.is_new or any(len(part) for part in growing.positions):
                yield self._patch(growing)

    def _patch(self, growing: _Growing) -> TensorPatch:
        entry, row = growing.entry, DTYPES[growing.entry.dtype]
        per_value = row.elements_per_value
        if not (growing.is_new or row.packed):
            positions = np.concatenate(growing.positions)
            index = positions if per_value == 1 else np.unique(positions // per_value)
            index_dtype = np.int32 if index[-1] <= np.iinfo(np.int32).max else np.int64
            nbytes = len(index) * (np.dtype(index_dtype).itemsize + row.width * per_value)
            if nbytes < growing.bits.nbytes:
                values = (
                    growing.bits[positions] if per_value == 1 else growing.bits.reshape(-1, per_value)[index].ravel()
                )
                return self._made(entry, index.astype(index_dtype), values, (len(index),))
            self._complete(growing)
        elif not growing.is_new:
            self._complete(growing)
        return self._made(entry, None, growing.bits, entry.shape)

    def _complete(self, growing: _Growing) -> None:
        """Read the chunks of a tensor that do not differ."""
        entry, n = growing.entry, self._chunk_elements
        rest = [(entry.space, chunk) for chunk in entry.chunks(n) if chunk not in growing.seen]
        for places in _batches(rest, n):
            base = self._versions.of_base(places)
            for (_, chunk), bits in base.items():
                start, stop = max(entry.start, chunk * n), min(entry.stop, (chunk + 1) * n)
                growing.bits[start - entry.start : stop - entry.start] = bits[start - chunk * n : stop - chunk * n]

    def _made(
        self, entry: TensorEntry, index: NDArray[np.signedinteger] | None, bits: Bits, shape: tuple[int, ...]
    ) -> TensorPatch:
        indices: Any = index
        if index is not None and self._framework == "torch":
            import torch

            indices = torch.from_numpy(index)
        values = to_array(bits, entry.dtype, shape, self._framework)
        return TensorPatch(entry.name, entry.aliases, entry.dtype, entry.shape, indices, values)
