"""Stores behind a relay when things go wrong: lost answers, foreign servers, hostile clients, tokens, TLS."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import secrets
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from group_records import admit, empty
from relays import RelayThread
from servers import FaultProxy, free_ports
from watched import Watched

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError, OutcomeUnknownError, StorageError
from dcr_store.format.groups import Ack, GroupVersion
from dcr_store.objects.open import open_objects
from dcr_store.objects.retry import RetryPolicy
from dcr_store.objects.transfer import map_bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcr_store.ports import ObjectStore

    Opener = Callable[..., ObjectStore]

IMPATIENT = RetryPolicy(deadline_s=0.6, unreachable_s=0.6, first_delay_s=0.02, longest_delay_s=0.2)
TOKEN = "correct-horse-battery-staple"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def upstream() -> Watched:
    return Watched(open_objects(f"memory://{secrets.token_hex(8)}"))


@pytest.fixture
def relay(upstream: Watched, tmp_path: Path) -> Iterator[RelayThread]:
    with RelayThread(upstream, tmp_path / "cache", policy=IMPATIENT) as relay:
        yield relay


@pytest.fixture
def proxy(relay: RelayThread) -> Iterator[FaultProxy]:
    with FaultProxy(relay.url, seed=1) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(proxy: FaultProxy) -> Opener:
    return lambda policy=None: open_objects(proxy.endpoint_url, retry=policy or RetryPolicy(first_delay_s=0.02))


# ---------------------------------------------------------------------- outcomes


@pytest.mark.parametrize("nbytes", [10, 3 << 20])
@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_answer_is_success(behind_proxy: Opener, proxy: FaultProxy, times: int, nbytes: int) -> None:
    objects = behind_proxy()
    lost = proxy.add("drop_answer", "PUT", "log/7", times=times)
    data = bytes([times]) * nbytes
    assert objects.put_if_absent("log/7", data)
    assert lost.hits == times
    assert objects.get("log/7") == data


def test_a_lost_refusal_is_a_lost_race(behind_proxy: Opener, proxy: FaultProxy, upstream: Watched) -> None:
    upstream.put("log/7", b"foreign")
    lost = proxy.add("drop_answer", "PUT", "log/7", times=2)
    assert not behind_proxy().put_if_absent("log/7", b"mine")
    assert lost.hits == 2
    assert upstream.get("log/7") == b"foreign"


def test_a_put_that_lands_late_is_waited_for(behind_proxy: Opener, proxy: FaultProxy, upstream: Watched) -> None:
    objects = behind_proxy(RetryPolicy(first_delay_s=0.05, longest_delay_s=0.1))
    proxy.add("land_late", "PUT", "log/7", delay_s=0.3)
    refused = proxy.add("answer", "PUT", "log/7", times=None, status=503)
    threading.Timer(0.6, setattr, (refused, "times", 0)).start()
    assert objects.put_if_absent("log/7", b"mine")
    assert refused.hits > 2
    assert upstream.get("log/7") == b"mine"


def test_an_outcome_that_the_relay_does_not_know_is_unknown(relay: RelayThread, upstream: Watched) -> None:
    """Neither a conflict nor a failure: the put may land, and the reader has to find out."""
    objects = open_objects(relay.url, retry=IMPATIENT)

    def lose(method: str, key: str) -> None:
        if method == "put_if_absent":
            raise OutcomeUnknownError("no answer (injected)", key=key)

    upstream.before = lose
    with pytest.raises(OutcomeUnknownError, match="outcome-unknown"):
        objects.put_if_absent("log/7", b"mine")
    upstream.before = None
    assert objects.put_if_absent("log/7", b"mine")


def test_an_outcome_learned_late_is_the_right_one(relay: RelayThread, upstream: Watched) -> None:
    """The put took effect although the relay did not learn it; the repetition finds its own bytes."""
    objects = open_objects(relay.url, retry=RetryPolicy(first_delay_s=0.02))

    def land_and_lose(method: str, key: str) -> None:
        if method == "put_if_absent":
            upstream.before = None
            assert upstream.inner.put_if_absent(key, b"mine")
            raise OutcomeUnknownError("no answer (injected)", key=key)

    upstream.before = land_and_lose
    assert objects.put_if_absent("log/7", b"mine")
    upstream.before = land_and_lose
    assert not objects.put_if_absent("log/8", b"other")


def test_a_failure_before_the_put_is_no_unknown_outcome(relay: RelayThread, upstream: Watched) -> None:
    objects = open_objects(relay.url, retry=IMPATIENT)

    def refuse(method: str, key: str) -> None:
        raise StorageError("permission denied (injected)", key=key)

    upstream.before = refuse
    with pytest.raises(StorageError, match="permission denied"):
        objects.put_if_absent("log/7", b"mine")


@pytest.mark.parametrize("kind", ["drop_answer", "reset", "land_late", "answer"])
def test_no_answer_until_the_deadline_is_an_unknown_outcome(behind_proxy: Opener, proxy: FaultProxy, kind: Any) -> None:
    proxy.add(kind, "PUT", "log/7", times=None, delay_s=0.1)
    proxy.add("answer", "GET", "log/7", times=None, status=503)
    with pytest.raises(OutcomeUnknownError, match="not known after") as caught:
        behind_proxy(IMPATIENT).put_if_absent("log/7", b"mine")
    assert caught.value.key == "log/7"


def test_a_put_that_was_never_sent_is_no_unknown_outcome() -> None:
    objects = open_objects(f"http://127.0.0.1:{free_ports(1)[0]}", retry=IMPATIENT)
    with pytest.raises(StorageError, match="no connection"):
        objects.put_if_absent("log/7", b"mine")


def test_a_storm_of_faults_is_survived(behind_proxy: Opener, proxy: FaultProxy) -> None:
    objects = behind_proxy()
    storm = [
        proxy.add("answer", times=None, probability=0.15),
        proxy.add("reset", times=None, probability=0.15),
        proxy.add("drop_answer", times=None, probability=0.15),
        proxy.add("truncate", "GET", times=None, probability=0.2),
    ]
    contents = {f"a/{i}": bytes([i]) * (i * 1000 + 1) for i in range(20)}
    assert all(map_bounded(lambda key: objects.put_if_absent(key, contents[key]), contents))
    assert dict(zip(contents, map_bounded(objects.get, contents), strict=True)) == contents
    known = map_bounded(lambda key: objects.get(key, sha256=sha256(contents[key])), contents)
    assert list(known) == list(contents.values())
    assert objects.list("a/") == {key: len(contents[key]) for key in sorted(contents)}
    assert list(map_bounded(objects.size, contents)) == [len(data) for data in contents.values()]
    list(map_bounded(objects.delete, contents))
    assert objects.list("a/") == {}
    assert all(fault.hits > 0 for fault in storm)


# ---------------------------------------------------------------------- answers that are none


def foreign_server(answer: bytes) -> tuple[str, Callable[[], None]]:
    """Return the URL of a server that says the same to everybody, and what ends it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()

    def end() -> None:
        with socket.create_connection(listener.getsockname()):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

    return f"http://127.0.0.1:{listener.getsockname()[1]}", end


