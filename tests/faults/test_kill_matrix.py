"""Every kind of target, from every kind of store, killed at every named point and at random instants, then harmed.

Just after the kill it is old or new wherever it says anything; the plain rerun ends right, writes only chunks that are
wrong, fetches only what these need, and leaves nothing over. By default a part of the matrix; a campaign takes all of
it, ``DCR_OCCURRENCES=3``, and more random instants, ``DCR_KILLS=300``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults import harms
from faults.conftest import Library
from faults.kept import KINDS, Costs, Kept, SideBySide, harm_spool
from faults.processes import Nursery
from faults.scenes import KILLS, OCCURRENCES, SEED, behind_relay, every, seeded, strikes

CAMPAIGN = OCCURRENCES > 1
PLACES = ["directory", "s3", "relay", "relay to s3"]
SERIES = {"in place": "checkpoints"}

Scenario = tuple[str, str, str]
"""Where the store is, the kind of target, and how children bring it further."""


@pytest.fixture
def kept(request: pytest.FixtureRequest, library: Library, scratch: Path) -> Iterator[Kept]:
    """A target of the kind and of the store that the scenario names."""
    where, kind, by = request.param
    series = SERIES.get(kind, "versions")
    place = library.place("s3" if where.endswith("s3") else "directory", series)
    with ExitStack() as stack:
        if where.startswith("relay"):
            place = stack.enter_context(behind_relay(place, scratch / "relay"))
        yield KINDS[kind](place, request.getfixturevalue(series), scratch, by)


@pytest.fixture
def nurse(request: pytest.FixtureRequest, kept: Kept) -> Nursery:
    """Where children of this kind come from."""
    found: Nursery = request.getfixturevalue("torch_nursery" if kept.kind == "engine" else "nursery")
    return found


# From (None: from nothing) and to: in place, several steps, back, other files, other names, another layout.
IN_PLACE = [(None, 2), (1, 2), (0, 3), (2, 1), (0, 1), (3, 4), (4, 5), (5, 6), (6, 0)]
# New, few files change, all do, back, another layout, other files.
BESIDE = [(None, 0), (0, 1), (1, 2), (2, 1), (2, 3), (3, 4)]
IN_MEMORY = [(None, 1), (0, 2), (2, 1)]
WAYS = {"in place": IN_PLACE, "copy": BESIDE}


def _all() -> Iterator[tuple[Scenario, int | None, int]]:
    for where in PLACES:
        for kind, cls in KINDS.items():
            for by in cls.ways_of_bringing:
                if by != "command" or where != "s3":  # its credentials would have to be in the environment
                    for way in WAYS.get(kind, IN_MEMORY):
                        yield (where, kind, by), *way


SOME: list[tuple[Scenario, int | None, int]] = [
    *((("directory", "in place", "pull"), *way) for way in IN_PLACE),
    *((("directory", "copy", "pull"), *way) for way in BESIDE[:4]),
    (("directory", "copy", "command"), 0, 1),
    (("directory", "shared memory", "load"), 2, 1),
    (("directory", "shared memory", "follow"), 0, 2),
    (("directory", "engine", "follow"), 0, 1),
    (("s3", "in place", "pull"), 0, 1),
    (("s3", "copy", "pull"), 0, 1),
    (("s3", "memory", "follow"), 0, 1),
    (("relay", "in place", "follow"), 1, 2),
    (("relay", "copy", "follow"), 0, 1),
    (("relay", "memory", "follow"), 0, 2),
    (("relay to s3", "in place", "follow"), 1, 2),
]


def _step(scenario: Scenario) -> int:
    """Return of how many points one is struck, so that the default stays short; of many ways each takes others."""
    where, kind, by = scenario
    if where == "directory" and by == "pull":
        return 3
    return 12 if where.endswith("s3") and by == "follow" else 4 if kind != "in place" else 3


def _name(value: object) -> str | None:
    return ", ".join(value) if isinstance(value, tuple) else None


@pytest.mark.parametrize(("kept", "start", "goal"), list(_all()) if CAMPAIGN else SOME, indirect=["kept"], ids=_name)
def test_killed_at_every_point(
    nurse: Nursery, kept: Kept, request: pytest.FixtureRequest, start: int | None, goal: int
) -> None:
    scenario = request.node.callspec.params["kept"]
    rng = seeded("points", scenario, start, goal)
    store = kept.place.open()
    costs = Costs(store)
    kept.set_out(start)
    kept.reset()
    points = nurse.finish(**kept.job(goal)).points
    kept.assert_done(goal)
    is_pull = scenario[0] == "directory" and kept.by == "pull"
    chosen = strikes(points, max(OCCURRENCES, 2) if kept.kind == "directory" and is_pull else OCCURRENCES)
    ways = WAYS.get(scenario[1], [])
    way = ways.index((start, goal)) if (start, goal) in ways else 0
    n_compared = 0
    for nth, strike in enumerate(every(chosen, _step(scenario), way)):
        # All harms come up in turn; a campaign strikes without harm, too.
        harm_of_turn = kept.harms[(SEED + way + nth) % len(kept.harms)]
        each = {harms.no_harm, harm_of_turn} if is_pull or CAMPAIGN else {harm_of_turn}
        for harm in each:
            told = f"killed at {strike}, then {harm.__name__}"
            kept.reset()
            assert nurse.run(**kept.job(goal, kill=strike)).killed or strike[1] > 1, strike
            try:
                kept.assert_old_or_new({start, goal})
                kept.harm(harm, rng)
                told += f", {harm_spool(kept, rng)}"
                n_compared += _rerun(nurse, kept, costs, goal)
                if isinstance(kept, SideBySide) and harm not in (harms.document_lost, harms.document_emptied):
                    kept.assert_tidy({goal} if start is None else {start, goal})
            except AssertionError as error:
                raise AssertionError(f"{told}: {error}") from error
    assert n_compared or kept.kind == "engine" or kept.by == "command"


def _rerun(nurse: Nursery, kept: Kept, costs: Costs, goal: int, **options: object) -> bool:
    """Run again, without a kill; return whether what it cost could be compared with what it may."""
    limits, n_said = kept.limits(costs, goal), len(kept.said())
    outcome = nurse.finish(**kept.job(goal, first=None, **options))
    kept.assert_done(goal)
    # What died with its process can be judged by what this one said alone.
    assert kept.outlives or [claim["version"] for claim in kept.said()[n_said:]][-1:] == [f"main@{goal}"]
    counts = kept.counts(outcome)
    if limits is None or counts is None:
        return False
    assert counts[0] <= limits[0], f"{counts[0]} chunks were written, {limits[0]} were wrong"
    assert counts[1] <= limits[1], f"{counts[1]} bytes were fetched, {limits[1]} were missing"
    return True


RANDOM: list[Scenario] = [
    ("directory", "in place", "pull"),
    ("directory", "copy", "pull"),
    ("directory", "shared memory", "follow"),
    ("s3", "in place", "pull"),
    ("s3", "copy", "pull"),
    ("relay", "in place", "follow"),
    ("relay", "copy", "follow"),
    ("relay", "memory", "follow"),
    ("relay to s3", "shared memory", "load"),
]
ALL = list(dict.fromkeys(scenario for scenario, _, _ in _all()))


@pytest.mark.parametrize("kept", ALL if CAMPAIGN else RANDOM, indirect=True, ids=_name)
def test_killed_at_random_instants_on_the_way_between_versions(
    nurse: Nursery, kept: Kept, request: pytest.FixtureRequest
) -> None:
    """Kills, harm and changes of mind follow each other; a run that is left alone ends right each time."""
    rng = seeded("instants", request.node.callspec.params["kept"])
    store = kept.place.open()
    costs = Costs(store)
    kept.reset()
    began = time.monotonic()
    nurse.finish(**kept.job(kept.goals[-1]))
    lasts_s = time.monotonic() - began
    kept.assert_done(kept.goals[-1])
    current, n_started, n_struck, n_compared = kept.goals[-1], 0, 0, 0
    history: list[object] = []
    is_compared = kept.kind != "engine" and kept.by != "command"
    while n_struck < KILLS or (is_compared and not n_compared):
        if kept.only_forward:
            current = rng.choice(kept.goals[:-1])
            kept.set_out(current)
            kept.reset()
            kept.start = None  # what it is told to give up may be in it, too
        else:
            kept.keep_as_old()
        allowed: set[int | None] = {current}
        try:
            for _ in range(rng.choice([1, 1, 2, 3])):
                goal = rng.choice([g for g in kept.goals if g >= current or not kept.only_forward])
                first = {} if kept.kind not in ("memory", "engine") else {"first": f"main@{rng.choice(kept.goals)}"}
                child = nurse.start(**kept.job(goal, watch=True, keep=rng.randrange(3), **first))
                time.sleep(rng.uniform(0.0, 1.2 * lasts_s))
                child.signal(signal.SIGKILL)
                n_struck += child.wait().killed
                n_started += 1
                allowed.add(goal)
                current = max(current, goal)
                kept.assert_old_or_new(allowed)
                harm = rng.choice(kept.harms)
                history.append((goal, harm.__name__))
                kept.harm(harm, rng)
                if rng.random() < 0.3:
                    harm_spool(kept, rng)
            current = rng.choice([g for g in kept.goals if g >= current or not kept.only_forward])
            history.append(current)
            began = time.monotonic()
            n_compared += _rerun(nurse, kept, costs, current, keep=0)
            lasts_s = 0.5 * lasts_s + 0.5 * (time.monotonic() - began)
            if isinstance(kept, SideBySide) and kept.by != "command":
                kept.assert_tidy({current})
        except AssertionError as error:
            raise AssertionError(f"after {history}: {error}") from error
        assert n_started < 100 + 10 * KILLS, "they end before they are killed, or what they cost is never known"
