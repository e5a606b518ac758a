"""Finds versions and what they consist of: lines, references, contents, and the chain back to the nearest anchor.

Reads only; caches what is immutable. Refuses a reference that is ambiguous or names nothing, saying what there is.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, overload

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError
from dcr_store.format.documents import Base, Manifest, StoreDocument
from dcr_store.format.names import LINE, VersionRef, check_line, version_name
from dcr_store.layout.layout import Layout
from dcr_store.log.fold import VersionRow
from dcr_store.log.line import LineLog
from dcr_store.objects.threads import Threads
from dcr_store.objects.transfer import map_bounded
from dcr_store.payload import version as payload
from dcr_store.payload.version import Table, VersionContents
from dcr_store.ports import ObjectStore

CACHE_NBYTES: Final = 64 << 20
_SHORT_ROOT: Final = re.compile(r"(?=.*[a-f])[0-9a-f]{1,7}|[0-9]{4,7}")
_N_READERS: Final = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Located:
    """A committed version and the line it was found on."""

    line: str
    row: VersionRow

    @property
    def name(self) -> str:
        """``line@number``."""
        return version_name(self.line, self.row.version)

    @property
    def base(self) -> Base:
        """This version as a base."""
        return Base(self.name, self.row.root)


class Catalog:
    """The versions of one store. Safe to use from several threads for reading contents."""

    def __init__(self, objects: ObjectStore, document: StoreDocument, store_sha256: str) -> None:
        self.objects = objects
        self.document = document
        self.store_sha256 = store_sha256
        self._lines: dict[str, LineLog] = {}
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

    def lines(self) -> list[str]:
        """Return the names of all lines, sorted."""
        return sorted(name for name in self.objects.list_names("log/") if LINE.fullmatch(name))

    def log(self, line: str) -> LineLog:
        """Return a line's log, not refreshed."""
        check_line(line)
        return self._lines.setdefault(line, LineLog(self.objects, line, self.store_sha256))

    def fresh(self, line: str) -> LineLog:
        """Return a line's log, read to its end; ``NotFoundError`` if it has no version."""
        log = self.log(line)
        if log.refresh().head is None:
            others = [name for name in self.lines() if name != line]
            raise NotFoundError(
                f"the store {self.objects.url} has no version on line {line!r}; "
                + (f"other lines: {', '.join(others)}" if others else "nothing has been published yet")
                + (f"; did you mean main@{line}?" if line.isdecimal() else "")
                + ("; a root needs at least 8 digits" if _SHORT_ROOT.fullmatch(line) else ""),
                key=line,
            )
        return log

    def resolve(self, reference: str) -> Located:
        """Return the version that ``main@42``, ``main`` or a prefix of a root names.

        Raises
        ------
        InvalidInputError
            If `reference` is none of these, or a prefix of several roots.
        NotFoundError
            If there is no such version.
        """
        ref = VersionRef.parse(reference)
        if ref.root_prefix is not None:
            found = self.find_root(ref.root_prefix)
            if len({located.row.root for located in found}) > 1:
                names = ", ".join(f"{located.name} {located.row.root[:16]}" for located in found[:5])
                raise InvalidInputError(f"the root prefix {reference} is ambiguous: {names}; give more digits")
            if found:
                return found[0]
            if reference not in self.lines():
                raise NotFoundError(f"no version has a root that begins with {reference}", key=reference)
        assert ref.line is not None
        log = self.fresh(ref.line)
        head = log.state.head
        assert head is not None
        row = head if ref.number is None else log.row(ref.number)
        if row is None:
            raise NotFoundError(
                f"no such version; the head of {ref.line} is {version_name(ref.line, head.version)}", key=reference
            )
        return Located(ref.line, row)

    def known(self, name: str) -> Located | None:
        """Return the version that ``line@number`` names if its log has been read that far; asks nobody for more of it.

        Raises
        ------
        InvalidInputError
            If `name` names no version.
        """
        ref = VersionRef.parse(name)
        if ref.line is None or ref.number is None:
            return None
        row = self.log(ref.line).row(ref.number)
        return None if row is None else Located(ref.line, row)

    def find(self, name: str, root: str | None) -> Located | None:
        """Return the version of that name if it is the one with that root, else another one with the root, or None.

        In a store that was restored from a copy, another version has taken the number.
        """
        with contextlib.suppress(NotFoundError, InvalidInputError):
            found = self.known(name) or self.resolve(name)
            if root in (None, found.row.root):
                return found
        return None if root is None else next(iter(self.find_root(root)), None)

    def find_root(self, prefix: str) -> list[Located]:
        """Return all versions, newest first per line, whose state root begins with `prefix`."""
        found = []
        for line in self.lines():
            log = self.log(line)
            log.refresh()
            found += [Located(line, row) for row in reversed(log.rows()) if row.root.startswith(prefix)]
        return found

    def layout(self, sha256: str) -> Layout:
        """Return a layout."""
        return self._cached("layout", sha256, lambda: payload.read_layout(self.objects, sha256), _layout_nbytes)

    def manifest(self, located: Located) -> Manifest:
        """Return a version's manifest, checked against its row in the log, and its seals against its writers."""
        row, log = located.row, self.log(located.line)
        # Rows in log checkpoints do not name the writers, who may be many; the record is a round trip, so side by side.
        with Threads(1) as pool:
            begun = None if self.objects.is_local else pool.submit(log.begin_of, row)
            manifest = payload.read_manifest(self.objects, row.manifest)
            begin = log.begin_of(row) if begun is None else begun.result()
        named = (manifest.line, manifest.version, manifest.root, manifest.layout, manifest.base)
        expected = (located.line, row.version, row.root, row.layout, row.base)
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
        """Return a version's contents."""
        row = located.row

        def read() -> VersionContents:
            manifest = self.manifest(located)
            return payload.read_contents(self.objects, manifest, self.layout(row.layout), self.document.chunk_elements)

        return self._cached("contents", row.manifest.sha256, read, _contents_nbytes)

    def contents_of(self, versions: Sequence[Located]) -> list[VersionContents]:
        """Return the contents of several versions, read side by side."""
        if len(versions) < 2 or self.objects.is_local:
            return [self.contents(located) for located in versions]
        return list(map_bounded(self.contents, versions, n_parallel=_N_READERS))

    def tables(self, located: Located) -> dict[str, Table]:
        """Return the digest tables of a version."""
        return dict(self.contents(located).tables)

    def chain(self, located: Located) -> list[Located]:
        """Return the versions from the nearest anchor to `located`, in order."""
        log = self.log(located.line)
        if log.state.head is None or log.state.head.version < located.row.version:
            log.refresh()
        chain = [located]
        while chain[-1].row.base is not None:
            row = log.row(chain[-1].row.version - 1)
            if row is None or row.root != chain[-1].row.base.root:
                raise IntegrityError(
                    "the base of the version is not the version before it",
                    key=chain[-1].name,
                    expected=chain[-1].row.base.root,
                    found=None if row is None else row.root,
                )
            chain.append(Located(located.line, row))
        return chain[::-1]


class LazyStates(Sequence[VersionContents]):
    """The contents of a chain of versions, each read when it is asked for, those of a slice side by side."""

    def __init__(self, catalog: Catalog, chain: Sequence[Located]) -> None:
        self.chain = tuple(chain)
        self._catalog = catalog

    def __len__(self) -> int:
        return len(self.chain)

    @overload
    def __getitem__(self, index: int) -> VersionContents: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[VersionContents]: ...
    def __getitem__(self, index: int | slice) -> VersionContents | Sequence[VersionContents]:
        if isinstance(index, slice):
            return self._catalog.contents_of(self.chain[index])
        return self._catalog.contents(self.chain[index])


def _layout_nbytes(layout: Layout) -> int:
    """Return about how much memory a layout takes."""
    return 1024 * (1 + len(layout.tensors))


def _contents_nbytes(contents: VersionContents) -> int:
    """Return about how much memory the contents of a version take, without the layout."""
    n_rows = sum(len(rows) for rows in contents.touched.values())
    tables = sum(table.nbytes for table in contents.tables.values())
    return 8192 + tables + 256 * n_rows + 1024 * (len(contents.partitions) + len(contents.manifest.files))
