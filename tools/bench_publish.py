#!/usr/bin/env python3
"""Measure what a rank of a sharded trainer does to publish, beside gathering and exporting whole tensors.

    python tools/bench_publish.py [--mib 512] [--rate 0.01] [--quick]

On one core, because a rank shares its machine with others: detect, digest, encode and store of one rank's slice, by how
the slice lies in the canonical tensor; then the same version made as released NeMo-RL makes it (every rank gathers all
slices, exports whole tensors, compares the chunks that it owns), with what it communicates and compares. Then sizes and
times by change rate, beside an anchor of the same state, and, with a slice of four times the size, the peak memory of a
rank and when its first partition can be fetched. Exit status 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from bench_store import MIB, Report, made, peak_of

import dcr_store
from dcr_store import events
from dcr_store.codec import kernels
from dcr_store.codec.chunk import compare
from dcr_store.codec.portable import get_codec
from dcr_store.layout import slices
from dcr_store.layout.boxes import view

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dcr_store.layout.affine_map import AffineMap

    Bits = NDArray[np.uint16]

COLUMNS = 4096
CHUNK = 1 << 20
RATES = (0.0, 0.001, 0.01, 0.03, 0.05, 0.1, 0.3, 1.0)


def halves(bits: Bits) -> NDArray[Any]:
    return bits.reshape(-1, COLUMNS).view(ml_dtypes.bfloat16)


def ways(shape: tuple[int, int]) -> dict[str, tuple[AffineMap, float]]:
    """Return the map of rank 0 for each way to hold a tensor, and the target in GB/s."""
    rows = shape[0]
    fused = slices.concatenated(
        [slices.part("w", "BF16", shape, (start, 0), (rows // 4, COLUMNS)) for start in (0, rows // 2)]
    )
    return {
        "all of it": (slices.whole("w", "BF16", shape), 1.5),
        "rows, 1 of 4": (slices.column_parallel("w", "BF16", shape, 0, 4), 1.5),
        "rows, a flat range": (slices.flat_part("w", "BF16", shape, 1000, shape[0] * COLUMNS // 3), 1.5),
        "gate and up, 1 of 2": (fused, 1.5),
        "columns, 1 of 2": (slices.row_parallel("w", "BF16", shape, 0, 2), 0.8),
        "columns, 1 of 4": (slices.row_parallel("w", "BF16", shape, 0, 4), 0.8),
        "columns, 1 of 8": (slices.row_parallel("w", "BF16", shape, 0, 8), 0.8),
        "transposed columns, 1 of 2": (slices.transposed(slices.row_parallel("w", "BF16", shape, 0, 2)), 0.8),
    }


def local_of(mapped: AffineMap, full: NDArray[Any]) -> NDArray[Any]:
    local = np.empty(mapped.shape, full.dtype)
    flat, values = local.reshape(-1), full.reshape(-1)
    for item in mapped.boxes["w"]:
        view(flat, item.here, item, "here")[...] = view(values, item.there, item, "there")
    return local


def measure_ways(report: Report, states: list[NDArray[Any]], n_rounds: int) -> None:
    for name, (mapped, target) in ways(states[0].shape).items():
        locals_ = [local_of(mapped, state) for state in states[:2]]
        best_s, best_cpu_s, changed = float("inf"), float("inf"), 0
        with tempfile.TemporaryDirectory() as scratch, dcr_store.create(f"{scratch}/store") as store:
            with store.begin() as whole:
                whole.write("w", states[0])
            for turn in range(n_rounds + 1):
                transaction = store.begin(writers=["r0", "other"], slices=[mapped])
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                transaction.write_slice(locals_[min(turn, 1)], mapped)
                transaction.seal()
                seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
                if turn:  # the first one reads the baseline
                    best_s, best_cpu_s = min(best_s, seconds), min(best_cpu_s, cpu_s)
                    changed = transaction._writer.n_changed
                transaction.abort()
                transaction._baseline.n_doubts = 0  # as after a commit: what an abort leaves is proven again
        nbytes = locals_[0].nbytes
        speed = nbytes / best_s / 1e9
        cells = (name, f"{nbytes / MIB:.0f}", f"{changed / max(1, locals_[0].size):.2%}", f"{speed:.2f}")
        report.add(
            *cells,
            f"{1e9 * best_cpu_s / nbytes:.2f}",
            target=f">= {target} GB/s",
            met=speed >= target,
        )


def measure_gather(report: Report, states: list[NDArray[Any]], n_ranks: int) -> None:
    """What every rank does where all slices are gathered first: copies stand for the network, which is slower."""
    maps = [slices.row_parallel("w", "BF16", states[0].shape, rank, n_ranks) for rank in range(n_ranks)]
    locals_ = [local_of(mapped, states[1]) for mapped in maps]
    base = states[0].view(np.uint16).reshape(-1)
    codec = get_codec("dcr.delta")
    start_s = time.perf_counter()
    full = np.concatenate(locals_, 1).view(np.uint16).reshape(-1)  # each rank holds all
    gathered_s = time.perf_counter() - start_s
    n_chunks = len(base) // CHUNK
    for chunk in range(0, n_chunks, n_ranks):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        positions, masks, _ = compare(base[part], full[part])
        codec.encode_sparse(positions, masks, CHUNK)
    seconds = time.perf_counter() - start_s
    mine = locals_[0].nbytes
    cells = (f"gather and export, 1 of {n_ranks}", f"{mine / MIB:.0f}", "", f"{mine / seconds / 1e9:.2f}")
    received = f"{(n_ranks - 1) * mine / MIB:.0f} MiB received"
    report.rows.append((*cells, "", f"{received}, {gathered_s / seconds:.0%} of the time"))


def measure_rates(report: Report, n_elements: int) -> None:
    """Sizes by change rate, beside an anchor; the last row changes whole experts and leaves others as they are."""
    for rate in (*RATES, -1.0):
        old, new = made(n_elements, max(rate, 1e-9) if rate < 1.0 else 0.5)
        if rate == 0.0:
            new = old.copy()
        elif rate == 1.0:
            new = old ^ np.random.default_rng(0).integers(1, 1 << 16, len(old), np.uint16)
        elif rate < 0:
            _, new = made(n_elements, 0.05)
            new[: 3 * n_elements // 4] = old[: 3 * n_elements // 4]
        states = [halves(bits) for bits in (old, new)]
        mapped = slices.whole("w", "BF16", states[0].shape)
        sizes, times = [], []
        with tempfile.TemporaryDirectory() as scratch, dcr_store.create(f"{scratch}/store") as store:
            tensors = {"w": ("BF16", states[0].shape)}
            for state in (states[0], states[0], states[1]):
                start_s = time.perf_counter()
                transaction = store.begin(writers=["r0"], tensors=tensors, slices=[mapped])
                transaction.write_slice(state, mapped)
                info = transaction.commit()
                times.append(time.perf_counter() - start_s)
                sizes.append(info.nbytes)
        with tempfile.TemporaryDirectory() as scratch, dcr_store.create(f"{scratch}/store") as store:
            with store.begin() as whole:
                whole.write("w", states[1])
            anchor = store.log("main")[0].nbytes
        share = sizes[2] / anchor
        name = f"{rate:.1%}" if rate >= 0 else "5 % of a quarter"
        cells = (name, f"{states[0].nbytes / MIB:.0f}", f"{sizes[2] / 1e6:.2f}", f"{anchor / 1e6:.2f}")
        report.add(*cells, f"{times[2]:.2f}", f"{times[0]:.2f}", target="<= 1.02 x of an anchor", met=share <= 1.02)


def measure_large(report: Report, mib: int) -> None:
    """Peak anonymous memory of a rank beyond its slice and its baseline; when receivers can fetch a first partition."""
    with tempfile.TemporaryDirectory() as scratch:
        said = Path(scratch) / "said"
        _, peak = peak_of([sys.executable, __file__, "--child", str(mib), "--said", str(said)])
        first_share = float(said.read_text())
    over = peak / MIB - 2 * mib
    cells = (f"{mib} MiB of weights", f"{peak / MIB:.0f}")
    report.add(*cells, "memory beyond slice and baseline", f"{over:.0f} MiB", target="<= 256 MiB", met=over <= 256)
    cells = ("", "", "first partition journaled after", f"{first_share:.1%}")
    report.add(*cells, target="<= 5 %", met=first_share <= 0.05)


def child(mib: int, said: Path) -> None:
    """Publish versions of a slice of so many MiB, half of a tensor; say when the first partition was journaled."""
    state = np.zeros((mib * MIB // 2 // COLUMNS, COLUMNS), np.uint16).view(ml_dtypes.bfloat16)
    block = made(CHUNK, 0.01)
    bits = state.view(np.uint16).reshape(-1)
    mapped = slices.row_parallel("w", "BF16", (state.shape[0], 2 * COLUMNS), 0, 2)
    rest = slices.row_parallel("w", "BF16", (state.shape[0], 2 * COLUMNS), 1, 2)
    zeros = np.broadcast_to(np.zeros(1, np.uint16), state.shape).view(ml_dtypes.bfloat16)
    journaled_s: list[float] = []

    def listen(event: events.Event) -> None:
        if event.name == "publish.journal.stored":
            journaled_s.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as scratch, dcr_store.create(f"{scratch}/store") as store:
        for turn in range(3):
            for start in range(0, len(bits), len(block[0])):
                bits[start : start + len(block[0])] = block[turn % 2][: len(bits) - start]
            tensors = {"w": ("BF16", (state.shape[0], 2 * COLUMNS))}
            start_s = time.perf_counter()
            transaction = store.begin(writers=["r0", "r1"], tensors=tensors, slices=[mapped])
            journaled_s.clear()
            with events.listening(listen):
                transaction.write_slice(state, mapped)
                transaction.seal()
            share = (journaled_s[0] - start_s) / (time.perf_counter() - start_s)
            if os.fork() == 0:  # the other rank is another process
                other = dcr_store.open(store.url).join(transaction.txid, writer="r1")
                other.write_slice(zeros, rest)
                other.seal()
                os._exit(0)
            transaction.commit(timeout_s=600)
            os.wait()
    said.write_text(str(share))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the tensor")
    parser.add_argument("--rate", type=float, default=0.01, help="share of the weights that change")
    parser.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--said", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.said)
        return 0
    if importlib.util.find_spec("numba"):
        kernels.use_engine("numba")
    mib = 64 if arguments.quick else arguments.mib
    missed = 0
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    states = [halves(bits) for bits in made(mib * MIB // 2, arguments.rate)]
    report = Report(f"One rank, one core: a tensor of {mib} MiB")
    measure_ways(report, states, 1 if arguments.quick else 4)
    measure_gather(report, states, 4)
    missed += report.print("what the rank holds", "MiB", "changed", "GB/s", "CPU s/GB")
    report = Report("By change rate, one writer")
    measure_rates(report, min(mib, 128) * MIB // 2)
    missed += report.print("changed", "MiB", "MB", "anchor MB", "seconds", "anchor s")
    os.sched_setaffinity(0, cores)
    report = Report("One rank, a large slice")
    measure_large(report, 4 * mib)
    missed += report.print("slice", "peak MiB", "what", "found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
