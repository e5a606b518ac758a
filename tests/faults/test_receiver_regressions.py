"""What broke for users of other systems while they followed a run, one test each. Numbers are those of the same list
as in ``test_field_regressions``; what a single pull shows is there."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from faults.failing import over
from faults.processes import Nursery
from faults.scenes import Place, assert_checkpoint
from watched import Watched

from dcr_store.errors import DcrError, InvalidInputError, StorageError
from dcr_store.objects.open import open_objects
from dcr_store.receive import keeper, pacing
from dcr_store.receive.results import Active
from dcr_store.store import Store
from dcr_store.targets.directory import DirectoryTarget
from dcr_store.targets.marker import Marker, read_marker


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_LONGEST_REST_S", 0.05)
    monkeypatch.setattr(pacing, "_FIRST_RETRY_S", 0.02)


@pytest.fixture
def place(scratch: Path) -> Place:
    return Place(str(scratch / "store"))


def publish(store: Store, checkpoint: Path) -> None:
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoint)


def marker_of(target: Path) -> Marker:
    found = read_marker(target)
    assert isinstance(found, Marker)
    return found


def test_01_a_follower_that_dies_between_two_tensors_recovers(
    nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """A receiver died between two tensors' XOR; every retry then failed its checksum, forever."""
    store = place.create()
    for checkpoint in checkpoints[1:3]:
        publish(store, checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    job = {"do": "follow", "directory": str(target), "until": "main@1", **place.job}
    for nth in (1, 7, 7, 3, 12):
        assert nursery.run(**job, kill=["replay.chunk.before", nth]).killed
    outcome = nursery.finish(**job)
    assert outcome.told["failures"] == []
    assert outcome.told["applied"][-1]["chunks_healed"] == 0, "chunks were at one of two versions"
    assert_checkpoint(target, checkpoints[2], own=False)


def test_02_a_follower_notices_a_run_that_began_again(
    place: Place, scratch: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted trainer began again at version 0; receivers at v1 took the new v1 for the one they had."""
    monkeypatch.setattr(keeper, "CHECK_INTERVAL_S", 0.1)
    store = place.create()
    for checkpoint in checkpoints[1:3]:
        publish(store, checkpoint)
    target = scratch / "target"
    result: list[object] = []
    with store.receiver(target, spool=scratch / "spool") as receiver:

        def run() -> None:
            try:
                result.append(receiver.follow(on_failure=lambda *_: None))
            except DcrError as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while receiver.active() is None:
            time.sleep(0.01)
        shutil.rmtree(place.url)
        other = place.create()
        for checkpoint in checkpoints[3:5]:
            publish(other, checkpoint)
        thread.join(20)
    assert isinstance(result[0], DcrError)
    assert "start the receiver again" in str(result[0])
    assert_checkpoint(target, checkpoints[2], own=False)
    with other.receiver(target) as receiver, pytest.raises(InvalidInputError, match="follows another store"):
        receiver.follow(until="main@1")
    assert_checkpoint(target, checkpoints[2], own=False)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\0" * 100, b'{"body":{"state":"clean"},"sha256":""}'])
def test_05_a_torn_state_file_is_no_error(place: Place, scratch: Path, checkpoints: list[Path], content: bytes) -> None:
    """State file torn by a crash: JSON error at start. Here: marker, spool, whatever else is beside the weights."""
    store = place.create()
    for checkpoint in checkpoints[1:3]:
        publish(store, checkpoint)
    target = scratch / "target"
    with store.receiver(target) as receiver:
        receiver.prepare("main@0")
        receiver.prepare("main@1")
    (target / ".dcr" / "marker.json").write_bytes(content)
    (target / ".dcr" / "marker.json.new").write_bytes(content)
    n_spooled = 0
    for path in (target / ".dcr" / "spool").iterdir():
        path.write_bytes(content)
        n_spooled += 1
    assert n_spooled > 5
    with store.receiver(target) as receiver:
        assert receiver.poll().active is None
        receiver.follow(until="main@1")
        assert receiver.active() == Active("main@1", store.show("main@1").info.root)
    assert_checkpoint(target, checkpoints[2], own=False)


def test_07_a_payload_that_comes_twice_is_applied_once(place: Place, scratch: Path, checkpoints: list[Path]) -> None:
    """A late duplicate payload re-applied its XOR and reverted weights."""
    store = place.create()
    for checkpoint in checkpoints[1:4]:
        publish(store, checkpoint)
    target = scratch / "target"
    with store.receiver(target) as receiver:
        receiver.prepare("main@0")
        receiver.prepare("main@1")
        assert receiver.apply().chunks_written > 0
        # The same again: now, late, from a spool that has it twice, and through another receiver.
        again = receiver.apply()
        assert (again.chunks_written, again.chunks_healed) == (0, 0)
        receiver.prepare("main@1")
        assert receiver.apply().chunks_written == 0
        spool = target / ".dcr" / "spool"
        for path in list(spool.iterdir()):
            shutil.copy(path, spool / f"{path.name[:64]}.{'0' * 16}.1.{'0' * 32}")
        with store.receiver(target) as other:
            other.prepare("main@1")
            assert other.apply().chunks_written == 0
        assert_checkpoint(target, checkpoints[2], own=False)
        receiver.follow(until="main@2")
        # A transaction stores what it journaled once more, under a later incarnation's name.
        objects = store._objects
        data = [key for key in objects.list("versions/main/") if "/data/w0." in key and "/c/" in key]
        for key in data:
            head, _, rest = key.partition("/data/w0.")
            objects.put(f"{head}/data/w0.{'f' * 16}/{rest.partition('/')[2]}", objects.get(key))
        receiver.prepare("main@2")
        assert receiver.apply().chunks_written == 0
    assert_checkpoint(target, checkpoints[3], own=False)


def test_12_the_version_does_not_move_when_applying_fails(
    place: Place, scratch: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version moved although apply had failed."""
    store = place.create()
    publish(store, checkpoints[1])
    target = scratch / "target"
    write_chunk = DirectoryTarget.write_chunk
    n_left = 3

    def fail(self: DirectoryTarget, space: str, chunk: int, bits: np.ndarray) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise StorageError("cannot be written: No space left on device", key=str(target))
        write_chunk(self, space, chunk, bits)

    with store.receiver(target) as receiver:
        receiver.follow(until="main@0")
        publish(store, checkpoints[2])
        receiver.prepare("main@1")
        monkeypatch.setattr(DirectoryTarget, "write_chunk", fail)
        with pytest.raises(StorageError):
            receiver.apply()
        assert receiver.active() is None
        assert (marker_of(target).state, marker_of(target).base) == ("dirty", "main@0")
        assert receiver.poll().active is None
        monkeypatch.setattr(DirectoryTarget, "write_chunk", write_chunk)
        receiver.follow(until="main@1")
        assert receiver.active() == Active("main@1", store.show("main@1").info.root)
    assert_checkpoint(target, checkpoints[2], own=False)


def test_15_one_failed_apply_is_not_the_end_and_needs_no_whole_copy(
    place: Place, scratch: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failed apply wedged the receiver until restart; the fix for that copied the whole model each time."""
    store = place.create()
    publish(store, checkpoints[1])
    target = scratch / "target"
    watched = Watched(open_objects(place.url))
    write_chunk = DirectoryTarget.write_chunk
    failing: list[int] = []

    def fail(self: DirectoryTarget, space: str, chunk: int, bits: np.ndarray) -> None:
        if failing and failing.pop() == 0:
            raise StorageError("cannot be written: Input/output error", key=str(target))
        write_chunk(self, space, chunk, bits)

    monkeypatch.setattr(DirectoryTarget, "write_chunk", fail)
    failures: list[DcrError] = []
    with over(watched).receiver(target) as receiver:
        receiver.follow(until="main@0")
        publish(store, checkpoints[2])
        watched.requests.clear()
        for n_written in (2, 5, 1):
            failing[:] = [0, *[1] * n_written]
            receiver.follow(until="main@1", on_failure=lambda error, _: failures.append(error))
            assert receiver.active() == Active("main@1", store.show("main@1").info.root)
            failing.clear()
            assert_checkpoint(target, checkpoints[2], own=False)
            receiver.prepare("main@0")
            receiver.apply()
            assert_checkpoint(target, checkpoints[1], own=False)
        assert len(failures) == 3
        keys = {key for _, key in watched.requests if "/c/" in key and "/data/" in key}
        delta = {item.key for item in store._catalog.contents(store._catalog.resolve("main@1")).partitions}
        assert keys == delta, "the anchor was not needed again"


def test_16_catching_up_costs_one_fetch_a_delta(place: Place, scratch: Path, checkpoints: list[Path]) -> None:
    """Replaying N deltas cost O(N²)."""
    store = place.create()
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 1 << 16, 4096, dtype=np.uint16)
    n_versions = 24
    target = scratch / "target"
    watched = Watched(open_objects(place.url))
    with over(watched).receiver(target) as receiver:
        for number in range(n_versions):
            with store.begin() as transaction:
                transaction.write("w", weights)
            weights = np.where(rng.random(weights.shape) < 0.01, weights ^ 1, weights)
            if number == 0:
                receiver.follow(until="main@0")
                watched.requests.clear()
        receiver.follow(until=f"main@{n_versions - 1}")
        assert store.compare_directory("main", target).ok
    fetched = [key for method, key in watched.requests if method == "get" and "/data/" in key and "/c/" in key]
    assert len(fetched) == len(set(fetched)) == n_versions - 1
    assert watched.count("get") < 12 * n_versions
