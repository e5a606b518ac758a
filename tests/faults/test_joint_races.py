"""Two committers of one transaction, and writers and committers that slept: one version, once, and everyone is told."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import ranks
from faults.processes import Nursery
from faults.scenes import KILLS, OCCURRENCES, SMALL, Place, seeded
from faults.writers import N_RANKS, Ranks, expected_roots, other, states

from dcr_store.errors import ConflictError, FencedError, LagError
from dcr_store.format.documents import JournalEntry
from dcr_store.format.names import TransactionKeys
from dcr_store.publish import partitions

SLEEPS = [
    (point, ending)
    for point in ("publish.seals.found", "publish.proposal.stored", "log.commit.before")
    for ending in ("resumed", "replaced", "aborted")
]
SLOW = SLEEPS if OCCURRENCES > 1 else [("log.commit.before", "resumed")]  # the server is slow


@pytest.fixture
def directory(scratch: Path) -> Place:
    return Place(str(scratch / "store"))


@pytest.mark.parametrize("place", ["directory"], indirect=True)
def test_two_who_both_think_that_they_are_the_committer(nursery: Nursery, place: Place) -> None:
    """They fence each other, at most as often as they begin; each version is there once."""
    place.create()
    rng = seeded("committers")
    line = Ranks(nursery, place)
    line.publish(0)
    n_fenced = 0
    for nth in range(max(3, KILLS // 3)):
        state = other(line.published[-1], nth)
        children = line.start_all(state)
        time.sleep(rng.uniform(0.0, 0.1))
        rival = line.start(0, state, gives_up=True)
        outcome = rival.wait()
        assert outcome.ok or outcome.kind == FencedError.kind, outcome
        n_fenced += not outcome.ok
        line.finish(state, children)
    line.check_all()
    records = [record for record, _ in place.open()._catalog.log("main").records()]
    assert sum(record.kind == "commit" for record in records) == len(line.published)
    assert sum(record.kind == "abort" for record in records) == 0


@pytest.mark.parametrize(
    ("place", "point", "ending"),
    [*(("directory", *item) for item in SLEEPS), *(("s3", *item) for item in SLOW)],
    indirect=["place"],
)
def test_a_committer_that_slept_never_commits(nursery: Nursery, place: Place, point: str, ending: str) -> None:
    place.create()
    line = Ranks(nursery, place)
    line.publish(0)
    sleeper = line.start(0, 1, gives_up=True, stop=[point, 1])
    rest = line.start_all(1, but=[0], gives_up=ending == "aborted")
    sleeper.wait_stopped()
    if ending == "aborted":
        fresh = place.open()
        pending = fresh._catalog.log("main").refresh().open
        assert pending is not None
        fresh.join(pending.txid, writer="r2").abort()
        for child in rest.values():
            assert child.wait().kind == FencedError.kind
    else:
        rest[0] = line.start(0, 1, **({"message": "another"} if ending == "replaced" else {}))
        told = line.finish(1, rest)[0].told
        assert told["attempt"] == (1 if ending == "resumed" else 0)
    n_records = place.open()._catalog.log("main").refresh().length
    sleeper.signal(signal.SIGCONT)
    outcome = sleeper.wait()
    assert (outcome.ok, outcome.kind) == (False, FencedError.kind), outcome
    assert "taken over or aborted" in outcome.message
    assert place.open()._catalog.log("main").refresh().length == n_records, "it neither commits nor aborts"
    line.look()
    line.publish(2)
    line.check_all()


def test_a_committer_that_slept_does_not_abort_what_took_over(nursery: Nursery, directory: Place) -> None:
    """Its own failure ends nothing that is another's by now."""
    directory.create()
    line = Ranks(nursery, directory)
    line.publish(0)
    sleeper = line.start(0, 1, gives_up=True, timeout_s=0.01, stop=["publish.seals.awaited", 1])
    sleeper.wait_stopped()
    committer = line.start(0, 1)
    log = directory.open()._catalog.log("main")
    while (pending := log.refresh().open) is None or pending.attempt == 0:
        time.sleep(0.01)
    sleeper.signal(signal.SIGCONT)
    assert sleeper.wait().kind in (FencedError.kind, LagError.kind)
    line.finish(1, {**line.start_all(1, but=[0]), 0: committer})
    assert [record.kind for record, _ in log.records()][2:] == ["begin", "resume", "commit"]
    line.check_all()


