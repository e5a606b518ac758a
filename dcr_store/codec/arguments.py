"""Checks of what callers hand to a codec: ``InvalidInputError`` before anything is done with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dcr_store.errors import InvalidInputError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    Bits = NDArray[np.unsignedinteger[Any]]

MAX_ELEMENTS: Final = (1 << 32) - 1


def checked_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return `dtype`, or refuse one that chunks do not hold."""
    dtype = np.dtype(dtype)
    if dtype.kind != "u" or not dtype.isnative:
        raise InvalidInputError("chunks hold native unsigned integers", expected="uint8, 16, 32, 64", found=str(dtype))
    return dtype


def checked_bits(bits: Bits, what: str, *, empty: bool = False) -> Bits:
    """Return `bits`, C-contiguous, or refuse what is no chunk."""
    if bits.dtype.kind != "u" or not bits.dtype.isnative or bits.ndim != 1:
        raise InvalidInputError(
            f"{what} must be a 1-D array of native unsigned integers; take a view",
            expected="uintN, 1-D",
            found=f"{bits.dtype}, {bits.ndim}-D",
        )
    if not (0 if empty else 1) <= len(bits) <= MAX_ELEMENTS:
        raise InvalidInputError(f"{what} of an impossible length", expected=f"1 to {MAX_ELEMENTS}", found=len(bits))
    return np.ascontiguousarray(bits)


def checked_sparse(positions: NDArray[np.uint32], values: Bits, n_elements: int) -> Bits:
    """Return `values`, C-contiguous, or refuse what ``encode_sparse`` refuses."""
    values = checked_bits(values, "values", empty=True)
    if positions.dtype != np.uint32 or positions.shape != values.shape:
        raise InvalidInputError(
            "positions do not fit values",
            expected=f"uint32 of shape {values.shape}",
            found=f"{positions.dtype} of shape {positions.shape}",
        )
    if not 1 <= n_elements <= MAX_ELEMENTS:
        raise InvalidInputError("impossible number of elements", expected=f"1 to {MAX_ELEMENTS}", found=n_elements)
    if len(positions) and (positions[-1] >= n_elements or np.any(positions[1:] <= positions[:-1])):
        raise InvalidInputError(
            "positions must ascend below the number of elements", expected=n_elements, found=int(positions.max())
        )
    if not values.all():
        raise InvalidInputError("values of a sparse chunk must not be zero", expected="non-zero", found=0)
    return values


def check_target(bits: Bits) -> None:
    """Refuse bits that no chunk can be applied to."""
    checked_dtype(bits.dtype)
    if bits.ndim != 1 or not bits.flags.writeable:
        found = f"{bits.ndim}-D, {'writable' if bits.flags.writeable else 'read-only'}"
        raise InvalidInputError("cannot apply a chunk to these bits", expected="1-D, writable", found=found)


def check_out(out: Bits, dtype: np.dtype[Any], n_elements: int) -> None:
    """Refuse an `out` that a chunk cannot be decoded into."""
    if out.dtype != dtype or out.shape != (n_elements,) or not out.flags.c_contiguous or not out.flags.writeable:
        raise InvalidInputError(
            "out does not fit",
            expected=f"writable, contiguous {dtype} of shape ({n_elements},)",
            found=f"{out.dtype} of shape {out.shape}",
        )
