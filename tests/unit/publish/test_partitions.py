"""The partition writer: what it stores, journals and seals; what an earlier incarnation stored is not stored again."""

from __future__ import annotations

import itertools
import secrets
import sys
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from watched import Watched

from dcr_store.errors import StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import JournalEntry, Partition
from dcr_store.format.names import TransactionKeys
from dcr_store.objects.open import open_objects
from dcr_store.payload import contributions, shard
from dcr_store.publish import partitions, uploads
from dcr_store.publish.journaled import read_durable
from dcr_store.publish.partitions import PartitionWriter
from dcr_store.publish.spool import ChunkSpool

SIZE = 64
KEYS = TransactionKeys("main", 3, "7" * 32)
LENGTHS = {"u8": 0, "u16": 40 * SIZE, "u32": 0, "u64": SIZE}


@pytest.fixture
def objects() -> Watched:
    return Watched(open_objects(f"memory://{secrets.token_hex(8)}"))


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks of u16 in a partition, one of u64."""
    monkeypatch.setattr(partitions, "PARTITION_NBYTES", 4 * 2 * SIZE)
    monkeypatch.setattr(partitions, "JOURNAL_FIRST_PARTITIONS", 8)
    monkeypatch.setattr(partitions, "JOURNAL_INTERVAL_S", 1e9)


def make(
    objects: Watched,
    incarnation: str = "a" * 16,
    durable: Mapping[tuple[str, int, str], Partition] | None = None,
    spool: ChunkSpool | None = None,
    *,
    keep: bool = True,
) -> PartitionWriter:
    return PartitionWriter(objects, KEYS, "w0", incarnation, 0, "dcr.delta", SIZE, durable or {}, spool, keep=keep)


def chunk(number: int) -> bytes:
    return b"chunk %d" % number


def fill(writer: PartitionWriter, order: list[int], n_chunks: int | None = 40) -> None:
    for number in order:
        writer.add("u16", number, chunk(number) if number % 3 else None, n_chunks)


def sealed(objects: Watched, writer: PartitionWriter) -> JournalEntry:
    rows = {"u16": np.array([[1, 2, 3, 4]], np.uint64)}
    ref = writer.seal(LENGTHS, rows, [], 17)
    data = objects.get(ref.ref.key)
    assert canonical.sha256(data) == ref.ref.sha256
    return JournalEntry.from_bytes(data, ref.ref.key)


@pytest.fixture(params=["spooled", "kept"])
def spool(request: pytest.FixtureRequest) -> Iterator[ChunkSpool | None]:
    if request.param == "kept":
        yield None
        return
    spool = ChunkSpool()
    yield spool
    spool.close()


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
def test_every_chunk_is_where_it_belongs(objects: Watched, spool: ChunkSpool | None, order: str) -> None:
    numbers = list(range(40))
    if order == "descending":
        numbers.reverse()
    if order == "mixed":
        np.random.default_rng(0).shuffle(numbers)
    writer = make(objects, spool=spool)
    fill(writer, numbers)
    assert writer._open == {}, "stored as soon as they are full"
    entry = sealed(objects, writer)
    writer.close()
    assert entry.seal is not None
    (array,) = entry.seal.arrays
    assert (array.array, array.shape, array.chunk, array.shard) == ("u16/mask", 40 * SIZE, SIZE, 4 * SIZE)
    found = {}
    for item in entry.seal.partitions:
        data = objects.get(KEYS.partition("w0", item.incarnation, item.array, item.index))
        assert (canonical.sha256(data), len(data)) == (item.sha256, item.nbytes)
        parsed = shard.parse(data, 4, "k")
        assert len(parsed) == item.chunks
        found.update({4 * item.index + place: bytes(blob) for place, blob in parsed.items()})
    assert found == {number: chunk(number) for number in range(40) if number % 3}
    assert [item.index for item in entry.seal.partitions] == list(range(10))
    assert entry.seal.changed == 17
    rows = contributions.decode(objects.get(entry.seal.contributions.key), "k")["u16"]
    assert rows.tolist() == [[1, 2, 3, 4]]


def test_partitions_of_which_nothing_changed_are_not_stored(objects: Watched) -> None:
    writer = make(objects)
    for number in range(40):
        writer.add("u16", number, b"x" if number == 13 else None, 40)
    entry = sealed(objects, writer)
    writer.close()
    assert entry.seal is not None
    assert [item.index for item in entry.seal.partitions] == [3]
    assert writer.n_sealed == 1


def test_without_a_known_end(objects: Watched) -> None:
    """An anchor: the last partition is stored by ``flush``, with the length of a whole one."""
    writer = make(objects)
    fill(writer, list(range(6)), None)
    assert list(writer._open) == [("u16/mask", 1)]
    writer.flush()
    data = objects.get(KEYS.partition("w0", "a" * 16, "u16/mask", 1))
    assert {place: bytes(blob) for place, blob in shard.parse(data, 4, "k").items()} == {0: chunk(4), 1: chunk(5)}
    writer.close()


class TestJournal:
    def entries(self, objects: Watched) -> list[JournalEntry]:
        keys = sorted(objects.list(f"{KEYS.prefix}journal/"))
        return [JournalEntry.from_bytes(objects.get(key), key) for key in keys]

    def test_in_batches_and_chained(self, objects: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(partitions, "JOURNAL_FIRST_PARTITIONS", 3)
        monkeypatch.setattr(partitions, "JOURNAL_PARTITIONS", 3)
        writer = make(objects)
        fill(writer, list(range(40)))
        entry = sealed(objects, writer)
        writer.close()
        found = self.entries(objects)
        assert [item.seq for item in found] == [0, 1, 2, 3]
        assert found[-1] == entry
        assert [item.seal is None for item in found] == [True, True, True, False]
        for before, after in itertools.pairwise(found):
            assert after.prev == canonical.sha256(before.to_bytes())
        assert found[0].prev is None
        named = [part for item in found for part in item.partitions]
        assert entry.seal is not None
        assert sorted(named, key=lambda part: part.index) == list(entry.seal.partitions), "each named once"
        assert [ref.sha256 for ref in entry.seal.journal] == [canonical.sha256(e.to_bytes()) for e in found[:-1]]

    def test_the_first_at_once(self, objects: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(partitions, "JOURNAL_FIRST_PARTITIONS", 1)
        writer = make(objects)
        for last in (4, 8):  # the second partition waits for others
            fill(writer, list(range(last - 4, last)))
            for future in writer._uploads.futures:
                future.result()
            (entry,) = self.entries(objects)
            assert [item.index for item in entry.partitions] == [0]
        writer.close()

    def test_the_seal_names_an_only_partition(self, objects: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        """A version of one partition takes no entry more than its seal, and does not wait for one."""
        monkeypatch.setattr(partitions, "JOURNAL_FIRST_PARTITIONS", 1)
        writer = make(objects)
        fill(writer, [0, 1])
        entry = sealed(objects, writer)
        writer.close()
        assert [item.index for item in entry.partitions] == [0]
        assert self.entries(objects) == [entry]

    def test_in_time(self, objects: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(partitions, "JOURNAL_INTERVAL_S", 0.0)
        writer = make(objects)
        fill(writer, list(range(12)))
        writer.flush()
        assert len(self.entries(objects)) >= 1
        writer.close()

    def test_a_partition_is_durable_before_it_is_named(self, objects: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(partitions, "JOURNAL_PARTITIONS", 1)
        writer = make(objects)
        fill(writer, list(range(40)))
        sealed(objects, writer)
        writer.close()
        puts = [key for method, key in objects.requests if method == "put"]
        for key in puts:
            if "/journal/" in key:
                entry = JournalEntry.from_bytes(objects.get(key), key)
                for item in entry.partitions:
                    stored = KEYS.partition("w0", item.incarnation, item.array, item.index)
                    assert puts.index(stored) < puts.index(key)
        assert "/journal/" in puts[-1], "the seal is last"


class TestResuming:
    def test_what_is_durable_is_not_stored_again(self, objects: Watched) -> None:
        first = make(objects)
        fill(first, list(range(20)))
        first.flush()
        with first._lock:
            first._journal_now(None)
        first.close()
        durable = read_durable(objects, KEYS, "w0")
        assert {key[:2] for key in durable} == {("u16/mask", index) for index in range(5)}
        objects.requests.clear()
        second = make(objects, "b" * 16, durable)
        fill(second, list(range(40)))
        entry = sealed(objects, second)
        second.close()
        stored = {key for method, key in objects.requests if method == "put" and "/c/" in key}
        assert stored == {KEYS.partition("w0", "b" * 16, "u16/mask", index) for index in range(5, 10)}
        assert entry.seal is not None
        assert [item.incarnation[0] for item in entry.seal.partitions] == ["a"] * 5 + ["b"] * 5
        assert {ref.key for ref in second.sealed_objects() if "/c/" in ref.key} == {
            KEYS.partition("w0", item.incarnation, item.array, item.index) for item in entry.seal.partitions
        }

    def test_other_content_is_stored(self, objects: Watched) -> None:
        first = make(objects)
        fill(first, list(range(20)))
        first.flush()
        with first._lock:
            first._journal_now(None)
        first.close()
        second = make(objects, "b" * 16, read_durable(objects, KEYS, "w0"))
        for number in range(40):
            second.add("u16", number, b"other" if number == 0 else chunk(number) if number % 3 else None, 40)
        entry = sealed(objects, second)
        second.close()
        assert entry.seal is not None
        assert [item.incarnation[0] for item in entry.seal.partitions] == ["b"] + ["a"] * 4 + ["b"] * 5

    def test_journals_that_cannot_be_believed(self, objects: Watched) -> None:
        first = make(objects)
        fill(first, list(range(20)))
        first.flush()
        with first._lock:
            ref = first._journal_now(None)
        first.close()
        good = objects.get(ref.key)
        journal = f"{KEYS.prefix}journal/"
        for name, data in (
            ("w0.cccccccccccccccc.000000.json", b"torn {"),
            ("w0.dddddddddddddddd.000000.json", good.replace(b'"writer":"w0"', b'"writer":"w.0"')),
            ("w0.eeeeeeeeeeeeeeee.000000.json", good.replace(KEYS.txid.encode(), b"8" * 32)),
            ("w0.ffffffffffffffff.000000.json", b""),
            ("w00.ffffffffffffffff.000000.json", good),
        ):
            objects.put(journal + name, data)
        assert len(read_durable(objects, KEYS, "w0")) == 5
        assert read_durable(objects, KEYS, "w00") == {}, "an entry of another writer under its name"
        objects.delete(ref.key)
        assert read_durable(objects, KEYS, "w0") == {}, "entries of another transaction or writer count for nothing"

    def test_partitions_that_are_gone_or_cut_are_stored_again(self, objects: Watched) -> None:
        first = make(objects)
        fill(first, list(range(20)))
        first.flush()
        with first._lock:
            first._journal_now(None)
        first.close()
        gone, cut = (KEYS.partition("w0", "a" * 16, "u16/mask", index) for index in (1, 2))
        objects.delete(gone)
        objects.put(cut, objects.get(cut)[:-1])
        assert {key[1] for key in read_durable(objects, KEYS, "w0")} == {0, 3, 4}

    def test_nothing_before(self, objects: Watched) -> None:
        assert read_durable(objects, KEYS, "w0") == {}


def test_a_failing_upload_reaches_the_caller(objects: Watched) -> None:
    def fail(method: str, key: str) -> None:
        if method == "put" and key.endswith("/c/2"):
            raise StorageError("disk full", key=key)

    objects.before = fail
    writer = make(objects)
    with pytest.raises(StorageError, match="disk full"):  # noqa: PT012 - at one of the two
        fill(writer, list(range(40)))
        writer.flush()
    writer.close()


def test_bytes_in_flight_are_bounded(objects: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(uploads, "IN_FLIGHT_NBYTES", 300)
    gate, highest = threading.Event(), [0]
    writer = make(objects)

    def wait(method: str, key: str) -> None:
        if method == "put" and "/c/" in key:
            highest[0] = max(highest[0], writer._uploads.in_flight_nbytes)
            gate.wait(0.01)

    objects.before = wait
    fill(writer, list(range(40)))
    writer.flush()
    writer.close()
    assert 0 < highest[0] <= 300


@pytest.mark.parametrize("n_held", [1000, 20, 0])
def test_the_spool_forgets_partitions_that_were_stored(
    objects: Watched, monkeypatch: pytest.MonkeyPatch, n_held: int
) -> None:
    monkeypatch.setattr("dcr_store.publish.spool.SPOOL_NBYTES", n_held)
    spools = [ChunkSpool(), ChunkSpool()]
    sha256s = []
    for spool, keep in zip(spools, (True, False), strict=True):
        writer = make(objects, spool=spool, keep=keep)
        fill(writer, [*range(0, 40, 2), *range(1, 38, 2)])
        writer.flush()
        sha256s.append({item.index: item.sha256 for item in writer._sealed})
        writer.close()
    assert sha256s[0] == sha256s[1]
    assert len(spools[0].places()) == len([number for number in range(39) if number % 3])
    assert spools[1].places() == []
    assert spools[1]._held_nbytes == 0
    for spool in spools:
        spool.close()


@pytest.mark.parametrize("n_held", [1000, 4, 0])
def test_the_spool_keeps_what_it_is_given(monkeypatch: pytest.MonkeyPatch, n_held: int) -> None:
    monkeypatch.setattr("dcr_store.publish.spool.SPOOL_NBYTES", n_held)
    spool = ChunkSpool()
    spool.put("u8", 1, b"one")
    spool.put("u16", 1, b"two")
    spool.put("u8", 0, b"")
    assert [spool.get("u16", 1), spool.get("u8", 1), spool.get("u8", 0), spool.get("u8", 7)] == [
        b"two",
        b"one",
        b"",
        None,
    ]
    assert sorted(spool.places()) == [("u16", 1), ("u8", 0), ("u8", 1)]
    spool.close()


def test_the_spool_is_read_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("dcr_store.publish.spool.SPOOL_NBYTES", 1000)
    interval = sys.getswitchinterval()
    spool = ChunkSpool()
    for number in range(100):
        spool.put("u8", number, b"%d," % number * 50)

    def read(seed: int) -> bool:
        numbers = np.random.default_rng(seed).integers(0, 100, 3000).tolist()
        return all(spool.get("u8", number) == b"%d," % number * 50 for number in numbers)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(4)))
    finally:
        sys.setswitchinterval(interval)
        spool.close()
