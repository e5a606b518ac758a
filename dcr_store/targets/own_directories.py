"""Directories of our own, told by what is in them: stores and publishers' baselines. They are no parts of checkpoints.

As files of a version their content would be replaced, and removed, when that version is.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from dcr_store.errors import FormatError, InvalidInputError
from dcr_store.format import canonical
from dcr_store.format.names import STORE_KEY

LOCK: Final = "lock"
"""The file in a directory of ours that is locked while its owner lives."""
BASELINE_TAG: Final = b"dcr-baseline\n"
"""What the lock of a baseline begins with."""
_MAX_NBYTES: Final = 1 << 16


def holds_store(directory: Path) -> bool:
    """Return whether a directory is the root of a store, of whatever format version."""
    try:
        canonical.decode_object(_beginning(directory / STORE_KEY), STORE_KEY, "dcr-store")
    except (OSError, FormatError):
        return False
    return True


def refuse_file(directory: Path) -> None:
    """Raise ``InvalidInputError`` if what is to be a directory is a file, or would be below one."""
    for place in (directory, *directory.parents):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue  # not there yet, or not to be seen: whoever makes it says so
        if not stat.S_ISDIR(mode):
            what = (
                "is a file; give a directory"
                if place == directory
                else f"is below {place}, which is a file; give another place"
            )
            raise InvalidInputError(what, key=str(directory))
        return


def holds_baseline(directory: Path) -> bool:
    """Return whether a directory is a publisher's baseline."""
    try:
        return _beginning(directory / LOCK).startswith(BASELINE_TAG)
    except OSError:
        return False


def refuse_inside_store(directory: Path, what: str) -> None:
    """Raise ``InvalidInputError`` if a directory, there or not, is a store or lies inside one.

    Parameters
    ----------
    what : str
        What the directory is to hold.
    """
    real = Path(os.path.realpath(directory))  # unlike resolve(), no error of its own for loops of links
    for place in (real, *real.parents):
        if holds_store(place):
            raise InvalidInputError(
                f"is a store, or inside of one, where nothing else may be; give {what} a directory of its own",
                key=str(directory),
                expected="a place outside of stores",
                found=f"the store {place}",
            )


def _beginning(path: Path) -> bytes:
    """Return up to 64 KiB of a regular file; anything else, as a pipe that would make us wait, counts as empty."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_MAX_NBYTES)
