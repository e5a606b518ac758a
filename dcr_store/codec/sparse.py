"""Methods that list the non-zero elements: positions, as gaps or as a bitmap, and values apart (docs/spec/v1.md, 6.2).

Refuses bodies whose streams contradict each other, positions out of range, and unused bits that are set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dcr_store.codec import kernels
from dcr_store.codec.streams import StreamReader, append_stream, append_uint
from dcr_store.codec.values import append_values, read_values, refuse_unused_bits
from dcr_store.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]
    Bits = NDArray[np.unsignedinteger[Any]]

MAX_K: Final = 16
# Where changes are (everywhere or in few rows) denser than 1 in 6, a byte of the bitmap with any bit set has more than
# 1.75 of them on average, and the bitmap becomes smaller than gaps (docs/design/001-chunk-coding.md).
_BITMAP_NUMERATOR: Final = 7
_BITMAP_DENOMINATOR: Final = 4
_TYPICAL_GAP: Final = 128  # half of the gaps, without their low bits, shall be below; zstd's entropy coder likes that


def suits_bitmap(n: int, n_occupied: int) -> bool:
    """Tell whether a bitmap is smaller than gaps, for `n` bits set in `n_occupied` bytes."""
    return _BITMAP_DENOMINATOR * n > _BITMAP_NUMERATOR * n_occupied


def find_gaps(positions: U32) -> tuple[U32, int, int]:
    """Return the gaps before ascending positions, at least one, ``k``, and how many bytes of the bitmap have a bit."""
    return kernels.engine().find_gaps(positions, _TYPICAL_GAP, MAX_K)


def encode_gaps(gaps: U32, k: int, values: Bits) -> tuple[int, bytearray]:
    """Return the value mode and the body of the method sparse."""
    high, low = kernels.engine().split_gaps(gaps, k)
    out = bytearray()
    append_uint(out, len(gaps))
    append_stream(out, high)
    if k:
        append_stream(out, low, compressible=False)
    _, mode = append_values(out, values, rotate=False)
    return mode, out


def encode_bitmap(bitmap: U8, values: Bits) -> tuple[int, int, bytearray]:
    """Return ``k``, the value mode and the body of the method bitmap."""
    out = bytearray()
    append_uint(out, len(values))
    append_stream(out, bitmap)
    rotation, mode = append_values(out, values, rotate=True)
    return rotation, mode, out


def decode_gaps(body: StreamReader, dtype: np.dtype[Any], n_elements: int, k: int, mode: int) -> tuple[U32, Bits]:
    """Return the positions and values of a body of the method sparse.

    Raises
    ------
    FormatError
        The body violates the format.
    """
    if k > MAX_K:
        raise FormatError("k of a sparse chunk out of range", expected=f"0 to {MAX_K}", found=k)
    n = _read_n(body, n_elements)
    # Each byte of the gaps, carry or not, moves the position on by at least one.
    high = body.read_stream("gaps", n, n_elements)
    low = np.empty(0, np.uint8)
    if k:
        plane_nbytes = -(-n // 8)
        low = body.read_stream("low bits of the gaps", k * plane_nbytes)
        refuse_unused_bits("low bits of the gaps", low[plane_nbytes - 1 :: plane_nbytes], n % 8)
    positions, last = kernels.engine().join_gaps(high, low, n, k)
    if last < 0:
        raise FormatError("gaps do not hold as many gaps as elements", expected=n, found="more, fewer or a carry last")
    if last >= n_elements:
        raise FormatError("position out of range", expected=f"below {n_elements}", found=last)
    values = read_values(body, dtype, n, 0, mode)
    body.finish()
    return positions, values


def decode_bitmap(body: StreamReader, dtype: np.dtype[Any], n_elements: int, k: int, mode: int) -> tuple[U8, Bits]:
    """Return the bitmap and the values of a body of the method bitmap.

    Raises
    ------
    FormatError
        The body violates the format.
    """
    n = _read_n(body, n_elements)
    bitmap = body.read_stream("bitmap", -(-n_elements // 8))
    refuse_unused_bits("bitmap", bitmap[-1:], n_elements % 8)
    n_set = int(np.bitwise_count(bitmap).sum(dtype=np.int64))
    if n_set != n:
        raise FormatError("bitmap with another number of bits set than elements", expected=n, found=n_set)
    values = read_values(body, dtype, n, k, mode)
    body.finish()
    return bitmap, values


def _read_n(body: StreamReader, n_elements: int) -> int:
    n = body.read_uint("number of non-zero elements")
    if not 1 <= n <= n_elements:
        raise FormatError("impossible number of non-zero elements", expected=f"1 to {n_elements}", found=n)
    return n
