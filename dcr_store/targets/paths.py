"""Paths of a checkpoint's files: checked before use, and kept inside their directory; files replaced durably.

Refuses paths that format.paths does, and parents that a symbolic link leads out of the directory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from dcr_store import events
from dcr_store.errors import InvalidInputError, NotFoundError, StorageError
from dcr_store.format.paths import path_problem

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def check_path(path: str) -> str:
    """Return `path` if it can be that of a checkpoint's file, else raise ``InvalidInputError``."""
    problem = path_problem(path)
    if problem is not None:
        raise InvalidInputError(f"{path!r} cannot be a file of a checkpoint: {problem}; rename it")
    return path


def local_path(value: object, argument: str) -> Path:
    """Return a caller's path as it was given.

    Parameters
    ----------
    value : object
        What the caller gave as `argument`.

    Raises
    ------
    InvalidInputError
        If it is no path: not text or path-like, empty (an unset variable must not mean this directory), with NUL, or a
        URL, which would be made a directory here.
    """
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or text == "" or "\0" in text:
        raise InvalidInputError(
            "is no path", key=argument, expected="text or a path, not empty, without NUL", found=f"{value!r:.200}"
        )
    if _URL.match(text):
        raise InvalidInputError(
            "is a URL, where a place on this machine's file systems is meant; give its path",
            key=argument,
            expected="a path",
            found=f"{text:.200}",
        )
    return Path(text)


def existing_directory(directory: str | os.PathLike[str]) -> Path:
    """Return a directory's real path, so that a later change of a symbolic link to it changes nothing for us."""
    path = Path(directory)
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError as error:
        raise NotFoundError("there is no such directory", key=str(path)) from error
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot be opened: {error}", key=str(path)) from error
    if not real.is_dir():
        raise InvalidInputError("is not a directory", key=str(path))
    return real


def path_inside(root: Path, path: str) -> Path:
    """Return the place of a checkpoint's file below `root`, which must be a real path.

    The file itself may be missing or a symbolic link; its parents stay inside `root`.
    """
    place = root / check_path(path)
    parent = Path(os.path.realpath(place.parent))
    if parent != root and root not in parent.parents:
        raise InvalidInputError(
            "is outside of its directory through a symbolic link; replace the link by a directory",
            key=str(place),
            expected=f"a place below {root}",
            found=str(parent),
        )
    return place


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable; ``StorageError`` if that fails."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"cannot be made durable: {error.strerror}", key=str(directory)) from error


def replace_file(path: Path, data: bytes, point: str, detail: str = "") -> None:
    """Replace a small file, atomically and durably: after any crash it is the old one or the new one, whole.

    Parameters
    ----------
    point, detail : str
        The events ``<point>.stored``, ``.renamed`` and ``.durable`` are told with this detail.

    Raises
    ------
    StorageError
        If it cannot be written.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            # Without this a power loss could leave the new name on an empty file.
            os.fsync(fd)
        # A crash here leaves the old file, and a temporary one that the next writer truncates.
        events.reached(f"{point}.stored", detail)
        temporary.replace(path)
        # A kill here leaves the new file; a power loss the old or the new one.
        events.reached(f"{point}.renamed", detail)
    except OSError as error:
        raise StorageError(f"cannot be written: {error.strerror}", key=str(path)) from error
    fsync_directory(path.parent)
    events.reached(f"{point}.durable", detail)
