"""Files that share their content with others: hard links, and clones where the file system has them (FICLONE)."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcr_store.errors import StorageError

_FICLONE: Final = 0x40049409  # of linux/fs.h; other systems answer that they do not know it


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the file system of a directory can do."""

    can_link: bool
    can_clone: bool


def probe(source: Path, scratch: Path) -> Sharing:
    """Try on a file what its file system can do; `scratch` is a free name beside, and free again afterwards."""
    scratch.unlink(missing_ok=True)
    try:
        can_link = link(source, scratch)
        scratch.unlink(missing_ok=True)
        can_clone = clone(source, scratch)
    finally:
        scratch.unlink(missing_ok=True)
    return Sharing(can_link, can_clone)


def link(source: Path, place: Path) -> bool:
    """Give a file a second name; return whether that was possible."""
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:  # no such thing here, too many names already, a file of somebody else: then it is copied
        return False
    return True


def clone(source: Path, place: Path) -> bool:
    """Make a file that shares its blocks with `source` until either is written; return whether that was possible.

    Raises
    ------
    StorageError
        If the new file cannot even be made.
    """
    try:
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        try:
            writer = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise StorageError(f"cannot be made: {error.strerror}", key=str(place)) from error
        try:
            fcntl.ioctl(writer, _FICLONE, reader)
        except OSError:
            place.unlink()
            return False
        finally:
            os.close(writer)
    finally:
        os.close(reader)
    return True
