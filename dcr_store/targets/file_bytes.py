"""Bytes of open files, scattered and gathered: whole ranges or an error, never less.

Reads and writes with the kernel's positioned calls and not through a mapping: where a file is shorter than it should
be, or a disk is full, a mapping ends the process with a signal, and these raise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from dcr_store.errors import IntegrityError, StorageError

_MAX_BUFFERS: Final = 1024  # of one call (IOV_MAX)


def read_exactly(fd: int, offset: int, buffers: Sequence[memoryview], name: str) -> None:
    """Fill `buffers`, one after the other, with the bytes of a file from `offset` on.

    Raises
    ------
    IntegrityError
        If the file ends before.
    StorageError
        If it cannot be read.
    """
    _transfer(os.preadv, fd, offset, buffers, name, "read")


def write_exactly(fd: int, offset: int, buffers: Sequence[memoryview], name: str) -> None:
    """Write `buffers`, one after the other, to a file from `offset` on; ``StorageError`` if that fails."""
    _transfer(os.pwritev, fd, offset, buffers, name, "written")


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    offset: int,
    buffers: Sequence[memoryview],
    name: str,
    what: str,
) -> None:
    index = 0
    while index < len(buffers):
        batch = list(buffers[index : index + _MAX_BUFFERS])
        index += len(batch)
        while batch:
            try:
                n = call(fd, batch, offset)
            except OSError as error:
                raise StorageError(f"cannot be {what}: {error.strerror}", key=name) from error
            if n == 0 and any(batch):
                raise IntegrityError(
                    "is shorter than its header says", key=name, expected=f"more than {offset} bytes", found=offset
                )
            offset += n
            while batch and n >= len(batch[0]):
                n -= len(batch.pop(0))
            if batch:
                batch[0] = batch[0][n:]
