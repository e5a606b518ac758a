"""The spool keeps what fits, believes nothing that it finds, and nothing depends on it; transfers fetch once."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from watched import Watched

from dcr_store.errors import IntegrityError, StorageError
from dcr_store.format.documents import Array, ObjectRef, Partition
from dcr_store.objects.open import open_objects
from dcr_store.payload.version import SealedPartition
from dcr_store.receive import transfers as transfers_module
from dcr_store.receive.spool import Slot, Spool, Tag
from dcr_store.receive.transfers import Transfers

FAMILY = Tag.family_of("0" * 32, "main")
TAG = Tag(FAMILY, 3, "a" * 32)


def blob(number: int, nbytes: int = 1000) -> tuple[ObjectRef, bytes]:
    data = np.random.default_rng(number).bytes(nbytes)
    return ObjectRef.of(f"data/{number}", data), data


def keep(spool: Spool, number: int, tag: Tag | None = None, nbytes: int = 1000) -> bool:
    ref, data = blob(number, nbytes)
    slot = spool.reserve(ref, tag)
    if slot is None:
        return False
    with slot:
        return slot.write(data)


def kept(spool: Spool, numbers: range, tag: Tag | None = None) -> list[int]:
    return [number for number in numbers if spool.get(blob(number)[0], tag) is not None]


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", 4500)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def age(spool: Spool, number: int, age_s: int) -> None:
    """Let a file be used long ago."""
    path = spool.directory / blob(number)[0].sha256
    os.utime(path, (time.time() - age_s,) * 2)


def test_what_was_not_used_for_longest_makes_room(spool: Spool) -> None:
    for number in range(4):
        assert keep(spool, number)
        age(spool, number, 100 - number)
    assert spool.get(blob(0)[0]) == blob(0)[1]  # used just now
    assert keep(spool, 4)
    assert kept(spool, range(5)) == [0, 2, 3, 4]
    assert spool.nbytes() == 4000


def test_what_is_needed_stays_and_what_does_not_fit_is_not_kept(spool: Spool) -> None:
    for number in range(4):
        assert keep(spool, number)
    spool.need(blob(number)[0] for number in (0, 1, 2))
    assert not keep(spool, 9, nbytes=2000)
    assert keep(spool, 4)
    assert kept(spool, range(5)) == [0, 1, 2, 4]
    assert not keep(spool, 10, nbytes=4501)
    assert kept(spool, range(5)) == [0, 1, 2, 4]
    spool.need(())
    assert keep(spool, 11, nbytes=4500)
    assert spool.nbytes() == 4500


def test_open_transactions_do_not_push_each_other_out(spool: Spool) -> None:
    assert keep(spool, 0)
    for number in range(1, 5):
        assert keep(spool, number, TAG)
    assert kept(spool, range(5), TAG) == [1, 2, 3, 4]
    assert not keep(spool, 5, TAG)
    assert kept(spool, range(5), TAG) == [1, 2, 3, 4]
    assert keep(spool, 6), "what is needed is another matter"


@pytest.mark.parametrize("harm", ["flipped", "cut", "longer", "empty", "zeros", "gone", "directory", "link", "pipe"])
def test_damaged_files_are_as_if_they_were_not_there(spool: Spool, tmp_path: Path, harm: str) -> None:
    assert keep(spool, 0)
    ref, data = blob(0)
    path = spool.directory / ref.sha256
    if harm == "flipped":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif harm == "cut":
        path.write_bytes(data[:-1])
    elif harm == "longer":
        path.write_bytes(data + b"x")
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "zeros":
        path.write_bytes(bytes(len(data)))
    else:
        path.unlink()
    if harm == "directory":
        path.mkdir()
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif harm == "pipe":
        os.mkfifo(path)
    assert Spool(spool.directory).get(ref) is None
    assert Spool(spool.directory).has(ref) is False
    assert spool.get(ref) is None
    if harm != "directory":
        assert keep(spool, 0)
        assert spool.get(ref) == data


def test_a_spool_outlives_its_process_and_its_deletion(spool: Spool) -> None:
    assert keep(spool, 0)
    assert keep(spool, 1, TAG)
    other = Spool(spool.directory, 4500)
    assert other.has(blob(0)[0])
    assert other.get(blob(1)[0], TAG) == blob(1)[1]
    assert other.get(blob(1)[0]) == blob(1)[1], "known by now"
    shutil.rmtree(spool.directory)
    assert not spool.has(blob(0)[0])
    assert spool.get(blob(0)[0]) is None
    assert spool.nbytes() == 0
    spool.settle(FAMILY, lambda version, txid: "aborted")
    assert keep(spool, 0)
    assert spool.has(blob(0)[0])


def test_what_becomes_of_an_open_transaction_is_done_to_its_files(spool: Spool) -> None:
    other_line = Tag(Tag.family_of("0" * 32, "exp"), 3, "a" * 32)
    tags = {1: TAG, 2: Tag(FAMILY, 3, "b" * 32), 3: Tag(FAMILY, 4, "c" * 32), 4: other_line}
    for number, tag in tags.items():
        assert keep(spool, number, tag)
    verdicts = {"a" * 32: "open", "b" * 32: "aborted", "c" * 32: "committed"}
    spool.settle(FAMILY, lambda version, txid: verdicts[txid])  # type: ignore[arg-type,return-value]
    names = {path.name for path in spool.directory.iterdir()}
    sha256 = {number: blob(number)[0].sha256 for number in tags}
    assert names == {TAG.name(sha256[1]), sha256[3], other_line.name(sha256[4])}
    assert spool.has(blob(3)[0])
    assert not spool.has(blob(2)[0], tags[2])


def test_what_goes_is_forgotten(spool: Spool) -> None:
    for number in range(100):
        assert keep(spool, number)
    assert len(spool._seen) == len(list(spool.directory.iterdir())) <= 4
    assert keep(spool, 100, TAG)
    spool.settle(FAMILY, lambda version, txid: "aborted")
    assert blob(100)[0].sha256 not in spool._seen


def test_a_spool_that_cannot_be_listed_is_left_as_it_is(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep(spool, 0, TAG)

    def refuse(path: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "scandir", refuse)
    spool.settle(FAMILY, lambda version, txid: "aborted")
    monkeypatch.undo()
    assert kept(spool, range(1), TAG) == [0]
    shutil.rmtree(spool.directory)
    spool.directory.write_bytes(b"a file")
    spool.settle(FAMILY, lambda version, txid: "aborted")
    assert spool.directory.read_bytes() == b"a file"


def test_a_full_disk_is_no_error(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    assert keep(spool, 0)
    monkeypatch.setattr(os, "pwrite", full)
    assert not keep(spool, 1)
    monkeypatch.undo()
    monkeypatch.setattr(Spool, "_free_nbytes", lambda self: 500)
    spool.need([blob(0)[0]])
    assert not keep(spool, 1)
    monkeypatch.undo()
    assert {path.name for path in spool.directory.iterdir()} == {blob(0)[0].sha256}
    spool.directory.chmod(0o500)
    if os.geteuid():
        assert not keep(spool, 1)
    spool.directory.chmod(0o700)
    shutil.rmtree(spool.directory)
    spool.directory.write_bytes(b"a file")
    assert not keep(spool, 1)
    assert spool.get(blob(1)[0]) is None


def test_room_that_the_dead_had_reserved_is_free_again(spool: Spool) -> None:
    code = (
        "import os, sys; from pathlib import Path; from dcr_store.receive.spool import Spool;"
        "from dcr_store.format.documents import ObjectRef;"
        f"slot = Spool(Path({str(spool.directory)!r}), 4500).reserve(ObjectRef('k', 'a' * 64, 4000));"
        "print('ready', flush=True); sys.stdin.readline(); os._exit(9)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        assert not keep(spool, 0), "somebody is about to write 4000 of 4500 bytes"
        process.stdin.write(b"\n")
    assert keep(spool, 0)
    assert {path.name for path in spool.directory.iterdir()} == {blob(0)[0].sha256}


def test_processes_share_a_spool(tmp_path: Path) -> None:
    """Two receivers with one directory: what one has fetched the other one has, and neither confuses the other."""
    spools = [Spool(tmp_path / "spool", 20_000) for _ in range(4)]

    def work(worker: int) -> None:
        rng = np.random.default_rng(worker)
        for _ in range(150):
            number = int(rng.integers(40))
            ref, data = blob(number)
            found = spools[worker].get(ref, TAG)
            assert found in (None, data)
            if found is None:
                keep(spools[worker], number, TAG if number % 2 else None)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, worker) for worker in range(4)]:
            done.result()
    assert spools[0].nbytes() <= 20_000 + 4 * (20_000 // 16 + 1000)
    assert spools[0].nbytes() > 10_000


# ------------------------------------------------------------------ transfers


@pytest.fixture
def objects() -> Watched:
    return Watched(open_objects(f"memory://{secrets.token_hex(8)}"))


def sealed(number: int) -> SealedPartition:
    ref, data = blob(number)
    array = Array("u16/mask", 1 << 20, 1024, 1024, "dcr.delta", ref)
    return SealedPartition(array, Partition("u16/mask", number, "0" * 16, len(data), ref.sha256, 1), "w0", ref.key)


def test_however_many_ask_it_is_fetched_once(spool: Spool, objects: Watched) -> None:
    ref, data = blob(0)
    objects.inner.put(ref.key, data)
    gate = threading.Event()
    objects.before = lambda method, key: gate.wait(10) and None
    transfers = Transfers(objects, spool)
    ahead = transfers.want(ref, TAG)
    wait_until(lambda: objects.count("get") == 1)
    wanted = [transfers.want(ref) for _ in range(5)]
    with ThreadPoolExecutor(4) as pool:
        read = [pool.submit(transfers.read, sealed(0)) for _ in range(4)]
        time.sleep(0.05)
        gate.set()
        assert all(future.result() == data for future in read)
    assert all(future.result() for future in [ahead, *wanted])
    assert objects.count("get") == 1
    assert transfers.want(ref).result()
    assert objects.count("get") == 1
    assert (transfers.counts.fetched, transfers.counts.spooled) == (1000, 4000)
    transfers.close()


def test_what_is_needed_overtakes_what_may_be_needed(spool: Spool, objects: Watched) -> None:
    for number in range(40):
        ref, data = blob(number, 100)
        objects.inner.put(ref.key, data)
    gate = threading.Event()
    objects.before = lambda method, key: gate.wait(10) and None
    transfers = Transfers(objects, spool)
    ahead = [transfers.want(blob(number, 100)[0], TAG) for number in range(40)]
    needed = transfers.want(blob(39, 100)[0])
    assert ahead[39].cancelled()
    wait_until(lambda: objects.count("get", "data/39") == 1)
    assert objects.count("get") <= 5, "it did not wait for the others"
    gate.set()
    assert needed.result()
    assert all(future.result() for future in ahead[:39])
    assert objects.count("get") == 40
    transfers.close()


def test_what_is_needed_is_not_dropped_with_its_transaction(spool: Spool, objects: Watched) -> None:
    """One transfer serves both: the end of a transaction that stored the same bytes does not take it away."""
    for number in range(12):
        ref, data = blob(number, 100)
        objects.inner.put(ref.key, data)
    gate = threading.Event()
    objects.before = lambda method, key: gate.wait(10) and None
    transfers = Transfers(objects, spool)
    needed = [transfers.want(blob(number, 100)[0]) for number in range(10)]
    last, alone = blob(9, 100)[0], blob(11, 100)[0]
    shared = transfers.want(last, TAG)
    assert not transfers.drop_ahead(last, shared)
    for number in range(20, 24):
        transfers.want(blob(number, 100)[0], TAG)
    assert transfers.drop_ahead(alone, transfers.want(alone, TAG)), "nobody needs it, and it has not begun"
    gate.set()
    assert all(future.result(10) for future in needed)
    transfers.close()


def test_bytes_are_in_flight_until_they_are_written(
    spool: Spool, objects: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk slower than the network does not fill the memory."""
    monkeypatch.setattr(transfers_module, "IN_FLIGHT_NBYTES", 1000)
    for number in range(3):
        ref, data = blob(number)
        objects.inner.put(ref.key, data)
    gate, write = threading.Event(), Slot.write

    def slowly(slot: Slot, data: bytes) -> bool:
        gate.wait(10)
        return write(slot, data)

    monkeypatch.setattr(Slot, "write", slowly)
    transfers = Transfers(objects, spool)
    futures = [transfers.want(blob(number)[0]) for number in range(3)]
    wait_until(lambda: objects.count("get") == 1)
    time.sleep(0.1)
    assert objects.count("get") == 1
    gate.set()
    assert all(future.result(10) for future in futures)
    transfers.close()