@pytest.mark.parametrize("status", ["404 Not Found", "200 OK", "403 Forbidden", "301 Moved"])
def test_a_server_that_is_no_relay_is_not_believed(status: str) -> None:
    """A 404 of anybody else would be the end of a log."""
    url, end = foreign_server(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nLocation: /x\r\n\r\nhi".encode())
    try:
        for name, *arguments in (["get", "log/main/0"], ["size", "a"], ["list", ""], ["put_if_absent", "a", b""]):
            with pytest.raises(StorageError, match="no relay"):
                getattr(open_objects(url, retry=IMPATIENT), name)(*arguments)
    finally:
        end()


def test_a_relay_that_sends_other_bytes_is_named() -> None:
    url, end = foreign_server(b"HTTP/1.1 200 OK\r\nDcr-Relay: 1\r\nContent-Length: 2\r\n\r\nhi")
    try:
        with pytest.raises(IntegrityError) as caught:
            open_objects(url).get("a", sha256=sha256(b"ho"))
        assert url in str(caught.value)
        assert (caught.value.key, caught.value.expected, caught.value.found) == ("a", sha256(b"ho"), sha256(b"hi"))
    finally:
        end()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nDcr-Relay: 1\r\nContent-Length: 5\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nDcr-Relay: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\nDcr-Relay: 1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhi",
        b"HTTP/1.1 200 O",
        b"HTTP/1.1 200 OK\r\nDcr-Relay: 1\r\n",
        b"",
        b"nonsense\r\n\r\n",
    ],
)
def test_an_answer_that_is_not_whole_is_never_returned(answer: bytes) -> None:
    from dcr_store.objects.http import HttpObjects
    from dcr_store.objects.retry import TransientError

    url, end = foreign_server(answer)
    try:
        objects = HttpObjects(url, policy=IMPATIENT)
        with pytest.raises(StorageError, match="cannot get"):
            objects.get("a")
        with pytest.raises(TransientError):
            list(objects.blocks("a", sha256(b"hi")))
    finally:
        end()


