"""A receiver: polls, prepares, applies, follows; what is fetched ahead is fetched once; what fails is survived."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from states import law_step, tree, write_hf
from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.errors import ConflictError, DcrError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format.documents import JournalEntry, ObjectRef
from dcr_store.objects.open import open_objects
from dcr_store.payload.version import fetch
from dcr_store.publish import partitions
from dcr_store.publish.opening import LIVE
from dcr_store.publish.transaction import Transaction
from dcr_store.receive import keeper, pacing, streaming
from dcr_store.receive.bringing import DirectoryBringer
from dcr_store.receive.receiver import Receiver
from dcr_store.receive.results import Active, Applied, Prepared
from dcr_store.receive.spool import Spool, Tag
from dcr_store.receive.streaming import Streaming
from dcr_store.receive.transfers import Transfers
from dcr_store.store import Store
from dcr_store.targets.marker import Marker, lock, read_marker
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.prefetch import Fetch
from dcr_store.versions.replay import Outcome

CHUNK = 1024
N_TENSORS = 6
Array = np.ndarray


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many partitions, each journaled at once."""
    monkeypatch.setattr(partitions, "PARTITION_NBYTES", 2 * CHUNK * 2)
    monkeypatch.setattr(partitions, "JOURNAL_PARTITIONS", 1)
    monkeypatch.setattr(pacing, "_FIRST_RETRY_S", 0.05)


def states(n: int) -> list[dict[str, Array]]:
    rng = np.random.default_rng(5)
    state = {f"layers.{i}": rng.integers(0x3C00, 0x3F00, 4 * CHUNK, dtype=np.uint16) for i in range(N_TENSORS)}
    found = []
    for _ in range(n):
        found.append(state)
        state = {name: law_step(bits, 0.05, rng) for name, bits in state.items()}
    return found


STATES = states(6)


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with dcr_store.create(url, chunk_elements=CHUNK) as store:
        yield store


@pytest.fixture
def watched(store: Store) -> Watched:
    """What the receiver's requests go through."""
    return Watched(open_objects(store.url))


@pytest.fixture
def follower(store: Store, watched: Watched) -> Iterator[Store]:
    """The store as a receiver has it."""
    with Store(watched, store._document, store._catalog.store_sha256) as follower:
        yield follower


def commit(store: Store, number: int) -> None:
    with store.begin() as transaction:
        write(transaction, number, range(N_TENSORS))


def write(transaction: Transaction, number: int, tensors: range) -> None:
    for i in tensors:
        transaction.write(f"layers.{i}", STATES[number][f"layers.{i}"])
    transaction._writer.drain()
    for future in list(transaction._writer.partitions._uploads.futures):
        future.result()


def holds(target: Path, number: int) -> bool:
    weights = (target / "model.safetensors").read_bytes()
    expected = b"".join(STATES[number][f"layers.{i}"].tobytes() for i in range(N_TENSORS))
    return weights.endswith(expected)


def wait_until_spooled(receiver: Receiver, n_partitions: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        seen = receiver.poll().open
        if seen is not None and seen.n_spooled >= n_partitions:
            return
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)


def fetched(watched: Watched) -> Counter[str]:
    """How often each partition was asked for."""
    return Counter(key for method, key in watched.requests if method == "get" and "/c/" in key and "/data/" in key)


# ------------------------------------------------------------------ poll, prepare, apply


def test_polling_costs_a_constant_number_of_requests(
    store: Store, follower: Store, watched: Watched, tmp_path: Path
) -> None:
    for number in range(3):
        commit(store, number)
    with follower.receiver(tmp_path / "target") as receiver:
        polled = receiver.poll()
        assert polled.head == Active("main@2", store.show("main@2").info.root)
        assert (polled.open, polled.active, receiver.active()) == (None, None, None)
        receiver.prepare("main")
        receiver.apply()
        watched.requests.clear()
        assert receiver.poll().active == polled.head
        assert watched.requests == [("get", "log/main/00000000000000000006.json")]
        transaction = store.begin()
        write(transaction, 3, range(2))
        wait_until_spooled(receiver, 4)
        watched.requests.clear()
        seen = receiver.poll().open
        assert seen is not None
        assert (seen.version, seen.txid, seen.attempt) == ("main@3", transaction.txid, 0)
        assert (seen.n_partitions, seen.n_spooled, seen.nbytes_spooled) == (4, 4, seen.nbytes)
        prefix = f"versions/main/{3:012d}-{transaction.txid}/journal/"
        assert watched.requests == [("get", "log/main/00000000000000000007.json"), ("list", prefix)]
        transaction.abort()


