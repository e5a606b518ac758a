"""Where strided writes lie in memory: in normal form, as runs of bytes, and which of them meet. Does no I/O.

Refuses nothing: a view that meets itself, or has no elements, has no geometry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Geometry:
    """The bytes of a strided view, in a form that two views of the same bytes in the same grid share.

    Attributes
    ----------
    start : int
        The first byte, counted from the first of the region.
    dims : tuple of (int, int)
        Sizes and strides in bytes, outer first; the last is the run of adjacent bytes, of stride 1.
    """

    start: int
    dims: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.start + sum((size - 1) * stride for size, stride in self.dims) + 1

    @property
    def is_run(self) -> bool:
        """Whether the bytes are adjacent."""
        return len(self.dims) == 1


class Runs(NamedTuple):
    """Pieces of adjacent bytes: int64 arrays of the same shape, ascending where they are merged."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


def geometry(start: int, itemsize: int, sizes: Sequence[int], strides: Sequence[int]) -> Geometry | None:
    """Return the geometry of a view.

    Parameters
    ----------
    start : int
        Its first byte in its region.
    sizes, strides : sequence of int
        In elements.

    Returns
    -------
    Geometry or None
        None if it has no elements, or one byte is several of its elements.
    """
    if 0 in sizes:
        return None
    dims: list[tuple[int, int]] = [(itemsize, 1)]
    span = itemsize
    for stride, size in sorted((stride * itemsize, size) for size, stride in zip(sizes, strides, strict=True)):
        if size == 1:
            continue
        if stride < span:
            return None
        inner_size, inner_stride = dims[-1]
        if stride == inner_size * inner_stride:
            dims[-1] = (inner_size * size, inner_stride)
        else:
            dims.append((size, stride))
        span = stride * (size - 1) + span
    return Geometry(start, tuple(reversed(dims)))


def runs(place: Geometry) -> Runs:
    """Return the runs of a view, in no order."""
    starts = np.array([place.start], np.int64)
    for size, stride in place.dims[:-1]:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return Runs(starts, starts + place.dims[-1][0])


def meetings(places: Sequence[Geometry]) -> set[tuple[int, int]]:
    """Return pairs of indices of views that share bytes: every view that shares any with another is in some pair."""
    spans = sorted((place.start, place.stop, index) for index, place in enumerate(places))
    found: set[tuple[int, int]] = set()
    cluster: list[int] = []
    end = -1
    for start, stop, index in spans:
        if start >= end:
            found |= _meetings(places, cluster)
            cluster = []
        cluster.append(index)
        end = max(end, stop)
    return found | _meetings(places, cluster)


def _meetings(places: Sequence[Geometry], cluster: Sequence[int]) -> set[tuple[int, int]]:
    """Return the pairs among views whose spans hang together."""
    if len(cluster) < 2:
        return set()
    pieces = [runs(places[index]) for index in cluster]
    starts = np.concatenate([piece.starts for piece in pieces])
    stops = np.concatenate([piece.stops for piece in pieces])
    owners = np.repeat(np.array(cluster, np.int64), [len(piece.starts) for piece in pieces])
    order = np.lexsort((stops, starts))
    starts, stops, owners = starts[order], stops[order], owners[order]
    # The run that reaches farthest so far is the one that a later run meets, if it meets any.
    farthest = np.maximum.accumulate(stops)
    holders = np.maximum.accumulate(np.where(stops == farthest, np.arange(len(stops)), 0))
    met = np.flatnonzero(starts[1:] < farthest[:-1])
    firsts, seconds = owners[holders[met]].tolist(), owners[met + 1].tolist()
    return {(first, second) for first, second in zip(firsts, seconds, strict=True) if first != second}


def union(places: Iterable[Geometry]) -> Runs:
    """Return all bytes of several views as merged runs, ascending."""
    pieces = [runs(place) for place in places]
    if not pieces:
        return Runs(np.zeros(0, np.int64), np.zeros(0, np.int64))
    starts = np.concatenate([piece.starts for piece in pieces])
    stops = np.concatenate([piece.stops for piece in pieces])
    order = np.argsort(starts, kind="stable")
    starts, farthest = starts[order], np.maximum.accumulate(stops[order])
    is_first = np.concatenate([np.ones(1, bool), starts[1:] > farthest[:-1]])
    first = np.flatnonzero(is_first)
    last = np.concatenate([first[1:] - 1, [len(starts) - 1]])
    return Runs(starts[first], farthest[last])
