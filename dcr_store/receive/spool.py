"""Partitions that a receiver has fetched before it needs them: files named by their SHA-256, in a bounded directory.

Nothing depends on a spool. A file counts only after this process has seen its bytes to be the ones named, so a torn,
cut or foreign one is fetched again, nothing is synced, several processes may share a directory, and deleting it costs
time alone. What is of a transaction that is still open carries that in its name, and goes if it is aborted:

::

    <sha256>                                     of a committed version, or of an ended transaction that made one
    <sha256>.<family>.<version>.<txid>           of an open transaction; the family is a store and a line
    <random>.new                                 on its way; locked by the process that writes it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from dcr_store import events
from dcr_store.errors import StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import ObjectRef

SPOOL: Final = "spool"
"""The default spool's name in a target's own directory."""
_DEFAULT_NBYTES: Final = 16 << 30
_DEFAULT_SHARE: Final = 10
_NAME: Final = re.compile(r"([0-9a-f]{64})(?:\.([0-9a-f]{16})\.([0-9]{1,12})\.([0-9a-f]{32}))?")
_NEW: Final = re.compile(r"[0-9a-f]{32}\.new")
_FREE_SHARE: Final = 20  # a twentieth of the disk is left to others: the target needs room too
_SLACK_SHARE: Final = 16

Verdict = Literal["open", "committed", "aborted"]


@dataclass(frozen=True, slots=True)
class Tag:
    """Of which open transaction a file is."""

    family: str
    version: int
    txid: str

    @staticmethod
    def family_of(store_id: str, line: str) -> str:
        """Return the name of all transactions of one line of one store: 16 hex digits."""
        return canonical.sha256(f"{store_id}/{line}".encode())[:16]

    def name(self, sha256: str) -> str:
        """Return the file name of an object of this transaction."""
        return f"{sha256}.{self.family}.{self.version}.{self.txid}"


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the directory."""

    name: str
    sha256: str
    tag: Tag | None
    nbytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file that was right when it was looked at."""

    name: str
    inode: int
    nbytes: int


class Spool:
    """A spool directory. Safe to use from several threads and processes.

    Parameters
    ----------
    directory : path
        Made when something is put.
    limit_nbytes : int, optional
        Bytes of all files together. What does not fit is not kept. By default a tenth of the disk, and 16 GiB at least.
    """

    def __init__(self, directory: Path, limit_nbytes: int | None = None) -> None:
        self.directory = directory
        self.limit_nbytes = _default_limit(directory) if limit_nbytes is None else limit_nbytes
        self._needed: frozenset[str] = frozenset()
        self._seen: dict[str, _Seen] = {}  # what this process has found to be right, by SHA-256
        self._lock = threading.Lock()
        # Counted anew, with what others have put, whenever a share of the limit has been put since.
        self._counted_nbytes, self._put_nbytes = 0, self.limit_nbytes

    def need(self, refs: Iterable[ObjectRef]) -> None:
        """Say what must not make room for anything else from now on, instead of what was said before."""
        self._needed = frozenset(ref.sha256 for ref in refs)

    def spare(self) -> int:
        """Remove all that is not needed, so that the disk has room for something else; return how many bytes."""
        spared = 0
        with self._lock, contextlib.suppress(OSError):
            for file in list(self._files()):
                if file.sha256 not in self._needed:
                    self._unlink(file.name)
                    self._seen.pop(file.sha256, None)
                    events.reached("spool.evicted", file.name)
                    spared += file.nbytes
        return spared

    # ------------------------------------------------------------------ reading

    def has(self, ref: ObjectRef, tag: Tag | None = None) -> bool:
        """Whether the spool surely has an object; reads one that this process has not seen yet."""
        seen = self._seen.get(ref.sha256)
        if seen is not None:
            with contextlib.suppress(OSError):
                status = (self.directory / seen.name).stat()
                if (status.st_size, status.st_ino) == (ref.nbytes, seen.inode):
                    return True
        return self.get(ref, tag) is not None

    def get(self, ref: ObjectRef, tag: Tag | None = None) -> bytes | None:
        """Return an object's bytes; None if they are not there. A file with other bytes is removed."""
        seen = self._seen.get(ref.sha256)
        names = dict.fromkeys([ref.sha256, *([tag.name(ref.sha256)] if tag else []), *([seen.name] if seen else [])])
        for name in names:
            data = self._read(name, ref)
            if data is not None:
                return data
        self._seen.pop(ref.sha256, None)
        return None

    def find(self, sha256: str) -> bytes | None:
        """Return an object's bytes, whatever their number; None if they are not there."""
        seen = self._seen.get(sha256)
        try:
            nbytes = (self.directory / sha256).stat().st_size if seen is None else seen.nbytes
        except OSError:
            return None
        return self.get(ObjectRef("", sha256, nbytes)) if nbytes <= self.limit_nbytes else None

    def _read(self, name: str, ref: ObjectRef) -> bytes | None:
        path = self.directory / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            data = os.pread(fd, ref.nbytes + 1, 0)
            if canonical.sha256(data) == ref.sha256:
                os.utime(fd)  # used just now: what was not makes room first
                self._seen[ref.sha256] = _Seen(name, os.fstat(fd).st_ino, len(data))
                return data
        except OSError:
            return None
        finally:
            os.close(fd)
        events.reached("spool.damaged", name)
        self._unlink(name)
        return None

    # ------------------------------------------------------------------ writing

    def reserve(self, ref: ObjectRef, tag: Tag | None = None) -> Slot | None:
        """Make room for an object that is about to be fetched; None if there is none to be made.

        What was not used for longest goes first, and nothing that is needed. For an object of an open transaction
        nothing of any open transaction goes either: such a one would only be fetched over and over again.
        """
        with self._lock:
            try:
                if not self._make_room(ref.nbytes, tag is not None):
                    return None
                return Slot(self, ref, tag)
            except OSError as error:
                events.reached("spool.failed", f"{self.directory}: {error.strerror}")
                return None

    def _make_room(self, nbytes: int, is_ahead: bool) -> bool:
        self.directory.mkdir(parents=True, exist_ok=True)
        free = self._free_nbytes()
        slack = self.limit_nbytes // _SLACK_SHARE
        after = self._put_nbytes + nbytes
        if after <= slack and self._counted_nbytes + after <= self.limit_nbytes and nbytes <= free:
            self._put_nbytes = after
            return True
        files = list(self._files())
        total = sum(file.nbytes for file in files) + sum(self._unfinished())
        spare = [file for file in files if file.sha256 not in self._needed and not (is_ahead and file.tag is not None)]
        missing = max(total + nbytes - self.limit_nbytes, nbytes - free)
        is_possible = missing <= sum(file.nbytes for file in spare)
        if is_possible and missing > 0:
            # Some more, so that a full spool is not looked through for each object.
            missing += slack
            for file in sorted(spare, key=lambda file: file.used_ns):
                if missing <= 0:
                    break
                self._drop(file)
                events.reached("spool.evicted", file.name)
                missing, total = missing - file.nbytes, total - file.nbytes
        self._counted_nbytes, self._put_nbytes = total, nbytes if is_possible else 0
        return is_possible

    def _free_nbytes(self) -> int:
        disk = os.statvfs(self.directory)
        return (disk.f_bavail - disk.f_blocks // _FREE_SHARE) * disk.f_frsize

    def _files(self) -> Iterator[_File]:
        with os.scandir(self.directory) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    tag = Tag(match[2], int(match[3]), match[4]) if match[2] else None
                    yield _File(entry.name, match[1], tag, status.st_size, status.st_mtime_ns)

    def _unfinished(self) -> Iterator[int]:
        """Iterate over the bytes reserved by whoever writes just now; remove what the dead left."""
        with os.scandir(self.directory) as entries:
            names = [entry.name for entry in entries if _NEW.fullmatch(entry.name)]
        for name in names:
            with contextlib.suppress(OSError):
                fd = os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    yield os.fstat(fd).st_size
                else:
                    self._unlink(name)
                finally:
                    os.close(fd)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.directory / name).unlink(missing_ok=True)

    def _drop(self, file: _File) -> None:
        self._unlink(file.name)
        seen = self._seen.get(file.sha256)
        if seen is not None and seen.name == file.name:
            self._seen.pop(file.sha256, None)

    # ------------------------------------------------------------------ transactions

    def settle(self, family: str, judge: Callable[[int, str], Verdict]) -> None:
        """Keep, adopt or drop what was fetched of a line's transactions while they were open.

        Parameters
        ----------
        judge : callable
            Tells what became of the transaction with this version and txid; called after the files were listed, once
            for each. A directory that cannot be listed is left as it is.
        """
        try:
            files = list(self._files())
        except FileNotFoundError:
            return
        except OSError as error:
            events.reached("spool.failed", f"{self.directory}: {error.strerror}")
            return
        verdicts: dict[Tag, Verdict] = {}
        for file in files:
            if file.tag is None or file.tag.family != family:
                continue
            if file.tag not in verdicts:
                verdicts[file.tag] = judge(file.tag.version, file.tag.txid)
            if verdicts[file.tag] == "aborted":
                self._drop(file)
                events.reached("spool.dropped", file.name)
            elif verdicts[file.tag] == "committed":
                # Whether the version has it, or another one that its writer stored later, its seals tell.
                with contextlib.suppress(OSError):
                    (self.directory / file.name).rename(self.directory / file.sha256)
                    if file.sha256 in self._seen:
                        self._seen[file.sha256] = replace(self._seen[file.sha256], name=file.sha256)

    def nbytes(self) -> int:
        """Return the bytes of all files that are whole."""
        try:
            return sum(file.nbytes for file in self._files())
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise StorageError(f"cannot be listed: {error.strerror}", key=str(self.directory)) from error


