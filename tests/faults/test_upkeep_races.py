"""Maintenance beside readers, publishers, other maintenance, and names that are put at the moment of an expiry.

A reader gets the right bits, or is told that the version has expired: an object that is collected under it is no
damage of the store.
"""

from __future__ import annotations

import multiprocessing
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copies import cloned
from states import assert_same, series, write_hf
from upkeep import facts, require_no_waste, through, when
from watched import Watched

import dcr_store
from dcr_store.errors import ConflictError, DcrError, FencedError, IntegrityError, NotFoundError
from dcr_store.format.marks import Named
from dcr_store.receive import pacing
from dcr_store.receive.member import Member
from dcr_store.store import Store

STATES = [{name: array[:7] for name, array in state.items() if name != "layers.0.mlp.weight"} for state in series(12)]
State = dict[str, np.ndarray[Any, Any]]


class DatedWatched(Watched):
    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        self._note("dated", prefix)
        return self.inner.dated(prefix)  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def template() -> Iterator[Store]:
    with dcr_store.create(f"memory://upkeep-{secrets.token_hex(8)}", chunk_elements=64) as store:
        publish(store, 6)
        yield store


@pytest.fixture
def store(template: Store) -> Iterator[Store]:
    """A store of six versions, of the test's own."""
    with cloned(template) as store:
        yield store


def publish(store: Store, n: int, line: str = "main") -> None:
    for _ in range(n):
        number = len(store.log(line)) if line in store.lines() else 0
        with store.begin(line, owner="run") as transaction:
            for name, array in STATES[number].items():
                transaction.write(name, array)
            transaction.commit()


def watching(store: Store) -> tuple[Store, DatedWatched]:
    """The same store, seen by another process whose requests are watched."""
    objects = DatedWatched(store._objects)
    return through(store, objects), objects


def clear_away(store: Store, **keep: Any) -> None:
    other = dcr_store.open(store.url)
    other.expire(**keep)
    other.gc(grace_s=0)


def interrupted(objects: DatedWatched, at: int, act: Callable[[], None]) -> None:
    """Let something happen just before the n-th object under ``versions/`` is asked for."""
    left = [at]

    def before(method: str, key: str) -> None:
        if method == "get" and key.startswith("versions/"):
            left[0] -= 1
            if left[0] == 0:
                act()

    objects.before = before


READERS: dict[str, Callable[[Store, str, Path], State]] = {
    "read": lambda store, version, root: store.read(version),
    "read by name": lambda store, version, root: store.read(version, list(STATES[0])),
    "read parts": lambda store, version, root: store.read(version, dict.fromkeys(STATES[0])),
    "walk": lambda store, version, root: (
        next(
            iter(store.iter_states("main", int(version.partition("@")[2]), int(version.partition("@")[2]) + 1))
        ).tensors
    ),
    "load": lambda store, version, root: loaded(store, version),
    "patches": lambda store, version, root: patched(store, version),
    "diff": lambda store, version, root: store.read(version) if store.diff(version, "main@5").elements else {},
    "pull": lambda store, version, root: pulled(store, version, root),
    "pull a copy": lambda store, version, root: pulled(store, version, root, mode="copy"),
}


def loaded(store: Store, version: str) -> State:
    live = {name: np.zeros_like(array) for name, array in STATES[0].items()}
    store.load_into(live, version)
    return live


def patched(store: Store, version: str) -> State:
    """Version 5, brought to another one by what changes."""
    live = {name: array.copy() for name, array in STATES[5].items()}
    for patch in store.patches("main@5", version):
        if patch.indices is None:
            live[patch.name] = np.asarray(patch.values)
        else:
            live[patch.name].reshape(-1)[patch.indices] = patch.values
    return live


def pulled(store: Store, version: str, root: Path, **options: Any) -> State:
    store.pull(root / "node", version, **options)
    report = store.compare_directory(version, root / "node" / "current" if options else root / "node")
    assert report.ok, report.problems
    return STATES[int(version.partition("@")[2])]


@pytest.fixture(scope="module")
def template_of_files(tmp_path_factory: pytest.TempPathFactory) -> Store:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    store = dcr_store.create(f"memory://upkeep-{secrets.token_hex(8)}", chunk_elements=64)
    for number, state in enumerate(STATES[:6]):
        with store.begin(owner="run") as transaction:
            transaction.write_checkpoint(write_hf(checkpoints / f"step{number}", state))
    return store


