"""The fold of a group's log: which record is legal where, as a table; what the fold of legal ones says."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from group_records import ack, admit, apply, create, drop, empty, incarnation, promote, propose, version, withdraw
from log_records import STORE_SHA256

from dcr_store.errors import FormatError, IntegrityError
from dcr_store.format.fields import Fields
from dcr_store.format.groups import GroupRecord, GroupVersion, Policy, parse_group_record
from dcr_store.log import group_fold
from dcr_store.log.group_fold import Dropped, GroupState

Make = Callable[[GroupState], GroupRecord]


def b(state: GroupState) -> GroupRecord:
    return admit(state, "b")


START = empty()
CREATED = apply(START, create)
HALF = apply(CREATED, admit)
WHOLE = apply(HALF, b)
PROPOSED = apply(WHOLE, propose)
ACTIVE = apply(PROPOSED, promote)
NEXT = apply(ACTIVE, lambda s: propose(s, 1))
DROPPED = apply(NEXT, lambda s: drop(s, "b"))
NOBODY = apply(PROPOSED, drop, lambda s: drop(s, "b"))
OPEN = apply(START, lambda s: create(s, policy=Policy(admission="anyone")))
HALF_PROPOSED = apply(HALF, propose)
BACK = apply(DROPPED, lambda s: admit(s, "b", 1))
REPLACED = apply(HALF, lambda s: admit(s, "a", 1))
STATES = {
    "start": START,
    "created": CREATED,
    "half": HALF,
    "whole": WHOLE,
    "proposed": PROPOSED,
    "active": ACTIVE,
    "next": NEXT,
    "dropped": DROPPED,
    "nobody": NOBODY,
    "open": OPEN,
    "half, proposed": HALF_PROPOSED,
    "dropped, back": BACK,
    "replaced": REPLACED,
}

LEGAL: list[tuple[str, Make]] = [
    ("start", create),
    ("created", admit),
    ("created", lambda s: drop(s, "a")),
    ("created", lambda s: admit(s, "c", None)),
    ("created", propose),
    ("half", b),
    ("half", lambda s: admit(s, "a", 1)),
    ("open", lambda s: admit(s, "stranger")),
    ("whole", lambda s: propose(s, 7)),
    ("proposed", promote),
    ("proposed", withdraw),
    ("proposed", lambda s: admit(s, "a", 1)),
    ("active", lambda s: propose(s, 1)),
    ("active", lambda s: propose(s, 0, new=replace(version(0), root="f" * 64))),
    ("next", promote),
    ("next", lambda s: promote(s, acks=(ack("b"), ack("a")))),
    ("dropped", promote),
    ("dropped", lambda s: admit(s, "b", 1)),
    ("nobody", withdraw),
]

ILLEGAL: list[tuple[str, Make, str]] = [
    ("start", lambda s: create(s, group="other"), "it belongs to another group"),
    ("start", lambda s: create(s, seq=1), "its number is not its place"),
    ("start", lambda s: create(s, prev="0" * 64), "the hash chain is broken"),
    ("half", lambda s: b(replace(s, last_sha256=CREATED.last_sha256)), "the hash chain is broken"),
    ("created", create, "the group exists already"),
    ("active", create, "the group exists already"),
    ("start", admit, "the group is not created"),
    ("start", propose, "the group is not created"),
    ("half", admit, "it is admitted already"),
    ("dropped", b, "this incarnation was dropped or replaced"),
    ("dropped, back", b, "this incarnation was dropped or replaced"),
    ("replaced", admit, "this incarnation was dropped or replaced"),
    ("created", lambda s: admit(s, "stranger"), "the name is not expected"),
    ("created", lambda s: admit(s, "a", None), "the name is expected already"),
    ("created", lambda s: drop(s, "stranger"), "it drops nobody"),
    ("dropped", lambda s: drop(s, "b"), "it drops nobody"),
    ("half", lambda s: drop(s, "a", incarnation=incarnation("a", 1)), "it drops another incarnation"),
    ("half", lambda s: drop(s, "a", incarnation=None), "it drops another incarnation"),
    ("half", lambda s: drop(s, "b", incarnation=incarnation("b")), "it drops another incarnation"),
    ("proposed", propose, "a proposal stands"),
    ("proposed", lambda s: propose(s, 1), "a proposal stands"),
    ("whole", lambda s: propose(s, new=version(0, "exp")), "it proposes a version of another line"),
    ("active", propose, "it proposes the active version"),
    ("whole", withdraw, "no proposal stands"),
    ("active", promote, "no proposal stands"),
    ("next", lambda s: withdraw(s, new=version(0)), "the proposal is another one"),
    ("next", lambda s: promote(s, new=version(2)), "the proposal is another one"),
    ("next", lambda s: promote(s, new=replace(version(1), root="0" * 64)), "the proposal is another one"),
    ("next", lambda s: promote(s, old=None), "the active version is another one"),
    ("next", lambda s: promote(s, old=version(1)), "the active version is another one"),
    ("proposed", lambda s: promote(s, old=version(0)), "the active version is another one"),
    ("half, proposed", promote, "expected members have not been admitted yet"),
    ("nobody", promote, "the group has no members"),
    ("proposed", lambda s: promote(s, acks=()), "its acknowledgements are not those of the members admitted"),
    ("proposed", lambda s: promote(s, acks=(ack("a"),)), "its acknowledgements are not those of the members admitted"),
    (
        "proposed",
        lambda s: promote(s, acks=(ack("a"), ack("a"))),
        "its acknowledgements are not those of the members admitted",
    ),
    (
        "proposed",
        lambda s: promote(s, acks=(ack("a"), ack("b"), ack("c"))),
        "its acknowledgements are not those of the members admitted",
    ),
    (
        "proposed",
        lambda s: promote(s, acks=(ack("a"), ack("b", 1))),
        "its acknowledgements are not those of the members admitted",
    ),
    (
        "dropped",
        lambda s: promote(s, acks=(ack("a"), ack("b"))),
        "its acknowledgements are not those of the members admitted",
    ),
]


def ids(case: Any) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("state", "make"), LEGAL, ids=ids)
def test_legal(state: str, make: Make) -> None:
    before = STATES[state]
    record = make(before)
    data = record.to_bytes()
    assert parse_group_record(data, "key") == record
    after = group_fold.apply(before, record, data)
    assert after.length == before.length + 1
    assert after.last_sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(("state", "make", "rule"), ILLEGAL, ids=ids)
def test_illegal_records_are_refused_with_the_rule(state: str, make: Make, rule: str) -> None:
    before = STATES[state]
    record = make(before)
    with pytest.raises(IntegrityError, match=f"the group record is illegal: {rule}") as caught:
        group_fold.apply(before, record, record.to_bytes())
    assert caught.value.key == f"groups/eu/log/{before.length:020d}.json", "the error names the record"


def test_every_rule_has_a_case() -> None:
    source = inspect.getsource(group_fold.apply) + inspect.getsource(group_fold._admit)
    rules = {rule for *_, rule in ILLEGAL}
    for rule in rules:
        assert rule in source
    assert source.count("require(") == len(rules) + 2, "its own definition, and the rule of other kinds"


def test_a_kind_without_a_rule_is_refused() -> None:
    class Other(GroupRecord):
        kind = "other"

    record = Other(group="eu", seq=WHOLE.length, id="0" * 32, prev=WHOLE.last_sha256, created_at="")
    with pytest.raises(IntegrityError, match="its kind has no rule"):
        group_fold.apply(WHOLE, record, b"{}")


class TestWhatTheFoldSays:
    def test_nobody_is_a_member_before_it_is_admitted(self) -> None:
        assert (CREATED.line, CREATED.expected, CREATED.awaited) == ("main", ("a", "b"), ("a", "b"))
        assert (CREATED.members, CREATED.active, CREATED.proposed) == ({}, None, None)

    def test_admitting(self) -> None:
        assert (HALF.members, HALF.awaited) == ({"a": incarnation("a")}, ("b",))
        assert list(WHOLE.members) == ["a", "b"]
        assert (WHOLE.awaited, WHOLE.expected) == ((), ("a", "b"))
        again = apply(WHOLE, lambda s: admit(s, "a", 1))
        assert again.members == {"a": incarnation("a", 1), "b": incarnation("b")}

    def test_a_name_let_in_is_expected_but_not_awaited(self) -> None:
        state = apply(CREATED, lambda s: admit(s, "c", None))
        assert (state.expected, state.awaited, state.members) == (("a", "b", "c"), ("a", "b"), {})
        assert "c" in apply(state, lambda s: admit(s, "c")).members

    def test_promoting(self) -> None:
        assert PROPOSED.proposed == GroupVersion("main@0", version(0).root, 3)
        assert PROPOSED.active is None
        assert (ACTIVE.active, ACTIVE.proposed) == (PROPOSED.proposed, None)
        assert (ACTIVE.active.line, ACTIVE.active.number) == ("main", 0)  # type: ignore[union-attr]

    def test_withdrawing_leaves_the_active_version(self) -> None:
        state = apply(NEXT, withdraw)
        assert (state.active, state.proposed, state.highest) == (ACTIVE.active, None, 1)

    def test_the_highest_stays_when_an_older_version_is_proposed(self) -> None:
        state = apply(NEXT, promote, lambda s: propose(s, 0), promote)
        assert state.active is not None
        assert (state.active.version, state.highest) == ("main@0", 1)
        assert state.active != ACTIVE.active, "another proposal of the same version"

    def test_dropping(self) -> None:
        assert DROPPED.members == {"a": incarnation("a")}
        assert DROPPED.dropped == {"b": Dropped(incarnation("b"), "gone", 6)}
        assert BACK.members["b"] == incarnation("b", 1)
        assert BACK.dropped == DROPPED.dropped, "it never comes back"
        awaited = apply(HALF, lambda s: drop(s, "b"))
        assert (awaited.awaited, awaited.dropped) == ((), {"b": Dropped(None, "gone", 2)})
        assert "b" in apply(awaited, b).members, "who was only not waited for may come"

    def test_replacing(self) -> None:
        assert REPLACED.members == {"a": incarnation("a", 1)}
        assert REPLACED.dropped == {"a": Dropped(incarnation("a"), "replaced", 2)}
        again = apply(BACK, lambda s: admit(s, "b", 2))
        assert again.dropped == {"b": Dropped(incarnation("b", 1), "replaced", 8)}

    def test_a_reason_has_a_longest_length(self) -> None:
        for make in (lambda s, reason: drop(s, reason=reason), lambda s, reason: withdraw(s, reason=reason)):
            assert parse_group_record(make(NEXT, "é" * 1024).to_bytes(), "key").reason == "é" * 1024  # type: ignore[attr-defined]
            with pytest.raises(FormatError, match=r"field 'reason' is wrong .expected up to 1,024 characters"):
                parse_group_record(make(NEXT, "x" * 1025).to_bytes(), "key")

    def test_only_the_last_dropped_names_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(group_fold, "DROPPED_KEPT", 3)
        state = OPEN
        for name in ("p", "q", "r", "p", "s"):
            state = apply(state, lambda s, n=name: admit(s, n, s.length), lambda s, n=name: drop(s, n))
        assert list(state.dropped) == ["r", "p", "s"]

    def test_lacking(self) -> None:
        assert HALF_PROPOSED.lacking({"a"}) == ["b"]
        assert PROPOSED.lacking({}) == ["a", "b"]
        assert PROPOSED.lacking({"a", "b", "c"}) == []


@pytest.mark.parametrize("name", [name for name in STATES if name != "start"])
def test_the_checkpoint_is_the_state(name: str) -> None:
    assert GroupState.from_json(Fields(STATES[name].to_json(STORE_SHA256), "key")) == STATES[name]
