"""Temporary directories of which a killed process leaves none for long: whoever makes one removes those of the dead.

Each holds a file that is locked while its owner lives. Never touches a directory of another user, or one without that
file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dcr_store.targets.own_directories import LOCK


def make_locked(prefix: str) -> tuple[Path, int]:
    """Make a directory whose name begins with `prefix`; return it and the descriptor that holds its lock.

    Raises
    ------
    OSError
        If there is no place for one.
    """
    sweep(prefix)
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix))
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Somebody who sweeps may have taken the lock before us; then the directory is gone, or about to go.
        if _try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return directory, descriptor
        os.close(descriptor)


def sweep(prefix: str) -> None:
    """Remove directories with that prefix whose owner does not live any more."""
    with contextlib.suppress(OSError):
        for directory in list(_ours(prefix)):
            with contextlib.suppress(OSError):
                descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if _try_lock(descriptor):
                        remove(directory)
                finally:
                    os.close(descriptor)


def remove(directory: Path) -> None:
    """Remove such a directory, as far as that can be done; its lock last: what a kill leaves must be found by it."""
    with contextlib.suppress(OSError):
        for path in list(directory.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _ours(prefix: str) -> Iterator[Path]:
    with os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            is_one = entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False)
            if is_one and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                yield Path(entry.path)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
