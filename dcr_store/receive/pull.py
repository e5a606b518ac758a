"""Bring a directory of safetensors files to a version, in place; a missing or empty one is a checkout.

Killed anywhere and run again it ends right: a marker says that the directory is on its way, every chunk is judged by
its digest, and none is written before its new bits are proven. Refuses a directory with weights that no version of
the store has, unless forced, and one that another process is writing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dcr_store import events
from dcr_store.errors import DcrError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format.documents import SPACES
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.layout.dtypes import uint_dtype
from dcr_store.payload.version import Table, VersionContents, root_of
from dcr_store.receive import leftovers, side_files, structure
from dcr_store.receive.leftovers import STAGE
from dcr_store.receive.spool import SPOOL
from dcr_store.receive.structure import Structure
from dcr_store.targets.checkpoint import open_checkpoint
from dcr_store.targets.checkpoint_listing import is_weights
from dcr_store.targets.copy_directory import refuse_copies
from dcr_store.targets.directory import DirectoryTarget, WeightFile
from dcr_store.targets.marker import Marker, Unreadable, lock, read_marker, write_marker
from dcr_store.targets.own_directories import refuse_file, refuse_inside_store
from dcr_store.targets.paths import local_path
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept
from dcr_store.versions.path import ZERO
from dcr_store.versions.prefetch import Fetch
from dcr_store.versions.replay import Outcome, classify, digests, everywhere, replay
from dcr_store.versions.route import Route, route


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did.

    Attributes
    ----------
    previous : str or None
        The version that the directory held before, if that was known.
    nbytes_fetched : int
        Bytes of partitions and side files read from the store.
    chunks_written, chunks_healed : int
        Chunks written, and among them those that were in no state of the path and rebuilt.
    """

    version: str
    root: str
    previous: str | None
    nbytes_fetched: int
    chunks_written: int
    chunks_healed: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Situation:
    """What is known of a directory before it is touched.

    Attributes
    ----------
    held : tuple of Located
        The versions that its chunks may be of.
    everything : bool
        Whether nothing is known, so that all versions on the path have to be asked.
    is_lost : bool
        Whether the marker is lost, so that files of any version may be there.
    is_foreign : bool
        Whether there are weights of no version, which are to be removed.
    abandoned : Located or None
        Another version than the goal that an earlier pull was on its way to.
    """

    is_empty: bool
    held: tuple[Located, ...]
    previous: str | None
    everything: bool = False
    is_lost: bool = False
    is_foreign: bool = False
    abandoned: Located | None = None


def pull(
    catalog: Catalog,
    goal: Located,
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
    fetcher: Fetch | None = None,
) -> PullResult:
    """Bring `directory` to the version `goal`.

    Parameters
    ----------
    directory : path
        Missing, empty, or with a checkpoint; changed in place.
    force : bool
        Replace or remove weights that no version of the store has.
    fetcher : callable, optional
        Returns a partition's verified bytes; by default from the store.

    Raises
    ------
    InvalidInputError
        If the directory holds foreign weights or a distributed checkpoint (nothing was changed), holds versions side by
        side, cannot be written in place, or is in a store.
    ConflictError
        If another process is writing the directory.
    NotFoundError
        If the version has expired, be it meanwhile.
    IntegrityError
        If the store is damaged; names the key. The directory can be pulled again.
    """
    return while_kept(catalog, [goal], lambda: _pull(catalog, goal, directory, force, fetcher))


