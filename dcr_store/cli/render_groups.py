"""Lines, groups and members as plain text for people. Pure; reasons and owners come from strangers and are escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcr_store.cli.output import escape
from dcr_store.cli.render import ROOT_DIGITS, pairs, some, table, when

if TYPE_CHECKING:
    from dcr_store.receive.status import GroupStatus, Status


def status(found: Status) -> str:
    """Return all lines, then all groups, then all members."""
    if not found.lines and not found.groups:
        return "nothing has been published yet, and there are no groups"
    parts = []
    if found.lines:
        rows = [
            (
                line.line,
                line.head or "-",
                "-" if line.created_at is None else when(line.created_at),
                (line.root or "-")[:ROOT_DIGITS],
                "-" if line.open is None else f"{line.open} by {escape(line.owner or '')}",
            )
            for line in found.lines
        ]
        parts.append(table(("line", "head", "created", "root", "open"), rows))
    if found.groups:
        groups = [
            (item.group, item.line, item.active or "-", str(item.lag), item.proposed or "-", item.waits_for)
            for item in found.groups
        ]
        parts.append(table(("group", "line", "active", "lag", "proposed", "waits for"), groups, right="lag"))
    members = [
        (item.group, member.name, member.incarnation or "-", escape(member.doing))
        for item in found.groups
        for member in item.members
    ]
    if members:
        parts.append(table(("group", "member", "incarnation", "doing"), members))
    return "\n\n".join(parts)


def group(found: GroupStatus) -> str:
    """Return everything about one group."""
    late = "never" if found.drop_after_s is None else f"after {found.drop_after_s} s"
    facts = [
        ("group", found.group),
        ("line", f"{found.line}, head {found.head or 'none'}"),
        ("active", f"{found.active}, root {found.root}" if found.active else "none"),
        ("proposed", found.proposed or "none"),
        ("lag", some(found.lag, "version")),
        ("waits for", found.waits_for),
        ("admits", "expected names" if found.admission == "expected" else "every name"),
        ("proposes", "the newest version" if found.proposing == "newest" else "by hand"),
        ("drops", late),
    ]
    rows = [
        (member.name, member.incarnation or "-", member.version or "-", escape(member.doing))
        for member in found.members
    ]
    return pairs(facts) + ("\n\n" + table(("member", "incarnation", "version", "doing"), rows) if rows else "")
