#!/usr/bin/env python3
"""Measure a refit from the trainer's memory to the last receiver, beside full checkpoints and dense XOR.

    python tools/bench_refit.py [--gib 1] [--rates 1,3,5,10] [--mb-per-s 100] [--receivers 2] [--into memory|files]

One run, all on this machine: a SeaweedFS server, a link of the given bandwidth (each way) between it and everybody
else, receivers in processes of their own. Ways that are compared, each from the first byte read of the new weights in
the trainer's memory to the moment at which the last receiver has them, in its memory, as an engine has, or synced in
its file:

full, one after the other   the state in shards of 64 MiB: upload all, then download all
full, overlapped            the same; a shard is downloaded as soon as it is uploaded
dense XOR + zstd-1          new XOR old of each shard, compressed, as slime and SkyRL do; overlapped
ours                        a delta published into the store, received over the link by each for itself
ours, relay                 the same, with a relay on the receivers' side of the link

The shard ways get told for free when a shard is there; ours polls. Exit status 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

os.environ.setdefault("BOTO_DISABLE_CRT", "true")  # whose signer makes the uploads that we are compared with slower

import numpy as np
from bench_store import MIB, Report, made, tensors_of
from line_child import LineChild
from shaped_link import ShapedLink

import dcr_store
from dcr_store.codec import kernels
from dcr_store.codec.digest import crc64

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from servers import SeaweedS3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]

SHARD_NBYTES: Final = 64 * MIB
N_TRANSFERS = 4
TARGETS = {3: 40.0, 5: 30.0}


@dataclass
class Timed:
    """What one way took.

    Attributes
    ----------
    seconds : float
        From the trainer's memory to the last receiver.
    nbytes : int
        What the trainer sent.
    stages : dict of str to float
        Seconds of its parts, which may overlap.
    """

    seconds: float
    nbytes: int
    stages: dict[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------------- receivers


def client(endpoint_url: str) -> Any:
    import botocore.config
    import botocore.session

    config = botocore.config.Config(s3={"addressing_style": "path"}, max_pool_connections=2 * N_TRANSFERS)
    return botocore.session.Session().create_client("s3", endpoint_url=endpoint_url, config=config)


class ShardReceiver:
    """Writes or patches the shards of a state, several at once, in memory or in a file that is synced at the end."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._client = client(options["endpoint_url"])
        self._bucket = options["bucket"]
        file = options["file"]
        in_memory = options["into"] == "memory"
        self._state = np.fromfile(file, np.uint8) if in_memory else np.memmap(file, np.uint8, "r+")
        self._pool = ThreadPoolExecutor(N_TRANSFERS)
        self._tasks: list[Any] = []

    def start(self, key: str, shard: int, is_mask: bool) -> None:
        self._tasks.append(self._pool.submit(self._take, key, shard, is_mask))

    def _take(self, key: str, shard: int, is_mask: bool) -> None:
        data = self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read()
        part = self._state[shard * SHARD_NBYTES : (shard + 1) * SHARD_NBYTES]
        if is_mask:
            import zstandard

            words = part.view(np.uint64)
            words ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint64)
        else:
            part[:] = np.frombuffer(data, np.uint8)

    def finish(self) -> None:
        for task in self._tasks:
            task.result()
        self._tasks.clear()
        if isinstance(self._state, np.memmap):
            self._state.flush()

    def digest(self) -> int:
        return crc64(self._state)


def live(file: str) -> dict[str, Any]:
    """Return the tensors of a state in memory, as ``tensors_of`` cuts it, each with memory of its own."""
    return {name: tensor.copy() for name, tensor in tensors_of(np.fromfile(file, np.uint16)).items()}