def test_prepared_means_that_applying_fetches_nothing(
    store: Store, follower: Store, watched: Watched, tmp_path: Path
) -> None:
    checkpoints = [write_hf(tmp_path / f"checkpoint{i}", STATES[i], n_files=2, step=i) for i in range(3)]
    (checkpoints[2] / "tokenizer" / "vocab.txt").write_text("c\n")
    for checkpoint in checkpoints[:2]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = tmp_path / "target"
    with follower.receiver(target) as receiver:
        receiver.prepare("main@0")
        assert tree(target) == tree(checkpoints[0]), "an empty directory has nothing to lose"
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoints[2])
        before = tree(target)
        prepared = receiver.prepare("main@2")
        assert tree(target) == before
        assert (prepared.version, prepared.base) == ("main@2", "main@0")
        assert prepared.base_root == store.show("main@0").info.root
        assert prepared.nbytes_spooled == prepared.nbytes > 0
        wanted = {
            item.key for i in (1, 2) for item in store._catalog.contents(store._catalog.resolve(f"main@{i}")).partitions
        }
        assert set(fetched(watched)) >= wanted
        assert set(fetched(watched).values()) == {1}

        def refuse(method: str, key: str) -> None:
            raise StorageError("the network is gone", key=key)

        watched.before = refuse
        applied = receiver.apply()
        assert tree(target) == tree(checkpoints[2])
        assert (applied.version, applied.previous, applied.nbytes_fetched) == ("main@2", "main@0", 0)
        assert applied.nbytes_spooled > 0
        assert receiver.active() == Active("main@2", prepared.root)
        # And back: masks lead both ways.
        watched.before = None
        back = receiver.prepare("main@0")
        assert back.n_objects == len(wanted) + 5  # two headers each, one side file
        watched.before = refuse
        receiver.apply()
        assert tree(target) == tree(checkpoints[0])


def test_what_may_not_be_asked(store: Store, tmp_path: Path) -> None:
    commit(store, 0)
    with store.begin("other") as transaction:
        transaction.write("w", np.zeros(4, np.int8))
    with store.receiver(tmp_path / "target") as receiver:
        (tmp_path / "file").write_bytes(b"a file")
        with pytest.raises(InvalidInputError, match="cannot be a spool"):
            store.receiver(tmp_path / "other", spool=tmp_path / "file")
        with pytest.raises(InvalidInputError, match="nothing is prepared"):
            receiver.apply()
        with pytest.raises(NotFoundError, match="no such version"):
            receiver.prepare("main@7")
        with pytest.raises(InvalidInputError, match="no version of the line") as caught:
            receiver.prepare("other@0")
        assert (caught.value.expected, caught.value.found) == ("main", "other")
        for until in ("main", "other@3", "0123456789abcdef"):
            with pytest.raises(InvalidInputError, match="no version to follow the line until"):
                receiver.follow(until=until)
    with pytest.raises(InvalidInputError, match="is closed"):
        receiver.poll()
    receiver.close()
    for wrong in (-1, True, 1.5, "1"):
        with pytest.raises(InvalidInputError, match="no number of bytes"):
            store.receiver(tmp_path / "target", spool_nbytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="nothing that can be kept"):
        store.receiver(None)
    with pytest.raises(InvalidInputError, match="cannot name a line"):
        store.receiver(tmp_path / "target", line="../main")