def _pull(
    catalog: Catalog, goal: Located, directory: str | os.PathLike[str], force: bool, fetcher: Fetch | None
) -> PullResult:
    started = time.perf_counter()
    root = local_path(directory, "directory")
    refuse_file(root)
    refuse_inside_store(root, "the checkpoint")
    contents = catalog.contents(goal)
    goal_files = structure.structure_of(catalog.objects, contents)
    try:
        root.mkdir(parents=True, exist_ok=True)
        root = root.resolve()
        refuse_copies(root)
        structure.refuse_own(root, goal_files)
        is_new = not any(root.iterdir())
        # A receiver's spool may be there before anything is known of the rest.
        is_ours = (root / OWN_DIRECTORY).is_dir() and any(i.name != SPOOL for i in (root / OWN_DIRECTORY).iterdir())
    except OSError as error:
        raise StorageError(f"cannot be made or read: {error.strerror}", key=str(root)) from error
    try:
        # What may be refused is refused before anything of ours is in the directory.
        situation = None if is_ours else _examine(catalog, goal, goal_files, root, force=force, is_ours=False)
        with lock(root):
            try:
                if situation is None or read_marker(root) is not None:
                    situation = _examine(catalog, goal, goal_files, root, force=force, is_ours=is_ours)
                outcome = _bring(catalog, goal, contents, goal_files, root, situation, fetcher)
            except DcrError:
                # Still locked, so nobody else's lock goes with ours.
                if is_new and not (root / OWN_DIRECTORY / "marker.json").exists():
                    shutil.rmtree(root / OWN_DIRECTORY, ignore_errors=True)
                raise
    except OSError as error:
        raise StorageError(
            f"cannot be changed: {error.strerror or error}; pull again when that is cured",
            key=str(error.filename or root),
        ) from error
    return PullResult(
        goal.name,
        goal.row.root,
        situation.previous,
        outcome.nbytes_fetched,
        outcome.chunks_written,
        outcome.chunks_healed,
        round(time.perf_counter() - started, 6),
    )


def _examine(
    catalog: Catalog, goal: Located, files: Structure, root: Path, *, force: bool, is_ours: bool
) -> _Situation:
    """Find out what a directory holds; refuse one that holds what is not the store's."""
    situation = _look(catalog, goal, files, root, force=force, is_ours=is_ours)
    if situation.is_foreign:
        return situation
    extra = leftovers.foreign(root, files, ())
    if extra:
        try:
            held = [structure.structure_of(catalog.objects, catalog.contents(item)) for item in situation.held]
        except (IntegrityError, NotFoundError):
            return situation  # then all weights are replaced
        extra = leftovers.foreign(root, files, held)
    if extra and situation.is_lost:
        extra = leftovers.of_no_version(catalog, root, extra)
    if extra and not force:
        raise InvalidInputError(
            "the directory holds weights beside those of its version, which whoever loads it would load too; nothing "
            "was changed: move them away, or remove them with --force",
            key=str(root),
            expected="no other weights than those of the version",
            found=", ".join(extra[:5]),
        )
    return replace(situation, is_foreign=True) if extra else situation


def _look(catalog: Catalog, goal: Located, files: Structure, root: Path, *, force: bool, is_ours: bool) -> _Situation:
    marker = read_marker(root)
    entries = [item.name for item in root.iterdir() if item.name != OWN_DIRECTORY]
    if isinstance(marker, Marker) and marker.store_id != catalog.document.store_id:
        if not force:
            raise InvalidInputError(
                "the directory follows another store; pull into another directory, or replace its weights with --force",
                key=str(root),
                expected=f"store {catalog.document.store_id}",
                found=f"store {marker.store_id}, {marker.target}",
            )
        return _Situation(not entries, (), None, everything=True, is_foreign=True)
    if isinstance(marker, Marker):
        target = catalog.find(marker.target, marker.root)
        if marker.state == "clean":
            base, abandoned = target, None
        else:
            base = None if marker.base is None else catalog.find(marker.base, marker.base_root)
            abandoned = target if marker.target != goal.name else None
        if target is not None and (base is not None or marker.base is None):
            held = (target,) if base in (target, None) else (base, target)
            return _Situation(not entries, held, None if base is None else base.name, abandoned=abandoned)
        if not force:
            raise InvalidInputError(
                "the directory holds a version that the store does not have, so its history is another one by now: was "
                "it restored from a copy? pull into another directory, or replace the weights with --force",
                key=str(root),
                expected=f"a version of {catalog.objects.url}",
                found=f"{marker.target} {marker.root[:16]}",
            )
        return _Situation(not entries, (), None, everything=True, is_foreign=True)
    if not entries:
        return _Situation(True, (), None)
    is_lost = is_ours or isinstance(marker, Unreadable)
    identified = identify(catalog, root)
    if identified is not None:
        return _Situation(False, (identified,), identified.name, is_lost=is_lost)
    if is_lost:
        return _Situation(False, (), None, everything=True, is_lost=True)
    in_the_way = structure.conflicts(catalog.objects, root, files)
    weights = sorted(filter(is_weights, entries))
    if (in_the_way or weights) and not force:
        raise InvalidInputError(
            "the directory holds weights or files that are no version of this store; nothing was changed: pull into "
            "another directory, or replace them with --force",
            key=str(root),
            expected=f"nothing, or a version of {catalog.objects.url}",
            found=", ".join((in_the_way or weights)[:5]),
        )
    return _Situation(False, (), None, everything=force, is_foreign=force)


