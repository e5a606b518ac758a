"""How many elements of each tensor a delta changes. Reads the delta alone; bits of the base only where it overwrites.

The delta need not be one that its version is read by any more: what is still stored is told, also of versions that have
expired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import NotFoundError
from dcr_store.layout.dtypes import width
from dcr_store.layout.layout import Layout
from dcr_store.payload.version import VersionContents
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.changes import ChunkChanges, iter_chunk_changes
from dcr_store.versions.chunks import chunks_at
from dcr_store.versions.edges import Edge
from dcr_store.versions.moving import while_kept
from dcr_store.versions.pairs import BATCH_NBYTES


def own_delta(catalog: Catalog, located: Located) -> Edge | None:
    """Return the edge that leads to a version from the one before it, if it is still stored."""
    if located.row.base is None:
        return None
    before = located.row.version - 1
    return next((edge for edge in catalog.edges_to(located.line, before + 1) if edge.start == before), None)


class Counted(NamedTuple):
    """What was counted of one version.

    Attributes
    ----------
    edge, contents : Edge, VersionContents
        The delta that was read.
    changed : dict of str to int
        How many elements of each tensor differ from the version before; those without any are left out.
    """

    edge: Edge
    contents: VersionContents
    changed: dict[str, int]


def count_changes(catalog: Catalog, located: Located) -> Counted | None:
    """Count what a version changes, tensor by tensor.

    Returns
    -------
    Counted or None
        None if that is not known: the version was stored whole, its delta is not stored any more, or it overwrites and
        no path leads to its base.

    Raises
    ------
    IntegrityError
        If an object is missing or damaged.
    """
    try:
        return while_kept(catalog, [located], lambda: _counted(catalog, located))
    except NotFoundError:  # it has expired, and its delta gone, while it was read
        return None


def _counted(catalog: Catalog, located: Located) -> Counted | None:
    edge = own_delta(catalog, located)
    if edge is None:
        return None
    n = catalog.document.chunk_elements
    found = Counted(edge, catalog.contents_of_edge(located.line, edge), {})
    for changes in _with_overwrites(catalog, located, iter_chunk_changes(catalog.objects, found.contents, n)):
        if changes is None:
            return None
        _add(found.changed, found.contents.layout, n, *changes)
    return found


def _with_overwrites(
    catalog: Catalog, located: Located, found: Iterator[ChunkChanges]
) -> Iterator[tuple[str, int, NDArray[np.int64]] | None]:
    """Yield space, chunk and ascending positions of what changes; None where the base of an overwrite is not there."""
    waiting: list[ChunkChanges] = []
    for change in found:
        yield change.space, change.chunk, change.positions
        if len(change.written):
            waiting.append(change)
        n_together = max(1, BATCH_NBYTES // (catalog.document.chunk_elements * width(change.space)))
        if len(waiting) >= n_together:
            yield from _overwritten(catalog, located, waiting)
            waiting = []
    yield from _overwritten(catalog, located, waiting)


def _overwritten(
    catalog: Catalog, located: Located, waiting: Sequence[ChunkChanges]
) -> Iterator[tuple[str, int, NDArray[np.int64]] | None]:
    row = catalog.row(located.line, located.row.version - 1)
    path = catalog.path_from_zero(Located(located.line, row)) if waiting and row is not None else None
    for space in sorted({change.space for change in waiting}):
        its = [change for change in waiting if change.space == space]
        if path is None:
            yield None
            return
        base = chunks_at(catalog, located.line, path, space, [change.chunk for change in its], by_chunk=True)
        for change in its:
            yield space, change.chunk, change.written[base[change.chunk][change.written] != change.values]


def _add(
    counts: dict[str, int], layout: Layout, chunk_elements: int, space: str, chunk: int, positions: NDArray[np.int64]
) -> None:
    """Count ascending positions in a chunk by tensor."""
    start = chunk * chunk_elements
    for piece in layout.pieces(space, start, start + chunk_elements):
        stop = piece.offset + piece.tensor_stop - piece.tensor_start
        first, last = np.searchsorted(positions, (piece.offset, stop)).tolist()
        if last > first:
            counts[piece.entry.name] = counts.get(piece.entry.name, 0) + last - first
