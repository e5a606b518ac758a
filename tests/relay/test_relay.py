"""Relays as a whole: one fetch for many, cut-through, kills, restarts, wrong bytes, trees, a store through two."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from relays import RelayProcess, RelayThread
from servers import SeaweedS3, free_ports
from states import series, tree, write_hf
from watched import Watched

import dcr_store
from dcr_store.errors import IntegrityError, NotFoundError, StorageError
from dcr_store.objects.http import HttpObjects
from dcr_store.objects.open import open_objects
from dcr_store.objects.retry import RetryPolicy
from dcr_store.ports import ObjectStore

IMPATIENT = RetryPolicy(deadline_s=0.5, unreachable_s=0.5, first_delay_s=0.02, longest_delay_s=0.2)
MIB = 1 << 20


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def upstream() -> Watched:
    return Watched(open_objects(f"memory://{secrets.token_hex(8)}"))


@pytest.fixture
def relay(upstream: Watched, tmp_path: Path) -> Iterator[RelayThread]:
    with RelayThread(upstream, tmp_path / "cache", policy=IMPATIENT) as relay:
        yield relay


class Slow(Watched):
    """Gives ranges of an object one after the other, as the test lets it."""

    is_local = True

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.permits = threading.Semaphore(0)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        if sha256 is not None:
            assert self.permits.acquire(timeout=30)
        return super().get(key, start, stop, sha256=sha256)


# ---------------------------------------------------------------------- one for all


@pytest.mark.parametrize("known", [True, False])
def test_a_hundred_readers_at_once_cost_one_fetch(relay: RelayThread, upstream: Watched, known: bool) -> None:
    data = secrets.token_bytes(MIB)
    upstream.put("a", data)
    upstream.before = lambda method, key: time.sleep(0.15)
    objects = open_objects(relay.url)
    start, began = threading.Barrier(100), time.monotonic()

    def read(_: int) -> bytes:
        start.wait()
        return objects.get("a", sha256=sha256(data) if known else None)

    with ThreadPoolExecutor(100) as pool:
        assert set(pool.map(read, range(100))) == {data}
    # Without the SHA-256 an answer is good for 0.2 s only; a hundred readers may take longer on a slow machine.
    assert upstream.count("get") <= (1 if known else (time.monotonic() - began) / 0.2 + 1)


def test_bytes_are_passed_on_before_all_of_them_are_there(tmp_path: Path) -> None:
    """Through three relays, while upstream has still to send the last part."""
    slow = Slow(open_objects(f"memory://{secrets.token_hex(8)}"))
    data = secrets.token_bytes(9 * MIB)  # ranges of 4, 4 and 1 MiB
    slow.put("a", data)
    with ExitStack() as stack:
        top = stack.enter_context(RelayThread(slow, tmp_path / "0"))
        middle = stack.enter_context(RelayThread(top.url, tmp_path / "1"))
        bottom = stack.enter_context(RelayThread(middle.url, tmp_path / "2"))
        pieces = HttpObjects(bottom.url).blocks("a", sha256(data))
        slow.permits.release()
        got = b""
        while len(got) < 4 * MIB:
            got += next(pieces)
        assert slow.count("get") <= 2  # the second range is waiting for its permit
        assert got == data[: len(got)]
        late = open_objects(bottom.url)  # who comes in the middle is given all of it
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(late.get, "a", sha256=sha256(data))
            slow.permits.release(2)
            assert got + b"".join(pieces) == data
            assert reading.result() == data
        assert slow.count("get") == 3


def test_a_tree_fetches_one_copy(tmp_path: Path, upstream: Watched) -> None:
    """Three levels, thirty-two readers, each with everything: 1.05 copies leave the upstream at most."""
    contents = {f"versions/{i}": secrets.token_bytes(200_000 + i) for i in range(8)}
    for key, data in contents.items():
        upstream.put(key, data)
    with ExitStack() as stack:
        levels: list[list[RelayThread]] = []
        for n in (1, 2, 4):
            above = [relay.url for relay in levels[-1]] if levels else []
            ups = [above[i // 2] if above else upstream for i in range(n)]
            directories = [tmp_path / f"{n}-{i}" for i in range(n)]
            pairs = zip(ups, directories, strict=True)
            levels.append([stack.enter_context(RelayThread(up, directory)) for up, directory in pairs])

        def read(i: int) -> bool:
            objects = open_objects(levels[-1][i % 4].url)
            return all(objects.get(key, sha256=sha256(data)) == data for key, data in contents.items())

        with ThreadPoolExecutor(32) as pool:
            assert all(pool.map(read, range(32)))
        left = levels[0][0].status()["transferred_nbytes"]
        assert left <= 1.05 * sum(map(len, contents.values()))
        assert upstream.count("get") == len(contents)
        assert sum(relay.status()["served_nbytes"] for relay in levels[-1]) == 32 * sum(map(len, contents.values()))


def test_an_object_that_arrives_while_the_disk_is_asked_is_not_fetched_again(
    relay: RelayThread, upstream: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader looks at the disk, finds nothing, and is slow to say so; meanwhile another one has it brought."""
    from dcr_store.relay.cache import Cache

    upstream.put("a", b"right")
    looked, arrived = threading.Event(), threading.Event()
    open_kept = Cache.open

    def slow(self: Cache, key: str, digest: str, *, past: bool = False) -> BinaryIO | None:
        found = open_kept(self, key, digest, past=past)
        if not looked.is_set():
            looked.set()
            assert arrived.wait(30)
        return found

    monkeypatch.setattr(Cache, "open", slow)
    objects = open_objects(relay.url)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(objects.get, "a", sha256=sha256(b"right"))
        assert looked.wait(30)
        assert objects.get("a", sha256=sha256(b"right")) == b"right"
        arrived.set()
        assert first.result() == b"right"
    assert upstream.count("get") == 1


