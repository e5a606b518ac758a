"""A rank's copy of the last committed bits of its own slices, in memory, packed by chunk (``layout.pieces``).

Every piece has the digest that its bits ought to have, compared whenever it is used: a piece that drifted is read from
the store again. It advances when the outcome of a commit is known. Slices that are new, as after a change of the
training topology, are read from the store: only the chunks that they meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_store import events
from dcr_store.codec import kernels
from dcr_store.codec.digest import crc64, linear
from dcr_store.format.documents import SPACES, ObjectRef
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.pieces import Piece
from dcr_store.publish.ownership import Ownership
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import everywhere, replay
from dcr_store.versions.route import route
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
    """

    pieces: tuple[Piece, ...]
    bits: Bits
    starts: tuple[int, ...]
    digests: NDArray[np.uint64]
    owned: NDArray[np.uint64]

    @classmethod
    def blank(cls, pieces: Sequence[Piece]) -> SliceBits:
        """Return the bits of a slice that nothing is known of."""
        starts = np.cumsum([0, *(piece.n_elements for piece in pieces)]).tolist()
        dtype = uint_dtype(pieces[0].space) if pieces else np.dtype(np.uint8)
        n = len(pieces)
        return cls(
            tuple(pieces),
            np.empty(starts[-1], dtype),
            tuple(starts[:-1]),
            np.zeros(n, np.uint64),
            np.zeros(n, np.uint64),
        )

    def packed(self, index: int) -> Bits:
        """Return the bits of a piece, uintN of shape (n_elements,); a view."""
        start = self.starts[index]
        return self.bits[start : start + self.pieces[index].n_elements]

    def note(self, index: int, chunk_elements: int) -> None:
        """Take the digests of a piece from its bits."""
        self.digests[index] = crc64(self.packed(index))
        self._note_owned(index, chunk_elements)

    def renew_owned(self, chunk_elements: int) -> None:
        """Take `owned` from the bits again, where these are what they ought to be; the others are healed when used."""
        for index in range(len(self.pieces)):
            if crc64(self.packed(index)) == int(self.digests[index]):
                self._note_owned(index, chunk_elements)

    def _note_owned(self, index: int, chunk_elements: int) -> None:
        piece, packed = self.pieces[index], self.packed(index)
        chunk = scratch(piece.space, chunk_elements, "owned")
        chunk.fill(0)
        piece.spread(packed, chunk)
        self.owned[index] = linear(crc64(chunk), chunk.nbytes)


class Change(NamedTuple):
    """What a transaction changes of a piece.

    Attributes
    ----------
    positions : ndarray of uint32, shape (n,)
        Packed.
    values : ndarray of uintN, shape (n,)
        ``base ^ new``.
    digest : int
        Of the piece afterwards.
    mask : int
        L of the mask in the chunk.
    """

    positions: NDArray[np.uint32]
    values: Bits
    digest: int
    mask: int


