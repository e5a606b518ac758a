#!/usr/bin/env python3
"""A TCP link of a known bandwidth between a client and a server on this machine, for benches and tests.

    python tools/shaped_link.py --to HOST:PORT --mb-per-s 100

Prints the port that it listens on and runs until its standard input ends. Each direction has a bandwidth of its own
(full duplex), which all connections share; what a direction may send at once is a twentieth of a second's worth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from typing import Self

PIECE_NBYTES = 64 << 10
BURST_S = 0.05


class Bucket:
    """Lets bytes pass at a rate, in the order in which they were asked for."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = time.monotonic()

    async def take(self, nbytes: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_S) + nbytes / self._bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bucket: Bucket) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(PIECE_NBYTES):
            await bucket.take(len(piece))
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(ConnectionError, OSError):
        writer.write_eof()


async def serve(host: str, port: int, bytes_per_s: float) -> None:
    up, down = Bucket(bytes_per_s), Bucket(bytes_per_s)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, there_writer, up), pump(there_reader, writer, down))
        for end in (writer, there_writer):
            end.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class ShapedLink:
    """A link in a process of its own, so that it does not share this one's time; a context manager.

    Attributes
    ----------
    endpoint_url : str
        ``http://127.0.0.1:port``.
    """

    def __init__(self, to: str, mb_per_s: float) -> None:
        command = [sys.executable, __file__, "--to", to.removeprefix("http://"), "--mb-per-s", str(mb_per_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint_url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--mb-per-s", type=float, required=True)
    arguments = parser.parse_args()
    host, _, port = arguments.to.rpartition(":")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(host, int(port), arguments.mb_per_s * 1e6))


if __name__ == "__main__":
    main()
