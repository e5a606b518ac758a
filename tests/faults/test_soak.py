"""Trainers, receivers, readers and keepers in one store, all at once, killed now and then: nobody meets a wrong bit.

``--soak-seconds 300`` for longer; ``DCR_SEED`` for other lives.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from faults.living import number_of, require
from faults.processes import Child, Nursery
from faults.scenes import SEED, Place
from servers import SeaweedS3
from upkeep import require_no_waste

LIVES = {
    "trainer": {"role": "publish", "line": "main"},
    "another trainer": {"role": "publish", "line": "side"},
    "who forks": {"role": "fork"},
    "a": {"role": "receive", "group": "eu", "name": "a"},
    "b": {"role": "receive", "group": "eu", "name": "b"},
    "reader": {"role": "read"},
    "another reader": {"role": "read"},
    "who anchors": {"role": "anchor"},
    "who folds": {"role": "fold"},
    "who lets go": {"role": "expire"},
    "who collects": {"role": "collect"},
    "who names": {"role": "name"},
}


def test_twelve_processes(request: pytest.FixtureRequest, nursery: Nursery, seaweed: SeaweedS3, scratch: Path) -> None:
    random = Random(SEED)
    place = Place(seaweed.new_url(), seaweed.storage_options, seaweed.storage_options)
    store = place.create()
    store.create_group("eu", ["a", "b"])
    end = scratch / "end"

    def start(**role: str) -> Child:
        common = {"end": str(end), "seed": random.random(), "checkpoint_versions": 3}
        return nursery.start(do="live", **role, **common, **place.job)

    assert start(role="begin").wait().ok, nursery.errors()
    lives = {who: start(**LIVES[who]) for who in LIVES}
    until, n_killed = time.monotonic() + request.config.getoption("--soak-seconds"), 0
    while time.monotonic() < until:
        time.sleep(random.uniform(0.5, 2.5))
        who = random.choice(list(LIVES))
        lives[who].signal(signal.SIGKILL)
        outcome = lives[who].wait()
        assert outcome.killed, f"{who} had ended: {outcome}"
        assert "Traceback" not in nursery.errors(), nursery.errors()
        n_killed += 1
        lives[who] = start(**LIVES[who])
    end.touch()
    counts: Counter[str] = Counter()
    for who, life in lives.items():
        outcome = life.wait()
        assert outcome.ok, f"{who}: {outcome}\n{nursery.errors()}"
        counts.update(outcome.told["counts"])
    print(f"{n_killed} killed, {dict(sorted(counts.items()))}")
    store = place.open()
    report = store.verify(deep=True)
    assert report.ok, report.problems
    for line in store.lines():
        for info in store.log(line):
            if info.is_kept:
                require(store.read(info.version), line, number_of(info.version))
    store.gc(grace_s=0)
    require_no_waste(store)
