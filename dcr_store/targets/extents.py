"""Which memory tensors take, and whether two share any: for targets whose tensors the caller owns.

Exact for every pair; of a single tensor that walks its memory in an odd order it may say that elements overlap where
they do not. Reads no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import torch

_MAX_WORK: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of one tensor.

    Attributes
    ----------
    device : str
        Where it is.
    address : int
        Of its first element.
    shape, strides : tuple of int
        Strides in bytes; dimensions of size 1 are left out.
    itemsize : int
        Bytes of one value.
    """

    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def low(self) -> int:
        """The lowest address."""
        return self.address + sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True) if stride < 0
        )

    @property
    def high(self) -> int:
        """The address after the highest."""
        ends = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True) if stride > 0)
        return self.address + ends + self.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether two of its elements may be the same memory, as in an expanded tensor."""
        reach = self.itemsize
        for stride, size in sorted((abs(stride), size) for size, stride in zip(self.shape, self.strides, strict=True)):
            if stride < reach:
                return True
            reach += (size - 1) * stride
        return False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What NumPy needs to compare addresses; nobody looks at what is there."""
        return {
            "version": 3,
            "data": (self.address, True),
            "shape": (*self.shape, self.itemsize),
            "strides": (*self.strides, 1),
            "typestr": "|u1",
        }


def extent_of(tensor: np.ndarray[Any, Any] | torch.Tensor) -> Extent | None:
    """Return the memory of a tensor, None if it has no values."""
    if isinstance(tensor, np.ndarray):
        device, address, itemsize = "cpu", tensor.ctypes.data, tensor.itemsize
        strides = tensor.strides
    else:
        device, address, itemsize = str(tensor.device), tensor.data_ptr(), tensor.itemsize
        strides = tuple(stride * itemsize for stride in tensor.stride())
    shape = tuple(int(size) for size in tensor.shape)
    if math.prod(shape) == 0:
        return None
    kept = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    return Extent(device, address, tuple(size for size, _ in kept), tuple(stride for _, stride in kept), itemsize)


def overlapping(extents: Mapping[str, Extent]) -> Iterator[tuple[str, str]]:
    """Yield the names of each two extents that share memory, in the order of their addresses."""
    reaching: list[tuple[str, Extent]] = []
    for name, extent in sorted(extents.items(), key=lambda item: (item[1].device, item[1].low)):
        reaching = [(n, e) for n, e in reaching if e.device == extent.device and e.high > extent.low]
        yield from ((other, name) for other, e in reaching if _share(e, extent))
        reaching.append((name, extent))


def _share(a: Extent, b: Extent) -> bool:
    try:
        return np.shares_memory(np.asarray(a), np.asarray(b), max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
