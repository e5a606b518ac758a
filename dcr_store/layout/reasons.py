"""Why values that an exporter gives are no slice's: cast, added to, scaled. Pure, but for what the exporter does.

Found by a few runs more, on numbers; says less rather than something that may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dcr_store.layout.dtypes import DTYPES, Bits, uint_dtype
from dcr_store.layout.tensors import to_array
from dcr_store.layout.trials import NO_DIGIT, Digit, Kind, constant, digits_of, n_digits, negated, ordinary

Run = Callable[[Mapping[str, Bits]], Iterable[tuple[str, str, Bits]]]

COMPUTED: Final = "computed: other bits than any slice has"
KEPT_BUT: Final[Mapping[Kind, str]] = {
    "zeros": "computed: numbers are kept, but -0 becomes 0",
    "smallest": "computed: numbers are kept, but not subnormal ones",
    "largest": "computed: numbers are kept, but not the largest ones",
    "infinite": "computed: numbers are kept, but not infinities",
    "nan": "computed: numbers are kept, but NaNs change their bits, as by arithmetic, or a cast there and back",
}
"""Of values that came out as they went in, until a trial of this kind."""
MAX_RANGES: Final = 1000
_WINDOW: Final = 1 << 20
_ONE_OF_E8M0: Final = 127


def explained(
    run: Run, n_of: Mapping[str, int], names: Collection[str]
) -> dict[str, tuple[list[str], NDArray[np.int64]]]:
    """Return reasons for values of some outputs that are not moved.

    Parameters
    ----------
    run : callable
        Runs the exporter on the bits of all slices, by dtype; gives names, dtypes and bits of all outputs.
    n_of : mapping of str to int
        Values of all slices of each dtype.
    names : collection of str
        Of the outputs; not of packed dtypes.

    Returns
    -------
    dict of str to (list of str, ndarray of int64)
        For each output the reasons, and which of them each of its values has. Those of moved values mean nothing.
    """
    probes: dict[str, list[NDArray[np.float64]]] = {name: [] for name in names}
    for level in range(3):
        constants = {dtype: _constant(dtype, n, level) for dtype, n in n_of.items()}
        for name, dtype, bits in run(constants):
            if name in probes:
                probes[name].append(_real(dtype, bits))
    casts, sums = _casts(run, n_of, names), _sums(run, n_of, {name: rows[:2] for name, rows in probes.items()})
    found = {}
    for name, (zero, one, two) in probes.items():
        with np.errstate(all="ignore"):
            step = one - zero
            is_even = two - one == step
            added = is_even & (step == 1) & (zero != 0)
            scaled = is_even & (zero == 0) & (step != 0) & (step != 1)
            by_others = (zero == 0) & (one != 0) & (two == 4 * one)
            for claimed in (added, scaled, by_others):
                # A sum of few may look like one value in all masks: not so all sums of as many.
                claimed &= ~np.isin(one, one[sums[name] & claimed])
        reasons, which = [COMPUTED], np.zeros(len(zero), np.int64)
        for reason, where in (  # what is surer comes later: a product may be close to one of its factors
            *((f"cast: from {source}", is_cast) for source, is_cast in casts[name].items()),
            (f"added: {_one_of(zero[added])}", added),
            (f"scaled: by {_one_of(step[scaled])}", scaled),
            ("scaled: by other values", by_others),
        ):
            if where.any():
                which[where] = len(reasons)
                reasons.append(reason)
        if np.count_nonzero(np.diff(which)) > MAX_RANGES:
            reasons, which = [COMPUTED], np.zeros(len(zero), np.int64)
        found[name] = reasons, which
    return found


def _sums(
    run: Run, n_of: Mapping[str, int], levels: Mapping[str, Sequence[NDArray[np.float64]]]
) -> dict[str, NDArray[np.bool_]]:
    """Return for each output which values come of several: neither as of zeros nor as of ones, of slices of both.

    Parameters
    ----------
    levels : mapping of str to (ndarray of float64, ndarray of float64)
        For each output, what came of zeros alone, and of ones alone.
    """
    found = {name: np.zeros(len(zero), bool) for name, (zero, _) in levels.items()}
    masks, start = {}, 0
    for dtype, n in n_of.items():
        # Any two of the first 256 values differ in one of the eight masks; of others, nearly all.
        masks[dtype] = np.empty(n, np.uint8)
        for at in range(0, n, _WINDOW):
            stop = min(at + _WINDOW, n)
            octets = np.arange(start + at, start + stop, dtype="<u8").view(np.uint8).reshape(-1, 8)
            np.bitwise_xor.reduce(octets, 1, out=masks[dtype][at:stop])
        start += n
    for bit in range(8):
        values = {}
        for dtype, n in n_of.items():
            is_one = np.repeat(masks[dtype] >> bit & 1, DTYPES[dtype].elements_per_value)
            values[dtype] = np.where(is_one, _constant(dtype, n, 1), _constant(dtype, n, 0))
        for name, dtype, bits in run(values):
            if name in found:
                (zero, one), shown = levels[name], _real(dtype, bits)
                found[name] |= (shown != zero) & (shown != one)
    return found


def _casts(run: Run, n_of: Mapping[str, int], names: Collection[str]) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """Return for each output, and each other dtype, which values are that dtype's, only in another form."""
    sources = [dtype for dtype in n_of if not DTYPES[dtype].packed and dtype != "F8_E8M0"]
    origins: dict[str, dict[str, NDArray[np.int64]]] = {name: {} for name in names}
    weight = dict.fromkeys(sources, 1)
    for _ in range(max([1, *(n_digits(n_of[dtype] + 1, len(digits_of(dtype))) for dtype in sources)])):
        values = {dtype: _constant(dtype, n, 0) for dtype, n in n_of.items()}
        for dtype in sources:  # from 1: what is made from nothing is often 0
            per = DTYPES[dtype].elements_per_value
            values[dtype] = Digit(dtype, weight[dtype]).shown(n_of[dtype] + 1)[per:]
        for name, dtype, bits in run(values):
            if name not in origins:
                continue
            shown = _real(dtype, bits)
            with np.errstate(all="ignore"):
                digit = shown.astype(np.int64)
            is_digit = (digit == shown) & (digit >= 0)
            for source in sources:
                if source != dtype:
                    origin = origins[name].setdefault(source, np.zeros(len(shown), np.int64))
                    is_of_source = is_digit & (digit < len(digits_of(source)))
                    origin += np.where(is_of_source, digit * weight[source], NO_DIGIT)
        for dtype in sources:
            if weight[dtype] <= n_of[dtype]:
                weight[dtype] *= len(digits_of(dtype))
    found = {
        name: {source: (origin > 0) & (origin <= n_of[source]) for source, origin in mine.items()}
        for name, mine in origins.items()
    }
    rng = np.random.default_rng(1)
    once = {dtype: ordinary(dtype, n, rng) for dtype, n in n_of.items()}
    for values in (once, {dtype: negated(dtype, bits) for dtype, bits in once.items()}):
        for name, dtype, bits in run(values):
            if name in found:
                shown = _real(dtype, bits)
                for source, is_cast in found[name].items():
                    given = _real(source, values[source])[origins[name][source][is_cast] - 1]
                    is_cast[is_cast] = _are_close(dtype, shown[is_cast], given)
    return found


