"""What stands beside a target's files in ``.dcr/``: the lock of whoever writes them, and the marker of their state.

::

    .dcr/lock           flock(2), exclusive, while a process writes the target; holds its process id, for people
    .dcr/marker.json    {"body": {"format": "dcr-target", "state": "clean" or "dirty", ...}, "sha256": of body}

Reading a marker never fails because of what is in it: torn, foreign or newer ones are `Unreadable`, and the caller
finds out what the target holds from the target itself. Only the holder of the lock writes the marker.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dcr_store.errors import ConflictError, FormatError, InvalidInputError, StorageError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.targets.paths import existing_directory, fsync_directory, replace_file

FORMAT: Final = "dcr-target"
_LOCK: Final = "lock"
_MARKER: Final = "marker.json"
_MAX_MARKER_NBYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Marker:
    """What a target holds.

    Attributes
    ----------
    state : {"dirty", "clean"}
        Dirty: any mixture of `base` and `target`. Clean: `target`, durably.
    store_id : str
        Of the store that the versions are from.
    base : str or None
        The version that the target held before, e.g. ``main@3``; None if nothing or something unknown.
    target : str
        The version that it holds, or is being brought to.
    root : str
        The state root of `target`.
    base_root : str or None
        The state root of `base`.
    layout : str or None
        The layout digest of `target`.
    """

    state: Literal["dirty", "clean"]
    store_id: str
    base: str | None
    target: str
    root: str
    base_root: str | None = None
    layout: str | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """There is a marker, but it says nothing that can be relied on; `reason` says why."""

    reason: str


@contextmanager
def lock(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a target while the context is open. It ends with the process, however that ends.

    Raises
    ------
    ConflictError
        If another process holds it; names its process id.
    StorageError
        If the directory cannot be written.
    """
    own = _own_directory(directory, make=True)
    pid = os.getpid()
    fd = _locked(own / _LOCK)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        if os.getpid() == pid:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(fd)


def _locked(path: Path) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise StorageError(f"the lock cannot be opened: {error.strerror}", key=str(path)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody may have removed the file while we waited to open it; then ours locks nothing.
            if same_file(fd, path):
                return fd
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StorageError(f"cannot be locked: {error.strerror}", key=str(path)) from error
            raise ConflictError(
                f"the target is being written by process {holder}; wait for it or stop it", key=str(path)
            ) from error
        os.close(fd)


def same_file(fd: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def write_marker(directory: str | os.PathLike[str], marker: Marker) -> None:
    """Replace the marker, atomically and durably: after any crash it is the old one or the new one.

    The caller holds the lock.
    """
    own = _own_directory(directory, make=True)
    data = canonical.seal_body({"format": FORMAT, **asdict(marker)})
    fsync_directory(own.parent)  # where `own` may be new
    replace_file(own / _MARKER, data, "target.marker", marker.state)


def read_marker(directory: str | os.PathLike[str]) -> Marker | Unreadable | None:
    """Return the marker; None if there is none.

    Raises
    ------
    StorageError
        If the disk or its permissions do not let us look.
    """
    path = _own_directory(directory, make=False) / _MARKER
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Unreadable("the marker is a link")
        raise StorageError(f"the marker cannot be opened: {error.strerror}", key=str(path)) from error
    try:
        data = os.pread(fd, _MAX_MARKER_NBYTES + 1, 0)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ESPIPE):
            return Unreadable("the marker is no regular file")
        raise StorageError(f"the marker cannot be read: {error.strerror}", key=str(path)) from error
    finally:
        os.close(fd)
    if len(data) > _MAX_MARKER_NBYTES:
        return Unreadable(f"the marker has over {_MAX_MARKER_NBYTES} bytes")
    try:
        body = canonical.open_body(data, str(path))
        return Unreadable("the marker is damaged or foreign") if body is None else _parse(body, str(path))
    except (FormatError, InvalidInputError) as error:
        return Unreadable(str(error))


def _parse(body: dict[str, Any], key: str) -> Marker:
    fields = Fields(body, key)
    if fields.text("format") != FORMAT:
        raise FormatError("is no marker of a target", key=key, expected=FORMAT, found=body["format"])
    state = fields.text("state")
    if state not in ("dirty", "clean"):
        raise FormatError("says an unknown state", key=key, expected="dirty or clean", found=state)
    return Marker(
        state="dirty" if state == "dirty" else "clean",
        store_id=fields.text("store_id"),
        base=fields.optional_text("base"),
        target=fields.text("target"),
        root=fields.text("root"),
        base_root=fields.optional_text("base_root"),
        layout=fields.optional_text("layout"),
    )


def _own_directory(directory: str | os.PathLike[str], *, make: bool) -> Path:
    own = existing_directory(directory) / OWN_DIRECTORY
    if own.is_symlink():
        raise InvalidInputError("is a link; a target keeps its marker itself", key=str(own))
    if make:
        try:
            own.mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot be made: {error.strerror}", key=str(own)) from error
    return own
