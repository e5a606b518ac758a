#!/usr/bin/env python3
"""Measure how encoding, upload and the receivers' fetching overlap where several ranks publish over a link.

    python tools/bench_overlap.py [--mib 2048] [--rates 1,30,100] [--mb-per-s 100] [--ranks 2] [--receivers 2]

One run, all on this machine: a SeaweedFS server, a link of the given bandwidth (each way) between it and everybody
else, ranks that hold rows of one tensor and receivers that hold all of it in memory, each a process of its own. The
ranks have one half of the cores, all others the other half, as they are machines of their own elsewhere. A version is
published from the order to all ranks until the commit of the one that began it has returned. Beside that:

encode alone   the same by the same ranks into a directory in memory
upload alone   the same objects through the link, eight at a time

The version is then published again, into a store that receivers follow: when the last receiver had fetched its last
partition, from the order on, beside that publish. The ranks find each other by the store. Rate 100 is an anchor. Exit
status 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from bench_store import MIB, Report, consecutive
from line_child import LineChild
from shaped_link import ShapedLink

import dcr_store
from dcr_store import events
from dcr_store.codec import kernels
from dcr_store.codec.digest import crc64
from dcr_store.layout import slices
from dcr_store.objects.open import open_objects

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from servers import SeaweedS3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

COLUMNS = 4096
N_UPLOADS = 8
N_ROUNDS = 3


def read_state(file: str, n_rows: int, first: int = 0) -> NDArray[Any]:
    bits = np.fromfile(file, np.uint16, n_rows * COLUMNS, offset=2 * first * COLUMNS)
    return bits.view(ml_dtypes.bfloat16).reshape(n_rows, COLUMNS)


def be_rank(options: dict[str, Any], orders: Iterator[dict[str, Any]], say: Callable[..., None]) -> None:
    """Publish the rank's rows of a state for each order."""
    rank, names, shape = options["rank"], [f"r{index}" for index in range(options["ranks"])], tuple(options["shape"])
    mapped = slices.column_parallel("w", "BF16", shape, rank, len(names))
    store, url = None, ""
    for order in orders:
        if store is None or url != order["url"]:
            if store is not None:
                store.close()  # and drop its baseline
            url = order["url"]
            store = dcr_store.open(url, storage_options=order["storage_options"])
        local = read_state(order["file"], mapped.shape[0], rank * mapped.shape[0])
        say(ready=True)
        next(orders)
        start_s = time.time()
        if rank == 0:
            transaction = store.begin(writers=names, tensors={"w": ("BF16", shape)}, slices=[mapped])
        else:
            transaction = store.join(writer=names[rank], slices=[mapped])
        transaction.write_slice(local, mapped)
        transaction.seal()
        sealed_s = time.time()
        transaction.commit(timeout_s=600)
        say(start=start_s, sealed=sealed_s, end=time.time(), txid=transaction.txid)


def be_receiver(options: dict[str, Any], orders: Iterator[dict[str, Any]], say: Callable[..., None]) -> None:
    """Follow to the version that each order names; the file of the first one is what is there before."""
    fetched_s = 0.0

    def listen(event: events.Event) -> None:
        nonlocal fetched_s
        if event.name == "transfer.fetched":
            fetched_s = time.time()

    receiver, target = None, {}
    for order in orders:
        if receiver is None:
            store = dcr_store.open(order["url"], storage_options=order["storage_options"])
            target = {"w": read_state(order["file"], options["shape"][0])}
            receiver = store.receiver(target, spool=options["spool"])
        say(ready=True)
        with events.listening(listen):
            receiver.follow(until=order["version"])
        say(fetched=fetched_s, digest=crc64(target["w"].view(np.uint16)))
    if receiver is not None:
        receiver.close()


def child(options: dict[str, Any]) -> None:
    """Take orders until there are no more."""
    if options.get("cores"):
        os.sched_setaffinity(0, options["cores"])
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def say(**what: Any) -> None:
            print(json.dumps(what), file=out, flush=True)

        (be_rank if "rank" in options else be_receiver)(options, map(json.loads, sys.stdin), say)


