"""Writers of one transaction are killed, at every named point and at random times; the others end by themselves.

A writer that was killed joins again under its name, the committer begins again: the version is the one of a single
publisher, bit for bit, and nothing that was durable and journaled is stored twice.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from faults.processes import Nursery
from faults.scenes import KILLS, OCCURRENCES, Instants, Place, assert_nothing_twice, every, rounds, seeded, strikes
from faults.writers import N_RANKS, Ranks, other, states

from dcr_store.errors import FencedError


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_point_of_a_delta(
    nursery: Nursery, place: Place, scratch: Path, rank: int, announced: bool
) -> None:
    """Those that announce their slices have their baselines in files, which outlive them."""
    place.create()
    baseline = scratch / "baseline" if announced else None
    line = Ranks(nursery, place, announced=announced, baseline=baseline)
    line.publish(0)
    points = line.publish(1)[rank].points | line.publish(2)[rank].points
    advancing = [("slices.noted", 1), ("slices.piece.advanced", 1), ("slices.piece.advanced", 9)]
    assert points["publish.journal.stored"] >= 2
    assert "publish.object.stored" in points
    assert rank or "publish.seals.awaited" in points
    assert not rank or "publish.outcome.awaited" in points
    missed, lines = [], [line]
    step = (24 if announced else 48) if place.is_slow else 4 if announced else 12
    chosen = every(strikes(points), step, rank)
    for nth, strike in enumerate([*chosen, *(advancing if announced and not place.is_slow else [])]):
        if nth % 6 == 5:  # each writer that starts reads all versions since the first
            lines.append(Ranks(nursery, place, f"line-{nth}", announced=announced, baseline=baseline))
            lines[-1].publish(0)
        if not lines[-1].killed(other(lines[-1].published[-1], nth), rank, strike):
            missed.append(strike)
    assert not [point for point, nth in missed if nth == 1 and "log.checkpoint" not in point], missed
    # Of a server's store, and without announcement, few points are struck.
    assert sum(line.n_adopted for line in lines) > 0 or place.is_slow or not announced
    for line in lines:
        line.check_all()


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_point_of_an_anchor(nursery: Nursery, place: Place, scratch: Path, rank: int) -> None:
    place.create()
    points = Ranks(nursery, place, "recorded", baseline=scratch / "baseline").publish(0)[rank].points
    lines = []
    for nth, strike in enumerate(every(strikes(points), 36 if place.is_slow else 8, rank)):
        line = Ranks(nursery, place, f"first-{nth}", baseline=scratch / "baseline")
        assert line.killed(0, rank, strike) or strike[1] > 1, strike
        line.publish(1)
        lines.append(line)
    for line in lines[::3]:
        line.check_all()


def test_killed_at_random_times(nursery: Nursery, place: Place, scratch: Path) -> None:
    """Any writers, several at once, again and again; each starts again at once or after a while."""
    place.create()
    rng = seeded("joint", place.options is None)
    line = Ranks(nursery, place, baseline=scratch / "baseline")
    line.publish(0)
    began = time.monotonic()
    line.publish(1)
    instants = Instants(rng, time.monotonic() - began)
    struck: list[bool] = []
    n_rounds = KILLS if not place.is_slow else max(2, KILLS // 6)
    for nth in rounds(n_rounds, struck, 1):
        state = other(line.published[-1], rng.randrange(3))
        line.announced = nth % 2 == 0
        children = line.start_all(state)
        for _ in range(rng.choice([1, 1, 2])):
            time.sleep(instants.next(0.8))
            victims = rng.sample(range(N_RANKS), rng.choice([1, 1, 2, 3, 4]))
            for rank in victims:
                children[rank].signal(signal.SIGKILL)
            for rank in victims:
                outcome = children[rank].wait()
                assert outcome.killed or outcome.ok, outcome
                struck.append(outcome.killed)
            instants.note(struck=any(struck[-len(victims) :]))
            store, known = line.known()
            rng.shuffle(victims)
            for rank in victims:
                children[rank] = line.start(rank, state)
        line.finish(state, children)
        assert_nothing_twice(store, line.line, known)
    line.check_all()


ENDINGS = [
    (rank, point, ending)
    for rank, point in [
        (0, "publish.partition.stored"),
        (0, "publish.seals.awaited"),
        (0, "publish.proposal.stored"),
        (0, "log.commit.before"),
        (1, "publish.partition.stored"),
        (1, "publish.seal.stored"),
    ]
    for ending in ("aborted", "replaced")
]
SLOW = [(0, "log.commit.before", "replaced")]  # the server is slow


@pytest.mark.parametrize(
    ("place", "rank", "point", "ending"),
    [
        *(("directory", *item) for item in ENDINGS),
        *(("s3", *item) for item in (ENDINGS if OCCURRENCES > 1 else SLOW)),
    ],
    indirect=["place"],
)
def test_what_a_killed_writer_leaves_may_be_thrown_away(
    nursery: Nursery, place: Place, rank: int, point: str, ending: str
) -> None:
    place.create()
    line = Ranks(nursery, place)
    line.publish(0)
    # Writers that read of the end of the transaction; if the committer replaces it, they join the next.
    rest = line.start_all(1, but=[rank], gives_up=ending == "aborted")
    assert line.start(rank, 1, kill=[point, 1]).wait().killed
    if ending == "aborted":
        fresh = line.place.open()
        pending = fresh._catalog.log("main").refresh().open
        assert pending is not None
        fresh.join(pending.txid, writer="r3").abort()
        for child in rest.values():
            assert child.wait().kind == FencedError.kind
        line.look()
        line.publish(2)
    else:
        if rank:  # the committer dies, too: only it could say what comes instead
            rest[0].signal(signal.SIGKILL)
            assert rest[0].wait().killed
        for number in {0, rank}:
            rest[number] = line.start(number, 1, message="another try")
        outcomes = line.finish(1, rest)
        assert outcomes[0].points["log.abort.after"] == 1
        assert place.open().log()[-1].message == "another try"
    line.publish(3)
    line.check_all()


@pytest.fixture
def directory(scratch: Path) -> Place:
    return Place(str(scratch / "store"))


def test_a_sole_publisher_goes_on_after_killed_writers(nursery: Nursery, directory: Place) -> None:
    directory.create()
    line = Ranks(nursery, directory)
    line.publish(0)
    children = line.start_all(1, but=[2])  # so that it cannot be committed
    time.sleep(0.2)
    for child in children.values():
        child.signal(signal.SIGKILL)
        child.wait()
    with directory.open().begin(owner="run") as transaction:
        for name, array in states()[2].items():
            transaction.write(name, array)
    line.published.append(2)
    line.look()
    line.publish(3)
    line.check_all()
    assert [info.base for info in directory.open().log()] == [None, "main@0", "main@1"]
