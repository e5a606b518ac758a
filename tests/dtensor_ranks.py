"""Real DTensors for tests/unit/layout/test_from_dtensor.py, which runs this file: ``dtensor_ranks.py real|alone DIR``.

``real``: four processes (gloo) shard a model in several ways; each writes its local tensors, their maps, and who else
holds them, made while every collective raises. ``alone``: one process plays each rank of larger meshes in turn, in a
process group that does not communicate, and writes the local tensors and their placements.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from dcr_store.errors import InvalidInputError
from dcr_store.layout.from_dcp import maps_of_dcp
from dcr_store.layout.from_dtensor import map_of_dtensor, replicas_of_dtensor

N_RANKS = 4


class Model(nn.Module):
    """Sizes that four ranks do not divide, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(3)


def model() -> Model:
    """The same bits on each rank."""
    torch.manual_seed(7)
    return Model().to(torch.bfloat16)


def tensor_parallel(mesh: DeviceMesh) -> Model:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    return parallelize_module(model(), mesh, plan)


def sharded() -> Iterator[tuple[str, DeviceMesh | None, dict[str, torch.Tensor]]]:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def fsdp(module: Model, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        fully_shard(module, mesh=mesh)
        return dict(module.named_parameters())

    yield "fsdp2", line, fsdp(model(), line)
    yield "hsdp", square, fsdp(model(), square)
    yield "tp", line, dict(tensor_parallel(line).named_parameters())
    yield "tp_fsdp2", square, fsdp(tensor_parallel(square["inner"]), square["outer"])
    pair = DeviceMesh("cpu", [0, 1])  # the other two ranks hold nothing
    full = dict(model().named_parameters())
    yield "pair", None, {"up.weight": distribute_tensor(full["up.weight"], pair, [Shard(1)])}
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    both = {
        "columns": distribute_tensor(full["up.weight"], square, [Shard(-1), Shard(0)]),
        "strided": distribute_tensor(full["up.weight"], square, strided, src_data_rank=None),
        "twice": distribute_tensor(full["up.weight"], square, [Shard(0), Shard(0)]),
    }
    for key, tensor in both.items():
        yield key, square, {"up.weight": tensor}


class _Raises(TorchDispatchMode):
    """Refuses every operation of torch's that talks to other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace or func.namespace == "_dtensor":
            raise AssertionError(f"{func} was called")
        return func(*args, **(kwargs or {}))


COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "isend",
    "irecv",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]


@contextmanager
def no_collectives() -> Iterator[None]:
    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective was called")

    with _Raises():
        patches = [mock.patch.object(dist, name, called) for name in COLLECTIVES]
        patches += [mock.patch.object(dist.distributed_c10d, name, called) for name in COLLECTIVES]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (AssertionError, InvalidInputError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def real(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=N_RANKS)
    bits: dict[str, Any] = {f"full/{name}": bits_of(tensor) for name, tensor in model().named_parameters()}
    maps, refusals = {}, {}
    all_reduce = dist.all_reduce
    cases = list(sharded())
    partial = torch.distributed.tensor.DTensor.from_local(
        torch.ones(2), cases[0][2]["up.weight"].device_mesh, [Partial()]
    )
    crossed = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("outer", "inner"))
    with no_collectives():
        refusals["guard"] = raised(lambda: dist.all_reduce(torch.ones(1)))
        refusals["guard of operations"] = raised(lambda: all_reduce(torch.ones(1)))
        refusals["gathered"] = raised(lambda: cases[0][2]["up.weight"].full_tensor())
        plain, part = torch.ones(2), dict(cases[3][2])["norm.weight"]
        refusals["plain"] = raised(lambda: replicas_of_dtensor("layers.0.norm", plain))
        refusals["mesh"] = raised(lambda: replicas_of_dtensor("layers.0.norm", part, cases[0][1]))
        refusals["other mesh of these names"] = raised(lambda: replicas_of_dtensor("layers.0.norm", part, crossed))
        refusals["partial"] = raised(lambda: map_of_dtensor("layers.0.sum", partial))
        for case, mesh, tensors in cases:
            for name, tensor in tensors.items():
                mapped = map_of_dtensor(name, tensor)
                is_in = mesh is not None or tensor.device_mesh.get_coordinate() is not None
                replicas = replicas_of_dtensor(name, tensor, mesh) if is_in else None
                maps[f"{case}/{name}"] = {
                    "map": mapped.to_bytes().decode(),
                    "index": replicas.index if replicas else 0,
                    "ranks": replicas.ranks if replicas else None,
                }
    for case, _, tensors in cases:
        for name, tensor in tensors.items():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            bits[f"{case}/{name}"] = bits_of(local)
    stored = save(
        {f"{case}/{name}": tensor for case, _, tensors in cases[:4] for name, tensor in tensors.items()}, folder
    )
    np.savez(folder / f"{rank}.npz", **bits)
    (folder / f"{rank}.json").write_text(json.dumps({"maps": maps, "refusals": refusals, "stored": stored}))
    dist.destroy_process_group()


def save(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, list[str]]:
    """Write a distributed checkpoint; return the maps of its chunks."""
    checkpoint.save(tensors, checkpoint_id=str(folder / "checkpoint"))
    found = maps_of_dcp(checkpoint.FileSystemReader(str(folder / "checkpoint")).read_metadata())
    assert not found.others
    return {name: [mapped.to_bytes().decode() for mapped in maps] for name, maps in found.maps.items()}


def bits_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().view(torch.int16).numpy().copy()


# ---------------------------------------------------------------------- meshes of more ranks than there are processes

# mesh, how many of its last dimensions split the tensor before FSDP2 does, and the dimension that each of them splits
MESHES: list[tuple[tuple[int, ...], tuple[int | None, ...]]] = [
    ((3, 2), (0,)),
    ((4, 2), (0,)),
    ((3, 2), (1,)),
    ((2, 3, 2), (0,)),  # HSDP over tensor parallelism
    ((3, 2, 2), (0, 0)),  # FSDP2 over expert and tensor parallelism
    ((3, 2, 2), (0, None)),
]
ROWS = [1, 2, 5, 7, 12, 19, 24]


def alone(folder: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    bits: dict[str, Any] = {}
    notes: list[dict[str, Any]] = []
    for mesh_shape, dims in MESHES:
        for rank in range(math.prod(mesh_shape)):
            dist.init_process_group("fake", rank=rank, world_size=math.prod(mesh_shape), store=FakeStore())
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("abcd"[: len(mesh_shape)]))
            head, tail = mesh.mesh_dim_names[: -len(dims)], mesh.mesh_dim_names[-len(dims) :]
            for rows, maker in itertools.product(ROWS, ("fully_shard", "distribute_tensor")):
                full = torch.arange(rows * 4, dtype=torch.int16).view(rows, 4)
                before = [Replicate() if dim is None else Shard(dim) for dim in dims]
                holder = nn.Module()
                split = distribute_tensor(full, mesh[tail], before, src_data_rank=None)
                holder.weight = nn.Parameter(split, requires_grad=False)
                fully_shard(holder, mesh=mesh[head])
                tensor = holder.weight
                if maker == "distribute_tensor":
                    tensor = distribute_tensor(full, mesh, tensor.placements, src_data_rank=None)
                key = f"{len(notes)}"
                bits[key] = tensor.to_local().detach().numpy().copy()
                notes.append(
                    {
                        "key": key,
                        "shape": [rows, 4],
                        "mesh_shape": list(mesh_shape),
                        "at": list(mesh.get_coordinate()),
                        "placements": [
                            None if type(p) is Replicate else [p.dim, getattr(p, "split_factor", 1)]
                            for p in tensor.placements
                        ],
                        "made_by": maker,
                    }
                )
            dist.destroy_process_group()
    np.savez(folder / "alone.npz", **bits)
    (folder / "alone.json").write_text(json.dumps(notes))


def main(what: str, folder: Path) -> int:
    torch.set_num_threads(1)
    if what == "alone":
        alone(folder)
        return 0
    children = []
    for rank in range(N_RANKS):  # forked, so that torch is imported once
        child = os.fork()
        if child == 0:
            status = 1
            try:
                real(rank, folder)
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
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
