"""Every call of a receiver to its store fails, for once or for a while: it says so, goes on, and ends right."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from faults.failing import FailingObjects, over
from faults.scenes import OCCURRENCES, Place, assert_checkpoint

from dcr_store.errors import DcrError
from dcr_store.objects.open import open_objects
from dcr_store.receive import pacing
from dcr_store.store import Store
from dcr_store.targets.marker import Marker, read_marker

CAMPAIGN = OCCURRENCES > 1


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value_s in (("_FIRST_RETRY_S", 0.001), ("_FIRST_REST_S", 0.001), ("_LONGEST_REST_S", 0.01)):
        monkeypatch.setattr(pacing, name, value_s)


def publish(store: Store, checkpoint: Path) -> None:
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoint)


def numbers(n_calls: int, n_chosen: int) -> range:
    return range(0, n_calls, 1 if CAMPAIGN else max(1, n_calls // n_chosen))


@pytest.fixture
def old(scratch: Path, checkpoints: list[Path]) -> tuple[Store, Path]:
    """A store with two versions, in a group of one, and a target at the first of them."""
    store = Place(str(scratch / "store")).create()
    store.create_group("eu", ["r0"])
    publish(store, checkpoints[1])
    store.pull(scratch / "old", "main@0")
    publish(store, checkpoints[2])
    return store, scratch / "old"


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(("grouped", "late"), [(False, False), (True, False), (True, True)])
def test_every_call_of_a_follower_fails(
    old: tuple[Store, Path], scratch: Path, checkpoints: list[Path], lasting: bool, late: bool, grouped: bool
) -> None:
    """`late`: a write took effect, and its answer was lost. `lasting`: until two failures have been told."""
    inner = open_objects(old[0].url)
    target = scratch / "target"
    group = {"group": "eu", "name": "r0"} if grouped else {}

    def run(objects: FailingObjects) -> list[DcrError]:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(old[1], target)
        failures: list[DcrError] = []

        def failed(error: DcrError, wait_s: float) -> None:
            failures.append(error)
            marker = read_marker(target)
            assert isinstance(marker, Marker)
            assert marker.state == "dirty" or marker.target in ("main@0", "main@1")
            if len(failures) == 2:
                objects.at = None

        # Opening is not following: that fails with an error, of which other tests tell.
        at, objects.at = objects.at, None
        with over(objects).receiver(target, **group) as receiver:
            objects.n_calls, objects.at = 0, at
            receiver.follow(until="main@1", on_failure=failed)
            active = receiver.active()
        assert active is not None
        assert active.version == "main@1"
        assert_checkpoint(target, checkpoints[2], own=False)
        return failures

    counting = FailingObjects(inner)
    assert run(counting) == []
    n_told = 0
    for at in numbers(counting.n_calls, 12):
        failing = FailingObjects(inner, at, lasting, late)
        failures = run(failing)
        n_told += bool(failures)
        assert all(error.key for error in failures)
        if lasting and failing.failed:  # how often a follower looks before it is done depends on the time
            assert failures, (at, failing.failed)
    assert n_told > 3


def test_a_follower_that_is_cut_off_serves_what_it_has(
    old: tuple[Store, Path], scratch: Path, checkpoints: list[Path]
) -> None:
    """The network goes away at each stage, for as long as it likes; nothing changes until it is back."""
    store = old[0]
    target = shutil.copytree(old[1], scratch / "target")
    objects = FailingObjects(open_objects(store.url), lasting=True)
    told = threading.Event()
    with over(objects).receiver(target) as receiver:
        receiver.follow(until="main@1")
        root = store.show("main@1").info.root
        for number in (3, 4):
            objects.at = objects.n_calls
            publish(store, checkpoints[number])
            told.clear()
            thread = threading.Thread(
                target=receiver.follow,
                kwargs={"until": f"main@{number - 1}", "on_failure": lambda *_: told.set()},
            )
            thread.start()
            assert told.wait(20)
            active = receiver.active()
            assert active is not None
            assert active.root == root
            assert_checkpoint(target, checkpoints[number - 1], own=False)
            objects.at = None
            thread.join(60)
            assert_checkpoint(target, checkpoints[number], own=False)
            root = store.show(f"main@{number - 1}").info.root