def _are_close(dtype: str, shown: NDArray[np.float64], given: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which values are what a dtype makes of others, however it rounds."""
    kind = to_array(np.zeros(DTYPES[dtype].elements_per_value, uint_dtype(DTYPES[dtype].space)), dtype, (1,)).real.dtype
    if kind.kind in "iub":
        return np.abs(shown - given) < 1
    about = ml_dtypes.finfo(kind)
    with np.errstate(all="ignore"):
        error = np.maximum(np.abs(given) * float(about.eps), float(about.smallest_subnormal))
        close: NDArray[np.bool_] = np.abs(shown - given) <= error
        return close


def _constant(dtype: str, n: int, level: int) -> Bits:
    """Return the elements of `n` values that are all 0, 1 or 2; a dtype of powers of two has 1, 1 and 2."""
    row = DTYPES[dtype]
    if dtype == "F8_E8M0":
        return constant(dtype, n, _ONE_OF_E8M0 + max(level - 1, 0))
    if row.packed:
        return constant(dtype, n, 0)
    digits = digits_of(dtype)
    return constant(dtype, n, digits[min(level, len(digits) - 1)])


def _real(dtype: str, bits: Bits) -> NDArray[np.float64]:
    """Return values as float64; of complex numbers, the real parts where there are no others, else NaN."""
    values: NDArray[Any] = to_array(bits, dtype, (len(bits) // DTYPES[dtype].elements_per_value,))
    with np.errstate(all="ignore"):
        if dtype.startswith("C"):
            return np.where(values.imag == 0, values.real, np.nan).astype(np.float64)
        return values.astype(np.float64)


def _one_of(numbers: NDArray[np.float64]) -> str:
    return f"{numbers[0]:g}" if len(numbers) and (numbers == numbers[0]).all() else "several numbers"
