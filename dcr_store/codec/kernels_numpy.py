"""The inner loops of the chunk coding, in NumPy alone.

``kernels_numba`` has the same functions with the same results. Arrays are 1-D, C-contiguous and of native byte order,
except the target of ``xor_at``; what can be checked without looking at every element is checked by the caller.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dcr_store.codec.digest import linear_within

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]
    Bits = NDArray[np.unsignedinteger[Any]]

CARRY: Final = 255
_WORD_NBYTES: Final = 8
_GROUP_NBYTES: Final = 64  # eight words: their flags are one word again
_BLOCK_NBYTES: Final = 1 << 20  # its flags stay in the L2 cache; with smaller ones threads wait for the GIL instead

# A packed byte holds four 2-bit codes, first in the low bits; 1, 3 and 7 are codes 0, 1 and 2, and 0 marks an escape.
_CODES: Final = np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
_VALUES: Final = np.array([1, 3, 7, 0], np.uint8)[_CODES].view("<u4").ravel()
_N_ESCAPES: Final = np.count_nonzero(_CODES == 3, axis=1)

_zeros: Final = threading.local()  # a chunk of each dtype


def find_changes(base: Bits, new: Bits) -> tuple[U32, Bits]:
    """Return the positions at which two arrays differ, and the masks ``base ^ new`` there."""
    return _find(new.dtype, len(new), operator.ne, operator.xor, base, new)


def find_nonzero(mask: Bits) -> tuple[U32, Bits]:
    """Return the positions of the non-zero elements of a mask, and their values."""
    return _find(mask.dtype, len(mask), lambda words: words != 0, lambda words: words, mask)


def _find(
    dtype: np.dtype[Any], n_elements: int, differ: Callable[..., Any], combine: Callable[..., Any], *arrays: Bits
) -> tuple[U32, Bits]:
    """Look at words of 8 bytes first, and at their flags eight at a time: few of them differ."""
    in_word = _WORD_NBYTES // dtype.itemsize
    shift = in_word.bit_length() - 1
    n_grouped = n_elements - n_elements % (_GROUP_NBYTES // dtype.itemsize)
    words = [array[:n_grouped].view(np.uint64) for array in arrays]
    found: list[U32] = []
    masks: list[Bits] = []
    step = _BLOCK_NBYTES // _WORD_NBYTES
    for start in range(0, n_grouped >> shift, step):
        block = [array[start : start + step] for array in words]
        hits = _nonzero_flags(differ(*block))
        if not len(hits):
            continue
        lanes: Bits = combine(*(array.take(hits) for array in block)).view(dtype)
        lane = (lanes != 0).nonzero()[0]
        hits += start
        positions = hits.take(lane >> shift)
        positions <<= shift
        masks.append(lanes.take(lane))
        lane &= in_word - 1
        positions += lane
        found.append(positions.astype(np.uint32))
    rest: Bits = combine(*(array[n_grouped:] for array in arrays))
    lane = rest.nonzero()[0]
    found.append((lane + n_grouped).astype(np.uint32))
    masks.append(rest.take(lane))
    return np.concatenate(found), np.concatenate(masks)


def _nonzero_flags(flags: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return where flags, a multiple of eight, are set."""
    octets = flags.view(np.uint64)
    some = (octets != 0).nonzero()[0]
    flag = octets.take(some).view(np.bool_).nonzero()[0]
    hits: NDArray[np.intp] = some.take(flag >> 3)
    hits <<= 3
    flag &= 7
    hits += flag
    return hits


