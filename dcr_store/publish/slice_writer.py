"""What one of several writers contributes to a version: its slices, cut into pieces, encoded, put together by chunk.

Each piece (``layout.pieces``) is copied once and compared with the baseline's; the bits that are published are those of
the copy (``publish.slice_encoding``). Pieces of several slices in one chunk become one chunk, which goes on to its
partition when it is whole, or when the writer seals. That no element comes twice is for the caller to see to; refuses
what is more than was announced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec import kernels
from dcr_store.codec.portable import get_codec
from dcr_store.errors import IntegrityError, InvalidInputError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.layout.pieces import Piece
from dcr_store.publish.chunk_encoding import unfaithful
from dcr_store.publish.encoders import N_TOGETHER, Encoders
from dcr_store.publish.partitions import PartitionWriter
from dcr_store.publish.slice_bits import SliceBits
from dcr_store.publish.slice_changes import SliceChanges
from dcr_store.publish.slice_encoding import (
    Difference,
    EncodedPiece,
    Plain,
    compare_piece,
    encode_pieces,
    encode_whole,
    take_whole,
)
from dcr_store.versions.workers import scratch

_N_TRIES: Final = 3
_PLAIN_SHARE: Final = 64  # of a chunk: so many pieces in one, and more, are encoded together


Heal = Callable[[SliceBits, int], None]
"""Brings a piece of a baseline that drifted back to its base; called from workers' threads."""


@dataclass(slots=True)
class _Chunk:
    """A chunk that still waits for pieces.

    Attributes
    ----------
    arrays : dict of str to list of (int or None)
        By kind, of each part that waits in the spool: how many elements if it is plain, None if it is encoded.
    """

    n_elements: int = 0
    arrays: dict[str, list[int | None]] = field(default_factory=dict)


