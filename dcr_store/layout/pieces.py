"""A slice cut along the chunks of the canonical spaces: which of its elements a chunk holds, and where. Pure.

A *piece* is what one slice holds of one chunk. Its elements are *packed*: box after box, each in the chunk's order. So
a piece of new bits and one of base bits are compared as plain arrays, and only what differs is placed in the chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Box, Dim, box, clipped, view
from dcr_store.layout.dtypes import DTYPES, Bits
from dcr_store.layout.entry import TensorEntry
from dcr_store.layout.layout import Layout

_TILE: Final = 128  # elements; two tiles of any width stay in a cache of the second level


@dataclass(frozen=True)
class Piece:
    """What a slice holds of one chunk.

    Attributes
    ----------
    boxes : tuple of Box
        In elements: ``here`` of the slice, ``there`` counted from the chunk's first.
    """

    space: str
    chunk: int
    boxes: tuple[Box, ...]

    @cached_property
    def n_elements(self) -> int:
        """How many elements it has."""
        return sum(item.n_elements for item in self.boxes)

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first element of the chunk that it has, and the one after its last."""
        return min(item.there for item in self.boxes), max(item.there_stop for item in self.boxes)

    @cached_property
    def _is_ascending(self) -> bool:
        return all(a.there_stop <= b.there for a, b in itertools.pairwise(self.boxes))

    def gather(self, local: Bits, out: Bits) -> None:
        """Copy the piece's elements of a slice, uintN of shape (n,), packed to `out`, shape (n_elements,)."""
        start = 0
        for item in self.boxes:
            stop = start + item.n_elements
            if _is_adjacent(item):
                np.copyto(out[start:stop], local[item.here : item.here + item.n_elements])
            else:
                _copy(view(local, item.here, item, "here"), out[start:stop].reshape([dim.n for dim in item.dims]))
            start = stop

    def gather_chunk(self, chunk: Bits, out: Bits) -> None:
        """Copy the piece's elements of the whole chunk, packed to `out`."""
        start = 0
        for item in self.boxes:
            stop = start + item.n_elements
            np.copyto(out[start:stop].reshape([dim.n for dim in item.dims]), view(chunk, item.there, item, "there"))
            start = stop

    def spread(self, packed: Bits, chunk: Bits) -> None:
        """Write packed elements to their places in the chunk; the others stay."""
        start = 0
        for item in self.boxes:
            stop = start + item.n_elements
            np.copyto(view(chunk, item.there, item, "there"), packed[start:stop].reshape([dim.n for dim in item.dims]))
            start = stop

    def take(self, chunk: Bits, local: Bits) -> None:
        """Copy the piece's elements of the whole chunk to their places in a slice."""
        for item in self.boxes:
            np.copyto(view(local, item.here, item, "here"), view(chunk, item.there, item, "there"))

    def put(self, local: Bits, chunk: Bits) -> None:
        """Copy the piece's elements of a slice to their places in the chunk; the others stay."""
        for item in self.boxes:
            np.copyto(view(chunk, item.there, item, "there"), view(local, item.here, item, "here"))

    def place(self, positions: NDArray[np.uint32], values: Bits) -> tuple[NDArray[np.uint32], Bits]:
        """Return where in the chunk packed elements are, ascending, and their values in this order.

        Parameters
        ----------
        positions : ndarray of uint32, shape (n,)
            Packed, ascending.
        values : ndarray of uintN, shape (n,)
        """
        if len(self.boxes) == 1:
            return _placed(self.boxes[0], positions), values
        ends = np.cumsum([item.n_elements for item in self.boxes])
        cuts = np.searchsorted(positions, ends)
        found, first, start = [], 0, 0
        for item, end, cut in zip(self.boxes, ends.tolist(), cuts.tolist(), strict=True):
            found.append(_placed(item, positions[first:cut] - np.uint32(start)))
            first, start = cut, end
        places = np.concatenate(found)
        if self._is_ascending:
            return places, values
        order = np.argsort(places, kind="stable")
        return places[order], values[order]