def find_gaps(positions: U32, typical: int, max_k: int) -> tuple[U32, int, int]:
    """Return the gaps before ascending positions, at least one, and what their coding is chosen by.

    Returns
    -------
    gaps : ndarray of uint32, shape (n,)
    k : int
        Low bits without which at least half of the gaps are below `typical`, as few as possible; at most `max_k`.
    n_occupied : int
        Number of bitmap bytes that the positions fall into.
    """
    gaps = np.empty(len(positions), np.uint32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= np.uint32(1)
    k = 0
    while k < max_k and 2 * np.count_nonzero(gaps < typical << k) < len(gaps):
        k += 1
    octets = positions >> np.uint32(3)
    return gaps, k, 1 + int(np.count_nonzero(octets[1:] != octets[:-1]))


def split_gaps(gaps: U32, k: int) -> tuple[U8, U8]:
    """Split gaps into bytes with carries of what is above their `k` low bits, and the bit planes of these."""
    low = np.empty(0, np.uint8)
    if k:
        planes = gaps[None, :] >> np.arange(k, dtype=np.uint32)[:, None] & 1
        low = np.packbits(planes.astype(np.bool_), axis=1, bitorder="little").ravel()
        gaps = gaps >> np.uint32(k)
    high = gaps.astype(np.uint8)
    long = (gaps >= CARRY).nonzero()[0]
    if not len(long):
        return high, low
    n_carries, high[long] = np.divmod(gaps.take(long), CARRY)
    carries = long.repeat(n_carries)
    carries += np.arange(len(carries))
    carried = np.full(len(high) + len(carries), CARRY, np.uint8)
    ends = np.ones(len(carried), np.bool_)
    ends[carries] = False
    carried[ends] = high
    return carried, low


def join_gaps(high: U8, low: U8, n: int, k: int) -> tuple[U32, int]:
    """Return the positions that `n` gaps lead to, undoing ``split_gaps``.

    Returns
    -------
    positions : ndarray of uint32, shape (n,)
        Ascending, if the last one is right.
    last : int
        The last position, in or out of range; -1 if `high` does not hold `n` gaps and nothing else.
    """
    flags = high != CARRY
    if np.count_nonzero(flags) != n or not flags[-1]:
        return np.empty(n, np.uint32), -1
    positions = np.cumsum(high, dtype=np.int64)
    if n < len(high):
        positions = positions[flags]
    if k:
        positions <<= k
        planes = np.unpackbits(low.reshape(k, -1), axis=1, count=n, bitorder="little")
        rest = np.zeros(n, np.int64)
        for plane in planes[::-1]:
            rest <<= 1
            rest += plane
        positions += np.cumsum(rest)
    positions += np.arange(n)
    return positions.astype(np.uint32), int(positions[-1])


def pack_flags(positions: U32, n_elements: int) -> U8:
    """Return a bitmap in which the bits at `positions` are set."""
    flags = np.zeros(n_elements, np.bool_)
    flags[positions] = True
    return np.packbits(flags, bitorder="little")


def find_flags(bitmap: U8, n_elements: int) -> U32:
    """Return the positions of the bits that are set, undoing ``pack_flags``."""
    return np.unpackbits(bitmap, count=n_elements, bitorder="little").nonzero()[0].astype(np.uint32)


def spread(bitmap: U8, values: Bits, out: Bits) -> None:
    """Overwrite `out` with `values` where bits of `bitmap` are set, as many, and with 0 elsewhere."""
    out[:] = 0
    out[np.unpackbits(bitmap, count=len(out), bitorder="little").view(np.bool_)] = values


def pack_values(values: Bits) -> tuple[U8, Bits]:
    """Return the packed 2-bit codes of values, and the values that have none."""
    codes = np.zeros(-(-len(values) // 4) * 4, np.uint8)
    used = codes[: len(values)]
    used += 3
    for code, value in enumerate((1, 3, 7)):
        used -= (values == value).view(np.uint8) * np.uint8(3 - code)
    escaped = values.take((used == 3).nonzero()[0])
    quads = codes.view("<u4")
    return (quads | quads >> 6 | quads >> 12 | quads >> 18).astype(np.uint8), escaped


def count_escapes(codes: U8, n: int) -> int:
    """Return how many of the first `n` packed codes are escapes; the codes after them are 0."""
    return int(_N_ESCAPES.take(codes).sum())


def unpack_values(codes: U8, escaped: Bits, n: int) -> Bits:
    """Undo ``pack_values``."""
    small = _VALUES.take(codes).view(np.uint8)[:n]
    values: Bits = small.astype(escaped.dtype)
    values[(small == 0).nonzero()[0]] = escaped
    return values


def split_plane(values: Bits, rotation: int, j: int) -> U8:
    """Return byte plane `j`, from the least significant, of values rotated left by `rotation` bits."""
    n_bits = 8 * values.dtype.itemsize
    shift = (8 * j - rotation) % n_bits
    plane: U8 = (values >> shift).astype(np.uint8)
    if shift + 8 > n_bits:
        plane |= (values << (n_bits - shift)).astype(np.uint8)
    return plane


def join_plane(plane: U8, rotation: int, j: int, out: Bits) -> None:
    """Put byte plane `j` into `out`, undoing ``split_plane``; plane 0 comes first and overwrites what is there."""
    n_bits = 8 * out.dtype.itemsize
    shift = (8 * j - rotation) % n_bits
    if j == 0:
        out[:] = 0
    part = plane.astype(out.dtype)
    if shift + 8 > n_bits:
        out |= part >> (n_bits - shift)
    part <<= shift
    out |= part


def xor_at(bits: Bits, positions: U32, values: Bits) -> None:
    """XOR values into `bits`, of any stride, at ascending, distinct positions, in place."""
    index = positions.astype(np.intp)
    bits[index] ^= values


def digest_sparse(positions: U32, values: Bits, n_elements: int) -> int:
    """Return ``L`` (``digest.linear``) of a chunk of zeros with `values` at ascending, distinct positions."""
    return digest_whole(positions, values, n_elements, xor_at)


def digest_whole(positions: U32, values: Bits, n_elements: int, xor_at: Callable[[Bits, U32, Bits], None]) -> int:
    """Return what ``digest_sparse`` does, of a buffer that is zero before and after."""
    chunk: Bits | None = getattr(_zeros, values.dtype.name, None)
    if chunk is None or len(chunk) != n_elements:
        chunk = np.zeros(n_elements, values.dtype)
        setattr(_zeros, values.dtype.name, chunk)
    if not len(positions):
        return 0
    first, stop = int(positions[0]), int(positions[-1]) + 1
    xor_at(chunk, positions, values)
    digest = linear_within(chunk[first:stop], chunk[stop:].nbytes)
    xor_at(chunk, positions, values)
    return digest
