"""Files that other versions put into a directory and the wanted one does not have: found by name, removed if unchanged.

Of a directory whose marker is lost nothing tells which versions it has seen; then versions are asked, newest first,
until no file is unexplained. Never removes a file that differs from what a version put there, but for weights whose
header a crash has torn.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dcr_store import events
from dcr_store.errors import DcrError, StorageError
from dcr_store.format import canonical
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.receive import side_files, structure
from dcr_store.receive.structure import Structure
from dcr_store.targets.checkpoint_listing import SUFFIX, is_index, is_weights
from dcr_store.targets.own_directories import holds_baseline, holds_store
from dcr_store.targets.paths import fsync_directory, path_inside
from dcr_store.versions.catalog import Catalog, Located

STAGE = "next"


def remove_left(root: Path, goal: Structure, old: Structure) -> None:
    """Remove what an older version put into a directory at paths that `goal` does not have.

    Weights count as that version's wherever their tensors lie as in its file, or where a crash has torn the header.
    """
    wanted = set(goal.paths())
    for weights in old.weights:
        place = path_inside(root, weights.path)
        if weights.path not in wanted and _is_file(place):
            header = structure.header_of(place)
            if header is None or structure.alike(header, weights.header):
                _remove(root, place)
    for side in old.sides:
        place = path_inside(root, side.path)
        if side.path not in wanted and _is_file(place) and structure.holds(place, side):
            _remove(root, place)


def remove_abandoned(root: Path, goal: Structure, abandoned: Structure, base: Structure | None) -> None:
    """Remove what a version that was on its way here has put here, but what `base` or `goal` can be made of.

    The marker that names `abandoned` is about to be replaced by one that does not. What stays is told apart from it
    afterwards: files as `base` has them, and files of `goal` that are brought up to date in place.
    """
    kept = [item for item in (goal, base) if item is not None]
    for weights in abandoned.weights:
        place = path_inside(root, weights.path)
        if not _is_file(place):
            continue
        others = [file.header for item in kept for file in item.weights if file.path == weights.path]
        header = structure.header_of(place)
        is_torn = header is None and not others
        if is_torn or (header == weights.header and not any(structure.alike(header, other) for other in others)):
            _remove(root, place)
    sides = {(file.path, file.ref.sha256) for item in kept for file in item.sides}
    for side in abandoned.sides:
        place = path_inside(root, side.path)
        if (side.path, side.ref.sha256) not in sides and _is_file(place) and structure.holds(place, side):
            _remove(root, place)


def remove_of_any(catalog: Catalog, root: Path, goal: Structure, but_not: Sequence[Structure]) -> None:
    """Remove what any version put into a directory, but what is at paths of `goal` and what is of one of `but_not`.

    Versions that cannot be read are passed over.
    """
    others = _others(root).difference(goal.paths())
    for item in but_not:
        others -= {weights.path for weights in item.weights}
        others -= {s.path for s in item.sides if s.path in others and structure.holds(path_inside(root, s.path), s)}
    for path in sorted(others.difference(_unexplained(catalog, root, others))):
        _remove(root, path_inside(root, path))


def foreign(root: Path, goal: Structure, old: Sequence[Structure]) -> list[str]:
    """Return the weights and indexes of weights at the top of a directory that no file of `goal` or `old` accounts for.

    Loaders take all of a directory's weights, so one more makes another checkpoint of it. With the files of a
    distributed checkpoint, nobody could tell which of the two is meant.
    """
    names = {place.name for place in root.iterdir() if place.is_symlink() or place.is_file()}
    names = {name for name in names if is_weights(name) or is_index(name)}.difference(goal.paths())
    if not names:
        return []
    for item in old:
        for weights in item.weights:
            if weights.path in names and _is_file(root / weights.path):
                header = structure.header_of(root / weights.path)
                if header is None or structure.alike(header, weights.header):
                    names.discard(weights.path)
        names -= {side.path for side in item.sides if side.path in names and structure.holds(root / side.path, side)}
    return sorted(names)


def of_no_version(catalog: Catalog, root: Path, names: Sequence[str]) -> list[str]:
    """Return those of `names` that no version of the store put into a directory; asks versions until none is left."""
    return sorted(_unexplained(catalog, root, names))


def remove_foreign(root: Path, goal: Structure, old: Sequence[Structure]) -> None:
    """Remove what `foreign` names, links too."""
    for name in foreign(root, goal, old):
        _remove(root, root / name)


def clear_own(root: Path) -> None:
    """Remove what a pull that was killed left beside the marker."""
    own = root / OWN_DIRECTORY
    for name in (STAGE, side_files.STAGE):
        shutil.rmtree(own / name, ignore_errors=True)


def _others(root: Path) -> set[str]:
    """Return the relative paths of all regular files in a directory but our own and those of stores and baselines."""
    found = set()
    for parent, directories, files in os.walk(root, onerror=_refuse):
        place = Path(parent).relative_to(root)
        if place == Path():
            directories[:] = [name for name in directories if name != OWN_DIRECTORY]
        if holds_store(root / place) or holds_baseline(root / place):
            directories.clear()
            continue
        found |= {(place / name).as_posix() for name in files if _is_file(root / place / name)}
    return found


def _is_file(place: Path) -> bool:
    return place.is_file() and not place.is_symlink()


def _refuse(error: OSError) -> None:
    raise StorageError(f"cannot be listed: {error.strerror}", key=str(error.filename)) from error


def _unexplained(catalog: Catalog, root: Path, paths: Iterable[str]) -> set[str]:
    """Return those of `paths` that are of no version: neither as it has them, nor its weights under another's name.

    The latter is what a pull leaves that dies after it has renamed a file.
    """
    unexplained = set(paths)
    headers = {path: structure.header_of(path_inside(root, path)) for path in unexplained if path.endswith(SUFFIX)}
    found = {path: canonical.sha256(header) for path, header in headers.items() if header is not None}
    names: set[str] = set()
    known: set[str] = set()
    for located in catalog.find_root(""):
        if not unexplained:
            break
        with contextlib.suppress(DcrError):
            for path, is_weights, sha256 in _files_of(catalog, located):
                if is_weights:
                    names.add(path)
                    known.add(sha256)
                if path in unexplained and _is_still(path_inside(root, path), is_weights, sha256):
                    unexplained.discard(path)
            unexplained -= {path for path in unexplained & names if found.get(path) in known}
    return unexplained


def _files_of(catalog: Catalog, located: Located) -> Iterator[tuple[str, bool, str]]:
    """Iterate over path, whether it is weights, and SHA-256 of header or content."""
    manifest = catalog.manifest(located)
    for file in manifest.files:
        yield file.path, file.kind == "weights", file.ref.sha256
    if not manifest.files:
        single = structure.single_file(catalog.layout(located.row.layout))
        yield single.path, True, canonical.sha256(single.header)


def _is_still(place: Path, is_weights: bool, sha256: str) -> bool:
    if is_weights:
        header = structure.header_of(place)
        return header is None or canonical.sha256(header) == sha256
    with contextlib.suppress(OSError):
        return canonical.sha256(place.read_bytes()) == sha256
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