# ---------------------------------------------------------------------- what is kept


def test_ranges_are_those_of_a_slice_from_disk_too(relay: RelayThread, upstream: Watched) -> None:
    data = secrets.token_bytes(3 * MIB)
    upstream.put("a", data)
    objects = open_objects(relay.url)
    ranges = [(0, 5), (5, 100_000), (MIB, None), (3 * MIB - 1, 3 * MIB + 5), (3 * MIB, None), (5 * MIB, 6 * MIB)]
    for start, stop in ranges:
        assert objects.get("a", start, stop, sha256=sha256(data)) == data[start:stop]
    assert objects.get("a", sha256=sha256(data)) == data
    for start, stop in ranges:
        assert objects.get("a", start, stop, sha256=sha256(data)) == data[start:stop]
    assert upstream.count("get") == 3  # two ranges as they are, then the whole, for the first without an end


@pytest.mark.parametrize("known", [True, False])
def test_a_range_is_answered_as_a_range(relay: RelayThread, upstream: Watched, known: bool) -> None:
    """Also one from the beginning without an end: while it arrives, from disk, and of an empty object."""
    for key, data in (("a", secrets.token_bytes(1000)), ("empty", b"")):
        upstream.put(key, data)
        headers = {"Dcr-Sha256": sha256(data)} if known else {}
        for _ in range(2):
            for asked, right in (("bytes=0-", data), ("bytes=0-9", data[:10]), ("bytes=10-", data[10:]), (None, data)):
                connection = http.client.HTTPConnection(relay.url.removeprefix("http://"), timeout=30)
                ranged = {"Range": asked} if asked else {}
                connection.request("GET", f"/v1/objects/{key}", headers={**headers, **ranged})
                answer = connection.getresponse()
                body = answer.read()
                connection.close()
                assert answer.status == (200 if asked is None else 206 if right else 416), (key, asked)
                assert body == right or answer.status == 416


