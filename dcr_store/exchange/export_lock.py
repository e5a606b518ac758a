"""One export at a time in a directory: two would build their folders in the same place, and name each other's."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dcr_store.errors import ConflictError, StorageError

LOCK: Final = ".export.lock"
"""Stays, empty: on network file systems a lock whose file goes away is not seen by all."""


@contextmanager
def only_export(root: Path) -> Iterator[None]:
    """Hold the lock of a directory that is exported to; it ends with the process, however that ends.

    Raises
    ------
    ConflictError
        If another export holds it.
    StorageError
        If the directory cannot be written, or its file system does not lock.
    """
    pid = os.getpid()
    descriptor = -1
    try:
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, BlockingIOError | PermissionError) and descriptor >= 0:
            raise ConflictError(
                "another export writes here; wait for it, or export to another directory", key=str(root)
            ) from error
        raise StorageError(f"cannot be locked: {error.strerror}", key=str(root / LOCK)) from error
    try:
        yield
    finally:
        if os.getpid() == pid:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(descriptor)
