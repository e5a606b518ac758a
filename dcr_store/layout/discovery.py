"""Affine maps found by running a framework's own exporter on tensors of known values.

An exporter turns a rank's slices, or those of all ranks, into canonical tensors. It runs a few times on numbers that
name each value of each slice, small enough for every dtype, and on values that expose arithmetic: what comes out
bit for bit in every run, and comes from where the numbers say, is moved, and the map is read off the numbers. All else
is residual, with a reason.

Pure, but for what the exporter does. Refuses exporters that give no tensors, a name twice, or other shapes each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Box
from dcr_store.layout.dtypes import DTYPES, Bits, n_elements, n_values
from dcr_store.layout.read_off import read_off
from dcr_store.layout.reasons import COMPUTED, KEPT_BUT, MAX_RANGES, explained
from dcr_store.layout.tensors import as_bits, describe, to_array
from dcr_store.layout.trials import Digit, Kind, digits_of, kind_of, n_digits, ordinary, same_values, trials, values_of

Slices = Mapping[str, Any]
Export = Callable[[Any], Iterable[tuple[str, Any]]]


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
        What comes about otherwise; by tensor, ascending. A reason begins with ``cast``, ``added``, ``scaled``,
        ``computed``, ``made from nothing``, ``moved in too many parts`` or ``values of``.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    maps: tuple[Mapping[str, AffineMap], ...]
    residual: tuple[Residual, ...]


def discover(export: Export, slices: Slices | Sequence[Slices]) -> Discovery:
    """Find what an exporter moves, and where to.

    Parameters
    ----------
    export : callable
        Takes what `slices` is, of the same shapes and dtypes but other values; returns, or yields, pairs of canonical
        name and tensor, or returns a mapping. Must not keep or change what it is given.
    slices : mapping of str to tensor, or sequence of them
        Those of one rank, or, where the exporter gathers from other ranks, of all. numpy arrays, or torch tensors on
        any device, ``meta`` too: only shapes and dtypes are used. The exporter is given numpy arrays, or torch tensors
        on the CPU.

    Raises
    ------
    InvalidInputError
        If the exporter gives a name twice, no tensors, or other tensors in another run; names the tensor. If `slices`
        or what the exporter gives is something else.
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
        return n_values(DTYPES[self.dtype], self.shape)


@dataclass
class _Output:
    """A canonical tensor, and what is known of each of its values so far.

    Attributes
    ----------
    origins : ndarray of int64, shape (n_values,)
        Its number among the values of all slices of its dtype; negative if it is none's. Empty for a packed dtype.
    held : ndarray of int64 or None
        Which values have an origin; None: all.
    constants : ndarray of int64 or None
        Which have none, and were the same in each trial; None: not known before the second one.
    first : ndarray of uintN
        What came out in the first trial.
    lost : list of (str, ndarray of int64)
        Which values had an origin until a trial of this kind.
    """

    dtype: str
    shape: tuple[int, ...]
    origins: NDArray[np.int64]
    held: NDArray[np.int64] | None = None
    constants: NDArray[np.int64] | None = None
    first: Bits | None = None
    lost: list[tuple[Kind, NDArray[np.int64]]] = field(default_factory=list)

    def compare(self, kind: Kind, bits: Bits, given: Bits | None) -> None:
        """Keep the origins of those values that came out as they went in.

        Parameters
        ----------
        kind : str
            Of values.
        bits : ndarray of uintN
            What came out.
        given : ndarray of uintN or None
            What all slices of its dtype had; None if there are none, and so no origins.
        """
        found = values_of(bits, self.dtype)
        if given is not None and (self.held is None or len(self.held)):
            numbers = self.origins if self.held is None else self.origins[self.held]
            same = same_values(
                found if self.held is None else found[self.held], values_of(given, self.dtype)[numbers]
            )  # fmt: skip
            if not same.all():
                others = np.flatnonzero(~same) if self.held is None else self.held[~same]
                self.origins[others] = -1
                if (own := kind_of(kind, self.dtype)) in KEPT_BUT:
                    self.lost.append((own, others))
                self.held = np.flatnonzero(self.origins >= 0)
        if self.first is None:
            self.first = bits.copy()
            return
        before = values_of(self.first, self.dtype)
        if self.constants is None:
            # What has an origin has just been other than in the first trial, as all that is given was.
            self.constants = np.flatnonzero(same_values(found, before) & (self.origins < 0))
        elif len(self.constants):
            self.constants = self.constants[same_values(found[self.constants], before[self.constants])]

    @property
    def is_constant(self) -> NDArray[np.bool_]:
        found = np.zeros(len(self.origins), bool)
        found[self.constants] = True
        return found

    @property
    def has_computed(self) -> bool:
        """Whether any value has no origin and is no constant."""
        n_held = len(self.origins) if self.held is None else len(self.held)
        n_constant = 0 if self.constants is None else len(self.constants)
        return n_held + n_constant < len(self.origins)


