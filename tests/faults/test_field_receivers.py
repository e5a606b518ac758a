"""What broke for users of other systems, where it touches receivers: each kind of target, groups, relays.

Numbers are those of the same list as in ``test_field_regressions``; what a single pull shows is there.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import handmade
import numpy as np
import pytest
from faults.failing import FailingObjects, over
from faults.scenes import Place, rename_side_file
from faults.small_targets import (
    CHUNK_ELEMENTS,
    KINDS,
    SHAPES,
    Bits,
    InPlace,
    Kept,
    Memory,
    Native,
    octets,
    publish,
    states,
    write,
)
from relays import RelayThread
from states import raw, tree
from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.errors import DcrError, FormatError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import JournalEntry, Partition
from dcr_store.format.names import TransactionKeys
from dcr_store.layout.tensors import to_array
from dcr_store.objects import fallback
from dcr_store.objects import streaming as streaming_of_objects
from dcr_store.objects.open import open_objects
from dcr_store.ports import ObjectStore
from dcr_store.receive import pacing
from dcr_store.receive.bringing import Bringer
from dcr_store.receive.keeper import StoreReplacedError
from dcr_store.receive.results import Active, Applied
from dcr_store.store import Store

STATES = states(4)
OTHERS = states(4, seed=9)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_LONGEST_REST_S", 0.05)
    monkeypatch.setattr(pacing, "_FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(pacing, "_LONGEST_RETRY_S", 0.1)
    monkeypatch.setattr(pacing, "_LONGEST_BLOCK_S", 0.1)
    monkeypatch.setattr(fallback, "WRONG_S", 1.0)  # of a relay
    monkeypatch.setattr(fallback, "AWAY_S", 0.1)


def new_store(series: list[Bits], n_versions: int = 2) -> Store:
    store = dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=CHUNK_ELEMENTS)
    for bits in series[:n_versions]:
        publish(store, bits)
    return store


@pytest.fixture
def store() -> Iterator[Store]:
    with new_store(STATES) as store:
        yield store


@pytest.fixture(params=list(KINDS))
def kept(request: pytest.FixtureRequest, scratch: Path) -> Kept:
    """A target of each kind."""
    return KINDS[request.param](scratch)


def follow(store: Store, target: Bringer, version: str, **hooks: Any) -> Active | None:
    with store.receiver(target) as receiver:
        receiver.follow(until=version, once=True, **hooks)
        return receiver.active()


def test_03_a_target_of_another_store_is_told_apart(kept: Kept, store: Store, scratch: Path) -> None:
    """A store opened with another base model served the previous one: the base was named, never compared."""
    with new_store(OTHERS) as other:  # of the same names, shapes, and numbers
        for is_new in (False, True):
            with contextlib.ExitStack() as stack:
                target = kept.start()
                first = stack.enter_context(store.receiver(target))
                first.follow(once=True)
                assert kept.found() == octets(STATES[1])
                before = tree(scratch)
                second = stack.enter_context(other.receiver(kept.start() if is_new else target))
                assert second.poll().active is None
                if kept.refuses_foreign:
                    for attempt in (lambda r=second: r.follow(until="main@1"), lambda r=second: r.prepare("main")):
                        with pytest.raises(InvalidInputError, match="follows another store"):
                            attempt()
                    assert second.active() is None
                    assert kept.found() == octets(STATES[1])
                    assert tree(scratch) == before
                else:
                    second.follow(until="main@1", once=True)
                    assert second.active() == Active("main@1", other.show("main@1").info.root)
                    assert kept.found() == octets(OTHERS[1])


class Exchanged:
    """A store that is deleted, and another one made in its place, while some have it open."""

    def __init__(self, scratch: Path) -> None:
        self.place = Place(str(scratch / "store"))
        with self.place.create(chunk_elements=CHUNK_ELEMENTS) as store:
            publish(store, STATES[0])
            publish(store, STATES[1])
            store.create_group("eu", ["r1"])

    def exchange(self, n_versions: int) -> None:
        shutil.rmtree(self.place.url)
        with self.place.create(chunk_elements=CHUNK_ELEMENTS) as store:
            for bits in OTHERS[:n_versions]:
                publish(store, bits)
            store.create_group("eu", ["r1"])

    def objects(self) -> dict[str, bytes]:
        return tree(Path(self.place.url))

    def assert_is_usable(self, scratch: Path) -> None:
        """Assert that the new store goes on, and its group promotes."""
        with self.place.open() as store:
            n_versions = len(store.log())
            version = publish(store, OTHERS[n_versions])
            assert store.verify(deep=True).ok
            fresh = InPlace(scratch / "fresh")
            with store.receiver(fresh.start(), group="eu", name="r1") as receiver:
                receiver.follow(until=version)
            assert fresh.found() == octets(OTHERS[n_versions])


@pytest.mark.parametrize("through", ["directory", "relay"])
@pytest.mark.parametrize("n_versions", [0, 1, 2])
def test_02_03_nobody_writes_into_a_store_that_took_the_place_of_his(
    scratch: Path, through: str, n_versions: int
) -> None:
    """A restarted trainer began again at version 0, in a store of another model: who had the old one open is told."""
    exchanged = Exchanged(scratch)
    with contextlib.ExitStack() as stack:
        url = exchanged.place.url
        if through == "relay":
            url = stack.enter_context(RelayThread(url, scratch / "cache")).url
        publisher, reader = (stack.enter_context(dcr_store.open(url)) for _ in range(2))
        kept = InPlace(scratch)
        member = stack.enter_context(reader.receiver(kept.start(), group="eu", name="r1"))
        member.follow(until="main@1")
        publish(publisher, STATES[2])
        group = reader.group("eu")
        assert group.status().active == "main@1"
        held = kept.found()
        exchanged.exchange(n_versions)
        before = exchanged.objects()
        time.sleep(0.3)  # for which a relay may give answers of before
        for attempt in (
            lambda: publish(publisher, STATES[3]),
            lambda: member.follow(once=True),
            lambda: group.propose("main@0"),
            lambda: group.drop("r1", "by hand"),
        ):
            with pytest.raises(DcrError):
                attempt()
            assert exchanged.objects() == before
        assert kept.found() == held
        exchanged.assert_is_usable(scratch)


def test_02_03_a_relay_whose_store_is_exchanged_shows_the_new_one(scratch: Path) -> None:
    """A store opened with another base model served the previous one: here out of a relay's memory."""
    exchanged = Exchanged(scratch)
    with RelayThread(exchanged.place.url, scratch / "cache") as relay:
        kept = InPlace(scratch)
        with dcr_store.open(relay.url) as early:
            follow(early, kept.start(), "main@1")
            exchanged.exchange(2)
            time.sleep(0.3)
            with dcr_store.open(relay.url) as late:
                assert late.store_id != early.store_id
                fresh = InPlace(scratch / "fresh")
                follow(late, fresh.start(), "main@1")
                assert fresh.found() == octets(OTHERS[1])
                assert late.verify(deep=True).ok
                with pytest.raises(InvalidInputError, match="follows another store"):
                    follow(late, kept.start(), "main@1")
            # Who has had it open since before is told, also where the log has as many records.
            with early.receiver(kept.start()) as receiver, pytest.raises(StoreReplacedError):
                receiver.follow(on_failure=lambda *_: None)
        assert kept.found() == octets(STATES[1])


