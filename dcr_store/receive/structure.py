"""Which files a version puts into a directory, and how the ones that are there become these.

Weights keep their place where size and tensors agree; a file that was only renamed is renamed. Anything else means that
the weights are built beside and moved in. Never touches a file that no version
of the store put there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dcr_store import events
from dcr_store.errors import DcrError, FormatError, InvalidInputError, StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import CheckpointFile
from dcr_store.layout.layout import Layout
from dcr_store.payload.version import VersionContents, fetch_all
from dcr_store.ports import ObjectStore
from dcr_store.targets.checkpoint_listing import SUFFIX
from dcr_store.targets.directory import WeightFile
from dcr_store.targets.file_map import FileMap
from dcr_store.targets.own_directories import holds_baseline, holds_store
from dcr_store.targets.paths import fsync_directory, path_inside
from dcr_store.targets.safetensors_file import make_header, parse_header, read_header

SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Structure:
    """The files of a version in a directory."""

    weights: tuple[WeightFile, ...]
    sides: tuple[CheckpointFile, ...]

    def paths(self) -> list[str]:
        """Return the relative paths of all files."""
        return [*(file.path for file in self.weights), *(file.path for file in self.sides)]


def structure_of(objects: ObjectStore, contents: VersionContents) -> Structure:
    """Return a version's files. Tensors that were written one by one come as ``model.safetensors``.

    Raises
    ------
    FormatError
        If a header is malformed, or the files do not hold the version's tensors.
    """
    files = contents.manifest.files
    if not files:
        return Structure((single_file(contents.layout),), ())
    wanted = [file for file in files if file.kind == "weights"]
    headers = fetch_all(objects, [file.ref for file in wanted])
    weights = tuple(WeightFile(f.path, header, f.nbytes) for f, header in zip(wanted, headers, strict=True))
    try:
        FileMap.of(contents.layout, [(w.path, parse_header(w.header, w.nbytes, w.path)) for w in weights])
    except InvalidInputError as error:
        raise FormatError(f"the files of the version do not hold its tensors: {error}", key=contents.name) from error
    return Structure(weights, tuple(f for f in files if f.kind == "side"))


def single_file(layout: Layout) -> WeightFile:
    """Return the file that tensors written one by one come as."""
    tensors = [(name, e.dtype, e.shape) for e in layout.tensors for name in (e.name, *e.aliases)]
    header = make_header(tensors, {"format": "pt"})
    document = canonical.decode(header[8:], SINGLE_FILE)
    end = max((row["data_offsets"][1] for name, row in document.items() if name != "__metadata__"), default=0)
    return WeightFile(SINGLE_FILE, header, len(header) + end)


def settle(root: Path, goal: Structure, old: Iterable[WeightFile]) -> bool:
    """Rename files so that the weights of `goal` can be written in place, if that is possible.

    Parameters
    ----------
    old : iterable of WeightFile
        What the directory holds, as far as the store knows.

    Returns
    -------
    bool
        Whether headers and bits can now be written in place; False leaves the directory as it was.
    """
    wanted = {file.path for file in goal.weights}
    spare = {file.path: file for file in old if file.path not in wanted}
    spare = {path: file for path, file in spare.items() if is_own_file(path_inside(root, path))}
    renames: list[tuple[Path, Path]] = []
    for file in goal.weights:
        place = path_inside(root, file.path)
        if os.path.lexists(place):
            if not is_own_file(place):
                return False
            found = header_of(place)
            # A header that cannot be read was torn: it is written again, and the bits behind it are judged by digest.
            if found is not None and not alike(found, file.header):
                return False
            continue
        twin = next((o for o in spare.values() if alike(o.header, file.header) and o.nbytes == file.nbytes), None)
        if twin is None and spare:
            return False
        if twin is not None:
            del spare[twin.path]
            renames.append((path_inside(root, twin.path), place))
    try:
        for source, place in renames:
            place.parent.mkdir(parents=True, exist_ok=True)
            source.rename(place)
            fsync_directory(place.parent)
            events.reached("pull.file.renamed", str(place))
    except OSError as error:
        raise StorageError(f"cannot be changed: {error.strerror}", key=str(error.filename)) from error
    return True


def is_own_file(place: Path) -> bool:
    """Whether a file may be written in place: a regular one with one name."""
    return not place.is_symlink() and place.is_file() and place.stat().st_nlink == 1


def header_of(place: Path) -> bytes | None:
    """Return a file's header, None if it cannot be read."""
    try:
        return read_header(place).raw
    except DcrError:
        return None


def weights_in(root: Path) -> tuple[WeightFile, ...]:
    """Return the files of weights in a directory whose headers can be read, whatever they are called."""
    places = sorted(place for place in root.iterdir() if place.name.endswith(SUFFIX) and is_own_file(place))
    found = ((place, header_of(place)) for place in places)
    return tuple(WeightFile(place.name, header, place.stat().st_size) for place, header in found if header is not None)


def alike(found: bytes, wanted: bytes) -> bool:
    """Whether two headers put the same tensors to the same bytes of a file."""
    if found == wanted:
        return True
    if len(found) != len(wanted):
        return False
    return _tensors(found) == _tensors(wanted)


def _tensors(header: bytes) -> Mapping[str, object]:
    document = canonical.decode(header[8:], "header")
    return {name: row for name, row in document.items() if name != "__metadata__"}


def move_in(root: Path, stage: Path, goal: Structure) -> None:
    """Move the weights of `goal` from `stage` to their places, each atomically."""
    for file in goal.weights:
        source, place = path_inside(stage, file.path), path_inside(root, file.path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            source.replace(place)
            fsync_directory(place.parent)
            events.reached("pull.file.moved", str(place))
        except OSError as error:
            raise StorageError(f"cannot be put in place: {error.strerror}", key=str(place)) from error


def refuse_own(root: Path, goal: Structure) -> None:
    """Raise ``InvalidInputError`` if files of `goal` would go into a store or a baseline below a directory."""
    for parent in sorted({parent for path in goal.paths() for parent in PurePosixPath(path).parents if parent.name}):
        place = path_inside(root, str(parent))
        if holds_store(place) or holds_baseline(place):
            raise InvalidInputError(
                "files of the version would go into a store or a baseline; give the checkpoint a directory of its own",
                key=str(root),
                expected="a directory for the checkpoint alone",
                found=f"the {'store' if holds_store(place) else 'baseline'} {place}",
            )


def conflicts(objects: ObjectStore, root: Path, goal: Structure) -> list[str]:
    """Return the paths at which a file of `goal` would replace a different one."""
    found = [file.path for file in goal.weights if os.path.lexists(path_inside(root, file.path))]
    for side in goal.sides:
        place = path_inside(root, side.path)
        if os.path.lexists(place) and not holds(place, side):
            found.append(side.path)
    return found


def holds(place: Path, file: CheckpointFile) -> bool:
    """Whether a file is there and has the content recorded."""
    with contextlib.suppress(OSError):
        if place.is_file() and place.stat().st_size == file.nbytes:
            return canonical.sha256(place.read_bytes()) == file.ref.sha256
    return False


def same_tensors(layout: Layout, weights: Iterable[WeightFile]) -> bool:
    """Whether files hold the tensors of a layout: names, dtypes and shapes."""
    found = {t.name: (t.dtype, t.shape) for w in weights for t in parse_header(w.header, w.nbytes, w.path).tensors}
    return found == {name: (e.dtype, e.shape) for name in layout.names() for e in (layout.entry(name),)}
