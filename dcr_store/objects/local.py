"""Objects as files below a directory of one machine.

A file appears under its name whole or not at all: it is written to a temporary file in a hidden directory of the store,
synced, and then linked (``put_if_absent``) or renamed (``put``) to its name, and the name's directory is synced. What a
killed process leaves in the hidden directory is never listed, and is removed once it is a day old. Refuses file systems
without hard links, and symbolic links below the root: a store that was unpacked from somewhere must not lead reads,
writes or deletes out of its directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from dcr_store.errors import DcrError, NotFoundError, StorageError
from dcr_store.objects.flat import flat
from dcr_store.objects.keys import SCRATCH, check_key, check_prefix, check_range, key_problem
from dcr_store.objects.retry import RetryPolicy, TransientError, resolving, retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dcr_store.ports import Bytes

STALE_AFTER_S: Final = 86_400.0
T = TypeVar("T")
MOST_MOVES: Final = 100  # tries to give a file its name while others remove its directory
_TRANSIENT: Final = {errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR}  # network file systems
_NO_LINK: Final = {errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP}  # whatever is there, if anything
_HINTS: Final = {
    errno.ENOSPC: "the disk is full: free space and repeat",
    errno.EDQUOT: "the quota is used up: free space and repeat",
    errno.EACCES: "permission denied: check who owns the store's directory",
    errno.EPERM: "not permitted: check the directory's owner, and that its file system has hard links",
    errno.EROFS: "the file system is read-only",
    errno.EXDEV: "the store's directory spans two file systems: keep it on one",
    errno.ENOTSUP: "the file system has no hard links, which a store needs: use another one",
    errno.EMLINK: "the file system has no hard links, which a store needs: use another one",
    errno.ENOTDIR: "a part of the path is a file, not a directory: is this the store's directory?",
    errno.EISDIR: "a directory has this name: is this the store's directory?",
    errno.ENAMETOOLONG: "the path is too long for the file system: use a shorter root",
    errno.ELOOP: "a symbolic link has this name: a store holds none below its root",
    errno.EMFILE: "too many open files: raise ulimit -n",
}


class LocalObjects:
    """An object store below a directory. See ``dcr_store.ports.ObjectStore``.

    Parameters
    ----------
    root : str
        The directory, absolute. Made at the first put.
    policy : RetryPolicy, optional
        For what network file systems answer now and then.
    """

    is_local = True

    def __init__(self, root: str, policy: RetryPolicy | None = None) -> None:
        self._root = root.rstrip("/") or "/"
        self._policy = policy or RetryPolicy()
        self._durable: set[str] = set()  # directories whose own names are known to be on disk
        self._swept = False
        self.url = self._root

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._root}/{key}"

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of an object; ``NotFoundError`` if there is none."""
        path = self._path(key)
        check_range(key, start, stop)
        return self._retried("get", key, lambda: self._read(path, key, start, stop))

    def _read(self, path: str, key: str, start: int, stop: int | None) -> bytes:
        self._check_no_links(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(f"no such object in {self.url}", key=key) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NotFoundError(f"no such object in {self.url}", key=key)
            end = status.st_size if stop is None else min(stop, status.st_size)
            pieces = []
            while start < end:
                piece = os.pread(descriptor, min(end - start, 1 << 30), start)
                if not piece:
                    raise TransientError(f"the file ended {end - start} bytes early")
                pieces.append(piece)
                start += len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            os.close(descriptor)

    def put(self, key: str, data: Bytes) -> None:
        """Store an object, atomically and durably, over whatever is there."""
        path = self._path(key)
        view = flat(data)

        def attempt() -> None:
            with _translated("put", key), self._temporary(view) as temporary:
                self._into_place(path, lambda: temporary.replace(path))

        retrying(self._policy, "put", key, attempt)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        """Create an object, atomically and durably, unless the key is taken.

        Returns
        -------
        bool
            True if the key now holds exactly `data`, False if it holds something else.
        """
        path = self._path(key)
        view = flat(data)

        def create() -> bool:
            with _translated("create", key):
                if _is_taken(path):
                    return False  # spares writing and syncing a file that the link would refuse
                linked = False

                def link() -> None:
                    nonlocal linked
                    Path(path).hardlink_to(temporary)
                    linked = True

                with self._temporary(view) as temporary:
                    try:
                        self._into_place(path, link)
                    except FileExistsError:
                        return False
                    except OSError as error:
                        if linked:  # the object stands, but may not outlive a power loss: that is no answer
                            raise TransientError(f"its directory cannot be synced: {error.strerror}") from error
                        raise
                return True

        def read() -> bytes:
            with _translated("read back", key):
                content = self._read(path, key, 0, None)
                # Whoever made the name may not have synced it yet, and we build on it.
                self._make_durable(Path(path).parent)
                _sync_directory(Path(path).parent)
                return content

        return resolving(self._policy, key, view, create, read)

    @contextlib.contextmanager
    def _temporary(self, view: memoryview) -> Iterator[Path]:
        """Hold a synced temporary file with the bytes of `view`; it is removed afterwards, unless it was renamed."""
        scratch = Path(self._root, SCRATCH)
        path = scratch / f"{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            scratch.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
        try:
            try:
                if not self._swept:
                    self._swept = True
                    _sweep(scratch, os.fstat(descriptor).st_mtime - STALE_AFTER_S)
                while len(view):
                    view = view[os.write(descriptor, view[: 1 << 30]) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield path
        finally:
            # One that stays is swept later; what was done with it is done.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _into_place(self, path: str, move: Callable[[], object]) -> None:
        """Call `move`, which gives a synced file the name `path`, and make the name durable."""
        parent = Path(path).parent
        for n_left in reversed(range(MOST_MOVES)):
            try:
                self._make_durable(parent)
                move()
                break
            except FileNotFoundError:
                # A delete took the directory away when it became empty.
                self._forget(parent)
                if n_left == 0:
                    raise
        # A crash before this line may lose the name, and the caller has not been told of success.
        _sync_directory(parent)

    def _make_durable(self, directory: Path) -> None:
        """Make `directory` and those above it; sync the name of each, once a process, whoever made it."""
        if str(directory) in self._durable:
            return
        below_root = len(str(directory)) > len(self._root)
        if below_root or not directory.exists():
            self._make_durable(directory.parent)
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
        if below_root and directory.is_symlink():
            raise _link_error(directory)
        try:
            _sync_directory(directory.parent)
        except PermissionError:
            if below_root:
                raise  # the root may stand in a directory that we may not open; then others made it
        self._durable.add(str(directory))

    def _forget(self, directory: Path) -> None:
        while len(str(directory)) > len(self._root):
            self._durable.discard(str(directory))
            directory = directory.parent

    def _check_no_links(self, path: str) -> None:
        for place in range(len(self._root) + 1, len(path)):
            if path[place] == "/" and path[:place] not in self._durable and _is_link(path[:place]):
                raise _link_error(Path(path[:place]))

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → nbytes of every object whose key starts with `prefix`."""
        return {key: nbytes for key, (nbytes, _) in self.dated(prefix).items()}

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Return key → (nbytes, time of the last change) of every object whose key starts with `prefix`."""
        check_prefix(prefix)

        def look() -> dict[str, tuple[int, float]]:
            found = ((key, status) for key, status in self._walk(prefix))
            return {key: (status.st_size, status.st_mtime) for key, status in sorted(found, key=lambda item: item[0])}

        return self._retried("list", prefix, look)

    def list_names(self, prefix: str) -> Sequence[str]:
        """Return the sorted next path components below `prefix`."""
        check_prefix(prefix)

        def holds_objects(entry: os.DirEntry[str]) -> bool:
            try:
                return entry.is_file(follow_symlinks=False) or any(True for _ in self._walk(f"{prefix}{entry.name}/"))
            except PermissionError:
                return True  # whoever looks for what is there finds out what it is by its name

        return self._retried(
            "list", prefix, lambda: sorted(entry.name for entry in self._entries(prefix) if holds_objects(entry))
        )

    def _retried(self, action: str, key: str, call: Callable[[], T]) -> T:
        def attempt() -> T:
            with _translated(action, key):
                return call()

        return retrying(self._policy, action, key, attempt)

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        for entry in self._entries(prefix):
            key = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(key + "/")
            else:
                with contextlib.suppress(FileNotFoundError):  # deleted since the directory was read
                    yield key, entry.stat(follow_symlinks=False)

    def _entries(self, prefix: str) -> Sequence[os.DirEntry[str]]:
        """Return files and directories that may be, or hold, objects."""
        try:
            with os.scandir(f"{self._root}/{prefix}") as entries:
                return [
                    entry
                    for entry in entries
                    if (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))
                    and key_problem(prefix + entry.name) is None
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, key: str) -> int | None:
        """Return an object's nbytes, or None if there is none."""
        path = self._path(key)

        def look() -> int | None:
            self._check_no_links(path)
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

        return self._retried("look up", key, look)

    def delete(self, key: str) -> None:
        """Delete an object, and the directories that it leaves empty; one that does not exist is no error."""
        path = self._path(key)
        self._retried("delete", key, lambda: self._delete(path))

    def _delete(self, path: str) -> None:
        self._check_no_links(path)
        try:
            Path(path).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (IsADirectoryError, PermissionError):
            if Path(path).is_dir():
                return  # no object
            raise
        parent = Path(path).parent
        with contextlib.suppress(OSError):  # not empty, or another delete was first
            while len(str(parent)) > len(self._root):
                parent.rmdir()
                self._durable.discard(str(parent))
                parent = parent.parent


@contextlib.contextmanager
def _translated(action: str, key: str) -> Iterator[None]:
    try:
        yield
    except DcrError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in _TRANSIENT:
            raise TransientError(reason) from error
        hint = _HINTS.get(error.errno or 0)
        raise StorageError(f"cannot {action}: {reason}{'; ' + hint if hint else ''}", key=key) from error


def _is_link(path: str) -> bool:
    """Return whether a symbolic link has this name, as ``Path.is_symlink``, which takes several times as long."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False


def _link_error(directory: Path) -> StorageError:
    return StorageError(
        f"{directory} is a symbolic link, and a store holds none below its root: put the directory there"
    )


def _is_taken(path: str) -> bool:
    """Return whether a file stands at `path`; raise if something else does, which cannot be an object."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(mode):
        number = errno.ELOOP if stat.S_ISLNK(mode) else errno.EISDIR
        raise OSError(number, os.strerror(number))
    return True


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(scratch: Path, before: float) -> None:
    """Remove temporary files last written before `before`, a time by the clock of the file system itself."""
    with contextlib.suppress(OSError), os.scandir(scratch) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < before:
                    Path(entry.path).unlink()
