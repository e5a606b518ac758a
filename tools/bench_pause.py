#!/usr/bin/env python3
"""Measure for how long weights are in flux: ``apply`` alone, when all was prepared, beside a full reload.

    python tools/bench_pause.py [--gib 1] [--rates 1,3,5,10] [--cores 1,2]

A version is prepared (fetched, verified, held ready) while an engine may go on generating; then comes the pause.
Targets: the files of a directory in place, live tensors of a process, and a module behind its own loader, which fuses
three tensors into one parameter. A full reload opens the checkpoint's safetensors file, which is in the page cache,
and runs the same loader over all of it; nothing of that is verified. Beside the files, which are synced and verified,
stands a copy of the whole checkpoint that is synced. Every pair of rate and number of cores runs in a process of its
own that may use only these cores; what comes out is compared with the checkpoint. Seconds for a GiB of weights, the
best of three versions. Needs the extras ``torch`` and ``demo``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from bench_store import CHUNK, MIB, Report, made

import dcr_store
from dcr_store.codec import kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

N_VERSIONS = 4  # the first brings the target, the others are measured
MADE = 4 * CHUNK  # elements that are made by the law; the rest of a state repeats them
FUSED = ("q", "k", "v")
ROWS, COLUMNS = 4096, 2048  # of a tensor: 16 MiB


def layers(n_elements: int) -> list[str]:
    return [f"layers.{i}." for i in range(max(1, n_elements // (len(FUSED) * ROWS * COLUMNS)))]


def tensors_of(bits: NDArray[np.uint16], names: list[str]) -> dict[str, NDArray[Any]]:
    parts = bits[: len(names) * ROWS * COLUMNS].view(ml_dtypes.bfloat16).reshape(-1, ROWS, COLUMNS)
    return dict(zip(names, parts, strict=True))


def fused_module(prefixes: list[str]) -> tuple[Any, Callable[[Iterable[tuple[str, Any]]], None]]:
    """Return a module with one parameter a layer, and its loader."""
    import torch

    module = torch.nn.Module()
    parameters = {}
    for index, prefix in enumerate(prefixes):
        parameter = torch.nn.Parameter(torch.zeros(3 * ROWS, COLUMNS, dtype=torch.bfloat16), requires_grad=False)
        module.register_parameter(f"qkv{index}", parameter)
        parameters[prefix] = parameter

    def load_weights(weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            prefix, shard = name[:-1], FUSED.index(name[-1])
            parameters[prefix].data.narrow(0, shard * ROWS, ROWS).copy_(weight)

    return module, load_weights


def reload_s(checkpoint: Path, load_weights: Callable[[Iterable[tuple[str, Any]]], None]) -> float:
    """Return the seconds of a full reload."""
    from safetensors import safe_open

    begun_s = time.perf_counter()
    with safe_open(checkpoint, framework="pt") as file:
        load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    return time.perf_counter() - begun_s


def copy_s(checkpoint: Path, copy: Path) -> float:
    """Return the seconds of a copy that is on the disk then."""
    begun_s = time.perf_counter()
    shutil.copyfile(checkpoint, copy)
    with copy.open("rb+") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - begun_s


def child(options: dict[str, Any]) -> None:
    """Measure on some cores; print the seconds by target as JSON."""
    os.sched_setaffinity(0, options["cores"])
    import torch

    from dcr_store.targets.native.target import NativeLoaderTarget

    torch.set_num_threads(len(options["cores"]))
    prefixes = options["prefixes"]
    module, load_weights = fused_module(prefixes)
    live = {prefix + shard: torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16) for prefix in prefixes for shard in FUSED}
    targets: dict[str, Any] = {
        "files in place": options["directory"],
        "live tensors": live,
        "native loader": NativeLoaderTarget(load_weights, module),
    }
    seconds: dict[str, list[float]] = {}
    with dcr_store.open(options["url"]) as store:
        for name, target in targets.items():
            with store.receiver(target) as receiver:
                for number in range(options["n_versions"]):
                    receiver.prepare(f"main@{number}")
                    begun_s = time.perf_counter()
                    receiver.apply()
                    if number:
                        seconds.setdefault(name, []).append(time.perf_counter() - begun_s)
    checkpoint = Path(options["directory"]) / "model.safetensors"
    full_module, full_load = fused_module(prefixes)
    seconds["full reload"] = [reload_s(checkpoint, full_load) for _ in range(3)]
    seconds["full copy, synced"] = [copy_s(checkpoint, checkpoint.with_suffix(".copy")) for _ in range(2)]
    for (name, ours), (_, theirs) in zip(module.named_parameters(), full_module.named_parameters(), strict=True):
        parts = torch.cat([live[prefixes[int(name.removeprefix("qkv"))] + shard] for shard in FUSED])
        for what, tensor in (("native loader", ours), ("live tensors", parts)):
            if not torch.equal(tensor.view(torch.int16), theirs.view(torch.int16)):
                raise SystemExit(f"{what}: {name} is wrong")
    print(json.dumps({name: min(found) for name, found in seconds.items()}))


def measure(states: list[NDArray[np.uint16]], rate: float, cores: list[list[int]], report: Report) -> None:
    """Add the rows of one change rate."""
    prefixes = layers(len(states[0]))
    names = [prefix + shard for prefix in prefixes for shard in FUSED]
    with tempfile.TemporaryDirectory(prefix="dcr-bench-") as scratch:
        url = f"{scratch}/store"
        with dcr_store.create(url) as store:
            for bits in states:
                tensors = tensors_of(bits, names)
                with store.begin() as transaction:
                    for name, tensor in tensors.items():
                        transaction.write(name, tensor)
            n_gib = sum(tensor.nbytes for tensor in tensors.values()) / (1 << 30)
        for some in cores:
            options = {
                "url": url,
                "directory": f"{scratch}/weights-{len(some)}",
                "prefixes": prefixes,
                "cores": some,
                "n_versions": len(states),
            }
            command = [sys.executable, __file__, "--child", json.dumps(options)]
            seconds = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            for name, found_s in seconds.items():
                full_s = seconds["full copy, synced" if name == "files in place" else "full reload"]
                cells = (f"{found_s / n_gib:.3f}", f"{found_s / full_s:.2f} x" if "full" not in name else "")
                report.add(f"{rate:g} %", str(len(some)), name, *cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rates", default="1,3,5,10", help="percent of the weights that change, with commas")
    parser.add_argument("--cores", help="numbers of cores, with commas; by default one, and all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return 0
    available = sorted(os.sched_getaffinity(0))
    numbers = sorted({1, len(available)}) if arguments.cores is None else map(int, arguments.cores.split(","))
    if importlib.util.find_spec("numba"):
        os.environ[kernels.ENVIRONMENT_VARIABLE] = "numba"  # from the start, in all processes
    n_elements = (
        len(FUSED) * ROWS * COLUMNS * max(1, int(arguments.gib * 1024) * MIB // (2 * len(FUSED) * ROWS * COLUMNS))
    )
    report = Report(f"Weights in flux, {2 * n_elements / MIB:.0f} MiB of BF16")
    for rate in (float(rate) for rate in arguments.rates.split(",")):
        some = made(MADE, rate / 100, N_VERSIONS)
        states = [np.tile(bits, -(-n_elements // MADE))[:n_elements] for bits in some]
        measure(states, rate, [available[:n] for n in numbers], report)
    return report.print("changed", "cores", "target", "s / GiB", "of full")


if __name__ == "__main__":
    sys.exit(main())
