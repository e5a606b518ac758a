"""A pull is killed at every named point and at random times, its target is torn; the plain rerun ends right."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.processes import Nursery
from faults.scenes import (
    KILLS,
    OCCURRENCES,
    Place,
    Strike,
    assert_checkpoint,
    seeded,
    strikes,
)

from dcr_store.errors import ConflictError

MARKER = ".dcr/marker.json"
PAGE_NBYTES = 512  # of a simulated page: the files are small


@pytest.fixture
def served(place: Place, checkpoints: list[Path]) -> Place:
    """A place with a store that has a version of each checkpoint."""
    store = place.create()
    for checkpoint in checkpoints:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    store.close()
    return place


def no_harm(target: Path, old: Path, rng: random.Random) -> None:
    """Leave the target as the kill left it."""


def marker_deleted(target: Path, old: Path, rng: random.Random) -> None:
    (target / MARKER).unlink(missing_ok=True)


def marker_corrupted(target: Path, old: Path, rng: random.Random) -> None:
    data = bytearray((target / MARKER).read_bytes() if (target / MARKER).exists() else b"")
    if data:  # an earlier harm may have emptied it
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (target / MARKER).write_bytes(data)


def marker_emptied(target: Path, old: Path, rng: random.Random) -> None:
    if (target / MARKER).exists():
        (target / MARKER).write_bytes(b"")


def pages_reverted(target: Path, old: Path, rng: random.Random) -> None:
    """Power loss: pages that were not synced are as they were before, or zeros where the file was new."""
    for place in _weights(target):
        before = old / place.relative_to(target)
        data = bytearray(place.read_bytes())
        then = before.read_bytes() if before.exists() else b""
        header_nbytes = 8 + int.from_bytes(data[:8], "little")
        for start in range(0, len(data), PAGE_NBYTES):
            stop = min(start + PAGE_NBYTES, len(data))
            if rng.random() < 0.3 and start >= header_nbytes:
                data[start:stop] = then[start:stop].ljust(stop - start, b"\0")
        place.write_bytes(data)


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


Harm = Callable[[Path, Path, random.Random], None]
HARMS: list[Harm] = [
    no_harm,
    marker_deleted,
    pages_reverted,
    marker_corrupted,
    header_torn,
    file_truncated,
    marker_emptied,
    file_deleted,
]

# start (None: a missing directory) and goal: in place, several steps, back, other files, other names, another layout
WAYS = [(None, 2), (1, 2), (0, 3), (2, 1), (0, 1), (3, 4), (4, 5), (5, 6), (6, 0)]


# The server is slow: all ways with it in campaigns only.
PLACED = [*(("directory", *way) for way in WAYS), *(("s3", *way) for way in (WAYS if OCCURRENCES > 1 else [(0, 1)]))]


@pytest.mark.parametrize(("place", "start", "goal"), PLACED, indirect=["place"])
def test_killed_at_every_point(
    nursery: Nursery,
    served: Place,
    scratch: Path,
    checkpoints: list[Path],
    start: int | None,
    goal: int,
) -> None:
    rng = seeded("pull", start, goal)
    old, target = scratch / "old", scratch / "target"
    store = served.open()
    if start is not None:
        store.pull(old, f"main@{start}")

    def reset() -> None:
        shutil.rmtree(target, ignore_errors=True)
        if start is not None:
            shutil.copytree(old, target)

    def pull(**options: object) -> dict[str, object]:
        return {"do": "pull", "directory": str(target), "version": f"main@{goal}", **served.job, **options}

    reset()
    points = nursery.finish(**pull()).points
    assert_checkpoint(target, checkpoints[goal])
    assert points["pull.clean"] == 1
    is_slow = served.options is not None and OCCURRENCES == 1
    chosen = strikes(points, 1 if is_slow else max(OCCURRENCES, 2))
    for nth, strike in enumerate(chosen):
        for harm in [HARMS[nth % len(HARMS)]] if is_slow else {no_harm, HARMS[nth % len(HARMS)]}:
            reset()
            assert nursery.run(**pull(kill=strike)).killed or strike[1] > 1, strike
            harm(target, old, rng)
            outcome = nursery.finish(**pull())
            assert outcome.told["version"] == f"main@{goal}"
            try:
                assert_checkpoint(target, checkpoints[goal])
            except AssertionError as error:
                raise AssertionError(f"killed at {strike}, then {harm.__name__}: {error}") from error


def test_killed_at_random_times_on_the_way_between_versions(
    nursery: Nursery, served: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """Kills, harm and changes of mind follow each other; a pull that is left alone ends right each time."""
    rng = seeded("way", served.options is None)
    target, before = scratch / "target", scratch / "before"
    began = time.monotonic()
    nursery.finish(do="pull", directory=str(scratch / "once"), version="main@3", **served.job)
    lasts_s = time.monotonic() - began
    n_struck = 0
    history: list[object] = []
    for _ in range(KILLS):
        shutil.rmtree(before, ignore_errors=True)
        if target.exists():
            shutil.copytree(target, before)
        for _ in range(rng.choice([1, 1, 2, 3])):
            goal = rng.randrange(len(checkpoints))
            child = nursery.start(do="pull", directory=str(target), version=f"main@{goal}", **served.job)
            time.sleep(rng.uniform(0.0, 1.2 * lasts_s))
            child.signal(signal.SIGKILL)
            n_struck += child.wait().killed
            harm = rng.choice(HARMS)
            harm(target, before, rng)
            history.append((goal, harm.__name__))
        goal = rng.randrange(len(checkpoints))
        nursery.finish(do="pull", directory=str(target), version=f"main@{goal}", **served.job)
        try:
            assert_checkpoint(target, checkpoints[goal])
        except AssertionError as error:
            raise AssertionError(f"main@{goal} after {history}: {error}") from error
        history.append(goal)
    assert n_struck >= KILLS // 3


def _strike(nursery: Nursery, job: dict[str, object], strike: Strike) -> None:
    assert nursery.run(**job, kill=strike).killed


def test_a_pull_that_changed_its_mind_twice_leaves_no_files_of_the_version_between(
    nursery: Nursery, scratch: Path, checkpoints: list[Path]
) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in (checkpoints[0], checkpoints[1], checkpoints[3]):  # one file, three files, two files
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    job = {"do": "pull", "directory": str(target), **place.job}
    _strike(nursery, {**job, "version": "main@1"}, ("pull.file.moved", 2))
    _strike(nursery, {**job, "version": "main@2"}, ("pull.dirty", 1))
    nursery.finish(**job, version="main@2")
    assert_checkpoint(target, checkpoints[3])


def test_files_of_a_way_that_was_given_up_are_not_taken_for_the_old_ones(
    nursery: Nursery, scratch: Path, checkpoints: list[Path]
) -> None:
    """The version between has files of the same names as the old one, with other tensors in them."""
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in (checkpoints[3], checkpoints[5], checkpoints[0]):  # two files, two files alike, one file
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    job = {"do": "pull", "directory": str(target), **place.job}
    _strike(nursery, {**job, "version": "main@1"}, ("pull.file.moved", 1))
    _strike(nursery, {**job, "version": "main@0"}, ("pull.dirty", 1))
    nursery.finish(**job, version="main@2")
    assert_checkpoint(target, checkpoints[0])


@pytest.mark.parametrize("point", ["pull.file.removed", "target.marker.durable", "pull.file.moved"])
def test_a_pull_that_lost_its_marker_and_is_killed(
    nursery: Nursery, scratch: Path, checkpoints: list[Path], point: str
) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in checkpoints[:4]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@1")
    (target / MARKER).unlink()
    file_truncated(target, target, seeded("lost"))
    job = {"do": "pull", "directory": str(target), "version": "main@3", **place.job}
    nursery.run(**job, kill=[point, 1])
    nursery.finish(**job)
    assert_checkpoint(target, checkpoints[3])


def test_a_forced_pull_that_is_killed_is_finished_without_force(
    nursery: Nursery, scratch: Path, checkpoints: list[Path]
) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoints[3])
    target = shutil.copytree(checkpoints[6], scratch / "target")  # model.safetensors, which loaders take first
    job = {"do": "pull", "directory": str(target), **place.job}
    refused = nursery.run(**job)
    assert (refused.ok, refused.kind) == (False, "invalid-input")
    _strike(nursery, {**job, "force": True}, ("pull.dirty", 1))
    nursery.finish(**job)
    assert store.compare_directory("main", target).ok
    assert not (target / "model.safetensors").exists()


def test_nothing_that_is_right_is_fetched_again(nursery: Nursery, scratch: Path, checkpoints: list[Path]) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in checkpoints[:2]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    whole = store.pull(scratch / "whole", "main@0").nbytes_fetched
    target = scratch / "target"
    job = {"do": "pull", "directory": str(target), "version": "main@0", **place.job}
    _strike(nursery, job, ("pull.replayed", 1))
    (target / MARKER).unlink()
    outcome = nursery.finish(**job)
    assert outcome.told["nbytes_fetched"] < whole / 10  # side files only
    assert outcome.told["chunks_written"] == 0
    assert_checkpoint(target, checkpoints[0])


def test_two_pulls_of_one_directory(nursery: Nursery, scratch: Path, checkpoints: list[Path]) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in checkpoints[1:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    job = {"do": "pull", "directory": str(target), **place.job}
    first = nursery.start(**job, stop=["replay.chunk.before", 5])
    first.wait_stopped()
    second = nursery.run(**job, version="main@0")
    assert (second.ok, second.kind) == (False, ConflictError.kind)
    assert str(first.pid) in second.message
    first.signal(signal.SIGCONT)
    assert first.wait().ok
    assert_checkpoint(target, checkpoints[2])
    nursery.finish(**job, version="main@0")
    assert_checkpoint(target, checkpoints[1])
