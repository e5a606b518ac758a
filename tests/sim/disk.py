"""Real files in memory whose writes may be lost: what a power loss leaves is what was synced, and any part of the rest.

The code under test works on real files (tmpfs), through the real kernel; ``os`` is wrapped so that each call that
changes something is a step of the simulation, and so that we know what is durable:

- the content of a file as of its last fsync; of what was written since, any page may be there or not;
- names (create, rename, remove, directories) in their order, as of the last fsync of a directory concerned; of what
  was done since, a beginning may be there (a journal).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sim.world import World

_MARKER: Final = "/.dcr/marker.json"
_ASIDE: Final = ("/.dcr/lock", "/.dcr/marker.json.new", "/.dcr/spool/")  # no part of what a target holds
PAGE_NBYTES: Final = 128  # real pages are larger, and so are real tensors
_NAMES: Final = (
    "open",
    "pwrite",
    "pwritev",
    "ftruncate",
    "fsync",
    "replace",
    "rename",
    "unlink",
    "remove",
    "mkdir",
    "rmdir",
    "symlink",
    "link",
)
REAL: Final = {name: getattr(os, name) for name in _NAMES}
REAL_FLOCK: Final = fcntl.flock
REAL_PATH: Final = os.path.realpath


class Disk:
    """One host's files.

    Attributes
    ----------
    target : str
        Where its receiver keeps a checkpoint.
    keeps_copies : bool
        Whether it keeps versions side by side there, with a link to the one to be read.
    has_changed : bool
        Set by whatever changes a file of that; the judge looks, and resets it.
    has_marked : bool
        Set where that may have changed what its marker says, or which version the link leads to; likewise.
    n_rotten : int
        How often a baseline of this host has rotted.
    """

    def __init__(self, root: Path, *, has_files: bool = True) -> None:
        self.root, self.has_files = str(root), has_files
        if has_files:
            root.mkdir()
        self.target = os.path.join(self.root, "target")
        self.durable: dict[int, bytes] = {}
        self.journal: list[tuple[set[str], Callable[[], None]]] = []
        self.keeps_copies = False
        self.has_changed = self.has_marked = False
        self.n_rotten = 0

    # ------------------------------------------------------------------ what was done

    def changed(self, path: str, *, is_name: bool = False) -> None:
        if path.startswith(self.target) and not any(part in path for part in _ASIDE):
            self.has_changed = True
            # Only a marker's own bytes and names tell what it says: not what is written to any other file.
            self.has_marked |= is_name or path.endswith(_MARKER)

    def named(self, undo: Callable[[], None], *paths: str) -> None:
        self.changed(paths[-1], is_name=True)
        self.journal.append(({os.path.dirname(path) for path in paths}, undo))

    def synced(self, descriptor: int, path: str) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            last = max((i for i, (parents, _) in enumerate(self.journal) if path in parents), default=-1)
            del self.journal[: last + 1]
        elif found.st_nlink:
            self.durable[found.st_ino] = read_file(path)

    # ------------------------------------------------------------------ power loss

    def lose_power(self, rng: Random) -> int:
        """Make the files what they are when power comes back; return how many pages are not what was written."""
        for _, undo in reversed(self.journal[int(rng.random() * (len(self.journal) + 1)) :]):
            undo()
        self.journal.clear()
        n_reverted = 0
        for parent, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(parent, name)
                if not os.path.islink(path):
                    n_reverted += self._tear(path, rng)
        self.has_changed = self.has_marked = True
        return n_reverted

    def rot(self, rng: Random) -> None:
        """Change one byte of a baseline, if there is one: nobody has promised that its files stay as they are."""
        self.n_rotten += 1
        for name in ("u16.bin", "u8.bin"):
            path = f"{self.root}/baseline/{name}"
            if os.path.exists(path) and (data := bytearray(read_file(path))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                _write_over(path, bytes(data))

    def _tear(self, path: str, rng: Random) -> int:
        new, inode = read_file(path), os.stat(path).st_ino
        old = self.durable.get(inode, b"")
        if old == new or rng.random() < 0.3:
            self.durable[inode] = new  # it had been written back
            return 0
        nbytes = len(old) if rng.random() < 0.3 else len(new)
        torn, n_reverted, chance = bytearray(nbytes), 0, rng.choice([0.1, 0.5, 0.9])
        for start in range(0, nbytes, PAGE_NBYTES):
            page = slice(start, start + PAGE_NBYTES)
            is_lost = rng.random() < chance
            n_reverted += is_lost
            part = (old if is_lost else new)[page]
            torn[start : start + len(part)] = part
        _write(path, bytes(torn))
        self.durable[inode] = bytes(torn)
        return n_reverted


def read_file(path: str) -> bytes:
    """Return a file's bytes, past the wrapped calls."""
    descriptor = REAL["open"](path, os.O_RDONLY)
    try:
        return os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)


