"""What one tensor of the checkpoint undergoes on the way to a version, and the tensors that a loader gets for it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from dcr_store.layout.dtypes import Bits, uint_dtype, width
from dcr_store.layout.tensors import to_array
from dcr_store.targets.native.memory import integers, view_of

if TYPE_CHECKING:
    from dcr_store.layout.entry import TensorEntry
    from dcr_store.layout.layout import Layout


BATCH_NBYTES: Final = 256 << 20
"""Values are read in batches of about so many bytes."""

Values = Callable[[Iterable[str]], Mapping[str, Bits]]
"""Returns the bits of tensors by name, as the module holds them or soon will."""


def named(layout: Layout) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the names that a loader is given, in this order: each tensor's, then its aliases."""
    for entry in layout.tensors:
        for name in (entry.name, *entry.aliases):
            yield name, entry


def batched(layout: Layout, wanted: Container[str], values: Values) -> Iterator[tuple[str, Bits | None]]:
    """Yield all names as ``named`` does, with the bits of those wanted, some of which are read at a time."""
    batch: list[str] = []
    nbytes = 0

    def read() -> Iterator[tuple[str, Bits | None]]:
        chosen = [name for name in batch if name in wanted]
        bits = values(chosen) if chosen else {}
        for name in batch:
            yield name, bits.get(name)

    for name, entry in named(layout):
        batch.append(name)
        nbytes += entry.n_elements * width(entry.space) if name in wanted else 0
        if nbytes >= BATCH_NBYTES:
            yield from read()
            batch, nbytes = [], 0
    yield from read()


@dataclass(frozen=True, slots=True)
class Changes:
    """Masks and overwrites of one tensor.

    Attributes
    ----------
    positions : ndarray of int32 or int64, shape (n,)
        Elements in row-major order, ascending.
    bits : ndarray of uintN, shape (n,)
        The mask there, or the new bits where `present`.
    present : ndarray of bool, shape (n,), or None
        Which are overwritten; None if none is.
    """

    positions: NDArray[np.integer[Any]]
    bits: Bits
    present: NDArray[np.bool_] | None

    def apply(self, bits: Bits) -> Bits:
        """Return a tensor's new bits; `bits` stays as it is."""
        new = bits.copy()
        if self.present is None:
            new[self.positions] ^= self.bits
        else:
            new[self.positions] = np.where(self.present, self.bits, new[self.positions] ^ self.bits)
        return new


def no_guise(entry: TensorEntry) -> str | None:
    """Return why no mask can stand for a tensor of this dtype, or None."""
    if entry.dtype == "BOOL":
        return "is bool: torch makes each true value 1 when it copies"
    if entry.dtype == "C128":
        return "is complex128: torch has no integers of that width"
    return None


def values_of(entry: TensorEntry, bits: Bits) -> torch.Tensor:
    """Return a tensor with these bits, which it owns alone."""
    tensor: torch.Tensor = to_array(bits.copy(), entry.dtype, entry.shape, "torch")
    return tensor


def dense_of(entry: TensorEntry, changes: Changes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the mask (or new bits) of all elements as integers in the tensor's shape, and where they are present."""
    dense = np.zeros(entry.n_elements, uint_dtype(entry.space))
    dense[changes.positions] = changes.bits
    guise: torch.Tensor = to_array(dense, entry.dtype, entry.shape, "torch")
    bits = as_integers(guise).to(device)
    if changes.present is None:
        return bits, None
    present = np.zeros(entry.n_elements, np.bool_)
    present[changes.positions] = changes.present
    return bits, torch.from_numpy(present).reshape(guise.shape).to(device)


@lru_cache(maxsize=1024)
def guise_of(entry: TensorEntry) -> torch.Tensor:
    """Return a meta tensor of the dtype and shape that a loader gets for a tensor."""
    untouched = np.zeros(entry.n_elements, uint_dtype(entry.space))  # memory that is never touched is never there
    guise: torch.Tensor = to_array(untouched, entry.dtype, entry.shape, "torch")
    return guise.to("meta")


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers of their width, in the same memory."""
    dtype = integers(tensor.itemsize)
    assert dtype is not None
    if tensor.is_meta:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
    return view_of(tensor, dtype)
