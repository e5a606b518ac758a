"""Chunk encoding: ``N`` unsigned integers to bytes and back, format `dcr.delta` (docs/spec/v1.md, section 6.2).

A chunk is a mask, mostly zeros, or an anchor's bits. The encoder takes the smallest of nothing, sparse, dense and
raw. Every function that reads an encoded chunk treats it as hostile: what violates the format is refused with
``FormatError`` before anything of the caller's is written (but for the `out` of ``decode``), and memory is bounded by
the decoded chunk. Encoding is deterministic for one version of the zstd library.

`base`, the bits that a mask applies to, is accepted for methods that condition on it; format 1 has none and ignores it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dcr_store.codec import kernels, sparse
from dcr_store.codec.arguments import check_out, check_target, checked_bits, checked_dtype, checked_sparse
from dcr_store.codec.digest import crc64
from dcr_store.codec.streams import StreamReader
from dcr_store.codec.values import append_planes, choose_rotation, read_planes
from dcr_store.errors import FormatError, InvalidInputError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    Bits = NDArray[np.unsignedinteger[Any]]
    Bytes = bytes | bytearray | memoryview

ZERO: Final = 0
RAW: Final = 1
DENSE: Final = 2
SPARSE: Final = 3
BITMAP: Final = 4
METHODS: Final = (ZERO, RAW, DENSE, SPARSE, BITMAP)
_LISTS: Final = (bytes([ZERO]), bytes([SPARSE]))
HEADER_NBYTES: Final = 8
# From this share of non-zero elements on they may be an anchor's bits, for which dense is best.
_DENSE_FROM: Final = 0.95
_SAMPLE: Final = 1 << 12


def encode(mask: Bits, base: Bits | None = None) -> bytes:
    """Encode a chunk given whole.

    Parameters
    ----------
    mask : ndarray of uint8, uint16, uint32 or uint64, shape (N,)
        Native byte order, ``1 <= N < 2**32``; read only.
    base : ndarray like `mask`, optional
        The bits that `mask` applies to; format 1 ignores it.

    Returns
    -------
    bytes
        At most ``8 + mask.nbytes``.

    Raises
    ------
    InvalidInputError
        `mask` has another dtype, shape or length.
    """
    mask = checked_bits(mask, "mask")
    engine = kernels.engine(mask.nbytes)
    flags = mask != 0
    n = int(np.count_nonzero(flags))
    if n >= _DENSE_FROM * len(mask) and not _looks_like_mask(mask):
        return _encode_dense(mask)
    if sparse.suits_bitmap(n, -(-len(mask) // 8)):  # whichever bytes they fall into
        values = mask if n == len(mask) else mask[flags]
        return _encode_bitmap(np.packbits(flags, bitorder="little"), values, len(mask))
    positions, values = engine.find_nonzero(mask)
    return _encode_sparse(positions, values, len(mask))


def encode_sparse(positions: NDArray[np.uint32], values: Bits, n_elements: int, base: Bits | None = None) -> bytes:
    """Encode a chunk given by its non-zero elements; the same bytes as ``encode`` of the whole chunk.

    Parameters
    ----------
    positions : ndarray of uint32, shape (n,)
        Ascending, distinct, below `n_elements`; read only.
    values : ndarray of uint8, uint16, uint32 or uint64, shape (n,)
        None of them zero; read only.
    n_elements : int
        ``N``.
    base : ndarray like `values`, shape (N,), optional
        The bits that the mask applies to; format 1 ignores it.

    Raises
    ------
    InvalidInputError
        Positions do not ascend or reach `n_elements`, a value is zero, or an array has another dtype or shape.
    """
    values = checked_sparse(positions, values, n_elements)
    positions = np.ascontiguousarray(positions)
    kernels.engine(values.dtype.itemsize * n_elements)
    if len(positions) >= _DENSE_FROM * n_elements:
        mask = np.zeros(n_elements, values.dtype)
        mask[positions] = values
        return encode(mask)
    return _encode_sparse(positions, values, n_elements)


def decode(data: Bytes, dtype: DTypeLike, n_elements: int, out: Bits | None = None) -> Bits:
    """Decode a chunk whole.

    Parameters
    ----------
    data : bytes, bytearray or memoryview
        The encoded chunk; read only.
    dtype : uint8, uint16, uint32 or uint64
        What the array that the chunk belongs to holds.
    n_elements : int
        ``N``, as the array says.
    out : ndarray of `dtype`, shape (N,), C-contiguous, optional
        Overwritten and returned; undefined after an error. A new array by default.

    Raises
    ------
    FormatError
        `data` is not an encoded chunk of `dtype` and `n_elements`.
    InvalidInputError
        `out` or `dtype` do not fit.
    """
    method, k, mode, body = _open(data, dtype, n_elements)
    dtype = np.dtype(dtype)
    if out is None:
        out = np.empty(n_elements, dtype)
    check_out(out, dtype, n_elements)
    engine = kernels.engine(dtype.itemsize * n_elements)
    if method == SPARSE:
        positions, values = sparse.decode_gaps(body, dtype, n_elements, k, mode)
        out[:] = 0
        engine.xor_at(out, positions, values)
    elif method == BITMAP:
        bitmap, values = sparse.decode_bitmap(body, dtype, n_elements, k, mode)
        engine.spread(bitmap, values, out)
    elif method == DENSE:
        read_planes(body, k, out)
        body.finish()
    else:
        out[:] = np.frombuffer(body.read_rest(dtype.itemsize * n_elements), dtype) if method == RAW else 0
    return out


def decode_sparse(data: Bytes, dtype: DTypeLike, n_elements: int) -> tuple[NDArray[np.uint32], Bits]:
    """Decode the non-zero elements of a chunk of any method.

    Parameters and errors are those of ``decode``.

    Returns
    -------
    positions : ndarray of uint32, shape (n,)
        Ascending, below `n_elements`.
    values : ndarray of `dtype`, shape (n,)
    """
    method, k, mode, body = _open(data, dtype, n_elements)
    dtype = np.dtype(dtype)
    engine = kernels.engine(dtype.itemsize * n_elements)
    if method == SPARSE:
        return sparse.decode_gaps(body, dtype, n_elements, k, mode)
    if method == BITMAP:
        bitmap, values = sparse.decode_bitmap(body, dtype, n_elements, k, mode)
        return engine.find_flags(bitmap, n_elements), values
    if method == ZERO:
        return np.empty(0, np.uint32), np.empty(0, dtype)
    return engine.find_nonzero(decode(data, dtype, n_elements))


def lists(data: Bytes) -> bool:
    """Return whether an encoded chunk, as its first byte says, lists its non-zero elements: it is sparse, or nothing.

    Of such a chunk ``decode_sparse`` makes no dense mask. Whether it is a chunk at all, that tells.
    """
    return memoryview(data)[:1].tobytes() in _LISTS


def apply(data: Bytes, bits: Bits, base: Bits | None = None) -> int:
    """XOR a chunk into bits, in place.

    Parameters
    ----------
    data : bytes, bytearray or memoryview
        The encoded chunk; read only.
    bits : ndarray of uint8, uint16, uint32 or uint64, shape (N,)
        Mutated; not touched if `data` is refused. May be strided or unaligned.
    base : ndarray like `bits`, optional
        The bits that the mask was made for, where `bits` are not they; format 1 ignores it.

    Returns
    -------
    int
        Number of elements that changed.

    Raises
    ------
    FormatError
        `data` is not an encoded chunk of the dtype and length of `bits`.
    InvalidInputError
        `bits` has another dtype or dimension, or is read-only.
    """
    check_target(bits)
    method, *_ = _open(data, bits.dtype, len(bits))
    if method in (ZERO, SPARSE):
        positions, values = decode_sparse(data, bits.dtype, len(bits))
        kernels.engine().xor_at(bits, positions, values)
        return len(positions)
    mask = decode(data, bits.dtype, len(bits))
    np.bitwise_xor(bits, mask, out=bits)
    return int(np.count_nonzero(mask))


def find_changes(base: Bits, new: Bits) -> tuple[NDArray[np.uint32], Bits]:
    """Compare two chunks bit by bit.

    Parameters
    ----------
    base, new : ndarray of uint8, uint16, uint32 or uint64, shape (N,)
        Of one dtype and length; read only.

    Returns
    -------
    positions : ndarray of uint32, shape (n,)
        Where they differ, ascending.
    masks : ndarray like `new`, shape (n,)
        ``base ^ new`` there.

    Raises
    ------
    InvalidInputError
        The arrays differ in dtype or length, or are not 1-D unsigned integers.
    """
    base, new = _checked_pair(base, new)
    return kernels.engine(new.nbytes).find_changes(base, new)


def compare(base: Bits, new: Bits) -> tuple[NDArray[np.uint32], Bits, int]:
    """Compare two chunks like ``find_changes``, and digest the new one.

    Returns
    -------
    positions : ndarray of uint32, shape (n,)
    masks : ndarray like `new`, shape (n,)
    digest : int
        CRC-64/NVME of `new`, which must be C-contiguous.
    """
    positions, masks = find_changes(base, new)
    return positions, masks, crc64(new)


def _checked_pair(base: Bits, new: Bits) -> tuple[Bits, Bits]:
    base, new = checked_bits(base, "base", empty=True), checked_bits(new, "new", empty=True)
    if base.dtype != new.dtype or base.shape != new.shape:
        raise InvalidInputError(
            "base and new do not fit each other",
            expected=f"{base.dtype} {base.shape}",
            found=f"{new.dtype} {new.shape}",
        )
    return base, new


def _encode_sparse(positions: NDArray[np.uint32], values: Bits, n_elements: int) -> bytes:
    if not len(positions):
        return _header(ZERO, values.dtype.itemsize, 0, 0, n_elements)
    gaps, k, n_occupied = sparse.find_gaps(positions)
    if sparse.suits_bitmap(len(positions), n_occupied):
        return _encode_bitmap(kernels.engine().pack_flags(positions, n_elements), values, n_elements)
    mode, body = sparse.encode_gaps(gaps, k, values)
    if len(body) < values.dtype.itemsize * n_elements:
        return _header(SPARSE, values.dtype.itemsize, k, mode, n_elements) + body
    mask = np.zeros(n_elements, values.dtype)
    mask[positions] = values
    return _encode_raw(mask)


def _encode_bitmap(bitmap: NDArray[np.uint8], values: Bits, n_elements: int) -> bytes:
    k, mode, body = sparse.encode_bitmap(bitmap, values)
    if len(body) < values.dtype.itemsize * n_elements:
        return _header(BITMAP, values.dtype.itemsize, k, mode, n_elements) + body
    mask = np.empty(n_elements, values.dtype)
    kernels.engine().spread(bitmap, values, mask)
    return _encode_raw(mask)


def _encode_dense(mask: Bits) -> bytes:
    k = choose_rotation(mask)
    body = bytearray()
    append_planes(body, mask, k)
    if len(body) < mask.nbytes:
        return _header(DENSE, mask.dtype.itemsize, k, 0, len(mask)) + body
    return _encode_raw(mask)


def _encode_raw(mask: Bits) -> bytes:
    return _header(RAW, mask.dtype.itemsize, 0, 0, len(mask)) + mask.tobytes()


def _looks_like_mask(mask: Bits) -> bool:
    """Tell, by a sample, whether most elements are steps of one unit in the last place, which have short codes."""
    sample = mask[:: -(-len(mask) // _SAMPLE)]
    return 2 * int(np.count_nonzero((sample == 1) | (sample == 3) | (sample == 7))) >= len(sample)


def _header(method: int, width: int, k: int, mode: int, n_elements: int) -> bytes:
    return bytes((method, width, k, mode)) + n_elements.to_bytes(4, "little")


def _open(data: Bytes, dtype: DTypeLike, n_elements: int) -> tuple[int, int, int, StreamReader]:
    """Check an encoded chunk's header; return its method, ``k``, value mode and body."""
    dtype = checked_dtype(dtype)
    view = memoryview(data).cast("B")
    longest = HEADER_NBYTES + dtype.itemsize * n_elements
    if not HEADER_NBYTES <= len(view) <= longest:
        raise FormatError(
            "encoded chunk of a length it cannot have", expected=f"{HEADER_NBYTES} to {longest} bytes", found=len(view)
        )
    method, width, k, mode = view[:4]
    n = int.from_bytes(view[4:8], "little")
    if method not in METHODS:
        raise FormatError("unknown chunk method; a newer dcr_store may know it", expected="0 to 4", found=method)
    if (width, n) != (dtype.itemsize, n_elements):
        raise FormatError(
            "chunk of another dtype or length",
            expected=f"{n_elements} of {dtype.itemsize} bytes",
            found=f"{n} of {width} bytes",
        )
    if (method in (ZERO, RAW) and k) or (method in (ZERO, RAW, DENSE) and mode):
        raise FormatError("chunk header with a field that its method has not", expected="0", found=f"{k=}, {mode=}")
    if method == DENSE and k >= 8 * width:
        raise FormatError("k of a dense chunk out of range", expected=f"below {8 * width}", found=k)
    body = StreamReader(view, HEADER_NBYTES)
    if method == ZERO:
        body.finish()
    return method, k, mode, body
