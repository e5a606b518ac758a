"""A receiver as a member: joining, acknowledging, promoting, being dropped, coming back."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from watched import Watched

import dcr_store
from dcr_store.errors import (
    ConflictError,
    FencedError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
)
from dcr_store.format.groups import GroupVersion, VersionRoot
from dcr_store.ports import Bytes
from dcr_store.receive.member import Member, Wanted, plan
from dcr_store.store import Store
from dcr_store.versions.catalog import Catalog


class Clock:
    """Seconds that grow when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store() -> Store:
    store = dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64)
    publish(store)
    return store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def member(store: Store, clock: Clock) -> Callable[..., Member]:
    def start(name: str, group: str = "eu", *, join: bool = True) -> Member:
        started = Member(store._catalog, group, name, clock=clock)
        if join:
            started.join()
        return started

    return start


def publish(store: Store) -> None:
    with store.begin() as transaction:
        transaction.write("w", np.full(100, len(store.log()), np.int32))


def prepare(member: Member) -> GroupVersion:
    wanted = member.step().prepare
    assert wanted is not None
    member.prepared(wanted, None, wanted.root)
    return wanted


def test_the_plan() -> None:
    from group_records import admit, apply, create, empty, promote, propose

    state = apply(empty(), lambda s: create(s, "a"), admit)
    assert plan(state, None, None) == Wanted(None, None)
    state = apply(state, propose)
    first = state.proposed
    assert plan(state, None, None) == Wanted(first, None)
    assert plan(state, first, None) == Wanted(None, None)
    state = apply(state, promote, lambda s: propose(s, 1))
    second = state.proposed
    assert plan(state, first, None) == Wanted(second, first), "what is decided is applied, prepared or not"
    assert plan(state, None, first) == Wanted(second, None)
    assert plan(state, second, first) == Wanted(None, None)