def identify(catalog: Catalog, root: Path) -> Located | None:
    """Return the version that a directory's weights are, bit for bit; None if they are none of the store's."""
    try:
        with open_checkpoint(root) as checkpoint:
            weights = [WeightFile(f.path, f.header.raw, f.header.nbytes) for f in checkpoint.files]
    except DcrError:
        return None
    roots: dict[str, Located] = {}
    layouts: set[str] = set()
    for located in catalog.find_root(""):
        roots.setdefault(located.row.root, located)
        layouts.add(located.row.layout)
    for sha256 in sorted(layouts):
        layout = catalog.layout(sha256)
        if not structure.same_tensors(layout, weights):
            continue
        chunk_elements = catalog.document.chunk_elements
        with DirectoryTarget(root, layout, weights, chunk_elements) as target:
            lengths = {space: layout.n_chunks(space, chunk_elements) for space in SPACES}
            found = roots.get(root_of(layout, digests(target, lengths, chunk_elements), chunk_elements))
        if found is not None:
            return found
    return None


def held(catalog: Catalog, directory: str | os.PathLike[str]) -> Located | None:
    """Return the version that a directory holds, as its marker says; None if it is empty, on its way, or unknown.

    Reads no weights: the next ``pull`` finds out what they are.
    """
    try:
        marker = read_marker(directory)
    except NotFoundError:
        return None
    if not isinstance(marker, Marker) or marker.state != "clean" or marker.store_id != catalog.document.store_id:
        return None
    return catalog.find(marker.target, marker.root)


def _bring(
    catalog: Catalog,
    goal: Located,
    contents: VersionContents,
    files: Structure,
    root: Path,
    situation: _Situation,
    fetcher: Fetch | None,
) -> Outcome:
    situation = _without_damage(catalog, goal, situation)
    held = next((item for item in situation.held if item.name == situation.previous), None)
    old = [_structure_of(catalog, item, contents, files) for item in situation.held]
    if situation.is_lost:
        # A pull may have died between renaming files and bringing their bits. They get the wanted names before a marker
        # is written: a crash leaves them as unexplained as they were.
        structure.settle(root, files, structure.weights_in(root))
    _remove_unnamed(catalog, root, files, situation, old)
    dirty = Marker(
        "dirty",
        catalog.document.store_id,
        situation.previous,
        goal.name,
        goal.row.root,
        None if held is None else held.row.root,
        goal.row.layout,
    )
    # A crash just before leaves the directory as it was; just after, the next run knows that it may be a mixture.
    write_marker(root, dirty)
    events.reached("pull.dirty", goal.name)
    way = route(catalog, goal, situation.held)
    if situation.is_empty or structure.settle(root, files, [w for item in old for w in item.weights]):
        outcome = _in_place(catalog, contents, files, root, situation, way, fetcher)
    else:
        outcome = _beside(catalog, contents, files, root, situation, way, fetcher)
    outcome.nbytes_fetched += side_files.write_sides(catalog.objects, root, files.sides)
    for item in old:
        leftovers.remove_left(root, files, item)
    leftovers.clear_own(root)
    events.reached("pull.applied", goal.name)
    clean = Marker(
        "clean",
        catalog.document.store_id,
        situation.previous,
        goal.name,
        goal.row.root,
        dirty.base_root,
        goal.row.layout,
    )
    # Everything is synced by now: a clean marker is never ahead of the bits.
    write_marker(root, clean)
    events.reached("pull.clean", goal.name)
    return outcome


def _without_damage(catalog: Catalog, goal: Located, situation: _Situation) -> _Situation:
    """Forget what the directory holds where the store cannot tell the way from there: then the anchor's is taken.

    So it is where that has expired.
    """
    way = route(catalog, goal, situation.held)
    try:
        for index in way.between([item.name for item in situation.held]):
            _ = way.path.states[index]
        for item in situation.held:
            catalog.contents(item)
    except (IntegrityError, NotFoundError) as error:
        catalog.check_kept(goal)
        events.reached("pull.damaged", str(error))
        # Which files are its, and which of an abandoned version, cannot be told either: all weights are replaced.
        return replace(situation, held=(), abandoned=None, is_foreign=True)
    return situation


