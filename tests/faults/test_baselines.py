"""Whatever a publisher's baseline holds after a crash, the next version is exactly what was published."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults.processes import Nursery
from faults.scenes import SMALL, Place, assert_checkpoint, seeded
from states import assert_same, raw

from dcr_store.errors import ConflictError

Harm = Callable[[Path, dict[str, Path], random.Random], None]


def deleted(baseline: Path, others: dict[str, Path], rng: random.Random) -> None:
    shutil.rmtree(baseline)


def stale(baseline: Path, others: dict[str, Path], rng: random.Random) -> None:
    """The machine was restored from a backup."""
    shutil.rmtree(baseline)
    shutil.copytree(others["old"], baseline)


def stale_but_says_new(baseline: Path, others: dict[str, Path], rng: random.Random) -> None:
    """Power loss: the note was on the disk, the bits were not."""
    note = (baseline / "baseline.json").read_bytes()
    stale(baseline, others, rng)
    (baseline / "baseline.json").write_bytes(note)


def damaged(baseline: Path, others: dict[str, Path], rng: random.Random) -> None:
    for path in baseline.glob("*.bin"):
        data = bytearray(path.read_bytes())
        for _ in range(5):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def foreign(baseline: Path, others: dict[str, Path], rng: random.Random) -> None:
    """Of another store."""
    shutil.rmtree(baseline)
    shutil.copytree(others["foreign"], baseline)


def foreign_bits(baseline: Path, others: dict[str, Path], rng: random.Random) -> None:
    """Of another store, with a note that says that it is this one's."""
    note = (baseline / "baseline.json").read_bytes()
    foreign(baseline, others, rng)
    (baseline / "baseline.json").write_bytes(note)


def note_torn(baseline: Path, others: dict[str, Path], rng: random.Random) -> None:
    note = (baseline / "baseline.json").read_bytes()
    (baseline / "baseline.json").write_bytes(note[: rng.randrange(len(note))])


def truncated(baseline: Path, others: dict[str, Path], rng: random.Random) -> None:
    path = sorted(baseline.glob("*.bin"))[0]
    path.write_bytes(path.read_bytes()[:-7])


HARMS: list[Harm] = [deleted, stale, stale_but_says_new, damaged, foreign, foreign_bits, note_torn, truncated]
POINTS = [None, "publish.partition.stored", "log.commit.after", "baseline.chunk.advanced", "baseline.noted"]


@pytest.mark.parametrize("harm", HARMS)
def test_a_baseline_is_never_trusted(nursery: Nursery, scratch: Path, checkpoints: list[Path], harm: Harm) -> None:
    rng = seeded("baseline", harm.__name__)
    place, elsewhere = Place(str(scratch / "store")), Place(str(scratch / "elsewhere"))
    place.create()
    elsewhere.create()
    baseline, others = scratch / "baseline", {"old": scratch / "old", "foreign": scratch / "foreign"}
    job = {"do": "publish", **place.job, **SMALL}
    nursery.finish(**job, checkpoint=str(checkpoints[0]), baseline=str(baseline))
    shutil.copytree(baseline, others["old"])
    nursery.finish(
        do="publish", **elsewhere.job, checkpoint=str(checkpoints[3]), baseline=str(others["foreign"]), **SMALL
    )
    expected = [checkpoints[0]]
    upcoming = itertools.cycle(checkpoints[1:4])
    for point in POINTS:
        checkpoint = next(upcoming)
        if point is None:
            nursery.finish(**job, checkpoint=str(checkpoint), baseline=str(baseline))
            expected.append(checkpoint)
        else:
            assert nursery.run(
                **job, checkpoint=str(checkpoint), baseline=str(baseline), kill=[point, 2 if "chunk" in point else 1]
            ).killed
            if len(place.open().log()) > len(expected):
                expected.append(checkpoint)
        harm(baseline, others, rng)
        following = next(upcoming)
        nursery.finish(**job, checkpoint=str(following), baseline=str(baseline))
        expected.append(following)
    store = place.open()
    assert store.verify(deep=True).ok
    assert len(store.log()) == len(expected)
    for number, checkpoint in enumerate(expected):
        store.pull(scratch / "target", f"main@{number}")
        assert_checkpoint(scratch / "target", checkpoint)


def test_a_baseline_that_changes_while_it_is_used_is_noticed(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips just before the base is used: nothing wrong is committed."""
    from dcr_store.publish.baseline import Baseline

    place = Place(str(scratch / "store"))
    store = place.create()
    states = [{"w": np.arange(1000, dtype=np.int32) + step} for step in range(3)]
    with store.begin() as transaction:
        transaction.write("w", states[0]["w"])
    real = Baseline.unproven_chunk
    flipped = set()

    def flip(self: Baseline, space: str, chunk: int) -> object:
        assert self._files is not None
        assert self._located is not None
        if chunk == 1 and self._located.name not in flipped:
            flipped.add(self._located.name)
            self._files.writable_view(space, chunk)[7] ^= 1
        return real(self, space, chunk)

    monkeypatch.setattr(Baseline, "unproven_chunk", flip)
    for state in states[1:]:
        with store.begin() as transaction:
            transaction.write("w", state["w"])
    monkeypatch.undo()
    fresh = place.open()
    assert fresh.verify(deep=True).ok
    for number, state in enumerate(states):
        assert_same(fresh.read(f"main@{number}"), state)
    assert len(flipped) == 2


def test_two_publishers_do_not_share_a_baseline(nursery: Nursery, scratch: Path, checkpoints: list[Path]) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    with store.begin(baseline=scratch / "baseline") as transaction:
        outcome = nursery.run(
            do="publish",
            **place.job,
            line="other",
            checkpoint=str(checkpoints[0]),
            baseline=str(scratch / "baseline"),
        )
        assert (outcome.ok, outcome.kind) == (False, ConflictError.kind)
        assert outcome.key == str(scratch / "baseline")
        transaction.write("w", np.zeros(3, np.int8))
    assert raw(place.open().read()["w"]) == bytes(3)
