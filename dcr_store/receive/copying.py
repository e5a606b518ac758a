"""Bring a directory to a version by copy on write: the new version is built beside the old one, then a link moves.

Whoever opens ``current`` sees one version, whole; versions before the last ones kept are removed, none that a reader
holds. Killed or powered off anywhere and run again it ends right: what is half-built is known by its marker, and gone
on with or removed. Refuses directories that hold anything else than versions of this store, and to write any of those
a second time: a damaged one is built anew, beside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from dcr_store import events
from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.payload.version import VersionContents
from dcr_store.receive import structure
from dcr_store.receive.copy_building import Built, Source, build, is_right
from dcr_store.receive.pull import held
from dcr_store.receive.spool import SPOOL
from dcr_store.receive.structure import Structure
from dcr_store.targets import copy_directory
from dcr_store.targets.checkpoint_listing import is_weights
from dcr_store.targets.copy_directory import Copies, directory_name
from dcr_store.targets.marker import Marker, lock, read_marker, write_marker
from dcr_store.targets.own_directories import refuse_file, refuse_inside_store
from dcr_store.targets.paths import fsync_directory, local_path
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept
from dcr_store.versions.prefetch import Fetch
from dcr_store.versions.replay import Outcome


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What a pull by copy on write did.

    Attributes
    ----------
    previous : str or None
        The version that was current before, if that was known.
    directory : str
        The version's own directory, to which ``current`` leads.
    nbytes_fetched : int
        Bytes of partitions and side files read from the store.
    chunks_written, chunks_healed : int
        Chunks replayed, and among them those that were in no state of the path and rebuilt.
    files_linked, files_made : int
        Files of weights that are second names of the old version's, and those that are files of their own.
    nbytes_needed : int
        Bytes of disk taken by files of weights, at most.
    """

    version: str
    root: str
    previous: str | None
    directory: str
    nbytes_fetched: int
    chunks_written: int
    chunks_healed: int
    files_linked: int
    files_made: int
    nbytes_needed: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


