"""One receiver as the trainer sees it: started, killed and started again, heard, asked for rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcr_store.demo.processes import Child
from dcr_store.demo.receiving import Job
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.sampling import Rollouts, load
from dcr_store.errors import DcrError
from dcr_store.format.names import version_number


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version that a receiver may serve.

    Attributes
    ----------
    previous : str or None
        What it held before.
    served_at_s : float
        On the clock that all processes have in common.
    apply_s : float
        For which its checkpoint was on its way.
    chunks_written : int
    fingerprint : dict
        Of the files and of the tensors loaded from them; see ``policy.fingerprint``.
    n_killed_after : int or None
        If it was killed on the way: how many chunks it had written by then.
    """

    version: str
    root: str
    previous: str | None
    served_at_s: float
    apply_s: float
    chunks_written: int
    fingerprint: dict[str, str]
    n_killed_after: int | None

    @property
    def is_return(self) -> bool:
        """Whether the receiver came from a later version."""
        return self.previous is not None and number_of(self.previous) > number_of(self.version)


def number_of(version: str) -> int:
    """Return the number in ``line@number``."""
    return version_number(version)


class Site:
    """A group with one receiver in it, which is a process.

    Attributes
    ----------
    group : str
    arrivals : dict
        By version, the first of each.
    """

    def __init__(self, group: str, store_url: str, scratch: Path, recipe: Recipe, strike: str | None):
        scratch.mkdir()
        self.group = group
        self.arrivals: dict[str, Arrival] = {}
        self._scratch = scratch
        self._job = Job(store_url, group, self.member, str(scratch), strike, asdict(recipe))
        self._stack = ExitStack()
        self._start(self._job)

    @property
    def member(self) -> str:
        """The receiver's name in the group."""
        return f"{self.group}-1"

    def _start(self, job: Job) -> None:
        child = Child(f"receiver {self.group}", "receiving", [job.to_json()], self._scratch / "stderr")
        self._child = self._stack.enter_context(child)

    def await_version(self, version: str) -> Arrival:
        """Wait until it may serve this version; it then waits to be asked. Others that come before are passed over.

        Raises
        ------
        DcrError
            If it fails.
        """
        killed_after: int | None = None
        while True:
            report = self._child.hear()
            if "struck" in report:
                killed_after = report["struck"]
                self._restart()
                continue
            arrival = _arrival(report, killed_after)
            self.arrivals.setdefault(arrival.version, arrival)
            if arrival.version == version:
                return arrival
            self.ask([])
            self.rollouts(arrival)

    def _restart(self) -> None:
        self._child.wait()
        job = self._job
        self._start(Job(job.store, job.group, job.name, job.scratch, None, job.recipe))

    def ask(self, shares: Sequence[int]) -> None:
        """Have it sample these shares, and go on."""
        self._child.ask(shares=list(shares))

    def rollouts(self, arrival: Arrival) -> dict[int, Rollouts]:
        """Wait for the shares that it was asked for.

        Raises
        ------
        DcrError
            If they are not stamped with the version that arrived.
        """
        found = {}
        for share, path in self._child.hear()["rollouts"].items():
            found[int(share)], stamp = load(Path(path))
            if stamp != (arrival.version, arrival.root):
                raise DcrError(
                    "rollouts of another version", key=path, expected=(arrival.version, arrival.root), found=stamp
                )
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


def _arrival(report: dict[str, Any], killed_after: int | None) -> Arrival:
    applied = report["applied"]
    return Arrival(
        report["version"],
        report["root"],
        applied["previous"],
        report["served_at_s"],
        applied["seconds"],
        applied["chunks_written"],
        report["fingerprint"],
        killed_after,
    )