def test_one_thread_at_a_time(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped at once, also in the middle of a long rest."""
    monkeypatch.setattr(pacing, "_FIRST_REST_S", 600.0)
    monkeypatch.setattr(pacing, "_LONGEST_REST_S", 600.0)
    with store.receiver(tmp_path / "target") as receiver:
        thread = threading.Thread(target=receiver.follow)
        thread.start()
        deadline = time.monotonic() + 10
        while not receiver._lock.locked():
            assert time.monotonic() < deadline
        with pytest.raises(ConflictError, match="another thread"):
            receiver.poll()
        receiver.stop()
        thread.join(30)
        assert not thread.is_alive()


# ------------------------------------------------------------------ open transactions


def test_partitions_of_an_open_transaction_are_fetched_while_it_is_written(
    store: Store, follower: Store, watched: Watched, tmp_path: Path
) -> None:
    commit(store, 0)
    target = tmp_path / "target"
    with follower.receiver(target) as receiver:
        receiver.prepare("main@0")
        before = tree(target)
        watched.requests.clear()
        transaction = store.begin()
        for i in range(N_TENSORS):
            write(transaction, 1, range(i, i + 1))
            wait_until_spooled(receiver, 2 * (i + 1))
        n_before = len(fetched(watched))
        assert n_before == 2 * N_TENSORS
        assert tree(target) == before
        transaction.commit()
        prepared = receiver.prepare("main@1")
        assert prepared.nbytes_spooled == prepared.nbytes
        applied = receiver.apply()
        assert (applied.nbytes_fetched, applied.chunks_healed) == (0, 0)
        assert holds(target, 1)
        assert set(fetched(watched).values()) == {1}, "nothing was fetched twice"
        assert len(fetched(watched)) == n_before
        receiver.poll()
        assert not [path.name for path in (target / ".dcr" / "spool").iterdir() if "." in path.name], "adopted"


def test_the_spool_of_an_aborted_transaction_is_dropped(store: Store, tmp_path: Path) -> None:
    commit(store, 0)
    target = tmp_path / "target"
    spool = target / ".dcr" / "spool"
    with store.receiver(target) as receiver:
        receiver.prepare("main@0")
        transaction = store.begin()
        write(transaction, 1, range(N_TENSORS))
        wait_until_spooled(receiver, 2 * N_TENSORS)
        assert len(list(spool.iterdir())) == 2 * N_TENSORS
        before = tree(target)
        transaction.abort()
        assert receiver.poll().open is None
        assert list(spool.iterdir()) == []
        assert tree(target) == before
        # And if the receiver was away meanwhile.
        transaction = store.begin()
        write(transaction, 2, range(N_TENSORS))
        wait_until_spooled(receiver, 2 * N_TENSORS)
        n_spooled = len(list(spool.iterdir()))
    transaction.abort()
    transaction = store.begin()
    write(transaction, 2, range(2))
    with store.receiver(target) as receiver:
        assert n_spooled == len(list(spool.iterdir()))
        wait_until_spooled(receiver, 4)
        assert len(list(spool.iterdir())) == 4
        transaction.abort()


def test_what_a_fenced_attempt_stored_does_not_count(
    store: Store, follower: Store, watched: Watched, url: str, tmp_path: Path
) -> None:
    """A second attempt writes other bits: they are matched by what the seals name."""
    commit(store, 0)
    target = tmp_path / "target"
    with follower.receiver(target) as receiver, dcr_store.open(url) as other:
        receiver.prepare("main@0")
        first = store.begin(owner="run")
        write(first, 1, range(N_TENSORS))
        wait_until_spooled(receiver, 2 * N_TENSORS)
        second = other.begin(owner="other", takeover=True)
        write(second, 2, range(N_TENSORS))
        receiver.poll()
        second.commit()
        with pytest.raises(DcrError):
            first.commit()
        receiver.prepare("main@1")
        receiver.apply()
        assert holds(target, 2)
        assert set(fetched(watched).values()) == {1}


def test_of_two_attempts_the_later_one_is_fetched(
    store: Store, follower: Store, watched: Watched, url: str, tmp_path: Path
) -> None:
    """The receiver comes when both have journaled the same places, with other bits."""
    commit(store, 0)
    store.pull(tmp_path / "target")
    first = store.begin(owner="run")
    write(first, 1, range(4))
    LIVE.discard((first.txid, first.attempt))  # as if its process had been killed
    with dcr_store.open(url) as other, follower.receiver(tmp_path / "target") as receiver:
        second = other.begin(owner="run")
        assert (second.txid, second.attempt) == (first.txid, 1)
        write(second, 2, range(3))
        wait_until_spooled(receiver, 8)
        seen = receiver.poll().open
        assert seen is not None
        assert (seen.attempt, seen.n_partitions) == (1, 8)
        by_incarnation = Counter(key.partition("/data/w0.")[2][:16] for key in fetched(watched))
        assert by_incarnation == {
            second._writer.partitions.incarnation: 6,
            first._writer.partitions.incarnation: 2,
        }
        write(second, 2, range(3, N_TENSORS))
        second.commit()
        receiver.follow(once=True)
        assert holds(tmp_path / "target", 2)


def test_a_resumed_transaction_is_not_fetched_again(
    store: Store, follower: Store, watched: Watched, url: str, tmp_path: Path
) -> None:
    commit(store, 0)
    target = tmp_path / "target"
    with follower.receiver(target) as receiver, dcr_store.open(url) as other:
        receiver.prepare("main@0")
        first = store.begin(owner="run")
        write(first, 1, range(4))
        wait_until_spooled(receiver, 8)
        LIVE.discard((first.txid, first.attempt))  # as if its process had been killed
        watched.requests.clear()
        second = other.begin(owner="run")
        assert (second.txid, second.attempt) == (first.txid, 1)
        write(second, 1, range(N_TENSORS))
        wait_until_spooled(receiver, 12)
        second.commit()
        receiver.prepare("main@1")
        assert receiver.apply().nbytes_fetched == 0
        assert holds(target, 1)
        assert len(fetched(watched)) == 4
        assert set(fetched(watched).values()) == {1}


def test_a_journal_that_lies_is_not_believed(store: Store, tmp_path: Path) -> None:
    """Damaged entries, entries of strangers, and partitions that are not what the journal says."""
    commit(store, 0)
    with store.receiver(tmp_path / "target") as receiver:
        receiver.prepare("main@0")
        transaction = store.begin()
        write(transaction, 1, range(2))
        objects = store._objects
        prefix = f"versions/main/{1:012d}-{transaction.txid}/"
        keys = sorted(objects.list(f"{prefix}journal/"))
        assert len(keys) == 4
        stored = {key: objects.get(key) for key in keys}
        objects.put(keys[0], b"{")
        objects.put(f"{prefix}journal/stranger.0123456789abcdef.000000.json", stored[keys[1]])
        objects.put(f"{prefix}journal/notes.txt", b"hello")
        entry = JournalEntry.from_bytes(stored[keys[1]], keys[1])
        stranger = replace(entry, writer="stranger", partitions=(replace(entry.partitions[0], index=77),))
        objects.put(f"{prefix}journal/stranger.{entry.incarnation}.{entry.seq:06d}.json", stranger.to_bytes())
        zombie = replace(entry, txid="0" * 32, seq=9, partitions=(replace(entry.partitions[0], index=78),))
        objects.put(f"{prefix}journal/w0.{entry.incarnation}.000009.json", zombie.to_bytes())
        partition = next(key for key in objects.list(f"{prefix}data/") if key.endswith("/c/2"))
        good = objects.get(partition)
        objects.put(partition, good[:-1] + bytes([good[-1] ^ 1]))
        deadline = time.monotonic() + 10
        while (seen := receiver.poll().open) is None or seen.n_spooled < 2:
            assert time.monotonic() < deadline
        assert (seen.n_partitions, seen.n_spooled) == (3, 2)
        objects.put(partition, good)
        objects.put(keys[0], stored[keys[0]])
        write(transaction, 1, range(2, N_TENSORS))
        transaction.commit()
        receiver.prepare("main@1")
        receiver.apply()
        assert holds(tmp_path / "target", 1)


def test_a_journal_that_cannot_be_read_keeps_no_version_from_being_applied(
    store: Store, follower: Store, watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, 0)
    broken: list[str] = []

    def refuse(method: str, key: str) -> None:
        if any(part in key for part in broken):
            raise StorageError("cannot be read", key=key)

    watched.before = refuse
    transaction = store.begin()
    write(transaction, 1, range(2))
    objects, prefix = store._objects, f"versions/main/{1:012d}-{transaction.txid}/journal/"
    keys = sorted(objects.list(prefix))
    stranger = f"{prefix}stranger.0123456789abcdef.000000.json"
    objects.put(stranger, b"{}")
    objects.put(keys[1][: -len("000000.json")] + "999999.json", b" " * 100_000)
    monkeypatch.setattr(streaming, "_ENTRY_NBYTES", 99_999)
    broken.append(keys[0])
    with follower.receiver(tmp_path / "target") as receiver:
        assert receiver.follow(once=True) is not None
        assert holds(tmp_path / "target", 0)
        wait_until_spooled(receiver, 3)
        assert not watched.count("get", "stranger")
        assert not watched.count("get", "999999")
        broken.append("/journal/")
        assert receiver.poll().open is None
        broken.clear()
        wait_until_spooled(receiver, 4)
        transaction.abort()


def test_a_spool_may_know_of_transactions_that_this_process_has_not_read_of(store: Store, tmp_path: Path) -> None:
    """Two receivers share one: what the other one has spooled meanwhile is no aborted transaction's."""
    spool = Spool(tmp_path / "spool")
    ref, data = ObjectRef.of("x", b"x" * 100), b"x" * 100
    commit(store, 0)
    catalog = Catalog(store._objects, store._document, store._catalog.store_sha256)
    log, family = catalog.log("main"), Tag.family_of(store._document.store_id, "main")
    transfers = Transfers(store._objects, spool)
    log.refresh()
    transaction = store.begin()
    slot = spool.reserve(ref, Tag(family, 1, transaction.txid))
    assert slot is not None
    with slot:
        assert slot.write(data)
    found = Streaming(log, transfers, family)
    found.look()
    assert len(list(spool.directory.iterdir())) == 1
    transaction.abort()
    log.refresh()
    found.look()
    assert list(spool.directory.iterdir()) == []
    transfers.close()


# ------------------------------------------------------------------ follow


def follow_in_thread(receiver: Receiver, **options: object) -> tuple[threading.Thread, list[object]]:
    result: list[object] = []

    def run() -> None:
        try:
            result.append(receiver.follow(**options))  # type: ignore[arg-type]
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def test_following_reacts_within_a_second(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "target"
    told: list[tuple[str, float]] = []
    with store.receiver(target) as receiver:
        thread, result = follow_in_thread(
            receiver, until="main@3", on_applied=lambda applied: told.append((applied.version, time.monotonic()))
        )
        committed = []
        for number in range(4):
            time.sleep(0.9 if number == 2 else 0.1)  # long enough for it to look rarely
            commit(store, number)
            committed.append(time.monotonic())
        thread.join(20)
        assert isinstance(result[0], Applied)
        assert result[0].version == "main@3"
        assert holds(target, 3)
        assert told[-1][0] == "main@3"
        assert told[-1][1] - committed[-1] < 1
        assert receiver.active() == Active("main@3", store.show("main@3").info.root)


def test_once_and_until(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "target"
    calls: list[str] = []

    def prepared(found: Prepared) -> None:
        calls.append(f"prepared {found.version}")

    def applying(found: Prepared) -> None:
        marker = read_marker(target) if target.exists() else None
        calls.append(f"applying {found.version} over {marker.target if isinstance(marker, Marker) else None}")

    def applied(found: Applied) -> None:
        marker = read_marker(target)
        assert isinstance(marker, Marker)
        assert (marker.state, marker.target) == ("clean", found.version)
        calls.append(f"applied {found.version}")

    hooks = {"on_prepared": prepared, "on_applying": applying, "on_applied": applied}
    with store.receiver(target) as receiver:
        assert receiver.follow(once=True) is None, "nothing has been published"
        for number in range(4):
            commit(store, number)
        found = receiver.follow(until="main@1", **hooks)
        assert found is not None
        assert (found.version, found.previous) == ("main@1", None)
        assert calls == ["prepared main@1", "applying main@1 over None", "applied main@1"]
        calls.clear()
        found = receiver.follow(once=True, **hooks)
        assert found is not None
        assert (found.version, found.previous) == ("main@3", "main@1")
        assert calls == ["prepared main@3", "applying main@3 over main@1", "applied main@3"]
        calls.clear()
        assert receiver.follow(until="main@1", **hooks) is None, "it is past that"
        assert calls == ["applied main@3"], "who starts is told where it is"
        assert holds(target, 3)


def test_a_target_is_looked_at_before_it_is_relied_on(store: Store, tmp_path: Path) -> None:
    """Its marker is clean, but somebody has been at the weights since."""
    for number in range(2):
        commit(store, number)
    target = tmp_path / "target"
    with store.receiver(target) as receiver:
        receiver.follow(once=True)
        assert receiver.follow(once=True) is None
    weights = target / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with store.receiver(target) as receiver:
        found = receiver.follow(once=True)
        assert found is not None
        assert (found.version, found.previous, found.chunks_written) == ("main@1", "main@1", 1)
        assert holds(target, 1)
    with store.receiver(target) as receiver:
        assert receiver.follow(once=True) is None


def test_a_store_that_fails_for_a_while_is_survived(
    store: Store, follower: Store, watched: Watched, tmp_path: Path
) -> None:
    commit(store, 0)
    target = tmp_path / "target"
    failures: list[DcrError] = []
    n_left = 6

    def fail(method: str, key: str) -> None:
        nonlocal n_left
        if n_left:
            n_left -= 1
            raise StorageError("no answer", key=key)

    watched.before = fail
    with follower.receiver(target) as receiver:
        found = receiver.follow(until="main@0", on_failure=lambda error, wait_s: failures.append(error))
        assert found is not None
        assert holds(target, 0)
        assert failures
        assert all(isinstance(error, StorageError) for error in failures)
        n_left = 1
        commit(store, 1)
        with pytest.warns(UserWarning, match=r"no answer; trying again in"):
            receiver.follow(until="main@1")
        n_left = 1
        commit(store, 2)
        with pytest.raises(StorageError, match="no answer"):
            receiver.follow(once=True)
        receiver.follow(once=True)
        assert holds(target, 2)


def test_a_version_that_cannot_be_had_leaves_the_old_one_and_the_next_one_is_taken(
    store: Store, tmp_path: Path
) -> None:
    """The damage is found before the target is touched."""
    commit(store, 0)
    target = tmp_path / "target"
    failures: list[DcrError] = []
    with store.receiver(target) as receiver:
        receiver.follow(until="main@0")
        commit(store, 1)
        contents = store._catalog.contents(store._catalog.resolve("main@1"))
        key = contents.partitions[3].key
        good = store._objects.get(key)
        store._objects.put(key, b"x" + good[1:])
        before = tree(target)
        with pytest.raises(IntegrityError) as caught:
            receiver.prepare("main@1")
        assert caught.value.key == key
        assert tree(target) == before
        assert receiver.active() == Active("main@0", store.show("main@0").info.root)
        thread, result = follow_in_thread(receiver, until="main@2", on_failure=lambda error, _: failures.append(error))
        deadline = time.monotonic() + 10
        while not failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.4)
        assert len(failures) <= 5, "longer and longer waits"
        assert tree(target) == before
        assert receiver.active() == Active("main@0", store.show("main@0").info.root)
        # The next version is over a base that cannot be read either, but the layout of an anchor would do.
        with store.begin() as transaction:
            transaction.write("other", np.arange(5000, dtype=np.int32))
        thread.join(20)
        assert isinstance(result[0], Applied)
        assert result[0].version == "main@2"
        assert store.compare_directory("main@2", target).ok
        assert all(isinstance(error, IntegrityError) and error.key == key for error in failures)


class Stubborn(DirectoryBringer):
    """Fails as it is told, in the middle of its work."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.failures: list[DcrError] = []

    def bring(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> Outcome:
        n_left = 3

        def failing(item: object) -> bytes:
            nonlocal n_left
            n_left -= 1
            if self.failures and n_left < 0:
                raise self.failures.pop()
            return (fetcher or (lambda i: fetch(catalog.objects, i.ref)))(item)  # type: ignore[arg-type]

        return super().bring(catalog, goal, failing)


def test_a_failed_apply_is_not_the_end(store: Store, tmp_path: Path) -> None:
    commit(store, 0)
    target = tmp_path / "target"
    bringer = Stubborn(target)
    spool = tmp_path / "spool"
    with store.receiver(bringer, spool=spool) as receiver:
        receiver.follow(until="main@0")
        for number in (1, 2):
            commit(store, number)
        first = store.show("main@0").info.root
        # What the disk does may be over: the target is on its way, and the next try finishes.
        bringer.failures = [StorageError("cannot be written: No space left on device", key="x")]
        receiver.prepare("main@2")
        with pytest.raises(StorageError):
            receiver.apply()
        assert receiver.active() is None
        marker = read_marker(target)
        assert isinstance(marker, Marker)
        assert marker.state == "dirty"
        assert receiver.apply().version == "main@2"
        assert holds(target, 2)
        # A version that is defective is given up, and the one before is there again.
        receiver.prepare("main@0")
        receiver.apply()
        bringer.failures = [IntegrityError("the stored version is defective", key="main@1")]
        receiver.prepare("main@1")
        with pytest.raises(IntegrityError, match="defective"):
            receiver.apply()
        assert holds(target, 0)
        assert receiver.active() == Active("main@0", first)
        receiver.follow(until="main@2")
        assert holds(target, 2)


def test_a_directory_that_another_process_writes_is_waited_for(store: Store, tmp_path: Path) -> None:
    commit(store, 0)
    target = tmp_path / "target"
    failures: list[DcrError] = []
    with store.receiver(target) as receiver:
        receiver.follow(until="main@0")
        commit(store, 1)
        with lock(target):
            thread, result = follow_in_thread(
                receiver, until="main@1", on_failure=lambda error, _: failures.append(error)
            )
            deadline = time.monotonic() + 10
            while not failures:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert holds(target, 0)
        thread.join(20)
        assert isinstance(result[0], Applied)
        assert isinstance(failures[0], ConflictError)
        assert holds(target, 1)


def test_somebody_elses_directory_is_left_alone(store: Store, tmp_path: Path) -> None:
    commit(store, 0)
    target = write_hf(tmp_path / "target", {"w": np.zeros(10, np.int8)})
    before = tree(target)
    transaction = store.begin()
    write(transaction, 1, range(2))
    with store.receiver(target) as receiver:
        wait_until_spooled(receiver, 4)
        for _ in range(2):
            with pytest.raises(InvalidInputError, match="no version of this store"):
                receiver.follow(until="main@0")
        with pytest.raises(InvalidInputError, match="no version of this store"):
            receiver.prepare("main@0")
    assert tree(target) == before
    assert not (target / ".dcr").exists()
    transaction.abort()


def test_a_spool_in_a_directory_makes_it_nobodys(store: Store, tmp_path: Path) -> None:
    """The receiver was killed before it wrote anything else, and then came the weights of somebody else."""
    commit(store, 0)
    target = tmp_path / "target"
    transaction = store.begin()
    write(transaction, 1, range(2))
    with store.receiver(target) as receiver:
        wait_until_spooled(receiver, 4)
    assert {path.name for path in (target / ".dcr").iterdir()} == {"spool"}
    write_hf(target, {"w": np.zeros(10, np.int8)})
    before = tree(target)
    with store.receiver(target) as receiver, pytest.raises(InvalidInputError, match="no version of this store"):
        receiver.follow(until="main@0")
    with pytest.raises(InvalidInputError, match="no version of this store"):
        store.pull(target)
    assert tree(target) == before
    transaction.abort()


def test_a_store_that_is_replaced_is_noticed(
    store: Store, follower: Store, watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers go on as if nothing had happened, but nothing that was known is there."""
    commit(store, 0)
    monkeypatch.setattr(keeper, "CHECK_INTERVAL_S", 0.2)
    with follower.receiver(tmp_path / "target") as receiver:
        thread, result = follow_in_thread(receiver, on_failure=lambda *_: None)
        deadline = time.monotonic() + 10
        while receiver.active() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        watched.inner = open_objects(dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=CHUNK).url)
        thread.join(20)
        assert isinstance(result[0], IntegrityError)
        assert result[0].key == "dcr.json"
        assert "replaced" in str(result[0])
        assert holds(tmp_path / "target", 0)


def test_versions_that_come_faster_than_they_are_fetched(
    store: Store, follower: Store, watched: Watched, tmp_path: Path
) -> None:
    """The one begun is reached before a newer one is: else a fast trainer would starve a slow link."""
    commit(store, 0)
    gate = threading.Event()

    def slowly(method: str, key: str) -> None:
        if method == "get" and f"main/{1:012d}-" in key and "/data/" in key and "/c/" in key:
            gate.wait(20)

    watched.before = slowly
    told: list[str] = []
    begun: list[str] = []

    def note(event: events.Event) -> None:
        if event.name == "receiver.prepare":
            begun.append(event.detail)

    with follower.receiver(tmp_path / "target") as receiver, events.listening(note):
        thread, result = follow_in_thread(
            receiver, until="main@2", on_applied=lambda applied: told.append(applied.version)
        )
        deadline = time.monotonic() + 20
        while told != ["main@0"]:
            assert time.monotonic() < deadline, result
            time.sleep(0.01)
        commit(store, 1)
        while "main@1" not in begun:
            assert time.monotonic() < deadline, result
            time.sleep(0.01)
        commit(store, 2)
        while watched.count("get", "log/main/00000000000000000006.json") < 2:
            assert time.monotonic() < deadline, watched.requests[-50:]
            time.sleep(0.01)
        gate.set()
        thread.join(20)
    assert told == ["main@0", "main@1", "main@2"]
    assert holds(tmp_path / "target", 2)


def test_a_version_is_active_once_the_hook_has_told_the_engine(store: Store, tmp_path: Path) -> None:
    """Rollouts are stamped with it, and the engine computes with the version before until then."""
    commit(store, 0)
    seen: list[tuple[str, str | None]] = []
    with store.receiver(tmp_path / "target") as receiver:

        def tell(applied: Applied) -> None:
            active = receiver.active()
            seen.append((applied.version, None if active is None else active.version))
            if len(seen) == 1:
                raise StorageError("the engine is busy")

        receiver.follow(until="main@0", on_applied=tell, on_failure=lambda *_: None)
        assert receiver.active() == Active("main@0", store.show("main@0").info.root)
        commit(store, 1)
        receiver.follow(until="main@1", on_applied=tell)
        assert receiver.active() == Active("main@1", store.show("main@1").info.root)
    assert [version for version, _ in seen] == ["main@0", "main@0", "main@1"]
    assert {active for _, active in seen} == {None}
    with store.receiver(tmp_path / "target") as receiver:
        receiver.follow(until="main@1", on_applied=tell)
        assert seen[-1] == ("main@1", None), "who starts is told where it is"
        assert receiver.active() is not None


def test_a_store_that_is_away_for_a_while_is_waited_for(
    store: Store, follower: Store, watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unmounted directory has nothing in it, and is not another store."""
    commit(store, 0)
    monkeypatch.setattr(keeper, "CHECK_INTERVAL_S", 0.1)
    failures: list[DcrError] = []
    with follower.receiver(tmp_path / "target") as receiver:
        thread, result = follow_in_thread(
            receiver, until="main@1", on_failure=lambda error, wait_s: failures.append(error)
        )
        deadline = time.monotonic() + 20
        while receiver.active() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        there = watched.inner
        watched.inner = open_objects(f"memory://{secrets.token_hex(8)}")
        while not failures:
            assert time.monotonic() < deadline, result
            time.sleep(0.01)
        assert failures[0].key == "dcr.json"
        watched.inner = there
        commit(store, 1)
        thread.join(20)
        assert isinstance(result[0], Applied), result
        assert holds(tmp_path / "target", 1)


def test_hooks_that_fail(store: Store, tmp_path: Path) -> None:
    commit(store, 0)
    told: list[str] = []
    n_failures = 2

    def flaky(applied: Applied) -> None:
        nonlocal n_failures
        told.append(applied.version)
        if n_failures:
            n_failures -= 1
            raise StorageError("the engine does not answer")

    with store.receiver(tmp_path / "target") as busy, pytest.raises(ConflictError, match=r"call stop\(\) in a hook"):
        busy.follow(once=True, on_applying=lambda _: busy.close())
    with store.receiver(tmp_path / "target") as receiver:
        receiver.follow(until="main@0", on_applied=flaky, on_failure=lambda *_: None)
        assert told == ["main@0"] * 3, "until it has been heard"
        commit(store, 1)

        def broken(_: object) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            receiver.follow(on_applying=broken)
        assert holds(tmp_path / "target", 0)
        receiver.follow(until="main@1")
        assert holds(tmp_path / "target", 1)


# ------------------------------------------------------------------ asyncio


def test_the_asyncio_twin(store: Store, tmp_path: Path) -> None:
    commit(store, 0)

    async def main() -> None:
        async with store.async_receiver(tmp_path / "target") as receiver:
            polled = await receiver.poll()
            assert polled.head is not None
            assert polled.head.version == "main@0"
            assert (await receiver.prepare("main")).version == "main@0"
            commit(store, 1)
            await receiver.prepare("main")
            assert (await receiver.apply()).version == "main@1"
            assert receiver.active() == Active("main@1", store.show("main@1").info.root)
            task = asyncio.create_task(receiver.follow(until="main@3"))
            await asyncio.sleep(0.05)
            commit(store, 2)
            commit(store, 3)
            found = await asyncio.wait_for(task, 20)
            assert found is not None
            assert found.version == "main@3"
            task = asyncio.create_task(receiver.follow())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert holds(tmp_path / "target", 3)

    asyncio.run(main())
