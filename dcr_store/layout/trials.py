"""Values for slices by which an exporter shows what it moves: numbers, digit by digit, and trials. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dcr_store.layout.dtypes import DTYPES, Bits, uint_dtype
from dcr_store.layout.tensors import to_array

_LARGEST_DIGIT: Final = 256  # BF16 has every integer up to it
NO_DIGIT: Final = -(1 << 56)

_Make = Callable[[str, int, np.random.Generator], Bits]
_Then = Callable[[str, Bits], Bits]


def values_of(bits: Bits, dtype: str) -> Bits:
    """Return elements by value: rows of two for a dtype whose values have two, else as they are."""
    per = DTYPES[dtype].elements_per_value
    return bits if per == 1 else bits.reshape(-1, per)


def same_values(found: Bits, given: Bits) -> NDArray[np.bool_]:
    """Return which values, as of ``values_of``, are equal bit for bit."""
    same: NDArray[np.bool_] = found == given
    return same if same.ndim == 1 else np.logical_and.reduce(same, 1)


def constant(dtype: str, n: int, first: Any) -> Bits:
    """Return the elements of `n` values whose first element is this one, and the other, if there is one, zero."""
    return _widened(np.full(n, first, uint_dtype(DTYPES[dtype].space)), dtype)


def _widened(firsts: Bits, dtype: str) -> Bits:
    per = DTYPES[dtype].elements_per_value
    if per == 1:
        return firsts
    found: Bits = np.zeros((len(firsts), per), firsts.dtype)
    found[:, 0] = firsts
    return found.reshape(-1)


@cache
def digits_of(dtype: str) -> Bits:
    """Return the bits of 0, 1, 2, … in a dtype, as far as it has them, up to 255; ascending, of distinct values."""
    row = DTYPES[dtype]
    space = uint_dtype(row.space)
    if row.packed:
        return np.zeros(1, space)
    if dtype == "F8_E8M0":  # powers of two alone; its bits serve as well
        return np.arange(_LARGEST_DIGIT - 1).astype(space)
    if dtype == "BOOL":
        return np.arange(2).astype(space)
    blank = to_array(np.zeros(row.elements_per_value, space), dtype, (1,))
    numbers = np.arange(_LARGEST_DIGIT)
    with np.errstate(all="ignore"):
        values = numbers.astype(np.float32).astype(blank.dtype) if "F8" in dtype else numbers.astype(blank.dtype)
        exact = values.astype(np.complex128) == numbers
    n = int(np.argmin(exact)) if not exact.all() else len(numbers)
    bits: Bits = values[:n].view(space).reshape(n, -1)[:, 0].copy()  # of a complex number, its real part
    return bits


class Digit:
    """One digit of the numbers of values: how slices show it, and what it adds to a number that is read back.

    Parameters
    ----------
    dtype : str
        Of the slices, or of what came of them.
    weight : int
        What the digit counts: a power of how many digits the dtype has.
    """

    def __init__(self, dtype: str, weight: int) -> None:
        self.dtype, self.weight = dtype, weight
        self.digits = digits_of(dtype)
        self._added = np.arange(len(self.digits), dtype=np.int64) * weight
        self._of_bits: NDArray[np.int64] | None = None
        if self.digits.itemsize <= 2:
            self._of_bits = np.full(1 << 8 * self.digits.itemsize, NO_DIGIT)
            self._of_bits[self.digits] = self._added

    def shown(self, n: int) -> Bits:
        """Return the elements of values that show this digit of the numbers 0 to `n` - 1."""
        period: Bits = np.repeat(self.digits[: -(-n // self.weight)], min(self.weight, n))
        n_periods = -(-n // len(period)) if n else 0
        return _widened(np.broadcast_to(period, (n_periods, len(period))).reshape(-1)[:n], self.dtype)

    def read(self, bits: Bits) -> NDArray[np.int64]:
        """Return what each value adds to its number; ``NO_DIGIT`` if it is no digit.

        Returns
        -------
        ndarray of int64, shape (n_values,)
            Numbers up to 2^52 have at most 52 digits, so that sums do not wrap, and any ``NO_DIGIT`` makes them
            negative.
        """
        rows = values_of(bits, self.dtype)
        firsts = rows if rows.ndim == 1 else rows[:, 0]
        if self._of_bits is not None:
            return self._of_bits[firsts]
        kind = _float(self.dtype) if _sign(self.dtype) else firsts.dtype
        with np.errstate(all="ignore"):  # what is no digit becomes any, and is found out
            digit = np.ascontiguousarray(firsts).view(kind)[:: firsts.itemsize // kind.itemsize].astype(np.uint8)
        is_digit = self.digits[digit] == firsts
        if rows.ndim > 1:
            is_digit &= (rows[:, 1:] == 0).all(1)
        return np.where(is_digit, self._added[digit], NO_DIGIT)


def n_digits(n_values: int, base: int) -> int:
    """Return how many digits the numbers below `n_values` have."""
    n, capacity = 1, base
    while capacity < n_values and base > 1:
        n, capacity = n + 1, capacity * base
    return n


Kind = Literal["any", "ordinary", "zeros", "smallest", "largest", "infinite", "nan"]


def trials(
    dtypes: Sequence[str], n_of: Mapping[str, int], rng: np.random.Generator
) -> Iterator[tuple[Kind, dict[str, Bits]]]:
    """Yield values for all slices, by dtype, and their kind: no arithmetic leaves any value as it is in all of them.

    Whatever compares values, clips or rounds them, takes the larger, or adds a zero leaves some as they are in one run,
    and not in another, where each has the other sign, all its bits inverted, or is the largest, smallest, infinite or
    no number.
    """
    kinds: tuple[tuple[Kind, _Make, _Then], ...] = (
        ("ordinary", ordinary, negated),
        ("ordinary", ordinary, negated),
        ("zeros", _zeros, negated),
        ("smallest", _smallest, negated),
        ("largest", _largest, negated),
        ("infinite", _infinite, negated),
        ("nan", _signalling, negated),
        ("any", _any_bits, _inverted),
        ("any", _any_bits, _inverted),
    )
    for kind, make, then in kinds:
        values = {dtype: make(dtype, n_of[dtype], rng) for dtype in dtypes}
        yield kind, values
        yield kind, {dtype: then(dtype, bits) for dtype, bits in values.items()}


def kind_of(kind: Kind, dtype: str) -> Kind:
    """Return of what kind a dtype's values are in a trial: not every one has signs and infinities."""
    if not _sign(dtype):
        return "any"
    return "nan" if kind == "infinite" and not _has_infinities(dtype) else kind


