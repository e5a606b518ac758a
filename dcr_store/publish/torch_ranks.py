"""Which ranks publish a torch module, and which of them this process is.

No rank is asked: the meshes of the module's tensors say it, or the process group, or the environment of torchrun.
Refuses tensors of meshes that know nothing of each other, and a process that is none of the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from dcr_store.errors import InvalidInputError
from dcr_store.layout.from_dtensor import is_dtensor
from dcr_store.layout.placements import Maker
from dcr_store.wording import first_of

_MAX_TOLD: Final = 5


def ranks_of(held: Mapping[str, tuple[Any, Maker | None]], mesh: Any, n_writers: int) -> tuple[tuple[int, ...], Any]:
    """Return the ranks that publish, the first one first, and their mesh if there is one."""
    if mesh is None:
        mesh = _mesh_around(held)
    if mesh is not None:
        return tuple(int(rank) for rank in mesh.mesh.flatten().tolist()), mesh
    return tuple(range(_world(n_writers)[1])), None


def _mesh_around(held: Mapping[str, tuple[Any, Maker | None]]) -> Any:
    """Return the mesh that the tensors' meshes are parts of."""
    found: dict[str, Any] = {}
    for name, (tensor, _) in held.items():
        if is_dtensor(tensor):
            found.setdefault(name, _root_of(tensor.device_mesh))
    meshes: list[tuple[str, Any]] = []
    for name, root in found.items():
        if not any(root is other or root == other for _, other in meshes):
            meshes.append((name, root))
    if len(meshes) > 1:
        raise InvalidInputError(
            "the module's tensors were sliced from several meshes; give the one of all ranks (mesh=), and slice all"
            " from it",
            key=meshes[1][0],
            expected=f"{meshes[0][1]}, as of {meshes[0][0]}",
            found=str(meshes[1][1]),
        )
    return meshes[0][1] if meshes else None


def _root_of(mesh: Any) -> Any:
    """Return the mesh that a mesh was sliced from; torch has had several ways to ask."""
    from torch.distributed import device_mesh

    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    resources = getattr(device_mesh, "_mesh_resources", None)
    return mesh if resources is None else resources.get_root_mesh(mesh)


def _world(n_ranks: int = 1) -> tuple[int, int]:
    """Return rank and number of ranks: of the process group, or as torchrun says, or else the first of `n_ranks`."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, n_ranks


def place_of(rank: int | None, ranks: tuple[int, ...], names: tuple[str, ...]) -> int:
    """Return the place of this process among the ranks, or check the one that is given."""
    if len(names) != len(ranks):
        raise InvalidInputError(
            "there is not one writer for each rank; name as many, or none",
            key="writers",
            expected=f"{len(ranks)}, for ranks {first_of([str(rank) for rank in ranks], _MAX_TOLD)}",
            found=f"{len(names)}",
        )
    if rank is None:
        number = _world()[0]
        if number not in ranks:
            raise InvalidInputError(
                "this rank is none of those that hold the module; call it on these only, or give the mesh of all",
                key="mesh",
                expected=f"one of {first_of([str(rank) for rank in ranks], _MAX_TOLD)}",
                found=f"rank {number}",
            )
        return ranks.index(number)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(names):
        raise InvalidInputError("is no rank", key="rank", expected=f"0 to {len(names) - 1}", found=repr(rank))
    return rank
