"""The table of dtypes and spaces (docs/spec/v1.md §5): how many elements of which space a tensor takes.

Sizes are Python integers and never wrap. Refuses dtypes that the table does not have, negative dimensions, and tensors
of more than 2^52 elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import DcrError, InvalidInputError
from dcr_store.format.documents import SPACES

Bits = NDArray[np.unsignedinteger[Any]]
"""Elements of a space: little-endian uintN."""

ALIGNMENT_NBYTES: Final = 64
MAX_ELEMENTS: Final = 1 << 52  # addresses are JSON numbers, exact below 2^53
"""No tensor and no space has more elements: all addresses then fit a signed 64-bit integer."""
MAX_DIMENSION: Final = (1 << 63) - 1  # what the C side of numpy and torch can hold

_WIDTHS: Final = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
_UINTS: Final = {space: np.dtype(f"<u{nbytes}") for space, nbytes in _WIDTHS.items()}


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the table.

    Attributes
    ----------
    name : str
        As in safetensors.
    bits : int
        Bits of one value.
    space : str
        The space that holds its elements.
    width : int
        Bytes of one element.
    elements_per_value : int
        2 for C128, else 1; packed dtypes have less than one element a value and say 1 here.
    packed : bool
        Values are smaller than a byte and stored as packed bytes.
    """

    name: str
    bits: int
    space: str
    width: int
    elements_per_value: int = 1
    packed: bool = False


def _table() -> dict[str, DType]:
    rows: dict[str, DType] = {}
    for space, names in (
        ("u8", "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        ("u16", "BF16 F16 U16 I16"),
        ("u32", "F32 U32 I32"),
        ("u64", "F64 U64 I64 C64"),
    ):
        nbytes = _WIDTHS[space]
        rows.update({name: DType(name, 8 * nbytes, space, nbytes) for name in names.split()})
    rows["C128"] = DType("C128", 128, "u64", 8, elements_per_value=2)
    for name, bits in (("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)):
        rows[name] = DType(name, bits, "u8", 1, packed=True)
    return rows


DTYPES: Final[dict[str, DType]] = _table()


def dtype(name: object, *, key: str | None = None, error: type[DcrError] = InvalidInputError) -> DType:
    """Return the row of a dtype.

    Parameters
    ----------
    name : object
        As in safetensors, e.g. ``BF16``.
    key : str, optional
        The tensor or file concerned, for the error.
    error : type of DcrError
        What to raise for a name that the table does not have.
    """
    row = DTYPES.get(name) if isinstance(name, str) else None
    if row is None:
        raise error(
            "has a dtype that format 1 cannot store; convert the tensor",
            key=key,
            expected=f"one of {', '.join(DTYPES)}",
            found=shown(name),
        )
    return row


def width(space: str) -> int:
    """Return the bytes of one element of a space."""
    try:
        return _WIDTHS[space]
    except KeyError:
        raise InvalidInputError("there is no such space", expected=", ".join(SPACES), found=repr(space)) from None


def uint_dtype(space: str) -> np.dtype[Any]:
    """Return the little-endian unsigned numpy dtype of a space's elements."""
    width(space)
    return _UINTS[space]


def aligned(element: int, space: str) -> int:
    """Return `element` rounded up to the next address that is a multiple of 64 bytes."""
    step = ALIGNMENT_NBYTES // width(space)
    return -(-element // step) * step


def n_elements(dtype: DType, shape: Sequence[int], *, key: str | None = None) -> int:
    """Return the number of elements that a tensor takes in its space.

    Parameters
    ----------
    dtype : DType
        Its dtype.
    shape : sequence of int
        Its shape, in values; ``()`` has one value. Booleans and floating-point numbers are no dimensions.
    key : str, optional
        The tensor concerned, for the error.

    Raises
    ------
    InvalidInputError
        If the shape is none, a dimension is negative or over 2^63 - 1, or the tensor has more than 2^52 elements.
    """
    n = 1
    for size in shape:
        if type(size) is not int:
            raise _refused(dtype, shape, key, "whole numbers", f"{shown(size)}")
        if not 0 <= size <= MAX_DIMENSION:
            raise _refused(dtype, shape, key, "dimensions from 0 to 2^63 - 1", shown(size))
        if n <= 2 * MAX_ELEMENTS:  # F4 has two values to an element; beyond that only a 0 makes a difference
            n *= size
    if 0 in shape:
        return 0
    n = -(-n * dtype.bits // 8) if dtype.packed else n * dtype.elements_per_value
    if n > MAX_ELEMENTS:
        raise _refused(dtype, shape, key, "at most 2^52 elements", "more")
    return n


def n_values(dtype: DType, shape: Sequence[int], *, key: str | None = None) -> int:
    """Return the number of values of a tensor, as ``n_elements`` does; of packed ones, how many bytes they take."""
    return n_elements(dtype, shape, key=key) // dtype.elements_per_value


def _refused(dtype: DType, shape: Sequence[int], key: str | None, expected: str, found: str) -> InvalidInputError:
    return InvalidInputError(
        f"a tensor of dtype {dtype.name} and shape {shown(list(shape))} cannot be stored",
        key=key,
        expected=expected,
        found=found,
    )


def shown(value: object) -> str:
    """Return a foreign value for a message: one line, printable, not too long."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print numbers of over 4,300 digits
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list):
        text = f"[{', '.join(shown(item) if isinstance(item, int) else repr(item)[:120] for item in value[:20])}]"
    else:
        text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
