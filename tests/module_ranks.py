"""Ranks for tests/unit/publish/test_torch.py, which runs: ``module_ranks.py CASES N_RANKS URL FIRST LAST DIR``.

Each rank is a process (gloo). For each state from FIRST to LAST it shards the module as CASE says and publishes it,
while every collective raises; and writes down what it was answered.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dtensor_ranks import no_collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcr_store
from dcr_store.errors import DcrError
from dcr_store.publish.torch import publish_module

TIMEOUT_S = 60.0


class Block(nn.Module):
    """Sizes that ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, found: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(found.view(-1, 3)).view(found.shape)))


class Model(nn.Module):
    """Several dtypes, buffers, a scalar, and, if tied, one tensor of two names; what is to be run has one dtype.

    Of 17 rows, 4 x 2 ranks hold others if FSDP2 split them first than if tensor parallelism did.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.stats = nn.BatchNorm1d(5)
        self.head = nn.Linear(6, 17, bias=False)
        self.to(torch.bfloat16)
        if kind != "run":
            self.blocks[1].norm.float()
        self.register_buffer("empty", torch.empty(0, 4))
        if kind != "untied":
            self.head.weight = self.embed.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found = self.embed(numbers)
        for block in self.blocks:
            found = block(found)
        return self.head(found)


def model(number: int, kind: str) -> Model:
    """The same bits on each rank; a few of them are others from one state to the next."""
    torch.manual_seed(11)
    found = Model(kind)
    with torch.no_grad():
        for step in range(number):
            for tensor in dict.fromkeys(found.state_dict().values()):
                if tensor.is_floating_point():
                    tensor[torch.rand(tensor.shape) < 0.1] += 0.5 + step
        found.stats.num_batches_tracked += number
    return found


PLAN = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
for index in range(2):
    PLAN |= {f"blocks.{index}.up": ColwiseParallel(), f"blocks.{index}.down": RowwiseParallel()}


def fsdp2(module: Model, n_ranks: int) -> Model:
    mesh = init_device_mesh("cpu", (n_ranks,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def hsdp(module: Model, n_ranks: int) -> Model:
    return fully_shard(module, mesh=init_device_mesh("cpu", (2, n_ranks // 2), mesh_dim_names=("replicas", "shards")))


def tensor_parallel(module: Model, n_ranks: int) -> Model:
    return parallelize_module(module, init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("tp",)), dict(PLAN))


def tp_fsdp2(module: Model, n_ranks: int) -> Model:
    mesh = init_device_mesh("cpu", (n_ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], dict(PLAN))
    for block in module.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(module, mesh=mesh["dp"])


def run(module: Model, n_ranks: int) -> Model:
    """In the middle of a step: nothing has changed, but FSDP2 has left the root's parameters whole."""
    fsdp2(module, n_ranks)
    module(torch.arange(7)).sum().backward()
    module(torch.arange(7))
    return module


CASES: dict[str, tuple[Callable[[Model, int], Model], str]] = {
    "plain": (lambda module, n_ranks: module, "tied"),
    "fsdp2": (fsdp2, "tied"),
    "run": (run, "run"),
    "hsdp": (hsdp, "tied"),
    "tp": (tensor_parallel, "untied"),
    "tp_fsdp2": (tp_fsdp2, "untied"),
}


def publish(case: str, rank: int, n_ranks: int, url: str, first: int, last: int, folder: Path) -> None:
    shard, kind = CASES[case]
    answers: list[dict[str, Any]] = []
    stopped = int(os.environ.get("DCR_TEST_FAILS", "-1")) == rank
    with dcr_store.open(url) as store:
        for number in range(first, last + 1):
            module = shard(model(number, kind), n_ranks)
            if stopped:
                module.register_buffer("unexpected", torch.zeros(2))
            start = time.monotonic()
            with no_collectives():
                try:
                    info = publish_module(store, module, metadata={"number": number, "loss": 0.5}, timeout_s=TIMEOUT_S)
                    answers.append(info.to_json())
                except DcrError as error:
                    answers.append({"error": f"{type(error).__name__}: {error}", "s": time.monotonic() - start})
    (folder / f"answers-{case}-{first}-{rank}.json").write_text(json.dumps(answers))


def main(cases: str, n_ranks: int, url: str, first: int, last: int, folder: Path) -> int:
    """Fork the ranks, so that torch is imported once. Several cases, separated by commas, publish to URL-CASE."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what the ranks share stays shared
    children = []
    for rank in range(n_ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                meeting = f"file://{folder / f'meeting-{first}'}"
                dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n_ranks)
                for case in cases.split(","):
                    publish(case, rank, n_ranks, f"{url}-{case}", first, last, folder)
                dist.barrier()
                dist.destroy_process_group()
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    cases, n_ranks, url, first, last, folder = sys.argv[1:]
    raise SystemExit(main(cases, int(n_ranks), url, int(first), int(last), Path(folder)))
