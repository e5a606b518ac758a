"""What broke for users of other systems, where it touches live tensors. The docstrings say what happened there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import dcr_store
from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.layout.layout import LayoutBuilder
from dcr_store.layout.tensors import as_bits
from dcr_store.ports import ScatterTarget
from dcr_store.receive import patches
from dcr_store.receive.memory_bringer import StateDictBringer
from dcr_store.store import Store
from dcr_store.targets import live_tensor
from dcr_store.targets.state_dict import state_target

SIZE = 64
BEYOND = (1 << 31) + 70_000


@pytest.fixture
def store() -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=SIZE) as store:
        yield store


@pytest.fixture(params=["host", "device"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Tensors of torch as they are, or as if their memory were a device's."""
    with patch.object(live_tensor, "is_on_host", lambda tensor: request.param == "host"):
        yield request.param


def commit(store: Store, state: dict[str, Any]) -> None:
    with store.begin() as transaction:
        for name, tensor in state.items():
            transaction.write(name, tensor)


def bits(tensor: Any) -> list[int]:
    return [int(value) for value in as_bits("", tensor).bits]


def bf16(patterns: list[int]) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


# Zeros of both signs, quiet and signalling NaNs of several payloads and signs, infinities.
PATTERNS = [0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x7F81, 0xFFC0, 0xFF81, 0x7F80, 0xFF80, 0x0001]


@pytest.mark.parametrize("shift", [1, 3])
def test_08_09_nans_and_zeros_of_both_signs_are_bits(store: Store, shift: int) -> None:
    """A weight that became NaN was skipped (NaN as "unchanged"); -0.0 against +0.0 compared equal."""
    new = PATTERNS[shift:] + PATTERNS[:shift]
    filling = [0x3F80] * 300  # so that little of it changes
    for patterns in (PATTERNS, new):
        commit(store, {"w": bf16(patterns + filling)})
    live = bf16(PATTERNS + filling)
    bringer = StateDictBringer({"w": live})
    assert bringer.held(store._catalog) is not None
    bringer.bring(store._catalog, store._catalog.resolve("main@1"), None)
    assert bits(live) == new + filling
    (item,) = store.patches("main@0", framework="torch")
    assert item.indices.tolist() == list(range(10))
    assert bits(item.values) == new


class Far:
    """Chunks of a tensor of which only the last one is not zeros, of two versions."""

    def __init__(self, chunk_elements: int) -> None:
        self._zeros = np.zeros(chunk_elements, np.uint8)

    def of_base(self, places: Any) -> Any:
        return dict.fromkeys(places, self._zeros)

    def of_goal(self, places: Any, base: Any) -> Any:
        new = self._zeros.copy()
        new[[0, 5]] = 1, 2
        return dict.fromkeys(places, new)