def differs(export: Export, slices: Slices | Sequence[Slices], found: Discovery) -> str | None:
    """Return how an exporter differs from what was discovered, by one run on ordinary numbers; None if in nothing.

    Parameters
    ----------
    export, slices
        As of ``discover``.
    found : Discovery
        With a map for each of `slices` but those of packed dtypes, and for no other.

    Raises
    ------
    InvalidInputError
        If the exporter gives a name twice, or what is no tensor.
    """
    return _Discoverer(export, slices).differs(found)


def ranks_of(slices: Slices | Sequence[Slices]) -> Sequence[Slices]:
    """Return the slices of each rank; ``InvalidInputError`` for what is neither one rank's nor a sequence of them."""
    if isinstance(slices, Mapping):
        return [slices]
    found = type(slices).__name__
    if isinstance(slices, Sequence) and not isinstance(slices, str):
        others = [mine for mine in slices if not isinstance(mine, Mapping)]
        if not others:
            return slices
        found = f"{type(others[0]).__name__} in it"
    raise InvalidInputError(
        "are no slices; make a mapping of pairs, with dict(…)",
        key="slices",
        expected="a mapping of names to tensors, or a list of one for each rank",
        found=found,
    )


class _Discoverer:
    def __init__(self, export: Export, slices: Slices | Sequence[Slices]) -> None:
        if not callable(export):
            raise InvalidInputError(
                "is no exporter", key="export", expected="a function of slices", found=type(export).__name__
            )
        self.export = export
        self.is_alone = isinstance(slices, Mapping)
        ranks = ranks_of(slices)
        self.n_ranks = len(ranks)
        self.sources: list[_Source] = []
        self.n_of: dict[str, int] = {}
        for rank, mine in enumerate(ranks):
            for name, tensor in mine.items():
                dtype, shape = describe(name, tensor, may_be_meta=True)
                start = self.n_of.get(dtype, 0)
                framework: Literal["numpy", "torch"] = "numpy" if isinstance(tensor, np.ndarray) else "torch"
                self.sources.append(_Source(rank, name, dtype, shape, framework, start))
                self.n_of[dtype] = start + n_values(DTYPES[dtype], shape)
        self.outputs: dict[str, _Output] = {}
        self.reasons: Mapping[str, tuple[list[str], NDArray[np.int64]]] = {}

    def run(self) -> Discovery:
        self._read_numbers()
        rng = np.random.default_rng(0)
        for kind, values in trials(sorted(self.n_of), self.n_of, rng):
            self._compare(kind, values)
        computed = [name for name, output in self.outputs.items() if output.has_computed]
        self.reasons = explained(self._again, self.n_of, computed) if computed else {}
        return self._result()

    def differs(self, found: Discovery) -> str | None:
        """Return how the exporter differs from what was discovered."""
        rng = np.random.default_rng()
        values = {dtype: ordinary(dtype, n, rng) for dtype, n in self.n_of.items()}
        given: dict[str, list[tuple[Bits, tuple[Box, ...]]]] = {name: [] for name in found.tensors}
        for source in self.sources:
            if not DTYPES[source.dtype].packed:
                mine = values_of(values[source.dtype], source.dtype)[source.start : source.start + source.n_values]
                for name, boxes in found.maps[source.rank][source.name].boxes.items():
                    given[name].append((mine, boxes))
        names = []
        for name, dtype, shape, bits in self._exported(values):
            names.append(name)
            if found.tensors.get(name) != (dtype, shape):
                return f"{name} is {dtype} {list(shape)}"
            there = values_of(bits, dtype)
            for mine, boxes in given[name]:
                for item in boxes:
                    from_here, to_there = item.positions()
                    if not same_values(there[to_there], mine[from_here]).all():
                        return f"values of {name} are others"
        return None if names == list(found.tensors) else f"it gives {len(names)} tensors, in another order or others"

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
        for name, tensor in self._run(ranks[0] if self.is_alone else ranks):
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

    def _run(self, slices: Any) -> Iterator[tuple[str, Any]]:
        """Yield what the exporter gives, each tensor before the next is asked for: it may reuse its memory."""
        with np.errstate(all="ignore"):  # overflows are on purpose
            found = self.export(slices)
            if isinstance(found, str) or not isinstance(found, Iterable):
                raise _no_pairs(found)
            exported = iter(found.items() if isinstance(found, Mapping) else found)
        while True:
            with np.errstate(all="ignore"):
                item = next(exported, None)
            if item is None:
                return
            if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
                raise _no_pairs(item)
            yield item[0], item[1]

    def _read_numbers(self) -> None:
        """Number all values of all slices, from 1, digit by digit, and read the numbers that come out."""
        n_runs = max([1, *(n_digits(n + 1, len(digits_of(dtype))) for dtype, n in self.n_of.items())])
        weight = dict.fromkeys(self.n_of, 1)
        outputs: dict[str, _Output] = {}
        for run in range(n_runs):
            digits = {dtype: Digit(dtype, weight[dtype]) for dtype in self.n_of}
            values = {
                dtype: digits[dtype].shown(n + 1)[DTYPES[dtype].elements_per_value :] for dtype, n in self.n_of.items()
            }
            for name, dtype, shape, bits in self._exported(values):
                if run == 0:
                    n = 0 if DTYPES[dtype].packed else n_values(DTYPES[dtype], shape)
                    outputs[name] = _Output(dtype, shape, np.full(n, -1))
                output = outputs.get(name)
                self._require_same(output, name, dtype, shape)
                assert output is not None
                if dtype in digits and len(output.origins):
                    output.origins += digits[dtype].read(bits)
            if run == 0:
                self.outputs = outputs
            for dtype, n in self.n_of.items():
                if weight[dtype] <= n:
                    weight[dtype] *= len(digits[dtype].digits)
        for output in outputs.values():
            is_none = (output.origins < 0) | (output.origins >= self.n_of.get(output.dtype, 0))
            if is_none.any():
                output.origins[is_none] = -1
                output.held = np.flatnonzero(~is_none)

    def _require_same(self, output: _Output | None, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        if output is None or (output.dtype, output.shape) != (dtype, shape):
            raise InvalidInputError(
                "the exporter gives another tensor in another run",
                key=name,
                expected="nothing" if output is None else f"{output.dtype} {list(output.shape)}",
                found=f"{dtype} {list(shape)}",
            )

    def _again(self, values: Mapping[str, Bits]) -> Iterator[tuple[str, str, Bits]]:
        """Run the exporter on slices of these bits, and hold it to what it gave before."""
        for name, dtype, shape, bits in self._exported(values):
            self._require_same(self.outputs.get(name), name, dtype, shape)
            yield name, dtype, bits

    def _compare(self, kind: Kind, values: Mapping[str, Bits]) -> None:
        """Keep the origins of those values that come out as they went in."""
        for name, dtype, bits in self._again(values):
            if len(self.outputs[name].origins):
                self.outputs[name].compare(kind, bits, values.get(dtype))

    # ------------------------------------------------------------------ what it says

    def _result(self) -> Discovery:
        boxes: dict[tuple[int, str], dict[str, list[Box]]] = {(s.rank, s.name): {} for s in self.sources}
        residual: list[Residual] = []
        for name, output in self.outputs.items():
            found = self._boxes(output)
            if found is None:
                if n := n_elements(DTYPES[output.dtype], output.shape):
                    is_packed = DTYPES[output.dtype].packed
                    reason = f"values of {output.dtype} are no whole bytes" if is_packed else "moved in too many parts"
                    residual.append(Residual(name, 0, n, reason))
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
        if DTYPES[output.dtype].packed:
            return None
        if output.held is None:
            there, numbers = np.arange(len(output.origins)), output.origins
        else:
            if np.count_nonzero(np.diff(output.held) > 1) > MAX_RANGES:
                return None
            there, numbers = output.held, output.origins[output.held]
        mine = [source for source in self.sources if source.dtype == output.dtype and source.n_values]
        starts = np.array([source.start for source in mine], np.int64)
        edges = np.searchsorted(starts, [numbers.min(), numbers.max()] if len(numbers) else [], side="right") - 1
        if len(set(edges.tolist())) == 1:
            which, indices = np.zeros(0, np.int64), edges.tolist()[:1]
        else:
            which = np.searchsorted(starts, numbers, side="right") - 1
            indices = np.flatnonzero(np.bincount(which)).tolist()
        found = {}
        for index in indices:
            held = which == index if len(which) else slice(None)
            items = read_off(numbers[held] - mine[index].start, there[held])
            if items is None:
                return None
            found[mine[index].rank, mine[index].name] = items
        return found

    def _residual(self, name: str, output: _Output) -> Iterator[Residual]:
        if output.held is None:
            return
        reasons, which = self.reasons.get(name, ([COMPUTED], np.zeros(1, np.int64)))
        reasons, which = _kept_but(output, reasons, which)
        kinds = np.where(output.origins >= 0, 0, np.where(output.is_constant, 1, 2 + which))
        edges = np.flatnonzero(np.diff(kinds, prepend=-1))
        for start, stop in itertools.pairwise([*edges.tolist(), len(kinds)]):
            if kinds[start]:
                reason = "made from nothing" if kinds[start] == 1 else reasons[kinds[start] - 2]
                if reason == COMPUTED and output.dtype not in self.n_of:
                    reason = f"cast: no slice has the dtype {output.dtype}"
                yield Residual(name, start, stop, reason)


def _kept_but(output: _Output, reasons: list[str], which: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
    """Say of values without another reason what became of them last, if that is not too much to say."""
    kinds = sorted({kind for kind, _ in output.lost})
    if not kinds:
        return reasons, which
    further = which.copy()
    for kind, lost in output.lost:
        further[lost[which[lost] == 0]] = len(reasons) + kinds.index(kind)
    if np.count_nonzero(np.diff(further)) > MAX_RANGES:
        return reasons, which
    return [*reasons, *(KEPT_BUT[kind] for kind in kinds)], further


def _no_pairs(found: object) -> InvalidInputError:
    return InvalidInputError(
        "the exporter gives something else than names and tensors",
        key="export",
        expected="pairs of name and tensor, or a mapping",
        found=type(found).__name__,
    )
