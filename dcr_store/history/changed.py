"""What a comparison of two versions tells, by tensor, by module and as a table. Frozen values with ``to_json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import InvalidInputError
from dcr_store.history.rows import Row

Status = Literal["changed", "same", "added", "removed", "altered"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Which way and how far values went. Of complex dtypes real and imaginary parts are counted apart.

    Attributes
    ----------
    up, down : int
        Values that became larger, and smaller.
    largest_ulp : int
        The largest change in units of last place; 0 if nothing changed.
    steps : tuple of int
        How many changes were from ``2**k`` up to below ``2**(k + 1)`` units of last place, for k from 0, without the
        zeros at the end.
    """

    up: int
    down: int
    largest_ulp: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor.

    Attributes
    ----------
    status : str
        ``changed``, ``same``, ``added``, ``removed`` or ``altered`` (another dtype or shape).
    elements, changed : int
        All elements, and those whose bits differ.
    nbytes : int
        What the change of this tensor takes, encoded.
    measured : Measured or None
        None for packed dtypes, where nothing can be compared, and where only counts were asked for.
    rows_changed : int or None
        Rows (indices of the first dimension) with a change; None where nothing can be compared, and for packed dtypes
        whose rows do not begin with a byte.
    top_rows : tuple of Row
        The rows that changed most, most first, each with the number of its elements that differ.
    """

    name: str
    status: Status
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    nbytes: int
    measured: Measured | None
    rows_changed: int | None
    top_rows: tuple[Row, ...]

    @property
    def rate(self) -> float:
        """``changed / elements``; 0 for a tensor without any."""
        return _rate(self.changed, self.elements)

    @property
    def largest_ulp(self) -> int | None:
        """The largest change in units of last place, if it was measured."""
        return None if self.measured is None else self.measured.largest_ulp

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "status": self.status,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "elements": self.elements,
            "changed": self.changed,
            "rate": self.rate,
            "nbytes": self.nbytes,
            **_measured_json(self.measured),
            "rows_changed": self.rows_changed,
            "top_rows": [{"row": item.row, "changed": item.changed} for item in self.top_rows],
        }


@dataclass(frozen=True, slots=True)
class ModuleDiff:
    """The tensors of one module, together.

    Attributes
    ----------
    name : str
        What the names of its tensors begin with, up to a dot; empty for names without one.
    n_tensors, n_changed : int
        Its tensors, and those that are not the same.
    measured : Measured or None
        Sums over its tensors; None unless all that could be compared were measured, and one at least.
    """

    name: str
    n_tensors: int
    n_changed: int
    elements: int
    changed: int
    nbytes: int
    measured: Measured | None

    @property
    def rate(self) -> float:
        """``changed / elements``; 0 for a module without any."""
        return _rate(self.changed, self.elements)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "n_tensors": self.n_tensors,
            "n_changed": self.n_changed,
            "elements": self.elements,
            "changed": self.changed,
            "rate": self.rate,
            "nbytes": self.nbytes,
            **_measured_json(self.measured),
        }


@dataclass(frozen=True, slots=True)
class Diff:
    """All tensors of two versions, in the order of the second; removed ones last."""

    a: str
    b: str
    tensors: list[TensorDiff]

    @property
    def changed(self) -> int:
        """Elements that differ."""
        return sum(item.changed for item in self.tensors)

    @property
    def elements(self) -> int:
        """All elements."""
        return sum(item.elements for item in self.tensors)

    @property
    def measured(self) -> Measured | None:
        """Which way and how far the values of all tensors went; None if none was measured."""
        measured = [item.measured for item in self.tensors if item.measured is not None]
        return _joined(measured) if measured else None

    def modules(self, depth: int | None = None) -> list[ModuleDiff]:
        """Return the tensors by module, in the order in which these come first.

        Parameters
        ----------
        depth : int, optional
            How many parts of the names, which dots separate, name a module: 2 for ``model.layers``. By default all but
            the last.

        Raises
        ------
        InvalidInputError
            If `depth` is no such number.
        """
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise InvalidInputError("is no depth of modules", key="depth", expected="1 or more", found=depth)
        found: dict[str, list[TensorDiff]] = {}
        for item in self.tensors:
            found.setdefault(".".join(item.name.split(".")[:-1][:depth]), []).append(item)
        return [_module(name, tensors) for name, tensors in found.items()]

    def to_table(self) -> dict[str, NDArray[Any]]:
        """Return the tensors as columns of one length, for ``pandas.DataFrame`` or NumPy.

        Returns
        -------
        dict of str to ndarray, shape (n_tensors,)
            ``name``, ``status``, ``dtype`` and ``shape`` (tuples) of objects; ``elements``, ``changed`` and ``nbytes``
            of int64; ``rate`` of float64; ``rows_changed``, ``up``, ``down``, ``largest_ulp`` and, for each power of
            two up to the largest change, ``ulp_1``, ``ulp_2``, ``ulp_4``, … of float64, NaN where there is no number.
        """
        measured = [item.measured for item in self.tensors]
        shapes = np.empty(len(self.tensors), object)
        shapes[:] = [item.shape for item in self.tensors]
        table: dict[str, NDArray[Any]] = {
            "name": np.array([item.name for item in self.tensors], object),
            "status": np.array([item.status for item in self.tensors], object),
            "dtype": np.array([item.dtype for item in self.tensors], object),
            "shape": shapes,
            "elements": np.array([item.elements for item in self.tensors], np.int64),
            "changed": np.array([item.changed for item in self.tensors], np.int64),
            "rate": np.array([item.rate for item in self.tensors], np.float64),
            "nbytes": np.array([item.nbytes for item in self.tensors], np.int64),
            "rows_changed": _floats(item.rows_changed for item in self.tensors),
            "up": _floats(None if item is None else item.up for item in measured),
            "down": _floats(None if item is None else item.down for item in measured),
            "largest_ulp": _floats(None if item is None else item.largest_ulp for item in measured),
        }
        for k in range(max((len(item.steps) for item in measured if item is not None), default=0)):
            table[f"ulp_{1 << k}"] = _floats(None if item is None else _at(item.steps, k) for item in measured)
        return table

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "a": self.a,
            "b": self.b,
            "changed": self.changed,
            "elements": self.elements,
            "tensors": [item.to_json() for item in self.tensors],
        }


def _module(name: str, tensors: Sequence[TensorDiff]) -> ModuleDiff:
    compared = [item for item in tensors if item.status in ("changed", "same")]
    measured = [item.measured for item in compared if item.measured is not None]
    return ModuleDiff(
        name,
        len(tensors),
        sum(item.status != "same" for item in tensors),
        sum(item.elements for item in tensors),
        sum(item.changed for item in tensors),
        sum(item.nbytes for item in tensors),
        _joined(measured) if measured and len(measured) == len(compared) else None,
    )


def _joined(measured: Sequence[Measured]) -> Measured:
    return Measured(
        sum(item.up for item in measured),
        sum(item.down for item in measured),
        max(item.largest_ulp for item in measured),
        tuple(map(sum, zip_longest(*(item.steps for item in measured), fillvalue=0))),
    )


def _measured_json(measured: Measured | None) -> dict[str, Any]:
    if measured is None:
        return dict.fromkeys(("up", "down", "largest_ulp", "steps"))
    return {
        "up": measured.up,
        "down": measured.down,
        "largest_ulp": measured.largest_ulp,
        "steps": list(measured.steps),
    }


def _rate(changed: int, elements: int) -> float:
    return changed / elements if elements else 0.0


def _at(steps: Sequence[int], k: int) -> int:
    return steps[k] if k < len(steps) else 0


def _floats(values: Iterable[int | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)
