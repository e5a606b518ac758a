"""What one of several writers contributes to a version: its slices compared with its baseline, encoded, digested.

A slice is cut into pieces (``layout.pieces``). Each is copied once, packed, compared with the baseline's piece, and
what differs is placed in its chunk and encoded; the bits that are published are those of the copy. Pieces of several
slices in one chunk become one chunk. What projects becomes a mask, residual fragments become overwrites; where there
is no base, everything is a mask. That no element comes twice is for the caller to see to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec import kernels
from dcr_store.codec.chunk import compare
from dcr_store.codec.digest import crc64, linear
from dcr_store.codec.portable import Codec, get_codec
from dcr_store.errors import IntegrityError, InvalidInputError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.layout.pieces import Piece
from dcr_store.publish.partitions import PartitionWriter
from dcr_store.publish.slice_baseline import SliceBits
from dcr_store.publish.state import unfaithful
from dcr_store.versions.workers import n_workers, scratch, worker_pool

_N_TOGETHER: Final = 4
_AHEAD: Final = 8
_N_TRIES: Final = 3
_PLAIN_SHARE: Final = 64  # of a chunk: so many pieces in one, and more, are encoded together

Positions = NDArray[np.uint32]


class Healer(Protocol):
    """What brings a piece of a baseline that drifted back to its base."""

    def heal(self, bits: SliceBits, index: int) -> None:
        """Read it from the store again."""


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


@dataclass(frozen=True, slots=True)
class _Change:
    """What a piece of the baseline changes by: `n` positions and values, or, if None, a mask of the whole piece."""

    n: int | None
    dtype: np.dtype[Any]
    digest: int
    mask: int


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
        healer: Healer,
        *,
        is_anchor: bool,
        expected: Mapping[tuple[str, int], int] | None,
    ) -> None:
        self.partitions, self.codec = partitions, get_codec(partitions.codec)
        self.chunk_elements = partitions.chunk_elements
        self.is_anchor = is_anchor
        self.n_changed = 0
        self._healer = healer
        self._expected = expected
        self._occupied = {space: layout.occupied(space, self.chunk_elements) for space in SPACES}
        self._per_partition = _per_partition(expected, partitions)
        self._chunks: dict[tuple[str, int], _Chunk] = {}
        self._passed: set[tuple[str, int]] = set()
        self._rows: dict[tuple[str, int], list[int]] = {}
        assert partitions.spool is not None
        self._spool = partitions.spool  # of what waits: encoded chunks, and what the baseline will change
        self._changes: dict[tuple[str, int], _Change] = {}
        self._pool = worker_pool("dcr-encode")
        self._waiting: deque[Future[None]] = deque()
        self._taking = threading.Lock()
        self._was_read = threading.Condition()
        self._n_unread = 0
        self._n_workers = n_workers()

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
        for first in range(0, len(runs), _N_TOGETHER):
            batch = runs[first : first + _N_TOGETHER]
            with self._was_read:
                self._n_unread += 1
            self._waiting.append(self._pool.submit(self._work, key, bits, local, batch, is_residual))
            while len(self._waiting) * _N_TOGETHER > _AHEAD * self._n_workers:
                self._waiting.popleft().result()
        with self._was_read:
            self._was_read.wait_for(lambda: self._n_unread == 0)
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    def _work(self, key: str, bits: SliceBits, local: Bits, batch: Sequence[range], is_residual: bool) -> None:
        """Copy, encode and take runs of pieces; runs in a worker's thread."""
        n_unread = len(batch)
        try:
            for run in batch:
                copies = self._copied(bits, run, local) if self.is_anchor else []
                found = [] if self.is_anchor else [self._compare(bits, index, local) for index in run]
                n_unread -= 1
                if n_unread == 0:
                    self._say_read()
                encoded = self._encode(bits, run, found, copies, is_residual=is_residual)
                with self._taking:
                    for index, item in zip(run, encoded, strict=True):
                        self._take(key, bits, index, item)
        finally:
            if n_unread:
                self._say_read()

    def _say_read(self) -> None:
        with self._was_read:
            self._n_unread -= 1
            if self._n_unread == 0:
                self._was_read.notify_all()

    def _copied(self, bits: SliceBits, run: range, local: Bits) -> list[Bits]:
        """Copy the pieces of an anchor, which are encoded from there: a baseline's files are no private memory."""
        buffer, copies, start = scratch(bits.pieces[run[0]].space, self.chunk_elements, "anchor"), [], 0
        for index in run:
            new = buffer[start : start + bits.pieces[index].n_elements]
            bits.pieces[index].gather(local, new)
            copies.append(new)
            start += len(new)
        return copies

    def _compare(self, bits: SliceBits, index: int, local: Bits) -> Difference:
        """Copy a piece and compare it with the baseline."""
        piece = bits.pieces[index]
        new = scratch(piece.space, self.chunk_elements)[: piece.n_elements]
        piece.gather(local, new)
        for _ in range(_N_TRIES):
            found = compare_piece(bits.packed(index), int(bits.digests[index]), new)
            if found is not None:
                return found
            self._healer.heal(bits, index)
        raise IntegrityError(
            f"the baseline's part of chunk {piece.chunk} of {piece.space} changes while it is used",
            expected="bits that stay",
            found="other bits each time",
        )

    def _encode(
        self, bits: SliceBits, run: range, found: Sequence[Difference], copies: Sequence[Bits], *, is_residual: bool
    ) -> list[EncodedPiece]:
        size, pieces = self.chunk_elements, [bits.pieces[index] for index in run]
        plain = [piece.n_elements * _PLAIN_SHARE <= size and piece.n_elements != self._whole(piece) for piece in pieces]
        if not self.is_anchor:
            return encode_pieces(self.codec, pieces, found, size, plain=plain, is_residual=is_residual)
        for index, new in zip(run, copies, strict=True):
            bits.take(index, new, size)
        return [
            take_whole(piece, new, size) if is_plain else encode_whole(self.codec, piece, new, size)
            for piece, new, is_plain in zip(pieces, copies, plain, strict=True)
        ]

    def _whole(self, piece: Piece) -> int:
        """Return how many elements come of a piece's chunk, if from this writer alone."""
        if self._expected is not None:
            return self._expected.get((piece.space, piece.chunk), 0)
        return int(self._occupied[piece.space][piece.chunk])

    def _take(self, key: str, bits: SliceBits, index: int, encoded: EncodedPiece) -> None:
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
                "announced with `slices`; announce all, residual fragments too (slices.flat_part), or nothing"
            )
        row = self._rows.setdefault(place, [0, 0, 0])
        row[1 if "present" in encoded.arrays else 0] ^= encoded.change
        difference = encoded.difference
        if not self.is_anchor:
            row[2] ^= int(bits.owned[index])
            if difference is not None and len(difference.positions):
                self._changes[key, index] = self._noted(key, index, piece.n_elements, difference, encoded.change)
        self.n_changed += piece.n_elements if difference is None else len(difference.positions)
        if chunk.n_elements == whole:
            self._pass_on(*place, encoded.arrays)
            return
        for kind, part in encoded.arrays.items():
            waiting = chunk.arrays.setdefault(kind, [])
            data = part.positions.tobytes() + part.values.tobytes() if isinstance(part, Plain) else part
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
                parts.append(data if n is None else _plain(data, dtype, n))
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

    def _noted(self, key: str, index: int, n_elements: int, found: Difference, change: int) -> _Change:
        """Keep what a piece of the baseline will change by, as it is shorter: by positions, or whole."""
        n = len(found.positions)
        is_whole = n * (4 + found.masks.itemsize) >= n_elements * found.masks.itemsize
        if is_whole:
            mask: Bits = np.zeros(n_elements, found.masks.dtype)
            mask[found.positions] = found.masks
            data = mask.tobytes()
        else:
            data = found.positions.tobytes() + found.masks.tobytes()
        self._spool.put(f"change {key}", index, data)
        return _Change(None if is_whole else n, found.masks.dtype, found.digest, change)

    def marks(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield key and index of each piece that changes, its digest afterwards, and L of its mask in the chunk."""
        for (key, index), change in self._changes.items():
            yield key, index, change.digest, change.mask

    def changed(self) -> Iterator[tuple[str, int, Positions, Bits]]:
        """Yield what changes in the baseline: key and index of a piece, packed positions, and ``base ^ new`` there."""
        for (key, index), change in self._changes.items():
            data = self._spool.get(f"change {key}", index)
            assert data is not None
            if change.n is None:
                mask: Bits = np.frombuffer(data, change.dtype)
                positions = np.flatnonzero(mask).astype(np.uint32)
                yield key, index, positions, mask[positions]
            else:
                positions = np.frombuffer(data, np.uint32, change.n)
                yield key, index, positions, np.frombuffer(data, change.dtype, change.n, 4 * change.n)

    def finish(self) -> dict[str, NDArray[np.uint64]]:
        """Encode what is left; return the contributions, uint64 of shape (n, 4) per space, ascending by chunk."""
        while self._waiting:
            self._waiting.popleft().result()
        for place in sorted(self._chunks):
            self._pass_on(*place, {})
        rows: dict[str, list[list[int]]] = {space: [] for space in SPACES}
        for (space, chunk), row in sorted(self._rows.items()):
            rows[space].append([chunk, *row])
        return {space: np.array(found, np.uint64).reshape(len(found), 4) for space, found in rows.items()}

    def close(self) -> None:
        """Stop the pools and drop what waited."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.partitions.close()
        self._spool.close()
        self._changes.clear()


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


def _plain(data: bytes, dtype: np.dtype[Any], n: int) -> Plain:
    positions = np.frombuffer(data, np.uint32, n)
    return Plain(positions, np.frombuffer(data, dtype, n, positions.nbytes))


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
