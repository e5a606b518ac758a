"""Affine maps found by running a framework's own exporter on tensors of known values.

An exporter turns a rank's slices, or those of all ranks, into canonical tensors. It runs a few times on numbers that
name each value of each slice, small enough for every dtype, and on values that expose arithmetic: what comes out
bit for bit in every run, and comes from where the numbers say, is moved, and the map is read off the numbers. All else
is residual, with a reason.

Pure, but for what the exporter does. Refuses exporters that give no tensors, a name twice, or other shapes each time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Box
from dcr_store.layout.dtypes import DTYPES, Bits, n_elements
from dcr_store.layout.read_off import read_off
from dcr_store.layout.tensors import as_bits, describe, to_array
from dcr_store.layout.trials import digits_of, n_digits, numbers_of, read_digits, trials, values_of

Slices = Mapping[str, Any]
Export = Callable[[Any], Iterable[tuple[str, Any]]]

_MAX_RANGES: Final = 1000


@dataclass(frozen=True, slots=True)
class Residual:
    """A range of a canonical tensor, in C order, that no slice's value is moved to, and why."""

    tensor: str
    start: int
    stop: int
    reason: str


@dataclass(frozen=True, slots=True)
class Discovery:
    """What an exporter does.

    Attributes
    ----------
    tensors : mapping of str to (str, tuple of int)
        Dtype and shape of each canonical tensor, in the order of the export.
    maps : tuple of mapping of str to AffineMap
        For each rank, its slices' maps; also of those that hold nothing of any tensor, but not of packed dtypes.
    residual : tuple of Residual
        What comes about otherwise; by tensor, ascending.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    maps: tuple[Mapping[str, AffineMap], ...]
    residual: tuple[Residual, ...]


def discover(export: Export, slices: Slices | Sequence[Slices]) -> Discovery:
    """Find what an exporter moves, and where to.

    Parameters
    ----------
    export : callable
        Takes what `slices` is, of the same shapes and dtypes but other values; returns, or yields, canonical names and
        tensors. Must not keep or change what it is given.
    slices : mapping of str to tensor, or sequence of them
        Those of one rank, or, where the exporter gathers from other ranks, of all. numpy arrays or torch tensors on
        the CPU, of which only shapes and dtypes are used.

    Raises
    ------
    InvalidInputError
        If the exporter gives a name twice, no tensors, or other tensors in another run; names the tensor.
    """
    return _Discoverer(export, slices).run()


@dataclass
class _Source:
    """One slice, and the numbers of its values among all of its dtype."""

    rank: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    framework: Literal["numpy", "torch"]
    start: int

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)


@dataclass
class _Output:
    """A canonical tensor, and what is known of each of its values so far."""

    dtype: str
    shape: tuple[int, ...]
    origins: NDArray[np.int64]  # number in the sources of its dtype, from 1; 0 none; -1 no number
    is_constant: NDArray[np.bool_]
    first: Bits = field(default_factory=lambda: np.zeros(0, np.uint8))


class _Discoverer:
    def __init__(self, export: Export, slices: Slices | Sequence[Slices]) -> None:
        self.export = export
        self.is_alone = isinstance(slices, Mapping)
        ranks: Sequence[Slices] = [slices] if isinstance(slices, Mapping) else slices
        self.n_ranks = len(ranks)
        self.sources: list[_Source] = []
        self.n_of: dict[str, int] = {}
        for rank, mine in enumerate(ranks):
            for name, tensor in mine.items():
                dtype, shape = describe(name, tensor)
                start = self.n_of.get(dtype, 0)
                framework: Literal["numpy", "torch"] = "numpy" if isinstance(tensor, np.ndarray) else "torch"
                self.sources.append(_Source(rank, name, dtype, shape, framework, start))
                self.n_of[dtype] = start + math.prod(shape)
        self.outputs: dict[str, _Output] = {}

    def run(self) -> Discovery:
        self._read_numbers()
        rng = np.random.default_rng(0)
        for values in trials(sorted(self.n_of), self.n_of, rng):
            self._compare(values)
        return self._result()

    # ------------------------------------------------------------------ runs

    def _exported(self, values: Mapping[str, Bits]) -> Iterator[tuple[str, str, tuple[int, ...], Bits]]:
        """Run the exporter on slices of these bits (by dtype, of all slices in turn)."""
        ranks: list[dict[str, Any]] = [{} for _ in range(self.n_ranks)]
        for source in self.sources:
            row = DTYPES[source.dtype]
            per = row.elements_per_value
            bits = values[source.dtype][per * source.start : per * (source.start + source.n_values)].copy()
            ranks[source.rank][source.name] = to_array(bits, source.dtype, source.shape, source.framework)
        seen: set[str] = set()
        with np.errstate(all="ignore"):  # overflows are on purpose
            exported = list(self.export(ranks[0] if self.is_alone else ranks))
        for name, tensor in exported:
            if name in seen:
                raise InvalidInputError("the exporter gives this tensor twice", key=name)
            seen.add(name)
            data = as_bits(name, tensor)
            yield name, data.dtype, data.shape, data.bits
        if self.outputs and seen != set(self.outputs):
            raise InvalidInputError(
                "the exporter gives other tensors in another run",
                key=min(seen ^ set(self.outputs)),
                expected=f"{len(self.outputs)} tensors",
                found=f"{len(seen)}",
            )

    def _read_numbers(self) -> None:
        """Number all values of all slices, from 1, digit by digit, and read the numbers that come out."""
        scales = {dtype: digits_of(dtype) for dtype in self.n_of}
        n_runs = max([1, *(n_digits(n, len(scales[dtype])) for dtype, n in self.n_of.items())])
        weight = dict.fromkeys(self.n_of, 1)
        outputs: dict[str, _Output] = {}
        for run in range(n_runs):
            values = {}
            for dtype, n in self.n_of.items():
                digits = scales[dtype]
                number = np.arange(1, n + 1, dtype=np.int64) // weight[dtype] % len(digits)
                values[dtype] = numbers_of(digits, dtype, number)
            for name, dtype, shape, bits in self._exported(values):
                if run == 0:
                    per = DTYPES[dtype].elements_per_value
                    n = 0 if DTYPES[dtype].packed else len(bits) // per
                    outputs[name] = _Output(dtype, shape, np.zeros(n, np.int64), np.ones(n, bool))
                output = outputs.get(name)
                self._require_same(output, name, dtype, shape)
                assert output is not None
                if dtype in scales:
                    digit = read_digits(scales[dtype], dtype, bits)
                    output.origins[digit < 0] = -1
                    is_number = output.origins >= 0
                    output.origins[is_number] += digit[is_number] * weight[dtype]
            if run == 0:
                self.outputs = outputs
            for dtype, digits in scales.items():
                if weight[dtype] <= self.n_of[dtype]:
                    weight[dtype] *= len(digits)
        for output in outputs.values():
            output.origins[output.origins > self.n_of.get(output.dtype, 0)] = -1

    def _require_same(self, output: _Output | None, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        if output is None or (output.dtype, output.shape) != (dtype, shape):
            raise InvalidInputError(
                "the exporter gives another tensor in another run",
                key=name,
                expected="nothing" if output is None else f"{output.dtype} {list(output.shape)}",
                found=f"{dtype} {list(shape)}",
            )

    def _compare(self, values: Mapping[str, Bits]) -> None:
        """Keep the numbers of those values that come out as they went in."""
        for name, dtype, shape, bits in self._exported(values):
            output = self.outputs.get(name)
            self._require_same(output, name, dtype, shape)
            assert output is not None
            if len(output.origins) == 0:
                continue
            found = values_of(bits, dtype)
            if len(output.first) == 0:
                output.first = bits.copy()
            output.is_constant &= (found == values_of(output.first, dtype)).all(1)
            if dtype in values:
                held = np.flatnonzero(output.origins > 0)
                given = values_of(values[dtype], dtype)[output.origins[held] - 1]
                output.origins[held[(found[held] != given).any(1)]] = -1

    # ------------------------------------------------------------------ what it says

    def _result(self) -> Discovery:
        boxes: dict[tuple[int, str], dict[str, list[Box]]] = {(s.rank, s.name): {} for s in self.sources}
        residual: list[Residual] = []
        for name, output in self.outputs.items():
            found = self._boxes(output)
            if found is None:
                if n := n_elements(DTYPES[output.dtype], output.shape):
                    residual.append(Residual(name, 0, n, self._why_not(output)))
                continue
            for key, items in found.items():
                boxes[key][name] = items
            residual += self._residual(name, output)
        tensors = {name: (output.dtype, output.shape) for name, output in self.outputs.items()}
        maps: tuple[dict[str, AffineMap], ...] = tuple({} for _ in range(self.n_ranks))
        for source in self.sources:
            mine = boxes[source.rank, source.name]
            full = {name: tensors[name][1] for name in mine}
            if not DTYPES[source.dtype].packed:
                maps[source.rank][source.name] = AffineMap.of(source.dtype, source.shape, full, mine)
        return Discovery(tensors, maps, tuple(residual))

    def _boxes(self, output: _Output) -> dict[tuple[int, str], list[Box]] | None:
        """Return the boxes of a tensor by rank and slice; None if it has too many parts."""
        if DTYPES[output.dtype].packed or np.count_nonzero(np.diff(output.origins > 0)) > 2 * _MAX_RANGES:
            return None
        there = np.flatnonzero(output.origins > 0)
        numbers = output.origins[there] - 1
        mine = [source for source in self.sources if source.dtype == output.dtype and source.n_values]
        starts = np.array([source.start for source in mine], np.int64)
        which = np.searchsorted(starts, numbers, side="right") - 1
        found = {}
        for index in np.unique(which).tolist():
            held = which == index
            items = read_off(numbers[held] - mine[index].start, there[held])
            if items is None:
                return None
            found[mine[index].rank, mine[index].name] = items
        return found

    def _residual(self, name: str, output: _Output) -> Iterator[Residual]:
        kinds = np.where(output.origins > 0, 0, np.where(output.is_constant, 1, 2))
        edges = np.flatnonzero(np.diff(kinds, prepend=-1))
        for start, stop in itertools.pairwise([*edges.tolist(), len(kinds)]):
            if kinds[start]:
                reason = "made from nothing" if kinds[start] == 1 else self._computed(output)
                yield Residual(name, start, stop, reason)

    def _why_not(self, output: _Output) -> str:
        if DTYPES[output.dtype].packed:
            return f"values of {output.dtype} are no whole bytes"
        if not (output.origins > 0).any():
            return self._computed(output)
        return "moved in too many parts"

    def _computed(self, output: _Output) -> str:
        if output.dtype not in self.n_of:
            return f"cast: no slice has the dtype {output.dtype}"
        return "computed: other bits than any slice has"