@pytest.mark.parametrize("status", ["200 OK", "204 No Content", "206 Partial Content"])
def test_only_created_is_created(status: str) -> None:
    """Something on the way that drops the condition has overwritten what was there, and answers 200."""
    url, end = foreign_server(f"HTTP/1.1 {status}\r\nDcr-Relay: 1\r\nContent-Length: 0\r\n\r\n".encode())
    try:
        with pytest.raises(OutcomeUnknownError, match=f"{status[:3]} to a conditional put"):
            open_objects(url, retry=IMPATIENT).put_if_absent("log/7", b"mine")
    finally:
        end()


def test_a_range_that_was_not_asked_for_is_no_empty_object() -> None:
    url, end = foreign_server(b"HTTP/1.1 416 X\r\nDcr-Relay: 1\r\nDcr-Error: range\r\nContent-Length: 0\r\n\r\n")
    try:
        objects = open_objects(url, retry=IMPATIENT)
        for digest in (sha256(b"right"), None):
            with pytest.raises(StorageError, match="without Range"):
                objects.get("a", sha256=digest)
        assert objects.get("a", 5, 8) == b""
    finally:
        end()


@pytest.mark.parametrize(
    ("told", "body"),
    [
        ("bytes 2-4/*", b"ab"),
        ("bytes 2-3/100", b"ab"),
        ("bytes 1-3/*", b"abc"),
        ("bytes 2-6/*", b"abcde"),
        ("nonsense", b"abc"),
        (None, b"abcde"),
        (None, b""),
    ],
)
def test_a_range_of_another_length_is_never_returned(told: str | None, body: bytes) -> None:
    head = f"HTTP/1.1 206 X\r\nDcr-Relay: 1\r\nContent-Length: {len(body)}\r\n"
    head += f"Content-Range: {told}\r\n" if told else ""
    url, end = foreign_server(head.encode() + b"\r\n" + body)
    try:
        with pytest.raises(StorageError, match="cannot get"):
            open_objects(url, retry=IMPATIENT).get("a", 2, 5)
    finally:
        end()


OURS = b"HTTP/1.1 200 OK\r\nDcr-Relay: 1\r\n"
CHUNKED = OURS + b"Transfer-Encoding: chunked\r\n\r\n"


