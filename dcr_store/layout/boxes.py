"""Boxes: regular parts of one flat tensor that lie regularly in another, and what two of them share. Pure arithmetic.

A box walks two sides at once, ``here`` and ``there``, each by an offset and strides in elements. Strides are positive,
and on each side every stride is larger than all that lies within it spans, as in any sub-box of a reshaped, permuted or
sliced tensor: then no element is met twice, and what two boxes share is again a few boxes. Refuses everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import InvalidInputError


class Dim(NamedTuple):
    """One dimension of a box: elements, and the strides on both sides."""

    n: int
    here: int
    there: int


class Walk(NamedTuple):
    """A part of a flat tensor, ``here``, with what each of its elements is elsewhere.

    ``there`` and each stride there may be vectors, of one length: then several things are tracked at once.
    """

    here: int
    there: tuple[int, ...]
    dims: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(elements, stride here, strides there), by falling stride here."""


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a flat tensor, ``here``, and which elements of another they are, ``there``.

    Attributes
    ----------
    here, there : int
        The first element on each side.
    dims : tuple of Dim
        By falling stride there; none has a single element, and no two could be one: so equal walks are equal boxes.
    """

    here: int
    there: int
    dims: tuple[Dim, ...]

    @property
    def n_elements(self) -> int:
        """The elements on each side."""
        return math.prod(dim.n for dim in self.dims)

    @property
    def here_stop(self) -> int:
        """The element after the last one here."""
        return self.here + sum((dim.n - 1) * dim.here for dim in self.dims) + 1

    @property
    def there_stop(self) -> int:
        """The element after the last one there."""
        return self.there + sum((dim.n - 1) * dim.there for dim in self.dims) + 1

    def inverse(self) -> Box:
        """Return the same box from the other side."""
        return box(self.there, self.here, [Dim(dim.n, dim.there, dim.here) for dim in self.dims])

    def moved(self, here: int = 0, there: int = 0) -> Box:
        """Return the box with both sides moved on by so many elements."""
        return Box(self.here + here, self.there + there, self.dims)

    def find(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where elements of the side here are there, -1 for those that are not in the box.

        Parameters
        ----------
        positions : ndarray of int64, shape (n,)

        Returns
        -------
        ndarray of int64, shape (n,)
        """
        rest = positions - self.here
        is_in = rest >= 0
        found = np.full(positions.shape, self.there, np.int64)
        for dim in sorted(self.dims, key=lambda dim: -dim.here):
            index, rest = np.divmod(rest, dim.here)
            is_in &= index < dim.n
            found += index * dim.there
        return np.where(is_in & (rest == 0), found, -1)

    def positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return all elements, by rising place there: here and there, int64 of shape (n_elements,)."""
        here, there = np.array([self.here], np.int64), np.array([self.there], np.int64)
        for dim in self.dims:
            steps = np.arange(dim.n, dtype=np.int64)
            here = (here[:, None] + steps * dim.here).ravel()
            there = (there[:, None] + steps * dim.there).ravel()
        return here, there


def box(here: int, there: int, dims: Iterable[Dim]) -> Box:
    """Return a box in normal form.

    Raises
    ------
    InvalidInputError
        If an offset is negative, a stride is not positive, or one element would be met twice on one side. A box without
        elements is refused too.
    """
    kept = [Dim(*dim) for dim in dims if dim.n != 1]
    if here < 0 or there < 0:
        raise InvalidInputError(
            "a box cannot begin before its tensor", expected="offsets from 0", found=f"{here}, {there}"
        )
    if any(dim.n < 1 for dim in kept):
        raise InvalidInputError("a box needs elements", expected="sizes from 1", found=f"{min(dim.n for dim in kept)}")
    for what, strides in (
        ("here", [(dim.here, dim.n) for dim in kept]),
        ("there", [(dim.there, dim.n) for dim in kept]),
    ):
        _require_nested(what, strides)
    kept.sort(key=lambda dim: -dim.there)
    merged: list[Dim] = []
    for dim in kept:
        if merged and merged[-1].here == dim.n * dim.here and merged[-1].there == dim.n * dim.there:
            merged[-1] = Dim(merged[-1].n * dim.n, dim.here, dim.there)
        else:
            merged.append(dim)
    return Box(here, there, tuple(merged))


def view(flat: NDArray[Any], start: int, item: Box, side: Literal["here", "there"]) -> NDArray[Any]:
    """Return the elements of one side of a box, in the shape of its dims; a view of `flat`.

    Parameters
    ----------
    flat : ndarray, shape (n,)
        That side, or a part of it that has the whole box.
    start : int
        Where in `flat` the box's first element is.
    """
    strides = [getattr(dim, side) * flat.itemsize for dim in item.dims]
    return np.lib.stride_tricks.as_strided(flat[start:], [dim.n for dim in item.dims], strides)


def _require_nested(what: str, strides: list[tuple[int, int]]) -> None:
    span = 0
    for stride, n in sorted(strides):
        if stride <= span:
            raise InvalidInputError(
                f"a box would meet an element {what} twice, or does not nest",
                expected=f"a stride over {span}",
                found=f"{stride}",
            )
        span += (n - 1) * stride


def is_box(here: int, there: int, dims: Sequence[Dim]) -> bool:
    """Return whether ``box`` would take these."""
    try:
        box(here, there, dims)
    except InvalidInputError:
        return False
    return True


# ---------------------------------------------------------------------- what two boxes share


def join(first: Box, second: Box) -> list[Box]:
    """Return the way through both: from `first`'s side here to `second`'s side there.

    They meet at `first`'s side there, which is `second`'s side here.
    """
    found = []
    for meeting in _meet(_walk(first.inverse()), _walk(second)):
        here, there = meeting.there
        found.append(box(here, there, [Dim(n, *strides) for n, _, strides in meeting.dims]))
    return found


def shared(first: Box, second: Box) -> list[Box]:
    """Return what of `first` lies, on its side there, where `second` lies on its own side there."""
    found = []
    for meeting in _meet(_walk(first.inverse()), _walk(second.inverse())):
        found.append(box(meeting.there[0], meeting.here, [Dim(n, there[0], here) for n, here, there in meeting.dims]))
    return found


def clipped(whole: Box, start: int, stop: int) -> list[Box]:
    """Return what of a box lies from `start` to `stop` on its side there."""
    if start <= whole.there and whole.there_stop <= stop:
        return [whole]
    if stop <= whole.there or whole.there_stop <= start or stop <= start:
        return []
    return shared(whole, Box(0, start, (Dim(stop - start, 1, 1),) if stop - start > 1 else ()))


def _walk(of: Box) -> Walk:
    dims = sorted(of.dims, key=lambda dim: -dim.here)
    return Walk(of.here, (of.there,), tuple((dim.n, dim.here, (dim.there,)) for dim in dims))


def _span(dims: Sequence[tuple[int, int, tuple[int, ...]]]) -> int:
    return sum((n - 1) * stride for n, stride, _ in dims)


def _added(a: tuple[int, ...], b: tuple[int, ...], times: int) -> tuple[int, ...]:
    return tuple(x + times * y for x, y in zip(a, b, strict=True))


def _meet(a: Walk, b: Walk) -> Iterator[Walk]:
    """Yield what two walks share here; what it is there in `a`, then in `b`."""
    delta = a.here - b.here
    if delta > _span(b.dims) or -delta > _span(a.dims):
        return
    if not a.dims and not b.dims:
        yield Walk(a.here, a.there + b.there, ())
        return
    stride = max(dims[0][1] for dims in (a.dims, b.dims) if dims)
    for part_a in _with_top(a, stride):
        for part_b in _with_top(b, stride):
            if part_a is None or part_b is None:
                yield from _meet_each(a, b)
                return
            yield from _meet_tops(part_a, part_b, stride)


def _with_top(walk: Walk, stride: int) -> list[Walk | None]:
    """Return the walk in parts whose first dimension has this stride, [None] where that cannot be.

    What is within the first dimension then spans less than the stride.
    """
    if walk.dims and walk.dims[0][1] == stride:
        return [walk]
    one = (1, stride, (0,) * len(walk.there))
    if _span(walk.dims) < stride:
        return [Walk(walk.here, walk.there, (one, *walk.dims))]
    n, step, elsewhere = walk.dims[0]
    per, uneven = divmod(stride, step)
    if uneven:
        return [None]
    n_whole, n_rest = divmod(n, per)
    inner = walk.dims[1:]
    outer = (n_whole, stride, tuple(per * there for there in elsewhere))
    parts: list[Walk | None] = []
    if n_whole:
        parts.append(Walk(walk.here, walk.there, (outer, (per, step, elsewhere), *inner)))
    if n_rest:
        start, there = walk.here + n_whole * stride, _added(walk.there, elsewhere, n_whole * per)
        parts.append(Walk(start, there, (one, (n_rest, step, elsewhere), *inner)))
    return parts


def _meet_tops(a: Walk, b: Walk, stride: int) -> Iterator[Walk]:
    """Yield what is shared by two walks whose first dimensions have one stride, over what is within them."""
    (n_a, _, there_a), *inner_a = a.dims
    (n_b, _, there_b), *inner_b = b.dims
    delta = a.here - b.here
    for ahead in range(-(-(delta - _span(inner_b)) // stride), (delta + _span(inner_a)) // stride + 1):
        first, last = max(0, -ahead), min(n_a - 1, n_b - 1 - ahead)
        if first > last:
            continue
        rest_a = Walk(a.here + first * stride, _added(a.there, there_a, first), tuple(inner_a))
        rest_b = Walk(b.here + (first + ahead) * stride, _added(b.there, there_b, first + ahead), tuple(inner_b))
        for inner in _meet(rest_a, rest_b):
            top = (last - first + 1, stride, there_a + there_b)
            yield Walk(inner.here, inner.there, (top, *inner.dims) if top[0] > 1 else inner.dims)


def _meet_each(a: Walk, b: Walk) -> Iterator[Walk]:
    """Yield what two walks share whose strides do not divide: by one first dimension's elements, one at a time."""
    is_a = bool(a.dims) and (not b.dims or a.dims[0][0] <= b.dims[0][0])
    whole = a if is_a else b
    n, stride, elsewhere = whole.dims[0]
    for i in range(n):
        part = Walk(whole.here + i * stride, _added(whole.there, elsewhere, i), whole.dims[1:])
        yield from _meet(part, b) if is_a else _meet(a, part)


