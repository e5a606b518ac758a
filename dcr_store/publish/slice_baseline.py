"""A rank's copy of the last committed bits of its own slices, packed by chunk (``layout.pieces``), in some memory.

Every piece has the digest that its bits ought to have, compared whenever it is used: a piece that drifted is read from
the store again. It advances when the outcome of a commit is known. Bits from before, be they of a process that has
ended, of a version that others have followed by more, or of a transaction without an outcome, are proven first, piece
by piece: one that is of a version further back gets the changes since, one that is of none is read from the store, as
are slices that are new. All that are announced are read together, each chunk that they meet once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcr_store import events
from dcr_store.codec import kernels
from dcr_store.codec.digest import crc64
from dcr_store.format.documents import ObjectRef
from dcr_store.layout.dtypes import ALIGNMENT_NBYTES, uint_dtype
from dcr_store.layout.pieces import Piece
from dcr_store.objects.transfer import map_bounded
from dcr_store.publish.ownership import Ownership
from dcr_store.publish.slice_bits import SliceBits
from dcr_store.publish.slice_changes import SliceChanges
from dcr_store.publish.slice_memory import Claim, Earlier, Memory, OwnMemory
from dcr_store.publish.slice_reading import bring, read_pieces, states_to
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import told_of
from dcr_store.versions.path import UNKNOWN
from dcr_store.versions.workers import n_workers


@dataclass
class SliceBaseline:
    """Slices by key, all at one version. Serves one transaction at a time.

    Attributes
    ----------
    memory : Memory
        Where their bits are.
    at : Located or None
        The version whose bits these are; None while there is none.
    ownership : tuple of (bytes, ObjectRef), or None
        What the seal of that version says about who owns what, and where it is: as long as the version is kept.
    n_doubts : int
        How many transactions in a row ended without a version, be it because what a writer has of the base was not
        that. After one, digests are taken from the bits again; after two, the bits are read from the store: they may be
        wrong, and their digests agree with them, which this writer alone cannot tell.
    owned : Ownership or None
        What was worked out last about who owns what, whether or not it is stored: it follows from the slices alone.
    proven : tuple of (str, tuple of str), or None
        Of the committer: the layout, and the writers with the SHA-256 of what each owns, that were found to fit last.
    """

    chunk_elements: int
    memory: Memory = field(default_factory=OwnMemory)
    at: Located | None = None
    slices: dict[str, SliceBits] = field(default_factory=dict)
    ownership: tuple[bytes, ObjectRef] | None = None
    owned: Ownership | None = None
    proven: tuple[str, tuple[str, ...]] | None = None
    n_doubts: int = 0
    _earlier: dict[str, Earlier] = field(default_factory=dict)
    _layout: str | None = None
    _pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)
    _healing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Take what the memory has found."""
        self._earlier, self._layout = self.memory.found(), self.memory.layout

    def bring_to(self, located: Located | None) -> None:
        """Go on from a version; what is here is proven again unless it is that version's. None forgets everything."""
        if located is None or self.at is None or self.at.row.txid != located.row.txid:
            self.ownership = None
        if self.n_doubts:
            self.owned = None
        if located is None or located.row.layout != self._layout or self.n_doubts > 1:
            self.forget()
        elif self.n_doubts or self.at is None or self.at.row.root != located.row.root:
            self._set_aside()
        if located is not None:
            self._layout = located.row.layout
        self.at = located
        self._free()

    def forget(self) -> None:
        """Forget all slices."""
        self.slices.clear()
        self._earlier.clear()
        self._pieces.clear()
        self.at, self._layout, self.n_doubts = None, None, 0

    def _set_aside(self) -> None:
        """Let every slice be proven again before it is used."""
        if self.at is not None:
            for key, bits in self.slices.items():
                self._earlier[key] = Earlier(bits.bits, bits.room, (Claim.of(self.at, bits.digests),))
        self.slices.clear()

    def _free(self) -> None:
        held: list[SliceBits | Earlier] = [*self.slices.values(), *self._earlier.values()]
        self.memory.keep(bits.room for bits in held)

    def pieces_of(self, key: str, cut: Callable[[], tuple[Piece, ...]]) -> tuple[Piece, ...]:
        """Return the pieces of a slice, cut once."""
        if key not in self._pieces:
            self._pieces[key] = self.slices[key].pieces if key in self.slices else cut()
        return self._pieces[key]

    def expect(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        """Hear which slices are going to be blank, so that their bits may be in one place."""
        self.memory.expect(sum(_nbytes(pieces) for pieces in wanted.values()))

    def blank(self, pieces: Sequence[Piece]) -> SliceBits:
        """Return room for a slice, of any content."""
        n_elements = sum(piece.n_elements for piece in pieces)
        return SliceBits.over(pieces, *self.memory.take(n_elements, _dtype(pieces)))

    # ------------------------------------------------------------------ reading

    def read(self, catalog: Catalog, wanted: Mapping[str, Sequence[Piece]]) -> bool:
        """Have slices, by key, at the baseline's version: from what was here before, else from the store.

        Returns
        -------
        bool
            Whether anything was read, which a note would save who comes after this process.
        """
        assert self.at is not None
        missing = {key: pieces for key, pieces in wanted.items() if key not in self.slices}
        if not missing:
            return False
        known = {key: self._earlier[key] for key, pieces in missing.items() if self._fits(key, pieces)}
        self.expect({key: pieces for key, pieces in missing.items() if key not in known})
        found = {
            key: SliceBits.over(pieces, known[key].bits, known[key].room) if key in known else self.blank(pieces)
            for key, pieces in missing.items()
        }
        before = told_of(catalog, [self.at])
        states = states_to(catalog, self.at, known.values())
        chain = [self.at] if states is None else catalog.along(self.at.line, states.edges)
        items = [(key, index) for key, bits in found.items() for index in range(len(bits.pieces))]

        def prove(item: tuple[str, int]) -> int:
            return self._prove(found[item[0]], item[1], known.get(item[0]), chain)

        behind: dict[int, list[tuple[SliceBits, int]]] = {}
        for (key, index), state in zip(items, map_bounded(prove, items, n_parallel=n_workers()), strict=True):
            if state != len(chain) - 1:
                behind.setdefault(state, []).append((found[key], index))
        brought = bring(catalog, self.at, states, behind, before)

        def note(item: tuple[SliceBits, int]) -> None:
            item[0].note(item[1], self.chunk_elements)

        for _ in map_bounded(note, brought, n_parallel=n_workers()):
            pass
        self.slices.update(found)
        for key in found:
            self._earlier.pop(key, None)
        return bool(brought)

    def _fits(self, key: str, pieces: Sequence[Piece]) -> bool:
        earlier = self._earlier.get(key)
        return (
            earlier is not None
            and len(earlier.bits) == sum(piece.n_elements for piece in pieces)
            and earlier.bits.dtype == _dtype(pieces)
            and all(len(claim.digests) == len(pieces) for claim in earlier.claims)
        )

    def _prove(self, bits: SliceBits, index: int, earlier: Earlier | None, chain: Sequence[Located]) -> int:
        """Return which version of the chain a piece is of, the newest; ``UNKNOWN`` if none."""
        if earlier is None:
            return UNKNOWN
        digest, found = crc64(bits.packed(index)), UNKNOWN
        for claim in earlier.claims:
            for place, located in enumerate(chain):
                held = (located.row.version, located.row.txid, located.row.root)
                if int(claim.digests[index]) == digest and held == (claim.version, claim.txid, claim.root):
                    found = max(found, place)
        if found == len(chain) - 1:
            bits.digests[index] = digest
            bits.note_owned(index, self.chunk_elements)
        return found

    def heal(self, catalog: Catalog, bits: SliceBits, index: int) -> None:
        """Read one piece from the store again, unless it is right by now."""
        assert self.at is not None
        with self._healing:
            if crc64(bits.packed(index)) == int(bits.digests[index]):
                return
            read_pieces(catalog, self.at, [(bits, index)])
            # Of what was read, and checked on the way: it may have been the digest that was wrong.
            bits.note(index, self.chunk_elements)
            events.reached("slices.healed", f"{bits.pieces[index].space} {bits.pieces[index].chunk}")

    # ------------------------------------------------------------------ advancing

    def note(self) -> None:
        """Note what is here, for a process that comes after this one."""
        assert self.at is not None
        self._note(self.at, self.slices)

    def _note(self, located: Located, slices: Mapping[str, SliceBits]) -> None:
        noted = {key: (bits.room, bits.digests) for key, bits in slices.items()}
        self.memory.note(located, located.row.layout, noted)

    def adopt(self, located: Located, used: Mapping[str, SliceBits]) -> None:
        """Take the bits of a state that was stored whole, and has been committed."""
        self._settle(located, used)
        self._note(located, used)

    def advance(self, located: Located, used: Mapping[str, SliceBits], changes: SliceChanges) -> None:
        """XOR what a committed transaction changes into the slices that it used, and forget the others."""
        self.slices = {}  # whoever interrupts this leaves nothing that could be taken for the version before
        for key, index, digest, mask in changes.marks():
            used[key].digests[index] = digest
            used[key].owned[index] ^= np.uint64(mask)
        # A kill before leaves the bits of the version before, and its note; after, those of either, and both notes.
        self._note(located, used)
        for key, index, positions, values in changes.changed():
            kernels.engine().xor_at(used[key].packed(index), positions, values)
            events.reached("slices.piece.advanced", f"{key} {index}")
        self._settle(located, used)

    def _settle(self, located: Located, used: Mapping[str, SliceBits]) -> None:
        self.slices = {}  # whoever interrupts this leaves nothing that could be taken for another version
        self.at, self._layout = located, located.row.layout
        self.slices = dict(used)
        self._earlier.clear()
        for key in [key for key in self._pieces if key not in self.slices]:
            del self._pieces[key]
        self._free()


def _dtype(pieces: Sequence[Piece]) -> np.dtype[Any]:
    return uint_dtype(pieces[0].space) if pieces else np.dtype(np.uint8)


def _nbytes(pieces: Sequence[Piece]) -> int:
    """Return how many bytes a slice takes, in a place that is aligned."""
    nbytes = sum(piece.n_elements for piece in pieces) * _dtype(pieces).itemsize
    return max(1, -(-nbytes // ALIGNMENT_NBYTES)) * ALIGNMENT_NBYTES
