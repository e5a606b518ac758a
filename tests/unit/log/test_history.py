"""log.history: every kind of maintenance folds, and every rule refuses what it is there for."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from log_records import (
    STORE_SHA256,
    abort,
    apply,
    begin,
    commit,
    digits,
    edge,
    empty,
    expire,
    fork,
    gc,
    holding_store,
    intent,
    origin,
    resume,
)

from dcr_store.errors import IntegrityError
from dcr_store.format.documents import Base
from dcr_store.format.ranges import Ranges
from dcr_store.format.records import Record, parse_record
from dcr_store.log import checkpoints, fold, history
from dcr_store.log.fold import LineState
from dcr_store.log.history import UNTOUCHED, Forked
from dcr_store.objects.memory import MemoryObjects

Make = Callable[[LineState], Record]


def base(number: int, line: str = "main") -> Base:
    return Base(f"{line}@{number}", digits(f"{line}@{number}", 64))


def of(*numbers: int) -> Ranges:
    return Ranges.of(numbers)


def a_fold(state: LineState) -> Record:
    return intent(state, "fold", of(3), base=base(1))


def expiry(state: LineState) -> Record:
    return intent(state, "expire", of(0, 1, 2))


FIVE = apply(empty(), *(make for _ in range(5) for make in (begin, commit)))
ANCHORING = apply(FIVE, lambda s: intent(s, "anchor", of(2)))
FOLDING = apply(FIVE, a_fold)
EXPIRING = apply(FIVE, expiry)
EXPIRED = apply(EXPIRING, lambda s: expire(s, versions=of(0, 1), deltas=of(0, 1)))
ANCHORED = apply(ANCHORING, edge)
FORKED = apply(FIVE, lambda s: fork(s, 1))
CHILD = apply(empty("exp"), lambda s: origin(s, FIVE.rows[2]), begin, commit)
STATES = {
    "five": FIVE,
    "anchoring": ANCHORING,
    "folding": FOLDING,
    "expiring": EXPIRING,
    "expired": EXPIRED,
    "anchored": ANCHORED,
    "forked, expiring": apply(FORKED, expiry),
    "folding, expiring": apply(FOLDING, expiry),
    "child": CHILD,
}

ILLEGAL: list[tuple[str, Make, str]] = [
    ("five", lambda s: intent(s, "anchor", of()), "it names no version"),
    ("five", lambda s: intent(s, "anchor", of(5)), "the version of a work is not among the line's own"),
    ("child", lambda s: intent(s, "anchor", of(2)), "the version of a work is not among the line's own"),
    ("child", lambda s: intent(s, "expire", of(1, 2)), "the version of a work is not among the line's own"),
    ("expired", lambda s: intent(s, "anchor", of(1)), "the version of a work expired before"),
    ("expired", lambda s: intent(s, "expire", of(1, 2)), "the version of a work expired before"),
    ("five", lambda s: intent(s, "fold", of(3)), "a fold alone has a base"),
    ("five", lambda s: intent(s, "anchor", of(3), base=base(1)), "a fold alone has a base"),
    ("five", lambda s: intent(s, "expire", of(3), base=base(1)), "a fold alone has a base"),
    ("five", lambda s: intent(s, "expire", of(3, 4)), "it would expire the head"),
    ("five", lambda s: intent(s, "anchor", of(1, 3)), "the version of a work has to be one"),
    ("five", lambda s: intent(s, "fold", of(3), base=base(1, "other")), "the base of a fold is of another line"),
    ("five", lambda s: intent(s, "fold", of(3), base=base(7)), "the base of a fold is not among the line's own"),
    ("expired", lambda s: intent(s, "fold", of(3), base=base(1)), "the base of a fold expired before"),
    ("five", lambda s: intent(s, "fold", of(3), base=base(3)), "a fold leads backwards"),
    ("five", lambda s: intent(s, "fold", of(3), base=base(4)), "a fold leads backwards"),
    ("anchoring", lambda s: intent(s, txid=s.history.works[0].txid), "its txid is taken"),
    ("five", lambda s: abort(s, txid="0" * 32), "its transaction is not open"),
    ("anchoring", lambda s: edge(s, txid="0" * 32), "its transaction is not open"),
    ("anchoring", lambda s: resume(s, txid=s.history.works[0].txid, attempt=2), "its attempt is not the next"),
    ("anchoring", lambda s: edge(s, attempt=1), "its attempt is fenced"),
    ("anchoring", lambda s: edge(s, version=1), "it is not what the intent says"),
    ("folding", lambda s: edge(s, base=base(0)), "it is not what the intent says"),
    ("expiring", lambda s: edge(s), "it is not what the intent says"),
    ("five", lambda s: expire(EXPIRING, seq=s.length, prev=s.last_sha256), "its transaction is not open"),
    ("anchoring", lambda s: expire(s), "its work is another one"),
    ("expiring", lambda s: expire(s, versions=of(2, 3)), "it expires a version that the intent does not name"),
    ("forked, expiring", lambda s: expire(s), "exp goes on from the version"),
    ("folding, expiring", lambda s: expire(s), f"the fold {FOLDING.history.works[0].txid} needs the version"),
    ("expiring", lambda s: expire(s, deltas=of(9)), "it ends the delta of a version that is not the line's own"),
    ("expiring", lambda s: expire(s, edges=("0" * 32,)), "it ends an edge that is not there"),
    ("five", lambda s: fork(s, child="main"), "a line cannot go on from itself"),
    ("five", lambda s: fork(s, 5), "the version that a line goes on from is not among the line's own"),
    ("expired", lambda s: fork(s, 0), "the version that a line goes on from expired before"),
    ("child", lambda s: fork(s, 2, child="other"), "the version that a line goes on from is not among the line's own"),
]


def ids(case: Any) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("state", "make", "rule"), ILLEGAL, ids=ids)
def test_illegal_records_are_refused_with_the_rule(state: str, make: Make, rule: str) -> None:
    before = STATES[state]
    record = make(before)
    with pytest.raises(IntegrityError, match=f"the log record is illegal: {rule}") as caught:
        fold.apply(before, record, record.to_bytes())
    assert caught.value.key == f"log/{before.line}/{before.length:020d}.json"


def test_a_second_expiry_of_what_has_expired_is_refused() -> None:
    both = apply(FIVE, expiry, lambda s: intent(s, "expire", of(1)))
    first = both.history.works[0]
    state = apply(both, lambda s: expire(s, versions=of(1), deltas=of(1)))
    with pytest.raises(IntegrityError, match="it expires a version that expired before"):
        apply(state, lambda s: expire(s, txid=first.txid, versions=of(0, 1)))
    with pytest.raises(IntegrityError, match="it ends a delta that ended before"):
        apply(state, lambda s: expire(s, txid=first.txid, versions=of(0), deltas=of(1)))


def test_every_rule_has_a_case() -> None:
    tested = [rule for *_, rule in ILLEGAL] + [
        "it expires a version that expired before",
        "it ends a delta that ended before",
    ]
    for call in ast.walk(ast.parse(inspect.getsource(history))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "_require":
            rule = call.args[1]
            parts = rule.values if isinstance(rule, ast.JoinedStr) else [rule]
            pattern = "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".+" for p in parts)
            of_the_fold = pattern == re.escape("its kind has no rule")
            assert of_the_fold or any(re.fullmatch(pattern, item) for item in tested), pattern


def test_an_anchor_and_a_fold_are_further_edges() -> None:
    assert ANCHORED.history.works == ()
    assert [(e.version, e.base) for e in ANCHORED.history.edges] == [(2, None)]
    folded = apply(ANCHORED, a_fold, edge)
    assert [(e.version, e.base) for e in folded.history.edges] == [(2, None), (3, base(1))]
    assert folded.head == FIVE.head


def test_a_work_is_taken_up_again() -> None:
    txid = FOLDING.history.works[0].txid
    resumed = apply(FOLDING, lambda s: resume(s, txid=txid, owner="another"))
    assert [(work.attempt, work.owner) for work in resumed.history.works] == [(1, "another")]
    with pytest.raises(IntegrityError, match="its attempt is fenced"):
        apply(resumed, lambda s: edge(s, attempt=0))
    assert len(apply(resumed, edge).history.edges) == 1


def test_an_aborted_work_leaves_nothing() -> None:
    assert apply(FOLDING, lambda s: abort(s, txid=s.history.works[0].txid)).history == UNTOUCHED


def test_what_expired_is_told() -> None:
    assert EXPIRED.history.expired == of(0, 1)
    assert EXPIRED.history.dead == of(0, 1)
    assert EXPIRED.history.works == ()
    later = apply(EXPIRED, lambda s: intent(s, "anchor", of(3)), edge, lambda s: intent(s, "expire", of(2)))
    txid = later.history.edges[0].txid
    last = apply(later, lambda s: expire(s, versions=of(), deltas=of(3), edges=(txid,)))
    assert (last.history.expired, last.history.dead, last.history.edges) == (of(0, 1), of(0, 1, 3), ())


def test_a_transaction_and_works_are_open_side_by_side() -> None:
    state = apply(FOLDING, begin, gc, lambda s: edge(s), commit)
    assert (state.head.version, state.open, len(state.history.edges)) == (5, None, 1)  # type: ignore[union-attr]


def test_a_fork_is_told_on_both_lines() -> None:
    assert FORKED.history.forks == (Forked("exp", 1, 10),)
    child = apply(empty("exp"), lambda s: origin(s, FIVE.rows[2]))
    assert (child.head, child.first, child.next_version) == (FIVE.rows[2], 3, 3)
    assert child.head_base == Base("exp@2", FIVE.rows[2].root)
    assert [row.version for row in CHILD.rows] == [3]
    assert CHILD.rows[0].base == child.head_base


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_checkpoints_carry_the_history(state: LineState) -> None:
    objects = holding_store(MemoryObjects("history"))
    checkpoints.write_checkpoint(objects, state, STORE_SHA256)
    assert checkpoints.read_checkpoint(objects, state.line, state.length, STORE_SHA256) == state


@pytest.mark.parametrize(
    "record",
    [
        intent(FIVE, "anchor", of(2)),
        a_fold(FIVE),
        expiry(FIVE),
        edge(ANCHORING),
        edge(FOLDING),
        expire(EXPIRING, deltas=of(0, 2), edges=("a" * 32,)),
        gc(FIVE),
        fork(FIVE),
        origin(empty("exp"), FIVE.rows[1]),
    ],
    ids=lambda record: record.kind,
)
def test_records_are_read_as_they_were_written(record: Record) -> None:
    assert parse_record(record.to_bytes(), "k") == record