# ---------------------------------------------------------------------- fewer boxes


def merged(boxes: Iterable[Box]) -> list[Box]:
    """Return the same elements in fewer boxes where several are one box's repetitions; by rising place there."""
    found = sorted(set(boxes), key=lambda item: (item.there, item.here))
    while True:
        groups: dict[tuple[Dim, ...], list[Box]] = {}
        for item in found:
            groups.setdefault(item.dims, []).append(item)
        fewer = sorted((part for group in groups.values() for part in _merged(group)), key=lambda b: (b.there, b.here))
        if len(fewer) == len(found):
            return fewer
        found = fewer


def _merged(group: list[Box]) -> Iterator[Box]:
    """Yield boxes of equal dims, ascending there, with even steps from one to the next taken together."""
    start = 0
    while start < len(group):
        first, stop = group[start], start + 1
        if stop < len(group):
            step = (group[stop].here - first.here, group[stop].there - first.there)
            while stop < len(group) and step == (
                group[stop].here - group[stop - 1].here,
                group[stop].there - group[stop - 1].there,
            ):
                stop += 1
            dims = (Dim(stop - start, *step), *first.dims)
            if is_box(first.here, first.there, dims):
                yield box(first.here, first.there, dims)
                start = stop
                continue
        yield first
        start += 1
