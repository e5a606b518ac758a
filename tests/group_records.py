"""Group records one after another, without members: what tests of the group log are written with."""

from __future__ import annotations

from typing import Any

from log_records import STORE_SHA256, TIME, digits

from dcr_store.format.groups import (
    AckRef,
    Admit,
    Create,
    Drop,
    Policy,
    Promote,
    Propose,
    VersionRoot,
    Withdraw,
)
from dcr_store.log import group_fold
from dcr_store.log.group_fold import GroupState


def version(number: int, line: str = "main") -> VersionRoot:
    return VersionRoot(f"{line}@{number}", digits(f"{line}@{number}", 64))


def incarnation(name: str, start: int = 0) -> str:
    return digits(f"{name} {start}", 16)


def ack(name: str, start: int = 0) -> AckRef:
    return AckRef(name, incarnation(name, start), digits(f"ack of {name}", 64))


def common(state: GroupState) -> dict[str, Any]:
    return {
        "group": state.group,
        "seq": state.length,
        "id": digits(f"id{state.length}", 32),
        "prev": state.last_sha256,
        "created_at": TIME,
    }


def create(state: GroupState, *expected: str, **changed: Any) -> Create:
    fields = {"line": "main", "expected": expected or ("a", "b"), "policy": Policy()}
    return Create(**{**common(state), **fields, **changed})


def admit(state: GroupState, name: str = "a", start: int | None = 0, **changed: Any) -> Admit:
    found = None if start is None else incarnation(name, start)
    return Admit(**{**common(state), "name": name, "incarnation": found, **changed})


def drop(state: GroupState, name: str = "a", **changed: Any) -> Drop:
    fields = {"name": name, "incarnation": state.members.get(name), "reason": "gone"}
    return Drop(**{**common(state), **fields, **changed})


def propose(state: GroupState, number: int = 0, **changed: Any) -> Propose:
    return Propose(**{**common(state), "new": version(number), **changed})


def withdraw(state: GroupState, **changed: Any) -> Withdraw:
    new = version(0) if state.proposed is None else state.proposed.ref
    return Withdraw(**{**common(state), "new": new, "reason": "bad", **changed})


def promote(state: GroupState, **changed: Any) -> Promote:
    fields = {
        "old": None if state.active is None else state.active.ref,
        "new": version(0) if state.proposed is None else state.proposed.ref,
        "acks": tuple(AckRef(name, found, digits(name, 64)) for name, found in state.members.items()),
    }
    return Promote(**{**common(state), **fields, **changed})


def empty(group: str = "eu") -> GroupState:
    return GroupState(group, 0, STORE_SHA256)


def apply(state: GroupState, *makers: Any) -> GroupState:
    """Return `state` after the records that `makers` make one after another."""
    for make in makers:
        record = make(state)
        state = group_fold.apply(state, record, record.to_bytes())
    return state