class Process:
    """A process that keeps a target; another one takes its place with ``restart``. A context manager."""

    def __init__(self, store: Store, kept: Kept) -> None:
        self._store, self._kept = store, kept
        self.receiver = store.receiver(kept.start())

    def bring(self, version: str) -> Applied:
        self.receiver.prepare(version)
        return self.receiver.apply()

    def restart(self) -> None:
        self.receiver.close()
        self.receiver = self._store.receiver(self._kept.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.receiver.close()


def points_of(process: Process, version: str) -> list[tuple[str, int]]:
    """Return the points that are reached on the way to a version, each with its first time and its last."""
    counted: Counter[str] = Counter()
    with events.listening(lambda event: counted.update([event.name])):
        process.bring(version)
    del counted["progress"]
    return sorted({(name, nth) for name, count in counted.items() for nth in (1, count)})


def interrupted(process: Process, version: str, point: tuple[str, int]) -> None:
    """Bring a target towards a version until a point is reached."""
    n_left = point[1]

    def interrupt(event: events.Event) -> None:
        nonlocal n_left
        if event.name == point[0]:
            n_left -= 1
            if n_left == 0:
                raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), events.listening(interrupt):
        process.bring(version)


@pytest.mark.parametrize("is_killed", [False, True])
def test_06_a_partial_refit_ends_without_the_trainer(kept: Kept, store: Store, is_killed: bool) -> None:
    """A partial refit needed operators: recover without the trainer, never XOR twice; failures injected everywhere."""
    watched = Watched(open_objects(store.url))
    with Process(over(watched), kept) as process:  # type: ignore[arg-type]
        process.bring("main@0")
        points = points_of(process, "main@1")
        assert len(points) > 8
        for point in points[:: 2 if is_killed and isinstance(kept, Native) else 1]:
            process.bring("main@0")
            assert kept.found() == octets(STATES[0])
            interrupted(process, "main@1", point)
            if is_killed:
                process.restart()
            process.bring("main@1")
            assert kept.found() == octets(STATES[1]), point
    assert {method for method, _ in watched.requests} <= {"get", "list", "list_names", "size"}


