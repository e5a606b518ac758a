#!/usr/bin/env python3
"""Measure a tree of relays against one direct reader, over links of a given speed.

    python tools/bench_relay.py [--rate 50] [--rate 5] [--leaves 32] [--branch] [--objects 16] [--object-mib 4]

Every node (relay or leaf) has a link of its own to the node above it, a proxy that lets so many MB/s through by a token
bucket; an unshaped relay on a directory stands for the store. In the tree each relay has two children, and the leaves
hang below the last ones. Each leaf fetches all objects, four at a time, and compares them. All nodes are processes of
one machine, so high rates measure its processors, not the tree: the share of them that was busy stands beside the
times. ``--branch`` takes of the tree only the relays above one leaf, and below each, in place of its other half, one
leaf: as deep, and small enough for the rate of a real link on a few processors. Exit status 1 if a target was missed
where the processors were not the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import resource
import secrets
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dcr_store.objects.open import open_objects, open_upstreams
from dcr_store.objects.transfer import map_bounded
from dcr_store.relay.serving import Settings, serving

FORK = multiprocessing.get_context("fork")
BLOCK_NBYTES = 1 << 16
BURST_S = 0.02
BUSY = 0.9  # share of the processors from which on they are the limit
Objects = dict[str, str]


class Bucket:
    """Lets `rate` bytes a second through, and a little more at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._rate
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


