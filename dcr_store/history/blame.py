"""Which version changed each row of a tensor last. Walks back over the positions of deltas; reads no anchor.

A fold that skips versions tells of a change between two of them; beyond an anchor nothing is known. Then the answer is
"at or before". A change that was undone again within a fold is not in it: the row is told to have changed last before
it. Base bits are read only where a delta overwrites, which may leave a value as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dcr_store import events
from dcr_store.errors import InvalidInputError
from dcr_store.format.names import version_name
from dcr_store.history.rows import row_elements
from dcr_store.layout.dtypes import DTYPES, Bits
from dcr_store.layout.entry import TensorEntry
from dcr_store.layout.selection import Index, select
from dcr_store.layout.slices import strides_of
from dcr_store.payload.version import VersionContents
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.changes import ChunkChanges, iter_chunk_changes
from dcr_store.versions.chunks import chunks_at
from dcr_store.versions.edges import Edge
from dcr_store.versions.moving import while_kept

_N_TOGETHER: Final = 8


@dataclass(frozen=True, slots=True)
class BlameRun:
    """Rows, one after the other, that one version changed last.

    Attributes
    ----------
    start, stop, step : int
        The rows ``range(start, stop, step)`` of the tensor.
    version : str
        ``line@number``.
    is_exact : bool
        Whether this version changed them; else it, or one before it did. What changed and was undone again between two
        versions of which a fold alone is kept is not seen.
    is_kept : bool
        Whether it can be read: it has not expired.
    """

    start: int
    stop: int
    step: int
    version: str
    is_exact: bool
    is_kept: bool

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "start": self.start,
            "stop": self.stop,
            "step": self.step,
            "version": self.version,
            "exact": self.is_exact,
            "kept": self.is_kept,
        }


@dataclass(frozen=True, slots=True)
class Blame:
    """The rows of a tensor, in ascending order.

    Attributes
    ----------
    version, tensor : str
        What was asked about.
    runs : tuple of BlameRun
        None if nothing is selected.
    """

    version: str
    tensor: str
    runs: tuple[BlameRun, ...]

    @property
    def n_rows(self) -> int:
        """How many rows were asked about."""
        return sum(len(range(run.start, run.stop, run.step)) for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "version": self.version,
            "tensor": self.tensor,
            "n_rows": self.n_rows,
            "runs": [run.to_json() for run in self.runs],
        }


def blame(catalog: Catalog, located: Located, tensor: str, index: Index | None = None) -> Blame:
    """Say for each row of a tensor, or of what `index` selects of it, which version changed it last.

    Parameters
    ----------
    tensor : str
        A name, or an alias.
    index : index, optional
        As NumPy's basic indices; only changes of what it selects count. Rows are those of the tensor, ascending,
        whatever the order of the index. All by default.

    Raises
    ------
    InvalidInputError
        If `index` does not fit, or the tensor is of a packed dtype and has no rows of whole bytes, or has an index.
    NotFoundError
        If there is no such tensor, or the version has expired, be it meanwhile.
    IntegrityError
        If an object is missing or damaged.
    """
    # Also of what leads over versions that expired before: the deltas that it reads may be collected under it.
    return while_kept(catalog, [located], lambda: _blame(catalog, located, tensor, index))


def _blame(catalog: Catalog, located: Located, tensor: str, index: Index | None) -> Blame:
    catalog.check_kept(located)
    entry = catalog.layout(located.row.layout).entry(tensor)
    rows = _Rows(tensor, entry, index)
    version, chain = located.row.version, _chain(catalog, located)
    n_ahead = 1 if catalog.objects.is_local else _N_TOGETHER
    while rows.is_open and (window := list(itertools.islice(chain, n_ahead))):
        for edge, contents in zip(window, catalog.contents_of_path(located.line, window), strict=True):
            if not rows.is_open or not _look(catalog, located.line, edge, contents, rows):
                break
            version = edge.start
            events.progress(f"blame {tensor}", rows.n_found, rows.n)
        else:
            continue
        break
    rows.end(version)
    return Blame(located.name, tensor, tuple(_runs(catalog, located.line, rows)))


def _chain(catalog: Catalog, located: Located) -> Iterator[Edge]:
    """Yield the edges that lead to a version, the last first, each the one that tells most exactly where it is from."""
    version = located.row.version
    while edges := [edge for edge in catalog.edges_to(located.line, version) if edge.base is not None]:
        edge = max(edges, key=lambda item: (item.start, -item.nbytes))
        yield edge
        version = edge.start


def _look(catalog: Catalog, line: str, edge: Edge, contents: VersionContents, rows: _Rows) -> bool:
    """Find the rows that an edge changes; return whether that could be told."""
    entry, n = rows.entry, catalog.document.chunk_elements
    overwriting: list[ChunkChanges] = []
    for change in iter_chunk_changes(catalog.objects, contents, n, chunks={entry.space: rows.chunks(n)}):
        at = change.chunk * n - entry.start
        rows.find(change.positions + at, edge)
        if rows.meets(change.written + at):
            overwriting.append(change)
    if not overwriting:
        return True
    base = _bits(catalog, line, edge.start, entry.space, [change.chunk for change in overwriting])
    if base is None:
        return False
    for change in overwriting:
        at = change.chunk * n - entry.start
        rows.find(change.written[base[change.chunk][change.written] != change.values] + at, edge)
    return True


def _bits(catalog: Catalog, line: str, number: int, space: str, chunks: Sequence[int]) -> dict[int, Bits] | None:
    """Return chunks of a version, which may have expired; None if no path leads there any more."""
    row = catalog.row(line, number)
    edges = None if row is None else catalog.path_from_zero(Located(line, row))
    if edges is None:
        return None
    return chunks_at(catalog, line, edges, space, chunks, by_chunk=True)


class _Rows:
    """The rows asked about, and what was found of each.

    Attributes
    ----------
    versions : ndarray of int64, shape (n,)
        The number of the version that changed it last; -1 while that is not known.
    is_exact : ndarray of bool, shape (n,)
        Whether it was this one.
    """

    def __init__(self, name: str, entry: TensorEntry, index: Index | None) -> None:
        per_row = row_elements(entry)
        if per_row is None or (index is not None and DTYPES[entry.dtype].packed):
            raise InvalidInputError(
                f"values of {entry.dtype} are smaller than a byte; rows of whole bytes can be asked about, all of them",
                key=name,
            )
        self.entry = entry
        self.selection = select(name, entry.shape, ... if index is None else index)
        self.first, self.step, self.n = 0, 1, 1
        if entry.shape:
            self.first, self.step, self.n = (
                self.selection.offsets[0], self.selection.steps[0], self.selection.sizes[0]
            )  # fmt: skip
        if 0 in self.selection.sizes:
            self.n = 0
        self._per_row = per_row
        self.versions = np.full(self.n, -1, np.int64)
        self.is_exact = np.zeros(self.n, bool)

    @property
    def n_found(self) -> int:
        """How many rows are known."""
        return int(np.count_nonzero(self.versions >= 0))

    @property
    def is_open(self) -> bool:
        """Whether a row is not known."""
        return self.n_found < self.n

    def chunks(self, chunk_elements: int) -> set[int]:
        """Return the chunks that hold elements of the rows that are not known."""
        starts = self.entry.start + self._per_row * (self.first + self.step * np.flatnonzero(self.versions < 0))
        first, last = starts // chunk_elements, (starts + self._per_row - 1) // chunk_elements
        marks = np.zeros(int(last.max()) - int(first.min()) + 2, np.int64)
        np.add.at(marks, first - first.min(), 1)
        np.add.at(marks, last - first.min() + 1, -1)
        return set((np.flatnonzero(np.cumsum(marks)) + first.min()).tolist())

    def meets(self, positions: NDArray[np.int64]) -> bool:
        """Whether some elements of the tensor are selected, in rows that are not known."""
        return len(self._rows_of(positions)) > 0

    def find(self, positions: NDArray[np.int64], edge: Edge) -> None:
        """Note that an edge changes some elements of the tensor, of which not all need be selected."""
        rows = self._rows_of(positions)
        self.versions[rows] = edge.version
        self.is_exact[rows] = edge.start == edge.version - 1

    def end(self, version: int) -> None:
        """Note that the rows that are not known are as they were at a version."""
        self.versions[self.versions < 0] = version

    def _rows_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows, counted from the first that is selected, that are not known and hold some positions."""
        inside = positions[(positions >= 0) & (positions < self.entry.n_elements)]
        rows, rest = np.divmod(inside, self._per_row)
        rows, over = np.divmod(rows - self.first, self.step)
        is_in = (over == 0) & (rows >= 0) & (rows < self.n)
        if not DTYPES[self.entry.dtype].packed:
            rest //= DTYPES[self.entry.dtype].elements_per_value
            parts = zip(strides_of(self.entry.shape), *self._selected(), strict=True)
            for stride, offset, step, size in itertools.islice(parts, 1, None):
                at, rest = np.divmod(rest, stride)
                at, over = np.divmod(at - offset, step)
                is_in &= (over == 0) & (at >= 0) & (at < size)
        rows = np.unique(rows[is_in])
        return rows[self.versions[rows] < 0]

    def _selected(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.selection.offsets, self.selection.steps, self.selection.sizes


def _runs(catalog: Catalog, line: str, rows: _Rows) -> Iterator[BlameRun]:
    """Yield neighbouring rows of which the same is known together."""
    keys = 2 * rows.versions + rows.is_exact
    bounds = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), rows.n] if rows.n else []
    for first, last in itertools.pairwise(bounds):
        number = int(rows.versions[first])
        row = catalog.require_row(line, number)
        start, stop = rows.first + rows.step * first, rows.first + rows.step * (last - 1) + 1
        is_kept = not catalog.is_expired(Located(line, row))
        yield BlameRun(start, stop, rows.step, version_name(line, number), bool(rows.is_exact[first]), is_kept)
