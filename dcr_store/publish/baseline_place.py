"""Where baselines may be, and the lock by which each serves one process at a time.

Refuses checkpoints, places in stores, and directories that another process is using.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dcr_store.errors import ConflictError, InvalidInputError, StorageError
from dcr_store.targets.checkpoint_listing import is_weights
from dcr_store.targets.own_directories import refuse_file, refuse_inside_store
from dcr_store.targets.paths import local_path


def checked_place(directory: str | os.PathLike[str]) -> Path:
    """Return a place for a baseline; refuse one that is a checkpoint or in a store, before anything is written."""
    place = local_path(directory, "baseline").absolute()  # it is written to after the commit, wherever this is run then
    refuse_file(place)
    refuse_inside_store(place, "the baseline")
    with contextlib.suppress(OSError):  # which says itself what is wrong when the directory is made
        if weights := sorted(path.name for path in place.iterdir() if is_weights(path.name)):
            raise InvalidInputError(
                "is a checkpoint; give the baseline a directory of its own (baseline)",
                key=str(place),
                expected="no weights",
                found=weights[0],
            )
    return place


@contextlib.contextmanager
def translated(directory: Path) -> Iterator[None]:
    """Raise ``StorageError`` where files of a baseline cannot be made, read, locked or written."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the baseline cannot be kept: {error.strerror}; free space, or name another directory (baseline)",
            key=str(error.filename or directory),
        ) from error


def take_lock(descriptor: int, directory: Path) -> None:
    """Lock a baseline's directory by the open file in it.

    Raises
    ------
    ConflictError
        If somebody else has it.
    OSError
        If the file system does not lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise ConflictError(
            "another publisher is using this baseline; wait for it, or name another directory (baseline)",
            key=str(directory),
        ) from error


def release_lock(descriptor: int, pid: int) -> None:
    """Close the open file by which process `pid` locked a baseline, and, in that process, unlock it."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
    with contextlib.suppress(OSError):
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write to an open file; ``OSError`` if the disk does not take all."""
    while data:
        n_written = os.pwrite(descriptor, data, offset)  # on a disk that is nearly full, fewer than asked for
        data, offset = data[n_written:], offset + n_written
