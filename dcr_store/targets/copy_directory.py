"""A directory that holds versions side by side, with a link to the one to be read: copy on write.

::

    DIR/current -> main@42-3f9a1c0e77ab    replaced atomically
    DIR/main@42-3f9a1c0e77ab/              a checkpoint with a marker of its own; once clean it is never written again
    DIR/main@41-90abcdef1234/              the one before, which an engine may still read; shares files with the other
    DIR/.dcr/lock                          held by whoever brings the directory further
    DIR/.dcr/copies.json                   {"body": {"format": "dcr-copies", "store_id", "order"}, "sha256": of body}
    DIR/.dcr/removed/                      what is being removed

A directory that the link has never led to may be half-built; ``order`` names those it has led to, newest first. Refuses
a ``current`` that is no such link. Never removes a version that a reader holds (``reading``), in whatever process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcr_store import events
from dcr_store.errors import FormatError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.format.names import VERSION
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.targets.marker import same_file
from dcr_store.targets.paths import existing_directory, fsync_directory, replace_file

CURRENT: Final = "current"
FORMAT: Final = "dcr-copies"
_DOCUMENT: Final = "copies.json"
_LINK_NEW: Final = "current.new"
_LOCK: Final = "lock"
_REMOVED: Final = "removed"
_ROOT_DIGITS: Final = 12
_DIRECTORY: Final = re.compile(rf"(?:{VERSION.pattern})-[0-9a-f]{{{_ROOT_DIGITS}}}(?:\.[1-9][0-9]*)?")


@dataclass(frozen=True, slots=True)
class Copies:
    """What the directory says of itself.

    Attributes
    ----------
    store_id : str or None
        Of the store that the versions are from; None if that is not known.
    order : tuple of str
        Directories that ``current`` has led to, or is about to, newest first. The first may stand a second time among
        the others: ``current`` had led to it before, and is about to lead back there.
    """

    store_id: str | None
    order: tuple[str, ...] = ()

    def read_before(self, current: str | None) -> tuple[str, ...]:
        """Return the directories that a reader may know, newest first: what stands before `current` was never it."""
        if current is None:
            return tuple(dict.fromkeys(self.order))
        after = self.order[self.order.index(current) + 1 :] if current in self.order else self.order
        return tuple(dict.fromkeys((current, *after)))


def directory_name(version: str, root: str, again: int = 0) -> str:
    """Return the name of a version's directory; `again` counts further ones of the same version."""
    return f"{version}-{root[:_ROOT_DIGITS]}" + (f".{again}" if again else "")


def version_directories(root: Path) -> list[str]:
    """Return the names of all directories of versions, complete or not, sorted."""
    with os.scandir(root) as entries:
        return sorted(
            entry.name for entry in entries if _DIRECTORY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )


def holds_copies(root: Path) -> bool:
    """Return whether a directory holds versions side by side."""
    return os.path.lexists(root / OWN_DIRECTORY / _DOCUMENT)


def refuse_copies(root: Path) -> None:
    """Raise ``InvalidInputError`` if a directory holds versions side by side, or is one of them."""
    if holds_copies(root):
        raise InvalidInputError(
            "holds versions side by side and cannot be written in place; use --mode copy, or give another directory",
            key=str(root),
            expected="a directory of one checkpoint",
            found=f"{OWN_DIRECTORY}/{_DOCUMENT}",
        )
    refuse_version(root)


def refuse_version(root: Path) -> None:
    """Raise ``InvalidInputError`` if a directory is one of those versions: they are never written again."""
    if _DIRECTORY.fullmatch(root.name) and holds_copies(root.parent):
        raise InvalidInputError(
            f"is one of the versions side by side in {root.parent}, which are never written again; pull that "
            "directory with --mode copy, or give another one",
            key=str(root),
            expected="a directory of its own",
            found=root.name,
        )


def read_copies(root: Path) -> Copies | None:
    """Return what a directory says of itself; None if it says nothing. What cannot be read is as good as nothing said.

    Raises
    ------
    StorageError
        If the disk or its permissions do not let us look.
    """
    path = root / OWN_DIRECTORY / _DOCUMENT
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", key=str(path)) from error
    with contextlib.suppress(FormatError, InvalidInputError):
        body = canonical.open_body(data, str(path)) or {}
        order, store_id = body.get("order"), body.get("store_id")
        if body.get("format") == FORMAT and isinstance(store_id, str) and isinstance(order, list):
            names = [name for name in order if isinstance(name, str) and _DIRECTORY.fullmatch(name)]
            return Copies(store_id, tuple(names))
    return Copies(None)


