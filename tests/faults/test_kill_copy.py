"""A pull by copy on write is killed at every named point and at random times, and what is half-built is torn.

``current`` leads to the old or the new version at every instant, whole, and files that it led to never change; the
plain rerun ends right and leaves nothing over.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults.processes import Nursery
from faults.scenes import KILLS, OCCURRENCES, Place, assert_checkpoint, model_series, seeded, strikes
from states import tree, write_hf

from dcr_store.errors import ConflictError

PAGE_NBYTES = 512  # of a simulated page: the files are small


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one run in files of unchanging headers.

    Few tensors change, then all, then a tensor is added, and then the files are other ones.
    """
    root = tmp_path_factory.mktemp("versions")
    states = model_series(4, seed=3)
    states[1] = {**states[0], "norm.weight": states[1]["norm.weight"], "scale": states[1]["scale"]}
    states[3] = {**states[2], "extra.weight": np.arange(500, dtype=np.float32)}
    found = [write_hf(root / f"version{i}", state, 4) for i, state in enumerate(states)]
    found.append(write_hf(root / "version4", states[3], 2))
    for number, place in enumerate(found):
        (place / "generation.json").write_text(json.dumps({"temperature": number // 2}))
    (found[1] / "tokenizer" / "merges.txt").write_text("a b\n")
    return found


@pytest.fixture
def served(place: Place, versions: list[Path]) -> Place:
    """A place with a store that has a version of each checkpoint."""
    store = place.create()
    for checkpoint in versions:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    store.close()
    return place


def half_built(target: Path) -> list[Path]:
    """Return the directories of versions to which ``current`` does not lead, and has not led before the kill."""
    current = (target / "current").readlink().name if (target / "current").is_symlink() else ""
    known = json.loads((target / ".dcr" / "copies.json").read_bytes())["body"]["order"] if _has_order(target) else []
    if current in known:
        known = known[known.index(current) :]
    return [path for path in sorted(target.glob("*@*")) if path.name not in (current, *known)]


def _has_order(target: Path) -> bool:
    return (target / ".dcr" / "copies.json").exists()


def no_harm(target: Path, rng: random.Random) -> None:
    """Leave the target as the kill left it."""


def pages_lost(target: Path, rng: random.Random) -> None:
    """Power loss: pages of new files that were not synced are zeros; their marker tells that they may be."""
    for directory in half_built(target):
        if b'"clean"' in _content(directory / ".dcr" / "marker.json"):
            continue
        for place in sorted(directory.glob("*.safetensors")):
            if place.stat().st_nlink > 1:
                continue
            data = bytearray(place.read_bytes())
            for start in range(0, len(data), PAGE_NBYTES):
                if rng.random() < 0.4:
                    data[start : start + PAGE_NBYTES] = bytes(len(data[start : start + PAGE_NBYTES]))
            place.write_bytes(data)


def _content(place: Path) -> bytes:
    return place.read_bytes() if place.exists() else b""


def files_lost(target: Path, rng: random.Random) -> None:
    """Power loss: names that were not synced are gone."""
    for directory in half_built(target):
        if b'"clean"' in _content(directory / ".dcr" / "marker.json"):
            continue
        for place in [path for path in directory.rglob("*") if path.is_file()]:
            if rng.random() < 0.4:
                place.unlink()


def file_cut_off(target: Path, rng: random.Random) -> None:
    for directory in half_built(target):
        own = [path for path in sorted(directory.glob("*.safetensors")) if path.stat().st_nlink == 1]
        if own and b'"clean"' not in _content(directory / ".dcr" / "marker.json"):
            place = rng.choice(own)
            place.write_bytes(place.read_bytes()[: rng.randrange(place.stat().st_size)])


def new_marker_corrupted(target: Path, rng: random.Random) -> None:
    for directory in half_built(target):
        place = directory / ".dcr" / "marker.json"
        if place.exists():
            data = bytearray(place.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            place.write_bytes(data)


def document_lost(target: Path, rng: random.Random) -> None:
    (target / ".dcr" / "copies.json").unlink(missing_ok=True)


def document_emptied(target: Path, rng: random.Random) -> None:
    if _has_order(target):
        (target / ".dcr" / "copies.json").write_bytes(b"")


Harm = Callable[[Path, random.Random], None]
HARMS: list[Harm] = [
    no_harm,
    pages_lost,
    document_lost,
    file_cut_off,
    new_marker_corrupted,
    files_lost,
    document_emptied,
]


def assert_whole(target: Path, versions: list[Path], allowed: set[int]) -> None:
    """Assert that ``current`` is one of the versions allowed, whole."""
    if not (target / "current").is_symlink():
        assert -1 in allowed
        return
    found = tree(target / "current")
    assert any(found == tree(versions[number]) for number in allowed if number >= 0), allowed


def assert_tidy(target: Path, numbers: set[int]) -> None:
    """Assert that the directory has the versions named, the link, and nothing else."""
    found = {path.name.partition("-")[0] for path in target.iterdir()}
    assert found == {".dcr", "current", *(f"main@{number}" for number in numbers)}
    assert {path.name for path in (target / ".dcr").iterdir()} <= {"lock", "copies.json"}
    for path in target.glob("*@*"):
        assert {item.name for item in (path / ".dcr").iterdir()} <= {"lock", "marker.json"}


def untouched(target: Path) -> dict[Path, tuple[int, bytes]]:
    """Return the files of the current version: inode and content."""
    directory = (target / "current").resolve()
    return {path: (path.stat().st_ino, path.read_bytes()) for path in directory.rglob("*") if path.is_file()}


# from (None: a missing directory) and to: new, few files change, all do, back, another layout, other files
WAYS = [(None, 0), (0, 1), (1, 2), (2, 3), (2, 1), (3, 4)]
# All ways, and all of them with the slow server, in campaigns only.
CHOSEN = WAYS if OCCURRENCES > 1 else WAYS[:4]
PLACED = [*(("directory", *way) for way in CHOSEN), *(("s3", *way) for way in (WAYS if OCCURRENCES > 1 else [(0, 1)]))]


@pytest.mark.parametrize(("place", "start", "goal"), PLACED, indirect=["place"])
def test_killed_at_every_point(
    nursery: Nursery, served: Place, scratch: Path, versions: list[Path], start: int | None, goal: int
) -> None:
    rng = seeded("copy", start, goal)
    old, target = scratch / "old", scratch / "target"
    store = served.open()
    if start is not None:
        store.pull(old, f"main@{start}", mode="copy")

    def reset() -> None:
        shutil.rmtree(target, ignore_errors=True)
        if start is not None:
            shutil.copytree(old, target, symlinks=True)

    def pull(**options: object) -> dict[str, object]:
        job = {"do": "pull", "mode": "copy", "directory": str(target), "version": f"main@{goal}", **served.job}
        return {**job, **options}

    reset()
    points = nursery.finish(**pull()).points
    assert points["copy.switch.durable"] == 1
    kept = {goal} if start is None else {start, goal}
    assert_tidy(target, kept)
    is_slow = served.options is not None and OCCURRENCES == 1
    chosen = strikes(points)[:: 3 if is_slow else 1]
    for nth, strike in enumerate(chosen):
        reset()
        before = untouched(target) if start is not None else {}
        assert nursery.run(**pull(kill=strike)).killed or strike[1] > 1, strike
        harm = HARMS[nth % len(HARMS)]
        try:
            assert_whole(target, versions, {-1 if start is None else start, goal})
            assert {path: (path.stat().st_ino, path.read_bytes()) for path in before} == before
            harm(target, rng)
            outcome = nursery.finish(**pull())
            assert outcome.told["version"] == f"main@{goal}"
            assert_checkpoint(target / "current", versions[goal])
            if harm not in (document_lost, document_emptied):  # then it is not known which ones have been read
                assert_tidy(target, kept)
            assert {path: (path.stat().st_ino, path.read_bytes()) for path in before} == before
        except AssertionError as error:
            raise AssertionError(f"killed at {strike}, then {harm.__name__}: {error}") from error


def test_killed_at_random_times_on_the_way_between_versions(
    nursery: Nursery, served: Place, scratch: Path, versions: list[Path]
) -> None:
    """Kills, harm and changes of mind follow each other; ``current`` is whole after each, and right in the end."""
    rng = seeded("copies", served.options is None)
    target = scratch / "target"
    began = time.monotonic()
    nursery.finish(do="pull", mode="copy", directory=str(scratch / "once"), version="main@3", **served.job)
    lasts_s = time.monotonic() - began
    n_struck, current = 0, -1
    history: list[object] = []
    for _ in range(KILLS):
        allowed = {current}
        try:
            for _ in range(rng.choice([1, 1, 2, 3])):
                goal = rng.randrange(len(versions))
                job = {"do": "pull", "mode": "copy", "directory": str(target), "version": f"main@{goal}"}
                child = nursery.start(**job, keep=rng.randrange(3), **served.job)
                time.sleep(rng.uniform(0.0, 1.2 * lasts_s))
                child.signal(signal.SIGKILL)
                n_struck += child.wait().killed
                allowed.add(goal)
                harm = rng.choice(HARMS[:-1])
                history.append((goal, harm.__name__))
                if target.exists():
                    assert_whole(target, versions, allowed)
                    harm(target, rng)
            current = rng.randrange(len(versions))
            history.append(current)
            job = {"do": "pull", "mode": "copy", "directory": str(target), "version": f"main@{current}", "keep": 0}
            nursery.finish(**job, **served.job)
            assert_checkpoint(target / "current", versions[current])
            assert_tidy(target, {current})
        except AssertionError as error:
            raise AssertionError(f"after {history}: {error}") from error
    assert n_struck >= KILLS // 3


def test_what_is_right_in_a_half_built_version_is_not_fetched_again(
    nursery: Nursery, scratch: Path, versions: list[Path]
) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in versions[:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    whole = store.pull(scratch / "whole", "main@2", mode="copy").nbytes_fetched
    job = {"do": "pull", "mode": "copy", "directory": str(scratch / "target"), "version": "main@2", **place.job}
    assert nursery.run(**job, kill=["copy.replayed", 1]).killed
    outcome = nursery.finish(**job)
    assert outcome.told["nbytes_fetched"] < whole / 10  # side files only
    assert outcome.told["chunks_written"] == 0
    assert_checkpoint(scratch / "target" / "current", versions[2])


def test_two_pulls_of_one_directory(nursery: Nursery, scratch: Path, versions: list[Path]) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in versions[1:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0", mode="copy")
    job = {"do": "pull", "mode": "copy", "directory": str(target), **place.job}
    first = nursery.start(**job, stop=["replay.chunk.before", 5])
    first.wait_stopped()
    second = nursery.run(**job, version="main@0")
    assert (second.ok, second.kind) == (False, ConflictError.kind)
    assert str(first.pid) in second.message
    assert_checkpoint(target / "current", versions[1])
    first.signal(signal.SIGCONT)
    assert first.wait().ok
    assert_checkpoint(target / "current", versions[2])


def test_a_process_that_was_killed_holds_no_version(nursery: Nursery, scratch: Path, versions: list[Path]) -> None:
    """What a killed puller had begun to remove is gone after the next run, and a dead reader is in nobody's way."""
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in versions[:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    job = {"do": "pull", "mode": "copy", "directory": str(target), "keep": 0, **place.job}
    nursery.finish(**job, version="main@0")
    assert nursery.run(**job, version="main@1", kill=["copy.version.retired", 1]).killed
    assert list((target / ".dcr" / "removed").iterdir())
    nursery.finish(**job, version="main@1")
    assert_tidy(target, {1})
    assert_checkpoint(target / "current", versions[1])