def child(options: dict[str, Any]) -> None:
    """Take orders until there are no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    shards = ShardReceiver(options) if "bucket" in options else None
    store = receiver = None
    target: Any = options.get("directory")
    if shards is None:
        store = dcr_store.open(options["url"], storage_options=options["storage_options"])
        if options["into"] == "memory":
            target = live(options["file"])
        receiver = store.receiver(target, spool=options["spool"])
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "take":
            assert shards is not None
            shards.start(order["key"], order["shard"], order["is_mask"])
        elif order["do"] == "finish":
            assert shards is not None
            shards.finish()
            say(at=time.time())
        elif order["do"] == "digest":
            bits = np.concatenate([t.view(np.uint16) for t in target.values()]) if shards is None else None
            say(digest=shards.digest() if shards is not None else crc64(bits))
        else:
            assert receiver is not None
            if order.get("ready"):
                say(ready=True)
            receiver.follow(until=order["version"])
            say(at=time.time())
    if receiver is not None:
        receiver.close()


def require_digest(receivers: list[LineChild], expected: int) -> None:
    """Refuse a run whose receivers do not have the right bits in the end."""
    for index, receiver in enumerate(receivers):
        receiver.tell(do="digest")
        if receiver.answer()["digest"] != expected:
            raise SystemExit(f"receiver {index} has wrong bits")


# ---------------------------------------------------------------------- ways


def by_shards(
    receivers: list[LineChild],
    put: Callable[[str, bytes], None],
    parts: list[U8],
    *,
    overlap: bool,
    old: list[U8] | None,
) -> Timed:
    """Send shards, or their masks if `old` is given."""
    import zstandard

    begun_s = time.time()
    nbytes = 0

    def send(shard: int) -> int:
        data: Any = parts[shard].data
        if old is not None:
            mask = parts[shard].view(np.uint64) ^ old[shard].view(np.uint64)
            data = zstandard.ZstdCompressor(level=1).compress(mask.data)
        put(f"shard-{shard}", bytes(data))
        return len(data)

    def announce(shard: int) -> None:
        for receiver in receivers:
            receiver.tell(do="take", key=f"shard-{shard}", shard=shard, is_mask=old is not None)

    with ThreadPoolExecutor(N_TRANSFERS) as pool:
        for shard, sent in enumerate(pool.map(send, range(len(parts)))):
            nbytes += sent
            if overlap:
                announce(shard)
    uploaded_s = time.time()
    if not overlap:
        for shard in range(len(parts)):
            announce(shard)
    for receiver in receivers:
        receiver.tell(do="finish")
    ended_s = max(receiver.answer()["at"] for receiver in receivers)
    return Timed(ended_s - begun_s, nbytes, {"encode + upload": uploaded_s - begun_s, "rest": ended_s - uploaded_s})


def by_store(store: dcr_store.Store, receivers: list[LineChild], state: dict[str, Any], number: int) -> Timed:
    """Publish a version and wait for all receivers."""
    for receiver in receivers:
        receiver.tell(do="follow", version=f"main@{number}", ready=True)
    for receiver in receivers:
        receiver.answer()
    time.sleep(1.0)  # they poll by now
    begun_s = time.time()
    with store.begin() as transaction:
        for name, tensor in state.items():
            transaction.write(name, tensor)
        info = transaction.commit()
        published_s = time.time()
    ended_s = max(receiver.answer()["at"] for receiver in receivers)
    return Timed(ended_s - begun_s, info.nbytes, {"publish": published_s - begun_s, "rest": ended_s - published_s})


@contextlib.contextmanager
def running(n: int, options: Callable[[int], dict[str, Any]], environment: dict[str, str]) -> Iterator[list[LineChild]]:
    receivers = [LineChild(__file__, {"index": index, **options(index)}, environment) for index in range(n)]
    try:
        yield receivers
    finally:
        for receiver in receivers:
            receiver.close()


class Bench:
    """One server behind one link, and the states that go over it."""

    def __init__(self, server: SeaweedS3, link: ShapedLink, scratch: Path, arguments: argparse.Namespace) -> None:
        self.server, self.link, self.scratch, self.arguments = server, link, scratch, arguments
        self.options = server.options_at(link.endpoint_url)
        self.environment = {**server.environment, "AWS_ENDPOINT_URL": link.endpoint_url}

    def shards(self, old: U8, new: U8, *, is_mask: bool, overlap: bool) -> Timed:
        bucket = self.server.new_bucket()
        files = []
        for index in range(self.arguments.receivers):
            files.append(self.scratch / f"file-{index}")
            old.tofile(files[-1])
        through_link = client(self.link.endpoint_url)

        def cut(octets: U8) -> list[U8]:
            return [octets[start : start + SHARD_NBYTES] for start in range(0, len(octets), SHARD_NBYTES)]

        def options(index: int) -> dict[str, Any]:
            place = {"file": str(files[index]), "into": self.arguments.into}
            return {"endpoint_url": self.link.endpoint_url, "bucket": bucket, **place}

        with running(self.arguments.receivers, options, self.environment) as receivers:
            timed = by_shards(
                receivers,
                lambda key, data: through_link.put_object(Bucket=bucket, Key=key, Body=data),
                cut(new),
                overlap=overlap,
                old=cut(old) if is_mask else None,
            )
            require_digest(receivers, crc64(new))
        for file in files:
            file.unlink()
        return timed

    def ours(self, states: list[Any], *, relay: bool) -> Timed:
        """Publish and follow the first states, so that all is compiled and connected, then measure the last."""
        url = self.server.new_url()
        first, *others = (tensors_of(bits) for bits in states)
        with contextlib.ExitStack() as stack:
            # Past the link: what is not measured need not wait.
            direct = stack.enter_context(dcr_store.create(url, storage_options=self.server.storage_options))
            store = stack.enter_context(dcr_store.open(url, storage_options=self.options))
            with store.begin() as transaction:
                for name, tensor in first.items():
                    transaction.write(name, tensor)
            receivers_url, options = url, self.options
            if relay:
                receivers_url, options = stack.enter_context(self.relay(url)), {}
            in_memory = self.arguments.into == "memory"
            directories = [self.scratch / f"node-{index}" for index in range(self.arguments.receivers)]
            states[0].tofile(self.scratch / "first")
            for directory in () if in_memory else directories:
                direct.pull(directory)

            def child_options(index: int) -> dict[str, Any]:
                return {
                    "url": receivers_url,
                    "storage_options": options,
                    "into": self.arguments.into,
                    "file": str(self.scratch / "first"),
                    "directory": str(directories[index]),
                    "spool": str(self.scratch / f"spool-{index}"),
                }

            with running(self.arguments.receivers, child_options, self.environment) as receivers:
                for number, state in enumerate(others, 1):
                    timed = by_store(store, receivers, state, number)
                if in_memory:
                    require_digest(receivers, crc64(states[-1]))
            for directory in () if in_memory else directories:
                if not direct.compare_directory("main", directory).ok:
                    raise SystemExit(f"{directory} is wrong")
        return timed

    @contextlib.contextmanager
    def relay(self, url: str) -> Iterator[str]:
        """Run a relay on the receivers' side of the link."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        listen = f"127.0.0.1:{port}"
        command = [sys.executable, "-m", "dcr_store", "relay", "--upstream", url, "--listen", listen]
        command += ["--cache", str(self.scratch / "cache"), "--max-bytes", "4GiB"]
        with subprocess.Popen(command, env={**os.environ, **self.environment}) as process:
            try:
                while True:
                    if process.poll() is not None:
                        raise SystemExit("the relay has ended")
                    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                        break
                    time.sleep(0.1)
                yield f"http://{listen}"
            finally:
                process.terminate()


