"""Write versions as plain checkpoints, each in a folder of its own; what does not change between them is shared.

A folder gets its name when all of it is there, so a killed export leaves none that is not whole; run again it goes on.
Refuses a folder of that name which holds something else, and a directory to which somebody else is exporting.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcr_store import events
from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.exchange.export_lock import only_export
from dcr_store.format.names import version_name
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.receive import copy_building, structure
from dcr_store.receive.copy_building import Source
from dcr_store.targets.own_directories import refuse_file, refuse_inside_store
from dcr_store.targets.paths import fsync_directory, local_path
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept

PARTIAL = ".partial"
"""Where a folder is made; one at a time, see ``export_lock``."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote.

    Attributes
    ----------
    directory : str
    written, found : tuple of str
        Versions whose folders were written, and those that had one.
    left_out : tuple of str
        Versions of the range that have expired.
    nbytes : int
        What the new files take; files that are shared count once.
    """

    directory: str
    written: tuple[str, ...]
    found: tuple[str, ...]
    left_out: tuple[str, ...]
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "directory": self.directory,
            "written": list(self.written),
            "found": list(self.found),
            "left_out": list(self.left_out),
            "nbytes": self.nbytes,
        }


def versions_between(catalog: Catalog, first: Located, last: Located) -> tuple[list[Located], list[Located]]:
    """Return the versions of a line from one to another: those that are kept, and those that are not.

    Raises
    ------
    InvalidInputError
        If they are of different lines, or in the wrong order.
    """
    if first.line != last.line or first.row.version > last.row.version:
        raise InvalidInputError(
            "is no range of versions",
            key=f"{first.name} {last.name}",
            expected="two versions of one line, the older one first",
        )
    rows = catalog.rows(last.line)[first.row.version : last.row.version + 1]
    every = [Located(last.line, row) for row in rows]
    return [v for v in every if not catalog.is_expired(v)], [v for v in every if catalog.is_expired(v)]


def open_directory(directory: str | os.PathLike[str], what: str) -> Path:
    """Return a directory to write into, made if it is missing."""
    root = local_path(directory, "directory")
    refuse_file(root)
    refuse_inside_store(root, what)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot be made: {error.strerror}", key=str(root)) from error
    return root.resolve()


def export_folders(catalog: Catalog, first: Located, last: Located, directory: str | os.PathLike[str]) -> Exported:
    """Write each version from `first` to `last` that is kept as ``DIRECTORY/LINE@NUMBER``, byte for byte.

    Files that do not change are hard links, or clones where a file changes in part and the file system can; so they
    are to be read, not written.

    Raises
    ------
    InvalidInputError
        If the two are no range, or a folder of one of these names holds something else.
    ConflictError
        If another export writes there.
    IntegrityError
        If the store is damaged.
    """
    kept, gone = versions_between(catalog, first, last)
    root = open_directory(directory, "the folders")
    written: list[str] = []
    nbytes = 0
    with only_export(root):
        for located, is_new, place in write_folders(catalog, kept, root):
            if is_new:
                written.append(located.name)
                nbytes += sum(path.stat().st_size for path in place.rglob("*") if path.is_file() and _links(path) == 1)
    found = tuple(located.name for located in kept if located.name not in written)
    return Exported(str(root), tuple(written), found, tuple(located.name for located in gone), nbytes)


def _links(path: Path) -> int:
    return path.stat().st_nlink


def write_folders(catalog: Catalog, versions: Sequence[Located], root: Path) -> Iterator[tuple[Located, bool, Path]]:
    """Write versions one after the other; yield each, whether its folder is new, and the folder.

    Nobody else may be writing into `root`.
    """
    source: Source | None = None
    for number, located in enumerate(versions):
        place = root / version_name(located.line, located.row.version)
        is_new = _write(catalog, located, place, source)
        events.progress("export", number + 1, len(versions))
        source = Source(place, located)
        yield located, is_new, place


def _write(catalog: Catalog, located: Located, place: Path, source: Source | None) -> bool:
    def write() -> bool:
        contents = catalog.contents(located)
        files = structure.structure_of(catalog.objects, contents)
        if place.exists():
            if not copy_building.is_right(contents, files, place, catalog.document.chunk_elements):
                raise InvalidInputError(
                    "holds something else than the version of that name; move it away, and export again",
                    key=str(place),
                    expected=f"{located.name} {located.row.root[:16]}",
                )
            return False
        partial = place.parent / PARTIAL
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
            partial.mkdir()  # of its own: not through a link that somebody made there
            (partial / OWN_DIRECTORY).mkdir()  # where building keeps what it needs meanwhile
            copy_building.build(catalog, located, contents, files, partial, source, None)
            shutil.rmtree(partial / OWN_DIRECTORY, ignore_errors=True)
            fsync_directory(partial)
            events.reached("export.built", located.name)
            partial.rename(place)
            fsync_directory(place.parent)
        except OSError as error:
            raise StorageError(f"cannot be written: {error.strerror or error}", key=str(place)) from error
        events.reached("export.folder", located.name)
        return True

    return while_kept(catalog, [located], write)