def whole(body: bytes, head: bytes = OURS) -> bytes:
    return head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (("size", "a"), CHUNKED),
        (("size", "a"), OURS + b"Transfer-Encoding: chunked\r\nContent-Length: x\r\n\r\n"),
        (("list", "a/"), whole(b'{"keys":{"a":"x"}}')),
        (("list", "a/"), whole(b'{"keys":{"a":-1}}')),
        (("list", "a/"), whole(b'{"keys":{"a":null}}')),
        (("list", "a/"), whole(b'{"keys":[]}')),
        (("list", "a/"), whole(b'{"keys":')),
        (("list", "a/"), whole(b"[" * 100_000)),
        (("list_names", "a/"), whole(b'{"names":[1]}')),
        (("list_names", "a/"), whole(b'{"names":{}}')),
        (("list_names", "a/"), whole(b"\xff")),
        (("get", "a"), whole(b"[" * 60_000, b"HTTP/1.1 500 X\r\nDcr-Relay: 1\r\nDcr-Error: storage\r\n")),
        (("get", "a"), OURS + b"Content-Length: 999999999999999999\r\n\r\nhi"),
    ],
)
def test_answers_of_another_form_are_errors_of_the_store(call: tuple[str, str], answer: bytes) -> None:
    url, end = foreign_server(answer)
    try:
        with pytest.raises(StorageError):
            getattr(open_objects(url, retry=IMPATIENT), call[0])(call[1])
    finally:
        end()


