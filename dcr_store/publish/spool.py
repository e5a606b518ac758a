"""Encoded chunks that wait until their transaction ends: in memory at first, then in an unnamed temporary file.

Refuses nothing but a full disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from tempfile import TemporaryFile, gettempdir
from typing import IO, Final

from dcr_store.errors import StorageError

SPOOL_NBYTES: Final = 8 << 20

Place = tuple[str, int]


class ChunkSpool:
    """Encoded chunks by (space, chunk): up to ``SPOOL_NBYTES`` in memory. Safe to use from several threads."""

    def __init__(self) -> None:
        self._held: dict[Place, bytes] = {}
        self._held_nbytes = 0
        self._stored: dict[Place, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def put(self, space: str, chunk: int, data: bytes) -> None:
        """Keep a chunk."""
        with self._lock:
            if self._held_nbytes + len(data) <= SPOOL_NBYTES:
                self._held[space, chunk] = data
                self._held_nbytes += len(data)
            else:
                self._stored[space, chunk] = (self._store(data), len(data))

    def _store(self, data: bytes) -> int:
        """Append to the file; return where."""
        with _translated():
            if self._file is None:
                self._file = TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the spool
                weakref.finalize(self, _close, self._file)  # also of a transaction that was dropped
            start, rest = self._end, memoryview(data)
            while rest:
                n_written = os.pwrite(self._file.fileno(), rest, self._end)
                rest, self._end = rest[n_written:], self._end + n_written
        return start

    def get(self, space: str, chunk: int) -> bytes | None:
        """Return a chunk, None if there is none."""
        held = self._held.get((space, chunk))
        if held is not None:
            return held
        place = self._stored.get((space, chunk))
        if place is None or self._file is None:
            return None
        with _translated():
            return os.pread(self._file.fileno(), place[1], place[0])

    def pop(self, space: str, chunk: int) -> bytes:
        """Return a chunk that was put, and forget it; what is in the file stays there."""
        with self._lock:
            held = self._held.pop((space, chunk), None)
            if held is not None:
                self._held_nbytes -= len(held)
                return held
        stored = self.get(space, chunk)
        assert stored is not None
        del self._stored[space, chunk]
        return stored

    def places(self) -> list[Place]:
        """Return what is kept: first what is in memory, then the rest, each in the order of arrival."""
        return [*self._held, *self._stored]

    def close(self) -> None:
        """Drop all."""
        self._held.clear()
        self._stored.clear()
        if self._file is not None:
            _close(self._file)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"encoded chunks cannot be kept: {error.strerror}; free space there, or set TMPDIR", key=gettempdir()
        ) from error


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):
        file.close()
