"""A publisher is killed at every named point and at random times; the plain rerun finishes, and no bit is wrong."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from faults.processes import Nursery
from faults.scenes import (
    KILLS,
    SMALL,
    Instants,
    Place,
    Strike,
    assert_checkpoint,
    assert_nothing_twice,
    every,
    journaled_partitions,
    roots,
    rounds,
    seeded,
    strikes,
)

import dcr_store
from dcr_store.errors import ConflictError
from dcr_store.store import Store


class Line:
    """A line that is published to by children, and a mirror of it that is pulled after each."""

    def __init__(self, nursery: Nursery, place: Place, scratch: Path, name: str, *, baseline: bool) -> None:
        self.nursery, self.place, self.name = nursery, place, name
        self.mirror = scratch / f"mirror-{name}"
        self.baseline = str(scratch / f"baseline-{name}") if baseline else None
        self.published: list[Path] = []
        self.n_adopted = 0
        self.n_looks = 0

    def job(self, checkpoint: Path) -> dict[str, object]:
        return {
            "do": "publish",
            "line": self.name,
            "checkpoint": str(checkpoint),
            "baseline": self.baseline,
            **self.place.job,
            **SMALL,
        }

    def publish(self, checkpoint: Path) -> dict[str, int]:
        """Publish undisturbed; return the points reached."""
        points = self.nursery.finish(**self.job(checkpoint)).points
        self.published.append(checkpoint)
        return points

    def check_survived(self, store: Store, checkpoint: Path, before: list[str]) -> None:
        """Assert that the line shows the old or the new version, whole, and remember which."""
        now = roots(store, self.name)
        assert now[: len(before)] == before
        assert len(now) in (len(before), len(before) + 1)
        if len(now) > len(before):
            self.published.append(checkpoint)
        self.n_looks += 1
        # Over a server each third time, the log alone otherwise: what a version is was looked at when it was made.
        if now and (self.place.options is None or self.n_looks % 3 == 0):
            store.pull(self.mirror, self.name)
            assert_checkpoint(self.mirror, self.published[-1])

    def killed(self, checkpoint: Path, strike: Strike | None = None, after_s: float = 0.0, again: int = 0) -> bool:
        """Publish, be killed (`again` more times), look, publish again, look; return whether a kill struck."""
        struck = False
        for _ in range(1 + again):
            before = roots(self.place.open(), self.name)
            child = self.nursery.start(kill=strike, **self.job(checkpoint))
            if strike is None:
                time.sleep(after_s)
                child.signal(signal.SIGKILL)
            outcome = child.wait()
            assert outcome.killed or outcome.ok, outcome
            struck |= outcome.killed
            self.check_survived(self.place.open(), checkpoint, before)
        store = self.place.open()
        before, known = roots(store, self.name), journaled_partitions(store, self.name)
        unfinished = store._catalog.log(self.name).refresh().open
        points = self.publish(checkpoint)
        store = self.place.open()
        assert len(roots(store, self.name)) == len(before) + 1
        assert "log.abort.after" not in points, "what was begun was thrown away"
        assert_nothing_twice(store, self.name, known)
        if unfinished is not None:
            self.n_adopted += sum(unfinished.txid in prefix for prefix, _, _ in known)
        store.pull(self.mirror, self.name)
        assert_checkpoint(self.mirror, checkpoint)
        return struck

    def check_all(self) -> None:
        """Assert that every version is what was published, and that the store is whole."""
        store = self.place.open()
        report = store.verify(deep=True)
        assert report.ok, report.problems
        infos = store.log(self.name)
        assert len(infos) == len(self.published)
        # The same weights may have several roots, one for each order of addresses.
        expected = {(info.root, checkpoint) for info, checkpoint in zip(infos, self.published, strict=True)}
        for root, checkpoint in expected:
            report = store.compare_directory(root, checkpoint)
            assert report.ok, report.problems


def test_killed_at_every_point_of_a_delta(
    nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    place.create()
    line = Line(nursery, place, scratch, "main", baseline=True)
    line.publish(checkpoints[0])
    points = line.publish(checkpoints[1]) | line.publish(checkpoints[2]) | line.publish(checkpoints[1])
    assert points["publish.journal.stored"] > 3
    missed = []
    for nth, strike in enumerate(every(strikes(points), 6 if place.is_slow else 1)):
        if not line.killed(checkpoints[2 - nth % 2], strike):
            missed.append(strike)
    assert not [point for point, nth in missed if nth == 1 and "log.checkpoint" not in point], missed
    assert line.n_adopted > 0
    line.check_all()


def test_killed_at_every_point_of_an_anchor(
    nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    place.create()
    recorded = Line(nursery, place, scratch, "recorded", baseline=True)
    first = recorded.publish(checkpoints[4])
    changed = recorded.publish(checkpoints[5])
    lines = []
    step = 12 if place.is_slow else 4
    for nth, strike in enumerate(every(strikes(first), step)):
        line = Line(nursery, place, scratch, f"first-{nth}", baseline=True)
        assert line.killed(checkpoints[4], strike) or strike[1] > 1, strike
        lines.append(line)
    line = Line(nursery, place, scratch, "changed", baseline=True)
    line.publish(checkpoints[4])
    for nth, strike in enumerate(every(strikes(changed), step, 1)):
        line.killed(checkpoints[5 - nth % 2], strike)
    for published in [*lines[::4], line]:
        published.check_all()


def test_killed_at_random_times(nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path]) -> None:
    place.create()
    rng = seeded("publish", place.options is None)
    line = Line(nursery, place, scratch, "main", baseline=True)
    line.publish(checkpoints[0])
    began = time.monotonic()
    line.publish(checkpoints[1])
    instants = Instants(rng, time.monotonic() - began)
    struck: list[bool] = []
    for _ in rounds(KILLS, struck, KILLS // 3):
        if rng.random() < 0.2:
            line.baseline = None if line.baseline else str(scratch / "baseline-main")
        again = rng.choice([0, 0, 0, 1, 2])
        struck.append(line.killed(rng.choice(checkpoints), None, instants.next(1.2), again))
        instants.note(struck=struck[-1])
    line.check_all()


@pytest.mark.parametrize("point", ["publish.partition.stored", "log.commit.before"])
def test_what_was_begun_is_thrown_away_only_if_something_else_is_published(
    nursery: Nursery, scratch: Path, checkpoints: list[Path], point: str
) -> None:
    place = Place(str(scratch / "store"))
    place.create()
    line = Line(nursery, place, scratch, "main", baseline=True)
    line.publish(checkpoints[0])
    assert nursery.run(**{**line.job(checkpoints[1]), "message": "one", "kill": [point, 1]}).killed
    outcome = nursery.finish(**{**line.job(checkpoints[2]), "message": "two"})
    assert outcome.points["log.abort.after"] == 1
    store = place.open()
    assert [info.message for info in store.log()] == [None, "two"]
    store.pull(line.mirror)
    assert_checkpoint(line.mirror, checkpoints[2])


def test_the_command_line_finishes_what_was_killed(nursery: Nursery, scratch: Path, checkpoints: list[Path]) -> None:
    from dcr_store.cli.main import main

    place = Place(str(scratch / "store"))
    place.create()
    line = Line(nursery, place, scratch, "main", baseline=True)
    line.publish(checkpoints[0])
    assert nursery.run(**line.job(checkpoints[1]), kill=["publish.seal.stored", 1]).killed
    assert main(["publish", place.url, str(checkpoints[1])]) == 0
    assert main(["pull", place.url, str(line.mirror)]) == 0
    assert_checkpoint(line.mirror, checkpoints[1])
    assert place.open().verify(deep=True).ok
    assert len(dcr_store.open(place.url).log()) == 2


def test_a_store_whose_making_was_killed(nursery: Nursery, scratch: Path, checkpoints: list[Path]) -> None:
    rng = seeded("create")
    began = time.monotonic()
    nursery.finish(do="create", store=str(scratch / "undisturbed"))
    lasts_s = time.monotonic() - began
    for number in range(KILLS):
        place = Place(str(scratch / f"store-{number}"))
        child = nursery.start(do="create", **place.job)
        time.sleep(rng.uniform(0, lasts_s))
        child.signal(signal.SIGKILL)
        child.wait()
        again = nursery.run(do="create", **place.job)
        assert again.ok or again.kind == ConflictError.kind, again
        line = Line(nursery, place, scratch, f"line-{number}", baseline=False)
        line.publish(checkpoints[0])
        assert place.open().verify().ok


def test_a_killed_publisher_leaves_no_copy_of_the_model_for_long(
    nursery: Nursery, scratch: Path, checkpoints: list[Path]
) -> None:
    """Its temporary baseline goes when the next publisher of this machine comes by; one that is in use stays."""
    place = Place(str(scratch / "store"))
    place.create()
    job = {"do": "publish", **place.job, "checkpoint": str(checkpoints[0])}

    def copies() -> set[Path]:
        return set(nursery.temporary.glob("dcr-baseline-*"))

    nursery.finish(**job)
    assert copies() == set()
    living = nursery.start(**job, line="other", stop=["log.commit.before", 1])
    living.wait_stopped()
    (in_use,) = copies()
    for _ in range(3):
        assert nursery.run(**job, kill=["log.commit.before", 1]).killed
        assert len(copies()) == 2
    nursery.finish(**job)
    assert copies() == {in_use}
    living.signal(signal.SIGCONT)
    assert living.wait().ok
    assert copies() == set()
