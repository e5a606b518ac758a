"""What versions consist of, and the cheapest path to them: edges, manifests, contents, digest tables.

Reads only; caches what is immutable. Which versions there are, and what they are called, is in ``versions.lines`` and
``versions.references``. Refuses what contradicts the log.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar, overload

from dcr_store.errors import IntegrityError, NotFoundError
from dcr_store.format.documents import Manifest, StoreDocument
from dcr_store.format.names import version_name
from dcr_store.format.rows import EdgeRow, VersionRow
from dcr_store.layout.layout import Layout
from dcr_store.log.history import History
from dcr_store.log.signing import UNSIGNED, Signing
from dcr_store.objects.threads import Threads
from dcr_store.objects.transfer import map_bounded
from dcr_store.payload import version as payload
from dcr_store.payload.version import Table, VersionContents
from dcr_store.ports import ObjectStore
from dcr_store.versions.edges import Edge, cheapest
from dcr_store.versions.lines import Located as Located
from dcr_store.versions.references import References

CACHE_NBYTES: Final = 64 << 20
_N_READERS: Final = 8
T = TypeVar("T")


class Catalog(References):
    """The versions of one store. Safe to use from several threads for reading contents."""

    def __init__(
        self, objects: ObjectStore, document: StoreDocument, store_sha256: str, signing: Signing = UNSIGNED
    ) -> None:
        super().__init__(objects, document, store_sha256, signing)
        self._edges: dict[str, tuple[tuple[EdgeRow, ...], dict[int, list[Edge]]]] = {}
        self._cache: OrderedDict[tuple[str, str], tuple[object, int]] = OrderedDict()
        self._cached_nbytes = 0
        self._lock = threading.Lock()

    def _cached(self, kind: str, sha256: str, read: Callable[[], T], nbytes_of: Callable[[T], int]) -> T:
        """Return what `read` returns, kept while it is among the last ``CACHE_NBYTES`` that were used."""
        with self._lock:
            if (kind, sha256) in self._cache:
                self._cache.move_to_end((kind, sha256))
                return self._cache[kind, sha256][0]  # type: ignore[return-value]
        value = read()
        nbytes = nbytes_of(value)
        with self._lock:
            if (kind, sha256) not in self._cache:
                self._cache[kind, sha256] = value, nbytes
                self._cached_nbytes += nbytes
            while self._cached_nbytes > CACHE_NBYTES and len(self._cache) > 1:
                self._cached_nbytes -= self._cache.popitem(last=False)[1][1]
        return value

    def layout(self, sha256: str) -> Layout:
        """Return a layout."""
        return self._cached("layout", sha256, lambda: payload.read_layout(self.objects, sha256), _layout_nbytes)

    def edges_to(self, line: str, version: int) -> list[Edge]:
        """Return the edges that lead to a version, as of the last refresh."""
        owner = self.owner(line, version)
        log = self.log(owner)
        row, history = log.row(version), self.history(owner)
        edges = list(self._added(owner, history).get(version, ()))
        if row is not None and version not in history.dead:
            edges.insert(0, Edge(owner, version, row.base, row.manifest, row.txid, row.counts.nbytes))
        for edge in edges:
            start = None if edge.base is None else self.row(line, edge.start)
            if edge.base is not None and (start is None or start.root != edge.base.root):
                raise IntegrityError(
                    "a version starts from a base that is not there",
                    key=version_name(owner, version),
                    expected=f"{edge.base.version} {edge.base.root}",
                    found=None if start is None else start.root,
                )
        return edges

    def _added(self, owner: str, history: History) -> dict[int, list[Edge]]:
        """Return the anchors and folds of a line by version: asked for at each step of a path, so found once."""
        kept = self._edges.get(owner)
        if kept is None or kept[0] is not history.edges:
            by_version: dict[int, list[Edge]] = {}
            for row in history.edges:
                by_version.setdefault(row.version, []).append(edge_of(owner, row))
            kept = self._edges[owner] = history.edges, by_version
        return kept[1]

    def manifest(self, located: Located) -> Manifest:
        """Return a version's manifest, checked against its row in the log, and its seals against its writers."""
        row, line = located.row, self.owner(located.line, located.row.version)
        log = self.log(line)
        # Rows in log checkpoints do not name the writers, who may be many; the record is a round trip, so side by side.
        with Threads(1) as pool:
            begun = None if self.objects.is_local else pool.submit(log.begin_of, row)
            manifest = payload.read_manifest(self.objects, row.manifest)
            begin = log.begin_of(row) if begun is None else begun.result()
        named = (manifest.line, manifest.version, manifest.root, manifest.layout, manifest.base)
        expected = (line, row.version, row.root, row.layout, row.base)
        if named != expected:
            raise IntegrityError(
                "the manifest is not that of its commit", key=row.manifest.key, expected=expected, found=named
            )
        writers = sorted(seal.writer for seal in manifest.seals)
        if writers != sorted(begin.writers):
            raise IntegrityError(
                "the manifest does not name one seal of each writer that the version was begun with; it was committed "
                "by a broken publisher: publish the state again as a new version",
                key=row.manifest.key,
                expected=sorted(begin.writers),
                found=writers,
            )
        return manifest

    def contents(self, located: Located) -> VersionContents:
        """Return what one of the edges to a version consists of, which all have its files and digest tables."""
        return self._contents(self._an_edge_to(located), located.row)

    def _an_edge_to(self, located: Located) -> Edge:
        self.check_kept(located)
        edges = self.edges_to(located.line, located.row.version)
        if not edges:
            raise self._unreachable(located)
        return edges[0]

    def contents_of_edge(self, line: str, edge: Edge) -> VersionContents:
        """Return what an edge consists of."""
        return self._contents(edge, self.require_row(line, edge.version))

    def _contents(self, edge: Edge, row: VersionRow) -> VersionContents:
        ref = row.manifest if edge.txid == row.txid else edge.manifest

        def read() -> VersionContents:
            manifest = self._manifest(edge, row)
            return payload.read_contents(self.objects, manifest, self.layout(row.layout), self.document.chunk_elements)

        return self._cached("contents", ref.sha256, read, _contents_nbytes)

    def _manifest(self, edge: Edge, row: VersionRow) -> Manifest:
        is_commit = edge.txid == row.txid
        return self.manifest(Located(edge.line, row)) if is_commit else self.manifest_of_edge(edge, row)

    def manifest_of_edge(self, edge: Edge, row: VersionRow) -> Manifest:
        """Return the manifest of an anchor or fold, checked against what the log says."""
        manifest = payload.read_manifest(self.objects, edge.manifest)
        named = (manifest.line, manifest.version, manifest.txid, manifest.root, manifest.layout, manifest.base)
        expected = (edge.line, edge.version, edge.txid, row.root, row.layout, edge.base)
        if named != expected:
            raise IntegrityError(
                "the manifest is not that of its record", key=edge.manifest.key, expected=expected, found=named
            )
        return manifest

    def contents_of_path(self, line: str, path: Sequence[Edge]) -> list[VersionContents]:
        """Return what the edges of a path consist of, read side by side."""
        if len(path) < 2 or self.objects.is_local:
            return [self.contents_of_edge(line, edge) for edge in path]
        return list(map_bounded(lambda edge: self.contents_of_edge(line, edge), path, n_parallel=_N_READERS))

    def _unreachable(self, located: Located) -> IntegrityError | NotFoundError:
        if self.document.is_copy:
            return self.not_copied(located)
        return IntegrityError(
            "no path leads to the version, which has not expired: the log is damaged, or a broken client wrote it",
            key=located.name,
        )

    def tables(self, located: Located) -> dict[str, Table]:
        """Return the digest tables of a version."""
        return dict(self.contents(located).tables)

    def tables_alone(self, located: Located) -> dict[str, Table]:
        """Return the digest tables of a version, reading nothing of its writers, who may be many; not cached."""
        manifest = self._manifest(self._an_edge_to(located), located.row)
        layout = self.layout(located.row.layout)
        return payload.read_tables(self.objects, manifest, layout, self.document.chunk_elements)

    def path(self, located: Located) -> list[Edge]:
        """Return the cheapest path from zero to a version.

        Raises
        ------
        NotFoundError
            If the version has expired.
        IntegrityError
            If no path leads there.
        """
        self.check_kept(located)
        found = self.path_from_zero(located)
        if found is None:
            raise self._unreachable(located)
        return found

    def along(self, line: str, path: Iterable[Edge]) -> list[Located]:
        """Return the versions to which the edges of a path of `line` lead."""
        found = ((line, self.row(line, edge.version)) for edge in path)
        return [Located(line, row) for line, row in found if row is not None]

    def path_from_zero(self, goal: Located) -> list[Edge] | None:
        """Return the cheapest path from zero to a version, or None if there is none, as to some that have expired."""
        return self._cheapest(goal, -1)

    def path_from(self, start: Located, goal: Located) -> list[Edge] | None:
        """Return the cheapest path from a version to a newer one of the line, or None if there is none."""
        return self._cheapest(goal, start.row.version) if self._has(start) else None

    def _has(self, located: Located) -> bool:
        """Whether a version is one of this store, which need not be so of what a target holds."""
        self.read_to(located.line, located.row.version)
        row = self.row(located.line, located.row.version)
        return row is not None and row.root == located.row.root

    def _cheapest(self, goal: Located, start: int) -> list[Edge] | None:
        if not self._has(goal):
            return None
        return cheapest(goal.row.version, lambda version: self.edges_to(goal.line, version), start)


