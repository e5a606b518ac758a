"""Live tensors as a target: which are accepted, what is refused by name, what a chunk of them is."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch

from dcr_store.codec import kernels
from dcr_store.errors import InvalidInputError
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.ports import ScatterTarget
from dcr_store.targets import live_tensor
from dcr_store.targets.state_dict import StateDictTarget, state_target, tensors_of

SIZE = 64


def layout(*rows: tuple[str, str, tuple[int, ...]], aliases: dict[str, str] | None = None) -> Layout:
    builder = LayoutBuilder()
    for row in rows:
        builder.add(*row)
    for alias, of in (aliases or {}).items():
        builder.add_alias(alias, of)
    return builder.build()


LAYOUT = layout(("a", "F32", (3, 4)), ("b", "BF16", (5,)), ("empty", "F32", (0, 2)), aliases={"tied": "a"})


def state() -> dict[str, Any]:
    return {"a": torch.zeros(3, 4), "b": np.zeros(5, ml_dtypes.bfloat16), "empty": torch.zeros(0, 2)}


def refusal(tensors: object, of: Layout = LAYOUT) -> str:
    with pytest.raises(InvalidInputError) as error:
        state_target(tensors, of, SIZE)
    return str(error.value)


def test_tensors_that_do_not_fit_are_named() -> None:
    given = state()
    del given["empty"]
    given |= {
        "b": np.zeros(6, np.float16),
        "other": torch.zeros(2),
        "tied": torch.zeros(4, 3),
    }
    assert refusal(given) == (
        "the tensors are not those of the version; nothing was written: missing here: 'empty'; "
        "not in the version (give a mapping without them): 'other'; of another dtype or shape: "
        "'tied', which has dtype F32 and shape (4, 3) here, F32 and (3, 4) there, "
        "'b', which has dtype F16 and shape (6,) here, BF16 and (5,) there"
        f" (expected {len(state())} tensors as in the version, found 4 that are not, {len(given)} in all)"
    )
    many = layout(*[(f"t{number}", "F32", (1,)) for number in range(9)])
    assert "missing here: 't0', 't1', 't2', 't3', 't4' and 4 more" in refusal({}, many)


@pytest.mark.parametrize("tensor", [None, 3.0, [1.0], "text", np.array([object()]), torch.zeros(3, device="meta")])
def test_what_is_no_tensor_is_named(tensor: object) -> None:
    assert refusal({**state(), "b": tensor}).startswith("b: ")
    assert refusal({**state(), "other": tensor}).startswith("other: ")


def test_what_holds_no_tensors() -> None:
    for target in (None, 3, "text", [torch.zeros(3)], torch.zeros(3)):
        with pytest.raises(InvalidInputError, match="holds no tensors by name"):
            tensors_of(target)


def test_expanded_tensors_are_refused() -> None:
    assert "several of its elements are the same memory (give contiguous tensors): 'a'" in refusal(
        {**state(), "a": torch.zeros(1, 4).expand(3, 4)}
    )


def test_memory_that_two_tensors_of_the_version_share_is_refused() -> None:
    two = layout(("a", "F32", (4,)), ("b", "F32", (4,)))
    flat = torch.zeros(8)
    state_target({"a": flat[:4], "b": flat[4:]}, two, SIZE)
    assert "(untie them): 'a' and 'b'" in refusal({"a": flat[:4], "b": flat[:4]}, two)
    assert "(untie them): 'a' and 'b'" in refusal({"a": flat[:4], "b": flat[3:7]}, two)
    assert "(untie them): 'b' and 'a'" in refusal({"b": flat[:4].numpy(), "a": flat[3:7]}, two)
    # Tied here and in the version, but not as one view.
    square = torch.zeros(3, 3)
    assert "(untie them)" in refusal({"a": square, "b": square.t()}, layout(("a", "F32", (3, 3)), aliases={"b": "a"}))


def chunk(target: StateDictTarget, space: str = "u32", number: int = 0) -> np.ndarray:
    out = np.full(SIZE, 77, f"u{int(space[1:]) // 8}")
    target.read_chunk(space, number, out)
    return out


def test_copies_are_all_written_and_differing_ones_are_nobodys() -> None:
    a, tied = torch.zeros(3, 4), np.zeros((3, 4), np.float32)
    target = state_target({**state(), "a": a, "tied": tied}, LAYOUT, SIZE)
    bits = np.arange(SIZE, dtype=np.uint32)
    target.write_chunk("u32", 0, bits)
    assert a.view(torch.int32).reshape(-1).tolist() == list(range(12))
    assert tied.view(np.uint32).reshape(-1).tolist() == list(range(12))
    assert chunk(target)[:12].tolist() == list(range(12))
    assert not chunk(target)[12:].any(), "no tensor is there"
    tied[1, 1] = 5
    found = chunk(target)
    found[5] = 5  # whatever a version has in that place, these are not its bits
    assert found[:12].tolist() != bits[:12].tolist()


@pytest.mark.parametrize("is_on_host", [True, False])
def test_further_names_of_tied_memory_are_written_once(is_on_host: bool) -> None:
    a = torch.zeros(3, 4)
    with patch.object(live_tensor, "is_on_host", lambda tensor: is_on_host):
        target = state_target({**state(), "a": a, "tied": a.view(3, 4), "head": a}, LAYOUT, SIZE)
    assert isinstance(target, ScatterTarget)
    target.xor_chunk("u32", 0, np.array([1], np.uint32), np.array([6], np.uint32))
    assert a.view(torch.int32).reshape(-1)[:3].tolist() == [0, 6, 0], "once, not twice"
    target.settle()


def test_only_memory_of_devices_is_far() -> None:
    assert not state_target(state(), LAYOUT, SIZE).is_far
    with patch.object(live_tensor, "is_on_host", lambda tensor: False):
        assert state_target(state(), LAYOUT, SIZE).is_far


@pytest.mark.parametrize(
    ("positions", "masks"),
    [
        (np.array([64], np.uint32), np.array([1], np.uint32)),
        (np.array([2**32 - 1], np.uint32), np.array([1], np.uint32)),
        (np.array([-1]), np.array([1], np.uint32)),
        (np.array([3, 3], np.uint32), np.array([1, 1], np.uint32)),
        (np.array([3, 2], np.uint32), np.array([1, 1], np.uint32)),
        (np.array([3, 4], np.uint32), np.array([1], np.uint32)),
        (np.array([3], np.uint32), np.array([1], np.uint16)),
    ],
)
@pytest.mark.parametrize("is_on_host", [True, False])
def test_positions_that_are_none_reach_no_tensor(positions: Any, masks: Any, is_on_host: bool) -> None:
    given = state()
    with patch.object(live_tensor, "is_on_host", lambda tensor: is_on_host):
        target = state_target(given, LAYOUT, SIZE)
    assert isinstance(target, ScatterTarget)
    with pytest.raises(InvalidInputError, match="cannot change elements of chunk 0"):
        target.xor_chunk("u32", 0, positions, masks)
    assert not given["a"].any()


@pytest.mark.parametrize("is_on_host", [True, False])
def test_elements_of_no_tensor_are_passed_over(is_on_host: bool) -> None:
    given = state()
    with patch.object(live_tensor, "is_on_host", lambda tensor: is_on_host):
        target = state_target(given, LAYOUT, SIZE)
    assert isinstance(target, ScatterTarget)
    target.xor_chunk("u32", 0, np.array([11, 12, 63], np.uint32), np.array([1, 2, 3], np.uint32))
    assert given["a"].view(torch.int32).reshape(-1).tolist() == [0] * 11 + [1]


@pytest.mark.parametrize("engine", ["numpy", "numba"])
@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("is_strided", [False, True])
def test_changes_reach_the_elements_that_they_are_of(is_on_host: bool, is_strided: bool, engine: str) -> None:
    """A tensor that begins in one chunk and ends in the third, after another one, changed chunk by chunk."""
    if engine == "numba":
        pytest.importorskip("numba")
    rng = np.random.default_rng(3)
    two = layout(("a", "I32", (5,)), ("b", "I32", (30, 5)))
    given = {"a": torch.zeros(5, dtype=torch.int32), "b": torch.zeros(30, 5, dtype=torch.int32)}
    if is_strided:
        given["b"] = torch.zeros(5, 30, dtype=torch.int32).t()
    with patch.object(live_tensor, "is_on_host", lambda tensor: is_on_host):
        target = state_target(given, two, SIZE)
    expected = np.zeros(3 * SIZE, np.uint32)
    kernels.use_engine(engine)
    try:
        for _ in range(2):
            for number in range(3):
                positions = np.flatnonzero(rng.random(SIZE) < 0.3).astype(np.uint32)
                masks = rng.integers(1, 1 << 32, len(positions), np.uint32)
                target.xor_chunk("u32", number, positions, masks)
                expected[number * SIZE + positions] ^= masks
    finally:
        kernels.use_engine("auto")
    for name, entry in ((entry.name, entry) for entry in two.tensors):
        found = given[name].contiguous().numpy().view(np.uint32).reshape(-1)
        np.testing.assert_array_equal(found, expected[entry.start : entry.stop])


# ---------------------------------------------------------------------- modules


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("cache", torch.ones(3), persistent=False)


def test_of_a_module_what_its_state_dict_has() -> None:
    model = Model()
    found = tensors_of(model)
    assert list(found) == list(model.state_dict())
    assert found["embed.weight"] is model.embed.weight
    assert "cache" not in found
    with_tie = layout(
        ("embed.weight", "F32", (7, 4)), ("norm.weight", "F32", (4,)), ("norm.bias", "F32", (4,)),
        ("norm.running_mean", "F32", (4,)), ("norm.running_var", "F32", (4,)),
        ("norm.num_batches_tracked", "I64", ()), ("table", "F64", (3,)),
    )  # fmt: skip
    target = state_target(model, with_tie, SIZE)
    target.write_chunk("u64", 0, np.arange(5, 5 + SIZE, dtype=np.uint64))
    assert model.norm.num_batches_tracked == 5
    assert model.table.view(torch.int64).tolist() == [13, 14, 15]
    target.write_chunk("u32", 0, np.arange(SIZE, dtype=np.uint32))
    assert model.head.weight.view(torch.int32)[0].tolist() == [0, 1, 2, 3]
    assert isinstance(model.embed.weight, torch.nn.Parameter)


def test_what_a_module_makes_up_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda module, found, prefix, metadata: found.update(weight=found["weight"].clone())
    )
    with pytest.raises(InvalidInputError, match="is made by the module when it is asked") as error:
        tensors_of(model)
    assert error.value.key == "weight"


class WithExtra(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"step": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nobody sets it")


def test_extra_state_that_is_no_tensor_is_not_ours() -> None:
    assert list(tensors_of(WithExtra(2, 2))) == ["weight", "bias"]


def test_lazy_and_meta_modules_are_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="no shape yet") as error:
        tensors_of(torch.nn.LazyLinear(3))
    assert error.value.key == "weight"
    with pytest.raises(InvalidInputError, match="meta tensor without data"):
        tensors_of(torch.nn.Linear(2, 3, device="meta"))


def test_packed_tensors_as_versions_are_read() -> None:
    packed = layout(("x", "F6_E2M3", (5,)), ("y", "F4", (2, 4)))
    x, y = np.zeros(4, np.uint8), torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    state_target({"x": x, "y": y}, packed, SIZE).write_chunk("u8", 0, np.arange(1, 1 + SIZE, dtype=np.uint8))
    assert x.tolist() == [1, 2, 3, 4]
    state_target({"x": x, "y": np.zeros(4, np.uint8)}, packed, SIZE)
    assert "'y', which has dtype U8 and shape (5,)" in refusal({"x": x, "y": np.zeros(5, np.uint8)}, packed)
