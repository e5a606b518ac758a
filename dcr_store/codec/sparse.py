"""Method 3, sparse: positions as gaps and values apart (docs/spec/v1.md, section 6.2).

Refuses bodies whose streams contradict each other, positions out of range, zero values and unused bits that are set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dcr_store.codec import kernels
from dcr_store.codec.streams import StreamReader, append_stream, append_uint
from dcr_store.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[np.unsignedinteger[Any]]

MAX_K: Final = 16
PLANES: Final = 0
CODED: Final = 1
# Zstd's entropy coder does best on gap bytes if a gap is well below 255 on average (docs/design/001-chunk-coding.md).
_MEAN_GAP: Final = 200


def choose_k(n: int, n_elements: int) -> int:
    """Return how many low bits of the gaps to keep apart, for `n` of `n_elements` non-zero."""
    return min(MAX_K, max(0, (n_elements // n // _MEAN_GAP).bit_length()))


def encode_body(positions: NDArray[np.uint32], values: Bits, n_elements: int) -> tuple[int, int, bytearray]:
    """Return ``k``, the value mode and the body for the non-zero elements, at least one."""
    engine = kernels.engine()
    k = choose_k(len(positions), n_elements)
    out = bytearray()
    append_uint(out, len(positions))
    high, low = engine.split_gaps(positions, k)
    append_stream(out, high)
    if k:
        append_stream(out, low, compressible=False)
    codes, escaped = engine.pack_values(values)
    coded = bytearray()
    mode = CODED
    if 2 * len(escaped) <= len(values):
        append_stream(coded, codes)
        append_planes(coded, engine.split_planes(escaped, 0))
    else:
        mode = PLANES
        append_planes(coded, engine.split_planes(values, 0))
    return k, mode, out + coded


def append_planes(out: bytearray, planes: list[NDArray[np.uint8]]) -> None:
    """Append a stream for each byte plane."""
    for plane in planes:
        append_stream(out, plane)


def decode_body(
    body: StreamReader, dtype: np.dtype[Any], n_elements: int, k: int, mode: int
) -> tuple[NDArray[np.uint32], Bits]:
    """Return the positions and values of a body, checked; the reader stands at its end.

    Raises
    ------
    FormatError
        The body violates the format; what it allocates until then is bounded by the chunk's decoded length.
    """
    engine = kernels.engine()
    if k > MAX_K:
        raise FormatError("k of a sparse chunk out of range", expected=f"0 to {MAX_K}", found=k)
    if mode not in (PLANES, CODED):
        raise FormatError("unknown value mode of a sparse chunk", expected="0 or 1", found=mode)
    n = body.read_uint("number of non-zero elements")
    if not 1 <= n <= n_elements:
        raise FormatError("impossible number of non-zero elements", expected=f"1 to {n_elements}", found=n)
    high = body.read_stream("gaps", n, n_elements)
    low = body.read_stream("low bits of the gaps", k * -(-n // 8)) if k else np.empty(0, np.uint8)
    _refuse_unused_bits("low bits of the gaps", low[-(-n // 8) - 1 :: -(-n // 8)] if k else low, n % 8)
    joined, n_left_over = engine.join_gaps(high, low, n, k)
    if len(joined) != n or n_left_over:
        raise FormatError(
            "gaps do not hold as many gaps as elements",
            expected=n,
            found=f"{len(joined)}, {n_left_over} carries left over",
        )
    if joined[-1] >= n_elements:
        raise FormatError("position out of range", expected=f"below {n_elements}", found=int(joined[-1]))
    return joined.astype(np.uint32), _decode_values(body, dtype, n, mode)


def _decode_values(body: StreamReader, dtype: np.dtype[Any], n: int, mode: int) -> Bits:
    engine = kernels.engine()
    n_apart = n
    codes = np.empty(0, np.uint8)
    if mode == CODED:
        codes = body.read_stream("value codes", -(-n // 4))
        _refuse_unused_bits("value codes", codes[-1:], 2 * (n % 4))
        n_apart = engine.count_escapes(codes, n)
    apart = np.empty(n_apart, dtype)
    engine.join_planes([body.read_stream(f"value plane {j}", n_apart) for j in range(dtype.itemsize)], 0, apart)
    if not apart.all():
        raise FormatError("a sparse chunk holds a zero value", expected="non-zero values", found=0)
    return engine.unpack_values(codes, apart, n) if mode == CODED else apart


def _refuse_unused_bits(what: str, last: NDArray[np.uint8], n_used: int) -> None:
    if n_used and np.any(last >> n_used):
        raise FormatError(f"unused bits of {what} are set", expected=0, found=int(last.max() >> n_used))
