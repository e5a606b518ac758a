"""Rows of tensors: what one index of the first dimension selects. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_store.layout.dtypes import DTYPES
from dcr_store.layout.entry import TensorEntry


class Row(NamedTuple):
    """A row, and how many of its elements changed."""

    row: int
    changed: int


def row_elements(entry: TensorEntry) -> int | None:
    """Return how many elements a row takes; None where rows of a packed dtype do not begin with a byte.

    A tensor without dimensions is one row.
    """
    n_rows = entry.shape[0] if entry.shape else 1
    dtype = DTYPES[entry.dtype]
    if dtype.packed and n_rows > 1 and int(np.prod(entry.shape[1:], dtype=object)) * dtype.bits % 8:
        return None
    return entry.n_elements // n_rows if n_rows else 0


class RowTally:
    """Counts changes by row, of positions that come in order; keeps the rows that changed most.

    Parameters
    ----------
    per_row : int
        Elements of a row.
    n_top : int
        How many rows to keep.

    Attributes
    ----------
    n_changed : int
        Rows with a change.
    """

    def __init__(self, per_row: int, n_top: int) -> None:
        self._per_row, self._n_top = per_row, n_top
        self._rows = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._last = -1
        self.n_changed = 0

    def add(self, positions: NDArray[np.int64]) -> None:
        """Count elements that changed: ascending, and beyond those before."""
        if not len(positions):
            return
        rows, counts = np.unique(positions // self._per_row, return_counts=True)
        self.n_changed += len(rows) - int(rows[0] == self._last)
        # The last row may go on: it is kept whatever its count is.
        if rows[0] == self._last:
            counts[0] += self._counts[-1]
            self._rows, self._counts = self._rows[:-1], self._counts[:-1]
        self._last = int(rows[-1])
        rows, counts = np.concatenate([self._rows, rows]), np.concatenate([self._counts, counts])
        best = np.lexsort((rows[:-1], -counts[:-1]))[: self._n_top]
        self._rows, self._counts = np.append(rows[best], rows[-1]), np.append(counts[best], counts[-1])

    def top(self) -> tuple[Row, ...]:
        """Return the rows that changed most, most first; of equal ones the first rows."""
        best = np.lexsort((self._rows, -self._counts))[: self._n_top]
        return tuple(Row(int(self._rows[at]), int(self._counts[at])) for at in best)
