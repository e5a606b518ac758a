"""What the simulation found of maintenance that runs beside others: each once, with the right outcome."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import assert_same, series, write_hf
from upkeep import facts, require_no_waste, through, when
from watched import Watched

import dcr_store
from dcr_store.errors import ConflictError, FencedError, NotFoundError
from dcr_store.format.names import new_txid
from dcr_store.format.ranges import Ranges
from dcr_store.layout import slices
from dcr_store.maintain import retention
from dcr_store.receive.member import Member
from dcr_store.store import Store

STATES = [{name: array[:7] for name, array in state.items() if name != "layers.0.mlp.weight"} for state in series(8)]
TENSORS = {"a": ("U16", (200,))}


class Timed(Watched):
    """A store whose own clock the test sets."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.now = 0.0
        self.times: dict[str, float] = {}

    def _note(self, method: str, key: str) -> None:
        if method in ("put", "put_if_absent"):
            self.times.setdefault(key, self.now)
        super()._note(method, key)

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        self._note("dated", prefix)
        return {key: (nbytes, self.times.get(key, 0.0)) for key, nbytes in self.inner.list(prefix).items()}


@pytest.fixture
def store() -> Iterator[Store]:
    with dcr_store.create(f"memory://upkeep-{secrets.token_hex(8)}", chunk_elements=64) as store:
        publish(store, 6)
        yield store


def publish(store: Store, n: int) -> None:
    for _ in range(n):
        state = STATES[len(store.log()) if "main" in store.lines() else 0]
        with store.begin(owner="run") as transaction:
            for name, array in state.items():
                transaction.write(name, array)
            transaction.commit()


def clear_away(store: Store, **keep: Any) -> None:
    other = dcr_store.open(store.url)
    other.expire(**keep)
    other.gc(grace_s=0)


def at_request(objects: Watched, is_it: Callable[[str, str], bool], act: Callable[[], object]) -> None:
    """Let something happen just before the first such request."""
    done: list[bool] = []

    def before(method: str, key: str) -> None:
        if not done and is_it(method, key):
            done.append(True)
            act()

    objects.before = before


# ---------------------------------------------------------------------- what expires at the same moment


@pytest.mark.parametrize("what", ["anchor", "fold", "fork"])
def test_what_expires_before_a_work_on_it_begins_is_told_as_expired(store: Store, what: str) -> None:
    """Not as damage of the log: it was kept when it was looked at."""
    other = dcr_store.open(store.url)
    acts: dict[str, Callable[[], object]] = {
        "anchor": lambda: store.anchor("main@2"),
        "fold": lambda: store.fold("main@1", "main@5"),
        "fork": lambda: store.fork("main@2", "exp"),
    }
    with (
        when("log.fork.before" if what == "fork" else "log.intent.before", lambda: other.expire(keep_last=2)),
        pytest.raises(NotFoundError, match="expired"),
    ):
        acts[what]()
    assert not facts(store._objects, "main").open
    assert store.lines() == ["main"]


def test_an_expiry_that_finds_all_of_it_done_does_nothing(store: Store) -> None:
    other = dcr_store.open(store.url)
    with when("log.intent.before", lambda: other.expire(keep_last=2)):
        assert store.expire(keep_last=2).versions == ()
    assert facts(store._objects, "main").expired == {0, 1, 2, 3}
    with when("log.intent.before", lambda: other.expire(keep_last=2)):
        assert store.expire(keep_last=1).versions == ("main@4",)
    assert not facts(store._objects, "main").open
    assert_same(dcr_store.open(store.url).read("main"), STATES[5])


