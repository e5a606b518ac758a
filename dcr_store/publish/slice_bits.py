"""The bits of one slice, packed piece by piece (``layout.pieces``), with the digests that they ought to have.

Refuses nothing; whether bits are what the digests say is for whoever uses them to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec.digest import crc64, linear_within
from dcr_store.layout.dtypes import Bits
from dcr_store.layout.pieces import Piece
from dcr_store.versions.workers import scratch


@dataclass
class SliceBits:
    """The bits of one slice that are in tensors, piece after piece.

    Attributes
    ----------
    pieces : tuple of Piece
    bits : ndarray of uintN, shape (n_elements,)
        Packed; of an anchor that is being written, what it will be.
    starts : tuple of int
        Where each piece begins in `bits`.
    digests : ndarray of uint64, shape (n_pieces,)
        CRC-64/NVME of each piece's packed bytes.
    owned : ndarray of uint64, shape (n_pieces,)
        L of the piece's bits in its chunk, zeros elsewhere.
    room : object
        Of `bits`, as the memory gave it.
    """

    pieces: tuple[Piece, ...]
    bits: Bits
    starts: tuple[int, ...]
    digests: NDArray[np.uint64]
    owned: NDArray[np.uint64]
    room: object = None

    @classmethod
    def over(cls, pieces: Sequence[Piece], bits: Bits, room: object = None) -> SliceBits:
        """Return a slice of which nothing is known but where its bits are, shape (n_elements,)."""
        starts = np.cumsum([0, *(piece.n_elements for piece in pieces)]).tolist()
        n = len(pieces)
        return cls(tuple(pieces), bits, tuple(starts[:-1]), np.zeros(n, np.uint64), np.zeros(n, np.uint64), room)

    def packed(self, index: int) -> Bits:
        """Return the bits of a piece, uintN of shape (n_elements,); a view."""
        start = self.starts[index]
        return self.bits[start : start + self.pieces[index].n_elements]

    def note(self, index: int, chunk_elements: int) -> None:
        """Take the digests of a piece from its bits."""
        self.digests[index] = crc64(self.packed(index))
        self.note_owned(index, chunk_elements)

    def take(self, index: int, new: Bits, chunk_elements: int) -> None:
        """Have other bits for a piece, and their digests: of `new` itself, not of what is read again from a file."""
        self.digests[index] = crc64(new)
        self._note_owned(index, new, chunk_elements)
        np.copyto(self.packed(index), new)

    def note_owned(self, index: int, chunk_elements: int) -> None:
        """Take `owned` of a piece from its bits."""
        self._note_owned(index, self.packed(index), chunk_elements)

    def _note_owned(self, index: int, packed: Bits, chunk_elements: int) -> None:
        piece = self.pieces[index]
        first, stop = piece.span
        chunk = scratch(piece.space, chunk_elements, "owned")
        chunk[first:stop] = 0
        piece.spread(packed, chunk)
        self.owned[index] = linear_within(chunk[first:stop], chunk[stop:].nbytes)
