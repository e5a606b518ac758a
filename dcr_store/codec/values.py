"""The values of a chunk's non-zero elements: byte planes, or 2-bit codes and escapes (docs/spec/v1.md, section 6.2).

Refuses zero values and unused bits that are set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dcr_store.codec import kernels
from dcr_store.codec.streams import StreamReader, append_stream, stored_nbytes
from dcr_store.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    Bits = NDArray[np.unsignedinteger[Any]]

PLANES: Final = 0
CODED: Final = 1
# 1 brings the exponent of BF16 and F32 into one byte; 3 and 6 leave the least significant bits of it there and fill up
# with bits of the mantissa, on which zstd's entropy coder does better (docs/design/001-chunk-coding.md).
_ROTATIONS: Final = (0, 1, 3, 6)
_N_PIECES: Final = 8
_PIECE: Final = 1 << 11
_WORTH_ROTATING: Final = 0.005


def append_values(out: bytearray, values: Bits, *, rotate: bool) -> tuple[int, int]:
    """Append the streams of values, none of them zero; return the rotation of their planes and the value mode.

    Parameters
    ----------
    out : bytearray
        Grows by the streams.
    values : ndarray of uintN, shape (n,)
        In the order of their positions.
    rotate : bool
        Whether the method has a field for a rotation.
    """
    engine = kernels.engine()
    codes, escaped = engine.pack_values(values)
    if 2 * len(escaped) <= len(values):
        append_stream(out, codes)
        append_planes(out, escaped, 0)
        return 0, CODED
    rotation = choose_rotation(values) if rotate else 0
    append_planes(out, values, rotation)
    return rotation, PLANES


def append_planes(out: bytearray, values: Bits, rotation: int) -> None:
    """Append a stream for each byte plane of values rotated left by `rotation` bits."""
    for j in range(values.dtype.itemsize):
        append_stream(out, kernels.engine().split_plane(values, rotation, j))


def choose_rotation(values: Bits) -> int:
    """Return the rotation that makes the planes smallest, as tried out on a sample."""
    if values.dtype.itemsize == 1:
        return 0  # it would only rename the symbols
    sample = values
    if len(values) > _N_PIECES * _PIECE:
        starts = np.linspace(0, len(values) - _PIECE, _N_PIECES).astype(np.intp)
        sample = np.concatenate([values[start : start + _PIECE] for start in starts])
    split, n_planes = kernels.engine().split_plane, values.dtype.itemsize
    nbytes = [sum(stored_nbytes(split(sample, rotation, j)) for j in range(n_planes)) for rotation in _ROTATIONS]
    best = min(nbytes)
    # A sample says nothing of patterns that repeat far apart; rotating breaks them up and must be worth it.
    return _ROTATIONS[nbytes.index(best)] if nbytes[0] - best > _WORTH_ROTATING * sample.nbytes else 0


def read_values(body: StreamReader, dtype: np.dtype[Any], n: int, rotation: int, mode: int) -> Bits:
    """Read `n` values.

    Raises
    ------
    FormatError
        The streams violate the format.
    """
    engine = kernels.engine()
    if mode not in (PLANES, CODED):
        raise FormatError("unknown value mode; a newer dcr_store may know it", expected="0 or 1", found=mode)
    if rotation >= 8 * dtype.itemsize:
        raise FormatError("rotation of values out of range", expected=f"below {8 * dtype.itemsize}", found=rotation)
    n_apart = n
    codes = np.empty(0, np.uint8)
    if mode == CODED:
        codes = body.read_stream("value codes", -(-n // 4))
        refuse_unused_bits("value codes", codes[-1:], 2 * n % 8)
        n_apart = engine.count_escapes(codes, n)
    apart = np.empty(n_apart, dtype)
    read_planes(body, rotation, apart)
    if not apart.all():
        raise FormatError("a value of a changed element is zero", expected="non-zero values", found=0)
    return engine.unpack_values(codes, apart, n) if mode == CODED else apart


def read_planes(body: StreamReader, rotation: int, out: Bits) -> None:
    """Read the streams of the byte planes of as many values as `out`, which is overwritten; one plane at a time."""
    for j in range(out.dtype.itemsize):
        kernels.engine().join_plane(body.read_stream(f"byte plane {j}", len(out)), rotation, j, out)


def refuse_unused_bits(what: str, last_bytes: U8, n_used: int) -> None:
    """Refuse bytes of which more than the `n_used` low bits are set; 0 means that all bits are in use."""
    if n_used and np.any(last_bytes >> n_used):
        raise FormatError(f"unused bits of {what} are set", expected=0, found=int((last_bytes >> n_used).max()))
