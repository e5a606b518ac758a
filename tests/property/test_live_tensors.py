"""Live tensors against a model: every dtype, any strides, on the host and by the way that memory of devices goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import NUMPY, TORCH, Framework, Placed, place

from dcr_store.errors import InvalidInputError
from dcr_store.layout.dtypes import DTYPES, n_elements, uint_dtype
from dcr_store.targets.extents import extent_of, overlapping
from dcr_store.targets.live_tensor import DeviceTensor, HostTensor, LiveTensor, boxes, live_tensor, torch_elements

Way = tuple[Framework, bool]
WAYS: list[Way] = [("numpy", False), ("torch", False), ("torch", True)]


def live(placed: Placed, by_device: bool) -> LiveTensor:
    if by_device:
        return DeviceTensor(torch_elements("a", placed.tensor))
    tensor = live_tensor("a", placed.tensor)
    assert isinstance(tensor, HostTensor)
    return tensor


def random_bits(dtype: str, n: int, rng: np.random.Generator) -> np.ndarray:
    uint = uint_dtype(DTYPES[dtype].space)
    bits = rng.integers(0, np.iinfo(uint).max, n, uint, endpoint=True)
    return bits & 1 if dtype == "BOOL" else bits


@st.composite
def shapes(draw: st.DrawFn, *, even: bool = False) -> tuple[int, ...]:
    shape = draw(st.lists(st.integers(1, 5), min_size=int(even), max_size=4))
    return (*shape[:-1], 2 * shape[-1]) if even else tuple(shape)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(WAYS))
def test_elements_are_read_and_changed_in_place(data: st.DataObject, way: Way) -> None:
    framework, by_device = way
    dtype = data.draw(st.sampled_from(NUMPY if framework == "numpy" else TORCH))
    shape = data.draw(shapes(even=dtype == "F4"))
    order = data.draw(st.permutations(range(len(shape))))
    signs = [1, 1, 2, 3] if framework == "torch" else [1, 1, 2, 3, -1, -2]
    steps = data.draw(st.lists(st.sampled_from(signs), min_size=len(shape), max_size=len(shape)))
    placed = place(dtype, shape, framework, order, steps)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n = n_elements(DTYPES[dtype], shape)
    model = random_bits(dtype, n, rng)
    placed.fill(model, dtype, shape)
    tensor = live(placed, by_device)
    for _ in range(data.draw(st.integers(1, 4))):
        first, last = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        action = data.draw(st.sampled_from(["read", "write", "xor"]))
        if action == "write":
            model[first:last] = random_bits(dtype, last - first, rng)
            tensor.write(first, last, model[first:last])
        if action == "xor" and first < last:
            positions = np.flatnonzero(rng.random(last - first) < 0.4).astype(np.uint32)
            masks = random_bits(dtype, len(positions), rng)
            model[first + positions] ^= masks
            tensor.xor(first, positions, masks)
        out = np.zeros(last - first, model.dtype)
        tensor.read(first, last, out)
        np.testing.assert_array_equal(out, model[first:last])
    np.testing.assert_array_equal(placed.bits, model)
    placed.assert_outside_untouched()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=5), st.data())
def test_boxes_are_the_range(shape: list[int], data: st.DataObject) -> None:
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, numbers.size)] * 2)))
    found = [numbers[box].reshape(-1) for box in boxes(shape, first, last)]
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *found]), np.arange(first, last))
    assert len(found) <= max(1, 2 * len(shape))


@pytest.mark.parametrize("by_device", [False, True])
def test_bools_of_other_bits_than_one_stay(by_device: bool) -> None:
    tensor = torch.tensor([2, 0, 255], dtype=torch.uint8).view(torch.bool)
    way = DeviceTensor(torch_elements("a", tensor)) if by_device else live_tensor("a", tensor)
    way.xor(0, np.array([0], np.uint32), np.array([1], np.uint8))
    assert tensor.view(torch.uint8).tolist() == [3, 0, 255]


@pytest.mark.parametrize("by_device", [False, True])
def test_leaves_that_require_gradients(by_device: bool) -> None:
    leaf = torch.nn.Parameter(torch.zeros(4))
    result = (leaf * leaf).sum()
    way = DeviceTensor(torch_elements("a", leaf)) if by_device else live_tensor("a", leaf)
    way.write(0, 4, np.ones(4, np.float32).view(np.uint32))
    assert leaf.tolist() == [1, 1, 1, 1]
    assert leaf.is_leaf
    assert leaf.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()  # gradients of old values by new ones: as after any other change in place
    (leaf * leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("by_device", [False, True])
def test_tensors_of_inference_mode(by_device: bool, mode: Any) -> None:
    with torch.inference_mode():
        inferred = torch.zeros(4, 4, dtype=torch.bfloat16)
    for tensor in (inferred, torch.zeros(4, 4, dtype=torch.bfloat16), inferred.t()):
        with mode():
            way = DeviceTensor(torch_elements("a", tensor)) if by_device else live_tensor("a", tensor)
            way.write(0, 3, np.array([1, 2, 3], np.uint16))
            way.xor(0, np.array([0], np.uint32), np.array([7], np.uint16))
            out = np.empty(4, np.uint16)
            way.read(0, 4, out)
        assert out.tolist() == [6, 2, 3, 0]


def test_memory_that_cannot_be_written_is_refused() -> None:
    read_only = np.zeros(3, np.float32)
    read_only.flags.writeable = False
    for tensor, words in (
        (read_only, "a read-only one"),
        (np.float32(3), "float32"),
        (np.zeros(3, ">f4"), "native byte order"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conjugated"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "negated"),
    ):
        with pytest.raises(InvalidInputError, match=words) as error:
            live_tensor("some.name", tensor)
        assert error.value.key == "some.name"


def test_which_memory_is_shared() -> None:
    flat = torch.zeros(100)
    square = torch.zeros(6, 6)
    array = square.numpy()
    tensors = {
        "q": flat[:40],
        "k": flat[40:60],
        "v": flat[59:],
        "even": square[:, ::2],
        "odd": array[:, 1::2],
        "columns": torch.zeros(3, 4).t(),
        "other": np.zeros(3),
    }
    extents = {name: extent for name, tensor in tensors.items() if (extent := extent_of(tensor)) is not None}
    assert list(overlapping(extents)) == [("k", "v")]
    extents["last"] = extent_of(square[:, -1])  # type: ignore[assignment]
    assert set(overlapping(extents)) == {("k", "v"), ("odd", "last")}
    assert not any(extent.overlaps_itself for extent in extents.values())


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.zeros(3, 1).expand(3, 4), True),
        (torch.zeros(1).expand(5), True),
        (torch.zeros(1).expand(1), False),
        (torch.zeros(()), False),
        (torch.zeros(9).as_strided((3, 3), (2, 1)), True),
        (torch.zeros(9).as_strided((3, 3), (3, 1)), False),
        (np.broadcast_to(np.zeros(3), (2, 3)), True),
        (np.zeros((4, 5), np.complex128)[::-2, ::-1].T, False),
        (np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (8, 8)), True),
    ],
)
def test_tensors_whose_elements_are_the_same_memory(tensor: Any, overlaps: bool) -> None:
    extent = extent_of(tensor)
    assert extent is not None
    assert extent.overlaps_itself == overlaps


def test_what_has_no_values_has_no_memory() -> None:
    assert extent_of(torch.zeros(0, 3)) is None
    assert extent_of(np.zeros((3, 0))) is None
