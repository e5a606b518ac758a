"""Affine maps of torch DTensors, from what they say of themselves: FSDP2, HSDP, tensor parallelism, and both.

A DTensor knows its global shape, its mesh, where this rank stands in that, and its placements; nothing else is asked,
and no other rank. Refuses sums that are not made yet (``Partial``), placements that torch does not have, and local
tensors of another shape than the placements say. torch is imported only when its tensors come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.placements import Maker, Placement, Replicas, Split, map_of_placements, replicas_of
from dcr_store.layout.slices import whole
from dcr_store.layout.tensors import describe

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_KNOWN: Final = ("Replicate", "Shard", "StridedShard", "_StridedShard")


def map_of_dtensor(name: str, tensor: torch.Tensor, made_by: Maker | None = None) -> AffineMap:
    """Return the map of this rank's local tensor, ``tensor.to_local()``.

    Parameters
    ----------
    name : str
        The canonical tensor: it has the global shape.
    tensor : torch.Tensor
        A DTensor on a mesh of any number of dimensions, each with ``Shard``, ``Replicate`` or ``_StridedShard``; sizes
        need not divide. A plain tensor is taken to be the whole. A rank outside the mesh holds nothing.
    made_by : {"fully_shard", "distribute_tensor"}, optional
        Who split the tensor, where torch's placements do not say it: needed for some uneven sizes of FSDP2 over tensor
        parallelism, and asked for in the error.

    Raises
    ------
    InvalidInputError
        If a placement is ``Partial`` or none of torch's, the local tensor has not the shape that follows from the
        placements, its dtype has no map, or `made_by` is needed; names the tensor.

    Notes
    -----
    Calls no collective. The local values count in C order, whatever their memory looks like.
    """
    if not is_dtensor(tensor):
        dtype, shape = describe(name, tensor)
        return whole(name, dtype, shape)
    dtype, local_shape = describe(name, local_tensor(tensor))
    shape = tuple(int(size) for size in tensor.shape)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placed, coordinate = _placements(name, tensor), _coordinate(mesh)
    if coordinate is None:
        return AffineMap.of(dtype, local_shape, {name: shape}, {})
    found = map_of_placements(name, dtype, shape, _mesh_shape(mesh), coordinate, placed, made_by)
    if found.shape == local_shape:
        return found
    if found.n_values == 0 and 0 in local_shape:  # FSDP2 keeps nothing of the shape of a tensor without values
        return AffineMap.of(dtype, local_shape, {name: shape}, {})
    raise InvalidInputError(
        "the local tensor has another shape than its placements say; make the DTensor with its own global shape, or"
        " say by whom it was made (made_by)",
        key=name,
        expected=f"{list(found.shape)} of {list(shape)} for {_shown(tensor)} at {list(coordinate)}",
        found=list(local_shape),
    )


def replicas_of_dtensor(name: str, tensor: torch.Tensor, mesh: DeviceMesh | None = None) -> Replicas:
    """Return which ranks hold the same slice of a tensor as this one.

    Parameters
    ----------
    tensor : torch.Tensor
        A DTensor; with `mesh` a plain tensor too, which all ranks of that are taken to hold alike.
    mesh : torch.distributed.device_mesh.DeviceMesh, optional
        The mesh of all ranks, if the tensor's own is only a part of it: along dimensions that its own mesh does not
        have, by their names, the tensor is taken to be replicated. So it is with a norm under tensor parallelism, which
        FSDP2 alone shards: its own mesh does not say that other ranks hold copies.

    Raises
    ------
    InvalidInputError
        If a plain tensor comes without `mesh`, this rank is outside the mesh, the tensor's mesh is no part of `mesh` by
        its names and ranks, or for its placements, as in `map_of_dtensor`.

    Notes
    -----
    Calls no collective.
    """
    around: Any = mesh if mesh is not None else getattr(tensor, "device_mesh", None)
    coordinate = None if around is None else _coordinate(around)
    if coordinate is None:
        raise InvalidInputError(
            "does not say who else holds it; give the mesh of all ranks",
            key=name,
            expected="a DTensor, or a mesh, with this rank in it",
            found=f"{type(tensor).__name__}, {around}",
        )
    placed = _placements(name, tensor) if is_dtensor(tensor) else []
    if mesh is not None and is_dtensor(tensor):
        placed = _spread(name, tensor, placed, mesh)
    elif mesh is not None:
        placed = [None] * len(coordinate)
    ranks = [int(rank) for rank in around.mesh.flatten().tolist()]
    return replicas_of(_mesh_shape(around), coordinate, placed, ranks)


def _spread(name: str, tensor: Any, placed: list[Placement], mesh: Any) -> list[Placement]:
    """Return the placements of a tensor on a mesh of which its own is a part."""
    own, names = tensor.device_mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
    part = [slice(None) if dim in own else at for dim, at in zip(names, _coordinate(mesh) or (), strict=False)]
    inside = np.array(mesh.mesh.tolist())[tuple(part)].tolist()
    if not own or not set(own) <= set(names) or inside != tensor.device_mesh.mesh.tolist():
        raise InvalidInputError(
            "the tensor's mesh is no part of the mesh of all ranks; give the one that it was sliced from",
            key=name,
            expected=f"a part of {mesh}",
            found=str(tensor.device_mesh),
        )
    found = dict(zip(own, placed, strict=True))
    return [found.get(dim) for dim in names]


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor says how it is placed on a mesh."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_tensor(tensor: Any) -> Any:
    """Return this rank's part of a DTensor; in its memory, and no operation of autograd."""
    import torch

    with torch.no_grad():
        return tensor.to_local()


def _mesh_shape(mesh: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in mesh.shape)


def _coordinate(mesh: Any) -> tuple[int, ...] | None:
    found = mesh.get_coordinate()
    return None if found is None else tuple(int(at) for at in found)


def _placements(name: str, tensor: Any) -> list[Placement]:
    """Return the placements as plain data.

    A subclass may split otherwise than its parent, so only torch's own classes are known. ``_StridedShard`` is a
    ``Shard`` in some versions of torch and none in others.
    """
    found: list[Placement] = []
    for placement in tensor.placements:
        kind = type(placement)
        if not kind.__module__.startswith("torch.") or kind.__name__ not in _KNOWN:
            is_sum = placement.is_partial()
            problem = "values that are still to be summed over ranks" if is_sum else "a placement of an unknown kind"
            raise InvalidInputError(
                f"has {problem}; redistribute it to Replicate or Shard",
                key=name,
                expected="Shard, Replicate or _StridedShard",
                found=_shown(tensor),
            )
        is_split = kind.__name__ != "Replicate"
        found.append(Split(int(placement.dim), int(getattr(placement, "split_factor", 1))) if is_split else None)
    return found


def _shown(tensor: Any) -> str:
    return f"{list(tensor.placements)} on a mesh of {list(_mesh_shape(tensor.device_mesh))}"
