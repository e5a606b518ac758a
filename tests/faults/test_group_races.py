"""Groups of real processes: members killed, stopped, started twice and dropped while versions come; lost answers.

What was promoted is judged by a replay of the raw records and by what the processes noted before they said it. By
default a few processes; a campaign takes 16: ``DCR_MEMBERS=16 DCR_OCCURRENCES=3``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from faults.processes import Child, Nursery
from faults.scenes import OCCURRENCES, SEED, Place
from group_replay import replay
from servers import FaultProxy, SeaweedS3

from dcr_store.errors import ConflictError
from dcr_store.store import Store

N_MEMBERS = int(os.environ.get("DCR_MEMBERS", "4"))
N_VERSIONS = 4 * OCCURRENCES


class Cluster:
    """Processes of one group, each started again when it dies, and the hand that strikes them."""

    def __init__(
        self, nursery: Nursery, place: Place, scratch: Path, names: list[str], until: int, **first: object
    ) -> None:
        self._nursery = nursery
        self._notes = scratch / "prepared"
        self._notes.touch()
        self._job = {"do": "member", "group": "eu", "until": until, "notes": str(self._notes), **place.job}
        self.names = names
        self.running = {name: self.start(name, **first) for name in names}
        self.n_killed = 0
        self.doubles: list[Child] = []
        self._pool = ThreadPoolExecutor(len(names))
        self._ends = [self._pool.submit(self._supervise, name) for name in names]

    def start(self, name: str, **more: object) -> Child:
        return self._nursery.start(**self._job, name=name, **more)

    def _supervise(self, name: str) -> str:
        """Start a member again until one ends by itself; return what is active then."""
        while True:
            outcome = self.running[name].wait()
            if outcome.ok:
                return str(outcome.told["active"])
            assert outcome.killed or outcome.kind == "fenced", outcome.message
            self.n_killed += outcome.killed
            self.running[name] = self.start(name)

    def strike(self, rng: random.Random) -> None:
        """Do something to somebody."""
        name = rng.choice(self.names)
        child, kind = self.running[name], rng.choice(["kill", "sleep", "double"])
        if kind == "kill":
            child.signal(signal.SIGKILL)
        elif kind == "sleep":
            child.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.05, 0.2))
            if rng.random() < 0.5:
                self.doubles.append(self.start(name))  # it wakes up as a zombie
            child.signal(signal.SIGCONT)
        else:
            self.doubles.append(self.start(name))

    def prepared(self) -> set[tuple[str, int]]:
        """Who has prepared what."""
        lines = [line.split() for line in self._notes.read_text().splitlines()]
        return {(line[0], int(line[1])) for line in lines if len(line) == 2}

    def finish(self) -> list[str]:
        """Wait for all; return what was active when each member ended."""
        ends = [end.result() for end in self._ends]
        for outcome in [child.wait() for child in self.doubles]:
            assert outcome.killed or outcome.ok or outcome.kind == "fenced", outcome.message
        self._pool.shutdown()
        return ends


def publish(store: Store, number: int) -> None:
    with store.begin() as transaction:
        transaction.write("w", np.full(100, number, np.int32))


def race(nursery: Nursery, place: Place, scratch: Path, *, direct: Place | None = None, n_strikes: int) -> list[str]:
    """Let members run while versions come and strikes fall; check what was decided; return the records' kinds."""
    store = (direct or place).open()
    rng = random.Random(f"{SEED} {place.url}")
    names = [f"r{i}" for i in range(N_MEMBERS)]
    group = store.create_group("eu", names)
    cluster = Cluster(nursery, place, scratch, names, N_VERSIONS - 1)
    deadline = time.monotonic() + 100
    for number in range(N_VERSIONS):
        publish(store, number)
        for _ in range(n_strikes):
            cluster.strike(rng)
            time.sleep(rng.uniform(0.0, 0.1))
        with contextlib.suppress(ConflictError):
            if number % 2:
                group.drop(rng.choice(cluster.names), "by hand")
        while number < N_VERSIONS - 1 and store.group("eu").status().lag > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
    ended = cluster.finish()
    assert ended == [f"main@{N_VERSIONS - 1}"] * N_MEMBERS, "no progress"
    found = replay(store._objects, "eu", cluster.prepared())
    roots = {info.version: info.root for info in store.log()}
    assert all(roots[version] == root for version, root, _ in found.promoted)
    numbers = [int(version.rpartition("@")[2]) for version, _, _ in found.promoted]
    assert numbers == sorted(set(numbers))
    status = store.group("eu").status()
    assert (status.active, status.lag) == (f"main@{N_VERSIONS - 1}", 0)
    assert store.verify().ok
    return found.kinds


def test_members_are_killed_stopped_doubled_and_dropped(nursery: Nursery, place: Place, scratch: Path) -> None:
    place.create()
    kinds = race(nursery, place, scratch, n_strikes=2)
    assert kinds.count("promote") >= 2
    assert kinds.count("admit") > N_MEMBERS, "somebody came back"


def test_answers_are_lost_meanwhile(nursery: Nursery, seaweed: SeaweedS3, scratch: Path) -> None:
    with FaultProxy(seaweed.endpoint_url, seed=SEED) as proxy:
        direct = Place(seaweed.new_url(), seaweed.storage_options, seaweed.storage_options)
        direct.create()
        place = Place(direct.url, seaweed.options_at(proxy.endpoint_url), seaweed.storage_options)
        faults = [
            proxy.add("drop_answer", "PUT", key="/groups/", times=None, probability=0.2),
            proxy.add(
                "answer", "PUT", key="/groups/", times=None, probability=0.1, status=409, code="OperationAborted"
            ),
            proxy.add("reset", times=None, probability=0.03),
            proxy.add("delay", times=None, probability=0.03, delay_s=0.2),
        ]
        race(nursery, place, scratch, direct=direct, n_strikes=1)
        assert sum(fault.hits > 0 for fault in faults) >= 3


@pytest.mark.parametrize("point", ["group.promote.before", "group.promote.after", "member.prepared.after"])
def test_one_is_killed_in_the_middle_of_deciding(nursery: Nursery, place: Place, scratch: Path, point: str) -> None:
    """Once they are started again, the members finish what was decided, or decide it."""
    store = place.create()
    publish(store, 0)
    store.create_group("eu", ["r0", "r1"])
    cluster = Cluster(nursery, place, scratch, ["r0", "r1"], 0, kill=[point, 1])
    assert cluster.finish() == ["main@0", "main@0"]
    assert cluster.n_killed > 0
    assert replay(store._objects, "eu", cluster.prepared()).kinds.count("promote") == 1
