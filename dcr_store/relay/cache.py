"""Whole objects on the relay's disk, by key and SHA-256; least recently used first out, bounded by bytes.

::

    <directory>/lock                                  held while a relay runs
    <directory>/objects/<first 2>/<sha256>-<key>      key: first 32 hex digits of the key's SHA-256
    <directory>/arriving/<random>                     on their way; removed at the next start

A file has its name only after its bytes proved right, by a rename. No sync: after a power loss a file may hold
anything, so each one that this process did not write is compared again before it is first used. The directory may be
deleted while no relay runs. Refuses a directory that another relay uses, or that holds something else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from dcr_store.errors import ConflictError, InvalidInputError, StorageError

_FILE: Final = re.compile(r"[0-9a-f]{64}-[0-9a-f]{32}")
_ON_ITS_WAY: Final = re.compile(r"[0-9a-f]{32}")
READ_NBYTES: Final = 1 << 26
_PARTS: Final = {"lock", "objects", "arriving"}


@dataclass(slots=True)
class _KeptFile:
    nbytes: int
    is_proven: bool


class Arriving:
    """The bytes of one object while they arrive: appended by one thread, read by others at any place before the end.

    They lie in a file, or in memory once the disk refuses to take more.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path | None = path
        self.nbytes = 0
        self._memory: bytearray | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            self._to_memory()

    def append(self, piece: bytes) -> None:
        """Add bytes at the end."""
        if self._memory is None:
            try:
                view = memoryview(piece)
                while view:
                    view = view[os.pwrite(self._descriptor, view, self.nbytes + len(piece) - len(view)) :]
            except OSError:
                self._to_memory()
        if self._memory is not None:
            self._memory += piece
        self.nbytes += len(piece)

    def _to_memory(self) -> None:
        memory = bytearray()
        while len(memory) < self.nbytes:  # one read gives 2 GiB at most
            piece = os.pread(self._descriptor, min(self.nbytes - len(memory), READ_NBYTES), len(memory))
            if not piece:
                raise OSError(errno.EIO, "what was written cannot be read back")
            memory += piece
        self._memory = memory
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()  # the disk may be full
            self.path = None

    def read(self, start: int, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes from `start` on."""
        nbytes = min(nbytes, self.nbytes - start)
        if self._memory is not None:
            return bytes(self._memory[start : start + nbytes])
        return os.pread(self._descriptor, nbytes, start)

    def close(self) -> None:
        """Let go of the bytes; a file that has no name yet should be gone by then."""
        self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Cache:
    """The objects that a relay keeps. Safe to use from any thread.

    Parameters
    ----------
    directory : path
        Made if there is none.
    max_nbytes : int
        How much is kept; objects on their way come on top.

    Raises
    ------
    ConflictError
        Another relay uses the directory.
    InvalidInputError
        The directory holds something else.
    StorageError
        It cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str], max_nbytes: int) -> None:
        self._directory = Path(directory)
        self._max_nbytes = max_nbytes
        self._guard = threading.Lock()
        self._kept: OrderedDict[str, _KeptFile] = OrderedDict()  # by name, the least recently used first
        self.nbytes = 0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            foreign = sorted({entry.name for entry in self._directory.iterdir()} - _PARTS)
            if foreign:
                raise InvalidInputError(
                    "the directory holds something else than a relay's cache; name an empty one",
                    key=str(directory),
                    found=foreign[0],
                )
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._lock = os.open(self._directory / "lock", flags, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._lock)
                raise ConflictError(
                    "another relay uses this cache; give each one a directory of its own", key=str(directory)
                ) from error
            try:
                self._take_over()
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise StorageError(f"the cache directory cannot be used: {error.strerror}", key=str(directory)) from error

    def _take_over(self) -> None:
        """Learn what an earlier run left: what is whole is kept, what was on its way is removed."""
        for name in ("objects", "arriving"):
            (self._directory / name).mkdir(exist_ok=True)
        for path in self._within("arriving"):
            if _ON_ITS_WAY.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
        found: list[tuple[int, str, int]] = []
        for directory in self._within("objects"):
            if not stat.S_ISDIR(directory.lstat().st_mode) and not directory.is_symlink():
                continue
            for path in self._within(f"objects/{directory.name}"):
                status = path.lstat()
                if _FILE.fullmatch(path.name) and path == self._path(path.name) and stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime_ns, path.name, status.st_size))
        for _, name, nbytes in sorted(found):
            self._kept[name] = _KeptFile(nbytes, is_proven=False)
            self.nbytes += nbytes
        with self._guard:
            self._evict()

    def _within(self, name: str) -> list[Path]:
        """Return what lies in a directory of the cache; refuse a link, which may lead to somebody else's files."""
        path = self._directory / name
        if path.is_symlink():
            raise InvalidInputError(
                "is a link; remove it, or name another directory for the cache",
                key=str(path),
                expected="a directory",
                found=f"a link to {path.readlink()}",
            )
        return list(path.iterdir())

    def _path(self, name: str) -> Path:
        return self._directory / "objects" / name[:2] / name

    def __len__(self) -> int:
        return len(self._kept)

    def open(self, key: str, sha256: str, *, past: bool = False) -> BinaryIO | None:
        """Return a kept object, open to be read, or None. It stays readable if it is dropped meanwhile.

        Parameters
        ----------
        key, sha256 : str
        past : bool
            Whether it is to be compared again in any case.
        """
        name = _name(key, sha256)
        with self._guard:
            kept = self._kept.get(name)
            if kept is None:
                return None
            self._kept.move_to_end(name)
        try:
            file = _opened(self._path(name))
        except OSError:
            self._drop(name)
            return None
        with contextlib.suppress(OSError):
            os.utime(file.fileno())  # the next run's order
        if past or not kept.is_proven:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                file.close()
                self._drop(name)
                return None
            file.seek(0)
            kept.is_proven = True
        return file

    def arriving(self) -> Arriving:
        """Return a place for an object on its way."""
        return Arriving(self._directory / "arriving" / secrets.token_hex(16))

    def keep(self, arriving: Arriving, key: str, sha256: str) -> None:
        """Give an object that has arrived whole, and proved to have `sha256`, its name; where it fits.

        Who reads it by `arriving` can go on.
        """
        path, arriving.path = arriving.path, None
        if path is None:
            return
        name = _name(key, sha256)
        try:
            if arriving.nbytes > self._max_nbytes:
                path.unlink()
                return
            self._path(name).parent.mkdir(exist_ok=True)
            path.rename(self._path(name))
        except OSError:
            path.unlink(missing_ok=True)
            return
        with self._guard:
            before = self._kept.pop(name, None)
            self.nbytes += arriving.nbytes - (before.nbytes if before else 0)
            self._kept[name] = _KeptFile(arriving.nbytes, is_proven=True)
            self._evict()

    def discard(self, arriving: Arriving) -> None:
        """Remove an object that did not arrive."""
        path, arriving.path = arriving.path, None
        if path is not None:
            path.unlink(missing_ok=True)

    def drop(self, key: str, sha256: str) -> None:
        """Forget an object."""
        self._drop(_name(key, sha256))

    def drop_key(self, key: str) -> None:
        """Forget whatever is kept of a key."""
        end = "-" + _key_digits(key)
        with self._guard:
            names = [name for name in self._kept if name.endswith(end)]
        for name in names:
            self._drop(name)

    def _drop(self, name: str) -> None:
        with self._guard:
            self._remove(name)

    def _evict(self) -> None:
        while self.nbytes > self._max_nbytes:
            self._remove(next(iter(self._kept)))

    def _remove(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.nbytes -= kept.nbytes
            with contextlib.suppress(OSError):
                self._path(name).unlink()

    def close(self) -> None:
        """Let another relay have the directory."""
        os.close(self._lock)


def _opened(path: Path) -> io.FileIO:
    """Open a file to be read; refuse links, and what opening or reading would wait for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file")
    return io.FileIO(descriptor)


def _key_digits(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _name(key: str, sha256: str) -> str:
    return f"{sha256}-{_key_digits(key)}"
