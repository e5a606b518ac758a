"""Chunks of two versions side by side, a bounded number at a time, each proven by its digest.

What lies between them is read once where a path leads from one to the other; else both are rebuilt from their anchors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np

from dcr_store.codec.digest import crc64
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, uint_dtype, width
from dcr_store.layout.layout import Layout, TensorEntry
from dcr_store.payload.version import SealedPartition, fetch
from dcr_store.ports import ObjectStore, Target
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.chunks import Chunks, Place
from dcr_store.versions.moving import while_kept
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import everywhere, replay
from dcr_store.versions.route import Route, route

BATCH_NBYTES: Final = 64 << 20  # of chunks that are compared at once
KEPT_NBYTES: Final = 128 << 20  # of partitions, which hold chunks of several batches
T = TypeVar("T")


def batches(places: Iterable[Place], chunk_elements: int) -> Iterator[list[Place]]:
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


class KeptPartitions:
    """Fetches partitions and keeps those used last: batches meet in them."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __call__(self, item: SealedPartition) -> bytes:
        """Return a partition's verified bytes."""
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


class ChunkPairs:
    """Chunks of two versions, proven by their digests.

    Parameters
    ----------
    source : Target, optional
        What may hold chunks of the base, in its layout; others are rebuilt.
    fetcher : KeptPartitions, optional
        Shared with whoever reads the same partitions.
    """

    def __init__(
        self,
        catalog: Catalog,
        base: Located,
        goal: Located,
        source: Target | None = None,
        fetcher: KeptPartitions | None = None,
    ) -> None:
        self._catalog = catalog
        if catalog.row(goal.line, base.row.version) == base.row:
            base = Located(goal.line, base.row)  # both lines have it
        self._base, self._goal = base, goal
        self._source = source
        self._fetcher = fetcher or KeptPartitions(catalog.objects)
        self._is_old = False
        self.is_one_layout = base.row.layout == goal.row.layout
        self._read(self._find_ways)

    def _find_ways(self) -> None:
        self._is_old = False
        self._to_base = route(self._catalog, self._base)
        self._to_goal = route(self._catalog, self._goal, [self._base] if self.is_one_layout else [])

    def _read(self, act: Callable[[], T]) -> T:
        """Return what `act` returns, by other paths where those that were found have gone meanwhile."""

        def again() -> T:
            if self._is_old:
                self._find_ways()
            try:
                return act()
            except IntegrityError:
                self._is_old = True
                raise

        return while_kept(self._catalog, [self._base, self._goal], again)

    def places(self) -> Iterator[Place]:
        """Yield the chunks of the goal that may differ."""
        old, new = self._read(lambda: (self._catalog.tables(self._base), self._catalog.tables(self._goal)))
        for space in SPACES:
            differs = old[space] != new[space] if self.is_one_layout else np.ones(len(new[space]), bool)
            yield from ((space, int(chunk)) for chunk in np.flatnonzero(differs))

    def of_base(self, places: Sequence[Place]) -> dict[Place, Bits]:
        """Return chunks of the base."""
        return self._read(lambda: self._of_base(places))

    def _of_base(self, places: Sequence[Place]) -> dict[Place, Bits]:
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
        """Return chunks of the goal, from those of the `base` where a path leads on from there."""
        return self._read(lambda: self._of_goal(places, base))

    def _of_goal(self, places: Sequence[Place], base: dict[Place, Bits]) -> dict[Place, Bits]:
        index = self._to_goal.places.get(self._base.name) if self.is_one_layout else None
        path = self._to_goal.path
        starts = {
            place: index
            for place in places
            if index is not None and (index <= path.goal or path.reversible(*place, index))
        }
        return self._replay(self._to_goal, places, starts, base)

    def _replay(
        self, routed: Route, places: Sequence[Place], starts: dict[Place, int], base: dict[Place, Bits] | None = None
    ) -> dict[Place, Bits]:
        path = routed.path
        states = everywhere(path, path.goal)
        for space, chunk in places:
            states[space][chunk] = starts.get((space, chunk), ZERO)
        held = {place: base[place] for place in starts} if base else {}
        target = Chunks(held)
        if places:
            replay(self._catalog.objects, path, target, states, fetcher=self._fetcher)
        zeros = {space: np.zeros(path.chunk_elements, uint_dtype(space)) for space, _ in places}
        return {place: target.bits.get(place, zeros[place[0]]) for place in places}


class Pairs(Protocol):
    """Gives chunks of two versions: ``ChunkPairs``."""

    def of_base(self, places: Sequence[Place]) -> dict[Place, Bits]:
        """Return chunks of the base."""

    def of_goal(self, places: Sequence[Place], base: dict[Place, Bits]) -> dict[Place, Bits]:
        """Return chunks of the goal."""


class Compared(NamedTuple):
    """The elements ``[first, last)`` of a tensor of the goal, which are in one chunk of it.

    Attributes
    ----------
    old : ndarray of uintN, shape (last - first,), or None
        Bits of the base; None if that has no such tensor.
    new : ndarray of uintN, shape (last - first,)
    """

    entry: TensorEntry
    first: int
    last: int
    chunk: int
    old: Bits | None
    new: Bits


def counterpart(old: Layout, entry: TensorEntry) -> TensorEntry | None:
    """Return the tensor of the same name in another layout, if it is of the same dtype and shape."""
    found = old.find(entry.name)
    return found if found is not None and (found.dtype, found.shape) == (entry.dtype, entry.shape) else None


def compared(
    pairs: Pairs, old: Layout, new: Layout, chunk_elements: int, places: Sequence[Place]
) -> Iterator[Compared]:
    """Yield what tensors have in some chunks of the goal, all of one space, beside what they had in the base.

    Parameters
    ----------
    old, new : Layout
        Of the base and the goal.
    """
    n = chunk_elements
    found = [(chunk, piece) for s, chunk in places for piece in new.pieces(s, chunk * n, (chunk + 1) * n)]
    befores = {piece.entry.name: counterpart(old, piece.entry) for _, piece in found}
    needed: set[Place] = set()
    for _, (entry, first, last, _) in found:
        if (before := befores[entry.name]) is not None:
            start = before.start
            needed.update((entry.space, chunk) for chunk in range((start + first) // n, (start + last - 1) // n + 1))
    base = pairs.of_base(sorted(needed))
    goal = pairs.of_goal(places, base)
    for chunk, (entry, first, last, offset) in found:
        before = befores[entry.name]
        bits = goal[entry.space, chunk][offset : offset + last - first]
        its = None if before is None else _elements(base, before, first, last, n)
        yield Compared(entry, first, last, chunk, its, bits)


def _elements(chunks: dict[Place, Bits], entry: TensorEntry, first: int, last: int, n: int) -> Bits:
    """Return some elements of a tensor, of chunks in memory."""
    start, stop = entry.start + first, entry.start + last
    parts = [
        chunks[entry.space, chunk][max(start - chunk * n, 0) : min(stop - chunk * n, n)]
        for chunk in range(start // n, (stop - 1) // n + 1)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
