"""How far values moved, in units of last place: how many values of the dtype lie between old and new. Pure.

-0.0 and NaNs are counted in the order of their bits. Packed dtypes have no steps: their elements hold several values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.layout.dtypes import Bits

_SIGNED: Final = ("I8", "I16", "I32", "I64")
_UNSIGNED: Final = ("BOOL", "U8", "U16", "U32", "U64", "F8_E8M0")
_PACKED: Final = ("F4", "F6_E2M3", "F6_E3M2")
_POWERS: Final = np.uint64(1) << np.arange(64, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Steps:
    """What some values did.

    Attributes
    ----------
    distance : ndarray of uint64, shape (n,)
        Units of last place. For complex dtypes one for each real and each imaginary part that changed.
    is_up : ndarray of bool, shape (n,)
        Whether the value became larger.
    """

    distance: NDArray[np.uint64]
    is_up: NDArray[np.bool_]


def has_steps(dtype: str) -> bool:
    """Whether values of a dtype, as in the layout, can be counted in units of last place."""
    return dtype not in _PACKED


def steps(dtype: str, old: Bits, new: Bits) -> Steps:
    """Return how far values moved that differ between `old` and `new`; those that do not are left out.

    Parameters
    ----------
    dtype : str
        As in the layout; one that has steps.
    old, new : ndarray of uintN, shape (n,)
        Bits of elements.
    """
    a, b = _ordered(dtype, old), _ordered(dtype, new)
    differ = a != b
    a, b = a[differ], b[differ]
    return Steps((np.maximum(a, b) - np.minimum(a, b)).astype(np.uint64), b > a)


def histogram(distance: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many distances, none of them 0, are from ``2**k`` up to below ``2**(k + 1)``: int64, shape (64,)."""
    return np.bincount(np.searchsorted(_POWERS, distance, side="right") - 1, minlength=64).astype(np.int64)


def _ordered(dtype: str, bits: Bits) -> Bits:
    """Return unsigned integers in the order of the values that `bits` are; neighbouring values differ by 1."""
    if dtype in _UNSIGNED:
        return bits
    lanes = bits.view(np.uint32) if dtype == "C64" else bits
    sign = lanes.dtype.type(1 << (8 * lanes.dtype.itemsize - 1))
    if dtype in _SIGNED:
        return lanes ^ sign
    return np.where(lanes & sign, ~lanes, lanes | sign)
