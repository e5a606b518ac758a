"""The fold of a group's log (docs/spec/v1.md §12): one pure function from state and record to state. No I/O.

Refuses a record that is illegal at its place, naming it. The state also says who is still to prepare.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from dcr_store.errors import IntegrityError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields
from dcr_store.format.groups import (
    Admit,
    Create,
    Drop,
    GroupRecord,
    GroupVersion,
    Policy,
    Promote,
    Propose,
    Withdraw,
    reason,
)
from dcr_store.format.names import VERSION, group_record_key

DROPPED_KEPT: Final = 1024
REPLACED: Final = "replaced"
"""Why an incarnation is none any more when another one of its name was admitted."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What became of a name's last earlier incarnation: which it was, why it is none any more, by which record."""

    incarnation: str | None
    reason: str
    seq: int


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group's log folded up to record ``length - 1``.

    Attributes
    ----------
    line : str
        The line that the group follows; empty while the group is not created.
    expected : tuple of str
        Names that may admit themselves, sorted.
    awaited : tuple of str
        Those of the names expected at first that were never admitted nor dropped: nothing is promoted before.
    members : mapping of str to str
        Name and incarnation of each member admitted, by name.
    dropped : mapping of str to Dropped
        For the last 1,024 names that had one: the incarnation that was dropped or replaced last, which never comes
        back. Oldest first. The name may have been admitted since, under another one.
    proposed, active : GroupVersion or None
    highest : int or None
        The highest number ever proposed: members propose by themselves only what comes after.
    """

    group: str
    length: int
    last_sha256: str
    line: str = ""
    policy: Policy = field(default_factory=Policy)
    expected: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    members: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, Dropped] = field(default_factory=dict)
    proposed: GroupVersion | None = None
    active: GroupVersion | None = None
    highest: int | None = None

    def may_admit_itself(self, name: str) -> bool:
        """Whether a receiver of this name may come by itself."""
        return self.policy.admission == "anyone" or name in self.expected

    def lacking(self, acknowledged: Container[str]) -> list[str]:
        """Return the names for which a promotion waits, given those whose `prepared` counts."""
        return sorted({*self.awaited, *(name for name in self.members if name not in acknowledged)})

    def to_json(self, store_sha256: str) -> dict[str, Any]:
        """Return the body of the checkpoint (§12)."""
        return {
            "format": "dcr-group-checkpoint",
            "group": self.group,
            "length": self.length,
            "store_sha256": store_sha256,
            "last_sha256": self.last_sha256,
            "line": self.line,
            "policy": self.policy.to_json(),
            "expected": list(self.expected),
            "awaited": list(self.awaited),
            "members": [{"name": name, "incarnation": found} for name, found in self.members.items()],
            "dropped": [
                {"name": name, "incarnation": item.incarnation, "reason": item.reason, "seq": item.seq}
                for name, item in self.dropped.items()
            ],
            "proposed": None if self.proposed is None else self.proposed.to_json(),
            "active": None if self.active is None else self.active.to_json(),
            "highest": self.highest,
        }

    @classmethod
    def from_json(cls, fields: Fields) -> GroupState:
        """Parse a checkpoint's body; ``FormatError`` names the field."""
        return cls(
            fields.group(),
            fields.count("length", 1),
            fields.hex("last_sha256", 64),
            fields.line(),
            Policy.from_json(fields.object("policy")),
            fields.members("expected"),
            fields.members("awaited"),
            {item.member(): item.hex("incarnation", 16) for item in fields.objects("members")},
            {
                item.member(): Dropped(item.optional_hex("incarnation", 16), reason(item), item.count("seq"))
                for item in fields.objects("dropped")
            },
            GroupVersion.from_json(fields.optional_object("proposed")),
            GroupVersion.from_json(fields.optional_object("active")),
            fields.optional_count("highest"),
        )


class _Require(Protocol):
    def __call__(self, condition: bool, rule: str, expected: object, found: object) -> None: ...


