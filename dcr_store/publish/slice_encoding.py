"""A piece of a slice compared with its base, and encoded as what it adds to its chunk. Pure.

What differs becomes a mask, or, of residual fragments, overwrites; what has no base, a mask over zeros. Refuses to
return a chunk that does not decode to what was encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec import kernels
from dcr_store.codec.chunk import compare
from dcr_store.codec.digest import crc64, linear
from dcr_store.codec.portable import Codec
from dcr_store.layout.dtypes import Bits
from dcr_store.layout.pieces import Piece
from dcr_store.publish.chunk_encoding import unfaithful
from dcr_store.versions.workers import scratch

Positions = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Difference:
    """A piece after comparison.

    Attributes
    ----------
    positions, masks, news : ndarrays of shape (n,)
        What changed, packed: uint32; uintN (``base ^ new``); uintN (``new``).
    digest : int
        Of the piece's packed bytes afterwards.
    """

    positions: Positions
    masks: Bits
    news: Bits
    digest: int


@dataclass(frozen=True, slots=True)
class Plain:
    """What a small piece adds to a chunk's array, not encoded: many of them are encoded as one chunk.

    Attributes
    ----------
    positions : ndarray of uint32, shape (n,)
        In the chunk.
    values : ndarray of the array's dtype, shape (n,)
        None of them zero.
    """

    positions: Positions
    values: Bits

    def to_bytes(self) -> bytes:
        """Return both, one after the other."""
        return self.positions.tobytes() + self.values.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, dtype: np.dtype[Any], n: int) -> Plain:
        """Return what ``to_bytes`` made of `n` values; views of `data`."""
        positions = np.frombuffer(data, np.uint32, n)
        return cls(positions, np.frombuffer(data, dtype, n, positions.nbytes))


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """What a piece adds to a version.

    Attributes
    ----------
    arrays : mapping of str to bytes or Plain
        The chunk of each kind of array, encoded unless the piece is small; none if nothing changed.
    change : int
        L of what changed, in the chunk.
    difference : Difference or None
        From the baseline; None of an anchor's piece.
    """

    arrays: Mapping[str, bytes | Plain]
    change: int
    difference: Difference | None


def compare_piece(base: Bits, base_digest: int, new: Bits) -> Difference | None:
    """Compare a piece with its base.

    Parameters
    ----------
    base, new : ndarray of uintN, shape (n_elements,)
        Packed. `base` is read only and need not hold still; `new` is nobody else's.
    base_digest : int
        What the digest of `base` ought to be.

    Returns
    -------
    Difference or None
        None if `base` was not what it ought to be; `new` is as it was in both cases.
    """
    positions, masks, digest = compare(base, new)
    # The base as it was seen: so that what is published leads from the base to `new`, whatever `base` does meanwhile.
    engine = kernels.engine(new.nbytes)
    engine.xor_at(new, positions, masks)
    seen = crc64(new)
    engine.xor_at(new, positions, masks)
    return Difference(positions, masks, new[positions], digest) if seen == base_digest else None


def encode_pieces(
    codec: Codec,
    pieces: Sequence[Piece],
    found: Sequence[Difference],
    chunk_elements: int,
    *,
    plain: Sequence[bool],
    is_residual: bool = False,
) -> list[EncodedPiece]:
    """Encode what differs in pieces, and prove that it decodes to itself: step by step, each for all of them.

    A step that follows itself finds its code and tables in the caches: for short pieces that is a fifth of the time.

    Parameters
    ----------
    plain : sequence of bool
        For each piece, whether what differs stays plain.
    is_residual : bool
        Whether it becomes overwrites.

    Raises
    ------
    IntegrityError
        If an encoded chunk does not decode to what was encoded.
    """
    together = zip(pieces, found, plain, strict=True)
    changed = [(piece, item, is_plain) for piece, item, is_plain in together if len(item.positions)]
    placed = [piece.place(item.positions, item.masks) for piece, item, _ in changed]
    engine = kernels.engine()
    changes = [engine.digest_sparse(places, masks, chunk_elements) for places, masks in placed]
    if is_residual:
        chunks = []
        for piece, item, _ in changed:
            places, values = piece.place(item.positions, item.news)
            kept = values != 0
            chunks.append({"present": (places, np.ones(len(places), np.uint8))})
            if kept.any():
                chunks[-1]["value"] = places[kept], values[kept]
    else:
        chunks = [{"mask": item} for item in placed]
    encoded: list[dict[str, bytes | Plain]] = [
        {kind: Plain(*part) if is_plain else codec.encode_sparse(*part, chunk_elements) for kind, part in chunk.items()}
        for (_, _, is_plain), chunk in zip(changed, chunks, strict=True)
    ]
    for (piece, _, _), chunk, arrays in zip(changed, chunks, encoded, strict=True):
        for kind, (places, values) in chunk.items():
            data = arrays[kind]
            if isinstance(data, Plain):
                continue
            decoded, decoded_values = codec.decode_sparse(data, values.dtype, chunk_elements)
            if not (np.array_equal(places, decoded) and np.array_equal(values, decoded_values)):
                raise unfaithful(piece.space, piece.chunk)
    done = iter(zip(encoded, changes, strict=True))
    return [EncodedPiece(*(next(done) if len(item.positions) else ({}, 0)), item) for item in found]


def take_whole(piece: Piece, new: Bits, chunk_elements: int) -> EncodedPiece:
    """Take a small piece as a mask over zeros, plain."""
    positions = np.flatnonzero(new).astype(np.uint32)
    if len(positions) == 0:
        return EncodedPiece({}, 0, None)
    places, values = piece.place(positions, new[positions])
    change = kernels.engine().digest_sparse(places, values, chunk_elements)
    return EncodedPiece({"mask": Plain(places, values)}, change, None)


def encode_whole(codec: Codec, piece: Piece, new: Bits, chunk_elements: int) -> EncodedPiece:
    """Encode a piece as a mask over zeros, and prove that it decodes to itself."""
    chunk = scratch(piece.space, chunk_elements)
    chunk.fill(0)
    piece.spread(new, chunk)
    if not chunk.any():
        return EncodedPiece({}, 0, None)
    data = codec.encode(chunk)
    if not np.array_equal(codec.decode(data, chunk.dtype, len(chunk)), chunk):
        raise unfaithful(piece.space, piece.chunk)
    return EncodedPiece({"mask": data}, linear(crc64(chunk), chunk.nbytes), None)