def publish_on(store: Store, line: str, states: list[Any]) -> None:
    for state in states:
        with store.begin(line, owner="run") as transaction:
            for name, array in state.items():
                transaction.write(name, array)
            transaction.commit()


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_line_that_goes_on_keeps_its_way_over_the_other_one(is_folded: bool) -> None:
    """What is pinned while others are stored first keeps the way that it has: the line's own, and its parent's."""
    store = dcr_store.create(f"memory://upkeep-{secrets.token_hex(8)}", chunk_elements=64)
    publish(store, 3)
    store.fork("main@2", "exp")
    publish_on(store, "exp", STATES[3:8])
    if is_folded:
        store.fold("exp@3", "exp@6")
    other = dcr_store.open(store.url)
    with when("edge.partition.stored", lambda: other.pin("exp@6", "evaluation")):
        done = store.expire("exp")
    assert done.versions == ("exp@3", "exp@4", "exp@5")
    store.gc(grace_s=0)
    fresh = dcr_store.open(store.url)
    for number in (6, 7):
        assert_same(fresh.read(f"exp@{number}"), STATES[number])
    assert fresh.verify(deep=True).ok
    require_no_waste(fresh)


# ---------------------------------------------------------------------- what is collected at the same moment


def test_a_collection_beside_another_one_is_not_told_of_damage(store: Store) -> None:
    objects = Timed(store._objects)
    through(store, objects).gc(grace_s=0, dry_run=True)
    n_requests = objects.count("get", "versions/")
    for at in (1, 2, n_requests // 2, n_requests):
        copy = dcr_store.create(f"memory://upkeep-{secrets.token_hex(8)}", chunk_elements=64)
        publish(copy, 6)
        left, objects = [at], Timed(copy._objects)

        def is_next(method: str, key: str, left: list[int] = left) -> bool:
            left[0] -= method == "get" and key.startswith("versions/")
            return left[0] == 0

        at_request(objects, is_next, lambda copy=copy: clear_away(copy))  # type: ignore[misc]
        through(copy, objects).gc(grace_s=0)
        require_no_waste(copy)


def test_the_grace_of_a_shared_file_begins_when_the_last_version_is_gone_that_has_it(scratch: Path) -> None:
    made = dcr_store.create(f"memory://upkeep-{secrets.token_hex(8)}", chunk_elements=64)
    objects = Timed(made._objects)
    store = through(made, objects)
    for number in range(2):
        with store.begin(owner="run") as transaction:
            transaction.write_checkpoint(write_hf(scratch / f"{number}", STATES[number]))
    publish(store, 1)
    files = [key for key in objects.list("versions/main/") if "/files/" in key]
    assert files
    assert {key.split("/")[2][:12] for key in files} == {"000000000000"}, "version 1 refers to those of version 0"
    objects.now = 100.0
    assert store.expire(keep_last=2).versions == ("main@0",)
    objects.now = 200.0
    assert store.expire(keep_last=1).versions == ("main@1",)
    objects.now = 250.0
    found = store.gc(grace_s=100)
    assert any(key.startswith("versions/main/000000000000-") for key in found.keys), "the rest of version 0 may go"
    assert set(files) <= objects.list("versions/main/").keys()
    objects.now = 300.0
    assert set(files) <= set(store.gc(grace_s=100).keys)
    require_no_waste(store)


def test_an_acknowledgement_of_a_version_that_is_proposed_meanwhile_stays(store: Store) -> None:
    store.create_group("g", ["a"], proposing="manual")
    other = dcr_store.open(store.url)
    member = Member(other._catalog, "g", "a")
    member.join()

    def prepare() -> None:
        other.group("g").propose("main@4")
        wanted = member.step().prepare
        assert wanted is not None
        member.prepared(wanted, None, wanted.root)

    objects = Timed(store._objects)
    at_request(objects, lambda method, key: (method, key) == ("dated", "groups/g/acks/"), prepare)
    assert through(store, objects).gc(grace_s=0).keys == []
    assert member.try_promote()


# ---------------------------------------------------------------------- who publishes beside it


def test_who_slept_until_the_transaction_was_collected_is_fenced(store: Store) -> None:
    other = dcr_store.open(store.url)
    transaction = store.begin(owner="run")
    for name, array in STATES[6].items():
        transaction.write(name, array)

    def end() -> None:
        other.begin(owner="run", takeover=True).abort()
        other.gc(grace_s=0)

    with when("publish.seal.stored", end), pytest.raises(FencedError):
        transaction.commit()
    assert len(dcr_store.open(store.url).log()) == 6


def test_who_slept_until_the_anchor_was_collected_is_fenced(store: Store) -> None:
    other = dcr_store.open(store.url)

    def end() -> None:
        with pytest.raises(KeyboardInterrupt), when("publish.seal.before", _die):
            other.anchor("main@3", owner="a")
        other.gc(grace_s=0)

    with when("publish.seal.stored", end), pytest.raises(FencedError):
        store.anchor("main@3", owner="a")
    assert not facts(store._objects, "main").edges
    assert not facts(store._objects, "main").open


def _die() -> None:
    raise KeyboardInterrupt


def test_a_base_to_which_another_way_leads_meanwhile_is_no_damaged_one(store: Store) -> None:
    publisher = dcr_store.open(store.url)
    with warnings.catch_warnings(), when("log.begin.after", lambda: clear_away(store)):
        warnings.simplefilter("error")
        publish(publisher, 1)
    assert facts(store._objects, "main").commits[6]["base"] is not None
    assert_same(dcr_store.open(store.url).read("main"), STATES[6])


def test_who_owns_what_stays_for_the_next_version_of_several_writers() -> None:
    """Its writers refer to the documents of the head, also where the head is kept by an anchor."""
    store = dcr_store.create(f"memory://upkeep-{secrets.token_hex(8)}", chunk_elements=64)
    other = dcr_store.open(store.url)
    state = np.random.default_rng(0).integers(0, 1 << 16, 200, np.uint16)
    for number in range(6):
        state = state.copy()
        state[[number, 150 + number]] ^= 1
        first = store.begin(owner="run", writers=("w0", "w1"), tensors=TENSORS)
        second = other.join(first.txid, writer="w1", timeout_s=5)
        for transaction, start in ((first, 0), (second, 100)):
            part = slices.flat_part("a", *TENSORS["a"], start, start + 100)
            transaction.write_slice(state[start : start + 100], part)
        second.seal()
        assert first.commit(timeout_s=5).version == f"main@{number}"
        second.commit(timeout_s=5)
        assert_same(dcr_store.open(store.url).read("main"), {"a": state})
        if number % 2:
            dcr_store.open(store.url).anchor("main")
            clear_away(store)
            require_no_waste(store)
            report = dcr_store.open(store.url).verify(deep=True)
            assert report.ok, report.problems
            assert report.unreferenced == []


# ---------------------------------------------------------------------- names


def test_a_name_that_two_put_stays_where_only_one_of_them_is_refused(store: Store) -> None:
    """The second found it, and read the log, before the expiry began; the first reads the log after."""
    other = dcr_store.open(store.url)

    def second() -> None:
        assert other.tag("main@2", "best").version == "main@2"
        log = other._catalog.fresh("main")
        retention._begin(log, Ranges.of([1, 2]), new_txid(), "an expiry", takeover=False)

    with when("mark.put", second), pytest.raises(ConflictError, match="about to expire"):
        store.tag("main@2", "best")
    assert [tag.version for tag in store.tags()] == ["main@2"]
    done = store.expire(keep_last=2, takeover=True)
    assert done.versions == ("main@0", "main@1", "main@3")
    assert_same(dcr_store.open(store.url).read("main@best"), STATES[2])


@pytest.mark.parametrize("kind", ["tag", "pin"])
def test_nothing_is_put_for_what_is_known_to_be_about_to_expire(store: Store, kind: str) -> None:
    log = dcr_store.open(store.url)._catalog.fresh("main")
    retention._begin(log, Ranges.of([1, 2]), new_txid(), "an expiry", takeover=False)
    with pytest.raises(ConflictError, match="about to expire"):
        getattr(store, kind)("main@2", "n")
    assert store._objects.list("tags/") == store._objects.list("pins/") == {}
