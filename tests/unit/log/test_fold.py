"""The fold: which record is legal where, as a table; what the fold of legal ones says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_records import COUNTS, TIME, abort, apply, begin, commit, digits, empty, origin, resume

from dcr_store.errors import IntegrityError
from dcr_store.format.documents import Base
from dcr_store.format.fields import Fields
from dcr_store.format.records import Record
from dcr_store.format.rows import VersionRow
from dcr_store.log import fold
from dcr_store.log.fold import LineState, OpenTransaction

Make = Callable[[LineState], Record]

START = empty()
OPEN = apply(START, begin)
RESUMED = apply(OPEN, resume, resume)
ONE = apply(START, begin, commit)
ONE_OPEN = apply(ONE, begin)
TWO = apply(ONE_OPEN, commit)
STATES = {"start": START, "open": OPEN, "resumed": RESUMED, "one": ONE, "one, open": ONE_OPEN, "two": TWO}
OTHER = Base("main@0", "e" * 64)

LEGAL: list[tuple[str, Make]] = [
    ("start", begin),
    ("start", lambda s: begin(s, writers=("a", "b"), layout="f" * 64, message="m", metadata={"a": 1})),
    ("open", commit),
    ("open", resume),
    ("open", lambda s: resume(s, owner="another")),
    ("open", abort),
    ("resumed", commit),
    ("resumed", abort),
    ("resumed", resume),
    ("one", begin),
    ("one, open", commit),
    ("one, open", lambda s: commit(s, base=None)),
    ("two", begin),
]

ILLEGAL: list[tuple[str, Make, str]] = [
    ("start", lambda s: begin(s, line="other"), "it belongs to another line"),
    ("start", lambda s: begin(s, seq=1), "its number is not its place"),
    ("two", lambda s: begin(s, seq=0), "its number is not its place"),
    ("start", lambda s: begin(s, prev="0" * 64), "the hash chain is broken"),
    ("two", lambda s: begin(s, prev=ONE.last_sha256), "the hash chain is broken"),
    ("open", begin, "a transaction is open"),
    ("one, open", begin, "a transaction is open"),
    ("start", lambda s: begin(s, version=1), "it begins another version"),
    ("two", lambda s: begin(s, version=1), "it begins another version"),
    ("two", lambda s: begin(s, version=3), "it begins another version"),
    ("start", lambda s: begin(s, base=OTHER), "its base is not the head"),
    ("two", lambda s: begin(s, base=None), "its base is not the head"),
    ("two", lambda s: begin(s, base=ONE.head_base), "its base is not the head"),
    ("two", lambda s: begin(s, base=Base("main@1", "e" * 64)), "its base is not the head"),
    ("start", lambda s: begin(s, writers=()), "it names no writer"),
    ("start", commit, "its transaction is not open"),
    ("start", resume, "its transaction is not open"),
    ("start", abort, "its transaction is not open"),
    ("two", commit, "its transaction is not open"),
    ("two", lambda s: commit(s, txid=TWO.head.txid), "its transaction is not open"),  # type: ignore[union-attr]
    ("open", lambda s: commit(s, txid="0" * 32), "its transaction is not open"),
    ("open", lambda s: resume(s, txid="0" * 32), "its transaction is not open"),
    ("open", lambda s: abort(s, txid="0" * 32), "its transaction is not open"),
    ("open", lambda s: resume(s, attempt=0), "its attempt is not the next"),
    ("open", lambda s: resume(s, attempt=2), "its attempt is not the next"),
    ("resumed", lambda s: resume(s, attempt=1), "its attempt is not the next"),
    ("resumed", lambda s: resume(s, attempt=2), "its attempt is not the next"),
    ("resumed", lambda s: commit(s, attempt=0), "its attempt is fenced"),
    ("resumed", lambda s: commit(s, attempt=1), "its attempt is fenced"),
    ("resumed", lambda s: commit(s, attempt=3), "its attempt is fenced"),
    ("open", lambda s: commit(s, version=1), "it commits another version"),
    ("one, open", lambda s: commit(s, version=0), "it commits another version"),
    ("open", lambda s: commit(s, base=OTHER), "its base is another one"),
    ("one, open", lambda s: commit(s, base=OTHER), "its base is another one"),
    ("one", lambda s: origin(s, ONE.rows[0], parent="other"), "a line comes from another one by its first record"),
    ("start", lambda s: origin(s, ONE.rows[0]), "a line cannot come from itself"),
]


def ids(case: Any) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("state", "make"), LEGAL, ids=ids)
def test_legal(state: str, make: Make) -> None:
    before = STATES[state]
    record = make(before)
    after = fold.apply(before, record, record.to_bytes())
    assert after.length == before.length + 1
    assert after.last_sha256 == hashlib.sha256(record.to_bytes()).hexdigest()


@pytest.mark.parametrize(("state", "make", "rule"), ILLEGAL, ids=ids)
def test_illegal_records_are_refused_with_the_rule(state: str, make: Make, rule: str) -> None:
    before = STATES[state]
    record = make(before)
    with pytest.raises(IntegrityError, match=f"the log record is illegal: {rule}") as caught:
        fold.apply(before, record, record.to_bytes())
    assert caught.value.key == f"log/main/{before.length:020d}.json", "the error names the record"
    assert caught.value.expected != caught.value.found


def test_every_rule_has_a_case() -> None:
    import inspect

    source = inspect.getsource(fold.apply)
    for rule in {rule for *_, rule in ILLEGAL}:
        assert rule in source
    others = 3  # its own line, the rules of maintenance, and that the kind is one of those known
    assert source.count("require(") == len({rule for *_, rule in ILLEGAL}) + others


def test_a_kind_without_a_rule_is_refused() -> None:
    class Other(Record):
        kind = "other"

    record = Other(line="main", seq=1, id="1" * 32, prev=OPEN.last_sha256, created_at=TIME)
    with pytest.raises(IntegrityError, match="its kind has no rule"):
        fold.apply(OPEN, record, record.to_bytes())


class TestWhatTheFoldSays:
    def test_begin_opens(self) -> None:
        state = apply(ONE, lambda s: begin(s, owner="o", writers=("a", "b"), message="m", metadata={"n": 1}))
        assert state.open == OpenTransaction(
            digits("tx2", 32), "o", 0, 1, ONE.head_base, None, ("a", "b"), "m", {"n": 1}, 2, TIME
        )
        assert state.head == ONE.head

    def test_resume_counts_attempts_and_changes_the_owner(self) -> None:
        state = apply(OPEN, lambda s: resume(s, owner="other"))
        assert state.open is not None
        assert (state.open.attempt, state.open.owner, state.open.seq) == (1, "other", 0)

    def test_abort_leaves_the_head(self) -> None:
        state = apply(ONE_OPEN, abort)
        assert (state.open, state.head, state.rows, state.next_version) == (None, ONE.head, ONE.rows, 1)

    def test_commit_makes_a_row(self) -> None:
        state = apply(RESUMED, commit)
        assert state.open is None
        row = state.head
        assert row is not None
        assert state.rows == (row,)
        assert (row.version, row.seq, row.begin_seq, row.attempt, row.base) == (0, 3, 0, 2, None)
        assert (row.root, row.counts, row.record_sha256) == (digits("main@0", 64), COUNTS, state.last_sha256)
        assert state.head_base == Base("main@0", row.root)
        assert state.next_version == 1

    def test_a_delta_names_its_base_and_an_anchor_none(self) -> None:
        assert TWO.head is not None
        assert TWO.head.base == ONE.head_base
        anchor = apply(ONE_OPEN, lambda s: commit(s, base=None)).head
        assert anchor is not None
        assert anchor.base is None

    @pytest.mark.parametrize("n", [999, 1000, 1001, 5000])
    def test_long_metadata_stays_in_its_record(self, n: int) -> None:
        def long(state: LineState) -> Record:
            return begin(state, message=None, metadata={"a": "x" * (n - 15)})  # [null,{"a":"…"}] takes 15 more

        row = apply(START, long, commit).head
        assert row is not None
        assert (row.metadata is None) == (n > 1024)
        row = apply(START, lambda s: begin(s, message="é" * n), commit).head
        assert row is not None
        assert (row.message is None) == (row.metadata is None) == (2 * n + 12 > 1024), "bytes count, not characters"

    def test_the_limit_itself(self) -> None:
        for n, inline in ((1024, True), (1025, False)):
            row = apply(START, lambda s, n=n: begin(s, metadata={"a": "x" * (n - 15)}), commit).head
            assert row is not None
            assert (row.metadata is not None) == inline

    def test_the_state_given_is_left_alone(self) -> None:
        before = ONE_OPEN.rows, ONE_OPEN.open, ONE_OPEN.length
        apply(ONE_OPEN, commit)
        assert before == (ONE_OPEN.rows, ONE_OPEN.open, ONE_OPEN.length)


@given(st.lists(st.sampled_from([begin, commit, resume, abort]), max_size=30))
def test_random_histories(makers: list[Make]) -> None:
    """Whatever is tried: versions are numbered without holes, and rows survive JSON."""
    state = empty()
    for make in makers:
        record = make(state)
        allowed = (state.open is None) == (make is begin)
        if allowed:
            state = fold.apply(state, record, record.to_bytes())
        else:
            with pytest.raises(IntegrityError):
                fold.apply(state, record, record.to_bytes())
    assert [row.version for row in state.rows] == list(range(len(state.rows)))
    assert [row.seq for row in state.rows] == sorted(row.seq for row in state.rows)
    for row in state.rows:
        assert VersionRow.from_json(Fields(row.to_json(), "k")) == row
    if state.open is not None:
        assert OpenTransaction.from_json(Fields(state.open.to_json(), "k")) == state.open
