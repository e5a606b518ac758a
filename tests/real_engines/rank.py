"""One rank of an engine: receives each version through the engine's loader, and compares it with a full load.

``python -m real_engines.rank ENGINE TP RANK DIRECTORY``; prints a line for each model, and ends with 1 if one is wrong.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from native.checkpoints import assert_same, octets

import dcr_store
from dcr_store.errors import InvalidInputError
from dcr_store.targets.native.target import NativeLoaderTarget
from real_engines.shapes import N_VERSIONS, SHAPES, model_directory, store_directory, version_tensors


def received(engine: Any, directory: Path, kind: str) -> str:
    """Bring a model through all versions, and say how.

    Raises
    ------
    AssertionError
        If a parameter or buffer is not as a full load gives it, or not moved as it is known to be.
    """
    module, load_weights = engine.build(model_directory(directory, kind))
    reference, load_reference = engine.build(model_directory(directory, kind))
    target = NativeLoaderTarget(load_weights, module)
    seconds = 0.0
    with dcr_store.open(store_directory(directory, kind)) as store, store.receiver(target) as receiver:
        for number in range(N_VERSIONS):
            receiver.prepare(f"main@{number}")
            applied = receiver.apply()
            assert applied.chunks_healed == 0, f"main@{number} was healed: {applied}"
            assert applied.previous == f"main@{max(number - 1, 0)}", applied
            seconds += applied.seconds
            load_reference(iter(version_tensors(directory, kind, number).items()))
            try:
                assert_same(module, reference)
                have, want = others(module), others(reference)
                assert have == want, f"different: {[name for name in want if have.get(name) != want[name]]}"
            except AssertionError as error:
                raise AssertionError(f"main@{number} differs") from error
    plan = target.plan
    assert plan is not None
    assert target.n_loads == 1 + N_VERSIONS, target.n_loads  # the first as it was prepared, with values
    assert {name.rpartition(".")[2] for name in plan.fallbacks} == SHAPES[kind].by_value, plan.fallbacks
    n_names = len(version_tensors(directory, kind, 0))
    assert n_names == len(plan.moved) + len(plan.fallbacks) + len(plan.skipped)
    refusal = ""
    if plan.fallbacks:
        refusal = " (where nothing may, it was refused)"
        refused(engine, directory, kind, set(plan.fallbacks))
    why = "".join(f"\n    {name} {reason}" for name, reason in plan.fallbacks.items())
    return (
        f"{N_VERSIONS} versions, all {len(octets(module))} parameters and buffers "
        f"{f'and {len(others(module))} other tensors ' if others(module) else ''}equal; {n_names} tensors: "
        f"{len(plan.moved)} moved, {len(plan.fallbacks)} fell back{refusal}, {len(plan.skipped)} skipped; "
        f"{seconds:.1f} s{why}"
    )


def others(module: torch.nn.Module) -> dict[str, bytes]:
    """Return the bytes of the tensors that a module keeps beside its parameters and buffers."""
    return {
        f"{path}.{name}": value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for path, owner in module.named_modules()
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor)
    }


def refused(engine: Any, directory: Path, kind: str, names: set[str]) -> None:
    """Hold that the same loader is refused by name, before anything is written, where nothing may fall back."""
    module, load_weights = engine.build(model_directory(directory, kind))
    before = octets(module)
    target = NativeLoaderTarget(load_weights, module, fallback=False)
    with dcr_store.open(store_directory(directory, kind)) as store, store.receiver(target) as receiver:
        found = None
        try:
            receiver.prepare("main@0")
        except InvalidInputError as error:
            found = error
    assert found is not None, "was not refused"
    assert found.key in names, found.key
    assert f"{found.key} is " in str(found), str(found)
    assert found.found == f"{len(names)} that are not copied so", found.found
    assert octets(module) == before, "was written before it was refused"


def main(name: str, tp: int, rank: int, directory: Path) -> int:
    rendezvous = (directory / f"rendezvous-{tp}").as_uri()
    engine = importlib.import_module(f"real_engines.{name}_engine").Engine(rank, tp, rendezvous)
    n_wrong = 0
    for kind in SHAPES:
        start = time.monotonic()
        try:
            said = received(engine, directory, kind)
        except Exception:
            n_wrong += 1
            said = f"WRONG after {time.monotonic() - start:.1f} s\n{traceback.format_exc()}"
        print(f"{name}  {kind:11}  TP {tp}  rank {rank}:  {said}", flush=True)
    return min(n_wrong, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    status = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    sys.stderr.flush()
    os._exit(status)  # engines leave threads behind that would wait for each other