def _is_adjacent(item: Box) -> bool:
    """Tell whether the elements lie one after the other in the slice, in the chunk's order."""
    n = 1
    for dim in reversed(item.dims):
        if dim.here != n:
            return False
        n *= dim.n
    return True


def _copy(source: NDArray[Any], out: NDArray[Any]) -> None:
    """Copy a strided view to a C-contiguous array, in tiles where the source runs in another direction.

    NumPy walks in the order of `out`; of a transposed source each step is then another cache line, eight to twelve
    times slower.
    """
    if source.ndim > 1:
        axis = source.strides.index(min(source.strides))
        n_across, n_along = source.shape[axis], source.shape[-1]
        if axis != source.ndim - 1 and min(n_across, n_along) >= _TILE // 4:
            turned, turned_out = np.moveaxis(source, axis, -2), np.moveaxis(out, axis, -2)
            for outer in np.ndindex(turned.shape[:-2]):
                for a in range(0, n_across, _TILE):
                    for b in range(0, n_along, _TILE):
                        tile = (*outer, slice(a, a + _TILE), slice(b, b + _TILE))
                        turned_out[tile] = np.ascontiguousarray(turned[tile].T).T
            return
    np.copyto(out, source)


def _placed(item: Box, positions: NDArray[np.uint32]) -> NDArray[np.uint32]:
    if not item.dims:
        return np.full(len(positions), item.there, np.uint32)
    if len(item.dims) == 1 and item.dims[0].there == 1:
        return positions + np.uint32(item.there)
    found = np.full(len(positions), item.there, np.uint32)
    rest = positions
    for dim in reversed(item.dims[1:]):
        outer = rest // np.uint32(dim.n)  # twice as fast as divmod
        found += (rest - outer * np.uint32(dim.n)) * np.uint32(dim.there)
        rest = outer
    return found + rest * np.uint32(item.dims[0].there)


def in_elements(boxes: tuple[Box, ...], dtype: str) -> tuple[Box, ...]:
    """Return boxes of values as boxes of the elements that these take."""
    per = DTYPES[dtype].elements_per_value
    if per == 1:
        return boxes
    return tuple(
        box(
            item.here * per,
            item.there * per,
            [*(Dim(d.n, d.here * per, d.there * per) for d in item.dims), Dim(per, 1, 1)],
        )
        for item in boxes
    )


def pieces(mapped: AffineMap, layout: Layout, chunk_elements: int) -> Iterator[Piece]:
    """Yield the pieces of a slice, by tensor and then by chunk.

    Raises
    ------
    InvalidInputError
        If the layout lacks a tensor of the map, or has another dtype or shape for it.
    """
    held: dict[str, tuple[Box, ...]] = {}
    for name, boxes in mapped.boxes.items():
        entry = require_entry(layout, name, mapped)
        if held.setdefault(entry.name, boxes) is not boxes:  # tied names
            if held[entry.name] != boxes:
                raise InvalidInputError(f"is tied to {entry.name}, but the slice has other values for it", key=name)
            continue
        for chunk in entry.chunks(chunk_elements):
            start = chunk * chunk_elements - entry.start
            found = [
                part.moved(there=-start)
                for item in in_elements(boxes, mapped.dtype)
                for part in clipped(item, max(start, 0), min(start + chunk_elements, entry.n_elements))
            ]
            if found:
                yield Piece(entry.space, chunk, tuple(sorted(found, key=lambda item: (item.there, item.here))))


def require_entry(layout: Layout, name: str, mapped: AffineMap) -> TensorEntry:
    """Return the entry of a map's tensor; ``InvalidInputError`` unless dtype and shape are the map's."""
    entry = layout.entry(name)
    if (entry.dtype, tuple(entry.shape)) != (mapped.dtype, mapped.tensors[name]):
        raise InvalidInputError(
            "the slice is of another tensor than the version has",
            key=name,
            expected=f"{entry.dtype} {list(entry.shape)}",
            found=f"{mapped.dtype} {list(mapped.tensors[name])}",
        )
    return entry
