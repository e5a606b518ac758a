"""Properties of affine maps: whatever is done to slices, the map says where each value came from; NumPy is the model.

In the model each value of a canonical tensor is its own place, so that a slice made of them by NumPy's own operations
says by itself what the map has to say; -1 is what is nobody's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_store.errors import FormatError, InvalidInputError
from dcr_store.layout import coverage as coverage_module
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap, coverage, holders
from dcr_store.layout.boxes import Box, Dim, box, clipped, join, merged, shared
from dcr_store.layout.coverage import Holding
from dcr_store.layout.read_off import read_off

Places = np.ndarray[Any, np.dtype[np.int64]]
STEP = 1 << 20  # places of the n-th tensor begin at n * STEP


@dataclass
class Slice:
    """A map, and the slice's own values."""

    mapped: AffineMap
    places: Places


@st.composite
def sources(draw: st.DrawFn, n_tensors: int) -> list[Slice]:
    """Parts of tensors t0, t1, …; tensors are not shared, so no value is doubled."""
    found = []
    for index in range(n_tensors):
        shape = draw(st.lists(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 6), min_size=1, max_size=3))
        places = np.arange(math.prod(shape)).reshape(shape) + index * STEP
        offsets = [draw(st.integers(0, full)) for full in shape]
        sizes = [
            draw(st.integers(0 if full == offset else 1, full - offset))
            for full, offset in zip(shape, offsets, strict=True)
        ]
        cut = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        found.append(Slice(slices.part(f"t{index}", "BF16", shape, offsets, sizes), places[cut]))
    return found


@st.composite
def made(draw: st.DrawFn) -> Slice:
    """A slice after several operations on several parts."""
    pool = draw(sources(draw(st.integers(1, 3))))
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(pool) - 1))
        pool[index] = draw(changed(pool[index]))
        if len(pool) > 1 and draw(st.booleans()):
            first, second = pool.pop(), pool.pop()
            pool.append(combined(first, second, draw))
    return pool[0]


def combined(first: Slice, second: Slice, draw: st.DrawFn) -> Slice:
    """Concatenate two slices, flattened unless they fit."""
    if first.places.shape == second.places.shape and draw(st.booleans()):
        dim = draw(st.integers(0, first.places.ndim))
        return Slice(slices.stacked([first.mapped, second.mapped], dim), np.stack([first.places, second.places], dim))
    fits = [
        dim
        for dim in range(first.places.ndim)
        if first.places.ndim == second.places.ndim
        and np.delete(first.places.shape, dim).tolist() == np.delete(second.places.shape, dim).tolist()
    ]
    if not fits:
        first, second = (Slice(slices.reshaped(s.mapped, [s.places.size]), s.places.ravel()) for s in (first, second))
        fits = [0]
    dim = draw(st.sampled_from(fits))
    return Slice(
        slices.concatenated([first.mapped, second.mapped], dim), np.concatenate([first.places, second.places], dim)
    )