def endless_server(head: bytes) -> tuple[str, Callable[[], None], list[int]]:
    """Return the URL of a server whose answers do not end, what ends it, and how many bytes it has sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent = [0]
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(head)
                while sent[0] < 64 << 20:  # a client that takes this much would take everything
                    connection.sendall(piece)
                    sent[0] += len(piece)

    thread = threading.Thread(target=serve)
    thread.start()

    def end() -> None:
        with contextlib.suppress(OSError), socket.create_connection(listener.getsockname()):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

    return f"http://127.0.0.1:{listener.getsockname()[1]}", end, sent


@pytest.mark.parametrize("call", ["get", "list", "list_names", "delete", "error"])
def test_bodies_without_an_end_are_given_up(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcr_store.objects import http as module

    for limit in ("_OBJECT_NBYTES", "_LISTING_NBYTES"):
        monkeypatch.setattr(module, limit, 1 << 20)
    head = CHUNKED if call != "error" else CHUNKED.replace(b"200 OK\r\n", b"500 X\r\nDcr-Error: storage\r\n")
    url, end, sent = endless_server(head)
    try:
        policy = RetryPolicy(deadline_s=0.0, unreachable_s=0.0)
        with pytest.raises(StorageError, match="bytes that are taken" if call != "error" else "answered 500"):
            getattr(open_objects(url, retry=policy), "get" if call == "error" else call)(
                "a/" if "list" in call else "a"
            )
        assert sent[0] < 32 << 20
    finally:
        end()


# ---------------------------------------------------------------------- hostile requests


def raw(relay: RelayThread, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
    """Send a request as it is; return status and the kind of error."""
    connection = http.client.HTTPConnection(relay.url.removeprefix("http://"), timeout=30)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(body)
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["Dcr-Relay"] == "1"
        return answer.status, answer.headers.get("Dcr-Error", "")
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "",
        "..",
        "../secret",
        "%2e%2e/secret",
        "a/%2e%2e/%2e%2e/secret",
        "%2Fetc%2Fpasswd",
        "/etc/passwd",
        "a//b",
        "a%00b",
        "a%0d%0ab",
        "a%5cb",
        "a/./b",
        "a/",
        "%ff",
        "%ed%a0%80",
        ".dcr-tmp/x",
        "x" * 2000,
    ],
)
def test_paths_outside_the_store_are_refused(relay: RelayThread, upstream: Watched, path: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        headers = {"Content_Length": "0"} if method == "PUT" else {}
        assert raw(relay, method, f"/v1/objects/{path}", **headers) == (400, "invalid-input")
    assert raw(relay, "GET", f"/v1/list?prefix={path or '.'}%2F") == (400, "invalid-input")
    assert upstream.requests == []


def test_requests_that_are_none_are_refused(relay: RelayThread, upstream: Watched) -> None:
    refused = (400, "invalid-input")
    for method, target in [
        ("GET", "/"),
        ("GET", "/v1/objects"),
        ("POST", "/v1/objects/a"),
        ("GET", "/v1/list"),
        ("GET", "/v1/list?prefix=a"),
        ("GET", "/v1/list?prefix=a/&x=1"),
        ("GET", "/v2/objects/a"),
        ("PUT", "/v1/objects/a"),
    ]:
        assert raw(relay, method, target) == refused, target
    for name, value in [
        ("Range", "bytes=-5"),
        ("Range", "bytes=5-3"),
        ("Range", "bytes=1-2,4-5"),
        ("Range", "lines=1-2"),
        ("Dcr_Sha256", "abc"),
        ("Dcr_Sha256", "A" * 64),
    ]:
        assert raw(relay, "GET", "/v1/objects/a", **{name: value}) == refused, value
    body = {"Content_Length": "1", "Dcr_Sha256": sha256(b"x")}
    assert raw(relay, "PUT", "/v1/objects/a", b"x", If_None_Match='"tag"', **body) == refused
    assert raw(relay, "PUT", "/v1/objects/a", b"x", Content_Encoding="gzip", **body) == refused
    assert upstream.requests == []


def test_bodies_that_were_damaged_are_not_put(relay: RelayThread, upstream: Watched) -> None:
    for headers in ({}, {"Dcr_Sha256": sha256(b"other")}):
        found = raw(relay, "PUT", "/v1/objects/a", b"mine", Content_Length="4", If_None_Match="*", **headers)
        assert found == (400, "digest")
    assert upstream.requests == []
    with socket.create_connection(("127.0.0.1", int(relay.url.rpartition(":")[2]))) as cut:
        cut.sendall(b"PUT /v1/objects/a HTTP/1.1\r\nHost: x\r\nIf-None-Match: *\r\nContent-Length: 9\r\n\r\nmine")
    time.sleep(0.1)
    assert upstream.requests == []


def test_long_bodies_are_refused_unread(upstream: Watched, tmp_path: Path) -> None:
    with RelayThread(upstream, tmp_path / "cache", access="members") as relay:
        nbytes = (16 << 20) + 1
        key = f"groups/g/log/{RECORD}"
        assert raw(relay, "PUT", f"/v1/objects/{key}", If_None_Match="*", Content_Length=str(nbytes)) == (
            413,
            "too-large",
        )
        with pytest.raises(StorageError, match="takes up to 16777216"):
            open_objects(relay.url).put_if_absent(key, bytes(nbytes))
    assert upstream.requests == []


# ---------------------------------------------------------------------- access, token, TLS

RECORD = "00000000000000000007.json"
WRITES = [
    # key, least access to create, to overwrite
    (f"groups/g/log/{RECORD}", "members", "none"),
    ("groups/g/acks/main@3/prepared/r1.0123456789abcdef.00000000000000000005.json", "members", "publish"),
    ("groups/g/log/latest.json", "publish", "members"),
    (f"groups/g/log/checkpoints/{RECORD}", "publish", "publish"),
    ("groups/g/anything", "publish", "publish"),
    (f"groups/g/log/deeper/{RECORD}", "publish", "publish"),
    (f"log/main/{RECORD}", "publish", "none"),
    ("log/main/latest.json", "publish", "publish"),
    (f"log/main/checkpoints/{RECORD}", "publish", "publish"),
    ("versions/main/000000000001-0/data/w.0/u16/mask/c/0", "publish", "publish"),
    ("dcr.json", "publish", "none"),
    ("layouts/0.json", "publish", "all"),
    (f"layouts/{sha256(b'x')}.json", "publish", "publish"),
    ("pins/p.json", "publish", "publish"),
]
GROUP_RECORD = admit(empty("g"), "r1", seq=7).to_bytes()
ACK = Ack("prepared", "g", "r1", "0123456789abcdef", GroupVersion("main@3", "0" * 64, 5)).to_bytes()


def body_at(key: str) -> bytes:
    """Return what may be created at `key`."""
    if not key.startswith("groups/"):
        return b"x"
    return ACK if "/acks/" in key else GROUP_RECORD


@pytest.mark.parametrize("access", ["members", "publish", "all"])
def test_what_each_access_passes_on(upstream: Watched, tmp_path: Path, access: str) -> None:
    order = ["members", "publish", "all", "none"]
    with RelayThread(upstream, tmp_path / "cache", access=access) as relay:
        objects = open_objects(relay.url)
        for key, to_create, to_overwrite in WRITES:
            for least, write in ((to_create, objects.put_if_absent), (to_overwrite, objects.put)):
                if order.index(access) >= order.index(least):
                    assert write(key, body_at(key)) in (True, None)
                else:
                    with pytest.raises(StorageError, match="forbidden"):
                        write(key, body_at(key))
            if access == "all":
                objects.delete(key)
            else:
                with pytest.raises(StorageError, match="forbidden"):
                    objects.delete(key)


@pytest.mark.parametrize(
    ("key", "body"),
    [
        (f"groups/g/log/{RECORD}", b"garbage"),
        (f"groups/g/log/{RECORD}", ACK),
        (f"groups/h/log/{RECORD}", GROUP_RECORD),
        ("groups/g/log/00000000000000000008.json", GROUP_RECORD),
        ("groups/g/acks/main@3/prepared/r1.0123456789abcdef.00000000000000000005.json", b"{}"),
        ("groups/g/acks/main@3/prepared/r1.0123456789abcdef.00000000000000000005.json", GROUP_RECORD),
        ("groups/g/acks/main@3/prepared/r2.0123456789abcdef.00000000000000000005.json", ACK),
        ("groups/g/acks/main@4/prepared/r1.0123456789abcdef.00000000000000000005.json", ACK),
        ("groups/g/acks/main@3/applied/r1.0123456789abcdef.00000000000000000005.json", ACK),
    ],
)
def test_members_put_only_what_belongs_there(upstream: Watched, tmp_path: Path, key: str, body: bytes) -> None:
    with (
        RelayThread(upstream, tmp_path / "cache", access="members") as relay,
        pytest.raises(StorageError, match="forbidden"),
    ):
        open_objects(relay.url).put_if_absent(key, body)
    assert upstream.requests == []


@pytest.fixture
def guarded(upstream: Watched, tmp_path: Path) -> Iterator[RelayThread]:
    with RelayThread(upstream, tmp_path / "cache", token=TOKEN) as relay:
        yield relay


def test_the_token_is_asked_for(guarded: RelayThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(f"  {TOKEN}\n")
    options: list[dict[str, str]] = [{"relay_token": TOKEN}, {"relay_token_file": str(tmp_path / "token")}]
    for right in options:
        objects = open_objects(guarded.url, right)
        assert objects.put_if_absent("a", b"x")
        assert objects.get("a") == b"x"
    for wrong in ({}, {"relay_token": TOKEN + "x"}, {"relay_token": TOKEN[:-1] + "E"}):
        for call in ("get", "size"):
            with pytest.raises(StorageError, match="token") as caught:
                getattr(open_objects(guarded.url, wrong), call)("a")
            assert TOKEN[:-1] not in str(caught.value)
    monkeypatch.setenv("DCR_RELAY_TOKEN", TOKEN)
    assert open_objects(guarded.url).get("a") == b"x"
    monkeypatch.delenv("DCR_RELAY_TOKEN")
    monkeypatch.setenv("DCR_RELAY_TOKEN_FILE", str(tmp_path / "token"))
    assert open_objects(guarded.url).get("a") == b"x"
    assert guarded.told == []


@pytest.mark.parametrize("given", ["Basic " + TOKEN, TOKEN, "Bearer", "Bearer " + "é" * 20])
def test_tokens_of_another_form_are_wrong(guarded: RelayThread, upstream: Watched, given: str) -> None:
    assert raw(guarded, "GET", "/v1/objects/a", Authorization=given) == (401, "token")
    assert raw(guarded, "GET", "/v1/status", Authorization=given) == (401, "token")
    assert upstream.requests == []


@pytest.mark.parametrize("token", ["short", "with space inside it", "", "é" * 20, 5])
def test_what_is_no_token_is_refused(token: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_objects("http://127.0.0.1:1", {"relay_token": token})
    assert str(token) not in str(caught.value) or not token


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://:80",
        "http://host:port",
        "http://user:secret-word@host:1",
        "http://user:pa/secret-word@host:1",
        "http://user:12/secret-word@host:1",
        "http://user:pa/secret-word@host:port",
        "http://h:1/?a=secret-word",
        "http://h:1?token=secret-word",
        "http://h:1/#secret-word",
        "http://h:1/?",
        "http://h:1/secret-word with a space",
        "http://h:0",
        "http://h\x7f:1",
        "http://h\x85:1",
        "http://hä:1",
        "http://h:1/\u2028",
        f"http://{'h' * 64}:1",
        "http://h..x:1",
    ],
)
def test_urls_that_cannot_be_a_relays_are_refused(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_objects(url)
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://relay-1:80", "https://relay-1.eu-west.example:8443/a-b/c~d", "http://127.0.0.1:8080", "http://[::1]:80"],
)
def test_urls_that_can_be_a_relays_are_taken(url: str) -> None:
    assert open_objects(url).url == url
    several = f"{url},http://relay-2:80"
    assert open_objects(several).url == several


def test_options_that_nobody_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="takes the storage options"):
        open_objects("http://127.0.0.1:1", {"key": "x"})
    with pytest.raises(InvalidInputError, match="none of"):
        open_objects("http://127.0.0.1:1,http://127.0.0.1:2", {"key": "x"})
    with pytest.raises(InvalidInputError, match="none of"):
        open_objects(f"{tmp_path},file://{tmp_path}/b", {"relay_token": TOKEN})
    with pytest.raises(InvalidInputError, match="certificates"):
        open_objects("https://127.0.0.1:1", {"relay_ca_file": __file__})


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with cert.pem, valid for 127.0.0.1, and key.pem."""
    directory = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=relay", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return directory