def _write_over(path: str, data: bytes) -> None:
    """Write to a file that is mapped, without making it shorter on the way."""
    descriptor = REAL["open"](path, os.O_WRONLY)
    try:
        REAL["pwrite"](descriptor, data, 0)
    finally:
        os.close(descriptor)


def _write(path: str, data: bytes) -> None:
    descriptor = REAL["open"](path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        REAL["pwrite"](descriptor, data, 0)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- the wrapped calls


class Calls:
    """The wrapped calls of ``os``. Outside of a simulation, and outside of its files, they are the real ones."""

    def __init__(self) -> None:
        self.world: World | None = None

    def _disk(self, path: object, dir_fd: int | None = None) -> tuple[str, Disk | None]:
        world = self.world
        if world is None or world.scheduler.current is None:
            return "", None
        text = os.fspath(path)  # type: ignore[call-overload]
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        if not text.startswith(world.root):
            return text, None
        for disk in world.disks:
            if text.startswith(disk.root):
                return text, disk
        return text, None

    def _disk_of(self, descriptor: int) -> tuple[str, Disk | None]:
        world = self.world
        if world is None or world.scheduler.current is None:
            return "", None
        return self._disk(os.readlink(f"/proc/self/fd/{descriptor}"))

    def _step(self, label: str) -> None:
        assert self.world is not None
        self.world.scheduler.step(label)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        real = REAL["open"]
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return int(real(path, flags, mode, dir_fd=dir_fd))
        text, disk = self._disk(path, dir_fd)
        if disk is None:
            return int(real(path, flags, mode, dir_fd=dir_fd))
        self._step(f"open {_last(text)}")
        is_new = not os.path.lexists(text)
        descriptor = int(real(path, flags, mode, dir_fd=dir_fd))
        if is_new:
            disk.named(lambda: _gone(text), text)
        if flags & os.O_TRUNC:
            disk.changed(text)
        return descriptor

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        return int(self._writing("pwrite", descriptor, [data], offset))

    def pwritev(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        return int(self._writing("pwritev", descriptor, buffers, offset))

    def _writing(self, name: str, descriptor: int, buffers: Any, offset: int) -> int:
        text, disk = self._disk_of(descriptor)
        if disk is None:
            return int(REAL["pwritev"](descriptor, buffers, offset))
        assert self.world is not None
        self._step(f"{name} {_last(text)} {offset}")
        fate = self.world.fates.of_write(name)
        if fate == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        disk.changed(text)
        if fate in ("short", "torn"):
            whole = b"".join(bytes(buffer) for buffer in buffers)
            cut = whole[: max(1, int(self.world.rng.random() * len(whole)))]
            n_written = int(REAL["pwrite"](descriptor, cut, offset))
            if fate == "torn":
                self.world.die()
            return n_written
        n_written = int(REAL["pwritev"](descriptor, buffers, offset))
        if fate == "power at a write":
            self.world.cut_power()
        return n_written

    def ftruncate(self, descriptor: int, nbytes: int) -> None:
        text, disk = self._disk_of(descriptor)
        if disk is not None:
            self._step(f"ftruncate {_last(text)}")
            disk.changed(text)
        REAL["ftruncate"](descriptor, nbytes)

    def fsync(self, descriptor: int) -> None:
        text, disk = self._disk_of(descriptor)
        if disk is not None:
            self._step(f"fsync {_last(text)}")
            disk.synced(descriptor, text)

    def replace(self, source: Any, place: Any, **options: Any) -> None:
        text, disk = self._disk(place)
        if disk is None:
            REAL["replace"](source, place, **options)
            return
        self._step(f"replace {_last(text)}")
        before, restore = os.fspath(source), _keep(disk, text)
        REAL["replace"](source, place, **options)

        def undo() -> None:
            if os.path.lexists(text):
                REAL["replace"](text, before)
            restore()

        disk.named(undo, before, text)

    rename = replace

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        text, disk = self._disk(path, dir_fd)
        if disk is None:
            REAL["unlink"](path, dir_fd=dir_fd)
            return
        self._step(f"unlink {_last(text)}")
        restore = _keep(disk, text)
        REAL["unlink"](path, dir_fd=dir_fd)
        disk.named(restore, text)

    remove = unlink

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        text, disk = self._disk(path, dir_fd)
        if disk is not None and not os.path.isdir(text):
            self._step(f"mkdir {_last(text)}")
            REAL["mkdir"](path, mode, dir_fd=dir_fd)
            disk.named(lambda: shutil.rmtree(text, ignore_errors=True), text)
            return
        REAL["mkdir"](path, mode, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        text, disk = self._disk(path, dir_fd)
        if disk is None:
            REAL["rmdir"](path, dir_fd=dir_fd)
            return
        self._step(f"rmdir {_last(text)}")
        REAL["rmdir"](path, dir_fd=dir_fd)
        disk.named(lambda: REAL["mkdir"](text), text)

    def symlink(self, source: Any, place: Any, *arguments: Any, **options: Any) -> None:
        self._new_name("symlink", source, place, *arguments, **options)

    def link(self, source: Any, place: Any, **options: Any) -> None:
        self._new_name("link", source, place, **options)

    def _new_name(self, name: str, source: Any, place: Any, *arguments: Any, **options: Any) -> None:
        text, disk = self._disk(place)
        if disk is not None:
            self._step(f"{name} {_last(text)}")
        REAL[name](source, place, *arguments, **options)
        if disk is not None:
            disk.named(lambda: _gone(text), text)

    def realpath(self, path: Any, **options: Any) -> Any:
        """Look at what lies on a disk alone: it is no link itself, nor is anything above it."""
        world = self.world
        text = os.fspath(path)
        if world is None or not isinstance(text, str) or not text.startswith(f"{world.root}/"):
            return REAL_PATH(path, **options)
        host, _, below = text[len(world.root) + 1 :].partition("/")
        if not host.isdecimal():
            return REAL_PATH(path, **options)
        place = f"{world.root}/{host}"
        for part in below.split("/") if below else ():
            place = f"{place}/{part}"
            try:
                is_plain = part not in ("", ".", "..") and not stat.S_ISLNK(os.lstat(place).st_mode)
            except OSError:
                is_plain = False
            if not is_plain:
                return REAL_PATH(path, **options)
        return place

    def flock(self, descriptor: int, operation: int) -> None:
        text, disk = self._disk_of(descriptor)
        if disk is None:
            REAL_FLOCK(descriptor, operation)
            return
        assert self.world is not None
        actor = self.world.scheduler.current
        assert actor is not None
        if operation & fcntl.LOCK_UN:
            REAL_FLOCK(descriptor, operation)
            actor.locks.pop(descriptor, None)
            return
        # Noted before: one that dies here never closes it, which a real process would.
        actor.locks[descriptor] = os.fstat(descriptor).st_ino
        self._step(f"flock {_last(text)}")
        while True:
            try:
                REAL_FLOCK(descriptor, operation | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if operation & fcntl.LOCK_NB:
                    del actor.locks[descriptor]
                    raise
                self.world.scheduler.sleep(0.1)


def _keep(disk: Disk, path: str) -> Callable[[], None]:
    """Return what brings a name back as it is now, after it has been taken."""
    if os.path.islink(path):
        leads_to = os.readlink(path)
        return lambda: REAL["symlink"](leads_to, path)
    if not os.path.isfile(path):
        return lambda: None
    content, durable = read_file(path), disk.durable.get(os.stat(path).st_ino)

    def restore() -> None:
        _write(path, content)
        if durable is not None:
            disk.durable[os.stat(path).st_ino] = durable

    return restore


def release(locks: dict[int, int]) -> None:
    """Release the locks that a process still has when it dies, as the kernel does."""
    for descriptor, inode in locks.items():
        try:
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
        except OSError:
            pass
    locks.clear()


CALLS: Final = Calls()


def install() -> None:
    """Wrap the calls, once for the process."""
    for name in _NAMES:
        setattr(os, name, getattr(CALLS, name))
    fcntl.flock = CALLS.flock  # type: ignore[assignment]
    os.path.realpath = CALLS.realpath  # type: ignore[assignment]


def _last(path: str) -> str:
    return path[path.rfind("/") + 1 :]


def _gone(path: str) -> None:
    if os.path.lexists(path):
        REAL["unlink"](path)


def remove_tree(path: str) -> None:
    """Remove a directory with all that is in it, past the wrapped calls."""
    with os.scandir(path) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                REAL["unlink"](entry.path)
    REAL["rmdir"](path)
