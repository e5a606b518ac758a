"""Writers of one transaction, each a child: a line that they publish to, and what has to hold of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ranks
from faults.processes import Child, Nursery, Outcome
from faults.scenes import SMALL, Place, Strike, assert_nothing_twice, journaled_partitions, roots

from dcr_store.store import Store

N_RANKS = 4
N_STATES = 4


@functools.cache
def states() -> list[ranks.State]:
    return ranks.states_of(N_STATES)


@functools.cache
def expected_roots() -> list[str]:
    """What one process makes of each state; a root knows nothing of what came before."""
    return ranks.publish_alone("memory://kill-joint-alone", states(), chunk_elements=256)


class Ranks:
    """A line that `N_RANKS` children write to together, with baselines in a directory or in memory."""

    def __init__(
        self,
        nursery: Nursery,
        place: Place,
        line: str = "main",
        *,
        announced: bool = True,
        baseline: Path | None = None,
    ) -> None:
        self.baseline = baseline
        self.nursery, self.place, self.line, self.announced = nursery, place, line, announced
        self.published: list[int] = []
        self.n_adopted = 0
        self.n_looks = 0

    def start(self, rank: int, state: int, **options: Any) -> Child:
        job = {
            "do": "slices",
            "line": self.line,
            "rank": rank,
            "n_ranks": N_RANKS,
            "number": len(self.published),
            "state": state,
            "owner": "run",
            "message": f"state {state}",
            "announced": self.announced,
            "baseline": None if self.baseline is None else str(self.baseline),
            **self.place.job,
            **SMALL,
        }
        return self.nursery.start(**{**job, **options})

    def start_all(self, state: int, but: Iterable[int] = (), **options: Any) -> dict[int, Child]:
        return {rank: self.start(rank, state, **options) for rank in range(N_RANKS) if rank not in set(but)}

    def publish(self, state: int) -> dict[int, Outcome]:
        """Publish undisturbed."""
        return self.finish(state, self.start_all(state))

    def finish(self, state: int, children: Mapping[int, Child]) -> dict[int, Outcome]:
        """Wait for all writers; require that all tell of the version, and that it is right."""
        outcomes = {rank: child.wait() for rank, child in children.items()}
        for rank, outcome in outcomes.items():
            assert outcome.ok, (rank, outcome, self.nursery.errors())
            assert outcome.told["version"] == f"{self.line}@{len(self.published)}"
            assert outcome.told["root"] == expected_roots()[state]
        self.published.append(state)
        self.look()
        return outcomes

    def look(self) -> None:
        """Require the roots of all versions, and the bits of the last; of a server's store, each third time."""
        store = self.place.open()
        assert roots(store, self.line) == [expected_roots()[state] for state in self.published]
        self.n_looks += 1
        if self.published and (not self.place.is_slow or self.n_looks % 3 == 0):
            ranks.require_state(store, self.line, states()[self.published[-1]])

    def known(self) -> tuple[Store, dict[Any, set[str]]]:
        store = self.place.open()
        return store, journaled_partitions(store, self.line)

    def killed(self, state: int, rank: int, strike: Strike) -> bool:
        """Let one writer be killed at a point, take its place, and finish; return whether the kill struck."""
        children = self.start_all(state, but=[rank])
        struck = self.start(rank, state, kill=strike).wait()
        assert struck.killed or struck.ok, struck
        store, known = self.known()
        before = len(roots(store, self.line))
        assert before in (len(self.published), len(self.published) + 1)
        children[rank] = self.start(rank, state)
        outcomes = self.finish(state, children)
        assert_nothing_twice(store, self.line, known)
        for outcome in outcomes.values():
            assert "log.abort.after" not in outcome.points, "what was begun was thrown away"
        if before < len(self.published) and struck.killed:
            prefix = f"versions/{self.line}/{before:012d}-"
            self.n_adopted += any(p.startswith(prefix) and p.endswith(f"/data/r{rank}") for p, _, _ in known)
        return struck.killed

    def check_all(self) -> None:
        """Require that every version is what was published, and that the store is whole."""
        store = self.place.open()
        for number, state in enumerate(self.published):
            ranks.require_state(store, f"{self.line}@{number}", states()[state])
        report = store.verify(deep=True)
        assert report.ok, report.problems


def other(state: int, nth: int) -> int:
    """Another state than that one: each in its turn."""
    return (state + 1 + nth % (N_STATES - 1)) % N_STATES
