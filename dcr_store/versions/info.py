"""What a user is told about a version. Frozen values with ``to_json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version.

    Attributes
    ----------
    version : str
        ``line@number``.
    base : str or None
        The version that it is a delta against; None for an anchor.
    root : str
        State root, 64 hex digits.
    changed, elements : int
        Elements that differ from the base (all, for an anchor), and all elements.
    nbytes : int
        Bytes that it added to the store.
    is_kept : bool
        Whether it can be read: it has not expired.
    """

    version: str
    base: str | None
    root: str
    created_at: str
    changed: int
    elements: int
    nbytes: int
    metadata: dict[str, Any]
    message: str | None
    is_kept: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "version": self.version,
            "base": self.base,
            "root": self.root,
            "created_at": self.created_at,
            "changed": self.changed,
            "elements": self.elements,
            "nbytes": self.nbytes,
            "metadata": self.metadata,
            "message": self.message,
            "kept": self.is_kept,
        }


@dataclass(frozen=True, slots=True)
class VersionDetail:
    """A version and what it consists of.

    Attributes
    ----------
    files : list of (str, int)
        Path and nbytes of the checkpoint's files; none where tensors were written one by one, nor of a version that has
        expired: what says which they were may be gone.
    tensors : list of (str, str, tuple of int)
        Name, dtype and shape; aliases are listed too.
    """

    info: VersionInfo
    line: str
    txid: str
    layout: str
    codec: str
    n_tensors: int
    n_partitions: int
    files: list[tuple[str, int]]
    tensors: list[tuple[str, str, tuple[int, ...]]]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **self.info.to_json(),
            "line": self.line,
            "txid": self.txid,
            "layout": self.layout,
            "codec": self.codec,
            "n_tensors": self.n_tensors,
            "n_partitions": self.n_partitions,
            "files": [{"path": path, "nbytes": nbytes} for path, nbytes in self.files],
            "tensors": [{"name": name, "dtype": dtype, "shape": list(shape)} for name, dtype, shape in self.tensors],
        }


def info_of(located: Located, *, is_kept: bool = True) -> VersionInfo:
    """Return what the log tells of a version; its row must be complete."""
    row = located.row
    return VersionInfo(
        located.name,
        None if row.base is None else row.base.version,
        row.root,
        row.created_at,
        row.counts.changed,
        row.counts.elements,
        row.counts.nbytes,
        dict(row.metadata or {}),
        row.message,
        is_kept,
    )


def detail_of(catalog: Catalog, located: Located) -> VersionDetail:
    """Return what the manifest and the layout tell too; its row must be complete.

    Raises
    ------
    NotFoundError
        If it expires just now.
    """
    is_kept = not catalog.is_expired(located)
    files = while_kept(catalog, [located], lambda: catalog.manifest(located).files) if is_kept else ()
    layout = catalog.layout(located.row.layout)
    tensors = [(name, e.dtype, e.shape) for e in layout.tensors for name in (e.name, *e.aliases)]
    return VersionDetail(
        info_of(located, is_kept=is_kept),
        located.line,
        located.row.txid,
        located.row.layout,
        catalog.document.codec,
        len(layout.tensors),
        located.row.counts.partitions,
        [(file.path, file.nbytes) for file in files],
        tensors,
    )
