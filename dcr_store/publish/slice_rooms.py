"""Room for slices in mapped files: taken, looked up after a restart, and taken back.

::

    bits-<n>.bin     packed bits of slices at multiples of 64 bytes; a note says which is where

A file goes when nothing in it is in use. The disk's room is taken with each slice's: writing to a mapping of a full
disk would end the process with a signal. Refuses files that are shorter than what is said to be in them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import re
import stat
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from dcr_store.layout.dtypes import ALIGNMENT_NBYTES, Bits

_LEAST_NBYTES: Final = 1 << 20
_NAME: Final = re.compile(r"bits-(0|[1-9][0-9]{0,8})\.bin")


class Room(NamedTuple):
    """The bytes `start` to `stop` of file number `file`."""

    file: int
    start: int
    stop: int


class Rooms:
    """The files in a directory that holds nothing else of these names. Not for several threads at once.

    Methods raise ``OSError`` where files cannot be made, read or removed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._free: list[Room] = []
        self._wanted_nbytes = 0
        self._close = weakref.finalize(self, _close_all, self._fds)

    def open(self, rooms: Iterable[Room]) -> set[Room]:
        """Open the files that are there; return which of the rooms, that do not overlap, are in them. Others go."""
        wanted: dict[int, list[Room]] = {}
        for room in rooms:
            wanted.setdefault(room.file, []).append(room)
        found = set()
        for number, mine in wanted.items():
            if self._open(number, max(room.stop for room in mine)):
                found.update(mine)
                for room in mine:
                    _reserve(self._fds[number], room)  # a copy, or what a power loss left, may have holes
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) not in self._maps:
                path.unlink()
        self.keep(found)
        return found

    def _path(self, number: int) -> Path:
        return self._directory / f"bits-{number}.bin"

    def _open(self, number: int, nbytes: int) -> bool:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(self._path(number), flags)
        except OSError:
            return False
        self._fds[number] = fd
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size >= max(nbytes, 1):
            self._maps[number] = mmap.mmap(fd, status.st_size)
            return True
        os.close(self._fds.pop(number))
        return False

    def expect(self, nbytes: int) -> None:
        """Say how much is going to be taken, so that the next file holds it."""
        self._wanted_nbytes = nbytes

    def take(self, nbytes: int) -> Room:
        """Return a room that was free, of any content."""
        needed = max(1, -(-nbytes // ALIGNMENT_NBYTES)) * ALIGNMENT_NBYTES
        fitting = (index for index, free in enumerate(self._free) if free.stop - free.start >= needed)
        index = next(fitting, len(self._free))
        if index == len(self._free):
            self._free.append(self._new_file(needed))
        free = self._free[index]
        room = Room(free.file, free.start, free.start + needed)
        _reserve(self._fds[room.file], room)
        self._free[index : index + 1] = [] if room.stop == free.stop else [free._replace(start=room.stop)]
        return room

    def _new_file(self, needed: int) -> Room:
        # As much again as there is: however many slices there are, they are in few files.
        total = self._wanted_nbytes or max(_LEAST_NBYTES, sum(len(mapped) for mapped in self._maps.values()))
        self._wanted_nbytes = 0
        number = next(number for number in itertools.count() if number not in self._maps)
        nbytes = max(needed, total)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self._path(number), flags, 0o666)
        try:
            os.ftruncate(fd, nbytes)
            self._maps[number] = mmap.mmap(fd, nbytes)
        except BaseException:
            os.close(fd)
            self._path(number).unlink()  # nobody knows of it, and the next one gets its number
            raise
        self._fds[number] = fd
        return Room(number, 0, nbytes)

    def view(self, room: Room, n_elements: int, dtype: np.dtype[Any]) -> Bits:
        """Return the mapped memory of a room, as far as it is used: uintN, shape (n_elements,)."""
        found: Bits = np.frombuffer(self._maps[room.file], dtype, n_elements, room.start)
        return found

    def keep(self, rooms: Iterable[Room]) -> None:
        """Take back all rooms but these, which do not overlap."""
        used: dict[int, list[Room]] = {number: [] for number in self._maps}
        for room in rooms:
            used[room.file].append(room)
        self._free = []
        for number, mine in used.items():
            if not mine:
                self._remove(number)
                continue
            end = 0
            for room in sorted(mine):
                if room.start > end:
                    self._free.append(Room(number, end, room.start))
                end = room.stop
            if end < len(self._maps[number]):
                self._free.append(Room(number, end, len(self._maps[number])))

    def _remove(self, number: int) -> None:
        del self._maps[number]  # the mapping goes with the last view of it
        os.close(self._fds.pop(number))
        with contextlib.suppress(FileNotFoundError):
            self._path(number).unlink()

    def close(self) -> None:
        """Let go of the files; they stay."""
        self._maps.clear()
        self._free.clear()
        self._close()


def _close_all(fds: dict[int, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def _reserve(fd: int, room: Room) -> None:
    """Take the disk's room, where the file system can do that."""
    try:
        os.posix_fallocate(fd, room.start, room.stop - room.start)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
