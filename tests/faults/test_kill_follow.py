"""Receivers that follow are killed at every named point and at random, and so are those that publish to them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import harms
from faults.harms import spooled
from faults.kept import KINDS, Costs
from faults.processes import Child, Nursery
from faults.scenes import KILLS, OCCURRENCES, SMALL, Place, assert_checkpoint, rounds, seeded
from relays import RelayProcess
from states import tree

from dcr_store.store import Store

Job = dict[str, object]
FAST = {"rest_s": 0.05}


def publish(store: Store, checkpoint: Path) -> str:
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoint)
        return transaction.commit().version


@pytest.fixture
def local(scratch: Path) -> Place:
    return Place(str(scratch / "store"))


def settled(target: Path, checkpoint: Path) -> None:
    """Assert that a target is a checkpoint, and that nothing is beside it but lock, marker and spool."""
    assert_checkpoint(target, checkpoint, own=False)
    assert {path.name for path in (target / ".dcr").iterdir()} <= {"lock", "marker.json", "spool"}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# ------------------------------------------------------------------ streaming


def test_most_is_fetched_before_the_commit_and_nothing_twice(
    nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """A writer that publishes slowly stops just before its commit; by then the follower has everything."""
    store = place.create()
    publish(store, checkpoints[1])
    target = scratch / "target"
    spool = target / ".dcr" / "spool"
    store.pull(target, "main@0")
    before = tree(target)
    follower = nursery.start(do="follow", directory=str(target), until="main@1", **FAST, **place.job)
    writer = nursery.start(
        do="publish",
        checkpoint=str(checkpoints[2]),
        owner="trainer",
        slow=["publish.partition.stored", 0.01],
        stop=["log.commit.before", 1],
        **SMALL,
        **place.job,
    )
    writer.wait_stopped()
    [prefix] = [name for name in store._objects.list_names("versions/main/") if name.startswith(f"{1:012d}-")]
    stored = store._objects.list(f"versions/main/{prefix}/data/")
    partitions = {key: nbytes for key, nbytes in stored.items() if "/c/" in key}
    assert len(partitions) > 10
    wait_for(lambda: len(spooled(spool)) >= len(partitions), f"{len(spooled(spool))} of {len(partitions)} were spooled")
    assert tree(target) == before, "nothing of an open transaction touches the target"
    writer.signal(signal.SIGCONT)
    assert writer.wait().ok
    outcome = follower.wait()
    assert outcome.ok, outcome.message
    settled(target, checkpoints[2])
    told = outcome.told
    assert [item["version"] for item in told["applied"]] == ["main@0", "main@1"]
    assert told["ahead"] == sum(partitions.values())
    assert told["ahead"] / told["fetched"] > 0.5, "the rest are headers and side files, known once the seal is"
    n_known = len(store.show("main@1").files) * 2
    assert outcome.points["transfer.fetched"] == outcome.points["transfer.before"] <= len(partitions) + n_known
    assert told["applied"][1]["nbytes_fetched"] == 0


@pytest.mark.parametrize("end", ["killed and resumed", "killed and taken over", "aborted"])
def test_a_writer_that_does_not_finish(
    nursery: Nursery, local: Place, scratch: Path, checkpoints: list[Path], end: str
) -> None:
    store = local.create()
    publish(store, checkpoints[1])
    target = scratch / "target"
    spool = target / ".dcr" / "spool"
    store.pull(target, "main@0")
    before = tree(target)
    follower = nursery.start(do="follow", directory=str(target), until="main@1", **FAST, **local.job)
    job: Job = {"do": "publish", "checkpoint": str(checkpoints[2]), "owner": "trainer", **SMALL, **local.job}
    writer = nursery.start(**job, stop=["publish.journal.stored", 6])
    writer.wait_stopped()
    wait_for(lambda: len(spooled(spool)) >= 10, "partitions are spooled")
    journaled = len(spooled(spool))
    writer.signal(signal.SIGKILL)
    writer.wait()
    if end == "killed and resumed":
        outcome = nursery.finish(**job)
        expected = checkpoints[2]
    elif end == "killed and taken over":
        other: Job = {**job, "checkpoint": str(checkpoints[3]), "owner": "another", "takeover": True}
        outcome = nursery.finish(**other)
        expected = checkpoints[3]
    else:
        with store.begin(owner="trainer") as transaction:
            transaction.abort()
        wait_for(lambda: spooled(spool) == [], "the spool is dropped")
        assert tree(target) == before
        outcome = nursery.finish(**{**job, "checkpoint": str(checkpoints[3])})
        expected = checkpoints[3]
    assert outcome.told["version"] == "main@1"
    found = follower.wait()
    assert found.ok, found.message
    settled(target, expected)
    assert found.told["failures"] == []
    assert not [name for name in spooled(spool) if "." in name], "adopted or dropped"
    if end == "killed and resumed":
        assert journaled >= 10
        contents = store._catalog.contents(store._catalog.resolve("main@1"))
        n_all = len(contents.partitions) + 2 * len(contents.manifest.files)
        assert found.points["transfer.fetched"] <= n_all, "what the first attempt had stored was not fetched again"


# ------------------------------------------------------------------ kills


CAMPAIGN = OCCURRENCES > 1


@pytest.mark.parametrize("place", ["directory", "s3", "relay", "relay to s3"], indirect=True)
@pytest.mark.parametrize("kind", ["in place", "copy", "memory", "shared memory"] if CAMPAIGN else ["in place"])
def test_a_follower_killed_while_a_transaction_is_open(
    nursery: Nursery, place: Place, kind: str, scratch: Path, checkpoints: list[Path]
) -> None:
    """Nothing of it has touched the target, and what was fetched is not fetched again once it is committed."""
    store = place.create()
    publish(store, checkpoints[1])
    kept = KINDS[kind](place, checkpoints[1:3], scratch, "follow")
    kept.set_out(0)
    kept.reset()
    writer = nursery.start(
        do="publish",
        checkpoint=str(checkpoints[2]),
        owner="trainer",
        stop=["log.commit.before", 1],
        **SMALL,
        **place.job,
    )
    writer.wait_stopped()
    points = ["transfer.before", "transfer.fetched", "spool.written", "spool.stored", "stream.journaled"]
    for point in points if CAMPAIGN or not place.is_slow else points[2:3]:
        child = nursery.start(**kept.job(1, kill=[point, 3]))
        assert child.wait().killed, point
        kept.assert_old_or_new({0})
    at_hand = harms.spooled(kept.spool)
    assert at_hand or point == "transfer.before"
    writer.signal(signal.SIGCONT)
    assert writer.wait().ok
    costs = Costs(place.open())
    limits = kept.limits(costs, 1)
    outcome = nursery.finish(**kept.job(1))
    kept.assert_done(1)
    assert limits is not None
    counts = kept.counts(outcome)
    assert counts is not None
    assert counts[0] <= limits[0]
    assert counts[1] <= limits[1]


def test_what_was_spooled_before_a_kill_is_not_fetched_again(
    nursery: Nursery, local: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    store = local.create()
    publish(store, checkpoints[1])
    target = scratch / "target"
    store.pull(target, "main@0")
    publish(store, checkpoints[2])
    job: Job = {"do": "follow", "directory": str(target), "until": "main@1", **FAST, **local.job}
    assert nursery.run(**job, kill=["receiver.apply.before", 1]).killed
    assert nursery.run(**job, kill=["replay.chunk.written", 5]).killed
    outcome = nursery.finish(**job)
    assert outcome.told["fetched"] == 0
    applied = outcome.told["applied"][-1]
    stored = store._objects.list("versions/")
    contributed = sum(nbytes for key, nbytes in stored.items() if key.endswith("/contributions.bin"))
    assert applied["nbytes_fetched"] <= contributed, "no payload, only what a process reads that knows nothing yet"
    assert applied["chunks_healed"] == 0
    settled(target, checkpoints[2])


@pytest.mark.parametrize("place", ["directory", "s3"], indirect=True)
def test_followers_and_writers_killed_at_random(
    nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """One line, two followers that share a spool, and a writer; each is killed now and then, and the target torn."""
    rng = seeded("random", place.options is None)
    store = place.create()
    publish(store, checkpoints[1])
    targets, spool = [scratch / "a", scratch / "b"], scratch / "spool"
    struck: list[bool] = []
    n_rounds = KILLS // 2 if place.options is None else max(1, KILLS // 12)
    for number in (1 + nth for nth in rounds(n_rounds, struck, n_rounds // 4)):
        checkpoint = checkpoints[1 + number % 4]
        children: list[Child] = []
        for target in targets:
            if rng.random() < 0.3:
                rng.choice(harms.IN_PLACE)(target, target, rng)
            children.append(
                nursery.start(
                    do="follow",
                    directory=str(target),
                    spool=str(spool),
                    spool_nbytes=rng.choice([200, 20_000, 1 << 30]),
                    until=f"main@{number}",
                    **FAST,
                    **place.job,
                )
            )
        publishing: Job = {"do": "publish", "checkpoint": str(checkpoint), "owner": "trainer", **SMALL, **place.job}
        writer = nursery.start(**publishing)
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.3))
            writer.signal(signal.SIGKILL)
        if writer.wait().killed and store.log()[-1].version != f"main@{number}":
            nursery.finish(**publishing)
        for child in children:
            if rng.random() < 0.6:
                time.sleep(rng.uniform(0, 0.1))
                child.signal(signal.SIGKILL)
        for target, child in zip(targets, children, strict=True):
            outcome = child.wait()
            struck.append(outcome.killed)
            if rng.random() < 0.3:
                rng.choice(harms.SPOOLS)(spool, rng)
            if outcome.killed:
                nursery.finish(
                    do="follow", directory=str(target), spool=str(spool), until=f"main@{number}", **FAST, **place.job
                )
            else:
                assert outcome.ok, outcome.message
            settled(target, checkpoint)


# ------------------------------------------------------------------ through a relay


def test_followers_behind_a_relay_that_is_killed(
    nursery: Nursery, local: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """Followers are killed at each step; then the relay dies, and comes back with its cache."""
    store = local.create()
    publish(store, checkpoints[1])
    target, cache = scratch / "target", scratch / "cache"
    with RelayProcess(local.url, directory=cache) as relay:
        job: Job = {"do": "follow", "directory": str(target), "store": relay.url, **FAST}
        nursery.finish(**job, until="main@0")
        publish(store, checkpoints[2])
        for point in (
            "transfer.fetched",
            "spool.stored",
            "receiver.apply.before",
            "replay.chunk.written",
            "pull.clean",
        ):
            assert nursery.run(**job, until="main@1", kill=[point, 1]).killed, point
        outcome = nursery.finish(**job, until="main@1")
        assert outcome.told["fetched"] == 0, "it was spooled before the kills"
        settled(target, checkpoints[2])
        writing = {"do": "publish", "checkpoint": str(checkpoints[3]), "owner": "trainer", **SMALL, **local.job}
        writer = nursery.start(**writing, stop=["log.commit.before", 1])
        writer.wait_stopped()
        follower = nursery.start(**job, until="main@2")
        spool = target / ".dcr" / "spool"
        wait_for(
            lambda: any("." in name for name in spooled(spool)), "it is spooled through the relay while it is open"
        )
        port = int(relay.url.rpartition(":")[2])
        relay.kill()
        writer.signal(signal.SIGCONT)
        assert writer.wait().ok
        time.sleep(1.0)
        settled(target, checkpoints[2])
    with RelayProcess(local.url, directory=cache, port=port):
        outcome = follower.wait()
    assert outcome.ok, outcome.message
    settled(target, checkpoints[3])
