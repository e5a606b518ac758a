"""The chunk assembler: tensors in any order, every chunk once, whole, with the right bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.publish import chunks
from dcr_store.publish.chunks import ChunkAssembler

SIZE = 64
DTYPES = {"u8": "U8", "u16": "BF16", "u32": "F32", "u64": "F64"}
SIZES = st.lists(
    st.tuples(st.sampled_from(SPACES), st.integers(0, 300) | st.sampled_from([0, 1, 63, 64, 65, 128])), max_size=12
)


def make(sizes: list[tuple[str, int]]) -> tuple[Layout, dict[str, Bits]]:
    """Return a layout and random bits of its spaces, zero in gaps."""
    builder = LayoutBuilder()
    for i, (space, n) in enumerate(sizes):
        builder.add(f"t{i}", DTYPES[space], (n,))
    layout = builder.build()
    rng = np.random.default_rng(len(sizes))
    state = {space: np.zeros(-(-n // SIZE) * SIZE, uint_dtype(space)) for space, n in layout.spaces.items()}
    for entry in layout.tensors:
        top = 2 ** (8 * uint_dtype(entry.space).itemsize) - 1
        state[entry.space][entry.start : entry.stop] = rng.integers(1, top, entry.n_elements, np.uint64)
    return layout, state


def reader(state: dict[str, Bits], space: str, start: int) -> Callable[[int, int, Bits], None]:
    return lambda a, b, out: np.copyto(out, state[space][start + a : start + b])


class Collected:
    """What the assembler passes on, filled at once."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, int], Bits] = {}
        self.order: list[tuple[str, int]] = []

    def emit(self, space: str, chunk: int, fill: Callable[[Bits], None]) -> None:
        assert (space, chunk) not in self.chunks, "each chunk once"
        out = np.zeros(SIZE, uint_dtype(space))
        fill(out)
        self.chunks[space, chunk] = out
        self.order.append((space, chunk))

    def assert_all(self, state: dict[str, Bits]) -> None:
        assert set(self.chunks) == {(space, i) for space, bits in state.items() for i in range(len(bits) // SIZE)}
        for (space, i), bits in self.chunks.items():
            np.testing.assert_array_equal(bits, state[space][i * SIZE : (i + 1) * SIZE])


def required(layout: Layout) -> dict[str, Any]:
    return {space: layout.occupied(space, SIZE) for space in SPACES}


@settings(max_examples=150, deadline=None)
@given(SIZES, st.randoms(use_true_random=False), st.sampled_from([0, 2, 32]))
def test_any_order(sizes: list[tuple[str, int]], order: Any, max_buffers: int) -> None:
    layout, state = make(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MAX_BUFFERS", max_buffers)
        found = Collected()
        assembler = ChunkAssembler(SIZE, required(layout), found.emit)
        entries = list(layout.tensors)
        order.shuffle(entries)
        for entry in entries:
            assembler.feed(entry.space, entry.start, entry.n_elements, reader(state, entry.space, entry.start))
        assert list(assembler.open_chunks()) == [], "complete chunks are passed on as soon as they are"
        found.assert_all(state)
        assembler.finish()
        found.assert_all(state)


@settings(max_examples=100, deadline=None)
@given(SIZES)
def test_ascending_without_an_end_in_sight(sizes: list[tuple[str, int]]) -> None:
    layout, state = make(sizes)
    found = Collected()
    assembler = ChunkAssembler(SIZE, None, found.emit)
    for entry in layout.tensors:
        assembler.feed(entry.space, entry.start, entry.n_elements, reader(state, entry.space, entry.start))
        assert len(list(assembler.open_chunks())) <= 2 * len(SPACES), "the ends of one tensor in each space"
    assembler.finish()
    found.assert_all(state)


def test_an_incomplete_chunk_can_be_seen() -> None:
    layout, state = make([("u16", 30), ("u16", 40), ("u16", 40)])
    found = Collected()
    assembler = ChunkAssembler(SIZE, required(layout), found.emit)
    first, _, last = layout.tensors
    assembler.feed("u16", last.start, last.n_elements, reader(state, "u16", last.start))
    assembler.feed("u16", first.start, first.n_elements, reader(state, "u16", first.start))
    assert sorted(assembler.open_chunks()) == [("u16", 0), ("u16", 1)]
    seen = assembler.partial("u16", 0)
    assert seen is not None
    np.testing.assert_array_equal(seen[:30], state["u16"][:30])
    assert not seen[30:].any()
    assert assembler.partial("u16", 2) is None
    assert found.order == [("u16", 2)]


def test_a_whole_chunk_is_read_only_when_it_is_filled() -> None:
    """No copy of a piece that covers a chunk: its bits are those at the time of filling."""
    fills: list[Callable[[Bits], None]] = []
    state = {"u8": np.zeros(SIZE, np.uint8)}
    assembler = ChunkAssembler(SIZE, None, lambda space, chunk, fill: fills.append(fill))
    assembler.feed("u8", 0, SIZE, reader(state, "u8", 0))
    state["u8"][:] = 7
    out = np.zeros(SIZE, np.uint8)
    fills[0](out)
    assert (out == 7).all()


def test_a_piece_is_copied_at_once() -> None:
    layout, state = make([("u8", 10), ("u8", 20)])
    found = Collected()
    assembler = ChunkAssembler(SIZE, required(layout), found.emit)
    expected = {space: bits.copy() for space, bits in state.items()}
    for entry in layout.tensors:
        assembler.feed(entry.space, entry.start, entry.n_elements, reader(state, entry.space, entry.start))
        state["u8"][entry.start : entry.stop] = 0
    found.assert_all(expected)
