"""What a transaction is going to change in the baseline of slices, kept until its outcome is known.

The masks wait in the transaction's spool, each as it is shorter: so they never take more than the slices. Refuses
nothing but a full disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcr_store.layout.dtypes import Bits
from dcr_store.publish.slice_encoding import Difference, Positions
from dcr_store.publish.spool import ChunkSpool


@dataclass(frozen=True, slots=True)
class _Change:
    """What a piece of the baseline changes by: `n` positions and values, or, if None, a mask of the whole piece."""

    n: int | None
    dtype: np.dtype[Any]
    digest: int
    mask: int


class SliceChanges:
    """Changes by key of the slice and index of the piece; not for several threads at once."""

    def __init__(self, spool: ChunkSpool) -> None:
        self._spool = spool
        self._changes: dict[tuple[str, int], _Change] = {}

    def add(self, key: str, index: int, n_elements: int, found: Difference, mask: int) -> None:
        """Keep what a piece of so many elements changes by, once.

        Parameters
        ----------
        mask : int
            L of what changes, in the chunk.
        """
        n = len(found.positions)
        is_whole = n * (4 + found.masks.itemsize) >= n_elements * found.masks.itemsize
        if is_whole:
            whole: Bits = np.zeros(n_elements, found.masks.dtype)
            whole[found.positions] = found.masks
            data = whole.tobytes()
        else:
            data = found.positions.tobytes() + found.masks.tobytes()
        self._spool.put(_place(key), index, data)
        self._changes[key, index] = _Change(None if is_whole else n, found.masks.dtype, found.digest, mask)

    def marks(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield key and index of each piece that changes, its digest afterwards, and L of its mask in the chunk."""
        for (key, index), change in self._changes.items():
            yield key, index, change.digest, change.mask

    def changed(self) -> Iterator[tuple[str, int, Positions, Bits]]:
        """Yield key and index of each, packed positions, and ``base ^ new`` there, uintN of the same shape."""
        for (key, index), change in self._changes.items():
            data = self._spool.get(_place(key), index)
            assert data is not None
            if change.n is None:
                whole: Bits = np.frombuffer(data, change.dtype)
                positions = np.flatnonzero(whole).astype(np.uint32)
                yield key, index, positions, whole[positions]
            else:
                positions = np.frombuffer(data, np.uint32, change.n)
                yield key, index, positions, np.frombuffer(data, change.dtype, change.n, 4 * change.n)

    def clear(self) -> None:
        """Forget all; what the spool holds is its owner's to drop."""
        self._changes.clear()


def _place(key: str) -> str:
    return f"change {key}"