def test_the_seal_of_an_old_attempt_does_not_count(nursery: Nursery, directory: Place) -> None:
    """A writer seals, and sleeps: whoever begins again waits until it has sealed for that attempt."""
    directory.create()
    line = Ranks(nursery, directory)
    line.publish(0)
    children = line.start_all(1, but=[0, 1])
    first = line.start(0, 1, stop=["publish.seals.awaited", 1])
    sleeper = line.start(1, 1, stop=["publish.seal.stored", 1])
    sleeper.wait_stopped()
    first.wait_stopped()
    first.signal(signal.SIGKILL)
    assert first.wait().killed
    with directory.open() as store, patch.object(partitions, "PARTITION_NBYTES", SMALL["partition_nbytes"]):
        names = [f"r{rank}" for rank in range(N_RANKS)]
        committer = store.begin(writers=names, tensors=ranks.SHAPES, owner="run", message="state 1")
        assert committer.attempt == 1
        ranks.write(committer, ranks.maps_of(0, N_RANKS), states()[1])
        with pytest.raises(LagError, match="1 of 4 writers have not sealed main@1 after 1 s: r1"):
            committer.commit(timeout_s=1)
        sleeper.signal(signal.SIGCONT)
        assert committer.commit(timeout_s=20).root == expected_roots()[1]
    outcomes = line.finish(1, {**children, 1: sleeper})
    assert all(outcome.points["publish.resealed"] == 1 for outcome in outcomes.values())
    line.check_all()


@pytest.mark.parametrize("point", ["publish.partition.stored", "publish.seal.before", "publish.outcome.awaited"])
@pytest.mark.parametrize("wakes", ["before the commit", "after it"])
def test_a_writer_that_slept_and_the_one_in_its_place(
    nursery: Nursery, directory: Place, point: str, wakes: str
) -> None:
    """Of the same weights it does not matter whose seal counts."""
    directory.create()
    line = Ranks(nursery, directory)
    line.publish(0)
    children = line.start_all(1, but=[1, 2])
    sleeper = line.start(1, 1, stop=[point, 1])
    sleeper.wait_stopped()
    children[1] = line.start(1, 1)
    if wakes == "before the commit":
        sleeper.signal(signal.SIGCONT)
        time.sleep(0.3)
    children[2] = line.start(2, 1)
    line.finish(1, children)
    sleeper.signal(signal.SIGCONT)
    outcome = sleeper.wait()
    assert outcome.ok, outcome
    assert outcome.told["root"] == expected_roots()[1]
    line.publish(2)
    line.check_all()


def await_seals(directory: Place, writer: str, n_processes: int) -> None:
    """Wait until that many processes have sealed as `writer` in the open transaction."""
    with directory.open() as store:
        objects, pending = store._catalog.objects, store._catalog.log("main").refresh().open
        assert pending is not None
        prefix = f"{TransactionKeys('main', pending.version, pending.txid).prefix}journal/"
        entries: list[JournalEntry] = []
        deadline = time.monotonic() + 40
        while len({entry.incarnation for entry in entries if entry.writer == writer and entry.seal}) < n_processes:
            assert time.monotonic() < deadline, [(entry.writer, entry.incarnation, entry.seq) for entry in entries]
            time.sleep(0.01)
            entries = [JournalEntry.from_bytes(objects.get(key), key) for key in objects.list(prefix)]


@pytest.mark.parametrize("wakes", ["before the commit", "after it"])
def test_a_writer_that_slept_with_other_weights_is_told(nursery: Nursery, directory: Place, wakes: str) -> None:
    """Whichever of the two counts, the other does not believe that its weights are in the version."""
    directory.create()
    line = Ranks(nursery, directory)
    line.publish(0)
    children = line.start_all(1, but=[1, 2], gives_up=True)
    # It journals nothing before it sleeps, be another thread ahead of the one that stops: that would bind the other.
    rarely = {"journal_first_partitions": 1000, "journal_partitions": 1000}
    sleeper = line.start(1, 2, gives_up=True, stop=["publish.partition.before", 1], **rarely)
    sleeper.wait_stopped()
    children[1] = line.start(1, 1, gives_up=True)
    if wakes == "after it":
        children[2] = line.start(2, 1)
        line.finish(1, children)
        sleeper.signal(signal.SIGCONT)
        outcome = sleeper.wait()
        assert outcome.kind == ConflictError.kind, outcome
        assert "committed with what another process sealed as writer r1" in outcome.message
    else:
        await_seals(directory, "r1", 1)  # else it would refuse what the sleeper journals
        sleeper.signal(signal.SIGCONT)
        await_seals(directory, "r1", 2)  # else the version could be committed without it
        children[2] = line.start(2, 1, gives_up=True)
        refused = children[0].wait()
        assert refused.kind == ConflictError.kind, refused
        assert "two processes sealed as writer r1" in refused.message
        for child in [sleeper, *(children[rank] for rank in (1, 2, 3))]:
            assert child.wait().kind == FencedError.kind
        line.look()
    line.publish(3)
    line.publish(2)
    line.check_all()
