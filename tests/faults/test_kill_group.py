"""Members of a group are killed between any two acts and at random instants; memory is lost with its process.

They are of different kinds, and behind relays. Nothing is acknowledged that is not held, nothing is active that not all
had prepared, and whoever is started again comes to what the group decided by itself.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from faults.kept import KINDS, Job, Kept, harm_spool
from faults.processes import Child, Nursery
from faults.scenes import KILLS, OCCURRENCES, Instants, Place, rounds, seeded
from group_replay import replay

from dcr_store.store import Store

CAMPAIGN = OCCURRENCES > 1
GROUP = "eu"


class Prepared:
    """Who noted, just before it told the group, that it had prepared what; for ``replay``."""

    def __init__(self, store: Store, members: list[Kept]) -> None:
        keys = [key for key in store._objects.list(f"groups/{GROUP}/log/") if not key.endswith("latest.json")]
        records = [json.loads(store._objects.get(key)) for key in keys]
        self._versions = {r["seq"]: r["new"]["version"] for r in records if r["kind"] == "propose"}
        said = [claim["said"].split("/") for kept in members for claim in kept.said() if "/" in claim["said"]]
        self._said = {(words[3], words[5].split(".")[1]) for words in said if words[4] == "prepared"}

    def __contains__(self, item: object) -> bool:
        assert isinstance(item, tuple)
        incarnation, proposal = item
        return (self._versions[proposal], incarnation) in self._said


class Cluster:
    """A store that gets versions, and a group of targets that follow it."""

    def __init__(self, place: Place, scratch: Path, series: list[Path], kinds: list[tuple[str, str]]) -> None:
        self.store = place.create()
        self._series = series
        self.published: list[Path] = []
        self.publish()
        names = [f"r{i}" for i in range(len(kinds))]
        self.members = {
            name: KINDS[kind](place, self.published, scratch, by, name)
            for name, (kind, by) in zip(names, kinds, strict=True)
        }
        for kept in self.members.values():
            kept.reset()
        self.store.create_group(GROUP, names)

    def publish(self) -> int:
        checkpoint = self._series[len(self.published) % len(self._series)]
        self.published.append(checkpoint)
        with self.store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
        return len(self.published) - 1

    def job(self, name: str, version: int, **options: object) -> Job:
        return self.members[name].job(version, group=GROUP, name=name, **options)

    def active(self) -> int:
        active = self.store.group(GROUP).status().active
        assert active is not None
        return int(active.rpartition("@")[2])

    def settle(self, children: dict[str, Child], version: int) -> None:
        """Wait for all, and judge what they hold, what they said, and what was decided."""
        for name, child in children.items():
            outcome = child.wait()
            assert outcome.ok, f"{name}: {outcome.message}"
        for name, kept in self.members.items():
            assert self.active() == version
            kept.assert_done(version)
            acked = [c["version"] for c in kept.said() if "/applied/" in c["said"]]
            assert kept.by == "command" or acked[-1] == f"main@{version}", name
        # What the command line says it has prepared is not noted.
        noting = [kept for kept in self.members.values() if kept.by == "follow"]
        if len(noting) == len(self.members):
            found = replay(self.store._objects, GROUP, Prepared(self.store, noting))
            promoted = [name for name, _, _ in found.promoted]
            assert promoted[-1] == f"main@{version}"
            said = {c["version"] for kept in noting for c in kept.said() if "/applied/" in c["said"]}
            assert said <= set(promoted), "acknowledged, and never decided"


PAIRS = [
    ("directory", [("in place", "follow"), ("in place", "follow")]),
    ("relay", [("memory", "follow"), ("copy", "follow")]),
    *(
        [
            ("s3", [("shared memory", "follow"), ("in place", "follow")]),
            ("relay to s3", [("copy", "follow"), ("memory", "follow")]),
            ("relay", [("in place", "follow"), ("copy", "command")]),
        ]
        if CAMPAIGN
        else []
    ),
]


@pytest.mark.parametrize(("place", "kinds"), PAIRS, indirect=["place"])
def test_a_member_killed_at_every_point(
    nursery: Nursery, place: Place, scratch: Path, versions: list[Path], kinds: list[tuple[str, str]]
) -> None:
    """The group goes on when it is back."""
    cluster = Cluster(place, scratch, versions[:3], kinds)
    rng = seeded("member", place.is_slow, kinds)
    first = cluster.members["r0"]
    cluster.settle({name: nursery.start(**cluster.job(name, 0)) for name in cluster.members}, 0)
    version = cluster.publish()
    other = nursery.start(**cluster.job("r1", version))
    points = nursery.finish(**cluster.job("r0", version)).points
    cluster.settle({"r1": other}, version)
    parts = ("member.", "group.", "receiver.", "memory.", "copy.", *(("spool.", "pull.") if CAMPAIGN else ()))
    names = [name for name in points if name.startswith(parts)]
    assert {"member.prepared.before", "member.prepared.after", "member.applied.before"} <= set(names)
    for name in names:
        version = cluster.publish()
        other = nursery.start(**cluster.job("r1", version))
        outcome = nursery.run(**cluster.job("r0", version, kill=[name, 1]))
        assert outcome.killed or outcome.ok, f"{name}: {outcome.message}"  # the other one may have been first
        held = cluster.active()
        assert held in (version - 1, version)
        first.assert_old_or_new({version - 1, version})
        harm_spool(first, rng)
        n_said = len(first.said())
        child = nursery.start(**cluster.job("r0", version))
        try:
            cluster.settle({"r0": child, "r1": other}, version)
            said = [int(claim["version"].rpartition("@")[2]) for claim in first.said()[n_said:] if claim["digest"]]
            assert min(said) >= held, "it came back to less than what was decided"
        except AssertionError as error:
            raise AssertionError(f"killed at {name}: {error}") from error


ALL = [("in place", "follow"), ("copy", "follow"), ("memory", "follow"), ("shared memory", "follow")]
CLUSTERS = [
    ("relay", ALL[1:3]),
    *(
        [
            ("directory", ALL),
            ("s3", ALL),
            ("relay", ALL),
            ("relay to s3", ALL),
            ("relay", [*ALL[:3], ("copy", "command")]),
        ]
        if CAMPAIGN
        else []
    ),
]


@pytest.mark.parametrize(("place", "kinds"), CLUSTERS, indirect=["place"])
def test_members_killed_at_random_instants(
    nursery: Nursery, place: Place, scratch: Path, versions: list[Path], kinds: list[tuple[str, str]]
) -> None:
    """Every member may die several times on the way to each version, and what outlived it is harmed."""
    cluster = Cluster(place, scratch, versions[:3], kinds)
    rng = seeded("members", place.is_slow, kinds)
    names = list(cluster.members)
    began = time.monotonic()
    cluster.settle({name: nursery.start(**cluster.job(name, 0)) for name in names}, 0)
    instants = Instants(rng, time.monotonic() - began)
    struck: list[bool] = []
    for _ in rounds(KILLS // 2, struck, KILLS // 4):
        version = cluster.publish()
        for kept in cluster.members.values():
            kept.keep_as_old()
        children = {name: nursery.start(**cluster.job(name, version, watch=True)) for name in names}
        history: list[tuple[str, str]] = []
        try:
            for _ in range(rng.randrange(1, 2 * len(names))):
                time.sleep(instants.next())
                name = rng.choice(names)
                kept = cluster.members[name]
                children[name].signal(signal.SIGKILL)
                struck.append(children[name].wait().killed)
                instants.note(struck=struck[-1])
                kept.assert_old_or_new({None, version - 1, version})
                harm = rng.choice(kept.harms)
                kept.harm(harm, rng)
                history.append((name, harm.__name__))
                if rng.random() < 0.3:
                    harm_spool(kept, rng)
                children[name] = nursery.start(**cluster.job(name, version, watch=True))
            cluster.settle(children, version)
        except AssertionError as error:
            raise AssertionError(f"main@{version} after {history}: {error}") from error
