"""The inner loops of the chunk coding, in NumPy alone.

``kernels_numba`` has the same functions with the same results. Arrays are 1-D, C-contiguous, native byte order;
nothing is checked here that the caller can check without looking at every element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]
    Bits = NDArray[np.unsignedinteger[Any]]

BLOCK: Final = 1 << 16  # elements compared at once: two blocks and the flags of their differences stay in the L2 cache
CARRY: Final = 255

# Value codes: 1, 3 and 7 are the masks of a step by one unit in the last place.
_CODE_OF: Final = np.array([3, 0, 3, 1, 3, 3, 3, 2, 3], np.uint8)
_CODED: Final = np.array([1, 3, 7, 0], np.uint8)
_QUAD: Final = np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
_QUAD_VALUES: Final = _CODED[_QUAD]


def find_changes(base: Bits, new: Bits) -> tuple[U32, Bits]:
    """Return the positions at which two arrays differ, and the masks ``base ^ new`` there."""
    found: list[U32] = []
    differs = np.empty(min(BLOCK, len(base)), np.bool_)
    for start in range(0, len(base), BLOCK):
        stop = min(start + BLOCK, len(base))
        flags = differs[: stop - start]
        np.not_equal(base[start:stop], new[start:stop], out=flags)
        hits = np.flatnonzero(flags)
        if len(hits):
            found.append((hits + start).astype(np.uint32))
    positions = np.concatenate(found) if found else np.empty(0, np.uint32)
    return positions, base[positions] ^ new[positions]


def find_nonzero(mask: Bits) -> tuple[U32, Bits]:
    """Return the positions of the non-zero elements of a mask, and their values."""
    positions = np.flatnonzero(mask).astype(np.uint32)
    return positions, mask[positions]


def split_gaps(positions: U32, k: int) -> tuple[U8, U8]:
    """Split ascending positions into gap bytes with carries, and the bit planes of the gaps' `k` low bits."""
    gaps = np.empty(len(positions), np.uint32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    low = np.empty(0, np.uint8)
    if k:
        planes = gaps[None, :] >> np.arange(k, dtype=np.uint32)[:, None] & 1
        low = np.packbits(planes.astype(np.bool_), axis=1, bitorder="little").ravel()
        gaps >>= k
    if gaps.max() < CARRY:
        return gaps.astype(np.uint8), low
    carries, rest = np.divmod(gaps, CARRY)
    ends = np.cumsum(carries + 1, dtype=np.int64)
    high = np.full(int(ends[-1]), CARRY, np.uint8)
    high[ends - 1] = rest
    return high, low


def join_gaps(high: U8, low: U8, n: int, k: int) -> tuple[NDArray[np.uint64], int]:
    """Undo ``split_gaps``.

    Returns
    -------
    positions : ndarray of uint64, shape (m,)
        As the bytes say, ascending, in or out of range. `m` is not `n` if the bytes do not hold `n` gaps.
    n_left_over : int
        Number of carries that no gap follows.
    """
    ends = np.flatnonzero(high != CARRY)
    n_left_over = len(high) - (int(ends[-1]) + 1 if len(ends) else 0)
    steps = high.astype(np.uint64) << np.uint64(k)
    if len(ends) == n:
        steps[ends] += 1
        if k:
            planes = np.unpackbits(low.reshape(k, -1), axis=1, count=n, bitorder="little")
            for plane in range(k):
                steps[ends] += planes[plane].astype(np.uint64) << np.uint64(plane)
    return np.cumsum(steps)[ends] - 1, n_left_over


def pack_values(values: Bits) -> tuple[U8, Bits]:
    """Return the packed 2-bit codes of values, and the values that have none."""
    codes = np.zeros(-(-len(values) // 4) * 4, np.uint8)
    np.take(_CODE_OF, np.minimum(values, 8), out=codes[: len(values)])
    escaped = values[codes[: len(values)] == 3]
    quads = codes.view("<u4")
    return (quads | quads >> 6 | quads >> 12 | quads >> 18).astype(np.uint8), escaped


def count_escapes(codes: U8, n: int) -> int:
    """Return how many of the first `n` packed codes are escapes."""
    return int(np.count_nonzero(_QUAD[codes].ravel()[:n] == 3))


def unpack_values(codes: U8, escaped: Bits, n: int) -> Bits:
    """Undo ``pack_values``."""
    values: Bits = _QUAD_VALUES[codes].ravel()[:n].astype(escaped.dtype)
    values[values == 0] = escaped
    return values


def split_planes(values: Bits, rotation: int) -> list[U8]:
    """Return the byte planes of values rotated left by `rotation` bits, least significant first."""
    width = values.dtype.itemsize
    if rotation:
        values = np.bitwise_or(values << rotation, values >> (8 * width - rotation), dtype=values.dtype)
    return [np.ascontiguousarray(values.view(np.uint8)[j::width]) for j in range(width)]


def join_planes(planes: list[U8], rotation: int, out: Bits) -> None:
    """Undo ``split_planes`` into `out`."""
    width = out.dtype.itemsize
    octets = out.view(np.uint8)
    for j, plane in enumerate(planes):
        octets[j::width] = plane
    if rotation:
        left = out << (8 * width - rotation)
        np.right_shift(out, rotation, out=out)
        np.bitwise_or(out, left, out=out)


def xor_at(bits: Bits, positions: U32, values: Bits) -> None:
    """XOR values into `bits` at ascending, distinct positions, in place."""
    bits[positions] ^= values
