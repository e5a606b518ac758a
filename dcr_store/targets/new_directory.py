"""A directory that is written beside its place and moved there at the end: whole or not at all.

Refuses a place where something is, unless that is of the same kind and may be replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from dcr_store.errors import ConflictError, StorageError
from dcr_store.targets.own_directories import refuse_file, refuse_inside_store


@contextlib.contextmanager
def in_place_of(directory: Path, kind: str, is_one: Callable[[Path], bool], *, force: bool) -> Iterator[Path]:
    """Yield a directory that takes the place of `directory` if nothing is raised.

    Parameters
    ----------
    directory : Path
        Missing or empty; with `force` also what may be replaced.
    kind : str
        What may be replaced, in words.
    is_one : function
        Whether a directory is of that kind.
    force : bool

    Raises
    ------
    InvalidInputError
        If it is a file, or in a store.
    ConflictError
        If something else is there.
    StorageError
        If it cannot be written.
    """
    refuse_inside_store(directory, "the checkpoint")
    refuse_file(directory)
    directory = Path(os.path.realpath(directory))
    try:
        is_there = directory.is_dir() and any(True for _ in directory.iterdir())
        if is_there and not (force and is_one(directory)):
            raise ConflictError(
                f"is not empty; give another directory{'' if force else f', or force, which replaces {kind}'}",
                key=str(directory),
                expected=f"nothing there{f', or {kind}' if force else ''}",
                found=kind if is_one(directory) else "other files",
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Not of tempfile's, whose mode would have to be widened: the process's mask can be read only by changing it.
        place = directory.with_name(f".{directory.name}-{secrets.token_hex(8)}")
        place.mkdir(0o777)
    except OSError as error:
        raise StorageError(f"cannot be written: {error.strerror}", key=str(directory)) from error
    try:
        yield place
        try:
            if is_there:
                # A crash between the two leaves both, the old one under the name of the temporary one.
                old = place.with_name(place.name + "-old")
                directory.rename(old)
                try:
                    place.rename(directory)
                except BaseException:
                    _move_back(old, directory)
                    raise
                shutil.rmtree(old, ignore_errors=True)
            else:
                if directory.is_dir():
                    directory.rmdir()
                place.rename(directory)
        except OSError as error:
            raise StorageError(f"cannot be written: {error.strerror}", key=str(directory)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _move_back(old: Path, directory: Path) -> None:
    try:
        old.rename(directory)
    except OSError as error:
        raise StorageError(
            f"cannot be written: {error.strerror}; what was there is whole, at {old}: move it back", key=str(directory)
        ) from error
