"""Where everybody is: heads of lines, groups, their members and what each is doing. Frozen values with ``to_json``.

Reads only. What a member is doing is what its acknowledgements say; nothing tells whether its process is alive.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dcr_store.format.names import version_name
from dcr_store.log.acks import AckReader
from dcr_store.log.group import group_names
from dcr_store.log.group_progress import Progress, read_progress
from dcr_store.versions.catalog import Catalog


@dataclass(frozen=True, slots=True)
class LineStatus:
    """One line.

    Attributes
    ----------
    head, root : str or None
        The newest version; None while there is none.
    open : str or None
        The version that is being published, and `owner` who publishes it.
    """

    line: str
    head: str | None
    root: str | None
    created_at: str | None
    open: str | None
    owner: str | None


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One name of a group.

    Attributes
    ----------
    incarnation : str or None
        The one admitted; None for who is no member.
    version : str or None
        The active version, if the member has applied it.
    doing : str
        What comes next for it, in words.
    """

    name: str
    incarnation: str | None
    version: str | None
    doing: str


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One group.

    Attributes
    ----------
    head, active, proposed : str or None
        The line's newest version, the group's active one, the one that stands proposed.
    root : str or None
        State root of the active version.
    lag : int
        How many versions `active` is behind `head`.
    waits_for : str
        What has to happen before the next promotion.
    """

    group: str
    line: str
    head: str | None
    active: str | None
    root: str | None
    proposed: str | None
    lag: int
    waits_for: str
    admission: str
    proposing: str
    drop_after_s: int | None
    members: list[MemberStatus]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Status:
    """All lines and groups of a store."""

    lines: list[LineStatus]
    groups: list[GroupStatus]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def status(catalog: Catalog) -> Status:
    """Return where all lines and groups are."""
    groups = [group_status(catalog, name) for name in group_names(catalog.objects)]
    return Status([_line_status(catalog, name) for name in catalog.lines()], groups)


def _line_status(catalog: Catalog, line: str) -> LineStatus:
    state = catalog.log(line).refresh()
    head, pending = state.head, state.open
    return LineStatus(
        line,
        None if head is None else version_name(line, head.version),
        None if head is None else head.root,
        None if head is None else head.created_at,
        None if pending is None else version_name(line, pending.version),
        None if pending is None else pending.owner,
    )


def group_status(catalog: Catalog, group: str) -> GroupStatus:
    """Return where a group is; ``NotFoundError`` if there is none of this name."""
    log = catalog.group_log(group)
    progress = read_progress(log, AckReader(catalog.objects, group))
    state = progress.state
    head = catalog.log(state.line).refresh().head
    active, proposed, policy = state.active, state.proposed, state.policy
    n_versions = 0 if head is None else head.version + 1
    return GroupStatus(
        group,
        state.line,
        None if head is None else version_name(state.line, head.version),
        None if active is None else active.version,
        None if active is None else active.root,
        None if proposed is None else proposed.version,
        max(0, n_versions - (0 if active is None else active.number + 1)),
        progress.waits_for(None if head is None else head.version),
        policy.admission,
        policy.proposing,
        policy.drop_after_s,
        _members(progress),
    )


def _members(progress: Progress) -> list[MemberStatus]:
    state = progress.state
    result = {}
    for name, incarnation in state.members.items():
        at_active = name in progress.applied and state.active is not None
        doing = []
        if state.active is not None:
            doing.append(f"{'serves' if at_active else 'applies'} {state.active.version}")
        if state.proposed is not None:
            doing.append(f"{'has prepared' if name in progress.prepared else 'prepares'} {state.proposed.version}")
        version = state.active.version if at_active and state.active is not None else None
        result[name] = MemberStatus(name, incarnation, version, ", ".join(doing) or "waits for a version")
    for name in state.expected:
        awaited = "has not come yet" if name in state.awaited else "may come"
        result.setdefault(name, MemberStatus(name, None, None, awaited))
    for name, item in state.dropped.items():
        if name not in state.members:
            result[name] = MemberStatus(name, None, None, f"was dropped: {item.reason}")
    return [result[name] for name in sorted(result)]