def test_06_a_receiver_outlives_every_failure_of_the_store(kept: Kept, store: Store) -> None:
    """A partial refit needed operators: here the same process goes on by itself."""
    objects = FailingObjects(open_objects(store.url))
    reader = over(objects)
    n_failures = 0
    with reader.receiver(kept.start(), spool_nbytes=0) as receiver:
        receiver.prepare("main@0")
        receiver.apply()
        for lasting in (False, True):
            for at in range(200):
                objects.at, objects.lasting, objects.n_calls, objects.failed = at, lasting, 0, []
                with contextlib.suppress(StorageError, IntegrityError):
                    receiver.prepare("main@1")
                    receiver.apply()
                is_over = not objects.failed
                n_failures += not is_over
                objects.at = None
                receiver.prepare("main@1")
                receiver.apply()
                assert kept.found() == octets(STATES[1])
                receiver.prepare("main@0")
                receiver.apply()
                assert kept.found() == octets(STATES[0])
                if is_over:
                    break
    assert n_failures > 3


def test_11_what_has_two_names_is_changed_once(kept: Kept, store: Store) -> None:
    """A tensor exported by two pipeline stages was XORed twice: here one that is tied, in each kind of target."""
    for bits in STATES[2:]:
        publish(store, bits)
    with Process(store, kept) as process:
        for number in (0, 1, 2, 3, 1, 0):
            process.bring(f"main@{number}")
            assert kept.found() == octets(STATES[number])


def test_11_untied_copies_of_a_tied_tensor_are_each_changed_once(store: Store) -> None:
    target = Memory(Path())
    target.tensors["head"] = target.tensors["embed"].clone()
    with Process(store, target) as process:
        for number in (0, 1, 0, 1):
            process.bring(f"main@{number}")
            assert target.found() == octets(STATES[number])


def dense(store: Store, bits: Bits) -> handmade.Dense:
    layout = store._catalog.layout(store._catalog.resolve("main").row.layout)
    state = handmade.zeros(layout)
    for name, array in bits.items():
        entry = layout.entry(name)
        state[entry.space][entry.start : entry.stop] = array
    return state