class SliceWriter:
    """Takes slices; see the module.

    Parameters
    ----------
    expected : mapping of (str, int) to int, or None
        How many elements come of each chunk (space, number), in all, if that is known: then partitions are stored as
        soon as they are whole. Otherwise those are that this writer fills alone, and the rest when it seals.
    """

    def __init__(
        self,
        partitions: PartitionWriter,
        layout: Layout,
        heal: Heal,
        *,
        is_anchor: bool,
        expected: Mapping[tuple[str, int], int] | None,
    ) -> None:
        self.partitions, self.codec = partitions, get_codec(partitions.codec)
        self.chunk_elements = partitions.chunk_elements
        self.is_anchor = is_anchor
        self.n_changed = 0
        self._heal = heal
        self._expected = expected
        self._occupied = {space: layout.occupied(space, self.chunk_elements) for space in SPACES}
        self._per_partition = _per_partition(expected, partitions)
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        self._passed: set[tuple[str, int]] = set()
        self._rows: dict[tuple[str, int], list[int]] = {}
        assert partitions.spool is not None
        self._spool = partitions.spool  # of what waits: encoded chunks, and what the baseline will change
        self.changes = SliceChanges(self._spool)
        self._encoders = Encoders()
        self._taking = threading.Lock()

    def write(self, key: str, bits: SliceBits, local: Bits, *, is_residual: bool) -> None:
        """Take a slice; returns when all of it has been read.

        Parameters
        ----------
        key : str
            Of the slice in the baseline.
        bits : SliceBits
            What the baseline has of it; for an anchor it is written.
        local : ndarray of uintN, shape (n,)
            The slice, flat in C order.
        """
        runs = list(_runs(bits.pieces, self.chunk_elements))
        for first in range(0, len(runs), N_TOGETHER):
            batch = runs[first : first + N_TOGETHER]
            if self.is_anchor:
                self._encoders.give(batch, partial(self._copied, bits, local), partial(self._encode_copies, key, bits))
            else:
                encode = partial(self._encode_differences, key, bits, is_residual)
                self._encoders.give(batch, partial(self._compared, bits, local), encode)
        self._encoders.settle()

    def _copied(self, bits: SliceBits, local: Bits, run: range) -> list[Bits]:
        """Copy the pieces of an anchor, which are encoded from there: a baseline's files are no private memory."""
        buffer, copies, start = scratch(bits.pieces[run[0]].space, self.chunk_elements, "anchor"), [], 0
        for index in run:
            new = buffer[start : start + bits.pieces[index].n_elements]
            bits.pieces[index].gather(local, new)
            copies.append(new)
            start += len(new)
        return copies

    def _compared(self, bits: SliceBits, local: Bits, run: range) -> list[Difference]:
        return [self._compare(bits, index, local) for index in run]

    def _compare(self, bits: SliceBits, index: int, local: Bits) -> Difference:
        """Copy a piece and compare it with the baseline."""
        piece = bits.pieces[index]
        new = scratch(piece.space, self.chunk_elements)[: piece.n_elements]
        piece.gather(local, new)
        for _ in range(_N_TRIES):
            found = compare_piece(bits.packed(index), int(bits.digests[index]), new)
            if found is not None:
                return found
            self._heal(bits, index)
        raise IntegrityError(
            f"the baseline's part of chunk {piece.chunk} of {piece.space} changes while it is used",
            expected="bits that stay",
            found="other bits each time",
        )

    def _encode_copies(self, key: str, bits: SliceBits, run: range, copies: Sequence[Bits]) -> None:
        for index, new in zip(run, copies, strict=True):
            bits.take(index, new, self.chunk_elements)
        encoded = []
        for index, new in zip(run, copies, strict=True):
            piece = bits.pieces[index]
            if self._stays_plain(piece):
                encoded.append(take_whole(piece, new, self.chunk_elements))
            else:
                encoded.append(encode_whole(self.codec, piece, new, self.chunk_elements))
        self._take(key, bits, run, encoded)

    def _encode_differences(
        self, key: str, bits: SliceBits, is_residual: bool, run: range, found: Sequence[Difference]
    ) -> None:
        pieces = [bits.pieces[index] for index in run]
        plain = [self._stays_plain(piece) for piece in pieces]
        encoded = encode_pieces(self.codec, pieces, found, self.chunk_elements, plain=plain, is_residual=is_residual)
        self._take(key, bits, run, encoded)

    def _stays_plain(self, piece: Piece) -> bool:
        return piece.n_elements * _PLAIN_SHARE <= self.chunk_elements and piece.n_elements != self._whole(piece)

    def _whole(self, piece: Piece) -> int:
        """Return how many elements come of a piece's chunk, if from this writer alone."""
        if self._expected is not None:
            return self._expected.get((piece.space, piece.chunk), 0)
        return int(self._occupied[piece.space][piece.chunk])

    def _take(self, key: str, bits: SliceBits, run: range, encoded: Sequence[EncodedPiece]) -> None:
        with self._taking:
            for index, item in zip(run, encoded, strict=True):
                self._take_piece(key, bits, index, item)

    def _take_piece(self, key: str, bits: SliceBits, index: int, encoded: EncodedPiece) -> None:
        """Note what a piece adds; the caller holds `_taking`."""
        piece = bits.pieces[index]
        place = (piece.space, piece.chunk)
        chunk = self._chunks.setdefault(place, _Chunk())
        chunk.n_elements += piece.n_elements
        whole = self._whole(piece)
        # More would make its partition come twice, under one key.
        if place in self._passed or (self._expected is not None and chunk.n_elements > whole):
            raise InvalidInputError(
                f"writer {self.partitions.writer} writes more to chunk {piece.chunk} of {piece.space} than it "
                "announced with `slices`; announce all, residual fragments too (slices.flat_part), or nothing, as "
                "where it writes some of a packed dtype"
            )
        row = self._rows.setdefault(place, [0, 0, 0])
        row[1 if "present" in encoded.arrays else 0] ^= encoded.change
        difference = encoded.difference
        if not self.is_anchor:
            row[2] ^= int(bits.owned[index])
            if difference is not None and len(difference.positions):
                self.changes.add(key, index, piece.n_elements, difference, encoded.change)
        self.n_changed += piece.n_elements if difference is None else len(difference.positions)
        if chunk.n_elements == whole:
            self._pass_on(*place, encoded.arrays)
            return
        for kind, part in encoded.arrays.items():
            waiting = chunk.arrays.setdefault(kind, [])
            data = part.to_bytes() if isinstance(part, Plain) else part
            self._spool.put(_waiting(kind, *place), len(waiting), data)
            waiting.append(len(part.positions) if isinstance(part, Plain) else None)

    def _pass_on(self, space: str, chunk: int, last: Mapping[str, bytes | Plain]) -> None:
        """Hand on a chunk: what waits of it, and what came last."""
        done = self._chunks.pop((space, chunk))
        self._passed.add((space, chunk))
        per = self.partitions.chunks_per_partition(space)
        n_expected = self._per_partition.get((space, chunk // per), per)
        for kind in ("mask", "value", "present"):
            dtype = np.dtype(np.uint8) if kind == "present" else uint_dtype(space)
            parts: list[bytes | Plain] = []
            for index, n in enumerate(done.arrays.get(kind, [])):
                data = self._spool.pop(_waiting(kind, space, chunk), index)
                parts.append(data if n is None else Plain.from_bytes(data, dtype, n))
            if kind in last:
                parts.append(last[kind])
            if kind != "mask" and not parts and self._expected is None:
                continue
            joined = self._joined(space, chunk, dtype, parts)
            self.partitions.add_part(f"{space}/{kind}", chunk, joined, n_expected)

    def _joined(self, space: str, chunk: int, dtype: np.dtype[Any], parts: Sequence[bytes | Plain]) -> bytes | None:
        """Return the parts of one chunk as one encoded chunk, None if there are none."""
        if not parts:
            return None
        if len(parts) == 1 and isinstance(parts[0], bytes):
            return parts[0]
        bits: Bits = np.zeros(self.chunk_elements, dtype)
        for part in parts:
            if isinstance(part, Plain):
                kernels.engine().xor_at(bits, part.positions, part.values)
            else:
                self.codec.apply(part, bits)
        encoded = self.codec.encode(bits)
        if not np.array_equal(self.codec.decode(encoded, dtype, len(bits)), bits):
            raise unfaithful(space, chunk)
        return encoded

    def finish(self) -> dict[str, NDArray[np.uint64]]:
        """Encode what is left; return the contributions, uint64 of shape (n, 4) per space, ascending by chunk."""
        self._encoders.drain()
        for place in sorted(self._chunks):
            self._pass_on(*place, {})
        rows: dict[str, list[list[int]]] = {space: [] for space in SPACES}
        for (space, chunk), row in sorted(self._rows.items()):
            rows[space].append([chunk, *row])
        return {space: np.array(found, np.uint64).reshape(len(found), 4) for space, found in rows.items()}

    def close(self) -> None:
        """Stop the pools and drop what waited."""
        self._encoders.close()
        self.partitions.close()
        self._spool.close()
        self.changes.clear()


def _runs(pieces: Sequence[Piece], chunk_elements: int) -> Iterator[range]:
    """Yield the indices of pieces that are taken together, step by step: of a chunk's elements, or one piece."""
    first, n_elements = 0, 0
    for index, piece in enumerate(pieces):
        n_elements += piece.n_elements
        if n_elements > chunk_elements and index > first:
            yield range(first, index)
            first, n_elements = index, piece.n_elements
    if first < len(pieces):
        yield range(first, len(pieces))


def _waiting(kind: str, space: str, chunk: int) -> str:
    return f"waiting {space}/{kind} {chunk}"


def _per_partition(
    expected: Mapping[tuple[str, int], int] | None, partitions: PartitionWriter
) -> dict[tuple[str, int], int]:
    """Return how many chunks come of each partition (space, number), where that is known."""
    found: dict[tuple[str, int], int] = {}
    for space, chunk in expected or ():
        place = (space, chunk // partitions.chunks_per_partition(space))
        found[place] = found.get(place, 0) + 1
    return found
