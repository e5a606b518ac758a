"""Values for slices by which an exporter shows what it moves: numbers, digit by digit, and trials. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dcr_store.layout.dtypes import DTYPES, Bits, uint_dtype
from dcr_store.layout.tensors import to_array

_LARGEST_DIGIT: Final = 256  # BF16 has every integer up to it


def numbers_of(digits: Bits, dtype: str, numbers: NDArray[np.int64]) -> Bits:
    """Return the elements of values that are these digits: numbers below ``len(digits)``."""
    found: Bits = np.zeros((len(numbers), DTYPES[dtype].elements_per_value), digits.dtype)
    found[:, 0] = digits[numbers]
    return found.reshape(-1)


def values_of(bits: Bits, dtype: str) -> Bits:
    """Return elements as rows of one value each."""
    return bits.reshape(-1, DTYPES[dtype].elements_per_value)


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


def read_digits(digits: Bits, dtype: str, bits: Bits) -> NDArray[np.int64]:
    """Return which digit each value is, -1 where it is none."""
    rows = values_of(bits, dtype)
    order = np.argsort(digits)
    at = np.minimum(np.searchsorted(digits[order], rows[:, 0]), len(digits) - 1)
    found = order[at]
    is_digit = (digits[found] == rows[:, 0]) & (rows[:, 1:] == 0).all(1)
    return np.where(is_digit, found, -1)


def n_digits(n_values: int, base: int) -> int:
    """Return how many digits the numbers up to `n_values` have."""
    n, capacity = 1, base
    while capacity <= n_values and base > 1:
        n, capacity = n + 1, capacity * base
    return n


def trials(dtypes: Sequence[str], n_of: Mapping[str, int], rng: np.random.Generator) -> Iterator[dict[str, Bits]]:
    """Yield values for all slices, by dtype: such that no arithmetic leaves any value as it is in all of them.

    Whatever compares values, clips or rounds them, takes the larger, or adds a zero leaves some as they are in one run,
    and not in another, where each has the other sign, all its bits inverted, or is the largest, smallest or no number.
    """
    for make, then in (
        (_random, _negated),
        (_random, _negated),
        (_zeros, _negated),
        (_smallest, _negated),
        (_largest, _negated),
        (_signalling, _negated),
        (_any_bits, _inverted),
        (_any_bits, _inverted),
    ):
        values = {dtype: make(dtype, n_of[dtype], rng) for dtype in dtypes}
        yield values
        yield {dtype: then(dtype, bits) for dtype, bits in values.items()}


def _n_bits(dtype: str, n: int) -> tuple[int, np.dtype[Any]]:
    row = DTYPES[dtype]
    return n * row.elements_per_value, uint_dtype(row.space)


def _sign(dtype: str) -> int:
    """Return the bit, or bits, by which an element of a floating-point dtype changes its sign; 0 for others."""
    if dtype == "C64":
        return 1 << 63 | 1 << 31
    is_float = dtype.startswith(("F", "BF", "C")) and dtype != "F8_E8M0"
    return 1 << 8 * DTYPES[dtype].width - 1 if is_float else 0


def _float(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the real numbers that elements of a floating-point dtype are, one or two each."""
    found: np.dtype[Any] = (
        to_array(np.zeros(2, uint_dtype(DTYPES[dtype].space)), dtype, (2,)).dtype
        if (not dtype.startswith("C"))
        else np.dtype("<f4" if dtype == "C64" else "<f8")
    )
    return found


def _random(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return ordinary numbers of all mantissas and both signs."""
    if not _sign(dtype):
        return _any_bits(dtype, n, rng)
    size, space = _n_bits(dtype, n)
    kind = _float(dtype)
    numbers = rng.normal(size=size * space.itemsize // kind.itemsize)
    ordinary: Bits = numbers.astype(kind).view(space)
    return ordinary


def _any_bits(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return bits of any kind: NaNs, infinities and subnormal numbers are among them."""
    size, space = _n_bits(dtype, n)
    if dtype == "BOOL":
        return rng.integers(0, 2, size).astype(space)
    return rng.integers(0, np.iinfo(space).max, size, dtype=space, endpoint=True)


def _zeros(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return zeros of both signs."""
    size, space = _n_bits(dtype, n)
    signs: Bits = (rng.integers(0, 2, size).astype(np.uint64) * np.uint64(_sign(dtype))).astype(space)
    return signs


def _smallest(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return the smallest numbers that are not zero, of both signs."""
    zeros = _zeros(dtype, n, rng)
    ones: Bits = zeros | zeros.dtype.type(1)
    return ones


def _largest(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return the largest numbers, of both signs."""
    size, space = _n_bits(dtype, n)
    if dtype == "BOOL":
        return np.ones(size, space)
    if not _sign(dtype):
        return np.full(size, np.iinfo(space).max >> (dtype[0] == "I"), space)
    kind = _float(dtype)
    top = np.array([ml_dtypes.finfo(kind).max] * (space.itemsize // kind.itemsize), kind).view(space)
    signed: Bits = _zeros(dtype, n, rng) | top[0]
    return signed


def _signalling(dtype: str, n: int, rng: np.random.Generator) -> Bits:
    """Return NaNs that an operation would make quiet, of both signs; any bits where there are none."""
    size, space = _n_bits(dtype, n)
    if not _sign(dtype) or np.isnan(np.array([np.inf]).astype(_float(dtype)).astype(np.float64)[0]):
        return _any_bits(dtype, n, rng)
    kind = _float(dtype)
    infinities = np.full(size * space.itemsize // kind.itemsize, np.inf).astype(kind)
    quiet: Bits = infinities.view(f"<u{kind.itemsize}") | np.dtype(f"<u{kind.itemsize}").type(1)
    signed: Bits = quiet.view(space) | _zeros(dtype, n, rng)
    return signed


def _negated(dtype: str, bits: Bits) -> Bits:
    return _inverted(dtype, bits) if not _sign(dtype) else bits ^ bits.dtype.type(_sign(dtype))


def _inverted(dtype: str, bits: Bits) -> Bits:
    inverted: Bits = bits ^ bits.dtype.type(1 if dtype == "BOOL" else np.iinfo(bits.dtype).max)
    return inverted
