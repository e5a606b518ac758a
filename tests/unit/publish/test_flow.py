"""Flow control: waiting for groups, not running ahead of them."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import numpy as np
import pytest

import dcr_store
from dcr_store.errors import InvalidInputError, LagError, NotFoundError
from dcr_store.receive.member import Member
from dcr_store.store import Store


@pytest.fixture
def store() -> Store:
    return dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64)


def publish(store: Store, **options: Any) -> str:
    with store.begin(**options) as transaction:
        transaction.write("w", np.full(100, 1, np.int32))
        return transaction.commit().version


def follow(store: Store, group: str = "eu", name: str = "a") -> Member:
    member = Member(store._catalog, group, name)
    member.join()
    return member


def advance(member: Member) -> None:
    wanted = member.step()
    if wanted.prepare is not None:
        member.prepared(wanted.prepare, None, wanted.prepare.root)
    member.try_promote()


class TestWaiting:
    def test_until_all_have_promoted(self, store: Store) -> None:
        store.create_group("eu", ["a"])
        store.create_group("us", ["b"])
        members = [follow(store), follow(store, "us", "b")]
        promoted = []

        def work() -> None:
            for member in members:
                time.sleep(0.1)
                while member.active is None:
                    advance(member)
                promoted.append(member.group)

        thread = threading.Thread(target=work)
        with store.begin() as transaction:
            transaction.write("w", np.zeros(3, np.int32))
            thread.start()
            assert transaction.commit(wait_for=["eu", "us"]).version == "main@0"
            assert [store.group(name).status().active for name in ("eu", "us")] == ["main@0", "main@0"]
        thread.join()

    def test_a_later_version_will_do(self, store: Store) -> None:
        store.create_group("eu", ["a"])
        transaction = store.begin()
        transaction.write("w", np.zeros(3, np.int32))
        with pytest.raises(LagError):
            transaction.commit(wait_for=["eu"], timeout_s=0)
        publish(store)
        advance(follow(store))
        assert transaction.commit(wait_for=["eu"], timeout_s=0).version == "main@0"

    def test_the_version_is_committed_when_that_takes_too_long(self, store: Store) -> None:
        store.create_group("eu", ["a", "b"])
        a = follow(store)

        def commit() -> None:
            with store.begin() as transaction:
                transaction.write("w", np.zeros(3, np.int32))
                transaction.commit(wait_for=["eu"], timeout_s=0.1)

        with pytest.raises(LagError, match=r"main@0 is committed, but not promoted everywhere after 0\.1 s") as caught:
            commit()
        assert "group eu is at no version and waits for b to come" in str(caught.value)
        assert (caught.value.kind, caught.value.key) == ("lag", "main@0")
        assert str(caught.value).endswith("; commit again to go on waiting")
        assert [info.version for info in store.log()] == ["main@0"]
        b = follow(store, "eu", "b")
        advance(a)
        with pytest.raises(LagError, match="group eu is at no version and waits for b to prepare main@0"):
            commit()
        advance(b)
        assert store.group("eu").status().active == "main@0"

    def test_groups_are_looked_at_before_anything_is_committed(self, store: Store) -> None:
        store.create_group("eu", ["a"])
        store.create_group("other", ["a"], line="exp")
        for groups, error, says in (
            (["us"], NotFoundError, "there is no group 'us'"),
            (["other"], InvalidInputError, "does not follow the line"),
            ("eu", InvalidInputError, "is no list of groups"),
            ([3], InvalidInputError, "cannot name a group"),
        ):
            transaction = store.begin()
            transaction.write("w", np.zeros(3, np.int32))
            with pytest.raises(error, match=says):
                transaction.commit(wait_for=groups)  # type: ignore[arg-type]
            transaction.abort()
        for wrong in (-1, "1"):
            with pytest.raises(InvalidInputError, match="timeout_s is how long"):
                store.begin(takeover=True).commit(wait_for=["eu"], timeout_s=wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidInputError, match="timeout_s is how long"):  # before us is looked for
                store.begin(takeover=True).commit(wait_for=["us"], timeout_s=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="timeout_s is how long"):
            store.begin(takeover=True).commit(timeout_s=1)
        assert store.log() == []


class TestRunningAhead:
    def test_no_more_than_so_many_versions(self, store: Store) -> None:
        store.create_group("eu", ["a"])
        a = follow(store)
        flow: dict[str, Any] = {"max_ahead": 2, "ahead_of": ["eu"]}
        assert [publish(store, **flow) for _ in range(2)] == ["main@0", "main@1"]
        with pytest.raises(LagError, match="main@2 would be more than 2 ahead") as caught:
            store.begin(**flow)
        assert "group eu is at no version and waits for a member to propose" in str(caught.value)
        assert str(caught.value).endswith("; begin again when they have caught up")
        advance(a)
        assert a.active is not None
        assert a.active.version == "main@1"
        assert [publish(store, **flow) for _ in range(2)] == ["main@2", "main@3"]
        with pytest.raises(LagError, match="group eu is at main@1"):
            store.begin(**flow)
        assert store._catalog.log("main").refresh().open is None
        assert publish(store) == "main@4", "who does not ask is not held"

    def test_what_is_asked_wrongly(self, store: Store) -> None:
        store.create_group("eu", ["a"])
        for options, says in (
            ({"max_ahead": 1}, "go together .expected both or neither, found max_ahead 1, ahead_of no group"),
            ({"ahead_of": ["eu", "us"]}, "go together .* found max_ahead None, ahead_of eu, us.$"),
            ({"max_ahead": 0, "ahead_of": ["us"]}, "is no distance"),  # us does not exist: nothing is read before
            ({"max_ahead": 0, "ahead_of": ["eu"]}, "is no distance"),
            ({"max_ahead": "1", "ahead_of": ["eu"]}, "is no distance"),
            ({"max_ahead": True, "ahead_of": ["eu"]}, "is no distance"),
            ({"max_ahead": 1, "ahead_of": 3}, "is no list of groups"),
            ({"max_ahead": 1, "ahead_of": "eu"}, "is no list of groups"),
        ):
            with pytest.raises(InvalidInputError, match=says):
                store.begin(**options)  # type: ignore[arg-type]
        with pytest.raises(NotFoundError, match="there is no group 'us'"):
            store.begin(max_ahead=1, ahead_of=["us"])
