"""What the demonstration found, as a table for people and as JSON, and the commands that go on from there. Pure."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One version: what it took to publish, what the follower made of it.

    Attributes
    ----------
    publish_s : float or None
        From begin to commit; None for a version of an earlier run.
    equal : bool
        Whether the follower's files and its loaded tensors are, bit for bit, what the trainer saved.
    """

    version: str
    step: int
    reward: float
    changed: int
    elements: int
    nbytes: int
    checkpoint_nbytes: int
    publish_s: float | None
    pull_s: float
    equal: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run."""

    store: str
    rows: tuple[Row, ...]
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether all versions arrived bit for bit."""
        return all(row.equal for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form: what the table says, in full, and the commands."""
        return {
            "store": self.store,
            "seconds": self.seconds,
            "equal": self.equal,
            "versions": [asdict(row) for row in self.rows],
            "next": [command for command, _ in next_commands(self)],
        }


def table(outcome: Outcome) -> Table:
    """Return one line for each version."""
    from rich.table import Table

    # At most 79 columns, which is what a pipe gets.
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("version", "reward", "changed", "rate", "stored", "of full", "publish", "pull", "bits"):
        made.add_column(title, justify="left" if title == "version" else "right", no_wrap=True)
    for row in outcome.rows:
        made.add_row(
            row.version,
            f"{row.reward:.3f}",
            f"{row.changed:,}",
            f"{row.changed / row.elements:.1%}",
            f"{row.nbytes / 1024:,.0f} KiB",
            f"{row.nbytes / row.checkpoint_nbytes:.1%}",
            "-" if row.publish_s is None else f"{row.publish_s:.2f} s",
            f"{row.pull_s:.2f} s",
            "equal" if row.equal else "DIFFER",
        )
    return made


def introduction(outcome: Outcome) -> str:
    """Return what the table is about."""
    last = outcome.rows[-1]
    return (
        f"A Llama of {last.elements:,} BF16 weights, {last.checkpoint_nbytes / 1024:,.0f} KiB as a file, learns to "
        "go on counting: 03 10 17 -> 24 31 38 45. Another process pulls each version in place, loads it and samples; "
        "the next step learns from these samples. The reward is their share of right terms."
    )


def next_commands(outcome: Outcome) -> list[tuple[str, str]]:
    """Return commands to explore the store, each with a remark."""
    dcr, store = _dcr(), shlex.quote(outcome.store)
    last = outcome.rows[-1].version
    before = outcome.rows[-2].version if len(outcome.rows) > 1 else last
    return [
        (f"{dcr} log {store}", ""),
        (f"{dcr} diff {store} {before} {last}", ""),
        (f"{dcr} checkout {store} {before} earlier", "a checkpoint for any engine"),
        (
            f"rm -rf policy; timeout -s KILL 0.5 {dcr} pull {store} policy",
            "killed on its way",
        ),
        (f"{dcr} pull {store} policy", "goes on from there"),
        (f"{dcr} verify {store} {last} --against policy", "bit for bit"),
        (f"{dcr} verify {store} --deep", "replays every version"),
    ]


def _dcr() -> str:
    """Return how to call ``dcr`` of this environment in the user's shell."""
    beside = Path(sys.executable).with_name("dcr")
    found = shutil.which("dcr")
    if found and Path(found) == beside:
        return "dcr"
    if not beside.is_file():
        return f"{shlex.quote(sys.executable)} -m dcr_store"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
