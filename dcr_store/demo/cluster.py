"""Two receivers in two groups, the second one behind a relay, and what is done to them.

Rollouts do not depend on who samples them, so a receiver that is away is replaced by the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dcr_store.demo.drills import Drill, Plan
from dcr_store.demo.processes import Child
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.sampling import N_SHARES, Rollouts, join
from dcr_store.demo.site import Site
from dcr_store.errors import ConflictError
from dcr_store.store import Store
from dcr_store.versions.info import VersionInfo

LINE: Final = "main"
DIRECT: Final = "eu"
RELAYED: Final = "us"


class Cluster:
    """The processes, and the groups in the store; a context manager.

    Parameters
    ----------
    store, store_url : Store, str
    head : VersionInfo or None
        The version to start from, if there is one.

    Attributes
    ----------
    sites : list of Site
    drills : list of Drill
        What was done so far.
    """

    def __init__(
        self,
        store: Store,
        store_url: str,
        head: VersionInfo | None,
        plan: Plan,
        scratch: Path,
        recipe: Recipe,
        told: Callable[[str], None],
    ) -> None:
        self._store, self._store_url, self._told = store, store_url, told
        self._scratch = scratch
        self._away: Site | None = None
        self._reconnected: Site | None = None
        self.drills: list[Drill] = []
        for group in (DIRECT, RELAYED):
            settle(store, group, head)
        strike = None if plan.kill is None else f"{LINE}@{plan.kill}"
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._relay, self._relay_url = self._start_relay(0)
            stack.enter_context(self._relay)
            self.sites = [
                stack.enter_context(Site(DIRECT, store_url, scratch / DIRECT, recipe, strike)),
                stack.enter_context(Site(RELAYED, self._relay_url, scratch / RELAYED, recipe, None)),
            ]
            self._stack = stack.pop_all()

    def _start_relay(self, port: int) -> tuple[Child, str]:
        arguments = [self._store_url, str(self._scratch / "cache"), str(port)]
        relay = Child("the relay", "relaying", arguments, self._scratch / "relay-stderr")
        with ExitStack() as stack:
            stack.enter_context(relay)
            url: str = relay.hear()["url"]
            stack.pop_all()
        return relay, url

    def cut(self, version: str) -> None:
        """Kill the relay, before `version` is published: from now on its receiver reaches nothing."""
        self._relay.kill()
        self._away = self.sites[1]
        self.drills.append(
            Drill(version, RELAYED, f"cut off before this version: its relay is killed; {DIRECT} samples for both")
        )

    def reconnect(self) -> None:
        """Start the relay again, at the same address, after the newest version was published."""
        self._relay, _ = self._start_relay(int(self._relay_url.rpartition(":")[2]))
        self._stack.enter_context(self._relay)
        self._away, self._reconnected = None, self._away

    def roll_out(self, version: str) -> Rollouts:
        """Return samples of the version, promoted, of all receivers that are there."""
        present = [site for site in self.sites if site is not self._away]
        arrivals = {}
        for nth, site in enumerate(present):
            self._told(f"{site.group} prepares, promotes and applies {version}")
            arrivals[site] = site.await_version(version)
            site.ask(range(nth, N_SHARES, len(present)))
            self._note(site, version)
        self._told(f"rollouts are sampled from {version}")
        shares: dict[int, Rollouts] = {}
        for site, arrival in arrivals.items():
            shares |= site.rollouts(arrival)
        return join(shares[share] for share in range(N_SHARES))

    def _note(self, site: Site, version: str) -> None:
        """Write down what was special about an arrival."""
        arrival = site.arrivals[version]
        if arrival.n_killed_after is not None:
            self.drills.append(
                Drill(
                    version,
                    site.group,
                    f"killed (SIGKILL) while it applied this version, chunks written: {arrival.n_killed_after}; "
                    f"started again, it finished alone, chunks written: {arrival.chunks_written}",
                )
            )
        if site is self._reconnected:
            self._reconnected = None
            self.drills.append(
                Drill(version, RELAYED, f"reached again: caught up from {arrival.previous} in one go, by itself")
            )

    def visit(self, versions: Iterable[str]) -> None:
        """Bring each receiver back to the versions that it jumped over, by hand, and then to the last one again."""
        every = list(versions)
        for site in self.sites:
            missed = [version for version in reversed(every) if version not in site.arrivals]
            if not missed:
                continue
            group = self._store.group(site.group)
            for version in [*missed, every[-1]]:
                self._told(f"{site.group} is proposed {version} by hand")
                group.propose(version)
                arrival = site.await_version(version)
                site.ask([])
                site.rollouts(arrival)
            self.drills.append(
                Drill(every[-1], site.group, f"by hand back to {', '.join(missed)} and forth, to compare them")
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def settle(store: Store, group: str, head: VersionInfo | None) -> None:
    """Have the group, with one receiver, at `head` as soon as that has come; whatever an earlier run left."""
    try:
        store.create_group(group, [f"{group}-1"], line=LINE)
        return
    except ConflictError:
        found = store.group(group)
    status = found.status()
    if status.proposed is not None:
        status = found.withdraw(reason="left by an earlier demo")
    if head is not None and status.active != head.version:
        found.propose(head.version)