def measure(bench: Bench, states: list[Any], rate: float, report: Report) -> None:
    """Add the rows of one change rate."""
    old, new = (bits.view(np.uint8) for bits in states[-2:])
    timed = {
        "full, one after the other": bench.shards(old, new, is_mask=False, overlap=False),
        "full, overlapped": bench.shards(old, new, is_mask=False, overlap=True),
        "dense XOR + zstd-1": bench.shards(old, new, is_mask=True, overlap=True),
        "ours": bench.ours(states, relay=False),
        "ours, relay": bench.ours(states, relay=True),
    }
    full_s = timed["full, one after the other"].seconds
    for way, found in timed.items():
        stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.stages.items())
        times = full_s / found.seconds
        cells = (f"{rate:g} %", way, f"{found.nbytes / 1e6:.1f}", f"{found.seconds:.2f}", f"{times:.1f} x", stages)
        target = TARGETS.get(rate) if way == "ours, relay" else None
        if target is None:
            report.add(*cells)
        else:
            report.add(*cells, target=f">= {target:g} x", met=times >= target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rates", default="1,3,5,10", help="percent of the weights that change, with commas")
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="bandwidth of the link, each way")
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--into", choices=("memory", "files"), default="memory", help="of the receivers")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    report = Report(
        f"Refit of {arguments.gib:g} GiB over {arguments.mb_per_s:g} MB/s to {arguments.receivers} receivers, "
        f"into {arguments.into}"
    )
    n_elements = int(arguments.gib * (1 << 30)) // 2
    with (
        SeaweedS3() as server,
        ShapedLink(server.endpoint_url, arguments.mb_per_s) as link,
    ):
        os.environ.update(server.environment)
        if importlib.util.find_spec("numba"):
            os.environ[kernels.ENVIRONMENT_VARIABLE] = "numba"  # from the start, in all processes
        for rate in (float(rate) for rate in arguments.rates.split(",")):
            with tempfile.TemporaryDirectory(prefix="dcr-bench-") as scratch:
                bench = Bench(server, link, Path(scratch), arguments)
                measure(bench, made(n_elements, rate / 100, 3), rate, report)
    return report.print("changed", "way", "MB sent", "seconds", "of full", "seconds of stages")


if __name__ == "__main__":
    sys.exit(min(1, main()))
