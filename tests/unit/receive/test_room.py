"""A disk with too little room for one more version gets what the spool can spare, and nothing that it needs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from states import series, tree, write_hf

import dcr_store
from dcr_store import events
from dcr_store.errors import StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import ObjectRef
from dcr_store.receive.copying import CopyBringer
from dcr_store.receive.receiver import Receiver
from dcr_store.receive.spool import Spool, Tag
from dcr_store.store import Store

N_JUNK, JUNK_NBYTES = 20, 10_000


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    return [write_hf(tmp_path / f"checkpoint{i}", state, 2) for i, state in enumerate(series(2, seed=7))]


@pytest.fixture
def store(checkpoints: list[Path]) -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=256) as store:
        for directory in checkpoints:
            with store.begin() as transaction:
                transaction.write_checkpoint(directory)
        yield store


class Disk:
    """A disk of which a spool's files take some; `room` is what they and the next version have together."""

    f_frsize, f_blocks = 1, 0

    def __init__(self, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spool, self.room = spool, 1 << 40
        monkeypatch.setattr(os, "statvfs", lambda _: self)

    @property
    def f_bavail(self) -> int:
        return self.room - sum(path.stat().st_size for path in self.spool.iterdir())


def fill(directory: Path) -> None:
    """Put what nobody needs into a spool: of versions gone by, and of a transaction that is open."""
    spool = Spool(directory)
    for i in range(N_JUNK):
        data = bytes([i]) * JUNK_NBYTES
        ref = ObjectRef("versions/gone", canonical.sha256(data), len(data))
        slot = spool.reserve(ref, Tag("ab" * 8, 9, "cd" * 16) if i % 2 else None)
        assert slot is not None
        with slot:
            assert slot.write(data)


@pytest.fixture
def receiver(store: Store, tmp_path: Path) -> Iterator[Receiver]:
    with store.receiver(CopyBringer(tmp_path / "out"), spool=tmp_path / "spool") as receiver:
        receiver.prepare("main@0")
        receiver.apply()
        fill(tmp_path / "spool")
        receiver.prepare("main@1")
        yield receiver


def needed_nbytes(store: Store, tmp_path: Path) -> int:
    """Return how much room main@1 takes beside main@0."""
    store.pull(tmp_path / "other", "main@0", mode="copy")
    told: list[str] = []
    with events.listening(lambda event: told.append(event.detail) if event.name == "copy.room" else None):
        store.pull(tmp_path / "other", "main@1", mode="copy")
    return int(told[0].split()[0])


def test_what_the_spool_does_not_need_goes_first(
    store: Store, receiver: Receiver, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needed_nbytes(store, tmp_path)
    disk = Disk(tmp_path / "spool", monkeypatch)
    all_nbytes = sum(path.stat().st_size for path in disk.spool.iterdir())
    disk.room = needed + all_nbytes - JUNK_NBYTES
    applied = receiver.apply()
    assert (applied.version, applied.nbytes_fetched) == ("main@1", 0)
    assert tree(tmp_path / "out" / "current") == tree(checkpoints[1])
    assert sum(path.stat().st_size for path in disk.spool.iterdir()) == all_nbytes - N_JUNK * JUNK_NBYTES


def test_what_it_needs_stays(
    store: Store, receiver: Receiver, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = needed_nbytes(store, tmp_path)
    disk = Disk(tmp_path / "spool", monkeypatch)
    disk.room = needed
    with pytest.raises(StorageError, match="not enough room"):
        receiver.apply()
    assert tree(tmp_path / "out" / "current") == tree(checkpoints[0])
    disk.room = 1 << 40
    prepared = receiver.prepare("main@1")
    assert prepared.nbytes_spooled == prepared.nbytes > 0
    assert receiver.apply().nbytes_fetched == 0
    assert tree(tmp_path / "out" / "current") == tree(checkpoints[1])
