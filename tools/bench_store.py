#!/usr/bin/env python3
"""Measure publish and pull beside memcpy: GB/s of dense weights per stage, peak memory, small and odd cases.

    python tools/bench_store.py [--gib 2] [--rate 0.01] [--threads 4,8] [--real DIR] [--quick] [--store URL]
    python tools/bench_store.py --memory [--gib 4]
    python tools/bench_store.py --cases

Every figure stands beside a memcpy of the same run and the same number of threads; where other processes disturb a
run, its processor time (of all threads, for a GB of weights) says more than its speed. The targets of single stages
were set on a machine whose memcpy does 13.3 GB/s on one core; where it does less, they are as much lower, for what
reads all weights and writes almost nothing is as fast as the memory. The state is BF16, in memory, and changes like in
training (bench_codec.py says how); ``--real`` takes a directory of safetensors files, in the order of their names.
Files go below TMPDIR, the store too unless ``--store`` names an empty place (an S3 endpoint comes from the usual AWS
variables). A version is published when its commit has returned; the copy that the next one is compared with advances
in the background, and what both take together is a row of its own. ``--memory`` publishes and pulls through the command
line and watches the anonymous memory of these processes; pages of files are left out. Best of several rounds; exit
status 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from bench_codec import CHUNK, ZSTD, step, weights
from rich.console import Console
from rich.table import Table

import dcr_store
from dcr_store.codec import kernels
from dcr_store.codec.chunk import compare
from dcr_store.codec.digest import crc64
from dcr_store.codec.portable import get_codec
from dcr_store.layout.tensors import to_array
from dcr_store.publish.chunk_encoding import encode_delta
from dcr_store.targets.checkpoint import open_checkpoint
from dcr_store.targets.safetensors_file import make_header
from dcr_store.versions.workers import scratch, worker_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    U16 = NDArray[np.uint16]
    State = dict[str, NDArray[Any]]

CHUNK_NBYTES = 2 * CHUNK
BLOCK = 32 * CHUNK  # elements that are made by the law; the rest of a state is the same, shifted
MIB = 1 << 20
SMALL_NBYTES = 256 * MIB
MEMCPY_OF_TARGETS = 13.3e9  # bytes a second, one thread
DELTA = get_codec("dcr.delta")


@dataclass
class Report:
    """Rows of one table, and how many targets were missed."""

    title: str
    rows: list[tuple[str, ...]] = field(default_factory=list)
    missed: int = 0

    def add(self, *cells: str, target: str = "", met: bool = True) -> None:
        self.missed += not met
        verdict = f"{'PASS' if met else 'FAIL'} {target}" if target else ""
        self.rows.append((*cells, verdict))

    def print(self, *columns: str) -> int:
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate((*columns, "target")):
            table.add_column(column, justify="left" if index in (0, len(columns)) else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 120, soft_wrap=True).print(table)
        return self.missed


# ---------------------------------------------------------------------- states


def made(n_elements: int, rate: float, n_steps: int = 2) -> list[U16]:
    """Return the bits of consecutive states."""
    return list(consecutive(n_elements, rate, n_steps))


def consecutive(n_elements: int, rate: float, n_steps: int) -> Iterator[U16]:
    """Yield the bits of consecutive states."""
    rng = np.random.default_rng(0)
    blocks = [weights(rng, min(BLOCK, -(-n_elements // CHUNK) * CHUNK))]
    while len(blocks) < n_steps:
        blocks.append(step(rng, blocks[-1], rate))
    size = len(blocks[0])
    shifts = [int(shift) for shift in rng.integers(0, size, -(-n_elements // size))]
    for block in blocks:
        yield np.concatenate([np.roll(block, shift) for shift in shifts])[:n_elements]


def tensors_of(bits: U16) -> State:
    """Cut a state into tensors of 16 Mi elements, an odd one in between, as views."""
    cuts = [0, *range(16 * CHUNK - 4096, len(bits), 16 * CHUNK), len(bits)]
    parts = [bits[a:b].view(ml_dtypes.bfloat16) for a, b in itertools.pairwise(cuts) if a < b]
    return {f"layers.{i}.weight": part for i, part in enumerate(parts)}


def read_series(directory: Path) -> list[State]:
    states = []
    for file in sorted(directory.glob("*.safetensors")):
        with open_checkpoint(file) as checkpoint:
            states.append(
                {
                    name: to_array(checkpoint.bits(name).copy(), tensor.dtype, tensor.shape)
                    for name, (_, tensor) in checkpoint.tensors.items()
                }
            )
    return states


def as_chunks(bits: U16) -> U16:
    return np.concatenate([bits, np.zeros(-len(bits) % CHUNK, bits.dtype)]).reshape(-1, CHUNK)


# ---------------------------------------------------------------------- stages


@dataclass(frozen=True)
class Speed:
    """Bytes of dense weights a second, and seconds of processor time for a GB, of all threads together."""

    wall: float
    cpu: float


ENCODE = "encoding alone, as in publish"
PUBLISH = "publish, delta"
ADVANCED = "the same, its baseline advanced"


def speed_of(work: Callable[[], object], nbytes: int) -> Speed:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    work()
    return Speed(nbytes / (time.perf_counter() - start_s), 1e9 * (time.process_time() - start_cpu_s) / nbytes)


class Stages:
    """Measures on one pair of states; speeds in bytes of dense weights a second."""

    def __init__(self, report: Report, n_rounds: int) -> None:
        self.report = report
        self.n_rounds = n_rounds
        self.memcpy: dict[int, Speed] = {}

    def best(self, work: Callable[[int], object], n_items: int, nbytes: int, n_threads: int) -> Speed:
        """Return the best speed of ``work(i)`` for all i."""
        with ThreadPoolExecutor(n_threads) as pool:
            speeds = [speed_of(lambda: list(pool.map(work, range(n_items))), nbytes) for _ in range(self.n_rounds)]
        return max(speeds, key=lambda speed: speed.wall)

    def row(self, stage: str, engine: str, n_threads: int, speed: Speed, target: float | None = None) -> None:
        ratio = speed.wall / self.memcpy[n_threads].wall
        cells = (stage, engine, str(n_threads), f"{speed.wall / 1e9:.2f}", f"{ratio:.2f}", f"{speed.cpu:.2f}")
        if target is None:
            self.report.add(*cells)
        else:
            wanted = target * min(1.0, self.memcpy[1].wall / MEMCPY_OF_TARGETS)
            text = f">= {wanted:.2g} GB/s" + (f" (of {target:g})" if wanted < target else "")
            self.report.add(*cells, target=text, met=speed.wall >= wanted * 1e9)

    def chunks(self, base: U16, new: U16, n_threads_tried: list[int]) -> Callable[[int], None]:
        """Measure everything that works chunk by chunk; return what encodes a chunk as publish does."""
        n, nbytes = len(base), base.nbytes
        bits = base.copy()
        digests = [(crc64(a), crc64(b)) for a, b in zip(base, new, strict=True)]

        def copy(i: int) -> None:
            np.copyto(bits[i], base[i])

        def encode(i: int) -> bytes:
            positions, masks, _ = compare(base[i], new[i])
            return DELTA.encode_sparse(positions, masks, CHUNK)

        def encode_proven(i: int) -> None:
            private = scratch("u16", CHUNK)  # as publish does: the caller's memory may change
            np.copyto(private, new[i])
            if encode_delta(DELTA, "u16", i, base[i], digests[i][0], private) is None:
                raise SystemExit(f"chunk {i} is wrong")

        for n_threads in n_threads_tried:
            self.memcpy[n_threads] = self.best(copy, n, nbytes, n_threads)
            self.row("memcpy", "", n_threads, self.memcpy[n_threads])
        encoded = [encode(i) for i in range(n)]
        for engine in ("numpy", "numba"):
            if importlib.util.find_spec(engine) is None:
                continue
            kernels.use_engine(engine)
            encode(0), DELTA.apply(encoded[0], bits[0]), DELTA.apply(encoded[0], bits[0])  # compiled by now
            for n_threads in n_threads_tried:
                speed = self.best(lambda i: kernels.engine().find_changes(base[i], new[i]), n, nbytes, n_threads)
                self.row("compare only", engine, n_threads, speed)
            for n_threads in n_threads_tried:
                target = {("numpy", max(n_threads_tried)): 2.0, ("numba", 2): 5.0}.get((engine, n_threads))
                self.row("detect, digest, encode", engine, n_threads, self.best(encode, n, nbytes, n_threads), target)
            for n_threads in n_threads_tried:
                speed = self.best(encode_proven, n, nbytes, n_threads)
                self.row("the same, of a copy, proven", engine, n_threads, speed)
            for n_threads in n_threads_tried:
                best = n_threads == max(n_threads_tried) and engine == "numba"
                speed = self.best(lambda i: DELTA.apply(encoded[i], bits[i]), n, nbytes, n_threads)
                self.row("decode, apply in place", engine, n_threads, speed, 6.0 if best else None)
                np.copyto(bits, base)

                def verified(i: int) -> None:
                    DELTA.apply(encoded[i], bits[i])
                    if crc64(bits[i]) not in digests[i]:
                        raise SystemExit(f"chunk {i} is wrong")

                speed = self.best(verified, n, nbytes, n_threads)
                self.row("decode, apply, digest", engine, n_threads, speed, 4.0 if best else None)
                np.copyto(bits, base)
        return encode_proven

    def others(self, bits: U16, state: State, directory: Path) -> None:
        """Measure what a user would do without a store."""
        octets = bits.reshape(-1).view(np.uint8)
        n_rounds, self.n_rounds = self.n_rounds, 1
        step_nbytes = 64 * MIB
        pieces = range(0, octets.nbytes, step_nbytes)
        speed = self.best(
            lambda i: ZSTD.encode(octets[i * step_nbytes : (i + 1) * step_nbytes]), len(pieces), octets.nbytes, 1
        )
        self.row("zstd-1 of the whole state", "numcodecs", 1, speed)
        self.n_rounds = n_rounds
        if importlib.util.find_spec("safetensors") is None:
            return
        from safetensors.numpy import save_file

        plain = {name: array.view(np.uint16) for name, array in state.items()}
        path = directory / "saved.safetensors"
        nbytes = sum(array.nbytes for array in plain.values())
        self.row("save_file, not synced", "safetensors", 1, self.best(lambda _: save_file(plain, path), 1, nbytes, 1))
        path.unlink()


def store_options(url: str) -> dict[str, Any] | None:
    """Return storage options for a server that is not Amazon's, as the AWS variables name it."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    return {"endpoint_url": endpoint} if url.startswith("s3://") and endpoint else None