def test_the_cache_outlives_restarts_and_kills(tmp_path: Path, upstream: Watched) -> None:
    store = open_objects(tmp_path / "store")
    data = secrets.token_bytes(2 * MIB)
    for key in ("a", "b"):
        store.put(key, data + key.encode())
    with RelayProcess(str(tmp_path / "store"), directory=tmp_path / "cache", arguments=["--access", "all"]) as relay:
        for key in ("a", "b"):
            assert open_objects(relay.url).get(key, sha256=sha256(data + key.encode()))
        relay.kill()
    # Torn by a power loss: the name was there before the bytes.
    (torn,) = (tmp_path / "cache" / "objects").glob(f"*/{sha256(data + b'b')}-*")
    torn.write_bytes(bytes(torn.stat().st_size))
    (tmp_path / "cache" / "arriving" / secrets.token_hex(16)).write_bytes(b"half")
    with RelayProcess(str(tmp_path / "store"), directory=tmp_path / "cache", arguments=["--access", "all"]) as relay:
        assert list((tmp_path / "cache" / "arriving").iterdir()) == []
        objects = open_objects(relay.url)
        for key in ("a", "b"):
            assert objects.get(key, sha256=sha256(data + key.encode())) == data + key.encode()
        assert relay.status()["transferred_nbytes"] == len(data) + 1
        status, told = relay.stop()
        assert (status, told) == (0, "")


def test_the_least_recently_used_go_first(tmp_path: Path, upstream: Watched) -> None:
    contents = {f"a{i}": bytes([i]) * 1000 for i in range(6)}
    for key, data in contents.items():
        upstream.put(key, data)
    with RelayThread(upstream, tmp_path / "cache", max_nbytes=3500) as relay:
        objects = open_objects(relay.url)

        def fetched(*keys: str) -> list[str]:
            before = len(upstream.requests)
            for key in keys:
                assert objects.get(key, sha256=sha256(contents[key])) == contents[key]
            return [key for _, key in upstream.requests[before:]]

        assert fetched("a0", "a1", "a2", "a0") == ["a0", "a1", "a2"]
        assert fetched("a3", "a0", "a2", "a3") == ["a3"]
        assert fetched("a1") == ["a1"]
        assert fetched("a0") == ["a0"]
        assert relay.status()["cached_nbytes"] == 3000
        files = list((tmp_path / "cache" / "objects").glob("*/*"))
        assert sum(file.stat().st_size for file in files) == 3000
        upstream.put("big", bytes(5000))
        for _ in range(2):
            assert objects.get("big", sha256=sha256(bytes(5000))) == bytes(5000)
        assert relay.status()["cached_nbytes"] == 3000


def test_a_cache_that_cannot_be_written_is_done_without(relay: RelayThread, upstream: Watched, tmp_path: Path) -> None:
    """As on a full disk: the readers are served all the same."""
    data = secrets.token_bytes(MIB)
    upstream.put("a", data)
    (tmp_path / "cache" / "arriving").rmdir()
    objects = open_objects(relay.url)
    for _ in range(2):
        assert objects.get("a", sha256=sha256(data)) == data
    assert relay.status()["cached_objects"] == 0


def test_what_is_cached_is_served_without_upstream(relay: RelayThread, upstream: Watched) -> None:
    data, record = secrets.token_bytes(1000), "log/main/00000000000000000000.json"
    upstream.put("a", data)
    upstream.put(record, b"{}")
    objects = open_objects(relay.url, retry=IMPATIENT)
    assert (objects.get("a", sha256=sha256(data)), objects.get(record)) == (data, b"{}")

    def cut(method: str, key: str) -> None:
        raise StorageError("no route to host (injected)", key=key)

    upstream.before = cut
    time.sleep(0.25)
    assert (objects.get("a", sha256=sha256(data)), objects.get(record)) == (data, b"{}")
    with pytest.raises(StorageError, match="no route"):
        objects.get("log/main/latest.json")
    with pytest.raises(StorageError, match="no route"):
        objects.list("log/")