@pytest.fixture
def files(template_of_files: Store) -> Store:
    """A store of checkpoints, which can be pulled, of the test's own."""
    return cloned(template_of_files)


def cleared_away(files: Store, n_requests: int, is_kept: bool) -> Iterator[tuple[int, Store]]:
    """Yield readers of copies, and at which of their requests all that only old versions need goes away."""
    for at in sorted({1, n_requests, *(1 + n_requests * part // 5 for part in range(1, 5))}):
        copied = cloned(files)
        reader, objects = watching(copied)
        if is_kept:
            dcr_store.open(copied.url).tag("main@3", "kept")
        interrupted(objects, at, lambda copied=copied: clear_away(copied))  # type: ignore[misc]
        yield at, reader


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_version_is_collected_while_it_is_read(files: Store, scratch: Path, what: str, is_kept: bool) -> None:
    """At each object that is asked for, all that only old ways need goes away, and with it the version or not."""
    reader, objects = watching(files)
    READERS[what](reader, "main@3", scratch / "trial")
    n_requests = objects.count("get", "versions/")
    assert n_requests >= 4
    outcomes = set()
    for at, reader in cleared_away(files, n_requests, is_kept):
        try:
            assert_same(READERS[what](reader, "main@3", scratch / f"{at}"), STATES[3])
            outcomes.add("read")
        except NotFoundError as error:
            outcomes.add("expired" if "expired" in str(error) else str(error))
        except StopIteration:
            outcomes.add("expired")  # a walk leaves it out
    assert outcomes == {"read"} if is_kept else {"expired"} <= outcomes <= {"read", "expired"}


ASKERS: dict[str, Callable[[Store, Path, Path], object]] = {
    "blame": lambda store, root, place: store.blame("main@3", next(iter(STATES[0]))),
    "show": lambda store, root, place: store.show("main@3"),
    "identify": lambda store, root, place: store.identify(root / "near").version,
    "the same export again": lambda store, root, place: (
        store.export("main@3", "main@3", place, format="slime", with_first=True).found
    ),
}


@pytest.mark.parametrize("what", ASKERS)
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_version_is_collected_while_something_is_asked_about_it(
    files: Store, scratch: Path, what: str, is_kept: bool
) -> None:
    """Nobody is told of damage: there is an answer, or the version has expired."""
    near = {name: array.copy() for name, array in STATES[3].items()}
    next(iter(near.values())).reshape(-1).view(np.uint8)[0] ^= 1
    write_hf(scratch / "near", near)
    place = scratch / "series"
    files.export("main@3", "main@3", place, format="slime")
    reader, objects = watching(files)
    expected = ASKERS[what](reader, scratch, place)
    n_requests = objects.count("get", "versions/")
    assert n_requests >= 1
    outcomes = set()
    for _, reader in cleared_away(files, n_requests, is_kept):
        try:
            found = ASKERS[what](reader, scratch, place)
            # What is known of rows, and which version is nearest, depends on what is kept.
            assert what in ("blame", "identify") or found == expected
            outcomes.add("answered")
        except NotFoundError as error:
            assert what != "identify"
            outcomes.add("expired" if "expired" in str(error) else str(error))
    assert outcomes <= ({"answered"} if is_kept else {"answered", "expired"})


def test_what_has_expired_is_shown_so(store: Store) -> None:
    store.expire(keep_last=2)
    assert not store.show("main@1").info.is_kept
    assert store.show("main@5").info.is_kept
    store.gc(grace_s=0)
    assert not store.show("main@1").info.is_kept


def test_what_is_really_lost_is_told_as_damage(store: Store) -> None:
    keys = store._objects.list("versions/main/")
    key = next(key for key in keys if key.startswith("versions/main/000000000003-") and "/mask/c/" in key)
    store._objects.delete(key)
    reader, objects = watching(store)
    with pytest.raises(IntegrityError, match="missing"):
        reader.read("main@3")
    # Also where something changes meanwhile that has nothing to do with it.
    interrupted(objects, 3, lambda: dcr_store.open(store.url).anchor("main@1"))  # type: ignore[arg-type, return-value]
    with pytest.raises(IntegrityError, match="missing"):
        through(store, objects).read("main@3")


def test_a_walk_goes_on_past_what_expires_under_it(store: Store) -> None:
    walk = dcr_store.open(store.url).iter_states("main")
    assert_same(next(walk).tensors, STATES[0])
    store.tag("main@3", "kept")
    clear_away(store)
    rest = list(walk)
    assert [state.info.version for state in rest] == ["main@3", "main@5"]
    for state in rest:
        assert_same(state.tensors, STATES[int(state.info.version.partition("@")[2])])


def test_verify_is_not_misled_by_what_is_collected_under_it(store: Store) -> None:
    reader, objects = watching(store)
    interrupted(objects, 9, lambda: clear_away(store, keep_last=2))
    report = reader.verify(deep=True)
    assert report.ok, report.problems
    assert report.versions == ["main@4", "main@5"]
    assert report.unreferenced == []


@pytest.mark.parametrize("mode", ["in-place", "copy"])
def test_a_directory_of_a_version_that_has_expired_is_pulled_further(files: Store, scratch: Path, mode: str) -> None:
    node = scratch / "node"
    files.pull(node, "main@1", mode=mode)  # type: ignore[call-overload]
    clear_away(files, keep_last=2)
    over = dcr_store.open(files.url)
    with pytest.raises(NotFoundError, match="expired"):
        over.pull(node, "main@2", mode=mode)  # type: ignore[call-overload]
    assert over.pull(node, mode=mode).version == "main@5"  # type: ignore[call-overload]
    assert over.compare_directory("main", node / "current" if mode == "copy" else node).ok


@pytest.mark.parametrize("target", ["directory", "memory"])
def test_a_receiver_whose_version_has_expired_goes_on(
    files: Store, scratch: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_LONGEST_REST_S", 0.05)
    live = {name: np.zeros_like(array) for name, array in STATES[0].items()}
    held: Any = scratch / "node" if target == "directory" else live
    failures: list[DcrError] = []
    with dcr_store.open(files.url).receiver(held) as receiver:
        receiver.follow(once=True)
        for number in (6, 7, 8):
            with files.begin(owner="run") as transaction:
                transaction.write_checkpoint(write_hf(scratch / f"step{number}", STATES[number]))
        clear_away(files)
        receiver.follow(once=True, on_failure=lambda error, wait_s: failures.append(error))
        assert receiver.active().version == "main@8"  # type: ignore[union-attr]
    assert failures == []
    if target == "memory":
        assert_same(live, STATES[8])
    else:
        assert files.compare_directory("main", held).ok


@pytest.mark.parametrize("at", [1, 2, 4, 8, 12])
def test_a_receiver_under_which_is_collected_what_it_prepares(files: Store, scratch: Path, at: int) -> None:
    dcr_store.open(files.url).pull(scratch / "node", "main@2")
    reader, objects = watching(files)
    interrupted(objects, at, lambda: clear_away(files))
    with reader.receiver(scratch / "node") as receiver:
        receiver.prepare("main@5")
        assert receiver.apply().version == "main@5"
    assert files.compare_directory("main", scratch / "node").ok


# ---------------------------------------------------------------------- names at the moment of an expiry


@pytest.mark.parametrize("kind", ["tag", "pin"])
def test_a_name_put_before_the_expiry_has_said_what_it_is_about_keeps_the_version(store: Store, kind: str) -> None:
    other = dcr_store.open(store.url)
    with when("log.intent.before", lambda: getattr(other, kind)("main@2", "n")):
        result = store.expire(keep_last=2)
    assert result.versions == ("main@0", "main@1", "main@3")
    assert "main@2" in result.kept_for
    store.gc(grace_s=0)
    assert_same(dcr_store.open(store.url).read("main@2"), STATES[2])
    assert dcr_store.open(store.url).verify(deep=True).ok


@pytest.mark.parametrize("kind", ["tag", "pin"])
@pytest.mark.parametrize("point", ["expire.begun", "expire.decided"])
def test_a_name_put_after_that_is_refused_or_keeps_it(store: Store, kind: str, point: str) -> None:
    other = dcr_store.open(store.url)

    def name() -> None:
        with pytest.raises(ConflictError, match="about to expire"):
            getattr(other, kind)("main@2", "n")

    with when(point, name):
        store.expire(keep_last=2)
    assert store._objects.list("tags/") == store._objects.list("pins/") == {}
    with pytest.raises(NotFoundError, match="expired"):
        getattr(other, kind)("main@2", "n")


def test_a_name_that_a_dead_process_put_too_late_is_not_taken_for_one_that_keeps(store: Store) -> None:
    """The expiry has read the names; a process that read the log before puts a tag and dies; another puts the same."""
    other = dcr_store.open(store.url)
    root = other.show("main@2").info.root

    def name_twice() -> None:
        late = Named("tag", "n", "main@2", root, None, "2026-01-01T00:00:00.000Z")
        store._objects.put("tags/main/n.json", late.to_bytes())
        with pytest.raises(ConflictError, match="about to expire"):
            other.tag("main@2", "n")

    with when("expire.decided", name_twice):
        store.expire(keep_last=2)
    with pytest.raises(NotFoundError, match="expired"):
        other.tag("main@2", "n")
    with pytest.raises(NotFoundError, match=r"expired|no tag"):
        other.read("main@n")


def test_a_fork_at_the_moment_of_an_expiry_keeps_the_version(store: Store) -> None:
    other = dcr_store.open(store.url)
    with when("expire.decided", lambda: other.fork("main@2", "exp")):
        result = store.expire(keep_last=2)
    assert result.versions == ("main@0", "main@1", "main@3")
    store.gc(grace_s=0)
    publish(other, 2, "exp")
    assert_same(dcr_store.open(store.url).read("exp@2"), STATES[2])
    assert_same(dcr_store.open(store.url).read("exp@4"), STATES[4])
    assert dcr_store.open(store.url).verify(deep=True).ok


def test_an_expiry_that_another_one_has_ended_changes_nothing(store: Store) -> None:
    other = dcr_store.open(store.url)
    with when("expire.decided", lambda: other.expire(keep_last=4)), pytest.raises(FencedError):
        store.expire(keep_last=2)
    assert facts(store._objects, "main").expired == {0, 1}
    assert not facts(store._objects, "main").open


def test_an_expiry_of_another_owner_is_not_disturbed_unless_it_is_dead(store: Store) -> None:
    other = dcr_store.open(store.url)

    def intrude() -> None:
        with pytest.raises(ConflictError, match="another expiry"):
            other.expire(keep_last=4, owner="b")

    with when("expire.decided", intrude):
        store.expire(keep_last=2, owner="a")
    assert facts(store._objects, "main").expired == {0, 1, 2, 3}


def test_a_pin_that_has_ended_keeps_nothing(store: Store) -> None:
    store.pin("main@1", "ended", until=datetime.now(UTC) - timedelta(days=1))
    store.pin("main@2", "lasts", until=datetime.now(UTC) + timedelta(days=1))
    store.pin("main@3", "always")
    assert store.expire(keep_last=1).versions == ("main@0", "main@1", "main@4")


# ---------------------------------------------------------------------- groups at that moment


def group_of(store: Store) -> Member:
    store.create_group("g", ["a"], proposing="manual")
    member = Member(dcr_store.open(store.url)._catalog, "g", "a")
    member.join()
    return member


def test_a_version_is_not_prepared_that_an_expiry_may_let_go(store: Store) -> None:
    member = group_of(store)

    def decide() -> None:
        dcr_store.open(store.url).group("g").propose("main@2")
        wanted = member.step().prepare
        assert wanted is not None
        with pytest.raises(ConflictError, match="about to expire"):
            member.prepared(wanted, None, wanted.root)

    with when("expire.decided", decide):
        store.expire(keep_last=2)
    member._catalog.log("main").refresh()
    assert member.step().prepare is None, "a proposal that nobody can prepare is withdrawn"
    with pytest.raises(NotFoundError, match="expired"):
        store.group("g").propose("main@2")
    store.group("g").propose("main@4")
    wanted = member.step().prepare
    assert wanted is not None
    member.prepared(wanted, None, wanted.root)
    assert member.try_promote()


def test_what_an_earlier_promotion_rested_on_may_be_collected(store: Store) -> None:
    member = group_of(store)
    for version in ("main@3", "main@4"):
        store.group("g").propose(version)
        wanted = member.step().prepare
        assert wanted is not None
        member.prepared(wanted, None, wanted.root)
        assert member.try_promote()
    assert len(store._objects.list("groups/g/acks/main@3/")) == 1
    store.gc(grace_s=0)
    assert store._objects.list("groups/g/acks/main@3/") == {}
    assert len(store._objects.list("groups/g/acks/main@4/")) == 1
    assert store.verify().ok
    for key in store._objects.list("groups/g/acks/main@4/"):
        store._objects.delete(key)
    assert [problem.key for problem in store.verify().problems] == [
        f"groups/g/acks/main@4/prepared/a.{member.incarnation}.{4:020d}.json"
    ]


# ---------------------------------------------------------------------- all at once


def test_nothing_is_collected_before_its_grace_period_is_over(store: Store) -> None:
    store.tag("main@4", "kept")
    store.expire()
    before = store._objects.list("versions/")
    waiting = store.gc(grace_s=3600)
    assert waiting.keys == []
    assert waiting.n_waiting >= 4
    assert store._objects.list("versions/") == before
    assert len(store.gc(grace_s=0).keys) == waiting.n_waiting
    require_no_waste(store)


def test_everything_at_once(store: Store) -> None:
    """Two maintainers, a publisher and readers, in threads of their own: no error but "expired" and lost races."""
    over, wrong = threading.Event(), []

    def run(act: Callable[[Store, np.random.Generator], None], seed: int) -> None:
        rng, own = np.random.default_rng(seed), dcr_store.open(store.url)
        while not over.is_set():
            try:
                act(own, rng)
            except (NotFoundError, ConflictError) as error:
                if isinstance(error, NotFoundError) and "expired" not in str(error):
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)

    def maintain(own: Store, rng: np.random.Generator) -> None:
        number = int(rng.integers(len(own.log())))
        [
            lambda: own.expire(keep_last=int(rng.integers(1, 4)), owner=f"{rng.integers(2)}"),
            lambda: own.gc(grace_s=0),
            lambda: own.anchor(f"main@{number}"),
            lambda: number and own.fold(f"main@{number - 1}", f"main@{number}"),
            lambda: own.tag(f"main@{number}", f"t{number}"),
        ][int(rng.integers(5))]()

    def read(own: Store, rng: np.random.Generator) -> None:
        number = int(rng.integers(len(own.log())))
        if rng.integers(2):
            assert_same(own.read(f"main@{number}"), STATES[number])
        for state in own.iter_states("main", number):
            assert_same(state.tensors, STATES[int(state.info.version.partition("@")[2])])

    actors = [(maintain, 1), (maintain, 2), (read, 3), (read, 4)]
    threads = [threading.Thread(target=run, args=actor) for actor in actors]
    for thread in threads:
        thread.start()
    try:
        publish(store, len(STATES) - 6)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    fresh = dcr_store.open(store.url)
    for line in fresh.lines():
        fresh.expire(line, takeover=True)
    fresh.gc(grace_s=0)
    assert fresh.verify(deep=True).ok
    assert_same(fresh.read(), STATES[-1])
    require_no_waste(fresh)


# ---------------------------------------------------------------------- elsewhere


def test_an_anchor_and_a_fold_are_made_in_other_processes(scratch: Path) -> None:
    store = dcr_store.create(scratch / "store", chunk_elements=64)
    publish(store, 4)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        assert store.anchor("main@2", executor=executor).base is None
        assert store.fold("main@0", "main@3", executor=executor).base == "main@0"
    assert sorted(edge["kind"] for edge in facts(store._objects, "main").edges.values()) == ["anchor", "fold"]
    assert store.expire(keep_last=1).versions == ("main@0", "main@1", "main@2")
    fresh = dcr_store.open(scratch / "store")
    assert_same(fresh.read("main@3"), STATES[3])
    assert fresh.verify(deep=True).ok


def test_an_anchor_and_a_fold_are_made_by_a_cluster(scratch: Path) -> None:
    distributed = pytest.importorskip("distributed")
    store = dcr_store.create(scratch / "store", chunk_elements=64)
    publish(store, 4)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        executor = client.get_executor()
        assert store.anchor("main@2", executor=executor).base is None
        assert store.fold("main@0", "main@3", executor=executor).base == "main@0"
    store.expire(keep_last=2)
    store.gc(grace_s=0)
    fresh = dcr_store.open(scratch / "store")
    assert_same(fresh.read("main@2"), STATES[2])
    assert_same(fresh.read("main@3"), STATES[3])
    assert fresh.verify(deep=True).ok