def through_store(
    stages: Stages,
    states: list[State],
    url: str,
    directory: Path,
    encode: Callable[[int], None],
    engine: str,
    n_threads: int,
) -> None:
    """Measure publish, pull and checkout, whole; ``encode(i)`` does what encodes chunk i in a publish."""
    nbytes = sum(array.nbytes for array in states[0].values())
    speeds: dict[str, list[Speed]] = {}
    pairs: dict[str, list[tuple[Speed, Speed]]] = {PUBLISH: [], ADVANCED: []}  # with the encoding just before

    def timed(name: str, work: Callable[[], object]) -> Speed:
        speeds.setdefault(name, []).append(speed_of(work, nbytes))
        return speeds[name][-1]

    def publish(state: State) -> None:
        with store.begin() as transaction:
            for name, tensor in state.items():
                transaction.write(name, tensor)

    def encode_all() -> None:
        with worker_pool() as pool:
            list(pool.map(encode, range(nbytes // (2 * CHUNK))))

    def publish_and_advance(state: State) -> None:
        publish(state)
        for baseline in store._baselines.values():
            baseline.wait()

    with dcr_store.create(url, storage_options=store_options(url)) as store:
        timed("publish, anchor", lambda: publish(states[0]))
        store.pull(directory / "weights")
        works = {PUBLISH: publish, ADVANCED: publish_and_advance}
        order = [states[i % len(states)] for i in range(1, max(len(states), 1 + 3 * stages.n_rounds))]
        for state, (name, work) in zip(order, itertools.cycle(works.items()), strict=False):
            encoded = timed(ENCODE, encode_all)  # each time: what else the machine does changes within the run
            pairs[name].append((encoded, timed(name, lambda work=work, state=state: work(state))))
            timed("pull, one version behind", lambda: store.pull(directory / "weights"))
        timed("checkout", lambda: store.checkout("main", directory / "checkout"))
        if not store.compare_directory("main", directory / "weights").ok:
            raise SystemExit("the pulled directory differs from the store")
    for name, found in speeds.items():
        stages.row(name, engine, n_threads, max(found, key=lambda speed: speed.wall))
        if name == PUBLISH:
            ratio = statistics.median(encoded.wall / published.wall for encoded, published in pairs[PUBLISH])
            cpu_ratio = statistics.median(advanced.cpu / encoded.cpu for encoded, advanced in pairs[ADVANCED])
            cells = ("publish / encoding, median", engine, str(n_threads), f"{ratio:.2f} x", "", f"{cpu_ratio:.2f} x")
            is_small = nbytes < SMALL_NBYTES  # of which the requests take the time, not the weights
            stages.report.add(*cells, target="" if is_small else "<= 1.3 x", met=is_small or ratio <= 1.3)


def measure(title: str, states: list[State], arguments: argparse.Namespace, n_rounds: int) -> int:
    report = Report(title)
    stages = Stages(report, n_rounds)
    n_cores = len(os.sched_getaffinity(0))
    threads = sorted({1, n_cores, *(int(n) for n in arguments.threads.split(",") if n != "auto")})
    base, new = (
        as_chunks(np.concatenate([array.reshape(-1).view(np.uint16) for array in state.values()]))
        for state in states[:2]
    )
    rate = np.count_nonzero(base != new) / base.size
    report.title += f", {base.nbytes / MIB:.0f} MiB, {rate:.2%} changed"
    encode = stages.chunks(base, new, threads)
    with temporary() as directory:
        stages.others(base, states[0], directory)
        engine = "numba" if importlib.util.find_spec("numba") else "numpy"
        kernels.use_engine(engine)
        url = arguments.store or str(directory / "store")
        through_store(stages, states, url, directory, encode, engine, n_cores)  # publish and pull take all cores
    return report.print("stage", "engine", "threads", "GB/s", "of memcpy", "CPU s/GB")


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="dcr-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------------- memory


def peak_of(command: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds and the largest anonymous memory that was seen, in bytes."""
    start_s, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
                peak = max(peak, int(found[1]) << 10 if found else 0)
            time.sleep(0.002)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.perf_counter() - start_s, peak


def write_checkpoint(directory: Path, nbytes: int, bits: U16) -> None:
    """Write an HF directory of files of 1 GiB, and tensors of 64 MiB, that repeat `bits`."""
    directory.mkdir()
    n_files = max(1, nbytes >> 30)
    n_tensors = nbytes // n_files // (64 * MIB)
    for i in range(n_files):
        header = make_header([(f"model.layers.{i}.{j}.weight", "BF16", (8192, 4096)) for j in range(n_tensors)])
        with (directory / f"model-{i + 1:05d}-of-{n_files:05d}.safetensors").open("wb") as file:
            file.write(header)
            for _ in range(n_tensors * 64 * MIB // bits.nbytes):
                file.write(bits.data)


def measure_memory(n_gib: float, limit_nbytes: int) -> int:
    report = Report(f"Peak anonymous memory of the command line, checkpoint of {n_gib:g} GiB")
    nbytes = int(n_gib * 1024) << 20
    cli = [sys.executable, "-m", "dcr_store"]
    first, second = made(4 * CHUNK, 0.01)
    with temporary() as directory:
        store, target, baseline = (str(directory / name) for name in ("store", "target", "baseline"))
        subprocess.run([*cli, "init", store], check=True, stdout=subprocess.DEVNULL)
        third = second ^ np.random.default_rng(1).integers(1, 1 << 16, len(second), np.uint16)
        for what, bits in (("anchor", first), ("1 % changed", second), ("100 % changed", third)):
            checkpoint = directory / "checkpoint"
            write_checkpoint(checkpoint, nbytes, bits)
            for verb, command in (
                ("publish", [*cli, "publish", store, str(checkpoint), "--baseline", baseline]),
                ("pull", [*cli, "pull", store, target]),
            ):
                seconds, peak = peak_of(command)
                cells = (f"{verb}, {what}", f"{seconds:.1f} s", f"{peak / MIB:.0f} MiB")
                report.add(*cells, target=f"<= {limit_nbytes / MIB:.0f} MiB", met=peak <= limit_nbytes)
            shutil.rmtree(checkpoint)
    return report.print("command", "time", "peak")


# ---------------------------------------------------------------------- small and odd cases


def timed(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def measure_cases() -> int:
    report = Report("Small and odd cases")

    def row(name: str, seconds: float, limit_s: float) -> None:
        report.add(name, f"{seconds:.3f} s", target=f"<= {limit_s:g} s", met=seconds <= limit_s)

    def publish(store: dcr_store.Store, state: State) -> None:
        with store.begin() as transaction:
            for name, tensor in state.items():
                transaction.write(name, tensor)

    row("python -m dcr_store --version", min(timed(_version) for _ in range(3)), 0.25)
    small = [tensors_of(bits) for bits in made(20_000_000, 0.01)]
    tiny = {f"blocks.{i}.scale": np.full(7, i, np.float32) for i in range(50_000)}
    one = {"weight": np.arange(1000, dtype=np.float32)}
    for name, states, limits in (
        ("20 M parameters", small, (0.2, 0.2)),
        ("one chunk", [one, {"weight": one["weight"] + 1}], (0.1, 0.1)),
        ("50,000 tensors", [tiny, {**tiny, "blocks.7.scale": np.zeros(7, np.float32)}], (3.0, 3.0)),
    ):
        with temporary() as directory, dcr_store.create(directory / "store") as store:
            row(f"{name}: publish, anchor", timed(lambda s=states[0]: publish(store, s)), 10 * limits[0])
            row(f"{name}: checkout", timed(lambda: store.pull(directory / "weights")), 10 * limits[1])
            rounds = [
                (timed(lambda s=state: publish(store, s)), timed(lambda: store.pull(directory / "weights")))
                for state in [states[1], states[0]] * 2
            ]
            row(f"{name}: publish, delta", min(seconds for seconds, _ in rounds), limits[0])
            row(f"{name}: pull", min(seconds for _, seconds in rounds), limits[1])
    with temporary() as directory, dcr_store.create(directory / "store", chunk_elements=4096) as store:
        state = {"weight": np.arange(100_000, dtype=np.float32)}
        halves = []
        for half in range(2):
            start_s = time.perf_counter()
            for i in range(500):
                state["weight"][(half * 500 + i) * 7 % 100_000] += 1
                publish(store, state)
                if (half, i) == (0, 0):
                    store.pull(directory / "weights")
            halves.append((time.perf_counter() - start_s) / 500)
        row("1,000 versions: publish, each of the last 500", halves[1], max(1.5 * halves[0], 0.05))
        row("1,000 versions: open and log", timed(lambda: dcr_store.open(directory / "store").log()), 1.0)
        row("1,000 versions: pull main@0 to main@999", timed(lambda: store.pull(directory / "weights")), 15.0)
    return report.print("case", "time")


def _version() -> None:
    subprocess.run([sys.executable, "-m", "dcr_store", "--version"], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, help="size of the state: 2, for --memory 4")
    parser.add_argument("--rate", type=float, default=0.01, help="share of the weights that change")
    parser.add_argument("--threads", default="auto", help="numbers of threads besides 1 and all cores, with commas")
    parser.add_argument("--real", type=Path, metavar="DIR", help="safetensors files, one a version")
    parser.add_argument("--store", metavar="URL", help="where to make the store")
    parser.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    parser.add_argument("--memory", action="store_true", help="peak memory of publish and pull instead")
    parser.add_argument("--limit-mib", type=int, default=700, help="of --memory")
    parser.add_argument("--cases", action="store_true", help="small models, many tensors, many versions instead")
    arguments = parser.parse_args()
    if arguments.memory:
        return min(1, measure_memory(arguments.gib or (0.5 if arguments.quick else 4), arguments.limit_mib << 20))
    if arguments.cases:
        return min(1, measure_cases())
    n_gib = arguments.gib or (0.25 if arguments.quick else 2)
    n_rounds = 2 if arguments.quick else 4
    missed = 0
    if arguments.real:
        states = read_series(arguments.real)
        missed += measure(f"Real series of {len(states)}", states, arguments, 3 * n_rounds)
    else:
        states = [tensors_of(bits) for bits in made(int(n_gib * (1 << 29)), arguments.rate)]
        missed += measure("Made like training", states, arguments, n_rounds)
    return min(1, missed)


if __name__ == "__main__":
    sys.exit(main())
