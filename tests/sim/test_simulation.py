"""The deterministic simulation: many seeds break no invariant; each safety rule that is taken out, some seed breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from sim import campaign
from sim.removals import REMOVALS

N_PROCESSES = len(os.sched_getaffinity(0))

# What has to be met in a run of the usual length; in shorter ones not all of it is.
FAULTS = (
    "crash",
    "sleep",
    "power",
    "power at a write",
    "refused",
    "lost",
    "late",
    "landed late",
    "in flight",
    "cut",
    "lost, then cut",
    "lag",
    "full",
    "short",
    "torn",
    "pages reverted",
    "rot",
)
CONSEQUENCES = (
    "resumed",
    "fenced",
    "aborted",
    "read",
    "files shared",
    "outcome unknown",
    "committed again",
    "chunks healed",
    "bytes from the spool",
    "target locked",
    "promoted",
    "member fenced",
    "all applied",
    "operator: drop",
    "operator: withdraw",
)
# Of several writers: these are in one seed of twelve.
JOINT = (
    "gone",
    "twin",
    "joined again",
    "cut otherwise",
    "ended for all",
    "given up for one who left",
    "aborted by a rank",
    "published alone",
    "waited in vain",
    "refused by the committer",
    "other bits refused",
    "two seals refused",
    "another seal counted",
    "sealed again",
    "slices healed",
    "slices read",
    "ownership unchanged",
)
# Of histories: these are in one seed of thirty-odd.
HISTORY = (
    "forked",
    "history read",
    "history walked",
    "versions expired",
    "told that it has expired",
    "about to expire",
    "objects collected",
    "objects that wait",
    "maintainer refused",
    "maintainer fenced",
    "no path to fold",
)
N_SEEDS = 20_000


def test_no_seed_breaks_an_invariant(request: pytest.FixtureRequest) -> None:
    n_seeds, first_seed = request.config.getoption("--seeds"), request.config.getoption("--first-seed")
    report = campaign.run(first_seed, n_seeds, N_PROCESSES)
    print(report.to_text())
    assert report.n_seeds == n_seeds
    assert report.failures == []
    if n_seeds >= 1000:
        expected = (*FAULTS, *CONSEQUENCES, *((*JOINT, *HISTORY) if n_seeds >= N_SEEDS else ()))
        missed = [name for name in expected if not report.counters.get(name)]
        assert missed == [], "kinds of faults, and of what they lead to, that no seed has met"


@pytest.fixture(scope="module")
def without() -> dict[str, dict[str, Any]]:
    """What was found with each safety rule taken out, alone: all by one process, which takes long to start."""
    command = [sys.executable, campaign.__file__, "--without=each", "--seeds=10000"]
    found: dict[str, dict[str, Any]] = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    return found


@pytest.mark.parametrize("rule", list(REMOVALS))
def test_without_a_safety_rule_an_invariant_breaks(without: dict[str, dict[str, Any]], rule: str) -> None:
    print(without[rule]["n_seeds"], without[rule]["failures"])
    assert without[rule]["failures"], f"10,000 seeds without the rule {rule!r}, and nothing was found"


def test_a_seed_repeats_in_every_process() -> None:
    """Whatever ran before it, and however Python hashes."""

    def trace(first_seed: int, n_seeds: int, hash_seed: str) -> list[str]:
        done = subprocess.run(
            [
                sys.executable,
                campaign.__file__,
                "--trace",
                "--json",
                f"--first-seed={first_seed}",
                f"--seeds={n_seeds}",
            ],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.splitlines()[:-1]

    alone, after_others = trace(9, 3, "1"), trace(0, 12, "2")
    assert len(alone) > 100
    assert after_others[-len(alone) :] == alone
