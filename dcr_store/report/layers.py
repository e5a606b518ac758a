"""Which layer a tensor belongs to, and how much of each layer changed, by column. Pure.

A layer is what names begin with up to their first number (``model.layers.17``), else up to their last dot. Where there
are more layers than rows, neighbours share one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from dcr_store.layout.layout import Layout
from dcr_store.report.figures import Layer

N_ROWS: Final = 96
OTHERS: Final = "(other layers)"
_PART: Final = re.compile(r"[0-9]+|[^0-9]+")


def layer_of(name: str) -> str:
    """Return the layer of a tensor, by its name."""
    parts = name.split(".")
    for n, part in enumerate(parts, 1):
        if part.isdecimal() and part.isascii():
            return ".".join(parts[:n])
    return ".".join(parts[:-1]) or name


@dataclass(slots=True)
class _Row:
    first: str
    last: str
    n_layers: int = 0
    n_tensors: int = 0

    @property
    def name(self) -> str:
        return self.first if self.first == self.last else f"{self.first} … {self.last}"


class LayerTally:
    """Counts changes by layer of one layout, and by column.

    Parameters
    ----------
    layout : Layout
        Of the last version; layers that only others have are counted together.
    """

    def __init__(self, layout: Layout, n_columns: int) -> None:
        tensors: dict[str, int] = {}
        for entry in layout.tensors:
            if entry.n_elements:
                layer = layer_of(entry.name)
                tensors[layer] = tensors.get(layer, 0) + 1
        # Files list their tensors by name, "layers.10" before "layers.2".
        names = sorted(tensors, key=_natural)
        n_rows = min(len(names), N_ROWS)
        self._rows: list[_Row] = []
        self._row_of: dict[str, int] = {}
        for row in range(n_rows):
            its = names[row * len(names) // n_rows : (row + 1) * len(names) // n_rows]
            self._rows.append(_Row(its[0], its[-1], len(its), sum(tensors[name] for name in its)))
            self._row_of.update(dict.fromkeys(its, row))
        self._rows.append(_Row(OTHERS, OTHERS))
        self._changed = np.zeros((n_rows + 1, n_columns), np.int64)
        self._elements = np.zeros((n_rows + 1, n_columns), np.int64)
        self._known: tuple[Layout, dict[str, int]] | None = None

    def add(self, column: int, layout: Layout, changed: Mapping[str, int]) -> None:
        """Count one version of a column: how many elements changed of each tensor of its layout."""
        rows = self._rows_of(layout)
        for entry in layout.tensors:
            self._elements[rows[entry.name], column] += entry.n_elements
        for name, n in changed.items():
            self._changed[rows[name], column] += n

    def _rows_of(self, layout: Layout) -> dict[str, int]:
        """Return the row of each tensor; most versions have the layout of the one before."""
        if self._known is None or self._known[0] is not layout:
            rest = len(self._rows) - 1
            rows = {entry.name: self._row_of.get(layer_of(entry.name), rest) for entry in layout.tensors}
            self._known = layout, rows
        return self._known[1]

    def result(self) -> tuple[Layer, ...]:
        """Return the layers in the order of their names, numbers by size; nothing if no version was counted."""
        layers = []
        for row, changed, elements in zip(self._rows, self._changed.tolist(), self._elements.tolist(), strict=True):
            if sum(elements):
                rates = tuple(part / whole if whole else None for part, whole in zip(changed, elements, strict=True))
                layers.append(Layer(row.name, row.n_layers, row.n_tensors, sum(changed), sum(elements), rates))
        return tuple(layers)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    parts = _PART.findall(name)
    # Of a number of thousands of digits int() makes none.
    return [(False, int(part), "") if part[0] in "0123456789" and len(part) < 20 else (True, 0, part) for part in parts]
