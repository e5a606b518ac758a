"""What the demonstration found, as a table for people and as JSON, and the commands that go on from there. Pure."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dcr_store.demo.drills import Drill

if TYPE_CHECKING:
    from rich.table import Table

# Not for ever: the pull before it may have failed.
_WHEN_BEGUN: Final = "for i in $(seq 999); do test -s policy/model.safetensors && break; sleep 0.01; done"


@dataclass(frozen=True, slots=True)
class Received:
    """One version at one receiver.

    Attributes
    ----------
    promote_s : float or None
        From the commit until it may be served: prepared, promoted, applied. None for a version of an earlier run, and
        where the receiver jumped over it at first.
    apply_s : float
        For which the receiver's checkpoint was on its way.
    jumped_over : bool
        Whether the receiver came to it only later, by hand.
    equal : bool
        Whether the files and the tensors loaded from them are, bit for bit, what the trainer saved.
    """

    promote_s: float | None
    apply_s: float
    jumped_over: bool
    equal: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One version: how it learns, what it took to publish, what the receivers made of it.

    Attributes
    ----------
    reward, reference_reward : float
        Of the samples of this version, and of the reference run's policy after the same step.
    loss, reference_loss : float or None
        Of the step that made it; None for the first.
    reference_equal : bool
        Whether the reference run has the same files and tensors, bit for bit.
    publish_s : float or None
        From begin to commit; None for a version of an earlier run.
    receivers : mapping of str to Received
    """

    version: str
    step: int
    reward: float
    loss: float | None
    reference_reward: float
    reference_loss: float | None
    reference_equal: bool
    changed: int
    elements: int
    nbytes: int
    checkpoint_nbytes: int
    publish_s: float | None
    receivers: Mapping[str, Received]

    @property
    def curve_equal(self) -> bool:
        """Whether the reference run has the same numbers, and the same weights."""
        numbers = (self.reward, self.loss) == (self.reference_reward, self.reference_loss)
        return numbers and self.reference_equal

    @property
    def bits_equal(self) -> bool:
        """Whether the version arrived bit for bit everywhere."""
        return all(received.equal for received in self.receivers.values())


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole run."""

    store: str
    rows: tuple[Row, ...]
    drills: tuple[Drill, ...]
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether all versions arrived bit for bit and all numbers are those of the reference run."""
        return all(row.curve_equal and row.bits_equal for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form: what the table says, in full, and the commands."""
        return {
            "store": self.store,
            "seconds": self.seconds,
            "equal": self.equal,
            "versions": [
                {**asdict(row), "curve_equal": row.curve_equal, "bits_equal": row.bits_equal} for row in self.rows
            ],
            "drills": [asdict(drill) for drill in self.drills],
            "next": [command for command, _ in next_commands(self)],
        }


def table(outcome: Outcome) -> Table:
    """Return one line for each version."""
    from rich.table import Table

    # At most 79 columns, which is what a pipe gets.
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    sites = tuple(outcome.rows[0].receivers)
    titles = ("version", "reward", "dense", "curve", "changed", "delta\nKiB", "ratio", "publish\ns")
    for title in (*titles, *(f"{site}\ns" for site in sites), "bits"):
        made.add_column(title, justify="left" if title == "version" else "right", no_wrap=True)
    for row in outcome.rows:
        made.add_row(
            row.version,
            f"{row.reward:.4f}",
            f"{row.reference_reward:.4f}",
            _verdict(row.curve_equal),
            f"{row.changed:,}",
            f"{row.nbytes / 1024:,.0f}",
            f"{row.nbytes / row.checkpoint_nbytes:.1%}",
            _seconds(row.publish_s),
            *("later" if item.jumped_over else _seconds(item.promote_s) for item in row.receivers.values()),
            _verdict(row.bits_equal),
        )
    return made


def drill_table(outcome: Outcome) -> Table:
    """Return what was done to the receivers, and what came of it."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2, 0, 0))
    for drill in outcome.drills:
        made.add_row(drill.version, drill.receiver, drill.what)
    return made


def _verdict(equal: bool) -> str:
    return "equal" if equal else "DIFFER"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def introduction(outcome: Outcome) -> str:
    """Return what the table is about."""
    last = outcome.rows[-1]
    first_site, second_site = last.receivers
    return (
        f"A Llama of {last.elements:,} BF16 weights, {last.checkpoint_nbytes / 1024:,.0f} KiB as a file, learns to "
        "go on counting: 03 10 17 -> 24 31 38 45. Two processes, each in a group of its own, bring each version into "
        "their checkpoint in place, load it and sample; the next step learns from these samples. "
        f"{second_site} is behind a relay. Reward: the share of right terms. Dense: the same of a run without a "
        "store that loads the full checkpoint each step; the curves are equal if rewards, losses and weights are. "
        f"{first_site}, {second_site}: from the commit until the version is promoted and may be served. Bits: files "
        "and tensors of both against the trainer's."
    )


def verdict(outcome: Outcome) -> str:
    """Return the whole in a sentence."""
    n_versions, n_sites = len(outcome.rows), len(outcome.rows[0].receivers)
    curve = sum(not row.curve_equal for row in outcome.rows)
    bits = sum(not row.bits_equal for row in outcome.rows)
    if outcome.equal:
        return (
            f"All {n_versions} versions equal in {n_sites} receivers, bit for bit; the training curve equals the dense "
            "reference run's, number for number."
        )
    return f"DIFFERENT: {bits} of {n_versions} versions in the receivers, {curve} points of the training curve."


def next_commands(outcome: Outcome) -> list[tuple[str, str]]:
    """Return commands to explore the store, each with a remark."""
    dcr, store = _dcr(), shlex.quote(outcome.store)
    last = outcome.rows[-1].version
    before = outcome.rows[-2].version if len(outcome.rows) > 1 else last
    return [
        (f"{dcr} status {store}", ""),
        *((f"{dcr} group {store} show {site}", "") for site in outcome.rows[-1].receivers),
        (f"{dcr} log {store}", ""),
        (f"{dcr} diff {store} {before} {last}", ""),
        (f"{dcr} checkout {store} {before} earlier", "a checkpoint for any engine"),
        (f"rm -rf policy; {dcr} pull {store} policy & {_WHEN_BEGUN}; kill -9 $!", "killed on its way"),
        (f"{dcr} follow {store} policy --once", "goes on from there"),
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
