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
from dcr_store.publish.slice_baseline import Change, SliceBits
from dcr_store.versions.workers import n_workers, scratch, worker_pool

_N_TOGETHER: Final = 4
_AHEAD: Final = 8
_N_TRIES: Final = 3

Positions = NDArray[np.uint32]


class Healer(Protocol):
    """What brings a piece of a baseline that drifted back to its base."""

    def heal(self, bits: SliceBits, index: int) -> None:
        """Read it from the store again."""


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """A piece after comparison.

    Attributes
    ----------
    arrays : mapping of str to bytes
        The encoded chunk of each kind of array; none if nothing changed.
    positions, values : ndarrays of shape (n,)
        What changed, packed: uint32, and uintN (``base ^ new``).
    digest : int
        Of the piece's packed bytes afterwards.
    change : int
        L of what changed, in the chunk.
    """

    arrays: Mapping[str, bytes]
    positions: Positions
    values: Bits
    digest: int
    change: int


@dataclass(slots=True)
class _Chunk:
    """A chunk that still waits for pieces."""

    n_elements: int = 0
    arrays: dict[str, list[int]] = field(default_factory=dict)


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
        indices = range(len(bits.pieces))
        for first in range(0, len(indices), _N_TOGETHER):
            batch = indices[first : first + _N_TOGETHER]
            with self._was_read:
                self._n_unread += 1
            self._waiting.append(self._pool.submit(self._work, key, bits, local, batch, is_residual))
            while len(self._waiting) * _N_TOGETHER > _AHEAD * self._n_workers:
                self._waiting.popleft().result()
        with self._was_read:
            self._was_read.wait_for(lambda: self._n_unread == 0)
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    def _work(self, key: str, bits: SliceBits, local: Bits, batch: Sequence[int], is_residual: bool) -> None:
        """Copy, encode and take pieces; runs in a worker's thread."""
        n_unread = len(batch)
        try:
            for index in batch:
                piece = bits.pieces[index]
                new = bits.packed(index) if self.is_anchor else scratch(piece.space, self.chunk_elements)
                new = new[: piece.n_elements]
                piece.gather(local, new)
                n_unread -= 1
                if n_unread == 0:
                    self._say_read()
                encoded = self._encode(bits, index, new, is_residual=is_residual)
                with self._taking:
                    self._take(key, bits, index, encoded)
        finally:
            if n_unread:
                self._say_read()

    def _say_read(self) -> None:
        with self._was_read:
            self._n_unread -= 1
            if self._n_unread == 0:
                self._was_read.notify_all()

    def _encode(self, bits: SliceBits, index: int, new: Bits, *, is_residual: bool) -> EncodedPiece:
        piece = bits.pieces[index]
        if self.is_anchor:
            bits.note(index, self.chunk_elements)
            return encode_whole(self.codec, piece, new, int(bits.digests[index]), self.chunk_elements)
        for _ in range(_N_TRIES):
            base, digest = bits.packed(index), int(bits.digests[index])
            found = encode_piece(self.codec, piece, base, digest, new, self.chunk_elements, is_residual=is_residual)
            if found is not None:
                return found
            self._healer.heal(bits, index)
        raise IntegrityError(
            f"the baseline's part of chunk {piece.chunk} of {piece.space} changes while it is used",
            expected="bits that stay",
            found="other bits each time",
        )

    def _take(self, key: str, bits: SliceBits, index: int, encoded: EncodedPiece) -> None:
        """Note what a piece adds; the caller holds `_taking`."""
        piece = bits.pieces[index]
        place = (piece.space, piece.chunk)
        chunk = self._chunks.setdefault(place, _Chunk())
        chunk.n_elements += piece.n_elements
        n_announced = None if self._expected is None else self._expected.get(place, 0)
        # More would make its partition come twice, under one key.
        if place in self._passed or (n_announced is not None and chunk.n_elements > n_announced):
            raise InvalidInputError(
                f"writer {self.partitions.writer} writes more to chunk {piece.chunk} of {piece.space} than it "
                "announced with `slices`; announce all, residual fragments too (slices.flat_part), or nothing"
            )
        row = self._rows.setdefault(place, [0, 0, 0])
        row[1 if "present" in encoded.arrays else 0] ^= encoded.change
        if not self.is_anchor:
            row[2] ^= int(bits.owned[index])
            if len(encoded.positions):
                self._changes[key, index] = self._noted(key, index, piece.n_elements, encoded)
        self.n_changed += piece.n_elements if self.is_anchor else len(encoded.positions)
        for kind, data in encoded.arrays.items():
            waiting = chunk.arrays.setdefault(kind, [])
            self._spool.put(_waiting(kind, *place), len(waiting), data)
            waiting.append(len(waiting))
        whole = int(self._occupied[piece.space][piece.chunk]) if n_announced is None else n_announced
        if chunk.n_elements == whole:
            self._pass_on(*place)

    def _pass_on(self, space: str, chunk: int) -> None:
        done = self._chunks.pop((space, chunk))
        self._passed.add((space, chunk))
        per = self.partitions.chunks_per_partition(space)
        n_expected = self._per_partition.get((space, chunk // per), per)
        for kind in ("mask", "value", "present"):
            found = (self._spool.get(_waiting(kind, space, chunk), n) for n in done.arrays.get(kind, []))
            parts = [data for data in found if data is not None]
            if kind != "mask" and not parts and self._expected is None:
                continue
            self.partitions.add_part(f"{space}/{kind}", chunk, self._joined(space, kind, parts), n_expected)

    def _joined(self, space: str, kind: str, parts: Sequence[bytes]) -> bytes | None:
        """Return the encoded pieces of one chunk as one encoded chunk."""
        if len(parts) < 2:
            return parts[0] if parts else None
        dtype = np.dtype(np.uint8) if kind == "present" else uint_dtype(space)
        chunk: Bits = np.zeros(self.chunk_elements, dtype)
        for data in parts:
            self.codec.apply(data, chunk)
        return self.codec.encode(chunk)

    def _noted(self, key: str, index: int, n_elements: int, encoded: EncodedPiece) -> _Change:
        """Keep what a piece of the baseline will change by, as it is shorter: by positions, or whole."""
        n = len(encoded.positions)
        is_whole = n * (4 + encoded.values.itemsize) >= n_elements * encoded.values.itemsize
        if is_whole:
            mask: Bits = np.zeros(n_elements, encoded.values.dtype)
            mask[encoded.positions] = encoded.values
            data = mask.tobytes()
        else:
            data = encoded.positions.tobytes() + encoded.values.tobytes()
        self._spool.put(f"change {key}", index, data)
        return _Change(None if is_whole else n, encoded.values.dtype, encoded.digest, encoded.change)

    def changed(self) -> Iterator[tuple[str, int, Change]]:
        """Yield what changes in the baseline: key and index of a piece, and how."""
        for (key, index), change in self._changes.items():
            data = self._spool.get(f"change {key}", index)
            assert data is not None
            if change.n is None:
                mask: Bits = np.frombuffer(data, change.dtype)
                positions = np.flatnonzero(mask).astype(np.uint32)
                yield key, index, Change(positions, mask[positions], change.digest, change.mask)
            else:
                positions = np.frombuffer(data, np.uint32, change.n)
                values: Bits = np.frombuffer(data, change.dtype, change.n, 4 * change.n)
                yield key, index, Change(positions, values, change.digest, change.mask)

    def finish(self) -> dict[str, NDArray[np.uint64]]:
        """Encode what is left; return the contributions, uint64 of shape (n, 4) per space, ascending by chunk."""
        while self._waiting:
            self._waiting.popleft().result()
        for place in sorted(self._chunks):
            self._pass_on(*place)
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


def encode_piece(
    codec: Codec,
    piece: Piece,
    base: Bits,
    base_digest: int,
    new: Bits,
    chunk_elements: int,
    *,
    is_residual: bool = False,
) -> EncodedPiece | None:
    """Compare a piece with its base and encode what differs; prove base, positions and encoding.

    Parameters
    ----------
    base, new : ndarray of uintN, shape (n_elements,)
        Packed. `base` is read only and need not hold still; `new` is nobody else's.
    base_digest : int
        What the digest of `base` ought to be.
    is_residual : bool
        Whether it becomes an overwrite.

    Returns
    -------
    EncodedPiece or None
        None if `base` was not what it ought to be; `new` is as it was in both cases.

    Raises
    ------
    IntegrityError
        If the encoded chunk does not decode to what was encoded.
    """
    positions, masks, digest = compare(base, new)
    # The base as it was seen: so that what is published leads from the base to `new`, whatever `base` does meanwhile.
    engine = kernels.engine(new.nbytes)
    engine.xor_at(new, positions, masks)
    seen = crc64(new)
    engine.xor_at(new, positions, masks)
    if seen != base_digest:
        return None
    if len(positions) == 0:
        return EncodedPiece({}, positions, masks, digest, 0)
    places, placed = piece.place(positions, masks)
    change = _linear(piece, places, placed, chunk_elements)
    if not is_residual:
        arrays = {"mask": _encoded(codec, piece, places, placed, chunk_elements)}
    else:
        _, values = piece.place(positions, new[positions])
        kept = values != 0
        ones = np.ones(len(places), np.uint8)
        arrays = {"present": _encoded(codec, piece, places, ones, chunk_elements)}
        if kept.any():
            arrays["value"] = _encoded(codec, piece, places[kept], values[kept], chunk_elements)
    return EncodedPiece(arrays, positions, masks, digest, change)


def encode_whole(codec: Codec, piece: Piece, new: Bits, digest: int, chunk_elements: int) -> EncodedPiece:
    """Encode a piece as a mask over zeros, and prove that it decodes to itself."""
    chunk = scratch(piece.space, chunk_elements)
    chunk.fill(0)
    piece.spread(new, chunk)
    empty = np.empty(0, np.uint32)
    if not chunk.any():
        return EncodedPiece({}, empty, new[:0], digest, 0)
    data = codec.encode(chunk)
    if not np.array_equal(codec.decode(data, chunk.dtype, len(chunk)), chunk):
        raise _unfaithful(piece)
    return EncodedPiece({"mask": data}, empty, new[:0], digest, linear(crc64(chunk), chunk.nbytes))


def _encoded(codec: Codec, piece: Piece, places: Positions, values: Bits, chunk_elements: int) -> bytes:
    data = codec.encode_sparse(places, values, chunk_elements)
    decoded, decoded_values = codec.decode_sparse(data, values.dtype, chunk_elements)
    if not (np.array_equal(places, decoded) and np.array_equal(values, decoded_values)):
        raise _unfaithful(piece)
    return data


def _linear(piece: Piece, places: Positions, values: Bits, chunk_elements: int) -> int:
    """Return L of a sparse mask, on a buffer that is zero before and after."""
    chunk = _zeros(piece.space, chunk_elements)
    engine = kernels.engine(chunk.nbytes)
    engine.xor_at(chunk, places, values)
    digest = linear(crc64(chunk), chunk.nbytes)
    engine.xor_at(chunk, places, values)
    return digest


def _waiting(kind: str, space: str, chunk: int) -> str:
    return f"waiting {space}/{kind} {chunk}"


_own: Final = threading.local()


def _zeros(space: str, chunk_elements: int) -> Bits:
    """Return this thread's chunk of zeros, to be left so."""
    found: Bits | None = getattr(_own, space, None)
    if found is None or len(found) != chunk_elements:
        found = np.zeros(chunk_elements, uint_dtype(space))
        setattr(_own, space, found)
    return found


def _unfaithful(piece: Piece) -> IntegrityError:
    return IntegrityError(
        f"chunk {piece.chunk} of {piece.space} does not decode to what was encoded; nothing was published: check the "
        "memory of this machine",
        expected="the mask",
        found="other bits",
    )


def _per_partition(
    expected: Mapping[tuple[str, int], int] | None, partitions: PartitionWriter
) -> dict[tuple[str, int], int]:
    """Return how many chunks come of each partition (space, number), where that is known."""
    found: dict[tuple[str, int], int] = {}
    for space, chunk in expected or ():
        place = (space, chunk // partitions.chunks_per_partition(space))
        found[place] = found.get(place, 0) + 1
    return found
