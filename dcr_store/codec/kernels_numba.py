"""The inner loops of the chunk coding, compiled by numba; see ``kernels_numpy`` for what each does.

Kernels are compiled when first called for a width, and kept in numba's cache on disk where that can be written.
They run without the GIL and in one thread. They check no index: callers pass what was checked.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from dcr_store.codec import kernels_numpy
from dcr_store.codec.digest import crc64, linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]
    U64 = NDArray[np.uint64]
    Bits = NDArray[np.unsignedinteger[Any]]

__all__ = [
    "count_escapes",
    "digest_sparse",
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

_BLOCK: Final = 64  # elements whose flags are one word
_POWERS: Final = 1 << 12  # elements
_FEW_NBYTES: Final = 64  # a chunk with one value in as many bytes, or fewer, is digested faster by its values
_REFLECTED_POLYNOMIAL: Final = np.uint64(0x9A6C9329AC4BC9B5)  # of CRC-64/NVME (docs/spec/v1.md, section 7)

_kernels: Final[dict[tuple[str, ...], Callable[..., Any]]] = {}
_compiling: Final = threading.Lock()


def find_changes(base: Bits, new: Bits) -> tuple[U32, Bits]:
    """Return the positions at which two arrays differ, and the masks ``base ^ new`` there."""
    if not (base.flags.aligned and new.flags.aligned):
        return kernels_numpy.find_changes(base, new)
    return _find(new, base, 1)


def find_nonzero(mask: Bits) -> tuple[U32, Bits]:
    """Return the positions of the non-zero elements of a mask, and their values."""
    if not mask.flags.aligned:
        return kernels_numpy.find_nonzero(mask)
    return _find(mask, np.zeros(_BLOCK, mask.dtype), 0)


def _find(bits: Bits, base: Bits, base_step: int) -> tuple[U32, Bits]:
    """Find what `bits` differ in from `base`; with `base_step` 0 the base of every block is the same."""
    positions = np.empty(len(bits), np.uint32)
    masks = np.empty(len(bits), bits.dtype)
    name = _name(bits)
    n = _kernel(_find_in_blocks, name, name, "", "uint32 out", name + " out")(bits, base, base_step, positions, masks)
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


def count_escapes(codes: U8, n: int) -> int:
    """Return how many of the first `n` packed codes are escapes; the codes after them are 0."""
    return int(_kernel(_count_escapes, "uint8")(codes))


def unpack_values(codes: U8, escaped: Bits, n: int) -> Bits:
    """Undo ``pack_values``."""
    if not escaped.flags.aligned:
        return kernels_numpy.unpack_values(codes, escaped, n)
    values = np.empty(4 * len(codes), escaped.dtype)
    _kernel(_unpack_values, "uint8", _name(escaped), _name(escaped) + " out")(codes, escaped, values)
    return values[:n]


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


def digest_sparse(positions: U32, values: Bits, n_elements: int) -> int:
    """Return ``L`` (``digest.linear``) of a chunk of zeros with `values` at ascending, distinct positions."""
    if len(positions) * _FEW_NBYTES > values.itemsize * n_elements or not values.flags.aligned:
        return kernels_numpy.digest_whole(positions, values, n_elements, xor_at)
    kernel = _kernel(_sum_powers, "uint32", _name(values), "", "uint64", "uint64")
    return int(kernel(positions, values, n_elements, *_powers(values.itemsize)))


@functools.cache
def _powers(width: int) -> tuple[U64, U64]:
    """Return what ``_sum_powers`` needs for elements of `width` bytes.

    As CRC-64/NVME writes polynomials, bit 63 is the constant term, and a zero byte after a buffer is a multiplication
    by x^8 modulo its polynomial. ``L`` of 8 bytes and zeros after them is thus their value times a power of x.

    Returns
    -------
    powers : ndarray of uint64, shape (_POWERS,)
        x^(64 + 8 width e) for each e.
    advance : ndarray of uint64, shape (8 * 256,)
        What each value of each byte of a state becomes when `_POWERS` elements of zeros come after it.
    """
    powers = np.empty(_POWERS, np.uint64)
    element, one = bytes(width), (1 << 63).to_bytes(8, "little")
    digest, of_zeros = crc64(one), crc64(bytes(8))
    for e in range(_POWERS):
        powers[e] = digest ^ of_zeros
        digest, of_zeros = crc64(element, digest), crc64(element, of_zeros)
    buffer = np.zeros(width * _POWERS // 8, np.uint64)
    advance = np.zeros((8, 256), np.uint64)
    for byte in range(8):
        for bit in range(8):
            buffer[0] = 1 << (8 * byte + bit)
            advance[byte, 1 << bit : 2 << bit] = advance[byte, : 1 << bit] ^ np.uint64(
                linear(crc64(buffer), buffer.nbytes)
            )
    return powers, advance.ravel()


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


def _find_in_blocks(bits: Bits, base: Bits, base_step: int, positions: U32, masks: Bits) -> Any:
    # The flags of a block are made by vector instructions; then each bit that is set costs one step, and no others.
    n = np.uint64(0)
    for block in range(len(bits) // _BLOCK):
        first = block * _BLOCK
        flags = _flags(bits, first, base, first * base_step)
        while flags != np.uint64(0):
            lane = _lowest(flags)
            at = np.uint64(first) + lane
            positions[n] = at
            masks[n] = bits[at] ^ base[np.uint64(first * base_step) + lane]
            n += np.uint64(1)
            flags &= flags - np.uint64(1)
    for i in range(len(bits) - len(bits) % _BLOCK, len(bits)):
        mask = bits[i] ^ base[i if base_step else 0]
        positions[n] = i
        masks[n] = mask
        n += np.uint64(mask != 0)
    return n


@intrinsic  # type: ignore[untyped-decorator]
def _flags(context: Any, bits: Any, start: Any, base: Any, base_start: Any) -> Any:
    """Return, as bits of a word, in which of ``_BLOCK`` elements two arrays differ; ``start`` may be any element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        vector = ir.VectorType(context.get_data_type(kind.dtype), _BLOCK)

        def load(array: Any, start: Any) -> Any:
            pointer = builder.gep(context.make_array(kind)(context, builder, array).data, [start])
            return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=kind.dtype.bitwidth // 8)

        differ = builder.icmp_unsigned("!=", load(*arguments[:2]), load(*arguments[2:]))
        return builder.bitcast(differ, ir.IntType(_BLOCK))

    return numba.uint64(bits, numba.int64, bits, numba.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _lowest(context: Any, word: Any) -> Any:
    """Return the number of the lowest bit that is set in a word that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return numba.uint64(numba.uint64), generate


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


def _count_escapes(codes: U8) -> Any:
    n = np.uint32(0)
    for octet in codes:
        escapes = octet & octet >> np.uint8(1)  # in bits 0, 2, 4, 6; bit 7 is never set
        n += np.uint32((escapes & 1) + (escapes >> 2 & 1) + (escapes >> 4 & 1) + (escapes >> 6))
    return n


def _unpack_values(codes: U8, escaped: Bits, values: Bits) -> None:
    # First all as if none were an escape, by vector instructions, then one step for each escape: few are.
    small = np.uint32(0x00_07_03_01)
    for octet in range(len(codes)):
        packed = np.uint32(codes[octet])
        for i in range(4):
            code = packed >> np.uint32(2 * i) & np.uint32(3)
            values[4 * octet + i] = small >> np.uint32(8) * code & np.uint32(0xFF)
    n = np.uint64(0)
    for start in range(0, len(codes), 8):
        packed_word = np.uint64(0)
        if start + 8 <= len(codes):
            for j in range(8):
                packed_word |= np.uint64(codes[start + j]) << np.uint64(8 * j)
        else:
            for j in range(len(codes) - start):
                packed_word |= np.uint64(codes[start + j]) << np.uint64(8 * j)
        escapes = packed_word & packed_word >> np.uint64(1) & np.uint64(0x5555_5555_5555_5555)
        while escapes != np.uint64(0):
            values[np.uint64(4 * start) + (_lowest(escapes) >> np.uint64(1))] = escaped[n]
            n += np.uint64(1)
            escapes &= escapes - np.uint64(1)


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


def _sum_powers(positions: U32, values: Bits, n_elements: int, powers: U64, advance: U64) -> Any:
    # An element that e others follow adds, for each of its bits j, x^(64 + 8 width e + 8 width - 1 - j). The sums are
    # kept apart by j, so that a value costs the same whatever its bits are, and joined once in `_POWERS` elements.
    n_bits = 8 * values.itemsize
    sums = np.zeros(n_bits, np.uint64)
    zero, one = np.uint64(0), np.uint64(1)
    state = zero
    block = (n_elements - 1) // _POWERS
    for i in range(len(positions) + 1):
        follow = np.int64(n_elements) - 1 - np.int64(positions[i]) if i < len(positions) else 0
        if follow // _POWERS < block or i == len(positions):
            together = zero
            for j in range(n_bits):
                together = (together >> one) ^ (_REFLECTED_POLYNOMIAL & (zero - (together & one))) ^ sums[j]
                sums[j] = zero
            state ^= together
            while block > follow // _POWERS:
                before, state = state, zero
                for byte in range(8):
                    octet = before >> np.uint64(8 * byte) & np.uint64(255)
                    state ^= advance[np.uint64(256 * byte) + octet]
                block -= 1
        if i < len(positions):
            power = powers[np.uint64(follow) & np.uint64(_POWERS - 1)]
            value = np.uint64(values[i])
            for j in range(n_bits):
                sums[j] ^= power & (zero - (value >> np.uint64(j) & one))
    return state