def _remove_unnamed(
    catalog: Catalog, root: Path, files: Structure, situation: _Situation, old: Sequence[Structure]
) -> None:
    """Remove the files that the new marker will not account for; a crash here leaves what is known as it was."""
    if situation.is_foreign:
        leftovers.remove_foreign(root, files, old)
    if situation.is_lost:
        leftovers.remove_of_any(catalog, root, files, old)
    if situation.abandoned is not None:
        named = dict(zip((item.name for item in situation.held), old, strict=True))
        abandoned = named.get(situation.abandoned.name)
        if abandoned is not None:
            base = None if situation.previous is None else named.get(situation.previous)
            leftovers.remove_abandoned(root, files, abandoned, base)


def _structure_of(catalog: Catalog, located: Located, goal: VersionContents, goal_files: Structure) -> Structure:
    """Return the files of a version, which mostly are the wanted ones."""
    contents = catalog.contents(located)
    if contents.layout is goal.layout and contents.manifest.files == goal.manifest.files:
        return goal_files
    return structure.structure_of(catalog.objects, contents)


def _in_place(
    catalog: Catalog,
    contents: VersionContents,
    files: Structure,
    root: Path,
    situation: _Situation,
    way: Route,
    fetcher: Fetch | None,
) -> Outcome:
    path = way.path
    with DirectoryTarget.create(root, contents.layout, files.weights, path.chunk_elements) as target:
        target.restore_headers()
        events.reached("pull.headers.restored", contents.name)
        if situation.is_empty and not situation.held:
            places = everywhere(path, ZERO)
        else:
            candidates = (
                range(len(path.states)) if situation.everything else way.between([i.name for i in situation.held])
            )
            places = classify(path, _digest(target, way), candidates)
        outcome = replay(catalog.objects, path, target, places, fetcher=fetcher)
        events.reached("pull.replayed", contents.name)
        target.sync()
        events.reached("pull.synced", contents.name)
    return outcome


def _beside(
    catalog: Catalog,
    contents: VersionContents,
    files: Structure,
    root: Path,
    situation: _Situation,
    way: Route,
    fetcher: Fetch | None,
) -> Outcome:
    """Build the weights in ``.dcr/next``, from the bits that the directory has where it can, and move them in."""
    path, stage = way.path, root / OWN_DIRECTORY / STAGE
    stage.mkdir(exist_ok=True)
    with DirectoryTarget.create(stage, contents.layout, files.weights, path.chunk_elements) as target:
        target.restore_headers()
        events.reached("pull.headers.restored", contents.name)
        _seed(target, contents, root, path.chunk_elements)
        events.reached("pull.seeded", contents.name)
        candidates = range(len(path.states)) if situation.everything else way.between([i.name for i in situation.held])
        places = classify(path, _digest(target, way), candidates)
        outcome = replay(catalog.objects, path, target, places, fetcher=fetcher)
        target.sync()
    events.reached("pull.staged", contents.name)
    structure.move_in(root, stage, files)
    return outcome


def _digest(target: DirectoryTarget, way: Route) -> dict[str, Table]:
    return digests(target, way.path.all_chunks(), way.path.chunk_elements)


def _seed(target: DirectoryTarget, contents: VersionContents, root: Path, chunk_elements: int) -> None:
    """Copy what the directory holds to files of another structure, if it holds the same tensors."""
    try:
        with open_checkpoint(root) as checkpoint:
            weights = [WeightFile(f.path, f.header.raw, f.header.nbytes) for f in checkpoint.files]
        if not structure.same_tensors(contents.layout, weights):
            return
        with DirectoryTarget(root, contents.layout, weights, chunk_elements) as source:
            for space in SPACES:
                scratch = np.empty(chunk_elements, uint_dtype(space))
                for chunk in range(contents.layout.n_chunks(space, chunk_elements)):
                    source.read_chunk(space, chunk, scratch)
                    target.write_chunk(space, chunk, scratch)
    except DcrError:
        events.reached("pull.unseeded", str(root))