def test_two_promote_together(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a", "b"])
    a = member("a")
    assert a.step() == Wanted(None, None), "nothing is proposed before all have come"
    b = member("b")
    first = prepare(a)
    assert (first.version, first.root) == ("main@0", store.log()[0].root)
    assert not a.try_promote()
    assert a.active is None
    prepare(b)
    assert b.try_promote()
    for each in (a, b):
        assert each.step() == Wanted(None, first)
        assert not each.try_promote(), "there is nothing to promote any more"
        assert not each.all_applied()
        each.applied(first, first.root)
        assert each.step() == Wanted(None, None)
    assert a.all_applied()
    assert a.active == b.active == first


def test_a_proposal_stands_while_versions_follow(store: Store, member: Callable[..., Member]) -> None:
    """Field: a publisher that is faster than the group must not starve it."""
    store.create_group("eu", ["a"])
    a = member("a")
    first = prepare(a)
    for _ in range(3):
        publish(store)
        assert a.step().prepare is None
    assert a.try_promote()
    assert a.active == first
    assert prepare(a).version == "main@3", "then the newest is proposed"
    assert a.try_promote()


def test_what_was_withdrawn_is_not_proposed_again_by_members(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"])
    a = member("a")
    prepare(a)
    store.group("eu").withdraw(reason="bad")
    assert a.step() == Wanted(None, None)
    assert not a.try_promote()
    publish(store)
    assert prepare(a).version == "main@1"


def test_going_back_by_hand_stays(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"])
    publish(store)
    a = member("a")
    old = prepare(a)
    assert a.try_promote()
    store.group("eu").propose("main@0")
    prepare(a)
    assert a.try_promote()
    assert a.step().prepare is None
    store.group("eu").propose("main@1")
    again = a.step().prepare
    assert again is not None
    assert again.ref == old.ref
    assert again != old
    assert not a.try_promote(), "what was prepared for the earlier proposal does not count for this one"
    prepare(a)
    assert a.try_promote()


def test_by_hand_nobody_proposes(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"], proposing="manual")
    a = member("a")
    assert a.step() == Wanted(None, None)
    store.group("eu").propose()
    assert prepare(a).version == "main@0"


def test_a_restart_makes_acknowledgements_void(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a", "b"])
    a, b = member("a"), member("b")
    prepare(a)
    b_again = member("b")
    for act in (b.step, b.join):
        with pytest.raises(FencedError, match="another start of the same name was admitted since"):
            act()
    assert b.log.refresh().members["b"] == b_again.incarnation, "who was replaced does not take the name back"
    late = a.state.proposed
    assert late is not None
    b.prepared(late, None, late.root)  # a sleeper that does not know yet
    a.step()
    assert not a.try_promote()
    prepare(b_again)
    assert a.try_promote()


def test_who_comes_late_applies_what_is_active(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"], admission="anyone")
    a = member("a")
    first = prepare(a)
    assert a.try_promote()
    b = member("b")
    assert b.step() == Wanted(None, first)
    publish(store)
    second = a.step().prepare
    assert second is not None
    a.prepared(second, first.root, second.root)
    assert not a.try_promote(), "and is waited for from then on"
    assert b.step() == Wanted(second, first)


def test_only_expected_names_come_by_themselves(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"])
    with pytest.raises(ConflictError, match="does not expect c; to let it in: dcr group STORE admit eu c"):
        member("c")
    store.group("eu").admit("c")
    assert "c" in member("c").state.members
    with pytest.raises(NotFoundError, match="there is no group 'us'"):
        member("a", "us")


class TestDropping:
    def test_by_hand(self, store: Store, member: Callable[..., Member]) -> None:
        store.create_group("eu", ["a", "b"])
        a, b = member("a"), member("b")
        prepare(a)
        store.group("eu").drop("b", "its rack burns")
        for act in (b.step, b.join):
            with pytest.raises(FencedError, match="its rack burns; stop serving") as caught:
                act()
        assert caught.value.found is None
        a.step()
        assert a.try_promote()
        again = member("b")
        assert again.step() == Wanted(None, a.active)

    def test_by_policy(self, store: Store, member: Callable[..., Member], clock: Clock) -> None:
        store.create_group("eu", ["a", "b"], drop_after_s=30)
        a, b = member("a"), member("b")
        prepare(a)
        assert not a.try_promote()
        clock.now_s += 29.9
        assert not a.try_promote()
        clock.now_s += 0.2
        assert a.try_promote(), "dropped, and then nobody is missing"
        assert a.state.members.keys() == {"a"}
        with pytest.raises(FencedError, match="had not prepared main@0 30 s after a"):
            b.step()

    def test_who_has_not_prepared_drops_nobody(self, store: Store, member: Callable[..., Member], clock: Clock) -> None:
        store.create_group("eu", ["a", "b"], drop_after_s=30)
        a, b = member("a"), member("b")
        a.step()
        b.step()
        for _ in range(3):
            clock.now_s += 1000
            assert not a.try_promote()
        assert a.log.refresh().members.keys() == {"a", "b"}

    def test_another_start_gets_its_own_time(self, store: Store, member: Callable[..., Member], clock: Clock) -> None:
        store.create_group("eu", ["a", "b"], drop_after_s=30)
        a, _ = member("a"), member("b")
        prepare(a)
        assert not a.try_promote()
        clock.now_s += 20
        member("b")
        a.step()
        assert not a.try_promote()
        clock.now_s += 20
        assert not a.try_promote()
        clock.now_s += 20
        assert a.try_promote()

    def test_nobody_who_is_awaited_is_dropped_by_policy(
        self, store: Store, member: Callable[..., Member], clock: Clock
    ) -> None:
        store.create_group("eu", ["a", "b"], drop_after_s=30)
        a = member("a")
        store.group("eu").propose()
        prepare(a)
        for _ in range(3):
            clock.now_s += 1000
            assert not a.try_promote()
        assert a.log.refresh().awaited == ("b",)
        store.group("eu").drop("b")
        a.step()
        assert a.try_promote()

    def test_who_does_not_apply_is_dropped_by_policy(
        self, store: Store, member: Callable[..., Member], clock: Clock
    ) -> None:
        """It died after the last acknowledgement: nobody else would ever serve the version."""
        store.create_group("eu", ["a", "b"], drop_after_s=30)
        a, b = member("a"), member("b")
        first = prepare(a)
        prepare(b)
        a.step()
        assert a.try_promote()
        for _ in range(2):
            assert not a.all_applied()
            clock.now_s += 1000
        assert a.log.refresh().members.keys() == {"a", "b"}, "who has not applied drops nobody"
        a.applied(first, first.root)
        assert not a.all_applied()
        clock.now_s += 29.9
        assert not a.all_applied()
        assert not a.try_promote(), "waiting for other acknowledgements does not begin anew"
        clock.now_s += 0.2
        assert a.all_applied()
        assert a.state.members.keys() == {"a"}
        with pytest.raises(FencedError, match="had not applied main@0 30 s after a"):
            b.step()

    def test_who_never_came(self, store: Store, member: Callable[..., Member]) -> None:
        store.create_group("eu", ["a"])
        with pytest.raises(FencedError, match="it was never admitted"):
            member("a", join=False).step()


def test_another_root_is_never_acknowledged(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"])
    a = member("a")
    wanted = a.step().prepare
    assert wanted is not None
    for acknowledge in (lambda: a.prepared(wanted, None, "0" * 64), lambda: a.applied(wanted, "0" * 64)):
        with pytest.raises(IntegrityError, match="something else than group eu wants"):
            acknowledge()
    assert store._objects.list("groups/eu/acks/") == {}


def test_a_proposal_of_what_is_not_there_is_noticed(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"], proposing="manual")
    a = member("a")
    a.log.propose(VersionRoot("main@0", "0" * 64))
    wanted = a.step().prepare
    assert wanted is not None
    with pytest.raises(IntegrityError, match="a version that the line does not have"):
        a.located(wanted)
    a.log.withdraw("wrong")
    a.log.propose(VersionRoot("main@9", "0" * 64))
    wanted = a.step().prepare
    assert wanted is not None
    with pytest.raises(NotFoundError, match="no such version"):
        a.located(wanted)


def test_a_foreign_acknowledgement_in_our_place_is_named(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"])
    a = member("a")
    wanted = a.step().prepare
    assert wanted is not None
    from dcr_store.format.groups import Ack

    key = Ack("prepared", "eu", "a", a.incarnation, wanted).key
    for foreign in (
        Ack("prepared", "eu", "b", a.incarnation, wanted),
        Ack("applied", "eu", "a", a.incarnation, wanted),
        Ack("prepared", "us", "a", a.incarnation, wanted),
    ):
        store._objects.put(key, foreign.to_bytes())
        with pytest.raises(IntegrityError, match="another acknowledgement is stored in this place") as caught:
            a.prepared(wanted, None, wanted.root)
        assert caught.value.key == key


def test_said_again_with_another_base_the_first_counts(store: Store, member: Callable[..., Member]) -> None:
    store.create_group("eu", ["a"])
    a = member("a")
    wanted = prepare(a)
    a.prepared(wanted, "1" * 64, wanted.root)
    assert a.try_promote()


def test_polling_costs_a_constant_number_of_requests(store: Store) -> None:
    store.create_group("eu", ["a", "b"])
    objects = Watched(store._objects)
    catalog = Catalog(objects, store._document, store._catalog.store_sha256)
    a, b = Member(catalog, "eu", "a"), Member(catalog, "eu", "b")
    a.join()
    b.join()

    def requests(act: Callable[[], Any]) -> int:
        before = len(objects.requests)
        act()
        return len(objects.requests) - before

    a.step()
    assert requests(a.step) == 1
    prepare(a)
    assert requests(a.step) == 1
    a.try_promote()
    assert requests(a.try_promote) == 1, "a listing"
    prepare(b)
    assert a.try_promote()
    a.applied(a.active, a.active.root)  # type: ignore[arg-type,union-attr]
    a.step()
    assert requests(a.step) == 2, "the group's log and the line's"
    assert requests(lambda: a.step(knows_head=True)) == 1


def test_what_an_operator_asks_wrongly(store: Store) -> None:
    group = store.create_group("eu", ["a"])
    before = store._objects.list("groups/")
    create: Any = store.create_group
    act: Any = group
    for wrong, says in (
        (lambda: create(None), "cannot name a group"),
        (lambda: create("us", 3), "is no list of names"),
        (lambda: create("us", "a"), "is no list of names"),
        (lambda: create("us", [3]), "cannot name a member"),
        (lambda: create("us"), "nobody could come into group us.*admission 'anyone'"),
        (lambda: create("us", iter(())), "nobody could come into group us"),
        (lambda: create("us", line="a/b"), "cannot name a line"),
        (lambda: create("us", admission="nobody"), "unknown admission"),
        (lambda: create("us", proposing=None), "unknown proposing"),
        *(
            (lambda n=n: create("us", drop_after_s=n), "is no number of seconds")
            for n in (0, -1, True, 1.5, "3", 2**53)
        ),
        (lambda: act.propose(3), "is no version"),
        (lambda: act.withdraw("main@0", 3), "the reason is no text"),
        (lambda: act.drop("a", None), "the reason is no text"),
        (lambda: act.drop(None), "cannot name a member"),
        (lambda: act.admit("a.b"), "cannot name a member"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            wrong()
    assert store._objects.list("groups/") == before


def test_a_replaced_start_whose_admission_got_no_answer_never_comes_back(
    store: Store, member: Callable[..., Member]
) -> None:
    """It was admitted without knowing it, then another start was: otherwise two would be fenced in turn."""
    store.create_group("eu", ["a"])

    class Lost(Watched):
        """Puts what it is told to, and says so from the second time on."""

        def put_if_absent(self, key: str, data: Bytes) -> bool:
            is_first = self.count("put_if_absent") == 0
            created = super().put_if_absent(key, data)
            if is_first:
                raise OutcomeUnknownError("no answer", key=key)
            return created

    catalog = Catalog(Lost(store._objects), store._document, store._catalog.store_sha256)
    first = Member(catalog, "eu", "a")
    with pytest.raises(OutcomeUnknownError):
        first.join()
    second = member("a")
    with pytest.raises(FencedError, match="another start of the same name"):
        first.join()
    prepare(second)
    assert second.try_promote()
