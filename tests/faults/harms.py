"""What may happen to a target between two runs: power loss, which takes back what was not synced, and worse.

A harm takes the target, what it was before the run that was killed, and a generator.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

MARKER = ".dcr/marker.json"
PAGE_NBYTES = 512  # of a simulated page: the files are small

Harm = Callable[[Path, Path, random.Random], None]


def no_harm(target: Path, old: Path, rng: random.Random) -> None:
    """Leave the target as the kill left it."""


def revert_pages(data: bytes, then: bytes, rng: random.Random, start: int = 0, chance: float = 0.4) -> bytes:
    """Power loss: some pages from `start` on are as they were `then`, some are zeros."""
    result = bytearray(data)
    for page in range(0, len(data), PAGE_NBYTES):
        stop = min(page + PAGE_NBYTES, len(data))
        if page >= start and rng.random() < chance:
            before = then[page:stop] if rng.random() < 0.7 else b""
            result[page:stop] = before.ljust(stop - page, b"\0")
    return bytes(result)


# ---------------------------------------------------------------------- a checkpoint in place


def marker_deleted(target: Path, old: Path, rng: random.Random) -> None:
    (target / MARKER).unlink(missing_ok=True)


def marker_corrupted(target: Path, old: Path, rng: random.Random) -> None:
    data = bytearray(_content(target / MARKER))
    if data:  # an earlier harm may have emptied it
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (target / MARKER).write_bytes(data)


def marker_emptied(target: Path, old: Path, rng: random.Random) -> None:
    if (target / MARKER).exists():
        (target / MARKER).write_bytes(b"")


def pages_reverted(target: Path, old: Path, rng: random.Random) -> None:
    """Power loss: pages that were not synced are as they were before, or zeros; the file system keeps headers."""
    for place in _weights(target):
        data = place.read_bytes()
        header_nbytes = 8 + int.from_bytes(data[:8], "little")
        place.write_bytes(revert_pages(data, _content(old / place.relative_to(target)), rng, header_nbytes))


def header_torn(target: Path, old: Path, rng: random.Random) -> None:
    for place in _weights(target)[:1]:
        data = bytearray(place.read_bytes())
        start = rng.randrange(0, 64)
        data[start : start + 40] = bytes(40)
        place.write_bytes(data)


def file_truncated(target: Path, old: Path, rng: random.Random) -> None:
    for place in _weights(target)[-1:]:
        os.truncate(place, rng.randrange(place.stat().st_size))


def file_deleted(target: Path, old: Path, rng: random.Random) -> None:
    files = [path for path in target.rglob("*") if path.is_file() and ".dcr" not in path.parts]
    if files:
        rng.choice(files).unlink()


def _weights(target: Path) -> list[Path]:
    return sorted(target.glob("*.safetensors")) if target.is_dir() else []


def _content(place: Path) -> bytes:
    return place.read_bytes() if place.exists() else b""


IN_PLACE: list[Harm] = [
    no_harm,
    marker_deleted,
    pages_reverted,
    marker_corrupted,
    header_torn,
    file_truncated,
    marker_emptied,
    file_deleted,
]

# ---------------------------------------------------------------------- versions side by side


def half_built(target: Path) -> list[Path]:
    """Return the directories of versions to which ``current`` does not lead, and has not led before the kill."""
    current = (target / "current").readlink().name if (target / "current").is_symlink() else ""
    document = _content(target / ".dcr" / "copies.json")
    known = json.loads(document)["body"]["order"] if document else []
    if current in known:
        known = known[known.index(current) :]
    return [path for path in sorted(target.glob("*@*")) if path.name not in (current, *known)]


def _has_order(target: Path) -> bool:
    return (target / ".dcr" / "copies.json").exists()


def _unsynced(target: Path) -> list[Path]:
    """Return what is half-built and was not synced: its marker tells."""
    return [path for path in half_built(target) if b'"clean"' not in _content(path / MARKER)]


def pages_lost(target: Path, old: Path, rng: random.Random) -> None:
    """Power loss: pages of new files that were not synced are zeros."""
    for directory in _unsynced(target):
        for place in _weights(directory):
            if place.stat().st_nlink == 1:
                place.write_bytes(revert_pages(place.read_bytes(), b"", rng))


def files_lost(target: Path, old: Path, rng: random.Random) -> None:
    """Power loss: names that were not synced are gone."""
    for directory in _unsynced(target):
        for place in [path for path in directory.rglob("*") if path.is_file()]:
            if rng.random() < 0.4:
                place.unlink()


def file_cut_off(target: Path, old: Path, rng: random.Random) -> None:
    for directory in _unsynced(target):
        own = [path for path in _weights(directory) if path.stat().st_nlink == 1]
        if own:
            place = rng.choice(own)
            place.write_bytes(place.read_bytes()[: rng.randrange(place.stat().st_size)])


def new_marker_corrupted(target: Path, old: Path, rng: random.Random) -> None:
    for directory in half_built(target):
        marker_corrupted(directory, old, rng)


def document_lost(target: Path, old: Path, rng: random.Random) -> None:
    (target / ".dcr" / "copies.json").unlink(missing_ok=True)


def document_emptied(target: Path, old: Path, rng: random.Random) -> None:
    if _has_order(target):
        (target / ".dcr" / "copies.json").write_bytes(b"")


SIDE_BY_SIDE: list[Harm] = [
    no_harm,
    pages_lost,
    document_lost,
    file_cut_off,
    new_marker_corrupted,
    files_lost,
    document_emptied,
]

# ---------------------------------------------------------------------- memory that outlives its process


def memory_reverted(target: Path, old: Path, rng: random.Random) -> None:
    place = target / "memory"
    place.write_bytes(revert_pages(place.read_bytes(), _content(old / "memory"), rng))


IN_SHARED_MEMORY: list[Harm] = [no_harm, memory_reverted]

# ---------------------------------------------------------------------- spools


def spooled(spool: Path) -> list[str]:
    """Return the names of the whole files in a spool."""
    return sorted(path.name for path in spool.iterdir() if not path.name.endswith(".new")) if spool.is_dir() else []


def spool_left(spool: Path, rng: random.Random) -> None:
    """Leave the spool as it is."""


def spool_damaged(spool: Path, rng: random.Random) -> None:
    """Power loss: nothing in a spool is synced, so any file may be cut, empty or zeros."""
    for name in spooled(spool):
        data = (spool / name).read_bytes()
        harm = rng.randrange(5)
        if harm == 0:
            (spool / name).write_bytes(data[: rng.randrange(len(data))] if data else b"")
        elif harm == 1:
            (spool / name).write_bytes(bytes(len(data)))
        elif harm == 2:
            (spool / name).unlink()


def spool_deleted(spool: Path, rng: random.Random) -> None:
    shutil.rmtree(spool, ignore_errors=True)


SPOOLS = [spool_left, spool_damaged, spool_deleted]