class Bench:
    """One server behind one link."""

    def __init__(
        self, server: SeaweedS3, link: ShapedLink, scratch: Path, arguments: argparse.Namespace, cores: list[int]
    ) -> None:
        self.server, self.scratch, self.arguments, self.cores = server, scratch, arguments, cores
        self.options = server.options_at(link.endpoint_url)

    def publish(self, ranks: list[LineChild], **where: Any) -> dict[str, Any]:
        """Publish from all ranks at once; return what the first one says."""
        for rank in ranks:
            rank.tell(**where)
        for rank in ranks:
            rank.answer()
        for rank in ranks:
            rank.tell()
        first, *_ = [rank.answer() for rank in ranks]
        return first

    def upload_s(self, directory: Path, txid: str) -> tuple[float, int]:
        """Return how long the objects of a version take through the link, and their bytes."""
        files = [file for file in directory.rglob("*") if file.is_file() and txid in str(file)]
        contents = [file.read_bytes() for file in files]
        through = open_objects(self.server.new_url(), self.options)
        with ThreadPoolExecutor(N_UPLOADS) as pool:
            list(pool.map(lambda index: through.put(f"warm/{index}", b"x"), range(N_UPLOADS)))
            start_s = time.time()
            list(pool.map(lambda item: through.put(f"o/{item[0]}", item[1]), enumerate(contents)))
            return time.time() - start_s, sum(map(len, contents))

    def followed(self, ranks: list[LineChild], receivers: list[LineChild], files: list[str], digest: int) -> float:
        """Return when the last partition of a version had been fetched, as a share of its publish."""
        shares, url = [], self.server.new_url()
        dcr_store.create(url, storage_options=self.server.storage_options).close()
        for number, file in enumerate(files):
            where = {"url": url, "storage_options": self.options, "file": file}
            following = receivers if number > 0 or len(files) == 1 else []
            for receiver in following:
                receiver.tell(**{**where, "file": files[0]}, version=f"main@{number}")
            for receiver in following:
                receiver.answer()
            time.sleep(1.0)  # they poll by now
            beside = self.publish(ranks, **where)
            answers = [receiver.answer() for receiver in following]
            if answers:
                fetched_s = max(answer["fetched"] for answer in answers) - beside["start"]
                shares.append(fetched_s / (beside["end"] - beside["start"]))
        if any(answer["digest"] != digest for answer in answers):
            raise SystemExit("a receiver has wrong bits")
        return median(shares[-N_ROUNDS:])

    def measure(self, rate: float, report: Report) -> None:
        """Add the rows of a rate: of one anchor, or the medians of several deltas."""
        arguments = self.arguments
        n_states = 1 if rate >= 100 else 2 + N_ROUNDS  # an anchor, and a delta that warms up
        files = [str(self.scratch / f"state-{number}") for number in range(n_states)]
        for file, bits in zip(files, consecutive(arguments.mib * MIB // 2, min(rate, 50) / 100, n_states), strict=True):
            bits.tofile(file)
            shape, digest = (len(bits) // COLUMNS, COLUMNS), crc64(bits)
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with contextlib.ExitStack() as stack:
            near = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcr-bench-", dir=in_memory)))
            common = {"shape": shape, "ranks": arguments.ranks}

            def started(**options: Any) -> LineChild:
                return stack.enter_context(contextlib.closing(LineChild(__file__, {**options, **common})))

            ranks = [started(rank=rank, cores=self.cores) for rank in range(arguments.ranks)]
            spools = [str(self.scratch / f"spool-{rate:g}-{index}") for index in range(arguments.receivers)]
            receivers = [started(spool=spool) for spool in spools]
            for directory in ("warm", "timed"):
                dcr_store.create(str(near / directory)).close()
            self.publish(ranks, url=str(near / "warm"), storage_options=None, file=files[0])
            encoded = [self.publish(ranks, url=str(near / "timed"), storage_options=None, file=file) for file in files]
            upload_s, nbytes = self.upload_s(near / "timed", encoded[-1]["txid"])
            shutil.rmtree(near)
            near.mkdir()
            url = self.server.new_url()
            dcr_store.create(url, storage_options=self.server.storage_options).close()
            published = [self.publish(ranks, url=url, storage_options=self.options, file=file) for file in files]
            last = self.followed(ranks, receivers, files, digest)
        encode_s, publish_s = typical_s(encoded, "end"), typical_s(published, "end")
        times = publish_s / max(encode_s, upload_s)
        cells = (f"{rate:g} %", f"{nbytes / 1e6:.1f}", f"{encode_s:.2f}", f"{upload_s:.2f}", f"{publish_s:.2f}")
        sealed = f"{typical_s(published, 'sealed'):.2f}"
        report.add(*cells, sealed, f"{times:.2f} x", "", target="<= 1.15 x of the longer", met=times <= 1.15)
        report.add("", "", "", "", "", "", "", f"{last:.2f} x", target="<= 1.1 x of publish", met=last <= 1.1)


def typical_s(rounds: list[dict[str, Any]], what: str) -> float:
    """Return the median time from the order on, without the anchor and the first delta if there are others."""
    return median([item[what] - item["start"] for item in rounds[-N_ROUNDS:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=2048, help="size of the state")
    parser.add_argument("--rates", default="1,30,100", help="percent of the weights that change; 100 is an anchor")
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="bandwidth of the link, each way")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    report = Report(f"{arguments.ranks} ranks publish {arguments.mib} MiB over {arguments.mb_per_s:g} MB/s")
    cores = sorted(os.sched_getaffinity(0))
    of_ranks = cores[: len(cores) // 2]
    os.sched_setaffinity(0, cores[len(of_ranks) :])
    with SeaweedS3() as server, ShapedLink(server.endpoint_url, arguments.mb_per_s) as link:
        os.environ.update(server.environment)
        if importlib.util.find_spec("numba"):
            os.environ[kernels.ENVIRONMENT_VARIABLE] = "numba"  # from the start, in all processes
        for rate in (float(rate) for rate in arguments.rates.split(",")):
            with tempfile.TemporaryDirectory(prefix="dcr-bench-") as scratch:
                Bench(server, link, Path(scratch), arguments, of_ranks).measure(rate, report)
    return report.print("changed", "MB sent", "encode s", "upload s", "publish s", "sealed s", "of longer", "fetched")


if __name__ == "__main__":
    sys.exit(min(1, main()))
