"""The inner loops of the chunk coding, compiled by numba; see ``kernels_numpy`` for what each does.

Kernels are compiled when first called for a width, and kept in numba's cache on disk where that can be written.
They run without the GIL and in one thread. They check no index: callers pass what was checked.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np

from dcr_store.codec import kernels_numpy
from dcr_store.codec.kernels_numpy import count_escapes, unpack_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]
    U64 = NDArray[np.uint64]
    Bits = NDArray[np.unsignedinteger[Any]]

__all__ = [
    "count_escapes",
    "find_changes",
    "find_flags",
    "find_gaps",
    "find_nonzero",
    "join_gaps",
    "join_plane",
    "pack_flags",
    "pack_values",
    "split_gaps",
    "split_plane",
    "spread",
    "unpack_values",
    "xor_at",
]

_GROUP: Final = 8  # words
_BLOCK: Final = 1 << 12  # words

_kernels: Final[dict[tuple[str, ...], Callable[..., Any]]] = {}
_compiling: Final = threading.Lock()


def find_changes(base: Bits, new: Bits) -> tuple[U32, Bits]:
    """Return the positions at which two arrays differ, and the masks ``base ^ new`` there."""
    if not (base.flags.aligned and new.flags.aligned):
        return kernels_numpy.find_changes(base, new)
    n_whole = _n_in_whole_words(new)
    return _find(new, base[:n_whole].view(np.uint64), 1, base[n_whole:] ^ new[n_whole:])


def find_nonzero(mask: Bits) -> tuple[U32, Bits]:
    """Return the positions of the non-zero elements of a mask, and their values."""
    if not mask.flags.aligned:
        return kernels_numpy.find_nonzero(mask)
    return _find(mask, np.zeros(_BLOCK, np.uint64), 0, mask[_n_in_whole_words(mask) :])


def _n_in_whole_words(bits: Bits) -> int:
    return len(bits) - len(bits) % (8 // bits.dtype.itemsize)


def _find(bits: Bits, base: U64, base_step: int, rest: Bits) -> tuple[U32, Bits]:
    """Find what `bits` differ in from `base`; with `base_step` 0 the base of every block is the same."""
    n_rest = len(rest)
    positions = np.empty(len(bits) + 8, np.uint32)
    masks = np.empty(len(bits) + 8, bits.dtype)
    kernel = _kernel(_find_in_words, "uint64", "uint64", "", "uint32 out", _name(bits) + " out")
    n = kernel(bits[: len(bits) - n_rest].view(np.uint64), base, base_step, positions, masks)
    if n_rest:
        lanes = rest.nonzero()[0]
        positions[n : n + len(lanes)] = lanes + (len(bits) - n_rest)
        masks[n : n + len(lanes)] = rest[lanes]
        n += len(lanes)
    return positions[:n].copy(), masks[:n].copy()


def find_gaps(positions: U32, typical: int, max_k: int) -> tuple[U32, int, int]:
    """Return the gaps before ascending positions, at least one, and what their coding is chosen by."""
    gaps = np.empty(len(positions), np.uint32)
    k, n_occupied = _kernel(_find_gaps, "uint32", "", "", "uint32 out")(positions, typical, max_k, gaps)
    return gaps, k, n_occupied


def split_gaps(gaps: U32, k: int) -> tuple[U8, U8]:
    """Split gaps into bytes with carries of what is above their `k` low bits, and the bit planes of these."""
    high: U8
    low: U8
    high, low = _kernel(_split_gaps, "uint32", "")(gaps, k)
    return high, low


def join_gaps(high: U8, low: U8, n: int, k: int) -> tuple[U32, int]:
    """Return the positions that `n` gaps lead to, and the last one; -1 if `high` does not hold `n` gaps."""
    positions = np.empty(len(high), np.uint32)
    last = _kernel(_join_gaps, "uint8", "uint8", "", "", "uint32 out")(high, low, n, k, positions)
    return positions[:n], last


def pack_flags(positions: U32, n_elements: int) -> U8:
    """Return a bitmap in which the bits at `positions` are set."""
    bitmap = np.zeros(-(-n_elements // 8), np.uint8)
    _kernel(_pack_flags, "uint32", "uint8 out")(positions, bitmap)
    return bitmap


def find_flags(bitmap: U8, n_elements: int) -> U32:
    """Return the positions of the bits that are set."""
    positions = np.empty(n_elements + 8, np.uint32)
    n = _kernel(_find_flags, "uint8", "uint32 out")(bitmap, positions)
    return positions[:n].copy()


def spread(bitmap: U8, values: Bits, out: Bits) -> None:
    """Overwrite `out` with `values` where bits of `bitmap` are set, as many, and with 0 elsewhere."""
    if not out.flags.aligned:
        kernels_numpy.spread(bitmap, values, out)
    elif len(values) == len(out):
        out[:] = values
    else:
        _kernel(_spread, "uint8", _name(out), _name(out) + " out")(bitmap, values, out)


def pack_values(values: Bits) -> tuple[U8, Bits]:
    """Return the packed 2-bit codes of values, and the values that have none."""
    if not values.flags.aligned:
        return kernels_numpy.pack_values(values)
    codes = np.empty(-(-len(values) // 4), np.uint8)
    escaped = np.empty(len(values) + 1, values.dtype)
    n = _kernel(_pack_values, _name(values), "uint8 out", _name(values) + " out")(values, codes, escaped)
    return codes, escaped[:n]


def split_plane(values: Bits, rotation: int, j: int) -> U8:
    """Return byte plane `j`, from the least significant, of values rotated left by `rotation` bits."""
    if not values.flags.aligned:
        return kernels_numpy.split_plane(values, rotation, j)
    plane = np.empty(len(values), np.uint8)
    _kernel(_split_plane, _name(values), "", "uint8 out")(values, (8 * j - rotation) % (8 * values.itemsize), plane)
    return plane


def join_plane(plane: U8, rotation: int, j: int, out: Bits) -> None:
    """Put byte plane `j` into `out`, undoing ``split_plane``; plane 0 comes first and overwrites what is there."""
    if out.flags.aligned and out.flags.c_contiguous:
        kernel = _kernel(_join_plane, "uint8", "", "", _name(out) + " out")
        kernel(plane, (8 * j - rotation) % (8 * out.itemsize), j > 0, out)
    else:
        kernels_numpy.join_plane(plane, rotation, j, out)


def xor_at(bits: Bits, positions: U32, values: Bits) -> None:
    """XOR values into `bits`, of any stride, at ascending, distinct positions, in place."""
    if bits.flags.aligned and bits.flags.c_contiguous:
        _kernel(_xor_at, "uint32", _name(bits), _name(bits) + " out")(positions, values, bits)
    else:
        kernels_numpy.xor_at(bits, positions, values)


def _name(bits: Bits) -> str:
    """Return the name of an array's dtype; NumPy takes longer to make it up than a short kernel runs."""
    return f"uint{8 * bits.itemsize}"