@st.composite
def changed(draw: st.DrawFn, old: Slice) -> Slice:
    """One operation on one slice."""
    mapped, places = old.mapped, old.places
    shape = list(places.shape)
    what = draw(st.sampled_from(["permute", "reshape", "narrow", "pad", "flatten", "json"]))
    if what == "permute":
        dims = draw(st.permutations(range(places.ndim)))
        return Slice(slices.permuted(mapped, dims), places.transpose(dims))
    if what == "reshape":
        for size in draw(st.permutations([2, 3, 5])):
            if places.size and places.size % size == 0:
                return Slice(slices.reshaped(mapped, [size, places.size // size]), places.reshape(size, -1))
        return Slice(slices.reshaped(mapped, [places.size]), places.ravel())
    if what == "narrow":
        dim = draw(st.integers(0, places.ndim - 1))
        start = draw(st.integers(0, shape[dim]))
        n = draw(st.integers(0, shape[dim] - start))
        return Slice(slices.narrowed(mapped, dim, start, n), places.take(range(start, start + n), dim))
    if what == "pad":
        more = [draw(st.integers(0, 2)) for _ in shape]
        wider = np.pad(places, [(0, n) for n in more], constant_values=-1)
        return Slice(slices.padded(mapped, wider.shape), wider)
    if what == "flatten":
        start = draw(st.integers(0, places.size))
        stop = draw(st.integers(start, places.size))
        return Slice(slices.flattened(mapped, start, stop), places.ravel()[start:stop])
    return Slice(AffineMap.from_bytes(mapped.to_bytes(), "the test"), places)


def found_by(mapped: AffineMap) -> Places:
    """What the map says of each value of the slice."""
    found = np.full(math.prod(mapped.shape), -1, np.int64)
    for name in mapped.tensors:
        there = mapped.canonical_of(name, np.arange(len(found)))
        assert not ((there >= 0) & (found >= 0)).any()
        found = np.where(there >= 0, there + int(name[1:]) * STEP, found)
    return found.reshape(mapped.shape)


@given(made())
@settings(max_examples=400)
def test_map_of_any_slice_says_where_each_value_came_from(found: Slice) -> None:
    assert np.array_equal(found_by(found.mapped), found.places)
    assert found.mapped.n_values == int((found.places >= 0).sum())


@given(made())
def test_inverse_leads_back(found: Slice) -> None:
    for name, full in found.mapped.tensors.items():
        back = found.mapped.inverse(name, "slice")
        n = math.prod(full)
        here = found.mapped.local_of(name, np.arange(n))
        assert np.array_equal(back.canonical_of("slice", np.arange(n)), here)
        held = np.flatnonzero(here >= 0)
        assert np.array_equal(found.mapped.canonical_of(name, here[held]), held)
        assert (
            back.inverse("slice", name).boxes[name] == found.mapped.boxes[name]
            or found_by(
                AffineMap.of("BF16", found.mapped.shape, {name: full}, {name: back.inverse("slice", name).boxes[name]})
            ).tolist()
            == np.where(found.places // STEP == int(name[1:]), found.places, -1).tolist()
        )


@given(made(), st.data())
def test_clipping_leaves_what_lies_within(found: Slice, data: st.DataObject) -> None:
    for name, full in found.mapped.tensors.items():
        start = data.draw(st.integers(0, math.prod(full)))
        stop = data.draw(st.integers(start, math.prod(full)))
        parts = found.mapped.clipped(name, start, stop)
        pairs = [pair for item in parts for pair in zip(*(p.tolist() for p in item.positions()), strict=True)]
        here = found.mapped.local_of(name, np.arange(start, stop))
        wanted = [(int(h), start + i) for i, h in enumerate(here) if h >= 0]
        assert sorted(pairs, key=lambda pair: pair[1]) == wanted


@given(made(), made())
def test_maps_follow_each_other(first: Slice, second: Slice) -> None:
    """The second takes one tensor of the first as its slice, flattened and padded to fit."""
    name = next(iter(first.mapped.tensors))
    full = first.mapped.tensors[name]
    n = math.prod(full)
    flat = slices.reshaped(second.mapped, [second.places.size])
    places = second.places.ravel()
    if len(places) < n:
        flat, places = slices.padded(flat, [n]), np.pad(places, (0, n - len(places)), constant_values=-1)
    flat, places = slices.flattened(flat, 0, n), places[:n]
    others = {f"u{key[1:]}": key for key in flat.tensors}
    onward = AffineMap.of(
        "BF16",
        full,
        {new: flat.tensors[old] for new, old in others.items()},
        {new: flat.boxes[old] for new, old in others.items()},
    )
    joined = first.mapped.then({name: onward})
    index = int(name[1:])
    is_mine = first.places // STEP == index
    expected = np.where(is_mine, np.append(places, -1)[np.where(is_mine, first.places - index * STEP, -1)], -1)
    got = np.full(first.places.size, -1, np.int64)
    for new in others:
        there = joined.canonical_of(new, np.arange(first.places.size))
        got = np.where(there >= 0, there + int(new[1:]) * STEP, got)
    assert np.array_equal(got.reshape(first.places.shape), expected)


@given(st.lists(made(), min_size=1, max_size=4), st.data())
def test_coverage_counts_what_numpy_counts(found: list[Slice], data: st.DataObject) -> None:
    maps = [item.mapped for item in found]
    tensors: dict[str, tuple[int, ...]] = {}
    kept = []
    for mapped in maps:
        if all(tensors.get(name, full) == full for name, full in mapped.tensors.items()):
            tensors.update(mapped.tensors)
            kept.append(mapped)
    counts = {name: np.zeros(math.prod(full), np.int64) for name, full in tensors.items()}
    for mapped in kept:
        for name in mapped.tensors:
            counts[name] += mapped.local_of(name, np.arange(len(counts[name]))) >= 0
    covered = coverage(kept, tensors)
    for parts, n, wanted in (
        (covered.missing, covered.n_missing, {name: count == 0 for name, count in counts.items()}),
        (covered.doubled, covered.n_doubled, {name: count > 1 for name, count in counts.items()}),
    ):
        flags = {name: np.zeros(len(count), bool) for name, count in counts.items()}
        for part in parts:
            assert part.start < part.stop
            assert not flags[part.tensor][part.start : part.stop].any()
            flags[part.tensor][part.start : part.stop] = True
        assert {name: flag.tolist() for name, flag in flags.items()} == {k: v.tolist() for k, v in wanted.items()}
        assert n == sum(int(flag.sum()) for flag in flags.values())
    for part in covered.doubled:
        assert len(holders(kept, part)) > 1
    assert covered.is_exact == all((count == 1).all() for count in counts.values())


# ---------------------------------------------------------------------- boxes, whatever their strides


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """Any box, strides of which need not divide anything."""
    dims: list[Dim] = []
    here = there = 1
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(2, 4))
        here, there = here + draw(st.integers(0, 3)), there + draw(st.integers(0, 3))
        dims.append(Dim(n, here, there))
        here, there = here * n, there * n
    return box(draw(st.integers(0, 20)), draw(st.integers(0, 20)), dims)


def pairs_of(item: Box) -> set[tuple[int, int]]:
    return set(zip(*(side.tolist() for side in item.positions()), strict=True))


@given(boxes(), boxes())
@settings(max_examples=400)
def test_joined_boxes_are_the_way_through_both(first: Box, second: Box) -> None:
    onward = dict(pairs_of(second))
    wanted = sorted((here, onward[there]) for here, there in pairs_of(first) if there in onward)
    assert sorted(pair for item in join(first, second) for pair in pairs_of(item)) == wanted


@given(boxes(), boxes())
@settings(max_examples=400)
def test_shared_boxes_are_where_both_lie(first: Box, second: Box) -> None:
    theirs = {there for _, there in pairs_of(second)}
    wanted = sorted(pair for pair in pairs_of(first) if pair[1] in theirs)
    assert sorted(pair for item in shared(first, second) for pair in pairs_of(item)) == wanted


@given(boxes(), st.integers(0, 200), st.integers(0, 200))
def test_clipped_boxes_are_what_lies_within(item: Box, start: int, stop: int) -> None:
    wanted = sorted(pair for pair in pairs_of(item) if start <= pair[1] < stop)
    assert sorted(pair for part in clipped(item, start, stop) for pair in pairs_of(part)) == wanted


@given(st.lists(st.lists(boxes(), min_size=1, max_size=3), min_size=1, max_size=6))
def test_what_is_held_is_told_however_it_came(items: list[list[Box]]) -> None:
    holding = Holding("w")
    held = np.zeros(1 << 14, np.int64)
    for some in items:
        more = held.copy()
        for item in some:
            np.add.at(more, item.positions()[1], 1)
        part = holding.doubled(some)
        assert (part is not None) == bool(more.max() > 1)
        if part is None:
            holding.add(some)
            held = more
        else:
            assert np.all(more[part.start : part.stop] > 1)
        found = np.zeros_like(held)
        for item in holding.boxes():
            np.add.at(found, item.positions()[1], 1)
        assert np.array_equal(found, held)


@pytest.mark.parametrize("cut", ["rows", "columns", "rows from the end", "blocks"])
def test_what_comes_in_order_is_compared_once(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with all that came before: a tensor may come in thousands of slices."""
    n = 64
    parts = [((i, 0), (1, n)) if "rows" in cut else ((0, i), (n, 1)) for i in range(n)]
    if cut == "blocks":
        parts = [((8 * i, 8 * j), (8, 8)) for i in range(8) for j in range(8)]
    n_compared = 0

    def counted(*pair: Box) -> list[Box]:
        nonlocal n_compared
        n_compared += 1
        return shared(*pair)

    monkeypatch.setattr(coverage_module, "shared", counted)
    holding = Holding("w")
    for offsets, sizes in parts[::-1] if cut.endswith("end") else parts:
        boxes = slices.part("w", "F32", (n, n), offsets, sizes).boxes["w"]
        assert holding.doubled(boxes) is None
        holding.add(boxes)
    assert n_compared <= 4 * len(parts)
    assert holding.boxes() == [box(0, 0, [Dim(n * n, 1, 1)])]


@given(st.lists(boxes(), max_size=6))
def test_merged_boxes_hold_the_same(items: list[Box]) -> None:
    wanted = {pair for item in items for pair in pairs_of(item)}
    fewer = merged(items)
    assert {pair for item in fewer for pair in pairs_of(item)} == wanted
    assert len(fewer) <= len(items)


@given(boxes(), st.lists(st.integers(0, 1000), max_size=50))
def test_finding_is_looking_up(item: Box, positions: list[int]) -> None:
    places = dict(pairs_of(item))
    assert item.find(np.array(positions, np.int64)).tolist() == [places.get(place, -1) for place in positions]


@pytest.mark.parametrize(
    "dims",
    [
        [Dim(2, 1, 0)],
        [Dim(2, 0, 1)],
        [Dim(2, -1, 1)],
        [Dim(2, 1, 1), Dim(2, 1, 2)],
        [Dim(3, 1, 1), Dim(2, 2, 3)],
        [Dim(0, 1, 1)],
    ],
)
def test_what_meets_a_value_twice_is_no_box(dims: list[Dim]) -> None:
    with pytest.raises(InvalidInputError):
        box(0, 0, dims)


def test_a_large_tensor_does_not_wrap() -> None:
    """Half of a tensor of 2^33 values, by columns, of which nothing is ever in memory."""
    n = 1 << 17
    halves = [slices.row_parallel("w", "BF16", [n // 2, n], rank, 2) for rank in range(2)]
    assert coverage(halves, {"w": [n // 2, n]}).is_exact
    places = np.array([0, n // 2 - 1, n // 2, (n // 2) * (n // 2) - 1], np.int64)
    assert halves[1].canonical_of("w", places).tolist() == [n // 2, n - 1, n + n // 2, (n // 2) * n - 1]
    assert halves[1].local_of("w", halves[1].canonical_of("w", places)).tolist() == places.tolist()


def test_broken_documents_are_refused_by_name() -> None:
    good = slices.row_parallel("w", "BF16", [4, 6], 1, 2).to_bytes()
    for old, new in (
        (b'"local":0', b'"local":7'),
        (b'"canonical":3', b'"canonical":9'),
        (b"[4,3,6]", b"[4,3]"),
        (b"[4,3,6]", b"[4,3,-6]"),
        (b"[4,3,6]", b"[4,1,6]"),
        (b'"BF16"', b'"F4"'),
        (b'"shape":[4,3]', b'"shape":[true]'),
        (b'"name":"w"', b'"name":""'),
    ):
        assert old in good
        with pytest.raises(FormatError, match=r"map\.json"):
            AffineMap.from_bytes(good.replace(old, new), "map.json")
    assert AffineMap.from_bytes(good, "map.json").to_bytes() == good


# ---------------------------------------------------------------------- boxes read off moves


@given(made())
@settings(max_examples=300)
def test_boxes_read_off_moves_hold_them_all(found: Slice) -> None:
    for name, full in found.mapped.tensors.items():
        here = found.mapped.local_of(name, np.arange(math.prod(full)))
        there = np.flatnonzero(here >= 0)
        items = read_off(here[there], there)
        assert items is not None
        pairs = [pair for item in items for pair in zip(*(side.tolist() for side in item.positions()), strict=True)]
        assert sorted(pairs, key=lambda pair: pair[1]) == list(zip(here[there].tolist(), there.tolist(), strict=True))


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 1 << 30))
def test_boxes_read_off_any_moves_hold_them_all(held: list[bool], seed: int) -> None:
    there = np.flatnonzero(held)
    here = np.random.default_rng(seed).permutation(len(held))[: len(there)].astype(np.int64)
    items = read_off(here, there)
    assert items is not None
    pairs = [pair for item in items for pair in zip(*(side.tolist() for side in item.positions()), strict=True)]
    assert sorted(pairs, key=lambda pair: pair[1]) == list(zip(here.tolist(), there.tolist(), strict=True))


@pytest.mark.parametrize(
    "mapped",
    [
        slices.whole("w", "BF16", (64, 32)),
        slices.row_parallel("w", "BF16", (64, 32), 1, 4),
        slices.transposed(slices.whole("w", "BF16", (64, 32))),
        slices.transposed(slices.row_parallel("w", "BF16", (64, 32), 2, 4)),
        slices.permuted(slices.part("w", "BF16", (6, 5, 4, 8), (1, 0, 1, 3), (4, 5, 2, 3)), (2, 0, 3, 1)),
        slices.qkv({"q": (64, 8), "k": (16, 8), "v": (16, 8)}, "BF16", 4, 0, 1),
        slices.qkv({"q": (64, 8), "k": (16, 8), "v": (16, 8)}, "BF16", 4, 1, 2),
        slices.stacked_experts(
            {f"e{i}": (6, 4) for i in range(4)}, "BF16", is_transposed=True, dim=0, rank=1, n_ranks=2
        ),
        slices.padded_vocabulary("w", "BF16", (50, 4), 64, 3, 4),
        slices.fused({"z": (8, 3), "x": (8, 3), "dt": (2, 3)}, "BF16", 1, 2),
    ],
)
def test_usual_slices_are_read_off_as_they_are_built(mapped: AffineMap) -> None:
    for name, full in mapped.tensors.items():
        here = mapped.local_of(name, np.arange(math.prod(full)))
        there = np.flatnonzero(here >= 0)
        assert tuple(read_off(here[there], there) or ()) == mapped.boxes[name]


def test_moves_without_any_order_are_refused() -> None:
    n = 1 << 16
    assert read_off(np.random.default_rng(0).permutation(n).astype(np.int64), np.arange(n)) is None
