"""Pieces: gathered from slices and from chunks, spread and placed, against NumPy indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_store.errors import InvalidInputError
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.layout.pieces import pieces

SHAPES = {"a": (200, 150), "b": (7,), "c": (3, 160, 140), "d": (), "e": (0, 4)}


def layout_of(dtype: str = "BF16") -> Layout:
    builder = LayoutBuilder()
    for name, shape in SHAPES.items():
        builder.add(name, dtype, shape)
    return builder.build()


MAPS = [
    slices.whole("a", "BF16", SHAPES["a"]),
    slices.transposed(slices.whole("a", "BF16", SHAPES["a"])),
    slices.row_parallel("a", "BF16", SHAPES["a"], 1, 3),
    slices.transposed(slices.row_parallel("a", "BF16", SHAPES["a"], 1, 3)),
    slices.permuted(slices.whole("c", "BF16", SHAPES["c"]), (2, 0, 1)),
    slices.permuted(slices.part("c", "BF16", SHAPES["c"], (1, 5, 7), (2, 131, 130)), (1, 2, 0)),
    slices.concatenated([slices.flat_part("a", "BF16", SHAPES["a"], 40, 29_000), slices.whole("b", "BF16", (7,))]),
    slices.interleaved({"a": (200, 150)}, "BF16", 4),
    slices.whole("d", "BF16", ()),
    slices.whole("e", "BF16", (0, 4)),
]


@pytest.mark.parametrize("mapped", MAPS)
@pytest.mark.parametrize("chunk_elements", [64, 4096, 1 << 20])
def test_pieces_hold_each_value_of_the_slice_once_at_its_place(mapped: AffineMap, chunk_elements: int) -> None:
    layout = layout_of()
    local = np.random.default_rng(0).integers(0, 1 << 16, math.prod(mapped.shape), np.uint16)
    space = np.zeros(layout.spaces["u16"], np.uint16)
    for name in mapped.tensors:
        there = mapped.canonical_of(name, np.arange(len(local)))
        space[layout.entry(name).start + there[there >= 0]] = local[there >= 0]
    found = np.zeros(-(-len(space) // chunk_elements) * chunk_elements, np.uint16)
    n_elements = 0
    for piece in pieces(mapped, layout, chunk_elements):
        chunk = found[piece.chunk * chunk_elements : (piece.chunk + 1) * chunk_elements]
        packed = np.zeros(piece.n_elements, np.uint16)
        piece.gather(local, packed)
        piece.spread(packed, chunk)
        again = np.zeros_like(packed)
        piece.gather_chunk(chunk, again)
        assert np.array_equal(again, packed)
        n_elements += piece.n_elements
        positions = np.arange(0, piece.n_elements, 3, dtype=np.uint32)
        places, values = piece.place(positions, packed[positions])
        assert bool((np.diff(places.astype(np.int64)) > 0).all())
        assert np.array_equal(chunk[places], values)
        assert len(values) == len(positions)
    assert np.array_equal(found[: len(space)], space)
    assert n_elements == mapped.n_values


@given(st.integers(0, 1 << 30), st.sampled_from([64, 256, 1024]))
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_slices(seed: int, chunk_elements: int) -> None:
    rng = np.random.default_rng(seed)
    mapped = slices.permuted(
        slices.part("c", "BF16", SHAPES["c"], (0, 0, 0), rng.integers(1, [4, 161, 141]).tolist()), rng.permutation(3)
    )
    if rng.random() < 0.5:
        stop = math.prod(mapped.shape)
        mapped = slices.flattened(mapped, int(rng.integers(0, stop)), stop)
    layout = layout_of()
    local = rng.integers(1, 1 << 16, math.prod(mapped.shape)).astype(np.uint16)
    there = mapped.canonical_of("c", np.arange(len(local)))
    full = np.zeros(math.prod(SHAPES["c"]), np.uint16)
    full[there] = local
    entry = layout.entry("c")
    for piece in pieces(mapped, layout, chunk_elements):
        packed = np.zeros(piece.n_elements, np.uint16)
        piece.gather(local, packed)
        chunk = np.zeros(chunk_elements, np.uint16)
        piece.spread(packed, chunk)
        start = piece.chunk * chunk_elements - entry.start
        wanted = full[max(start, 0) : start + chunk_elements]
        assert np.array_equal(chunk[max(-start, 0) :][: len(wanted)], wanted)


def test_another_tensor_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="another tensor"):
        list(pieces(slices.whole("a", "F32", SHAPES["a"]), layout_of(), 64))
    with pytest.raises(InvalidInputError, match="another tensor"):
        list(pieces(slices.whole("a", "BF16", (150, 200)), layout_of(), 64))