def test_10_positions_beyond_32_bits(way: str) -> None:
    """32-bit positions wrapped for tensors over 4 GiB, or 2^31 elements."""
    builder = LayoutBuilder()
    builder.add("large", "U8", (BEYOND // 1000, 1000))
    layout = builder.build()
    memory = np.zeros((BEYOND // 1000, 1000), np.uint8)  # of which pages that nobody touches take no room
    n = 1 << 16
    target = state_target({"large": torch.from_numpy(memory)}, layout, n)
    flat, last = memory.reshape(-1), (BEYOND - 1) // n - 1
    whole = np.arange(n).astype(np.uint8)
    target.write_chunk("u8", last, whole)
    found = np.empty(n, np.uint8)
    target.read_chunk("u8", last, found)
    assert np.array_equal(found, whole)
    assert np.array_equal(flat[last * n : (last + 1) * n], whole)
    if way == "device":
        assert isinstance(target, ScatterTarget)
        target.xor_chunk("u8", last, np.array([7, n - 1], np.uint32), np.array([1, 2], np.uint8))
        assert (flat[last * n + 7], flat[last * n + n - 1]) == (7 ^ 1, 255 ^ 2)
    assert not flat[:n].any(), "nothing wrapped round to the front"
    assert not flat[last * n - (1 << 31) : last * n - (1 << 31) + n].any()
    gather = patches._Gather(layout, layout, n, Far(n), "torch")  # type: ignore[arg-type]
    found_patches = [*gather.compare([("u8", last)]), *gather.finish()]
    assert found_patches[0].indices.dtype == torch.int64
    assert found_patches[0].indices.tolist() == [last * n, last * n + 5]
    gather = patches._Gather(layout, layout, n, Far(n), "numpy")  # type: ignore[arg-type]
    found_patches = [*gather.compare([("u8", 100)]), *gather.finish()]
    assert found_patches[0].indices.dtype == np.int32, "where all of them fit"


def test_11_a_tensor_under_two_names_is_changed_once(store: Store) -> None:
    """A tensor exported by two pipeline stages was XORed twice."""
    tied = bf16([0x3F80] * 300)
    commit(store, {"embed": tied, "head": tied})
    live = tied.clone()
    bringer = StateDictBringer({"embed": live, "head": live, "model.head": live})
    tied[7] = 2.0
    commit(store, {"embed": tied, "head": tied})
    assert bringer.held(store._catalog) is not None
    outcome = bringer.bring(store._catalog, store._catalog.resolve("main"), None)
    assert (outcome.chunks_written, outcome.chunks_healed) == (1, 0)
    assert bits(live) == bits(tied)


def test_12_15_the_version_moves_only_with_the_bits_and_one_failure_wedges_nothing(store: Store) -> None:
    """The version moved although apply had failed; one failed apply wedged the receiver until restart."""
    states = [bf16([0x3F80 + i] * 300) for i in range(3)]
    for state in states:
        commit(store, {"w": state})
    live = states[0].clone()
    catalog = store._catalog
    bringer = StateDictBringer({"w": live})
    bringer.bring(catalog, catalog.resolve("main@0"), None)

    def refuse(item: Any) -> bytes:
        raise StorageError("does not answer", key=item.key)

    for _ in range(3):
        with pytest.raises(StorageError):
            bringer.bring(catalog, catalog.resolve("main@2"), refuse)
        held = bringer.held(catalog)
        assert held is not None
        assert held.name == "main@0", "told by the bits"
    bringer.bring(catalog, catalog.resolve("main@2"), None)
    assert bits(live) == bits(states[2])


def test_18_tensors_that_are_not_contiguous(store: Store) -> None:
    """Non-contiguous tensors were written as if contiguous."""
    first = torch.arange(6 * 70, dtype=torch.float32).reshape(6, 70)
    second = first.clone()
    second[2, 3] = 9
    for state in (first, second):
        commit(store, {"w": state})
    memory = torch.full((140, 6), 7.0)
    views = {"w": memory[::2].t()}
    assert not views["w"].is_contiguous()
    views["w"].copy_(first)
    store.load_into(views)
    assert torch.equal(views["w"], second)
    assert torch.all(memory[1::2] == 7), "what lies between was not touched"


def test_19_indices_out_of_range_reach_no_tensor() -> None:
    """Out-of-range indices reached the device."""
    builder = LayoutBuilder()
    builder.add("w", "F32", (3, 4))
    live = torch.zeros(3, 4)
    with patch.object(live_tensor, "is_on_host", lambda tensor: False):
        target = state_target({"w": live}, builder.build(), SIZE)
    assert isinstance(target, ScatterTarget)
    for position in (SIZE, 2**32 - 1):
        with pytest.raises(InvalidInputError, match="ascending positions below 64"):
            target.xor_chunk("u32", 0, np.array([3, position], np.uint32), np.ones(2, np.uint32))
    target.xor_chunk("u32", 0, np.array([12, 63], np.uint32), np.ones(2, np.uint32))  # in the chunk, of no tensor
    assert not live.any()


def test_20_a_stale_copy_is_seen_and_absent_tensors_are_refused(store: Store) -> None:
    """Tied weights: one copy stale; absent tensors skipped in silence."""
    tied = bf16([0x3F80] * 300)
    commit(store, {"embed": tied, "head": tied, "norm": torch.ones(3)})
    state = {"embed": tied.clone(), "head": tied.clone(), "norm": torch.ones(3)}
    state["head"][5] = 9.0
    assert StateDictBringer(state).held(store._catalog) is None
    result = store.load_into(state)
    assert (result.chunks_written, result.chunks_healed) == (1, 1)
    assert bits(state["head"]) == bits(tied)
    del state["norm"]
    before = {name: bits(tensor) for name, tensor in state.items()}
    with pytest.raises(InvalidInputError, match="missing here: 'norm'"):
        store.load_into(state)
    assert before == {name: bits(tensor) for name, tensor in state.items()}