def test_what_has_no_room(objects: Watched, tmp_path: Path) -> None:
    ref, data = blob(0)
    objects.inner.put(ref.key, data)
    transfers = Transfers(objects, Spool(tmp_path / "spool", 999))
    assert transfers.want(ref, TAG).result() is False
    assert objects.count("get") == 0, "what only may be needed is not fetched for nothing"
    assert transfers.want(ref).result() is False
    assert objects.count("get") == 1, "what is needed is seen to be right"
    assert transfers.read(sealed(0)) == data
    assert objects.count("get") == 2
    transfers.close()


def test_what_was_not_fetched_ahead_is_fetched_when_it_is_needed(objects: Watched, tmp_path: Path) -> None:
    """The transfer ahead of the commit is about to find that there is no room."""
    gate, asked = threading.Event(), threading.Event()

    class Full(Spool):
        def reserve(self, ref: ObjectRef, tag: Tag | None = None) -> None:
            asked.set()
            if tag is not None:
                gate.wait(20)

    ref, data = blob(0)
    objects.inner.put(ref.key, data[:-1] + b"x")
    transfers = Transfers(objects, Full(tmp_path / "spool"))
    ahead = transfers.want(ref, TAG)
    assert asked.wait(20)
    needed = transfers.want(ref)
    assert transfers.want(ref) is needed
    gate.set()
    assert ahead.result() is False
    with pytest.raises(IntegrityError):
        needed.result()
    transfers.close()


def test_transfers_that_fail(spool: Spool, objects: Watched) -> None:
    ref, data = blob(0)
    objects.inner.put(ref.key, data[:-1] + b"x")
    transfers = Transfers(objects, spool)
    with pytest.raises(IntegrityError):
        transfers.want(ref).result()
    with pytest.raises(IntegrityError, match="missing"):
        transfers.want(blob(1)[0]).result()
    assert list(spool.directory.iterdir()) == []
    objects.inner.put(ref.key, data)
    gate, n_left = threading.Event(), 1

    def fail(method: str, key: str) -> None:
        nonlocal n_left
        gate.wait(10)
        if n_left:
            n_left -= 1
            raise StorageError("no answer", key=key)

    objects.before = fail
    n_before = objects.count("get", ref.key)
    future = transfers.want(ref)
    with ThreadPoolExecutor(1) as pool:
        wait_until(lambda: objects.count("get", ref.key) > n_before)
        read = pool.submit(transfers.read, sealed(0))
        time.sleep(0.05)
        gate.set()
        assert read.result() == data, "what failed for another is tried by who needs it"
    with pytest.raises(StorageError):
        future.result()
    transfers.close()