class Failing:
    """A file on a disk that fails after the first read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._n_reads = file, 0

    def read(self, nbytes: int) -> bytes:
        self._n_reads += 1
        if self._n_reads > 1:
            raise OSError(errno.EIO, "input/output error (injected)")
        return self._file.read(nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def test_an_answer_that_fails_in_its_middle_holds_no_second_answer(
    relay: RelayThread, upstream: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcr_store.relay.cache import Cache

    data = secrets.token_bytes(3 * MIB)
    upstream.put("a", data)
    objects = open_objects(relay.url)
    assert objects.get("a", sha256=sha256(data)) == data
    open_kept = Cache.open
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "open", lambda *arguments, **options: Failing(open_kept(*arguments, **options)))
        connection = http.client.HTTPConnection(relay.url.removeprefix("http://"), timeout=30)
        connection.request("GET", "/v1/objects/a", headers={"Dcr-Sha256": sha256(data)})
        answer = connection.getresponse()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)) as caught:
            answer.read()
        assert not isinstance(caught.value, http.client.IncompleteRead) or b"HTTP/1.1" not in caught.value.partial
        connection.close()
    assert any("cannot be read" in told for told in relay.told)
    assert objects.get("a", sha256=sha256(data)) == data  # brought anew
    assert upstream.count("get") == 2


def test_a_relay_that_is_stopped_finishes_what_it_answers(tmp_path: Path) -> None:
    slow = Slow(open_objects(f"memory://{secrets.token_hex(8)}"))
    data = secrets.token_bytes(9 * MIB)
    slow.put("a", data)
    relay = RelayThread(slow, tmp_path / "cache").__enter__()
    pieces = HttpObjects(relay.url, policy=IMPATIENT).blocks("a", sha256(data))
    slow.permits.release()
    got = next(pieces)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(relay.__exit__)
        time.sleep(0.2)
        slow.permits.release(2)
        assert got + b"".join(pieces) == data
        stopping.result()
    assert relay.told == []


def test_bodies_that_never_come_block_no_other(upstream: Watched, tmp_path: Path, monkeypatch: Any) -> None:
    from dcr_store.relay import server

    monkeypatch.setattr(server, "BODIES_NBYTES", 4 * MIB)
    monkeypatch.setattr(server, "SILENCE_S", 1.0)
    head = f"PUT /v1/objects/a HTTP/1.1\r\nHost: x\r\nIf-None-Match: *\r\nContent-Length: {3 * MIB}\r\n\r\nx"
    with ExitStack() as stack:
        relay = stack.enter_context(RelayThread(upstream, tmp_path / "cache"))
        address = ("127.0.0.1", int(relay.url.rpartition(":")[2]))
        silent = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(10)]
        for connection in silent:
            connection.sendall(head.encode())
        time.sleep(0.2)
        assert open_objects(relay.url, retry=IMPATIENT).put_if_absent("b", secrets.token_bytes(3 * MIB))
        for connection in silent:
            assert b" 503 " in connection.recv(65536).split(b"\r\n")[0]
    assert upstream.count("put_if_absent", "a") == 0


def asks(relay: RelayThread, key: str, digest: str = "") -> socket.socket:
    """Ask for an object; return the connection, from which nothing has been read."""
    connection = socket.create_connection(("127.0.0.1", int(relay.url.rpartition(":")[2])), timeout=60)
    connection.sendall(f"GET /v1/objects/{key} HTTP/1.1\r\nHost: x\r\n{digest}\r\n".encode())
    return connection


@pytest.mark.parametrize("known", [True, False])
def test_readers_that_never_read_are_cut_off(
    upstream: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    from dcr_store.relay import server, wire

    data, cut, is_cut = bytes(48 * MIB), wire.cut, threading.Event()

    def cutting(request: Any) -> Exception:
        error = cut(request)
        is_cut.set()
        return error

    upstream.put("a", data)
    with RelayThread(upstream, tmp_path / "cache", policy=IMPATIENT) as relay:
        with monkeypatch.context() as patched:
            patched.setattr(server, "SILENCE_S", 0.5)
            patched.setattr(wire, "cut", cutting)
            with asks(relay, "a", f"Dcr-Sha256: {sha256(data)}\r\n" if known else "") as deaf:
                assert is_cut.wait(60)
                got = 0
                with contextlib.suppress(ConnectionError):
                    while piece := deaf.recv(1 << 20):
                        got += len(piece)
                assert got < len(data)
        assert open_objects(relay.url).get("a", sha256=sha256(data) if known else None) == data


def test_an_answer_that_nobody_takes_counts_while_it_is_there(
    upstream: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcr_store.relay import server

    monkeypatch.setattr(server, "ANSWERS_NBYTES", 40 * MIB)
    upstream.put("a", bytes(48 * MIB))
    upstream.put("b", b"b")

    def is_full() -> bool:
        try:
            assert open_objects(relay.url, retry=RetryPolicy(deadline_s=0)).get("b") == b"b"
        except StorageError as error:
            if "as many answers" not in str(error):
                raise
            return True
        return False

    def wait(full: bool) -> None:
        end = time.monotonic() + 60
        while is_full() != full:
            assert time.monotonic() < end
            time.sleep(0.01)

    with RelayThread(upstream, tmp_path / "cache", policy=IMPATIENT) as relay:
        with asks(relay, "a"):
            wait(full=True)
            assert is_full()
        wait(full=False)  # who did not take it has left


# ---------------------------------------------------------------------- how old answers may be


def test_answers_are_fresh(relay: RelayThread, upstream: Watched) -> None:
    """A record that was missing is asked for again; what changed is seen; what passed through counts at once."""
    objects = open_objects(relay.url)
    record = "log/main/00000000000000000007.json"
    for key in (record, "groups/g/log/latest.json"):
        with pytest.raises(NotFoundError):
            objects.get(key)
        upstream.put(key, b"1")
        time.sleep(0.25)
        assert objects.get(key) == b"1"
    before = upstream.count("get")
    assert objects.get(record) == b"1"
    assert upstream.count("get") == before  # a record does not change
    assert objects.list("groups/") == {"groups/g/log/latest.json": 1}
    for data in (b"22", b"333"):
        objects.put("groups/g/log/latest.json", data)
        assert objects.get("groups/g/log/latest.json") == data
        assert objects.size("groups/g/log/latest.json") == len(data)
        assert objects.list("groups/") == {"groups/g/log/latest.json": len(data)}
    assert not objects.put_if_absent(record, b"2")
    objects.delete(record)
    with pytest.raises(NotFoundError):
        objects.get(record)


def test_polling_costs_upstream_the_same_for_one_and_for_many(relay: RelayThread, upstream: Watched) -> None:
    record = "log/main/00000000000000000007.json"
    start, seconds = time.monotonic(), 1.0

    def poll(_: int) -> int:
        objects, n = open_objects(relay.url), 0
        while time.monotonic() < start + seconds:
            with pytest.raises(NotFoundError):
                objects.get(record)
            n += 1
        return n

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(poll, range(16))) > 50
    assert upstream.count("get", record) <= (time.monotonic() - start) / 0.2 + 1


def test_answers_never_go_back_in_time(relay: RelayThread, upstream: Watched) -> None:
    """Who has learned from the hint that a record exists must not be told, from memory, that it does not."""
    objects = open_objects(relay.url)
    for i in range(10):
        record, hint = f"log/main/{i:020d}.json", "log/main/latest.json"
        with pytest.raises(NotFoundError):
            objects.get(record)
        upstream.put(record, b"{}")
        upstream.put(hint, str(i + 1).encode())
        while objects.get(hint) != str(i + 1).encode():
            time.sleep(0.01)
        assert objects.get(record) == b"{}"


def test_a_doubt_is_passed_upward(relay: RelayThread, upstream: Watched, tmp_path: Path) -> None:
    """Who comes from another relay is told nothing older by those two levels up either."""
    upstream.put("a/b", b"1")
    with RelayThread(relay.url, tmp_path / "below") as below:
        objects = HttpObjects(below.url)
        objects.doubt(30)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("get", lambda: objects.get("a/b")),
            ("get", lambda: objects.get("a/b", 0, 1)),
            ("size", lambda: objects.size("a/b")),
            ("list", lambda: objects.list("a/")),
            ("list_names", lambda: objects.list_names("a/")),
        ]
        for name, call in calls:
            before = upstream.count(name)
            for _ in range(3):
                call()
            assert upstream.count(name) == before + 3, name


def test_a_shorter_doubt_ends_no_longer_one(relay: RelayThread, upstream: Watched) -> None:
    """A writer doubts one record for a second, and so does who has just come from another relay, for longer."""
    upstream.put("a/b", b"1")
    objects = HttpObjects(relay.url)
    objects.doubt(30)
    objects.doubt(0)
    for _ in range(3):
        objects.get("a/b")
    assert upstream.count("get") == 3


# ---------------------------------------------------------------------- wrong bytes


def test_a_wrong_copy_on_disk_is_replaced(tmp_path: Path, upstream: Watched) -> None:
    """Damaged after it was compared: the reader notices, and the relay gets another one."""
    data = secrets.token_bytes(MIB)
    upstream.put("a", data)
    with RelayThread(upstream, tmp_path / "cache") as relay:
        objects = open_objects(relay.url)
        assert objects.get("a", sha256=sha256(data)) == data
        (file,) = (tmp_path / "cache" / "objects").glob("*/*")
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        for _ in range(2):
            assert objects.get("a", sha256=sha256(data)) == data
        assert upstream.count("get") == 2


def test_an_object_that_is_damaged_in_the_store_is_reported_soon(relay: RelayThread, upstream: Watched) -> None:
    data = secrets.token_bytes(5 * MIB)
    upstream.put("a", data[::-1])
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(IntegrityError) as caught:
            open_objects(relay.url).get("a", sha256=sha256(data))
        assert (caught.value.key, caught.value.expected, caught.value.found) == (
            "a",
            sha256(data),
            sha256(data[::-1]),
        )
    assert time.monotonic() - started < 10
    assert relay.status()["cached_objects"] == 0
    assert relay.told == []  # the readers' SHA-256 may as well be the wrong one


@contextmanager
def liar(data: bytes) -> Iterator[str]:
    """Serve `data` as every object, and say that it is a relay's."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            is_store = self.path.endswith("dcr.json")
            self.send_response(404 if is_store else 200)
            self.send_header("Dcr-Relay", "1")
            self.send_header("Dcr-Error", "not-found")
            self.send_header("Content-Length", str(0 if is_store else len(data)))
            self.end_headers()
            if not is_store:
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["it lies", "its store is damaged", "its bytes are cut"])
def test_a_relay_of_wrong_bytes_is_named_and_routed_around(tmp_path: Path, kind: str) -> None:
    """By a receiver, and by a relay below, which keeps nothing of it; also by readers who came in the middle."""
    data = secrets.token_bytes(2 * MIB)
    wrong = data[:-5] if kind == "its bytes are cut" else data[:-1] + bytes([data[-1] ^ 1])
    store, damaged = open_objects(tmp_path / "store"), open_objects(tmp_path / "damaged")
    store.put("a", data)
    damaged.put("a", wrong)
    with ExitStack() as stack:
        if kind == "its store is damaged":
            bad = stack.enter_context(RelayThread(damaged, tmp_path / "bad", policy=IMPATIENT)).url
        else:
            bad = stack.enter_context(liar(wrong))
        objects = open_objects(f"{bad},file://{store.url}")
        with pytest.warns(UserWarning, match=bad):
            assert objects.get("a", sha256=sha256(data)) == data
        below = stack.enter_context(RelayThread([bad, store.url], tmp_path / "below", policy=IMPATIENT))
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: open_objects(below.url).get("a", sha256=sha256(data)), range(8))) == {data}
        assert any(bad in told and sha256(wrong)[:8] in told for told in below.told)
        assert below.status()["cached_nbytes"] == len(data)