def link(upstream: str, rate: float) -> str:
    """Listen, pass connections on to `upstream`, and shape what comes down; return the URL.

    Bytes go from socket to socket within the kernel, so that links cost the processors little.
    """
    host, port = upstream.removeprefix("http://").split(":")
    bucket = Bucket(rate)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def up(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(BLOCK_NBYTES):
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def down(source: socket.socket, target: socket.socket) -> None:
        out, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 2 * BLOCK_NBYTES)
        with contextlib.suppress(OSError):
            while nbytes := os.splice(source.fileno(), into, BLOCK_NBYTES):
                bucket.take(nbytes)
                while nbytes:
                    nbytes -= os.splice(out, target.fileno(), nbytes)
            target.shutdown(socket.SHUT_WR)
        os.close(out)
        os.close(into)

    def accept() -> None:
        while True:
            below, _ = listener.accept()
            above = socket.create_connection((host, int(port)))
            for run, source, target in ((up, below, above), (down, above, below)):
                threading.Thread(target=run, args=(source, target), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def process(run: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Run ``run(connection, …)`` in a process of its own; the value is what it sends first."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=run, args=(theirs, *arguments), daemon=True)
    child.start()
    try:
        yield ours.recv()
    finally:
        ours.send("stop")
        child.join()


async def until_told(connection: Any) -> None:
    await asyncio.get_running_loop().run_in_executor(None, connection.recv)


def run_links(connection: Any, ups: Sequence[str], rate: float) -> None:
    connection.send([link(upstream, rate) for upstream in ups])
    connection.recv()


def run_relay(connection: Any, upstream: str, directory: str) -> None:
    async def run() -> None:
        settings = Settings("127.0.0.1", 0, directory, 1 << 40)
        async with serving(settings, open_upstreams([upstream]), print) as url:
            connection.send(url)
            await until_told(connection)

    asyncio.run(run())


def read_all(url: str, wanted: Objects) -> float:
    """Fetch and compare everything; return when it was done."""
    objects = open_objects(url)

    def fetch(key: str) -> bool:
        return hashlib.sha256(objects.get(key, sha256=wanted[key])).hexdigest() == wanted[key]

    assert all(map_bounded(fetch, wanted, n_parallel=4))
    return time.monotonic()


def run_leaves(connection: Any, urls: Sequence[str], wanted: Objects) -> None:
    connection.send("ready")
    connection.recv()
    with ThreadPoolExecutor(len(urls)) as pool:
        connection.send(max(pool.map(lambda url: read_all(url, wanted), urls)))
    connection.recv()


@contextlib.contextmanager
def leaves(urls: Sequence[str], wanted: Objects, n_processes: int) -> Iterator[Callable[[], float]]:
    """Hold processes with leaves; the value starts all of them and returns the seconds until the last one is done."""
    pipes, children = [], []
    for share in (urls[i::n_processes] for i in range(min(n_processes, len(urls)))):
        ours, theirs = FORK.Pipe()
        child = FORK.Process(target=run_leaves, args=(theirs, share, wanted), daemon=True)
        child.start()
        assert ours.recv() == "ready"
        pipes.append(ours)
        children.append(child)

    def start() -> float:
        begun = time.monotonic()
        for pipe in pipes:
            pipe.send("start")
        return max(pipe.recv() for pipe in pipes) - begun

    yield start
    for pipe, child in zip(pipes, children, strict=True):
        pipe.send("stop")
        child.join()


@dataclass(frozen=True)
class Measured:
    seconds: float
    busy: float
    nbytes_left: int


def measure(directory: Path, wanted: Objects, rate: float, levels: Sequence[Sequence[int]]) -> Measured:
    """Time the leaves of a tree.

    Parameters
    ----------
    levels : sequence of sequences of int
        One for each level of relays, the last for the leaves; in it, for each node, which one it hangs below: of
        relays, an index into the level before (of the first, 0: the store); of leaves, an index into the store and all
        relays, level by level.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcr-bench-relay-")))
        origin = stack.enter_context(process(run_relay, str(directory), str(scratch / "origin")))
        read_all(origin, wanted)  # the store's own disk is not measured
        relays = above = [origin]
        for depth, level in enumerate(levels[:-1]):
            links = stack.enter_context(process(run_links, [above[i] for i in level], rate))
            above = [
                stack.enter_context(process(run_relay, url, str(scratch / f"{depth}-{i}")))
                for i, url in enumerate(links)
            ]
            relays = [*relays, *above]
        ups = [relays[i] for i in levels[-1]]
        links = stack.enter_context(process(run_links, ups, rate))
        start = stack.enter_context(leaves(links, wanted, 4))
        before, begun = _served(origin), time.monotonic()
        ticks = _busy_s()
        seconds = start()
        busy = (_busy_s() - ticks) / (time.monotonic() - begun) / (os.cpu_count() or 1)
        return Measured(seconds, busy, _served(origin) - before)


def tree(n_leaves: int) -> list[list[int]]:
    """Return the levels of a binary tree: relays, as many as halve the number of leaves again and again, and leaves."""
    widths = [1]
    while 2 * widths[-1] < n_leaves:
        widths.append(2 * widths[-1])
    last = sum(widths) - widths[-1] + 1  # the store counts, too
    return [
        *([i // 2 for i in range(width)] for width in widths),
        [last + i * widths[-1] // n_leaves for i in range(n_leaves)],
    ]


def branch(n_leaves: int) -> list[list[int]]:
    """Return the levels of a tree of that depth that has relays above one leaf only."""
    n_relays = len(tree(n_leaves)) - 1
    return [*([0] for _ in range(n_relays)), [*range(1, n_relays + 1), n_relays]]


def _served(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/status") as answer:
        return int(json.load(answer)["served_nbytes"])


def _busy_s() -> float:
    """Return the seconds that all processors together have been busy, of all processes of the machine."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _, _, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, action="append", help="MB/s of each link (repeatable; default 50 and 5)")
    parser.add_argument("--leaves", type=int, default=32)
    parser.add_argument("--branch", action="store_true", help="only the relays above one leaf, and a leaf beside each")
    parser.add_argument("--objects", type=int, default=16)
    parser.add_argument("--object-mib", type=float, default=4.0)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    levels = (branch if arguments.branch else tree)(arguments.leaves)
    shape = f"{len(levels[-1])} leaves, {len(levels) - 1} relays above the last"
    table = Table(title=f"{shape}, {arguments.objects} x {arguments.object_mib:g} MiB")
    for name in ("MB/s", "direct", "tree, last leaf", "ratio", "processors busy", "left the store", "target"):
        table.add_column(name, justify="right")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="dcr-bench-relay-") as scratch:
        directory = Path(scratch) / "store"
        store, wanted, nbytes = open_objects(directory), {}, int(arguments.object_mib * (1 << 20))
        for i in range(arguments.objects):
            data = secrets.token_bytes(nbytes)
            store.put(f"versions/{i}", data)
            wanted[f"versions/{i}"] = hashlib.sha256(data).hexdigest()
        for rate in arguments.rate or [50.0, 5.0]:
            direct = measure(directory, wanted, rate * 1e6, [[0]])
            below = measure(directory, wanted, rate * 1e6, levels)
            ratio, copies = below.seconds / direct.seconds, below.nbytes_left / (nbytes * arguments.objects)
            is_limited = below.busy > BUSY
            met = ratio <= 1.5 and copies <= 1.05
            missed += not met and not is_limited
            table.add_row(
                f"{rate:g}",
                f"{direct.seconds:.2f} s",
                f"{below.seconds:.2f} s",
                f"{ratio:.2f}",
                f"{below.busy:.0%}",
                f"{copies:.2f} copies",
                "PASS" if met else "processors" if is_limited else "FAIL",
            )
    Console().print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
