"""A state in memory, whole or a choice of its tensors, as a target.

Starts as zeros: the state before the first version. Refuses names that the layout does not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.targets.chunks import check_chunk


class MemoryTensor(NamedTuple):
    """A tensor of a `MemoryTarget`: dtype, shape in values, and its bits: uintN, shape (n_elements,), not a copy."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits


class MemoryTarget:
    """Tensors in memory; satisfies ``ports.Target``.

    Parameters
    ----------
    layout : Layout
        Of the state.
    chunk_elements : int
        Elements of a chunk.
    names : iterable of str, optional
        Names or aliases of the tensors to hold, all by default; elements of others are dropped and read as zeros, so
        that only chunks without them have the digest of a version.

    Raises
    ------
    NotFoundError
        If the layout has no tensor of a name.
    """

    def __init__(self, layout: Layout, chunk_elements: int, names: Iterable[str] | None = None) -> None:
        self.layout = layout
        self.chunk_elements = chunk_elements
        self._entries = {name: layout.entry(name) for name in (layout.names() if names is None else names)}
        self._bits: dict[str, Bits] = {}
        for entry in self._entries.values():
            if entry.name not in self._bits:
                self._bits[entry.name] = np.zeros(entry.n_elements, uint_dtype(entry.space))

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a chunk's current bits into `out`; zeros where no held tensor is."""
        start, stop = check_chunk(self.layout, space, chunk, out, self.chunk_elements, writable=True)
        out[:] = 0
        for entry, first, last, offset in self.layout.pieces(space, start, stop):
            held = self._bits.get(entry.name)
            if held is not None:
                out[offset : offset + last - first] = held[first:last]

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Overwrite a chunk; elements of no held tensor are dropped."""
        start, stop = check_chunk(self.layout, space, chunk, bits, self.chunk_elements)
        for entry, first, last, offset in self.layout.pieces(space, start, stop):
            held = self._bits.get(entry.name)
            if held is not None:
                held[first:last] = bits[offset : offset + last - first]

    def tensors(self) -> dict[str, MemoryTensor]:
        """Return the held tensors by name; aliases share the memory of their tensor."""
        return {
            name: MemoryTensor(entry.dtype, entry.shape, self._bits[entry.name])
            for name, entry in self._entries.items()
        }