def _default_limit(directory: Path) -> int:
    for place in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            disk = os.statvfs(place)
            return max(_DEFAULT_NBYTES, disk.f_blocks * disk.f_frsize // _DEFAULT_SHARE)
    return _DEFAULT_NBYTES


class Slot:
    """Room in a spool for one object, until ``write`` or ``close``. A context manager that closes it."""

    def __init__(self, spool: Spool, ref: ObjectRef, tag: Tag | None) -> None:
        self._spool, self._ref, self._tag = spool, ref, tag
        self._path = spool.directory / f"{secrets.token_hex(16)}.new"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # Locked, so that nobody takes it for a dead one's; as long as it will be, so that others count it.
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.ftruncate(self._fd, ref.nbytes)
        except OSError:
            self.close()
            raise

    def write(self, data: bytes) -> bool:
        """Keep the object, whose bytes the caller has verified; return whether that could be done."""
        spool, sha256 = self._spool, self._ref.sha256
        name = self._tag.name(sha256) if self._tag else sha256
        try:
            rest, offset = memoryview(data), 0
            while rest:
                n_written = os.pwrite(self._fd, rest, offset)
                rest, offset = rest[n_written:], offset + n_written
            events.reached("spool.written", name)
            # A crash just before leaves a file that nobody counts; just after, one that is verified when it is used.
            self._path.rename(spool.directory / name)
            spool._seen[sha256] = _Seen(name, os.fstat(self._fd).st_ino, len(data))
        except OSError as error:
            events.reached("spool.failed", f"{spool.directory}: {error.strerror}")
            return False
        events.reached("spool.stored", name)
        return True

    def close(self) -> None:
        """Give the room back if nothing was kept."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