def write_copies(root: Path, copies: Copies) -> None:
    """Replace what the directory says of itself, atomically and durably. The caller holds the lock."""
    body = {"format": FORMAT, "store_id": copies.store_id, "order": list(copies.order)}
    fsync_directory(root)  # where `.dcr` may be new
    replace_file(root / OWN_DIRECTORY / _DOCUMENT, canonical.seal_body(body), "copy.order")


def current_of(root: Path) -> str | None:
    """Return the name of the directory that ``current`` leads to, None if there is no link or it leads nowhere.

    Raises
    ------
    InvalidInputError
        If there is a ``current`` that is no link to a version beside it.
    """
    place, absent = root / CURRENT, ""
    while True:
        try:
            name = str(place.readlink())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _foreign_link(place, "no link") from error
        if not _DIRECTORY.fullmatch(name):
            raise _foreign_link(place, f"a link to {name}")
        if (root / name).is_dir():
            return name
        if name == absent:
            return None
        absent = name  # the link may have been moved on, and its version removed, since we read it


def _foreign_link(place: Path, found: str) -> InvalidInputError:
    return InvalidInputError(
        "is not a link to a version beside it; give a directory of its own, or move this away",
        key=str(place),
        expected="nothing, or a link that was made here",
        found=found,
    )


def current_place(directory: str | os.PathLike[str]) -> Path:
    """Return the directory of the current version itself; ``NotFoundError`` if there is none."""
    root = existing_directory(directory)
    name = current_of(root)
    if name is None:
        raise NotFoundError("there is no current version; pull one with --mode copy", key=str(root / CURRENT))
    return root / name


def make_directory(root: Path, name: str) -> Path:
    """Make a version's directory, if it is not there, with what readers lock; return its path."""
    place = root / name
    try:
        (place / OWN_DIRECTORY).mkdir(parents=True, exist_ok=True)
        os.close(os.open(place / OWN_DIRECTORY / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        raise StorageError(f"cannot be made: {error.strerror}", key=str(place)) from error
    events.reached("copy.directory.made", name)
    return place


def switch(root: Path, name: str) -> None:
    """Let ``current`` lead to `name`, atomically and durably. All that it leads to is durable by now."""
    temporary = root / OWN_DIRECTORY / _LINK_NEW
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name, target_is_directory=True)
        # A crash here leaves the old link, and a temporary one that the next run replaces.
        events.reached("copy.link.made", name)
        temporary.replace(root / CURRENT)
        # A kill here leaves the new link; a power loss the old or the new one, and both lead to whole versions.
        events.reached("copy.switched", name)
    except OSError as error:
        raise StorageError(f"cannot be switched: {error.strerror}", key=str(root / CURRENT)) from error
    fsync_directory(root)
    events.reached("copy.switch.durable", name)


@contextmanager
def reading(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Hold the current version while the context is open: it is not removed, whatever becomes current meanwhile.

    Yields
    ------
    Path
        The version's own directory. A path through ``current`` leads elsewhere after a switch.

    Raises
    ------
    NotFoundError
        If there is no current version.
    """
    root = existing_directory(directory)
    pid = os.getpid()
    place, fd = _held(root)
    try:
        yield place
    finally:
        if os.getpid() == pid:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(fd)


def _held(root: Path) -> tuple[Path, int]:
    while True:
        place = current_place(root)
        lock = place / OWN_DIRECTORY / _LOCK
        try:
            fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if current_place(root) == place:
                raise StorageError(f"cannot be held: {error.strerror}", key=str(lock)) from error
            continue
        fcntl.flock(fd, fcntl.LOCK_SH)
        if same_file(fd, lock):
            return place, fd
        os.close(fd)  # it was removed while we waited


def retire(root: Path, name: str) -> bool:
    """Remove a version's directory, unless a reader holds it; return whether it is gone."""
    place, removed = root / name, root / OWN_DIRECTORY / _REMOVED
    with contextlib.ExitStack() as stack:
        try:
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(place / OWN_DIRECTORY / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                stack.callback(os.close, fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    events.reached("copy.version.held", name)
                    return False
            clear_removed(root)
            removed.mkdir()
            # First out of sight, as a whole: half a version is never found under its name.
            place.rename(removed / name)
            fsync_directory(root)
            fsync_directory(removed)
        except OSError as error:
            raise StorageError(f"cannot be removed: {error.strerror}", key=str(place)) from error
    events.reached("copy.version.retired", name)
    clear_removed(root)
    events.reached("copy.version.removed", name)
    return True


def clear_removed(root: Path) -> None:
    """Remove what a removal that was killed has left."""
    removed = root / OWN_DIRECTORY / _REMOVED
    if removed.is_dir():
        try:
            shutil.rmtree(removed)
        except OSError as error:
            raise StorageError(f"cannot be removed: {error.strerror}", key=str(error.filename or removed)) from error