def _kernel(function: Callable[..., Any], *arguments: str) -> Callable[..., Any]:
    """Return `function` compiled for arguments: an array's dtype, with ``out`` if written to, or nothing for an int."""
    key = (function.__name__, *arguments)
    kernel = _kernels.get(key)
    if kernel is None:
        with _compiling:
            kernel = _kernels.get(key) or _compile(function, arguments)
            _kernels[key] = kernel
    return kernel


def _compile(function: Callable[..., Any], arguments: tuple[str, ...]) -> Callable[..., Any]:
    signature = tuple(_numba_type(argument) for argument in arguments)
    kernel: Callable[..., Any]
    try:
        kernel = numba.njit(signature, nogil=True, cache=True)(function)
    except RuntimeError:  # no directory for the cache can be written
        kernel = numba.njit(signature, nogil=True)(function)
    return kernel


def _numba_type(argument: str) -> Any:
    if not argument:
        return numba.int64
    dtype, _, out = argument.partition(" ")
    # A mutable array may be passed for a read-only one, but not the other way round.
    return numba.types.Array(getattr(numba, dtype), 1, "C", readonly=not out)


# In numba an operation on uint64 and int64 gives float64: constants that meet uint64 are made uint64.


def _find_in_words(bits: U64, base: U64, base_step: int, positions: U32, masks: Bits) -> Any:
    # Words are compared into a buffer that stays in the L1 cache, by a loop that LLVM makes vectors of. Then groups of
    # words that differ, then words, then elements: all are written down, and the index steps on only if they differ,
    # for branches would be mispredicted too often.
    differ = np.zeros(_BLOCK, np.uint64)
    groups = np.empty(_BLOCK // _GROUP + 1, np.uint64)
    hits = np.empty(_BLOCK + 1, np.uint64)
    words = np.empty(_BLOCK + 1, np.uint64)
    in_word = 8 // masks.itemsize
    n_bits = np.uint64(8 * masks.itemsize)
    zero = np.uint64(0)
    n = zero
    for start in range(0, len(bits), _BLOCK):
        n_words = min(_BLOCK, len(bits) - start)
        block = bits[start : start + n_words]
        base_block = base[start * base_step : start * base_step + n_words]
        for i in range(n_words):
            differ[i] = block[i] ^ base_block[i]
        n_groups = np.uint64((n_words + _GROUP - 1) // _GROUP)
        for rest in range(n_words, np.int64(n_groups) * _GROUP):
            differ[rest] = zero
        n_found = zero
        for group in range(n_groups):
            first = np.uint64(group) * np.uint64(_GROUP)
            some = zero
            for step in range(_GROUP):
                some |= differ[first + np.uint64(step)]
            groups[n_found] = first
            n_found += np.uint64(some != zero)
        n_hits = zero
        for found in range(n_found):
            for step in range(_GROUP):
                i = groups[found] + np.uint64(step)
                hits[n_hits] = i
                words[n_hits] = differ[i]
                n_hits += np.uint64(differ[i] != zero)
        for hit in range(n_hits):
            first = (np.uint64(start) + hits[hit]) * np.uint64(in_word)
            word = words[hit]
            for lane in range(in_word):
                mask = masks.dtype.type(word)
                positions[n] = first + np.uint64(lane)
                masks[n] = mask
                n += np.uint64(mask != 0)
                if in_word > 1:
                    word >>= n_bits
    return n


def _find_gaps(positions: U32, typical: int, max_k: int, gaps: U32) -> Any:
    gaps[0] = positions[0]
    n_occupied = 1
    for i in range(1, len(positions)):
        gaps[i] = positions[i] - positions[i - 1] - np.uint32(1)
        n_occupied += (positions[i] >> np.uint32(3)) != (positions[i - 1] >> np.uint32(3))
    for k in range(max_k):
        below = np.uint32(typical) << np.uint32(k)
        n_small = 0
        for gap in gaps:
            n_small += gap < below
        if 2 * n_small >= len(gaps):
            return k, n_occupied
    return max_k, n_occupied


def _split_gaps(gaps: U32, k: int) -> Any:
    shift = np.uint32(k)
    n_high = np.int64(len(gaps))
    for gap in gaps:
        n_high += np.int64((gap >> shift) // np.uint32(255))
    high = np.empty(n_high, np.uint8)
    n = np.uint64(0)
    for gap in gaps:
        rest = gap >> shift
        while rest >= np.uint32(255):
            high[n] = 255
            n += np.uint64(1)
            rest -= np.uint32(255)
        high[n] = rest
        n += np.uint64(1)
    plane_nbytes = (len(gaps) + 7) // 8
    low = np.empty(k * plane_nbytes, np.uint8)
    for plane in range(k):
        for octet in range(plane_nbytes):
            first = 8 * octet
            bits = np.uint32(0)
            for i in range(min(8, len(gaps) - first)):
                bits |= (gaps[first + i] >> np.uint32(plane) & np.uint32(1)) << np.uint32(i)
            low[plane * plane_nbytes + octet] = bits
    return high, low


def _join_gaps(high: U8, low: U8, n: int, k: int, positions: U32) -> Any:
    # Writes len(high) positions at most, however many gaps the bytes hold.
    plane_nbytes = np.uint64((n + 7) // 8)
    position = np.int64(-1)
    found = np.uint64(0)
    if k == 0:
        for octet in high:
            ends = np.int64(octet != 255)
            position += np.int64(octet) + ends
            positions[found] = position
            found += np.uint64(ends)
    else:
        for octet in high:
            position += np.int64(octet) << k
            if octet != 255 and found < np.uint64(n):
                rest = np.int64(1)
                for plane in range(k):
                    bits = low[np.uint64(plane) * plane_nbytes + (found >> np.uint64(3))]
                    rest += np.int64(bits >> (found & np.uint64(7)) & np.uint64(1)) << plane
                position += rest
                positions[found] = position
            found += np.uint64(octet != 255)
    return position if found == np.uint64(n) and high[len(high) - 1] != 255 else -1


def _pack_flags(positions: U32, bitmap: U8) -> None:
    for position in positions:
        bitmap[position >> np.uint32(3)] |= np.uint8(1) << (position & np.uint32(7))


def _find_flags(bitmap: U8, positions: U32) -> Any:
    n = np.uint64(0)
    for i in range(len(bitmap)):
        octet = bitmap[i]
        if octet:
            for j in range(8):
                positions[n] = 8 * i + j
                n += np.uint64(octet >> j & 1)
    return n


def _spread(bitmap: U8, values: Bits, out: Bits) -> None:
    n = np.uint64(0)
    last = np.uint64(len(values) - 1)
    for i in range(len(out)):
        flag = np.uint64(bitmap[i >> 3] >> (i & 7) & 1)
        out[i] = values[min(n, last)] * flag
        n += flag


def _pack_values(values: Bits, codes: U8, escaped: Bits) -> Any:
    # Two bits for each of the values 0 to 8, and 8 stands for all above: branches would be mispredicted.
    table = np.uint64(0b11_10_11_11_11_01_11_00_11)
    n = np.uint64(0)
    for octet in range(len(codes)):
        first = 4 * octet
        packed = np.uint64(0)
        for i in range(min(4, len(values) - first)):
            value = values[first + i]
            code = table >> (np.uint64(2) * min(np.uint64(value), np.uint64(8))) & np.uint64(3)
            packed |= code << np.uint64(2 * i)
            escaped[n] = value
            n += code >> np.uint64(1) & code  # 1 if the code is 3
        codes[octet] = packed
    return n


def _split_plane(values: Bits, shift: int, plane: U8) -> None:
    n_bits = np.uint64(8 * values.itemsize)
    right = np.uint64(shift)
    left = (n_bits - right) % n_bits
    for i in range(len(values)):
        value = np.uint64(values[i])
        plane[i] = value >> right | value << left


def _join_plane(plane: U8, shift: int, keep: int, out: Bits) -> None:
    n_bits = np.uint64(8 * out.itemsize)
    left = np.uint64(shift)
    right = (n_bits - left) % n_bits
    if keep:
        for i in range(len(out)):
            part = np.uint64(plane[i])
            out[i] |= part << left | part >> right
    else:
        for i in range(len(out)):
            part = np.uint64(plane[i])
            out[i] = part << left | part >> right


def _xor_at(positions: U32, values: Bits, bits: Bits) -> None:
    for i in range(len(positions)):
        bits[positions[i]] ^= values[i]
