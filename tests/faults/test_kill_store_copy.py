"""A copying of a store is killed, at every named point and at random times, and goes on.

At each moment the copy is a store: what its logs tell reads back bit for bit, or is said not to be there.
"""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from copies import readable, require_no_waste, require_prefix, require_whole_or_not_yet
from faults.processes import Nursery
from faults.scenes import KILLS, SMALL, Instants, Place, behind_relay, rounds, seeded, strikes
from histories import Past, changed, first_state
from servers import SeaweedS3

import dcr_store


def step(past: Past, line: str) -> None:
    rng = np.random.default_rng(len(past.states[line]))
    past.publish(line, {name: changed(array, 0.2, rng) for name, array in past.states[line][-1].items()})


@pytest.fixture
def past(scratch: Path) -> Past:
    """A store with a fork, an expiry that was collected, anchors, a tag; and half a copy of it, begun with less."""
    root = scratch
    made = Past(dcr_store.create(root / "store", chunk_elements=64))
    made.publish("main", first_state(np.random.default_rng(1)))
    for _ in range(5):
        step(made, "main")
    made.store.anchor("main@4")
    made.store.copy_to(root / "half", since="main@4")
    made.fork("main", 4, "exp")
    step(made, "exp")
    made.store.expire("main", keep_last=2, keep_every=3)
    made.store.gc(grace_s=0)
    step(made, "main")
    made.store.tag("main@3", "best")
    return made


def settle(past: Past, url: Path) -> None:
    """Require the finished copy."""
    copy = dcr_store.open(url)
    require_prefix(past.store, copy)
    require_no_waste(copy)
    assert readable(past, copy) == past.kept()
    assert copy._catalog.resolve("main@best").name == "main@3"


def test_killed_at_every_point(nursery: Nursery, past: Past, scratch: Path) -> None:
    half = Path(past.store.url).parent / "half"
    places = {"new": None, "half": half}
    n_struck = 0
    for what, begun in places.items():
        job = {"do": "upkeep", "store": past.store.url, "options": None, **SMALL}

        def calls(url: Path) -> list[object]:
            return [("copy_to", [str(url)], {"since": "exp@0", "lines": ["exp"]}), ("copy_to", [str(url)], {})]

        url = scratch / f"{what}-recorded"
        if begun is not None:
            shutil.copytree(begun, url)
        points = nursery.finish(**job, calls=calls(url)).points
        assert {"copy.object.before", "copy.absent", "log.commit.before", "log.expire.after", "copy.tag"} <= set(points)
        chosen = [*strikes(points), ("log.commit.after", 3), ("copy.object.after", points["copy.object.after"] // 2)]
        for nth, strike in enumerate(chosen[::2] if what == "half" else chosen[::6]):
            url = scratch / f"{what}-{nth}"
            if begun is not None:
                shutil.copytree(begun, url)
            if not nursery.run(**job, calls=calls(url), kill=strike).killed:
                continue  # a point that only some interleavings of the threads reach
            n_struck += 1
            if (url / "dcr.json").exists():
                require_prefix(past.store, dcr_store.open(url))
                require_whole_or_not_yet(past, dcr_store.open(url))
            nursery.finish(**job, calls=calls(url))
            settle(past, url)
            shutil.rmtree(url)
    assert n_struck >= 8


def test_killed_at_random_times(nursery: Nursery, past: Past, scratch: Path) -> None:
    rng = seeded("store copy")
    struck: list[bool] = []
    url = scratch / "timed"
    job = {"do": "upkeep", "store": past.store.url, "options": None, **SMALL}
    began = time.monotonic()
    nursery.finish(**job, calls=[("copy_to", [str(url)], {})])
    instants = Instants(rng, time.monotonic() - began)
    for nth in rounds(max(1, KILLS // 6), struck, 1):
        url = scratch / f"timed-{nth}"
        for _ in range(3):
            child = nursery.start(**job, calls=[("copy_to", [str(url)], {})])
            time.sleep(instants.next(0.5))
            child.signal(signal.SIGKILL)
            struck.append(child.wait().killed)
            instants.note(struck=struck[-1])
            if (url / "dcr.json").exists():
                require_prefix(past.store, dcr_store.open(url))
                require_whole_or_not_yet(past, dcr_store.open(url))
        nursery.finish(**job, calls=[("copy_to", [str(url)], {})])
        settle(past, url)


def test_from_a_relay_to_s3_killed_and_begun_late(
    nursery: Nursery, past: Past, scratch: Path, seaweed: SeaweedS3
) -> None:
    """The source is what a relay serves, the copy is on a server; where it is begun with less, it goes on with less."""
    with behind_relay(Place(past.store.url), scratch / "cache") as relayed:
        url, options = seaweed.new_url(), seaweed.storage_options
        job = {"do": "upkeep", **relayed.job, **SMALL}
        calls = [("copy_to", [url], {"since": "main@4", "storage_options": options})]
        for strike in (("copy.absent", 1), ("copy.object.after", 12), ("log.commit.before", 1), ("copy.tag", 1)):
            assert nursery.run(**job, calls=calls, kill=strike).killed, strike
            copy = dcr_store.open(url, storage_options=options)
            require_prefix(past.store, copy)
            require_whole_or_not_yet(past, copy)
        nursery.finish(**job, calls=calls)
        copy = dcr_store.open(url, storage_options=options)
        require_prefix(past.store, copy)
        assert readable(past, copy) == {"main@4", "main@5", "main@6"} & past.kept()
        assert copy.verify(deep=True).ok
        # An object less, another one damaged: repaired from the relay.
        keys = [key for key in sorted(copy._objects.list("versions/")) if "/mask/c/" in key]
        copy._objects.delete(keys[0])
        copy._objects.put(keys[-1], b"x" * copy._objects.list("versions/")[keys[-1]])
        calls = [("copy_to", [url], {"since": "main@4", "repair": True, "storage_options": options})]
        assert nursery.run(**job, calls=calls, kill=("copy.repaired", 1)).killed
        nursery.finish(**job, calls=calls)
        assert dcr_store.open(url, storage_options=options).verify(deep=True).ok
