"""Receivers in a group: all prepare, then all apply; who comes late or comes back applies what was decided."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from states import law_step
from watched import Watched

import dcr_store
from dcr_store.errors import ConflictError, DcrError, FencedError, InvalidInputError, NotFoundError, StorageError
from dcr_store.objects.open import open_objects
from dcr_store.receive import pacing
from dcr_store.receive.receiver import Receiver
from dcr_store.receive.results import Active, Applied, Prepared
from dcr_store.store import Store

NAMES = ("r0", "r1", "r2")


def states(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    found = [rng.integers(0x3C00, 0x3F00, 4096, dtype=np.uint16)]
    for _ in range(n - 1):
        found.append(law_step(found[-1], 0.05, rng))
    return found


STATES = states(6)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_LONGEST_REST_S", 0.1)
    monkeypatch.setattr(pacing, "_FIRST_RETRY_S", 0.05)


@pytest.fixture
def store() -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=256) as store:
        yield store


def commit(store: Store, number: int) -> str:
    with store.begin() as transaction:
        transaction.write("w", STATES[number])
        return transaction.commit().root


def holds(target: Path, number: int) -> bool:
    return (target / "model.safetensors").read_bytes().endswith(STATES[number].tobytes())


def over(store: Store) -> Store:
    """The same store, opened by another process."""
    return dcr_store.open(store.url)


class Running:
    """A receiver that follows in a thread of its own, and what it did."""

    def __init__(self, store: Store, target: Path, name: str, **options: object) -> None:
        self.receiver = over(store).receiver(target, group="eu", name=name)
        self.log: list[tuple[str, str]] = []
        self.failures: list[DcrError] = []
        self.result: object = None
        self._options = options
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        def note(what: str) -> Callable[[Prepared | Applied | Active], None]:
            return lambda found: self.log.append((what, found.version))

        try:
            self.result = self.receiver.follow(
                **{  # type: ignore[arg-type]
                    "on_prepared": note("prepared"),
                    "on_applied": note("applied"),
                    "on_serving": note("serving"),
                    "on_failure": lambda error, _: self.failures.append(error),
                    **self._options,
                }
            )
        except BaseException as error:
            self.result = error

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), self.log
        self.receiver.close()

    def stop(self) -> None:
        self.receiver.stop()
        self.join()


def wait_for(condition: Callable[[], bool], what: object = "") -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def active(store: Store) -> str | None:
    return store.group("eu").status().active


def test_all_prepare_then_all_apply(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES)
    commit(store, 0)
    running = [Running(store, tmp_path / name, name, until="main@2") for name in NAMES[:2]]
    time.sleep(0.3)
    assert active(store) is None, "nothing is promoted before all expected have come"
    assert all(item.receiver.active() is None for item in running)
    running.append(Running(store, tmp_path / NAMES[2], NAMES[2], until="main@2"))
    wait_for(lambda: active(store) == "main@0")
    for number in (1, 2):
        commit(store, number)
        wait_for(lambda name=f"main@{number}": active(store) == name)
    for item in running:
        item.join()
        assert item.failures == []
        assert [version for what, version in item.log if what == "applied"] == ["main@0", "main@1", "main@2"]
        assert item.log.index(("prepared", "main@1")) < item.log.index(("applied", "main@1"))
        assert item.log.index(("applied", "main@2")) < item.log.index(("serving", "main@2"))
        assert item.receiver.active() == Active("main@2", store.show("main@2").info.root)
    assert all(holds(tmp_path / name, 2) for name in NAMES)
    assert {member.version for member in store.group("eu").status().members} == {"main@2"}


def test_no_target_leaves_the_active_version_before_all_have_prepared(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:2])
    commit(store, 0)
    running = [Running(store, tmp_path / name, name) for name in NAMES[:2]]
    wait_for(lambda: all(item.log[-1:] == [("serving", "main@0")] for item in running))
    running[1].stop()
    commit(store, 1)
    wait_for(lambda: ("prepared", "main@1") in running[0].log)
    time.sleep(0.3)
    assert holds(tmp_path / "r0", 0)
    assert running[0].receiver.active() == Active("main@0", store.show("main@0").info.root)
    assert active(store) == "main@0"
    # It comes back as another incarnation: it has to prepare anew.
    running[1] = Running(store, tmp_path / "r1", "r1")
    wait_for(lambda: all(("applied", "main@1") in item.log for item in running))
    assert running[1].log[0] == ("applied", "main@0"), "who starts is told where it is"
    for item in running:
        item.stop()
    assert all(holds(tmp_path / name, 1) for name in NAMES[:2])


def test_who_was_away_applies_what_was_decided(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:2])
    commit(store, 0)
    running = [Running(store, tmp_path / name, name) for name in NAMES[:2]]
    wait_for(lambda: all(("serving", "main@0") in item.log for item in running))
    running[1].stop()
    store.group("eu").drop("r1", "its node is gone")
    for number in (1, 2, 3):
        commit(store, number)
    wait_for(lambda: active(store) == "main@3")
    running[1] = Running(store, tmp_path / "r1", "r1", until="main@3")
    running[1].join()
    assert holds(tmp_path / "r1", 3)
    assert ("applied", "main@3") in running[1].log
    # And one that is new, from the cheapest path.
    store.group("eu").admit("r9")
    late = Running(store, tmp_path / "r9", "r9", until="main@3")
    late.join()
    assert holds(tmp_path / "r9", 3)
    running[0].stop()


def test_a_dropped_member_stops_serving(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:1])
    commit(store, 0)
    running = Running(store, tmp_path / "r0", "r0")
    wait_for(lambda: running.receiver.active() is not None)
    store.group("eu").drop("r0", "it misbehaved")
    running.join()
    assert isinstance(running.result, FencedError)
    assert "it misbehaved" in str(running.result)
    assert running.receiver.active() is None
    assert holds(tmp_path / "r0", 0)


def test_two_receivers_of_one_name(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:1])
    commit(store, 0)
    first = Running(store, tmp_path / "one", "r0")
    wait_for(lambda: first.receiver.active() is not None)
    second = Running(store, tmp_path / "two", "r0")
    first.join()
    assert isinstance(first.result, FencedError)
    assert first.receiver.active() is None
    wait_for(lambda: second.receiver.active() is not None)
    second.stop()


def test_step_by_step(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:2], proposing="manual")
    for number in range(3):
        commit(store, number)
    root = store.show("main@1").info.root
    receivers = [over(store).receiver(tmp_path / name, group="eu", name=name) for name in NAMES[:2]]
    for receiver in receivers:
        assert receiver.poll().wanted is None
        with pytest.raises(ConflictError, match="not promoted any version yet"):
            receiver.apply()
    store.group("eu").propose("main@1")
    for receiver in receivers:
        polled = receiver.poll()
        assert (polled.wanted, polled.may_apply) == ("main@1", False)
    assert receivers[0].prepare("main@1").version == "main@1"
    assert holds(tmp_path / "r0", 1), "it was empty"
    assert receivers[0].active() is None
    assert (receivers[0].poll().wanted, active(store)) == (None, None)
    receivers[1].prepare("main@0")  # not what is proposed: nobody is told
    assert active(store) is None
    prepared = receivers[1].prepare("main@1")
    assert prepared.base == "main@0"
    assert active(store) == "main@1"
    assert holds(tmp_path / "r1", 0)
    assert receivers[0].poll().active == Active("main@1", root), "it is there already"
    polled = receivers[1].poll()
    assert (polled.wanted, polled.may_apply) == ("main@1", True)
    assert receivers[1].apply().version == "main@1"
    assert receivers[1].active() == Active("main@1", root)
    assert store.group("eu").status().waits_for
    # Back to an older one: decided like any other.
    store.group("eu").propose("main@0")
    for receiver in receivers:
        receiver.poll()
        receiver.prepare("main@0")
    for name, receiver in zip(NAMES, receivers, strict=False):
        assert receiver.poll().wanted == "main@0"
        receiver.apply()
        assert holds(tmp_path / name, 0)
        receiver.close()


def test_once_does_what_can_be_done_now(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:2])
    commit(store, 0)
    receivers = [over(store).receiver(tmp_path / name, group="eu", name=name) for name in NAMES[:2]]
    for _ in range(3):
        for receiver in receivers:
            receiver.follow(once=True)
    assert active(store) == "main@0"
    commit(store, 1)
    receivers[0].follow(once=True)
    receivers[1].follow(once=True)  # the last one to prepare promotes, and applies
    assert (active(store), holds(tmp_path / "r0", 0), holds(tmp_path / "r1", 1)) == ("main@1", True, True)
    found = receivers[0].follow(once=True)
    assert found is not None
    assert found.version == "main@1"
    assert holds(tmp_path / "r0", 1)
    for receiver in receivers:
        receiver.close()


def test_a_proposal_that_cannot_be_prepared_is_not_promoted(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:2])
    commit(store, 0)
    running = [Running(store, tmp_path / name, name) for name in NAMES[:2]]
    wait_for(lambda: all(("serving", "main@0") in item.log for item in running))
    for item in running:
        item.stop()
    commit(store, 1)
    key = store._catalog.contents(store._catalog.resolve("main@1")).partitions[0].key
    good = store._objects.get(key)
    store._objects.put(key, good[:-1] + b"?")
    running = [Running(store, tmp_path / name, name) for name in NAMES[:2]]
    wait_for(lambda: all(item.failures for item in running))
    assert active(store) == "main@0"
    for name, item in zip(NAMES, running, strict=False):
        assert item.failures[0].key == key
        assert item.receiver.active() == Active("main@0", store.show("main@0").info.root)
        assert holds(tmp_path / name, 0)
    store._objects.put(key, good)
    wait_for(lambda: all(("applied", "main@1") in item.log for item in running))
    for item in running:
        item.stop()


def test_the_version_held_is_served_while_the_next_one_cannot_be_prepared(store: Store, tmp_path: Path) -> None:
    """Engines wait until all have applied; that does not end because a damaged version is proposed meanwhile."""
    store.create_group("eu", NAMES[:2])
    commit(store, 0)
    late = threading.Event()

    def wait(applied: Applied) -> None:
        assert late.wait(20)

    running = [Running(store, tmp_path / "r0", "r0"), Running(store, tmp_path / "r1", "r1", on_applied=wait)]
    wait_for(lambda: ("applied", "main@0") in running[0].log)
    commit(store, 1)
    key = store._catalog.contents(store._catalog.resolve("main@1")).partitions[0].key
    good = store._objects.get(key)
    store._objects.put(key, good[:-1] + b"?")
    wait_for(lambda: bool(running[0].failures) or ("prepared", "main@1") in running[0].log)
    late.set()
    wait_for(lambda: ("serving", "main@0") in running[0].log, running[0].log)
    store._objects.put(key, good)
    wait_for(lambda: all(("serving", "main@1") in item.log for item in running))
    for item in running:
        item.stop()


def test_an_engine_that_does_not_serve_does_not_hold_up_the_group(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:2])
    commit(store, 0)
    works = threading.Event()
    served: list[str] = []

    def serve(active: Active) -> None:
        if not works.is_set():
            raise StorageError("the engine does not answer")
        served.append(active.version)

    running = [Running(store, tmp_path / "r0", "r0", on_serving=serve), Running(store, tmp_path / "r1", "r1")]
    wait_for(lambda: bool(running[0].failures))
    commit(store, 1)
    wait_for(lambda: ("serving", "main@1") in running[1].log)
    works.set()
    wait_for(lambda: served == ["main@1"], served)
    for item in running:
        item.stop()


def test_step_by_step_the_group_is_asked_each_time(store: Store, tmp_path: Path) -> None:
    """What was promoted after the poll is applied, and who was dropped after it does not serve again."""
    store.create_group("eu", NAMES[:1])
    commit(store, 0)
    receiver = over(store).receiver(tmp_path / "r0", group="eu", name="r0")
    receiver.poll()
    receiver.prepare("main@0")
    receiver.apply()
    commit(store, 1)
    store.group("eu").propose("main@1")
    receiver.prepare("main@1")
    assert active(store) == "main@1", "the proposal was found by prepare itself"
    assert receiver.apply().version == "main@1"
    store.group("eu").drop("r0", "it misbehaved")
    for act in (receiver.apply, lambda: receiver.prepare("main@0")):
        with pytest.raises(FencedError, match="it misbehaved"):
            act()
        assert receiver.active() is None
    receiver.close()


def test_a_slow_hook_does_not_hold_up_the_promotion(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:2])
    commit(store, 0)
    go = threading.Event()
    called: list[str] = []

    def slowly(prepared: Prepared) -> None:
        called.append(prepared.version)
        assert go.wait(20)

    running = [Running(store, tmp_path / "r0", "r0", on_prepared=slowly), Running(store, tmp_path / "r1", "r1")]
    wait_for(lambda: called == ["main@0"])
    wait_for(lambda: active(store) == "main@0")
    go.set()
    for item in running:
        wait_for(lambda item=item: ("serving", "main@0") in item.log)
        item.stop()


def test_what_a_target_says_of_itself_is_not_acknowledged(store: Store, tmp_path: Path) -> None:
    """Its marker says that it is at the active version, and bits were changed since."""
    store.create_group("eu", NAMES[:1])
    commit(store, 0)
    with over(store).receiver(tmp_path / "r0", group="eu", name="r0") as receiver:
        receiver.poll()
        receiver.prepare("main@0")
        receiver.apply()
    weights = tmp_path / "r0" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with over(store).receiver(tmp_path / "r0", group="eu", name="r0") as receiver:
        polled = receiver.poll()
        assert (polled.active, polled.wanted, polled.may_apply) == (None, "main@0", True)
        assert store.group("eu").status().members[0].version is None
        receiver.apply()
        assert store.group("eu").status().members[0].version == "main@0"
        assert receiver.poll().active == Active("main@0", store.show("main@0").info.root)
    assert holds(tmp_path / "r0", 0)


def test_what_may_not_be_asked(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no group 'eu'"):
        store.receiver(tmp_path, group="eu", name="r0")
    store.create_group("eu", ["r0"])
    for arguments in ({"group": "eu"}, {"name": "r0"}):
        with pytest.raises(InvalidInputError, match="has a name"):
            store.receiver(tmp_path, **arguments)
    with pytest.raises(InvalidInputError, match="another line"):
        store.receiver(tmp_path, group="eu", name="r0", line="exp")
    with pytest.raises(InvalidInputError):
        store.receiver(tmp_path, group="eu", name="r.0")
    with (
        store.receiver(tmp_path, group="eu", name="r1", line="main") as receiver,
        pytest.raises(ConflictError, match="does not expect r1"),
    ):
        receiver.poll()


def test_polling_in_a_group_costs_a_constant_number_of_requests(store: Store, tmp_path: Path) -> None:
    store.create_group("eu", NAMES[:2])
    commit(store, 0)
    running = [Running(store, tmp_path / name, name) for name in NAMES[:2]]
    wait_for(lambda: all(("serving", "main@0") in item.log for item in running))
    for item in running:
        item.stop()
    watched = Watched(open_objects(store.url))
    receiver: Receiver = Store(watched, store._document, store._catalog.store_sha256).receiver(
        tmp_path / "r0", group="eu", name="r0"
    )
    receiver.poll()
    receiver.apply()
    receiver.poll()
    watched.requests.clear()
    receiver.poll()
    assert len(watched.requests) == 2, watched.requests

    def refuse(method: str, key: str) -> None:
        raise StorageError("no answer", key=key)

    watched.before = refuse
    with pytest.raises(StorageError):
        receiver.poll()
    assert receiver.active() is not None, "who cannot ask goes on serving"
    receiver.close()


def test_what_was_brought_while_it_prepared_is_told_too(store: Store) -> None:
    """A member of which nothing certain is known is brought to the version before it is promoted."""
    commit(store, 0)
    store.create_group("eu", ["r0"])
    live, told = {"w": np.zeros_like(STATES[0])}, []
    with over(store).receiver(live, group="eu", name="r0") as receiver:
        done = receiver.follow(until="main@0", on_applied=told.append)
    assert done is not None
    assert (done.version, done.chunks_written) == ("main@0", 16)
    assert told == [done]
    assert np.array_equal(live["w"], STATES[0])
