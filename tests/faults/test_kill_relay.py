"""A relay is killed at random instants while it serves, its cache is torn, and it is started again on what is left."""

from __future__ import annotations

import hashlib
import random
import secrets
import select
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from faults.conftest import Library
from faults.kept import KINDS
from faults.processes import Child, Nursery
from faults.scenes import KILLS, OCCURRENCES, Instants, Place, rounds, seeded
from relays import status
from servers import free_ports

CAMPAIGN = OCCURRENCES > 1


def files_of(cache: Path) -> list[Path]:
    return sorted((cache / "objects").glob("*/*"))


Torn = dict[Path, bytes]


def assert_consistent(cache: Path, torn: Torn) -> None:
    """Assert that every file in a cache has the bytes that its name says, but for those that are still as torn."""
    for file in files_of(cache):
        data = file.read_bytes()
        assert torn.get(file) == data or hashlib.sha256(data).hexdigest() == file.name.partition("-")[0], file


def harm(cache: Path, torn: Torn, rng: random.Random) -> str:
    """Power loss: nothing in a cache is synced, so any file may be cut, empty, zeros or gone."""
    if rng.random() < 0.4:
        return "left"
    (cache / "arriving" / secrets.token_hex(16)).write_bytes(b"half")
    for file in files_of(cache):
        kind, data = rng.randrange(6), file.read_bytes()
        if kind == 0:
            file.write_bytes(data[: rng.randrange(len(data) or 1)])
        elif kind == 1:
            file.write_bytes(bytes(len(data)))
        elif kind <= 3:
            file.unlink()
        if kind <= 1:
            torn[file] = file.read_bytes()
    return "torn"


def has_ended(child: Child) -> bool:
    return bool(select.select([child._socket], [], [], 0)[0])


@pytest.mark.parametrize("where", ["directory", *(["s3"] if CAMPAIGN else [])])
@pytest.mark.parametrize(
    ("kind", "by"), [("in place", "pull"), *([("copy", "follow"), ("memory", "follow")] if CAMPAIGN else [])]
)
def test_a_relay_killed_at_random_instants(
    nursery: Nursery, library: Library, scratch: Path, versions: list[Path], where: str, kind: str, by: str
) -> None:
    """Whoever reads through it waits for it and ends right; what it kept is used again, unless it is found wrong."""
    direct: Place = library.place(where, "versions")
    cache, (port,) = scratch / "cache", free_ports(1)
    url = f"http://127.0.0.1:{port}"
    job = {"do": "relay", "port": port, "cache": str(cache), "store": direct.url, "options": direct.options}
    kept = KINDS[kind](replace(direct, relay=url), versions, scratch, by)
    rng = seeded("relay", where, kind)

    def bring(goal: int) -> Child:
        kept.reset()
        return nursery.start(**kept.job(goal))

    relay = nursery.start(**job)
    began = time.monotonic()
    assert bring(2).wait().ok
    instants = Instants(rng, time.monotonic() - began)
    struck: list[bool] = []
    history: list[tuple[int, str]] = []
    torn: Torn = {}
    for _ in rounds(KILLS // 2, struck, KILLS // 4):
        goal = rng.choice(kept.goals)
        child = bring(goal)
        for _ in range(rng.randrange(1, 3)):
            time.sleep(instants.next())
            struck.append(not has_ended(child))
            instants.note(struck=struck[-1])
            relay.signal(signal.SIGKILL)
            assert relay.wait().killed
            assert_consistent(cache, torn)
            history.append((goal, harm(cache, torn, rng)))
            relay = nursery.start(**job)
        outcome = child.wait()
        assert outcome.ok, f"after {history}: {outcome.message}"
        kept.assert_done(goal)
    # Whatever is asked for is compared first; the next relay needs nothing of it from upstream.
    assert bring(2).wait().ok
    relay.signal(signal.SIGKILL)
    relay.wait()
    relay = nursery.start(**job)
    outcome = bring(2).wait()
    assert outcome.ok, outcome.message
    kept.assert_done(2)
    found = status(url)
    partitions = sum(nbytes for key, nbytes in direct.open()._objects.list("versions/").items() if "/data/" in key)
    assert found["transferred_nbytes"] < partitions / 4, "records and listings alone"
    relay.signal(signal.SIGKILL)
    relay.wait()
