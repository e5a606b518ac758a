"""Build a version in a directory of its own, out of what a whole one beside it has.

Files that do not change become hard links; of the others the chunks that stay are copied (or the file is cloned, where
the file system can), and the rest is replayed from the old file into the new one: nothing is written twice, and nothing
that the other directory has is written at all. What an earlier try left in the directory is judged by digest and kept
where it is right. Refuses, before it copies anything, when the disk has not enough room.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dcr_store import events
from dcr_store.codec.digest import crc64
from dcr_store.errors import DcrError, IntegrityError, StorageError
from dcr_store.format.documents import SPACES
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.layout.dtypes import width
from dcr_store.receive import leftovers, side_files, structure
from dcr_store.receive.bringing import NoRoomError
from dcr_store.receive.structure import Structure
from dcr_store.targets.checkpoint import open_checkpoint
from dcr_store.targets.directory import DirectoryTarget, WeightFile
from dcr_store.targets.file_map import FileMap
from dcr_store.targets.file_sharing import Sharing, clone, link, probe
from dcr_store.targets.paths import path_inside
from dcr_store.targets.safetensors_file import parse_header
from dcr_store.versions import path as version_path
from dcr_store.versions.moving import while_kept
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import Outcome, Places, classify, digests, everywhere, replay
from dcr_store.versions.route import route
from dcr_store.versions.workers import scratch, worker_pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcr_store.payload.version import VersionContents
    from dcr_store.versions.catalog import Catalog, Located
    from dcr_store.versions.prefetch import Fetch

_N_TOGETHER = 16
_PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Source:
    """A directory beside that holds a whole version, and which, if that is known. It is only read."""

    place: Path
    located: Located | None


@dataclass(frozen=True, slots=True)
class Built:
    """What building did.

    Attributes
    ----------
    nbytes_needed : int
        Bytes of disk that it took, at most.
    n_linked, n_made : int
        Files of weights that are second names of old ones, and those that are files of their own.
    """

    outcome: Outcome
    nbytes_needed: int = 0
    n_linked: int = 0
    n_made: int = 0


def is_right(contents: VersionContents, files: Structure, place: Path, chunk_elements: int) -> bool:
    """Return whether a directory holds a version, bit for bit, with all its files. Reads only."""
    every = [file.path for file in files.weights]
    try:
        with DirectoryTarget(place, contents.layout, files.weights, chunk_elements, kept=every) as target:
            if target.check():
                return False
            found = digests(target, {space: len(table) for space, table in contents.tables.items()}, chunk_elements)
    except DcrError:
        return False
    return all(np.array_equal(found[space], contents.tables[space]) for space in SPACES) and all(
        structure.holds(path_inside(place, side.path), side) for side in files.sides
    )


def is_version(catalog: Catalog, located: Located, place: Path) -> bool:
    """Return what ``is_right`` does of a version; ``NotFoundError`` if it has expired, be it meanwhile."""

    def look() -> bool:
        contents = catalog.contents(located)
        files = structure.structure_of(catalog.objects, contents)
        return is_right(contents, files, place, catalog.document.chunk_elements)

    return while_kept(catalog, [located], look)


def build(
    catalog: Catalog,
    goal: Located,
    contents: VersionContents,
    files: Structure,
    place: Path,
    source: Source | None,
    fetcher: Fetch | None,
) -> Built:
    """Build `goal` in `place`, an existing directory of which nobody reads.

    When it returns all is durable but the name of `place` itself.

    Raises
    ------
    NoRoomError
        If the disk has not enough room; says how much is needed and how much there is.
    IntegrityError
        If the store is damaged.
    """
    with ExitStack() as stack:
        path, origin, places = _start(catalog, goal, contents, source, stack)
        plan = _plan(files, path, places, origin, place)
        _check_room(plan.nbytes_needed + _nbytes_of_sides(files, place, source), place)
        _discard(plan, place)
        linked = [file for file, twin in plan.linked.items() if _take(link, twin, path_inside(place, file), "linked")]
        cloned = [file for file, twin in plan.cloned.items() if _take(clone, twin, path_inside(place, file), "cloned")]
        target = stack.enter_context(
            DirectoryTarget.create(place, contents.layout, files.weights, path.chunk_elements, kept=linked)
        )
        target.restore_headers()
        events.reached("copy.headers.restored", contents.name)
        if plan.found:
            settled = classify(path, digests(target, path.all_chunks(), path.chunk_elements), ())
        else:
            settled = _settled(path, places, plan, {*linked, *cloned})
        if origin is None:
            outcome = replay(catalog.objects, path, target, settled, fetcher=fetcher)
        else:
            _copy(path, origin, target, places, settled)
            ahead = {space: np.where(settled[space] == path.goal, path.goal, places[space]) for space in SPACES}
            outcome = replay(catalog.objects, path, _Overlay(origin, target), ahead, fetcher=fetcher)
        events.reached("copy.replayed", contents.name)
        _link_sides(files, place, source)
        outcome.nbytes_fetched += side_files.write_sides(catalog.objects, place, files.sides)
        target.sync()
        leftovers.clear_own(place)
        (place / OWN_DIRECTORY / _PROBE).unlink(missing_ok=True)
        events.reached("copy.synced", contents.name)
    return Built(outcome, plan.nbytes_needed, len(linked), len(files.weights) - len(linked))


class _Overlay:
    """Reads what the old files have, writes the new ones; satisfies ``ports.Target``."""

    def __init__(self, old: DirectoryTarget, new: DirectoryTarget) -> None:
        self.read_chunk = old.read_chunk
        self.write_chunk = new.write_chunk


def _start(
    catalog: Catalog, goal: Located, contents: VersionContents, source: Source | None, stack: ExitStack
) -> tuple[version_path.Path, DirectoryTarget | None, Places]:
    """Return the path to `goal`, the source if it is of use, and the state that each chunk of it is in."""
    located = None if source is None else source.located
    way = route(catalog, goal, () if located is None else (located,))
    path = way.path
    origin = None if source is None else _origin(contents, source.place, path.chunk_elements)
    if origin is None:
        return path, None, everywhere(path, ZERO)
    stack.enter_context(origin)
    try:
        found = digests(origin, path.all_chunks(), path.chunk_elements)
    except DcrError as error:  # a file is cut off or gone
        events.reached("copy.source.unreadable", str(error))
        return path, None, everywhere(path, ZERO)
    candidates = range(len(path.states)) if located is None else way.between([located.name])
    try:
        places = classify(path, found, candidates)
    except IntegrityError as error:
        # The store cannot tell what lies between: what is not right already comes from the anchor.
        events.reached("copy.damaged", str(error))
        places = classify(path, found, ())
    events.reached("copy.source.read", contents.name)
    return path, origin, places


def _origin(contents: VersionContents, place: Path, chunk_elements: int) -> DirectoryTarget | None:
    """Open the files of a directory, if they hold the tensors of a version, in whatever files."""
    try:
        with open_checkpoint(place) as checkpoint:
            weights = [WeightFile(f.path, f.header.raw, f.header.nbytes) for f in checkpoint.files]
        if structure.same_tensors(contents.layout, weights):
            return DirectoryTarget(place, contents.layout, weights, chunk_elements)
    except DcrError as error:
        events.reached("copy.source.unreadable", str(error))
    return None


@dataclass(slots=True)
class _Plan:
    """How the files of weights come about.

    Attributes
    ----------
    linked, cloned : dict of str to Path
        Path of the new file → the old one. All others are made, or go on from what is there.
    found : list of str
        Files of an earlier try that are gone on with.
    discarded : list of str
        Files of an earlier try that are not.
    nbytes_needed : int
        Bytes of disk that are still to be taken, at most.
    """

    map: FileMap
    files: tuple[WeightFile, ...]
    linked: dict[str, Path] = field(default_factory=dict)
    cloned: dict[str, Path] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    nbytes_needed: int = 0


def _plan(
    files: Structure, path: version_path.Path, places: Places, origin: DirectoryTarget | None, place: Path
) -> _Plan:
    headers = [(w.path, parse_header(w.header, w.nbytes, w.path)) for w in files.weights]
    plan = _Plan(FileMap.of(path.target.layout, headers), files.weights)
    changing = _changing(path, places, plan)
    twins = {} if origin is None else _twins(origin, files)
    sharing = Sharing(False, False)
    if twins:
        sharing = probe(next(iter(twins.values()))[0], place / OWN_DIRECTORY / _PROBE)
    for index, file in enumerate(files.weights):
        there = path_inside(place, file.path)
        old, is_equal = twins.get(file.path, (None, False))
        if old is not None and is_equal and index not in changing and sharing.can_link:
            plan.linked[file.path] = old
            if os.path.lexists(there):
                plan.discarded.append(file.path)
        elif structure.is_own_file(there):
            plan.found.append(file.path)
            plan.nbytes_needed += max(0, file.nbytes - there.stat().st_blocks * 512)
        else:
            if os.path.lexists(there):
                plan.discarded.append(file.path)
            if old is not None and sharing.can_clone:
                plan.cloned[file.path] = old
                plan.nbytes_needed += len(file.header) + changing.get(index, 0)
            else:
                plan.nbytes_needed += file.nbytes
    return plan


def _twins(origin: DirectoryTarget, files: Structure) -> dict[str, tuple[Path, bool]]:
    """Return path → the source's file with the same tensors in the same bytes, and whether its header is the same."""
    by_path = {file.path: file for file in origin.files}
    twins = {}
    for file in files.weights:
        same = by_path.get(file.path)
        others = [same] if same is not None else list(origin.files)
        for other in others:
            if other.nbytes == file.nbytes and structure.alike(other.header, file.header):
                twins[file.path] = path_inside(origin.root, other.path), other.header == file.header
                break
    return twins