class LazyStates(Sequence[VersionContents]):
    """The contents along a path, each read when it is asked for, those of a slice side by side."""

    def __init__(self, catalog: Catalog, line: str, edges: Sequence[Edge]) -> None:
        self.edges = tuple(edges)
        self._line = line
        self._catalog = catalog

    def __len__(self) -> int:
        return len(self.edges)

    @overload
    def __getitem__(self, index: int) -> VersionContents: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[VersionContents]: ...
    def __getitem__(self, index: int | slice) -> VersionContents | Sequence[VersionContents]:
        if isinstance(index, slice):
            return self._catalog.contents_of_path(self._line, self.edges[index])
        return self._catalog.contents_of_edge(self._line, self.edges[index])


def edge_of(line: str, row: EdgeRow) -> Edge:
    """Return an anchor or fold that a line's log tells."""
    return Edge(line, row.version, row.base, row.manifest, row.txid, row.counts.nbytes)


def _layout_nbytes(layout: Layout) -> int:
    """Return about how much memory a layout takes."""
    return 1024 * (1 + len(layout.tensors))


def _contents_nbytes(contents: VersionContents) -> int:
    """Return about how much memory the contents of a version take, without the layout."""
    n_rows = sum(len(rows) for rows in contents.touched.values())
    tables = sum(table.nbytes for table in contents.tables.values())
    return 8192 + tables + 256 * n_rows + 1024 * (len(contents.partitions) + len(contents.manifest.files))
