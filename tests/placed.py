"""Tensors within larger memory, of any strides: what a caller may own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from dcr_store.layout.dtypes import DTYPES, n_elements, uint_dtype
from dcr_store.layout.tensors import as_bits, to_array

NUMPY = [name for name in DTYPES if not DTYPES[name].packed]
TORCH = [*NUMPY, "F4"]
Framework = Literal["numpy", "torch"]
FILLING = 1  # also a bool


@dataclass
class Placed:
    """A tensor and the memory around it, which nobody may touch.

    `outside` are the elements of `memory` that are not the tensor's.
    """

    tensor: Any
    memory: Any
    outside: np.ndarray

    @property
    def bits(self) -> np.ndarray:
        return as_bits("", self.tensor).bits

    def fill(self, bits: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
        """Set the bits, by what the framework itself does with its own integers."""
        other = to_array(bits, dtype, shape, "torch" if isinstance(self.tensor, torch.Tensor) else "numpy")
        if isinstance(self.tensor, torch.Tensor):
            itemsize = self.tensor.itemsize
            integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(itemsize, self.tensor.dtype)
            self.tensor.detach().view(integer).copy_(other.reshape(self.tensor.shape).view(integer))
        else:
            self.tensor[...] = other

    def assert_outside_untouched(self) -> None:
        found = as_bits("", self.memory).bits[self.outside]
        assert np.all(found == FILLING)


def place(
    dtype: str,
    shape: tuple[int, ...],
    framework: Framework,
    order: list[int] | None = None,
    steps: list[int] | None = None,
) -> Placed:
    """Return a tensor whose dimensions lie in memory in `order`, outermost first, with `steps` between neighbours.

    A negative step walks memory backwards, which torch cannot; an F4 tensor of torch has half of `shape[-1]`.
    """
    order = list(range(len(shape))) if order is None else order
    steps = [1] * len(shape) if steps is None else steps
    own = (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape
    strides, extent = [0] * len(own), 1
    for axis in reversed(order):
        strides[axis] = extent * steps[axis]
        extent *= own[axis] * abs(steps[axis]) or 1
    n_values = 3 + extent
    start = 1 - sum((size - 1) * stride for size, stride in zip(own, strides, strict=True) if stride < 0 and size)
    of_memory = (2 * n_values,) if dtype == "F4" else (n_values,)
    bits = np.full(n_elements(DTYPES[dtype], of_memory), FILLING, uint_dtype(DTYPES[dtype].space))
    memory = to_array(bits, dtype, of_memory, framework)
    if framework == "torch":
        tensor = memory.as_strided(own, strides, start)
    else:
        nbytes = [stride * memory.itemsize for stride in strides]
        tensor = np.ndarray(own, memory.dtype, memory, start * memory.itemsize, nbytes)
    taken = start + np.zeros(own, int)
    for axis, (size, stride) in enumerate(zip(own, strides, strict=True)):
        taken += (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(len(own))])
    outside = np.setdiff1d(np.arange(n_values), taken)
    per = 2 if dtype == "C128" else 1
    return Placed(tensor, memory, (outside[:, None] * per + np.arange(per)).reshape(-1))