def _changing(path: version_path.Path, places: Places, plan: _Plan) -> dict[int, int]:
    """Return index of file → bytes of chunks in it that are to be written."""
    changing: dict[int, int] = {}
    for space in SPACES:
        for chunk in np.flatnonzero(places[space] != path.goal).tolist():
            for file, nbytes in _parts(plan.map, space, chunk, path.chunk_elements):
                changing[file] = changing.get(file, 0) + nbytes
    return changing


def _parts(file_map: FileMap, space: str, chunk: int, chunk_elements: int) -> Iterable[tuple[int, int]]:
    """Iterate over the files that hold a part of a chunk, and the bytes of the part."""
    for space_map in (file_map.first[space], *file_map.others[space]):
        for file, _, parts in space_map.transfers(chunk * chunk_elements, (chunk + 1) * chunk_elements):
            yield file, sum(last - first for first, last in parts)


def _settled(path: version_path.Path, places: Places, plan: _Plan, shared: set[str]) -> dict[str, NDArray[np.int64]]:
    """Return the state of each chunk of a directory in which only links and clones have any content."""
    indices = {index for index, file in enumerate(plan.files) if file.path in shared}
    settled = everywhere(path, ZERO)
    for space in SPACES:
        for chunk in np.flatnonzero(places[space] == path.goal).tolist() if indices else ():
            if all(file in indices for file, _ in _parts(plan.map, space, chunk, path.chunk_elements)):
                settled[space][chunk] = path.goal
    return settled


