"""What changed between two versions, by tensor and by module: counts, rates, how far and which way, rows, bytes.

Bits decide. Only chunks whose digests differ are looked at, a bounded number at a time. Counts alone come from the
deltas between the versions where these lead from one to the other; which way and how far values went takes their bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr_store import events
from dcr_store.codec.chunk import find_changes
from dcr_store.codec.portable import get_codec
from dcr_store.errors import InvalidInputError
from dcr_store.history.changed import Diff, Measured, Status, TensorDiff
from dcr_store.history.rows import RowTally, row_elements
from dcr_store.history.steps import has_steps, histogram, steps
from dcr_store.layout.dtypes import Bits, width
from dcr_store.layout.layout import Layout, Piece, TensorEntry
from dcr_store.versions.between import MasksBetween, deltas_between
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.chunks import Place
from dcr_store.versions.moving import while_kept
from dcr_store.versions.pairs import ChunkPairs, KeptPartitions, batches, compared, counterpart


@dataclass(frozen=True, slots=True)
class _Piece:
    """What changed of a tensor in one chunk: positions in the tensor, and the bits there where they were read."""

    entry: TensorEntry
    positions: NDArray[np.int64]
    nbytes: int
    old: Bits | None = None
    new: Bits | None = None


def diff(catalog: Catalog, a: Located, b: Located, *, n_rows: int = 5, only_counts: bool = False) -> Diff:
    """Compare version `a` with version `b`.

    Parameters
    ----------
    n_rows : int
        How many of the rows that changed most to name of each tensor.
    only_counts : bool
        Do not look which way and how far values went: then no anchor is read where deltas lead from one version to the
        other.

    Raises
    ------
    InvalidInputError
        If `n_rows` is no such number.
    NotFoundError
        If a version has expired.
    IntegrityError
        If the store does not hold what its digests say.
    """
    if isinstance(n_rows, bool) or not isinstance(n_rows, int) or n_rows < 0:
        raise InvalidInputError("is no number of rows", key="n_rows", expected="0 or more", found=n_rows)
    for located in (a, b):
        catalog.check_kept(located)
    return while_kept(catalog, [a, b], lambda: _diff(catalog, a, b, n_rows, only_counts=only_counts))


def _diff(catalog: Catalog, a: Located, b: Located, n_rows: int, *, only_counts: bool) -> Diff:
    old, new = catalog.layout(a.row.layout), catalog.layout(b.row.layout)
    common = [entry for entry in new.tensors if counterpart(old, entry) is not None]
    tallies = {entry.name: _Tally(entry, n_rows, is_measured=not only_counts) for entry in common}
    source = _Source(catalog, a, b, old, new)
    for piece in source.counted() if only_counts else source.compared():
        tallies[piece.entry.name].add(piece)
    tensors = []
    for entry in new.tensors:
        if entry.name in tallies:
            tensors.append(tallies[entry.name].result())
        else:
            tensors.append(_whole(entry, "added" if old.find(entry.name) is None else "altered"))
    tensors += [_whole(entry, "removed") for entry in old.tensors if new.find(entry.name) is None]
    return Diff(a.name, b.name, tensors)


class _Source:
    """Yields what changed, piece by piece, in the order of the spaces and addresses of the second version."""

    def __init__(self, catalog: Catalog, a: Located, b: Located, old: Layout, new: Layout) -> None:
        self._catalog, self._a, self._b, self._old, self._new = catalog, a, b, old, new
        self._n = catalog.document.chunk_elements
        self._codec = get_codec(catalog.document.codec)
        self._fetcher = KeptPartitions(catalog.objects)
        self._pairs = ChunkPairs(catalog, a, b, fetcher=self._fetcher)

    def compared(self) -> Iterator[_Piece]:
        """Yield pieces with their bits."""
        for places in self._batches():
            yield from (piece for _, piece in self._of_bits(places))

    def counted(self) -> Iterator[_Piece]:
        """Yield pieces, from masks alone where these are known."""
        deltas = deltas_between(self._catalog, self._a, self._b) if self._pairs.is_one_layout else None
        if deltas is None:
            yield from self.compared()
            return
        between = MasksBetween(self._catalog, self._a, self._b, deltas, self._fetcher)
        for places in self._batches():
            masks = between.of(places)
            by_bits: dict[int, list[_Piece]] = {}
            for chunk, piece in self._of_bits([place for place in places if masks[place] is None]):
                by_bits.setdefault(chunk, []).append(piece)
            for space, chunk in places:
                mask = masks[space, chunk]
                yield from by_bits.get(chunk, ()) if mask is None else self._of_mask(space, chunk, mask)

    def _batches(self) -> Iterator[list[Place]]:
        places = [place for place in self._pairs.places() if any(self._common(*place))]
        total, done = sum(self._n * width(space) for space, _ in places), 0
        for batch in batches(places, self._n):
            yield batch
            done += sum(self._n * width(space) for space, _ in batch)
            events.progress(f"diff {self._a.name} {self._b.name}", done, total)

    def _common(self, space: str, chunk: int) -> Iterator[Piece]:
        """Yield what a chunk holds of tensors that both versions have."""
        for piece in self._new.pieces(space, chunk * self._n, (chunk + 1) * self._n):
            if counterpart(self._old, piece.entry) is not None:
                yield piece

    def _of_bits(self, places: list[Place]) -> Iterator[tuple[int, _Piece]]:
        """Yield pieces, each with its chunk."""
        for entry, first, _, chunk, old, new in compared(self._pairs, self._old, self._new, self._n, places):
            if old is not None:
                positions, masks = find_changes(old, new)
                if len(positions):
                    nbytes = len(self._codec.encode_sparse(positions, masks, len(new)))
                    at = positions.astype(np.int64) + first
                    yield chunk, _Piece(entry, at, nbytes, old[positions], new[positions])

    def _of_mask(self, space: str, chunk: int, mask: Bits) -> Iterator[_Piece]:
        for entry, first, last, offset in self._common(space, chunk):
            its = mask[offset : offset + last - first]
            positions = np.flatnonzero(its)
            if len(positions):
                nbytes = len(self._codec.encode_sparse(positions.astype(np.uint32), its[positions], len(its)))
                yield _Piece(entry, positions + first, nbytes)


class _Tally:
    """Counts what changes in one tensor."""

    def __init__(self, entry: TensorEntry, n_rows: int, *, is_measured: bool) -> None:
        self._entry = entry
        self._is_measured = is_measured and has_steps(entry.dtype)
        per_row = row_elements(entry)
        self._rows = None if per_row is None else RowTally(per_row, n_rows)
        self._changed = self._nbytes = self._up = self._largest = 0
        self._steps = np.zeros(64, np.int64)

    def add(self, piece: _Piece) -> None:
        """Count one piece; they come in the order of their positions."""
        self._changed += len(piece.positions)
        self._nbytes += piece.nbytes
        if self._rows is not None:
            self._rows.add(piece.positions)
        if self._is_measured:
            assert piece.old is not None and piece.new is not None  # noqa: PT018 - both or neither
            moved = steps(self._entry.dtype, piece.old, piece.new)
            self._steps += histogram(moved.distance)
            self._up += int(np.count_nonzero(moved.is_up))
            self._largest = max(self._largest, int(moved.distance.max(initial=0)))

    def result(self) -> TensorDiff:
        """Return what was counted."""
        entry, n = self._entry, self._entry.n_elements
        measured = None
        if self._is_measured or (has_steps(entry.dtype) and not self._changed):
            found = np.trim_zeros(self._steps, "b").tolist()
            measured = Measured(self._up, sum(found) - self._up, self._largest, tuple(found))
        return TensorDiff(
            entry.name,
            "changed" if self._changed else "same",
            entry.dtype,
            entry.shape,
            n,
            self._changed,
            self._nbytes,
            measured,
            None if self._rows is None else self._rows.n_changed,
            () if self._rows is None else self._rows.top(),
        )


def _whole(entry: TensorEntry, status: Status) -> TensorDiff:
    n = entry.n_elements
    return TensorDiff(entry.name, status, entry.dtype, entry.shape, n, n, 0, None, None, ())
