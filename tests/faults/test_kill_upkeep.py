"""Anchors, folds, expiries, collections, forks, tags and pins are killed, at every named point and at random times.

What a killed process leaves is the old state of the store or the new one; run again it finishes, and nothing is lost,
nor left over.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.processes import Nursery
from faults.scenes import KILLS, SMALL, Instants, Place, every, rounds, seeded, strikes
from states import assert_same, series
from upkeep import facts, require_no_waste

from dcr_store.errors import NotFoundError
from dcr_store.layout import slices
from dcr_store.store import Store

Call = tuple[str, list[Any], dict[str, Any]]
STATES = [{name: array[:9] for name, array in state.items() if name != "layers.0.mlp.weight"} for state in series(9)]
EXPIRY: Call = ("expire", [], {"keep_last": 2, "keep_every": 4})
CALLS: dict[str, list[Call]] = {
    "anchor": [("anchor", ["main@5"], {})],
    "fold": [("fold", ["main@2", "main@6"], {})],
    "expire": [EXPIRY],
    "gc": [("gc", [], {"grace_s": 0})],
    "fork": [("fork", ["main@3", "exp"], {})],
    "tag": [("tag", ["main@3", "best"], {})],
    "pin": [("pin", ["main@3", "p"], {})],
}
GONE = {1, 2, 3, 5, 6}
DONE: dict[str, Callable[[Store], bool]] = {
    "anchor": lambda store: any(edge["base"] is None for edge in facts(store._objects, "main").edges.values()),
    "fold": lambda store: any(edge["base"] is not None for edge in facts(store._objects, "main").edges.values()),
    "expire": lambda store: facts(store._objects, "main").expired == GONE,
    "gc": lambda store: True,
    "fork": lambda store: store.lines() == ["exp", "main"],
    "tag": lambda store: [tag.version for tag in store.tags()] == ["main@3"],
    "pin": lambda store: [pin.version for pin in store.pins()] == ["main@3"],
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of versions, of which two were written by two writers, the one as residual."""
    place = tmp_path_factory.mktemp("upkeep") / "store"
    with Place(str(place)).create() as store, Place(str(place)).open() as other:
        for number, state in enumerate(STATES):
            if number in (3, 5):
                tensors = {name: (_dtype(array), array.shape) for name, array in state.items()}
                first = store.begin(owner="run", writers=("w0", "w1"), tensors=tensors)
                second = other.join(first.txid, writer="w1", timeout_s=5)
                for nth, (name, array) in enumerate(state.items()):
                    if nth % 2:
                        second.write_residual(name, array.reshape(-1), 0)
                    else:
                        first.write_slice(array, slices.whole(name, *tensors[name]))
                second.seal()
                first.commit(timeout_s=5)
                second.commit(timeout_s=5)
            else:
                with store.begin(owner="run") as transaction:
                    for name, array in state.items():
                        transaction.write(name, array)
    return place


def _dtype(array: np.ndarray[Any, Any]) -> str:
    return "F32" if array.dtype == np.float32 else "BF16"


def look(store: Store, *, must: set[int], may: set[int]) -> None:
    """Require that all versions read back but those that `must` have expired, and those that `may` and have."""
    expired = facts(store._objects, "main").expired
    assert must <= expired <= must | may
    found = {info.version: tensors for info, tensors in store.iter_states()}
    assert set(found) == {f"main@{number}" for number in range(len(STATES)) if number not in expired}
    if "exp" in store.lines():
        found |= {info.version: tensors for info, tensors in store.iter_states("exp", 3)}
    for version, tensors in found.items():
        assert_same(tensors, STATES[int(version.rpartition("@")[2])])
    for number in sorted(expired)[:1]:
        with pytest.raises(NotFoundError, match="expired"):
            store.read(f"main@{number}")


@pytest.mark.parametrize("what", CALLS)
def test_killed_at_every_point(nursery: Nursery, template: Path, scratch: Path, what: str) -> None:
    start = scratch / "start"
    shutil.copytree(template, start)
    if what == "gc":
        Place(str(start)).open().expire(*EXPIRY[1], **EXPIRY[2])
    gone = GONE if what == "gc" else set()
    job = {"do": "upkeep", "calls": CALLS[what], **SMALL}
    shutil.copytree(start, scratch / "recorded")
    points = nursery.finish(**job, **Place(str(scratch / "recorded")).job).points
    # Anchors and folds have nearly all points in common: half of them are struck in the one, half in the other.
    chosen = [*every(strikes(points), 2 if what in ("anchor", "fold") else 1, what == "fold")]
    if what == "gc":
        chosen += [("gc.delete.after", points["gc.delete.after"] // 2)]
    assert len(chosen) >= (1 if what in ("tag", "pin") else 4), points
    for nth, strike in enumerate(chosen):
        place = Place(str(scratch / f"{nth}"))
        shutil.copytree(start, place.url)
        assert nursery.run(**job, **place.job, kill=strike).killed, strike
        look(place.open(), must=gone, may=GONE if what == "expire" else set())
        nursery.finish(**job, **place.job)
        store = place.open()
        assert DONE[what](store), strike
        look(store, must=gone | (GONE if what == "expire" else set()), may=set())
        store.gc(grace_s=0)
        require_no_waste(store)
        report = place.open().verify(deep=nth % 8 == 0)
        assert report.ok, (strike, report.problems)
        assert not facts(store._objects, "main").open, "nothing is under way any more"
        shutil.rmtree(place.url)


def test_killed_at_random_times(nursery: Nursery, template: Path, scratch: Path) -> None:
    """All of it one after the other, again and again, until it gets through."""
    rng = seeded("upkeep")
    calls = [*CALLS["fold"], *CALLS["tag"], *CALLS["fork"], EXPIRY, *CALLS["gc"], ("anchor", ["main@8"], {})]
    job = {"do": "upkeep", "calls": calls, **SMALL}
    kept = (GONE - {3}) | {2}
    place = Place(str(scratch / "timed"))
    shutil.copytree(template, place.url)
    began = time.monotonic()
    nursery.finish(**job, **place.job)
    instants = Instants(rng, time.monotonic() - began)
    struck: list[bool] = []
    for nth in rounds(KILLS // 6, struck, 1):
        place = Place(str(scratch / f"{nth}"))
        shutil.copytree(template, place.url)
        for _ in range(2):
            # A fold of what has expired meanwhile is refused, and all else goes on from where it was.
            again = {**job, "calls": calls if facts(place.open()._objects, "main").expired == set() else calls[1:]}
            child = nursery.start(**again, **place.job)
            time.sleep(instants.next(0.9))
            child.signal(signal.SIGKILL)
            struck.append(child.wait().killed)
            instants.note(struck=struck[-1])
            look(place.open(), must=set(), may=kept)
        again = {**job, "calls": calls if facts(place.open()._objects, "main").expired == set() else calls[1:]}
        nursery.finish(**again, **place.job)
        store = place.open()
        look(store, must=kept - {2}, may={2})
        assert store.verify(deep=True).ok
        store.gc(grace_s=0)
        require_no_waste(store)