def test_11_a_version_of_two_writers_of_one_tensor_reaches_no_target(
    kept: Kept, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor exported by two pipeline stages was XORed twice: a version that says so is defective, goes nowhere."""
    with Process(store, kept) as process:
        process.bring("main@1")
        base, new = dense(store, STATES[1]), dense(store, STATES[2])
        mask = {"u16": base["u16"] ^ new["u16"]}
        layout = store._catalog.layout(store._catalog.resolve("main").row.layout)
        once = handmade.after
        monkeypatch.setattr(handmade, "after", lambda old, parts: once(old, parts[:1]))
        handmade.publish(store, layout, [handmade.Part("w0", mask), handmade.Part("w1", dict(mask))], base)
        assert store.show("main@2").info.version == "main@2"
        for restart in (False, True):
            if restart:
                process.restart()
                process.bring("main@1")
            with pytest.raises(IntegrityError, match="defective") as caught:
                process.bring("main@2")
            assert caught.value.key == "main@2"
            assert (active := process.receiver.active()) is None or active.version == "main@1"
            process.bring("main@1")
            assert kept.found() == octets(STATES[1])


HOSTILE = ["../evil", "/tmp/dcr-evil", "a/../../evil", ".", "..", "", "a//b", ".dcr/marker.json", "a\\b", "a\0b", "./a"]


@pytest.mark.parametrize("path", HOSTILE)
@pytest.mark.parametrize("kind", ["in place", "copy"])
def test_17_paths_of_side_files_are_refused(scratch: Path, checkpoints: list[Path], kind: str, path: str) -> None:
    """Names from a manifest used as paths (`..`, absolute, ".")."""
    place = Place(str(scratch / "store"))
    with place.create() as store, store.begin() as transaction:
        transaction.write_checkpoint(checkpoints[0])
    objects = open_objects(place.url)
    manifest_key = rename_side_file(objects, path)
    kept = KINDS[kind](scratch / "in")
    before = set(scratch.rglob("*"))
    with place.open() as store:
        for act in ("prepare", "follow"):
            with store.receiver(kept.start()) as receiver:
                with pytest.raises(FormatError) as caught:
                    _ = receiver.prepare("main@0") if act == "prepare" else receiver.follow(once=True)
                assert caught.value.key == f"{manifest_key}#files[1]"
    found = {item.relative_to(scratch).parts[0] for item in set(scratch.rglob("*")) - before}
    assert found <= {"in"}
    assert not Path("/tmp/dcr-evil").exists()


@pytest.mark.parametrize("kind", ["in place", "copy"])
def test_17_names_of_tensors_are_no_paths(store: Store, scratch: Path, kind: str) -> None:
    names = ["../../up", "/etc/x", ".", "a/b", "current", "main@0"]
    with store.begin("odd") as transaction:
        for number, name in enumerate(names):
            transaction.write(name, np.full(70, number, np.int16))
    kept = KINDS[kind](scratch / "in")
    with store.receiver(kept.start(), line="odd") as receiver:
        receiver.follow(once=True)
    assert kept.found() == {name: np.full(70, number, np.int16).tobytes() for number, name in enumerate(names)}
    assert [item.name for item in (scratch / "in").iterdir()] == ["target"]
    assert {path.name for path in scratch.rglob("*.safetensors")} == {"model.safetensors"}


@pytest.mark.parametrize(
    "name", ["../evil", "/evil", "..", ".", "", "a/b", "a\\b", "a\0b", "a b", "-a", "ü", "x" * 129, 7]
)
def test_17_names_of_groups_receivers_and_lines_are_refused_before_anything_is_asked(
    store: Store, scratch: Path, name: Any
) -> None:
    store.create_group("eu", ["r1"])
    watched = Watched(open_objects(store.url))
    reader = over(watched)  # type: ignore[arg-type]
    watched.requests.clear()
    target = scratch / "target"
    for attempt in (
        lambda: reader.receiver(target, group=name, name="r1"),
        lambda: reader.receiver(target, line=name),
        lambda: reader.create_group(name, ["r1"]),
        lambda: reader.create_group("us", [name]),
        lambda: reader.group(name).status(),
    ):
        with pytest.raises(InvalidInputError):
            attempt()
    assert watched.requests == []
    for attempt in (
        lambda: reader.receiver(target, group="eu", name=name),
        lambda: reader.group("eu").admit(name),
        lambda: reader.group("eu").drop(name),
    ):
        with pytest.raises(InvalidInputError):
            attempt()
    assert {method for method, _ in watched.requests} <= {"get", "list_names"}
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"array": "../../../../evil"},
        {"array": "/etc/passwd"},
        {"array": "u16/mask/../../../x"},
        {"incarnation": "../../x"},
        {"incarnation": "/" * 16},
        {"index": -1},
        {"index": "../x"},
        {"sha256": "../" * 21 + "x"},
        {"nbytes": 10**30},
        {"nbytes": -1},
    ],
)
def test_17_keys_of_partitions_in_a_hostile_journal_lead_nowhere(
    store: Store, scratch: Path, changed: dict[str, Any]
) -> None:
    """Names from a manifest used as paths: here from a journal, of which a receiver fetches ahead."""
    watched = Watched(open_objects(store.url))
    reader = over(watched)  # type: ignore[arg-type]
    kept = InPlace(scratch)
    with reader.receiver(kept.start(), spool=scratch / "spool") as receiver:
        receiver.follow(once=True)
        transaction = store.begin()
        write(transaction, STATES[2])
        keys = TransactionKeys("main", 2, transaction.txid)
        entry = JournalEntry(
            "main", transaction.txid, 0, "w0", "0" * 16, 0, None,
            (Partition("u16/mask", 0, "0" * 16, 10, "0" * 64, 1),), None,
        )  # fmt: skip
        document = json.loads(entry.to_bytes())
        document["partitions"][0].update(changed)
        store._objects.put(keys.journal("w0", "0" * 16, 0), canonical.encode(document))
        watched.requests.clear()
        seen = receiver.poll().open
        assert seen is not None
        time.sleep(0.05)
        assert watched.count("get", "evil") == watched.count("get", "passwd") == watched.count("get", "..") == 0
        assert watched.count("get", "0" * 16 + "/u16") == 0
        transaction.commit()
        receiver.follow(once=True)
    assert kept.found() == octets(STATES[2])
    assert {item.name for item in scratch.iterdir()} == {"spool", "target"}


@pytest.mark.parametrize(
    "body",
    [
        {"line": "../evil"},
        {"checkpoint": "../../x"},
        {"checkpoint": -1},
        {"checkpoint": 10**40},
        {"last_sha256": "../x"},
        {"length": -5},
        {"format": "../x"},
    ],
)
def test_17_a_hostile_hint_is_passed_over(store: Store, scratch: Path, body: dict[str, Any]) -> None:
    """Names from a manifest used as paths: here from a hint, through a relay."""
    objects = store._objects
    good = json.loads(objects.get("log/main/latest.json"))
    objects.put("log/main/latest.json", canonical.seal_body({**good["body"], **body}))
    watched = Watched(open_objects(store.url))
    kept = InPlace(scratch)
    with RelayThread(watched, scratch / "cache") as relay, dcr_store.open(relay.url) as reader:
        follow(reader, kept.start(), "main@1")
    assert kept.found() == octets(STATES[1])
    assert not [key for _, key in watched.requests if ".." in key or "evil" in key]


HALF_VISIBLE = ["manifest.json", "/digests/", "/c/", "contributions.bin", "layouts/", "/journal/", "log/main/"]


@pytest.mark.parametrize("through", ["directly", "relay"])
@pytest.mark.parametrize("part", HALF_VISIBLE)
def test_23_a_version_that_is_half_visible_is_waited_for(store: Store, scratch: Path, part: str, through: str) -> None:
    """Files visible before the index: a reader took what it saw. Here the record is there, and what it names is not."""
    watched = Watched(open_objects(store.url))
    kept = InPlace(scratch)
    n_hidden = 0

    def hide(method: str, key: str) -> None:
        nonlocal n_hidden
        if method == "get" and part in key and key not in known and n_hidden < 3:
            n_hidden += 1
            raise NotFoundError("no such object", key=key)

    with contextlib.ExitStack() as stack:
        if through == "relay":
            url = stack.enter_context(RelayThread(watched, scratch / "cache")).url
            reader = stack.enter_context(dcr_store.open(url))
        else:
            reader = over(watched)  # type: ignore[arg-type]
        receiver = stack.enter_context(reader.receiver(kept.start()))
        receiver.follow(once=True)
        known = set(store._objects.list(""))
        changed = {**STATES[2], "norm": STATES[3]["norm"]}
        if part == "layouts/":
            changed["more"] = np.ones(80, np.uint16)
        publish(store, changed)
        watched.before = hide
        failures: list[DcrError] = []
        receiver.follow(until="main@2", on_failure=lambda error, _: failures.append(error))
    assert n_hidden > 0
    assert part == "log/main/" or failures, "it was told"
    assert kept.found() == octets(changed)


def data_of(objects: ObjectStore, number: int) -> list[str]:
    """Return the keys of a version's partitions."""
    keys = objects.list("versions/main/")
    return [key for key in keys if f"/{number:012d}-" in key and "/data/" in key and "/c/" in key]


HOW = ["cut", "flipped", "of the version before", "empty", "longer"]
UPLOADED = [("in place", how, way) for how in HOW for way in ("directly", "relay")]
UPLOADED += [(kind, how, "directly") for kind in KINDS if kind != "in place" for how in HOW[1:3]]


@pytest.mark.parametrize(("kind", "how", "through"), UPLOADED)
def test_23_objects_that_are_uploaded_again_while_they_are_read(
    store: Store, scratch: Path, kind: str, how: str, through: str
) -> None:
    """A manifest valid while its files were being uploaded again: nothing of it reaches a target before it is right."""
    objects, kept = store._objects, KINDS[kind](scratch)
    with contextlib.ExitStack() as stack:
        url = store.url
        if through == "relay":
            url = stack.enter_context(RelayThread(objects, scratch / "cache")).url
        reader = stack.enter_context(dcr_store.open(url))
        receiver = stack.enter_context(reader.receiver(kept.start(), spool_nbytes=0))
        receiver.follow(once=True)
        publish(store, STATES[2])
        before, after = data_of(objects, 1), data_of(objects, 2)
        key, data = after[0], objects.get(after[0])
        other = {
            "cut": data[: len(data) // 2],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "of the version before": objects.get(before[0]),
            "empty": b"",
            "longer": data + b"x",
        }[how]
        objects.put(key, other)
        failures: list[DcrError] = []

        def failed(error: DcrError, _: float) -> None:
            failures.append(error)
            assert kept.found() == octets(STATES[1])
            assert receiver.active() == Active("main@1", store.show("main@1").info.root)
            if len(failures) == 2:
                objects.put(key, data)

        receiver.follow(until="main@2", on_failure=failed)
        assert receiver.active() == Active("main@2", store.show("main@2").info.root)
    assert kept.found() == octets(STATES[2])
    assert all(error.key == key for error in failures), failures
    # A relay may have begun to pass it on, and then breaks off.
    assert any(isinstance(error, IntegrityError) for error in failures), failures
    assert through == "relay" or all(isinstance(error, IntegrityError) for error in failures), failures


def test_23_an_object_that_is_exchanged_in_the_middle_of_a_transfer(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploaded again while it is read: here between two pieces that a relay has begun to pass on."""
    monkeypatch.setattr(streaming_of_objects, "RANGE_NBYTES", 100)
    store = new_store(STATES, 3)
    watched = Watched(store._objects)
    (key,) = data_of(store._objects, 2)
    data = store._objects.get(key)
    assert len(data) > 200
    n_pieces = 0

    def exchange(method: str, asked: str) -> None:
        nonlocal n_pieces
        if asked == key and method == "get":
            n_pieces += 1
            store._objects.put(key, bytes([byte ^ 0x55 for byte in data]) if n_pieces in (2, 3, 4) else data)

    watched.before = exchange
    kept = InPlace(scratch)
    with RelayThread(watched, scratch / "cache") as relay, dcr_store.open(relay.url) as reader:
        with reader.receiver(kept.start()) as receiver:
            receiver.follow(until="main@2", on_failure=lambda *_: None)
        assert n_pieces > 4
        assert kept.found() == octets(STATES[2])
        assert (
            sum(path.read_bytes() == data for path in (scratch / "cache" / "objects").rglob("*") if path.is_file()) == 1
        )
    store.close()


def test_23_nothing_of_an_open_transaction_reaches_a_target(kept: Kept, store: Store) -> None:
    """Files visible before the index: all of a version but its commit is there, sealed, and fetched ahead."""
    with store.receiver(kept.start()) as receiver:
        receiver.follow(once=True)
        transaction = store.begin()
        write(transaction, STATES[2])
        looks = 0
        one_at_a_time = threading.Lock()

        def look(event: events.Event) -> None:
            nonlocal looks
            if event.name not in ("publish.partition.stored", "publish.seal.stored", "publish.proposal.stored"):
                return
            with one_at_a_time:
                looks += 1
                polled = receiver.poll()
                assert (polled.wanted, receiver.active()) == (None, Active("main@1", store.show("main@1").info.root))
                receiver.follow(once=True)
                assert kept.found() == octets(STATES[1])

        with events.listening(look):
            transaction.commit()
        assert looks >= 2
        receiver.follow(once=True)
        assert kept.found() == octets(STATES[2])


CHANGES: dict[str, int] = {"embed": 5, "norm": -1}  # in a chunk that changes, and in one that does not


@pytest.mark.parametrize("name", CHANGES)
def test_24_a_target_that_others_change_between_preparing_and_applying(kept: Kept, store: Store, name: str) -> None:
    """The live buffer changed while it was being read: here a target's, by somebody whom nobody knows of."""
    with Process(store, kept) as process:
        process.bring("main@0")
        process.receiver.prepare("main@1")
        kept.flip(name, CHANGES[name])
        applied = process.receiver.apply()
        assert applied.version == "main@1"
        if isinstance(kept, Memory) and name == "norm":
            # What the version does not change is not looked at, unless something else was wrong: that is what makes it
            # quick. Whoever changes tensors says so, or torch does.
            assert kept.found() == flipped(octets(STATES[1]), name, CHANGES[name])
        else:
            assert kept.found() == octets(STATES[1])
            assert applied.chunks_healed == 1
        process.restart()  # who starts looks at everything
        process.bring("main@1")
        assert kept.found() == octets(STATES[1])


POINTS = {
    "in place": ("pull.dirty", "replay.chunk.before", "replay.chunk.written", "pull.replayed"),
    "copy": ("copy.dirty", "copy.source.read", "copy.chunk.copied", "replay.chunk.before"),
    "memory": ("memory.begun", "replay.chunk.before", "replay.chunk.written"),
    "native": ("native.load.before", "native.tensor.given", "native.load.written"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(("kind", "point"), [(kind, point) for kind, points in POINTS.items() for point in points])
def test_24_a_target_that_others_change_while_it_is_brought(
    store: Store, scratch: Path, kind: str, point: str, name: str
) -> None:
    """The live buffer changed while it was being read: it is right at once, or the next time; nothing stays wrong."""
    kept = KINDS[kind](scratch)
    with Process(store, kept) as process:
        process.bring("main@0")
        n_flips = 0

        def flip(event: events.Event) -> None:
            nonlocal n_flips
            if event.name == point and not n_flips:
                n_flips = 1
                kept.flip(name, CHANGES[name])

        with contextlib.suppress(IntegrityError), events.listening(flip):
            process.bring("main@1")
        assert n_flips == 1
        if kind == "copy":
            # What was built is of the bits that were proven, or nothing was switched to.
            assert kept.found() in (octets(STATES[1]), flipped(octets(STATES[0]), name, CHANGES[name]))
        process.restart()
        for version, bits in (("main@0", STATES[0]), ("main@1", STATES[1])):
            process.bring(version)
            assert kept.found() == octets(bits)


def flipped(found: dict[str, bytes], name: str, element: int) -> dict[str, bytes]:
    data = bytearray(found[name])
    data[2 * element] ^= 4
    return {**found, name: bytes(data)}


def test_24_what_a_receiver_gets_of_a_trainer_who_trains_on_is_one_state(kept: Kept, store: Store) -> None:
    """The live buffer changed while it was being read: what a receiver ends with is the version that was committed."""
    live = {name: bits.copy() for name, bits in STATES[1].items()}
    stop = threading.Event()

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            for name in ("q", "k", "norm"):  # not what is tied, which would be two tensors if it changed in between
                live[name][:] = step & 0x3FFF

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(3):
            given = {name: to_array(live[name], "BF16", shape, "torch") for name, shape in SHAPES.items()}
            with store.begin(owner="test") as transaction:  # of the live memory, with no copy between
                for name, tensor in {**given, "head": given["embed"]}.items():
                    transaction.write(name, tensor)
    finally:
        stop.set()
        thread.join()
    with store.receiver(kept.start()) as receiver:
        receiver.follow(once=True)
        active = receiver.active()
    head = store.show("main").info
    assert active == Active(head.version, head.root)
    assert kept.found() == {name: raw(tensor) for name, tensor in store.read("main", framework="torch").items()}
