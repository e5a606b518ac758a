"""Pieces of slices brought to a version from the store: read whole, or, from one before it, by what changed since.

Each chunk that pieces meet is fetched once. Refuses what the store's readers refuse: objects that are missing or
damaged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dcr_store import events
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits
from dcr_store.layout.pieces import Piece
from dcr_store.publish.slice_bits import SliceBits
from dcr_store.publish.slice_memory import Earlier
from dcr_store.versions.catalog import Catalog, LazyStates, Located
from dcr_store.versions.changes import ChunkChanges, iter_chunk_changes, require_consistent
from dcr_store.versions.moving import Told, have_moved, while_kept
from dcr_store.versions.path import UNKNOWN
from dcr_store.versions.replay import only, replay
from dcr_store.versions.route import route
from dcr_store.versions.workers import scratch

SlicePiece = tuple[SliceBits, int]
"""A slice, and the index of one of its pieces."""


def states_to(catalog: Catalog, at: Located, known: Iterable[Earlier]) -> LazyStates | None:
    """Return what leads to a version, by way of those that slices may be of; None if nothing is known of any."""
    numbers = {claim.version for earlier in known for claim in earlier.claims}
    if not numbers:
        return None
    rows = [catalog.row(at.line, number) for number in sorted(numbers) if number <= at.row.version]
    states = route(catalog, at, [Located(at.line, row) for row in rows if row is not None]).path.states
    assert isinstance(states, LazyStates)
    return states


def bring(
    catalog: Catalog,
    at: Located,
    states: LazyStates | None,
    behind: Mapping[int, Sequence[SlicePiece]],
    before: Told,
) -> list[SlicePiece]:
    """Bring pieces to a version, in place; their digests stay.

    Parameters
    ----------
    states : LazyStates or None
        The way to the version, as of ``states_to``.
    behind : mapping of int to sequence of SlicePiece
        By the state on that way that they are in, or ``UNKNOWN``.
    before : Told
        What ``told_of`` said before the way was chosen: if it is not there any more, all are read whole.

    Returns
    -------
    list of SlicePiece
        All of them.
    """
    unknown = list(behind.get(UNKNOWN, ()))
    followed = {state: pieces for state, pieces in behind.items() if state != UNKNOWN}
    pieces = list(itertools.chain(*followed.values()))
    if followed:
        assert states is not None  # of what is behind, the version is on it
        try:
            _follow(catalog, states, followed)
            events.reached("slices.followed", f"{at.name} {len(pieces)}")
        except IntegrityError as error:
            if not have_moved(catalog, [at], before, error):
                raise
            unknown, pieces = [*unknown, *pieces], []
    if unknown:
        read_pieces(catalog, at, unknown)
        events.reached("slices.read", f"{at.name} {len(unknown)}")
    return [*unknown, *pieces]


def read_pieces(catalog: Catalog, located: Located, wanted: Sequence[SlicePiece]) -> None:
    """Replay the chunks that pieces meet, from the nearest anchor."""
    while_kept(catalog, [located], lambda: _replay(catalog, located, wanted))


def _replay(catalog: Catalog, located: Located, wanted: Sequence[SlicePiece]) -> None:
    for bits, index in wanted:
        bits.packed(index).fill(0)  # a chunk of zeros is stored nowhere, and so is not written
    target = _Gatherer(wanted)
    path = route(catalog, located).path
    chunks = {space: [chunk for found, chunk in target.wanted if found == space] for space in SPACES}
    replay(catalog.objects, path, target, only(path, chunks))


def _follow(catalog: Catalog, states: LazyStates, behind: Mapping[int, Sequence[SlicePiece]]) -> None:
    """Apply to pieces, by the state on the path that they are in, what lies between it and the last.

    A chunk is not seen whole; what is applied is proven by what was sealed, and the result by the next commit.
    """
    wanted = _Gatherer([])
    for step in range(min(behind), len(states)):
        if step > min(behind):
            before, contents = states[step - 1 : step + 1]
            require_consistent(before, [contents])
            chunks = {space: {chunk for found, chunk in wanted.wanted if found == space} for space in SPACES}
            for changes in iter_chunk_changes(
                catalog.objects, contents, catalog.document.chunk_elements, chunks=chunks
            ):
                for bits, index in wanted.wanted.get((changes.space, changes.chunk), ()):
                    _apply(changes, bits.pieces[index], bits.packed(index), catalog.document.chunk_elements)
        wanted.add(behind.get(step, ()))


def _apply(changes: ChunkChanges, piece: Piece, packed: Bits, chunk_elements: int) -> None:
    """Apply what a version changes in a chunk to what a piece has of it."""
    chunk = scratch(piece.space, chunk_elements, "changes")
    part = scratch(piece.space, chunk_elements, "part")[: piece.n_elements]
    chunk.fill(0)
    chunk[changes.positions] = changes.masks
    piece.gather_chunk(chunk, part)
    np.bitwise_xor(packed, part, out=packed)
    if len(changes.written):
        flags = scratch("u8", chunk_elements, "written")
        flags_part = scratch("u8", chunk_elements, "written part")[: piece.n_elements]
        flags.fill(0)
        flags[changes.written] = 1
        piece.gather_chunk(flags, flags_part)
        chunk[changes.written] = changes.values
        piece.gather_chunk(chunk, part)
        np.copyto(packed, part, where=flags_part.view(np.bool_))


class _Gatherer:
    """A target that keeps of each chunk what pieces hold of it."""

    def __init__(self, wanted: Iterable[SlicePiece]) -> None:
        self.wanted: dict[tuple[str, int], list[SlicePiece]] = {}
        self.add(wanted)

    def add(self, wanted: Iterable[SlicePiece]) -> None:
        """Keep what these hold, too."""
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
