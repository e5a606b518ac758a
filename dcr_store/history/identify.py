"""Which version a checkpoint holds: by its root, which its digests give; else which is nearest, and what differs.

The log has the roots of all versions, and its layouts say how to digest the checkpoint: for an exact hit nothing else
is read. The nearest is that of which the checkpoint has the most chunks, by the versions' digest tables, of several the
newest; only chunks that differ from it are read. Weights decide; headers and side files are not looked at. Refuses what
is no checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dcr_store import events
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.history.checkpoint_chunks import CheckpointChunks, Mismatch
from dcr_store.history.compare import differing_elements
from dcr_store.objects.transfer import map_bounded
from dcr_store.payload.version import Table, root_of
from dcr_store.targets.checkpoint import Checkpoint, open_checkpoint
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import told_of
from dcr_store.versions.path import UNKNOWN
from dcr_store.versions.replay import digests, everywhere
from dcr_store.versions.route import route

_N_READERS: Final = 8


@dataclass(frozen=True, slots=True)
class Identified:
    """What a checkpoint holds.

    Attributes
    ----------
    path : str
        The checkpoint.
    version : str or None
        The version whose weights it has, one that is kept if there is any; else the nearest that is kept. None if it
        has no tensor of any.
    is_exact : bool
        Whether it has just these weights.
    is_proven : bool
        Whether each bit was compared; else digests tell, which find faults, not forgeries.
    root : str or None
        The state root of its weights, 64 hex digits; None where its tensors are not those of a version, or copies of a
        tied one differ.
    versions : tuple of str
        All that have these weights, `version` first.
    expired : tuple of str
        Those of them that are not kept any more.
    chunks_equal, n_chunks : int
        How many chunks of `version` it has, and all.
    tensors : tuple of Mismatch
        What is not as in `version`.
    """

    path: str
    version: str | None
    is_exact: bool
    is_proven: bool
    root: str | None
    versions: tuple[str, ...]
    expired: tuple[str, ...]
    chunks_equal: int
    n_chunks: int
    tensors: tuple[Mismatch, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "path": self.path,
            "version": self.version,
            "exact": self.is_exact,
            "proven": self.is_proven,
            "root": self.root,
            "versions": list(self.versions),
            "expired": list(self.expired),
            "chunks_equal": self.chunks_equal,
            "n_chunks": self.n_chunks,
            "tensors": [item.to_json() for item in self.tensors],
        }


@dataclass(frozen=True, slots=True)
class _View:
    """The checkpoint in one layout: its chunks, their digests, the root that these give."""

    chunks: CheckpointChunks
    tables: Mapping[str, Table]
    root: str

    @property
    def n_chunks(self) -> int:
        return sum(map(len, self.tables.values()))

    def n_equal(self, tables: Mapping[str, Table]) -> int:
        """Return how many chunks have the digests of a version."""
        return sum(int(np.count_nonzero(self.tables[space] == tables[space])) for space in SPACES)


def identify(catalog: Catalog, path: str | os.PathLike[str], *, strict: bool = False) -> Identified:
    """Say which version the checkpoint at `path`, a directory or a safetensors file, holds.

    Parameters
    ----------
    strict : bool
        Compare every bit with the version, read from the store. Where digests agree and bits do not, the checkpoint is
        forged: it is not exact then, and the tensors say where.

    Raises
    ------
    NotFoundError
        If there is nothing at `path`; with `strict`, if all versions with these weights have expired.
    InvalidInputError, FormatError
        If it is no checkpoint.
    IntegrityError
        If the checkpoint was changed meanwhile, or the store is damaged; names file or key.
    """
    with open_checkpoint(path) as checkpoint:
        while True:
            by_layout = _by_layout(catalog)
            lines = list({located.line: located for versions in by_layout.values() for located in versions}.values())
            before = told_of(catalog, lines)
            try:
                found = _identify(catalog, os.fspath(path), checkpoint, by_layout, strict=strict)
            except IntegrityError as error:
                # What is missing may be of a version that expired meanwhile.
                _by_layout(catalog)  # reads the logs on
                if told_of(catalog, lines) == before:
                    raise
                events.reached("read.moved", str(error))
                continue
            checkpoint.check_unchanged()
            return found


def _identify(
    catalog: Catalog, path: str, checkpoint: Checkpoint, by_layout: Mapping[str, list[Located]], *, strict: bool
) -> Identified:
    chunks = {sha256: CheckpointChunks(catalog.layout(sha256), checkpoint) for sha256 in by_layout}
    fitting = [sha256 for sha256, item in chunks.items() if not item.mismatches]
    views: dict[str, _View] = {}
    for sha256 in fitting:
        view = views[sha256] = _view(catalog, chunks[sha256])
        same = [located for located in by_layout[sha256] if located.row.root == view.root]
        if same:
            return _exact(catalog, path, view, same, strict=strict)
    is_kept = {sha256: not all(map(catalog.is_expired, versions)) for sha256, versions in by_layout.items()}
    if not any(is_kept[sha256] for sha256 in views):
        most = max((item.n_shared for sha256, item in chunks.items() if is_kept[sha256]), default=0)
        nearest_ones = [s for s, item in chunks.items() if is_kept[s] and most and item.n_shared == most]
        views |= {sha256: _view(catalog, chunks[sha256]) for sha256 in nearest_ones}
    kept = [
        (views[sha256], located)
        for sha256, versions in by_layout.items()
        for located in versions
        if sha256 in views and not catalog.is_expired(located)
    ]
    if not kept:
        return Identified(path, None, False, False, None, (), (), 0, 0, ())
    tables = map_bounded(lambda item: catalog.tables_alone(item[1]), kept, n_parallel=_N_READERS)
    counts = [view.n_equal(its) for (view, _), its in zip(kept, tables, strict=True)]
    best = max(range(len(kept)), key=lambda at: (counts[at], kept[at][1].row.created_at, kept[at][1].row.version))
    view, nearest = kept[best]
    tensors = _mismatches(catalog, view, nearest, everything=False)
    whole = [sha256 for sha256 in fitting if not chunks[sha256].is_torn]
    root = next((views[sha256].root for sha256 in (nearest.row.layout, *whole) if sha256 in whole), None)
    return Identified(path, nearest.name, False, False, root, (), (), counts[best], view.n_chunks, tuple(tensors))


def _by_layout(catalog: Catalog) -> dict[str, list[Located]]:
    """Return all versions by layout, the newest of each line first."""
    result: dict[str, list[Located]] = {}
    for line in catalog.lines():
        log = catalog.log(line)
        log.refresh()
        for row in reversed(log.rows()):
            result.setdefault(row.layout, []).append(Located(line, row))
    return result


def _view(catalog: Catalog, chunks: CheckpointChunks) -> _View:
    n, layout = catalog.document.chunk_elements, chunks.layout
    tables = digests(chunks, {space: layout.n_chunks(space, n) for space in SPACES}, n)
    return _View(chunks, tables, root_of(layout, tables, n))


def _exact(catalog: Catalog, path: str, view: _View, same: Sequence[Located], *, strict: bool) -> Identified:
    expired = [located for located in same if catalog.is_expired(located)]
    ordered = [*(located for located in same if located not in expired), *expired]
    tensors = _mismatches(catalog, view, ordered[0], everything=True) if strict else []
    names = tuple(located.name for located in ordered)
    return Identified(
        path,
        names[0],
        not tensors,
        strict,
        view.root,
        () if tensors else names,
        () if tensors else tuple(located.name for located in expired),
        view.n_chunks,
        view.n_chunks,
        tuple(tensors),
    )


def _mismatches(catalog: Catalog, view: _View, located: Located, *, everything: bool) -> list[Mismatch]:
    """Return what differs from a version: of the chunks whose digests do, or of all."""
    path = route(catalog, located).path
    places = everywhere(path, UNKNOWN)
    if not everything:
        for space in SPACES:
            places[space][view.tables[space] == path.target.tables[space]] = path.goal
    return view.chunks.differing(differing_elements(catalog, path, view.chunks.layout, view.chunks, places))
