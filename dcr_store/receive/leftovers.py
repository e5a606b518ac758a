"""Files that other versions put into a directory and the wanted one does not have: found by name, removed if unchanged.

Of a directory whose marker is lost nothing tells which versions it has seen; then versions are asked, newest first,
until no file is unexplained. Never removes a file that differs from what a version put there, but for weights whose
header a crash has torn.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dcr_store import events
from dcr_store.errors import DcrError, StorageError
from dcr_store.format import canonical
from dcr_store.receive import structure
from dcr_store.receive.structure import Structure
from dcr_store.targets.checkpoint_listing import SUFFIX, holds_store, is_index
from dcr_store.targets.paths import OWN_DIRECTORY, fsync_directory, path_inside
from dcr_store.versions.catalog import Catalog, Located

STAGE = "next"


@dataclass(frozen=True, slots=True)
class _Left:
    """A file that a version may have left: its path, whether it is weights, and the SHA-256 of header or content."""

    path: str
    is_weights: bool
    sha256: str


def remove_left(
    catalog: Catalog,
    root: Path,
    goal: Structure,
    versions: Iterable[Located],
    *,
    but_not: Iterable[Located] = (),
    lenient: bool = False,
) -> None:
    """Remove what `versions` put into a directory at paths that `goal` does not have.

    Parameters
    ----------
    but_not : iterable of Located
        Versions whose files stay.
    lenient : bool
        Pass over versions that cannot be read from the store.
    """
    unexplained = _others(root, goal)
    stay = {file for located in but_not for file in _files_of(catalog, located)}
    stay_torn = {file.path for file in stay}
    for located in versions:
        if not unexplained:
            return
        try:
            files = list(_files_of(catalog, located))
        except DcrError:
            if lenient:
                continue
            raise
        for file in files:
            if file.path not in unexplained or file in stay:
                continue
            if _is_still(path_inside(root, file.path), file, torn_too=file.path not in stay_torn):
                unexplained.discard(file.path)
                _remove(root, path_inside(root, file.path))


def remove_foreign(root: Path, goal: Structure) -> None:
    """Remove all weights and indexes of weights at the top of a directory that `goal` does not have, links too."""
    wanted = set(goal.paths())
    for place in sorted(root.iterdir()):
        is_weights = place.name.endswith(SUFFIX) or is_index(place.name)
        if is_weights and place.name not in wanted and (place.is_symlink() or place.is_file()):
            _remove(root, place)


def clear_own(root: Path) -> None:
    """Remove what a pull that was killed left beside the marker."""
    own = root / OWN_DIRECTORY
    shutil.rmtree(own / STAGE, ignore_errors=True)
    (own / structure.SIDE_NEW).unlink(missing_ok=True)


def _others(root: Path, goal: Structure) -> set[str]:
    """Return the relative paths of all regular files in a directory but those of `goal` and of stores."""
    found = set()
    for parent, directories, files in os.walk(root, onerror=_refuse):
        place = Path(parent).relative_to(root)
        if place == Path():
            directories[:] = [name for name in directories if name != OWN_DIRECTORY]
        if holds_store(root / place):
            directories.clear()
            continue
        found |= {(place / name).as_posix() for name in files if not (root / place / name).is_symlink()}
    return found - set(goal.paths())


def _refuse(error: OSError) -> None:
    raise StorageError(f"cannot be listed: {error.strerror}", key=str(error.filename)) from error


def _files_of(catalog: Catalog, located: Located) -> Iterator[_Left]:
    manifest = catalog.manifest(located)
    for file in manifest.files:
        yield _Left(file.path, file.kind == "weights", file.ref.sha256)
    if not manifest.files:
        file_ = structure.single_file(catalog.layout(located.row.layout))
        yield _Left(file_.path, True, canonical.sha256(file_.header))


def _is_still(place: Path, file: _Left, *, torn_too: bool) -> bool:
    if file.is_weights:
        header = structure.header_of(place)
        return torn_too if header is None else canonical.sha256(header) == file.sha256
    with contextlib.suppress(OSError):
        return canonical.sha256(place.read_bytes()) == file.sha256
    return False


def _remove(root: Path, place: Path) -> None:
    """Remove a file, and directories that it leaves empty."""
    try:
        place.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for parent in place.parents:
                if parent == root:
                    break
                parent.rmdir()
        fsync_directory(next(parent for parent in place.parents if parent.is_dir()))
    except OSError as error:
        raise StorageError(f"cannot be removed: {error.strerror}", key=str(place)) from error
    events.reached("pull.file.removed", str(place))