@dataclass
class SliceBaseline:
    """Slices by key, all at one version. Serves one transaction at a time.

    Attributes
    ----------
    at : Located or None
        The version whose bits these are; None while there is none.
    ownership : tuple of (bytes, ObjectRef), or None
        What the seal of that version says about who owns what, and where it is: as long as the version is kept.
    is_doubtful : bool
        Whether the last transaction ended without a version, be it because what a writer has of the base was not that.
    owned : Ownership or None
        What was worked out last about who owns what, whether or not it is stored: it follows from the slices alone.
    proven : tuple of (str, tuple of str), or None
        Of the committer: the layout, and the SHA-256 of what all writers own, that were found to fit last.
    """

    chunk_elements: int
    at: Located | None = None
    slices: dict[str, SliceBits] = field(default_factory=dict)
    ownership: tuple[bytes, ObjectRef] | None = None
    owned: Ownership | None = None
    proven: tuple[str, tuple[str, ...]] | None = None
    is_doubtful: bool = False
    _pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    _healing: threading.Lock = field(default_factory=threading.Lock)

    def bring_to(self, located: Located | None) -> None:
        """Forget everything unless it is that version's."""
        if located is None or self.at is None or self.at.row.root != located.row.root:
            self.slices.clear()
            self._pieces.clear()
        if located is None or self.at is None or self.at.row.txid != located.row.txid:
            self.ownership = None
        if self.is_doubtful:
            for bits in self.slices.values():
                bits.renew_owned(self.chunk_elements)
            self.is_doubtful = False
        self.at = located

    def pieces_of(self, key: str, cut: Callable[[], tuple[Piece, ...]]) -> tuple[Piece, ...]:
        """Return the pieces of a slice, cut once."""
        if key not in self._pieces:
            self._pieces[key] = self.slices[key].pieces if key in self.slices else cut()
        return self._pieces[key]

    def keep(self, keys: Container[str]) -> None:
        """Forget all slices but these."""
        for known in (self.slices, self._pieces):
            for key in [key for key in known if key not in keys]:
                del known[key]

    def read(self, catalog: Catalog, wanted: Mapping[str, Sequence[Piece]]) -> None:
        """Read slices, by key, from the store, at the baseline's version."""
        assert self.at is not None
        blank = {key: SliceBits.blank(pieces) for key, pieces in wanted.items()}
        _read(catalog, self.at, [(bits, index) for bits in blank.values() for index in range(len(bits.pieces))])
        for bits in blank.values():
            for index in range(len(bits.pieces)):
                bits.note(index, self.chunk_elements)
        self.slices.update(blank)
        events.reached("slices.read", f"{self.at.name} {len(wanted)}")

    def heal(self, catalog: Catalog, bits: SliceBits, index: int) -> None:
        """Read one piece from the store again, unless it is right by now."""
        assert self.at is not None
        with self._healing:
            if crc64(bits.packed(index)) == int(bits.digests[index]):
                return
            _read(catalog, self.at, [(bits, index)])
            # Of what was read, and checked on the way: it may have been the digest that was wrong.
            bits.note(index, self.chunk_elements)
            events.reached("slices.healed", f"{bits.pieces[index].space} {bits.pieces[index].chunk}")

    def change(self, bits: SliceBits, index: int, change: Change) -> None:
        """XOR what a committed transaction changed into a piece."""
        kernels.engine().xor_at(bits.packed(index), change.positions, change.values)
        bits.digests[index] = change.digest
        bits.owned[index] ^= np.uint64(change.mask)


class _Gatherer:
    """A target that keeps of each chunk what pieces hold of it."""

    def __init__(self, wanted: Iterable[tuple[SliceBits, int]]) -> None:
        self.wanted: dict[tuple[str, int], list[tuple[SliceBits, int]]] = {}
        for bits, index in wanted:
            piece = bits.pieces[index]
            self.wanted.setdefault((piece.space, piece.chunk), []).append((bits, index))

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        out.fill(0)
        for bits, index in self.wanted.get((space, chunk), ()):
            bits.pieces[index].spread(bits.packed(index), out)

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        for held, index in self.wanted.get((space, chunk), ()):
            held.pieces[index].gather_chunk(bits, held.packed(index))


def _read(catalog: Catalog, located: Located, wanted: Sequence[tuple[SliceBits, int]]) -> None:
    """Replay the chunks that pieces meet, from the nearest anchor."""
    for bits, index in wanted:
        bits.packed(index).fill(0)  # a chunk of zeros is stored nowhere, and so is not written
    target = _Gatherer(wanted)
    path = route(catalog, located).path
    places = everywhere(path, ZERO)
    for space in SPACES:
        elsewhere = np.ones(len(places[space]), bool)
        elsewhere[[chunk for found, chunk in target.wanted if found == space]] = False
        places[space][elsewhere] = path.goal
    replay(catalog.objects, path, target, places)
