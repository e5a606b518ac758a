"""A group's log in a store: acts, what is refused, lost races, checkpoints; which acknowledgements count."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from group_records import incarnation, version
from log_records import STORE_SHA256, holding_store
from watched import Watched

from dcr_store.errors import ConflictError, IntegrityError, InvalidInputError, NotFoundError, OutcomeUnknownError
from dcr_store.format import canonical
from dcr_store.format.groups import Ack, AckRef, GroupVersion, Policy
from dcr_store.format.names import group_checkpoint_key, group_record_key
from dcr_store.log.acks import AckReader
from dcr_store.log.group import GroupLog, group_names, read_checkpoint
from dcr_store.log.group_fold import GroupState
from dcr_store.log.group_progress import Progress, read_progress
from dcr_store.objects.open import open_objects


@pytest.fixture
def objects() -> Watched:
    return Watched(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store")))


def opened(objects: Watched, group: str = "eu") -> GroupLog:
    return GroupLog(objects, group, STORE_SHA256)


@pytest.fixture
def log(objects: Watched) -> GroupLog:
    """A group of two members."""
    log = opened(objects)
    log.create("main", ["b", "a"], Policy())
    for name in ("a", "b"):
        log.admit(name, incarnation(name))
    return log


def acknowledge(log: GroupLog, kind: str = "prepared", *names: str) -> dict[str, AckRef]:
    """Let members acknowledge what stands, or what is active; return what counts."""
    subject = log.state.proposed if kind == "prepared" else log.state.active
    assert subject is not None
    for name in names or tuple(log.state.members):
        ack = Ack(kind, log.group, name, log.state.members[name], subject)
        log.objects.put(ack.key, ack.to_bytes())
    return AckReader(log.objects, log.group).read(kind, subject, log.state.members)


def promote(log: GroupLog, number: int) -> GroupState:
    proposed = log.propose(version(number)).proposed
    assert proposed is not None
    return log.promote(proposed, acknowledge(log))


def test_a_group_lives(objects: Watched, log: GroupLog) -> None:
    assert log.state.members == {"a": incarnation("a"), "b": incarnation("b")}
    state = promote(log, 0)
    assert state.active == GroupVersion("main@0", version(0).root, 3)
    log.propose(version(3))
    log.withdraw("bad")
    promote(log, 4)
    log.drop("a", "gone")
    state = log.admit("c")
    assert opened(objects).refresh() == state
    assert [record.kind for record, _ in log.records()] == [
        *(
            "create",
            "admit",
            "admit",
            "propose",
            "promote",
            "propose",
            "withdraw",
            "propose",
            "promote",
            "drop",
            "admit",
        )
    ]
    assert group_names(objects) == ["eu"]


def test_names_are_checked_before_any_request(objects: Watched) -> None:
    for name in ("", "a/b", "../x", "a\n", 3, None):
        with pytest.raises(InvalidInputError, match="cannot name a group"):
            opened(objects, name)  # type: ignore[arg-type]
    log = opened(objects)
    for name in ("a.b", "", "a/b", None):
        for act in (lambda n: log.create("main", [n], Policy()), log.admit, lambda n: log.drop(n, "why")):
            with pytest.raises(InvalidInputError, match="cannot name a member"):
                act(name)  # type: ignore[no-untyped-call]
    assert objects.requests == []


def test_a_group_of_nobody_says_so_and_no_empty_list(objects: Watched) -> None:
    """The API creates none any more, but a store may hold one."""
    log = opened(objects)
    log.create("main", [], Policy())
    with pytest.raises(ConflictError, match=r"admit eu r1 \(expected nobody yet, found r1\)$"):
        log.admit("r1", incarnation("r1"))
    with pytest.raises(ConflictError, match=r"to drop \(expected nobody, found r1\)$"):
        log.drop("r1", "why")
    log.admit("r1")
    log.admit("r1", incarnation("r1"))
    assert set(log.state.members) == {"r1"}


REFUSED: list[tuple[str, Callable[[GroupLog], Any]]] = [
    ("exists already", lambda log: log.create("main", [], Policy())),
    ("does not expect stranger; to let it in: dcr group", lambda log: log.admit("stranger", incarnation("s"))),
    ("no such member to drop", lambda log: log.drop("stranger", "why")),
    ("no such member to drop", lambda log: log.drop("a", "why", incarnation=incarnation("a", 1))),
    ("follows another line", lambda log: log.propose(version(1, "exp"))),
    ("no such proposal in group eu to withdraw", lambda log: log.withdraw("why")),
    ("is active in group eu already", lambda log: [promote(log, 0), log.propose(version(0))]),
    ("a proposal stands", lambda log: [log.propose(version(0)), log.propose(version(1))]),
    ("main@0 or a later version was proposed before", lambda log: [promote(log, 3), _newer(log, 0)]),
    (
        "main@3 or a later version was proposed",
        lambda log: [log.propose(version(3)), log.withdraw("x"), _newer(log, 3)],
    ),
    ("no such proposal", lambda log: [log.propose(version(0)), log.withdraw("why", version="main@1")]),
    ("the proposal of group eu is another one", lambda log: log.promote(GroupVersion("main@0", "0" * 64, 3), {})),
    ("cannot promote main@0 yet: it waits for b", lambda log: _promote_with(log, "a")),
    ("has dropped this incarnation of a: gone", lambda log: [log.drop("a", "gone"), log.admit("a", incarnation("a"))]),
    (
        "has dropped this incarnation of a: replaced",
        lambda log: [log.admit("a", incarnation("a", 1)), log.admit("a", incarnation("a"))],
    ),
]


@pytest.mark.parametrize("act", [lambda log, reason: log.drop("a", reason), lambda log, reason: log.withdraw(reason)])
def test_a_reason_that_no_reader_accepts_is_refused_before_any_request(
    objects: Watched, log: GroupLog, act: Callable[[GroupLog, str], GroupState]
) -> None:
    log.propose(version(0))
    objects.requests.clear()
    with pytest.raises(InvalidInputError, match=r"the reason is too long; say it shorter .expected up to 1,024"):
        act(log, "x" * 1025)
    assert objects.requests == []
    assert act(log, "x" * 1024) == opened(objects).refresh()


def _newer(log: GroupLog, number: int) -> GroupState:
    return log.propose(version(number), only_newer=True)


def _promote_with(log: GroupLog, *names: str) -> GroupState:
    proposed = log.propose(version(0)).proposed
    assert proposed is not None
    return log.promote(proposed, acknowledge(log, "prepared", *names))


@pytest.mark.parametrize(("says", "act"), REFUSED, ids=lambda case: case if isinstance(case, str) else "")
def test_what_is_not_legal_is_refused_with_what_stands(
    log: GroupLog, says: str, act: Callable[[GroupLog], Any]
) -> None:
    with pytest.raises(ConflictError, match=says):
        act(log)
    assert opened(log.objects).refresh() == log.state  # type: ignore[arg-type]


def test_what_is_so_already_is_no_error(log: GroupLog) -> None:
    length = log.state.length
    log.admit("a", incarnation("a"))
    log.admit("a")
    assert log.state.length == length


def test_nothing_is_done_in_a_group_that_does_not_exist(objects: Watched, log: GroupLog) -> None:
    other = opened(objects, "us")
    for act in (
        other.existing,
        lambda: other.admit("a", incarnation("a")),
        lambda: other.drop("a", "why"),
        lambda: other.propose(version(0)),
        lambda: other.withdraw("why"),
        lambda: other.promote(GroupVersion("main@0", "0" * 64, 3), {}),
    ):
        with pytest.raises(NotFoundError, match="there is no group 'us'; there are: eu"):
            act()
    with pytest.raises(NotFoundError, match="create it with: dcr group"):
        opened(Watched(open_objects(f"memory://{secrets.token_hex(8)}"))).existing()


def test_a_promotion_is_judged_again_on_what_came_between(objects: Watched, log: GroupLog) -> None:
    """Who is admitted just before the number is taken is waited for; who is dropped is not."""
    proposed = log.propose(version(0)).proposed
    assert proposed is not None
    acks = acknowledge(log)
    other = opened(objects)
    other.admit("a", incarnation("a", 1))  # log has not read that
    with pytest.raises(ConflictError, match="it waits for a"):
        log.promote(proposed, acks)
    assert other.refresh().active is None
    other.drop("a", "slow")
    assert log.promote(proposed, acks).active == proposed
    assert [ack.name for ack in _last(log).acks] == ["b"]


def _last(log: GroupLog) -> Any:
    return list(log.records())[-1][0]


def test_of_two_who_decide_at_once_one_does(objects: Watched, log: GroupLog) -> None:
    proposed = log.propose(version(0)).proposed
    assert proposed is not None
    acks = acknowledge(log)
    other = opened(objects)
    other.refresh()

    def first(method: str, key: str) -> None:
        if method == "put_if_absent" and "/log/" in key:
            objects.before = None
            other.promote(proposed, acks)

    objects.before = first
    with pytest.raises(ConflictError, match="another one by now"):
        log.promote(proposed, acks)
    assert log.state.active == other.state.active == proposed
    assert [record.kind for record, _ in log.records()].count("promote") == 1


def test_an_unknown_outcome_is_found_out_before_anything_else(objects: Watched, log: GroupLog) -> None:
    def lose(method: str, key: str) -> None:
        if method == "put_if_absent" and "/log/" in key:
            objects.before = None
            raise OutcomeUnknownError("no answer", key=key)

    objects.before = lose
    with pytest.raises(OutcomeUnknownError):
        log.propose(version(0))
    with pytest.raises(ConflictError, match="a proposal stands"):
        log.propose(version(1))  # the first one lands before the second is tried
    assert log.state.proposed is not None
    assert log.state.proposed.version == "main@0"


class TestCheckpoint:
    def test_a_promotion_leaves_one_and_opening_starts_there(self, objects: Watched, log: GroupLog) -> None:
        promote(log, 0)
        promote(log, 1)
        log.propose(version(2))
        assert read_checkpoint(objects, "eu", STORE_SHA256) is not None
        before = len(objects.requests)
        assert opened(objects).refresh() == log.state
        keys = [key for _, key in objects.requests[before:]]
        assert keys == [group_checkpoint_key("eu"), *(group_record_key("eu", seq) for seq in (6, 7, 8))]

    @pytest.mark.parametrize("damage", ["gone", "torn", "other store", "other group", "foreign", "false"])
    def test_one_that_cannot_be_used_is_as_good_as_none(self, objects: Watched, log: GroupLog, damage: str) -> None:
        promote(log, 0)
        key = group_checkpoint_key("eu")
        body = log.state.to_json(STORE_SHA256)
        changes = {
            "other store": {"store_sha256": "0" * 64},
            "other group": {"group": "us"},
            "foreign": {"format": "dcr-log-hint"},
            "false": {"last_sha256": "0" * 64},
        }
        if damage == "gone":
            objects.delete(key)
        elif damage == "torn":
            objects.put(key, objects.get(key)[:-20])
        else:
            objects.put(key, canonical.seal_body({**body, **changes[damage]}))
        assert opened(objects).refresh() == log.state

    def test_a_wrong_one_that_fits_no_record_after_it_is_given_up(self, objects: Watched, log: GroupLog) -> None:
        promote(log, 0)
        body = {**log.state.to_json(STORE_SHA256), "active": None}
        log.propose(version(1))
        log.promote(log.state.proposed, acknowledge(log))  # type: ignore[arg-type]
        objects.put(group_checkpoint_key("eu"), canonical.seal_body(body))
        assert opened(objects).refresh() == log.state

    def without_b(self, log: GroupLog) -> None:
        """Leave a checkpoint, whole by its own SHA-256, that fits the last record and leaves member b out."""
        body = log.state.to_json(STORE_SHA256)
        body["members"] = [item for item in body["members"] if item["name"] == "a"]
        log.objects.put(group_checkpoint_key("eu"), canonical.seal_body(body))

    def test_nothing_is_decided_on_one(self, objects: Watched, log: GroupLog) -> None:
        """A promotion that only a wrong checkpoint allows would be the end of the log for all who read the records."""
        proposed = log.propose(version(0)).proposed
        assert proposed is not None
        acks = acknowledge(log, "prepared", "a")
        self.without_b(log)
        deceived = opened(objects)
        assert list(deceived.refresh().members) == ["a"]
        with pytest.raises(ConflictError, match="it waits for b"):
            deceived.promote(proposed, acks)
        assert deceived.state == log.refresh()
        assert [record.kind for record, _ in log.records()][-1] == "propose"

    def test_what_it_alone_says_is_done_already_is_done(self, objects: Watched, log: GroupLog) -> None:
        log.propose(version(0))
        body = {**log.state.to_json(STORE_SHA256), "expected": ["a", "b", "c"]}
        objects.put(group_checkpoint_key("eu"), canonical.seal_body(body))
        assert opened(objects).admit("c").expected == ("a", "b", "c")
        assert log.refresh().expected == ("a", "b", "c")

    def test_the_records_are_read_once_for_all_decisions(self, objects: Watched, log: GroupLog) -> None:
        promote(log, 0)
        other = opened(objects)
        other.propose(version(1))
        objects.requests.clear()
        other.withdraw("why")
        assert objects.requests == [("get", group_record_key("eu", 5)), ("put_if_absent", group_record_key("eu", 6))]

    def test_a_wrong_one_is_given_up_by_who_opened_with_it_before(self, objects: Watched, log: GroupLog) -> None:
        log.propose(version(0))
        self.without_b(log)
        deceived = opened(objects)
        deceived.refresh()
        log.promote(log.state.proposed, acknowledge(log))  # type: ignore[arg-type]
        assert deceived.refresh() == log.state

    def test_lost_records_are_noticed(self, objects: Watched, log: GroupLog) -> None:
        promote(log, 0)
        objects.delete(group_record_key("eu", log.state.length - 1))
        with pytest.raises(IntegrityError, match="the log record is missing") as caught:
            opened(objects).refresh()
        assert caught.value.key == group_record_key("eu", 4)


class TestAcknowledgements:
    def test_those_that_count(self, objects: Watched, log: GroupLog) -> None:
        log.propose(version(0))
        found = acknowledge(log, "prepared", "a")
        assert set(found) == {"a"}
        key = Ack("prepared", "eu", "a", incarnation("a"), log.state.proposed).key  # type: ignore[arg-type]
        assert found["a"] == AckRef("a", incarnation("a"), canonical.sha256(objects.get(key)))
        assert key == f"groups/eu/acks/main@0/prepared/a.{incarnation('a')}.{3:020d}.json"

    @pytest.mark.parametrize(
        ("what", "changed"),
        [
            ("another incarnation", {"incarnation": incarnation("b", 1)}),
            ("another name", {"name": "c"}),
            ("another group", {"group": "us"}),
            ("the other kind", {"kind": "applied"}),
            ("another root", {"root": "0" * 64}),
            ("another proposal of the version", {"proposal": 7}),
            ("another version", {"version": "main@1"}),
            ("another format", {"format": "dcr-journal"}),
            ("a field missing", {"root": None}),
        ],
    )
    def test_one_that_is_not_exactly_right_counts_nowhere(
        self, objects: Watched, log: GroupLog, what: str, changed: dict[str, Any]
    ) -> None:
        """Neither at the right place with other words, nor anywhere else."""
        log.propose(version(0))
        right = Ack("prepared", "eu", "b", incarnation("b"), log.state.proposed)  # type: ignore[arg-type]
        document = {**canonical.decode(right.to_bytes(), ""), **changed}
        objects.put(right.key, canonical.encode(document))
        assert acknowledge(log, "prepared", "a").keys() == {"a"}, what

    def test_said_twice_is_said_once(self, objects: Watched, log: GroupLog) -> None:
        log.propose(version(0))
        before = acknowledge(log)
        assert acknowledge(log) == before

    def test_those_of_a_withdrawn_proposal_do_not_count_for_the_next(self, log: GroupLog) -> None:
        log.propose(version(0))
        reader, state = AckReader(log.objects, "eu"), log.state
        acknowledge(log)
        assert len(reader.read("prepared", state.proposed, state.members)) == 2  # type: ignore[arg-type]
        log.withdraw("why")
        state = log.propose(version(0))
        assert reader.read("prepared", state.proposed, state.members) == {}  # type: ignore[arg-type]

    def test_each_is_read_once(self, objects: Watched, log: GroupLog) -> None:
        state = log.propose(version(0))
        reader = AckReader(objects, "eu")
        acknowledge(log)
        for _ in range(2):
            assert len(reader.read("prepared", state.proposed, state.members)) == 2  # type: ignore[arg-type]
        before = len(objects.requests)
        reader.read("prepared", state.proposed, state.members)  # type: ignore[arg-type]
        assert [method for method, _ in objects.requests[before:]] == ["list_names"]


def test_what_a_promotion_waits_for(objects: Watched) -> None:
    log, acks = opened(objects), AckReader(objects, "eu")

    def now() -> Progress:
        return read_progress(log, acks)

    log.create("main", ["a", "b"], Policy())
    assert now().waits_for(None) == "a to come, b to come"
    for name in ("a", "b"):
        log.admit(name, incarnation(name))
    assert now().waits_for(None) == "the next version of main"
    assert now().waits_for(4) == "a member to propose main@4"
    log.propose(version(4))
    acknowledge(log, "prepared", "b")
    assert now().waits_for(5) == "a to prepare main@4"
    acks_found = acknowledge(log)
    assert now().waits_for(5) == "a member to promote main@4, which all have prepared"
    log.promote(log.state.proposed, acks_found)  # type: ignore[arg-type]
    assert now().waits_for(4) == "the next version of main"
    assert [now().has_promoted(number) for number in (3, 4, 5)] == [True, True, False]
    acknowledge(log, "applied", "a")
    assert now().applied == {"a"}
    log.propose(version(5))
    log.withdraw("bad")
    assert now().waits_for(5) == "the next version of main, or an operator to propose one"
    for name in ("a", "b"):
        log.drop(name, "gone")
    assert now().waits_for(5) == "a first member to come"
    by_hand = opened(objects, "us")
    by_hand.create("main", [], Policy(admission="anyone", proposing="manual"))
    by_hand.admit("a", incarnation("a"))
    assert read_progress(by_hand, AckReader(objects, "us")).waits_for(4) == "an operator to propose a version"
