"""The simulated disk: what power loss leaves."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from sim.disk import PAGE_NBYTES, Disk

OLD, NEW = b"o" * (4 * PAGE_NBYTES), b"n" * (4 * PAGE_NBYTES)


def sync(disk: Disk, path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    disk.synced(descriptor, str(path))
    os.close(descriptor)


def pages(path: Path) -> str:
    """Return the first letter of each page; "0" for zeros."""
    data = path.read_bytes()
    return "".join(chr(data[i]).replace("\0", "0") for i in range(0, len(data), PAGE_NBYTES))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_synced_stays(tmp_path: Path, seed: int) -> None:
    disk = Disk(tmp_path / "host")
    path = tmp_path / "host" / "file"
    path.write_bytes(OLD)
    disk.named(path.unlink, str(path))
    sync(disk, path)
    sync(disk, path.parent)
    assert disk.lose_power(Random(seed)) == 0
    assert path.read_bytes() == OLD


def test_of_what_is_not_synced_any_page_may_stay(tmp_path: Path) -> None:
    found = set()
    for seed in range(300):
        disk = Disk(tmp_path / f"host{seed}")
        path = Path(disk.root, "file")
        path.write_bytes(OLD)
        sync(disk, path)
        path.write_bytes(NEW)
        disk.lose_power(Random(seed))
        found.add(pages(path))
    assert found == {f"{number:04b}".replace("0", "o").replace("1", "n") for number in range(16)}


def test_a_new_file_may_be_empty_or_have_holes(tmp_path: Path) -> None:
    found = set()
    for seed in range(300):
        disk = Disk(tmp_path / f"host{seed}")
        path = Path(disk.root, "file")
        path.write_bytes(NEW)
        disk.lose_power(Random(seed))
        found.add(pages(path))
    assert {"", "nnnn", "0000", "n0n0"} <= found


def test_names_come_back_as_they_were_at_some_instant(tmp_path: Path) -> None:
    found = set()
    for seed in range(100):
        disk = Disk(tmp_path / f"host{seed}")
        root = Path(disk.root)
        for name in "abc":
            path = root / name
            path.write_bytes(b"")
            disk.named(path.unlink, str(path))
        disk.lose_power(Random(seed))
        found.add("".join(sorted(path.name for path in root.iterdir())))
    assert found == {"", "a", "ab", "abc"}