class CopyBringer:
    """Keeps a directory of versions side by side at a version; satisfies ``receive.bringing.Bringer``.

    Parameters
    ----------
    directory : path
        Missing, empty, or such a directory.
    keep : int
        How many of the versions that were current before are kept.
    force : bool
        Take over a directory that follows another store.
    """

    is_atomic = True

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 1, force: bool = False) -> None:
        self._directory = local_path(directory, "directory")
        self._keep = check_keep(keep)
        self._force = force

    def __repr__(self) -> str:
        return f"CopyBringer({str(self._directory)!r}, keep={self._keep})"

    @property
    def place(self) -> Path:
        """The directory of the current version itself, or, while there is none, the one that will hold it.

        To keep it from being removed while it is read, use ``targets.copy_directory.reading``.
        """
        root = self._directory.resolve()
        name = copy_directory.current_of(root)
        return root if name is None else root / name

    @property
    def spool_directory(self) -> Path | None:
        """A place in the directory, unless it may turn out to be somebody else's."""
        try:
            there = {item.name for item in self._directory.iterdir()} if self._directory.is_dir() else set()
        except OSError:
            return None
        own = self._directory / OWN_DIRECTORY
        is_ours = there <= {OWN_DIRECTORY} or copy_directory.holds_copies(self._directory)
        return own / SPOOL if is_ours and not own.is_symlink() else None

    def held(self, catalog: Catalog) -> Located | None:
        """Return the version that is current, None if there is none or it is not known."""
        if not self._directory.is_dir():
            return None
        name = copy_directory.current_of(self._directory)
        return None if name is None else held(catalog, self._directory / name)

    def ready(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> None:
        """Do nothing: nobody waits for a copy that is not current yet."""

    def bring(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> Outcome:
        """Make `goal` current; errors are those of ``pull_copy``."""
        options: dict[str, Any] = {"keep": self._keep, "force": self._force, "fetcher": fetcher}
        result = pull_copy(catalog, goal, self._directory, **options)
        return Outcome(result.nbytes_fetched, result.chunks_written, result.chunks_healed)

    def close(self) -> None:
        """Do nothing: the directory is locked only while it is written."""


def pull_copy(
    catalog: Catalog,
    goal: Located,
    directory: str | os.PathLike[str],
    *,
    keep: int = 1,
    force: bool = False,
    fetcher: Fetch | None = None,
) -> CopyResult:
    """Make `goal` the current version of `directory`, by copy on write.

    Parameters
    ----------
    directory : path
        Missing, empty, or one that holds versions side by side.
    keep : int
        How many of the versions that were current before are kept; an engine may still read the last of them.
    force : bool
        Take over a directory that follows another store.
    fetcher : callable, optional
        Returns a partition's verified bytes; by default from the store.

    Raises
    ------
    InvalidInputError
        If the directory holds a checkpoint, has a ``current`` of somebody else, follows another store, or is in one.
    ConflictError
        If another process is bringing the directory further.
    NoRoomError
        If the disk has not enough room; nothing was copied.
    NotFoundError
        If the version has expired, be it meanwhile.
    IntegrityError
        If the store is damaged; names the key. What is current stays so.
    """
    check_keep(keep)
    return while_kept(catalog, [goal], lambda: _pull_copy(catalog, goal, directory, keep, force, fetcher))


def _pull_copy(
    catalog: Catalog,
    goal: Located,
    directory: str | os.PathLike[str],
    keep: int,
    force: bool,
    fetcher: Fetch | None,
) -> CopyResult:
    started = time.perf_counter()
    root = local_path(directory, "directory")
    refuse_file(root)
    refuse_inside_store(root, "the versions")
    contents = catalog.contents(goal)
    files = structure.structure_of(catalog.objects, contents)
    try:
        root.mkdir(parents=True, exist_ok=True)
        root = root.resolve()
        copies = _examined(catalog, root, force=force)
        with lock(root):
            copy_directory.clear_removed(root)
            copies = _examined(catalog, root, force=force)
            current = copy_directory.current_of(root)
            order = copies.read_before(current)
            if copy_directory.read_copies(root) != copies:
                copy_directory.write_copies(root, copies)
            source = _source(catalog, root, order)
            name, is_there = _name_for(catalog, goal, contents, files, root, order)
            _remove(root, [item for item in copy_directory.version_directories(root) if item not in (*order, name)])
            _remove(root, order[1 + keep :], but=name)
            built = Built(Outcome())
            if not is_there:
                place = copy_directory.make_directory(root, name)
                built = _build(catalog, goal, contents, files, place, source, fetcher)
            known = [item for item in order if (is_there or item != name) and (root / item).is_dir()]
            order = (name, *(item for item in known if item != name))
            if name != current:
                # Until the link has moved, the new name in front of the old one counts as never read. One that has been
                # read stands behind the old one too.
                copy_directory.write_copies(root, Copies(catalog.document.store_id, (name, *known)))
                copy_directory.switch(root, name)
            _remove(root, order[1 + keep :])
    except OSError as error:
        raise StorageError(
            f"cannot be changed: {error.strerror or error}; pull again when that is cured",
            key=str(error.filename or root),
        ) from error
    previous = None if source is None or current is None or source.located is None else source.located.name
    return CopyResult(
        goal.name,
        goal.row.root,
        previous,
        str(root / name),
        built.outcome.nbytes_fetched,
        built.outcome.chunks_written,
        built.outcome.chunks_healed,
        built.n_linked,
        built.n_made,
        built.nbytes_needed,
        round(time.perf_counter() - started, 6),
    )


def check_keep(keep: int) -> int:
    """Return how many versions are kept, as given; ``InvalidInputError`` if it is no such number."""
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise InvalidInputError("is no number of versions", key="keep", expected="0 or more", found=repr(keep))
    return keep


def _examined(catalog: Catalog, root: Path, *, force: bool) -> Copies:
    """Return what the directory says of itself, as far as it is still true; refuse one that is not ours to change."""
    copy_directory.refuse_version(root)
    copies, current = copy_directory.read_copies(root), copy_directory.current_of(root)
    there = copy_directory.version_directories(root)
    if copies is None and not there:
        weights = sorted(item.name for item in root.iterdir() if is_weights(item.name))
        if weights or read_marker(root) is not None:
            raise InvalidInputError(
                "the directory holds a checkpoint, and versions side by side need a directory of their own; give "
                "another one, or pull without --mode copy",
                key=str(root),
                expected="nothing, or versions side by side",
                found=weights[0] if weights else "the marker of a pull in place",
            )
    store_id = None if copies is None else copies.store_id
    if store_id is None and current is not None:
        marker = read_marker(root / current)
        store_id = marker.store_id if isinstance(marker, Marker) else None
    if store_id not in (None, catalog.document.store_id) and not force:
        raise InvalidInputError(
            "the directory follows another store; pull into another directory, or take it over with --force",
            key=str(root),
            expected=f"store {catalog.document.store_id}",
            found=f"store {store_id}",
        )
    order = () if copies is None else copies.order
    if copies is None or copies.store_id is None:
        # What said which of them have been read is lost: then all whole ones may have been.
        whole = [item for item in there if item == current or _is_clean(root / item)]
        order = tuple(sorted(whole, key=lambda item: (item == current, _number(item)), reverse=True))
    return Copies(catalog.document.store_id, order)


def _is_clean(place: Path) -> bool:
    marker = read_marker(place)
    return isinstance(marker, Marker) and marker.state == "clean"


def _number(name: str) -> int:
    return int(name.rpartition("@")[2].partition("-")[0])


def _source(catalog: Catalog, root: Path, order: Iterable[str]) -> Source | None:
    """Return the newest version that is there: the current one, if there is a link."""
    for name in order:
        if (root / name).is_dir():
            return Source(root / name, held(catalog, root / name))
    return None


def _name_for(
    catalog: Catalog, goal: Located, contents: VersionContents, files: Structure, root: Path, order: tuple[str, ...]
) -> tuple[str, bool]:
    """Return the name of the directory for a version, and whether it is there and right.

    One that may have been read is not written again, even if it is damaged: then the name is a further one.
    """
    for again in count():
        name = directory_name(goal.name, goal.row.root, again)
        if name not in order or not (root / name).is_dir():
            return name, False
        if _is_clean(root / name) and is_right(contents, files, root / name, catalog.document.chunk_elements):
            return name, True
        events.reached("copy.version.damaged", name)
    raise AssertionError("count() does not end")


def _build(
    catalog: Catalog,
    goal: Located,
    contents: VersionContents,
    files: Structure,
    place: Path,
    source: Source | None,
    fetcher: Fetch | None,
) -> Built:
    base = None if source is None else source.located
    store_id, names = catalog.document.store_id, (None, None) if base is None else (base.name, base.row.root)
    about = (store_id, names[0], goal.name, goal.row.root, names[1], goal.row.layout)
    write_marker(place, Marker("dirty", *about))
    fsync_directory(place.parent)
    events.reached("copy.dirty", goal.name)
    built = build(catalog, goal, contents, files, place, source, fetcher)
    # Everything is synced by now: a clean marker is never ahead of the bits.
    write_marker(place, Marker("clean", *about))
    fsync_directory(place.parent)
    events.reached("copy.clean", goal.name)
    return built


def _remove(root: Path, names: Iterable[str], but: str | None = None) -> None:
    """Remove directories that are there; those that a reader holds stay, and are tried again the next time."""
    for name in names:
        if name != but and (root / name).is_dir():
            copy_directory.retire(root, name)