def _n_bits(dtype: str, n: int) -> tuple[int, np.dtype[Any]]:
    row = DTYPES[dtype]
    return n * row.elements_per_value, uint_dtype(row.space)


def _sign(dtype: str) -> int:
    """Return the bit, or bits, by which an element of a floating-point dtype changes its sign; 0 for others."""
    if dtype == "C64":
        return 1 << 63 | 1 << 31
    is_float = dtype.startswith(("F", "BF", "C")) and dtype != "F8_E8M0" and not DTYPES[dtype].packed
    return 1 << 8 * DTYPES[dtype].width - 1 if is_float else 0


def _float(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the real numbers that elements of a floating-point dtype are, one or two each."""
    found: np.dtype[Any] = (
        to_array(np.zeros(2, uint_dtype(DTYPES[dtype].space)), dtype, (2,)).dtype
        if (not dtype.startswith("C"))
        else np.dtype("<f4" if dtype == "C64" else "<f8")
    )
    return found


def _has_infinities(dtype: str) -> bool:
    return not np.isnan(np.array([np.inf]).astype(_float(dtype)).astype(np.float64)[0])


def ordinary(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return ordinary numbers, a little below one or two, of all mantissas and both signs; any bits of other dtypes."""
    bits = _any_bits(dtype, n, rng)
    if not _sign(dtype):
        return bits
    kind = _float(dtype)
    about = ml_dtypes.finfo(kind)
    whole = bits.view(f"<u{kind.itemsize}")
    n_low = min(3, about.nexp - 2)  # bits of the exponent that are any; those above are 01...1
    low = (1 << about.nmant + n_low) - 1
    high = (1 << about.nmant + about.nexp - 1) - 1 - low
    whole &= whole.dtype.type(1 << about.bits - 1 | low)
    whole |= whole.dtype.type(high)
    return bits


def _any_bits(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return bits of any kind: NaNs, infinities and subnormal numbers are among them."""
    size, space = _n_bits(dtype, n)
    words = rng.integers(0, np.iinfo(np.uint64).max, -(-size * space.itemsize // 8), dtype=np.uint64, endpoint=True)
    bits: Bits = words.view(space)[:size]
    if dtype == "BOOL":
        bits &= space.type(1)
    return bits


def _zeros(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return zeros of both signs."""
    if not _sign(dtype):
        return np.zeros(*_n_bits(dtype, n))
    signs = _any_bits(dtype, n, rng)
    signs &= signs.dtype.type(_sign(dtype))
    return signs


def _smallest(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return the smallest numbers that are not zero, of both signs."""
    zeros = _zeros(dtype, n, rng)
    zeros |= zeros.dtype.type(1)
    return zeros


def _largest(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return the largest numbers, of both signs."""
    size, space = _n_bits(dtype, n)
    if dtype == "BOOL":
        return np.ones(size, space)
    if not _sign(dtype):
        return np.full(size, np.iinfo(space).max >> (dtype[0] == "I"), space)
    kind = _float(dtype)
    signed = _zeros(dtype, n, rng)
    signed |= np.array([ml_dtypes.finfo(kind).max] * (space.itemsize // kind.itemsize), kind).view(space)[0]
    return signed


def _infinite(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return infinities of both signs, or NaNs of a dtype without infinities; any bits where there are neither."""
    if not _sign(dtype) and dtype != "F8_E8M0":
        return _any_bits(dtype, n, rng)
    kind = _float(dtype)
    signed = _zeros(dtype, n, rng)
    signed |= np.full(signed.itemsize // kind.itemsize, np.inf).astype(kind).view(signed.dtype)[0]
    return signed


def _signalling(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return NaNs that an operation would make quiet, of both signs; any bits where there are none."""
    if not _sign(dtype) or not _has_infinities(dtype):
        return _any_bits(dtype, n, rng)
    kind = _float(dtype)
    signed = _zeros(dtype, n, rng)
    infinities = np.full(signed.itemsize // kind.itemsize, np.inf).astype(kind).view(f"<u{kind.itemsize}")
    signed |= (infinities | infinities.dtype.type(1)).view(signed.dtype)[0]
    return signed


def negated(dtype: str, bits: Bits) -> Bits:
    """Return values of the other sign, or, of dtypes without one, of other bits."""
    return _inverted(dtype, bits) if not _sign(dtype) else bits ^ bits.dtype.type(_sign(dtype))


def _inverted(dtype: str, bits: Bits) -> Bits:
    inverted: Bits = bits ^ bits.dtype.type(1 if dtype == "BOOL" else np.iinfo(bits.dtype).max)
    return inverted