def _check_room(nbytes_needed: int, place: Path) -> None:
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    events.reached("copy.room", f"{nbytes_needed} of {free} free bytes")
    if nbytes_needed > free:
        raise NoRoomError(
            "the disk has not enough room for one more version beside the others; free some, keep fewer versions, or "
            "use a file system that shares blocks (XFS, Btrfs)",
            key=str(place),
            expected=f"{nbytes_needed} bytes free",
            found=f"{free} bytes free",
        )


def _discard(plan: _Plan, place: Path) -> None:
    for file in plan.discarded:
        there = path_inside(place, file)
        try:
            there.unlink()
        except OSError as error:
            raise StorageError(f"cannot be removed: {error.strerror}", key=str(there)) from error


def _take(how: Callable[[Path, Path], bool], twin: Path, there: Path, what: str) -> bool:
    there.parent.mkdir(parents=True, exist_ok=True)
    done = how(twin, there)
    if done:
        events.reached(f"copy.file.{what}", str(there))
    return done


def _copy(
    path: version_path.Path,
    old: DirectoryTarget,
    new: DirectoryTarget,
    places: Places,
    settled: Mapping[str, NDArray[np.int64]],
) -> None:
    """Copy the chunks that are right in the old files and not there yet in the new ones."""
    todo = {
        space: np.flatnonzero((places[space] == path.goal) & (settled[space] != path.goal)).tolist() for space in SPACES
    }
    total = sum(len(chunks) * width(space) for space, chunks in todo.items()) * path.chunk_elements
    done = 0

    def some(space: str, chunks: list[int]) -> int:
        bits = scratch(space, path.chunk_elements)
        for chunk in chunks:
            old.read_chunk(space, chunk, bits)
            found, expected = crc64(bits), path.digest(space, chunk, path.goal)
            if found != expected:
                raise IntegrityError(
                    f"chunk {chunk} of {space} changed while it was copied; who writes there? pull again",
                    key=str(old.root),
                    expected=f"{expected:016x}",
                    found=f"{found:016x}",
                )
            new.write_chunk(space, chunk, bits)
            events.reached("copy.chunk.copied", f"{space} {chunk}")
        return len(chunks) * bits.nbytes

    with worker_pool() as pool:
        tasks = [
            pool.submit(some, space, chunks[first : first + _N_TOGETHER])
            for space, chunks in todo.items()
            for first in range(0, len(chunks), _N_TOGETHER)
        ]
        for task in tasks:
            done += task.result()
            events.progress("copy", done, total)


def _nbytes_of_sides(files: Structure, place: Path, source: Source | None) -> int:
    """Return the bytes of side files that neither are there nor can become links."""
    places = [place] if source is None else [place, source.place]
    return sum(
        side.nbytes
        for side in files.sides
        if not any(structure.holds(path_inside(directory, side.path), side) for directory in places)
    )


def _link_sides(files: Structure, place: Path, source: Source | None) -> None:
    """Give side files that stay a second name; what cannot have one is fetched."""
    if source is None:
        return
    for side in files.sides:
        there, old = path_inside(place, side.path), path_inside(source.place, side.path)
        if not os.path.lexists(there) and not old.is_symlink() and structure.holds(old, side):
            _take(link, old, there, "linked")
