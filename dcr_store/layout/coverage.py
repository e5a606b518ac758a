"""Which values of canonical tensors boxes hold, which none holds, and which are held twice; exactly. Pure.

Decided by arithmetic on the boxes where that is cheaper, else by counting, a window of a tensor at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_store.layout.boxes import Box, Dim, box, clipped, merged, shared, view

MAX_PARTS: Final = 1000
_WINDOW: Final = 1 << 24  # values that are counted at once
_PAIR_COST: Final = 20_000  # values that can be counted in the time that a pair of boxes takes
_SMALL: Final = 1 << 20


class Part(NamedTuple):
    """Adjacent values of a canonical tensor, in C order."""

    tensor: str
    start: int
    stop: int

    def __str__(self) -> str:
        # Not as an index: that would count along the first dimension.
        one, last = self.stop - self.start == 1, self.stop - 1
        which = f"value {self.start}" if one else f"values {self.start} to {last}"
        return f"{which} of {self.tensor} in C order"


@dataclass(frozen=True, slots=True)
class Coverage:
    """What several slices hold of all tensors together.

    Attributes
    ----------
    n_missing, n_doubled : int
        Values that none holds, and that are held more than once.
    missing, doubled : tuple of Part
        Where: of each tensor the first ``MAX_PARTS`` parts.
    """

    n_missing: int
    n_doubled: int
    missing: tuple[Part, ...]
    doubled: tuple[Part, ...]

    @property
    def is_exact(self) -> bool:
        """Whether each value is held once."""
        return not self.n_missing and not self.n_doubled


def covered(held: Mapping[str, Iterable[Box]], n_values: Mapping[str, int]) -> Coverage:
    """Return what boxes hold (``there``) of tensors of so many values, exactly."""
    missing, doubled = _Parts(), _Parts()
    for name, n_canonical in n_values.items():
        end, missing.left, doubled.left = 0, MAX_PARTS, MAX_PARTS
        for cluster in _clusters(held.get(name, ())):
            start, stop = cluster[0].there, max(item.there_stop for item in cluster)
            missing.add(name, end, start)
            end = stop
            if _are_apart(cluster, stop - start) and sum(item.n_elements for item in cluster) == stop - start:
                continue
            for low, counts in _counted(cluster, start, stop):
                missing.add_runs(name, low, counts == 0)
                doubled.add_runs(name, low, counts > 1)
        missing.add(name, end, n_canonical)
    return Coverage(missing.n_values, doubled.n_values, tuple(missing.parts), tuple(doubled.parts))


def doubled(name: str, boxes: Iterable[Box]) -> Part | None:
    """Return the first part of a tensor that several boxes hold, None if there is none."""
    for cluster in _clusters(boxes):
        start, stop = cluster[0].there, max(item.there_stop for item in cluster)
        if len(cluster) == 1 or _are_apart(cluster, stop - start):
            continue
        found = _Parts()
        for low, counts in _counted(cluster, start, stop):
            found.add_runs(name, low, counts > 1)
            if found.parts and found.parts[0].stop < low + len(counts):
                break
        if found.parts:
            return found.parts[0]
    return None


class Holding:
    """What is held of one tensor, as it grows: boxes (``there``), each element once.

    Only boxes whose spans meet are compared, and those that repeat evenly are taken together. So slices that come one
    after the other, be they rows or columns, cost as much each as the first.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._starts: list[int] = []
        self._spans: list[tuple[int, list[Box]]] = []  # by start: the end, and the boxes; spans are apart

    def doubled(self, boxes: Iterable[Box]) -> Part | None:
        """Return the first part that these have twice, or that is held already; None if there is none."""
        new = list(boxes)
        if (part := doubled(self.name, new)) is not None:
            return part
        for cluster in _clusters(new):
            first, last = self._met(cluster)
            met = [item for _, items in self._spans[first:last] for item in items]
            n_pairs, span = len(met) * len(cluster), max(item.there_stop for item in cluster) - cluster[0].there
            if n_pairs * _PAIR_COST <= max(span, _SMALL) and not any(shared(a, b) for a in met for b in cluster):
                continue
            if (part := doubled(self.name, [*met, *cluster])) is not None:
                return part
        return None

    def add(self, boxes: Iterable[Box]) -> None:
        """Hold these too; nothing of them is held already."""
        for cluster in _clusters(_bare(item) for item in boxes):
            first, last = self._met(cluster)
            met = [item for _, items in self._spans[first:last] for item in items]
            ends = [item.there_stop for item in cluster] + [end for end, _ in self._spans[first:last]]
            start = min([cluster[0].there, *self._starts[first:last]])
            self._starts[first:last] = [start]
            self._spans[first:last] = [(max(ends), merged([*met, *cluster]) if met else cluster)]

    def boxes(self) -> list[Box]:
        """Return what is held, by rising place."""
        return merged(item for _, items in self._spans for item in items)

    def _met(self, cluster: Sequence[Box]) -> tuple[int, int]:
        """Return the range of the spans that the span of a cluster meets."""
        start, stop = cluster[0].there, max(item.there_stop for item in cluster)
        first = bisect_right(self._starts, start)
        if first and self._spans[first - 1][0] > start:
            first -= 1
        return first, max(bisect_left(self._starts, stop), first)


def _bare(item: Box) -> Box:
    """Return a box that is on its side here what it is there."""
    return box(item.there, item.there, [Dim(dim.n, dim.there, dim.there) for dim in item.dims])


class _Parts:
    """Parts as they are found, by rising place; a few are kept of each tensor."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.n_values = 0
        self.left = MAX_PARTS

    def add(self, name: str, start: int, stop: int) -> None:
        if start >= stop:
            return
        self.n_values += stop - start
        if self.parts and (self.parts[-1].tensor, self.parts[-1].stop) == (name, start):
            self.parts[-1] = Part(name, self.parts[-1].start, stop)
        elif self.left:
            self.parts.append(Part(name, start, stop))
            self.left -= 1

    def add_runs(self, name: str, low: int, flags: NDArray[np.bool_]) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.view(np.int8), [0]]))).reshape(-1, 2)
        n_more = int(flags.sum())
        for start, stop in edges[: self.left + 1].tolist():
            self.add(name, low + start, low + stop)
            n_more -= stop - start
        self.n_values += n_more


def _clusters(boxes: Iterable[Box]) -> list[list[Box]]:
    """Return the boxes in groups whose spans there hang together, by rising place."""
    groups: list[list[Box]] = []
    end = -1
    for item in sorted(boxes, key=lambda item: (item.there, item.there_stop)):
        if item.there >= end:
            groups.append([])
        groups[-1].append(item)
        end = max(end, item.there_stop)
    return groups


def _are_apart(cluster: Sequence[Box], span: int) -> bool:
    """Return whether no two boxes share an element; False too where that is found sooner by counting."""
    n_pairs = len(cluster) * (len(cluster) - 1) // 2
    return n_pairs * _PAIR_COST <= max(span, _SMALL) and not any(shared(a, b) for a, b in combinations(cluster, 2))


def _counted(boxes: Sequence[Box], start: int, stop: int) -> Iterable[tuple[int, NDArray[np.uint32]]]:
    """Yield, for windows of the canonical tensor, the first value and how many boxes hold each."""
    for low in range(start, stop, _WINDOW):
        counts = np.zeros(min(_WINDOW, stop - low), np.uint32)
        for item in boxes:
            for part in clipped(item, low, low + len(counts)):
                view(counts, part.there - low, part, "there")[...] += 1
        yield low, counts