def apply(state: GroupState, record: GroupRecord, data: bytes) -> GroupState:
    """Return `state` advanced by one record, of which `data` are the stored bytes.

    Raises
    ------
    IntegrityError
        If the record is illegal at this place; names its key and the rule.
    """
    key = group_record_key(state.group, state.length)

    def require(condition: bool, rule: str, expected: object, found: object) -> None:
        if not condition:
            raise IntegrityError(
                f"the group record is illegal: {rule}; the log is damaged or was written by a broken client",
                key=key,
                expected=expected,
                found=found,
            )

    require(record.group == state.group, "it belongs to another group", state.group, record.group)
    require(record.seq == state.length, "its number is not its place", state.length, record.seq)
    require(record.prev == state.last_sha256, "the hash chain is broken", state.last_sha256, record.prev)
    advanced = replace(state, length=state.length + 1, last_sha256=canonical.sha256(data))
    if isinstance(record, Create):
        require(state.length == 0, "the group exists already", "record 0", record.seq)
        expected = tuple(sorted(record.expected))
        return replace(advanced, line=record.line, policy=record.policy, expected=expected, awaited=expected)
    require(state.length > 0, "the group is not created", "create", record.kind)
    if isinstance(record, Admit):
        return _admit(state, advanced, record, require)
    if isinstance(record, Drop):
        known = record.name in state.members or record.name in state.awaited
        require(known, "it drops nobody", f"one of {[*state.members, *state.awaited]}", record.name)
        found = state.members.get(record.name)
        require(record.incarnation == found, "it drops another incarnation", found, record.incarnation)
        return replace(
            advanced,
            members={name: item for name, item in state.members.items() if name != record.name},
            awaited=tuple(name for name in state.awaited if name != record.name),
            dropped=_with(state.dropped, record.name, Dropped(record.incarnation, record.reason, record.seq)),
        )
    proposed, active = state.proposed, state.active
    if isinstance(record, Propose):
        require(proposed is None, "a proposal stands", "none", proposed and proposed.version)
        match = VERSION.fullmatch(record.new.version)
        require(
            match is not None and match[1] == state.line,
            "it proposes a version of another line",
            state.line,
            record.new.version,
        )
        is_new = active is None or active.ref != record.new
        require(is_new, "it proposes the active version", "another one", record.new.version)
        new = GroupVersion(record.new.version, record.new.root, record.seq)
        return replace(advanced, proposed=new, highest=max(new.number, -1 if state.highest is None else state.highest))
    require(isinstance(record, Withdraw | Promote), "its kind has no rule", "create … promote", record.kind)
    assert isinstance(record, Withdraw | Promote)
    require(proposed is not None, "no proposal stands", "a proposal", None)
    assert proposed is not None
    require(record.new == proposed.ref, "the proposal is another one", proposed.ref, record.new)
    if isinstance(record, Withdraw):
        return replace(advanced, proposed=None)
    old = None if active is None else active.ref
    require(record.old == old, "the active version is another one", old, record.old)
    require(not state.awaited, "expected members have not been admitted yet", "none", list(state.awaited))
    require(len(state.members) > 0, "the group has no members", "at least one", 0)
    found_acks = sorted((ack.name, ack.incarnation) for ack in record.acks)
    members = sorted(state.members.items())
    require(found_acks == members, "its acknowledgements are not those of the members admitted", members, found_acks)
    return replace(advanced, proposed=None, active=proposed)


def _admit(state: GroupState, advanced: GroupState, record: Admit, require: _Require) -> GroupState:
    name, incarnation = record.name, record.incarnation
    if incarnation is None:
        require(name not in state.expected, "the name is expected already", "a new one", name)
        return replace(advanced, expected=tuple(sorted((*state.expected, name))))
    replaced, last = state.members.get(name), state.dropped.get(name)
    require(replaced != incarnation, "it is admitted already", "another incarnation", incarnation)
    fresh = last is None or last.incarnation != incarnation
    require(fresh, "this incarnation was dropped or replaced", "another incarnation", incarnation)
    require(state.may_admit_itself(name), "the name is not expected", f"one of {list(state.expected)}", name)
    return replace(
        advanced,
        members=dict(sorted({**state.members, name: incarnation}.items())),
        awaited=tuple(other for other in state.awaited if other != name),
        dropped=(
            state.dropped if replaced is None else _with(state.dropped, name, Dropped(replaced, REPLACED, record.seq))
        ),
    )


def _with(dropped: Mapping[str, Dropped], name: str, item: Dropped) -> dict[str, Dropped]:
    others = [(other, found) for other, found in dropped.items() if other != name]
    return dict([*others, (name, item)][-DROPPED_KEPT:])