def test_tls(upstream: Watched, tmp_path: Path, certificate: Path) -> None:
    data = secrets.token_bytes(3 << 20)
    upstream.put("a", data)
    files = {"tls_cert": str(certificate / "cert.pem"), "tls_key": str(certificate / "key.pem")}
    with RelayThread(upstream, tmp_path / "cache", **files) as relay:
        assert relay.url.startswith("https://")
        objects = open_objects(relay.url, {"relay_ca_file": files["tls_cert"]})
        assert objects.put_if_absent("b", data)
        for key in ("a", "b", "a"):
            assert objects.get(key, sha256=sha256(data)) == data
        with pytest.raises(StorageError, match="not trusted"):
            open_objects(relay.url).get("a")
        with pytest.raises(StorageError):
            open_objects(relay.url.replace("https", "http"), retry=IMPATIENT).get("a")
        with pytest.raises(NotFoundError):
            objects.get("c")
        objects.close()  # type: ignore[attr-defined]


def test_tls_files_that_do_not_fit_are_refused(upstream: Watched, tmp_path: Path, certificate: Path) -> None:
    files = {"tls_cert": str(certificate / "key.pem"), "tls_key": str(certificate / "key.pem")}
    with pytest.raises(InvalidInputError, match="cannot be used together"), RelayThread(upstream, tmp_path, **files):
        pass
