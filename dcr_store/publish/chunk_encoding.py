"""A chunk of a state compared with its base and encoded as a mask, or encoded whole. Pure.

What is returned was proven: by decoding, and by the digest that the base has. Refuses a chunk that does not decode to
what was encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcr_store.codec.chunk import compare
from dcr_store.codec.digest import crc64, zeros_digest
from dcr_store.codec.portable import Codec
from dcr_store.errors import IntegrityError
from dcr_store.layout.dtypes import Bits


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk after comparison.

    Attributes
    ----------
    data : bytes or None
        The encoded mask, None if nothing changed.
    base, new : int
        Digests before and after.
    """

    space: str
    chunk: int
    data: bytes | None
    n_changed: int
    base: int
    new: int


def encode_delta(codec: Codec, space: str, chunk: int, base: Bits, base_digest: int, new: Bits) -> EncodedChunk | None:
    """Compare `new` with `base`, encode the mask, and prove that it leads from the one to the other.

    The encoded mask is applied to `new` and has to give bits of the digest `base_digest`. That proves at once that the
    chunk decodes to the mask, and that the bits it was compared with, whatever else happens to them, were the base's.

    Parameters
    ----------
    base : ndarray of uintN, shape (n,)
        Read only; need not hold still.
    base_digest : int
        What the digest of `base` ought to be.
    new : ndarray of uintN, shape (n,)
        Nobody else's; holds the base's bits afterwards.

    Returns
    -------
    EncodedChunk or None
        None if `base` was not what it ought to be; `new` is as it was then.

    Raises
    ------
    IntegrityError
        If the encoded chunk does not decode to the mask.
    """
    positions, values, digest = compare(base, new)
    if len(positions) == 0:
        return EncodedChunk(space, chunk, None, 0, digest, digest) if digest == base_digest else None
    data = codec.encode_sparse(positions, values, len(new))
    codec.apply(data, new)
    if crc64(new) == base_digest:
        return EncodedChunk(space, chunk, data, len(positions), base_digest, digest)
    codec.apply(data, new)
    decoded, decoded_values = codec.decode_sparse(data, new.dtype, len(new))
    if not (np.array_equal(positions, decoded) and np.array_equal(values, decoded_values)) or crc64(new) != digest:
        raise unfaithful(space, chunk)
    return None


def encode_anchor(codec: Codec, space: str, chunk: int, new: Bits) -> EncodedChunk:
    """Encode `new` whole, as a delta from zero, and prove that it decodes to itself."""
    zero = zeros_digest(new.nbytes)
    if not new.any():
        return EncodedChunk(space, chunk, None, 0, zero, zero)
    data = codec.encode(new)
    if not np.array_equal(codec.decode(data, new.dtype, len(new)), new):
        raise unfaithful(space, chunk)
    return EncodedChunk(space, chunk, data, 0, zero, crc64(new))


def unfaithful(space: str, chunk: int) -> IntegrityError:
    """Return the error of a chunk whose encoding does not decode to it."""
    return IntegrityError(
        f"chunk {chunk} of {space} does not decode to what was encoded; nothing was published: check the memory of "
        "this machine",
        expected="the mask",
        found="other bits",
    )