# ---------------------------------------------------------------------- kills and other ways


def test_a_relay_killed_in_the_middle_is_finished_through_another(tmp_path: Path) -> None:
    """What the child had from the first one it does not fetch again from the second."""
    store = open_objects(tmp_path / "store")
    data = secrets.token_bytes(24 * MIB)
    store.put("a", data)
    slow = Slow(store)
    with (
        RelayThread(slow, tmp_path / "0") as top,
        RelayProcess(top.url, directory=tmp_path / "1") as first,
        RelayThread(store.url, tmp_path / "2") as second,
        RelayThread([first.url, second.url], tmp_path / "3") as child,
    ):
        pieces = HttpObjects(child.url).blocks("a", sha256(data))
        slow.permits.release(2)
        got = b""
        while len(got) < 6 * MIB:
            got += next(pieces)
        first.kill()
        assert got + b"".join(pieces) == data
        assert second.status()["served_nbytes"] <= len(data) - 6 * MIB + (1 << 20)
        assert any(first.url in told for told in child.told)
        slow.permits.release(10)


def test_receivers_go_on_through_another_relay(tmp_path: Path) -> None:
    store = open_objects(tmp_path / "store")
    contents = {f"a/{i}": secrets.token_bytes(300_000) for i in range(30)}
    for key, data in contents.items():
        store.put(key, data)
    with (
        RelayProcess(store.url, directory=tmp_path / "1", arguments=["--access", "all"]) as first,
        RelayThread(store.url, tmp_path / "2") as second,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        objects = open_objects(f"{first.url},{second.url}")
        found = {}
        for i, (key, data) in enumerate(contents.items()):
            if i == 10:
                first.kill()
            found[key] = objects.get(key, sha256=sha256(data))
        assert found == contents
        assert objects.put_if_absent("b", b"1")
        assert not objects.put_if_absent("b", b"2")
        assert objects.size("b") == 1
        assert store.get("b") == b"1"


def test_upstreams_of_different_stores_are_refused(tmp_path: Path) -> None:
    from dcr_store.errors import InvalidInputError

    urls = [str(tmp_path / name) for name in "ab"]
    for url in urls:
        dcr_store.create(url).close()
    objects = open_objects(f"http://127.0.0.1:{free_ports(1)[0]},file://{urls[0]},file://{urls[1]}", retry=IMPATIENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert objects.get("dcr.json") == open_objects(urls[0]).get("dcr.json")
        with pytest.raises(InvalidInputError, match="different stores"):
            objects.get("log/x", sha256="0" * 64)


def test_two_relays_do_not_share_a_cache(tmp_path: Path, upstream: Watched) -> None:
    from dcr_store.errors import ConflictError, InvalidInputError

    with RelayThread(upstream, tmp_path / "cache"), pytest.raises(ConflictError, match="another relay"):
        RelayThread(upstream, tmp_path / "cache").__enter__()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(InvalidInputError, match="something else"):
        RelayThread(upstream, tmp_path / "other").__enter__()


# ---------------------------------------------------------------------- a whole store


@pytest.mark.parametrize("kind", ["directory", "s3"])
def test_a_store_through_two_relays(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Created, published to, pulled from and verified two relays away."""
    url, options = str(tmp_path / "store"), None
    if kind == "s3":
        seaweed: SeaweedS3 = request.getfixturevalue("seaweed")
        url, options = seaweed.new_url(), seaweed.storage_options
    states = series(3)
    checkpoints = [write_hf(tmp_path / f"step{i}", state, step=i) for i, state in enumerate(states)]
    with (
        RelayThread(url, tmp_path / "0", storage_options=options) as upper,
        RelayThread(upper.url, tmp_path / "1") as lower,
    ):
        with dcr_store.create(lower.url, chunk_elements=4096) as store:
            for checkpoint in checkpoints:
                with store.begin() as transaction:
                    transaction.write_checkpoint(checkpoint)
        for place in (lower.url, f"http://127.0.0.1:{free_ports(1)[0]},{lower.url}"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with dcr_store.open(place) as store:
                    target = tmp_path / f"target-{len(place)}"
                    for version, checkpoint in (("main@0", 0), ("main", 2)):
                        store.pull(target, version)
                        assert tree(target) == tree(checkpoints[checkpoint])
                    assert store.verify(deep=True).ok
                    found = store.read("main@1", ["head"])["head"]
                    assert found.tobytes() == np.ascontiguousarray(states[1]["head"]).tobytes()
    with dcr_store.open(url, storage_options=options) as store:
        assert store.verify(deep=True).ok
        assert [info.version for info in store.log()] == ["main@0", "main@1", "main@2"]


def test_the_rest_of_an_object_is_passed_on_as_it_arrives(tmp_path: Path) -> None:
    """As to those whose transfer broke off at different places elsewhere: all of them cost one fetch."""
    slow = Slow(open_objects(f"memory://{secrets.token_hex(8)}"))
    data = secrets.token_bytes(5 * MIB)
    slow.put("a", data)
    with RelayThread(slow, tmp_path / "cache") as relay:
        rests = {start: HttpObjects(relay.url).blocks("a", sha256(data), start) for start in (1, 1000, 3 * MIB)}
        slow.permits.release()
        got = {start: next(pieces) for start, pieces in rests.items()}
        assert slow.count("get") <= 2  # the second range is waiting for its permit
        slow.permits.release(5)
        for start, pieces in rests.items():
            assert got[start] + b"".join(pieces) == data[start:]
        assert list(HttpObjects(relay.url).blocks("a", sha256(data), 5 * MIB)) == []
        assert slow.count("get") == 2


def test_members_follow_and_promote_through_a_relay(tmp_path: Path) -> None:
    """With the least access: acknowledgements and decisions pass upward, publishing does not."""
    states = series(2)
    checkpoints = [write_hf(tmp_path / f"step{i}", state, step=i) for i, state in enumerate(states)]
    with (
        dcr_store.create(tmp_path / "store", chunk_elements=4096) as store,
        RelayThread(str(tmp_path / "store"), tmp_path / "cache", access="members") as relay,
        dcr_store.open(relay.url) as seen,
    ):
        seen.create_group("eu", ["r0", "r1"])
        receivers = [seen.receiver(tmp_path / f"r{i}", group="eu", name=f"r{i}") for i in range(2)]
        for i, checkpoint in enumerate(checkpoints):
            with store.begin() as transaction:
                transaction.write_checkpoint(checkpoint)
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda receiver, until=f"main@{i}": receiver.follow(until=until), receivers))
            assert [tree(tmp_path / f"r{j}") for j in range(2)] == [tree(checkpoint)] * 2
            assert f"main@{i}" in str(store.group("eu").status())
        with pytest.raises(StorageError, match="forbidden"), seen.begin() as transaction:
            transaction.write("weight", np.zeros(4, np.int32))
        for receiver in receivers:
            receiver.close()


def test_an_answer_of_wrong_bytes_is_never_completed(relay: RelayThread, upstream: Watched) -> None:
    """So that a reader who does not compare cannot take them for the object either."""
    upstream.put("a", secrets.token_bytes(5 * MIB))
    connection = http.client.HTTPConnection(relay.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", "/v1/objects/a", headers={"Dcr-Sha256": "0" * 64})
        answer = connection.getresponse()
        assert answer.status == 200
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
    finally:
        connection.close()


def test_publishing_and_pulling_through_relays_that_are_killed_in_turn(tmp_path: Path) -> None:
    """Answers of conditional puts are lost on the way; every version is there once, and the target is right."""
    states = series(5)
    checkpoints = [write_hf(tmp_path / f"step{i}", state, step=i) for i, state in enumerate(states)]
    dcr_store.create(tmp_path / "store", chunk_elements=4096).close()
    ports = free_ports(2)
    done = threading.Event()
    n_kills = 0

    def start(i: int) -> RelayProcess:
        return RelayProcess(
            str(tmp_path / "store"),
            directory=tmp_path / f"cache{i}",
            port=ports[i],
            arguments=["--access", "publish"],
        ).__enter__()

    relays = [start(0), start(1)]

    def kill_in_turn() -> None:
        nonlocal n_kills
        while not done.is_set():
            relays[n_kills % 2].kill()
            relays[n_kills % 2].__exit__()
            relays[n_kills % 2] = start(n_kills % 2)
            n_kills += 1

    killer = threading.Thread(target=kill_in_turn)
    try:
        with (
            dcr_store.open(",".join(relay.url for relay in relays)) as store,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            killer.start()
            n_published = 0
            while n_published < len(checkpoints) or n_kills < 3:
                checkpoint = checkpoints[n_published % len(checkpoints)]
                with store.begin(baseline=tmp_path / "baseline") as transaction:
                    transaction.write_checkpoint(checkpoint)
                n_published += 1
                store.pull(tmp_path / "node")
                assert tree(tmp_path / "node") == tree(checkpoint)
            done.set()
            killer.join()
    finally:
        done.set()
        if killer.is_alive():
            killer.join()
        for relay in relays:
            relay.__exit__()
    with dcr_store.open(tmp_path / "store") as store:
        assert store.verify(deep=True).ok
        assert [info.version for info in store.log()] == [f"main@{i}" for i in range(n_published)]
