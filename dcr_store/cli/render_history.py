"""Text of the verbs that keep a history. Pure: values in, lines out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dcr_store.cli.output import escape
from dcr_store.cli.render import first_line, nbytes, some, table
from dcr_store.wording import first_of

if TYPE_CHECKING:
    from dcr_store.format.marks import Named
    from dcr_store.maintain.collect import Collected
    from dcr_store.maintain.edges import EdgeInfo
    from dcr_store.maintain.retention import Expiry


def edge(made: EdgeInfo) -> str:
    """Return what ``anchor`` or ``fold`` stored."""
    what = "stored whole" if made.base is None else f"stored as one delta from {made.base}"
    return f"{made.version} is {what}: {nbytes(made.nbytes)}"


def expiry(found: Expiry, *, is_dry: bool) -> str:
    """Return what expired, or would."""
    have = "would expire" if is_dry else "has expired" if len(found.versions) == 1 else "have expired"
    lines = [f"{some(len(found.versions), 'version')} of {found.line} {have}"]
    if found.versions:
        stored, folded = ("would store", "would fold") if is_dry else ("stored", "folded")
        lines[0] += f": {first_of(found.versions, 10)}"
        lines += [f"{stored} whole first: {name}" for name in found.anchors]
        lines += [f"{folded} first: {start} to {goal}" for start, goal in found.folds]
        lines.append(f"gc {'would be able to delete' if is_dry else 'may delete'} {nbytes(found.freed_nbytes)}")
    lines += [escape(f"kept: {name}, {why}") for name, why in found.kept_for.items()]
    return "\n".join(lines)


def collected(found: Collected, *, is_dry: bool) -> str:
    """Return what was deleted, or would be."""
    lines = [f"{'would delete' if is_dry else 'deleted'} {some(len(found.keys), 'object')}, {nbytes(found.nbytes)}"]
    if found.n_waiting:
        waiting = f"{some(found.n_waiting, 'object')}, {nbytes(found.waiting_nbytes)},"
        lines.append(f"{waiting} {'waits' if found.n_waiting == 1 else 'wait'} for the end of the grace period")
    if found.unknown:
        left = "was left alone" if len(found.unknown) == 1 else "were left alone"
        lines.append(f"{some(len(found.unknown), 'object')} of no transaction that the logs know {left}")
    return "\n".join(lines)


def named(item: Named) -> str:
    """Return a tag or pin that was put."""
    until = "" if item.until is None else f" until {item.until}"
    return f"{item.version} {item.root[:16]} is {'tagged' if item.kind == 'tag' else 'pinned as'} {item.name}{until}"


def names(found: Sequence[Named]) -> str:
    """Return tags or pins, one on each line."""
    if not found:
        return "none"
    ends = [] if found[0].kind == "tag" else ["until"]  # tags have none
    header = ["name", "version", "root", *ends, "message"]
    rows = [
        [item.name, item.version, item.root[:16], *([item.until or "-"] if ends else []), first_line(item.message)]
        for item in found
    ]
    return table(header, rows)
