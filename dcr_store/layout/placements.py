"""Affine maps of tensors that are placed on a mesh of ranks: split or replicated in each of its dimensions.

Placements are plain data here, one for each dimension of the mesh, and nothing else is known: neither torch nor other
ranks are asked (``from_dtensor`` reads them off tensors). Splits are those of ``torch.chunk``: where they do not
divide, the last ranks hold less, or nothing. Refuses placements that name no dimension, and uneven splits of which only
their maker knows in which order they were made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Box
from dcr_store.layout.slices import boxes_between, strides_of

Maker = Literal["fully_shard", "distribute_tensor"]
Runs = list[tuple[int, int]]
"""What a rank holds of one dimension: (start, stop), in the order in which it holds them."""


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor's dimension split over the ranks along one dimension of the mesh.

    Attributes
    ----------
    dim : int
        Of the tensor; negative ones count from the end.
    factor : int
        Into how many pieces later dimensions of the mesh had split the tensor's dimension before (torch's
        ``_StridedShard(dim, split_factor=factor)``): the rank has its part of each of them.
    """

    dim: int
    factor: int = 1


Placement = Split | None
"""None: replicated along the dimension of the mesh."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Who holds the same slice of a tensor.

    Attributes
    ----------
    index : int
        The place of the rank among them, from 0: equal placements give each of them another one, so that work can be
        shared out by it.
    coordinates : tuple of tuple of int
        All that hold the slice, this one too, in the mesh; ascending.
    ranks : tuple of int
        The same as ranks.
    """

    index: int
    coordinates: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]


def map_of_placements(
    name: str,
    dtype: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    made_by: Maker | None = None,
) -> AffineMap:
    """Return the map of what one coordinate of a mesh holds of a tensor.

    Parameters
    ----------
    shape : sequence of int
        Of the whole tensor.
    mesh_shape, coordinate : sequence of int
        Of the mesh, and one place in it.
    placements : sequence of (Split or None)
        For each dimension of the mesh.
    made_by : {"fully_shard", "distribute_tensor"}, optional
        Who split the tensor, which matters only where a split with a factor does not divide: ``fully_shard`` splits
        what the later dimensions of the mesh have left of the tensor, ``distribute_tensor`` goes through the placements
        from the first to the last. torch notes the same placements for both.

    Raises
    ------
    InvalidInputError
        If a placement or the coordinate does not fit tensor and mesh, or the two orders give different slices on any
        rank and `made_by` does not say which is meant: all ranks then refuse alike.
    """
    splits = _splits_by_dim(name, shape, mesh_shape, coordinate, placements)
    runs = [_held(name, size, mesh_shape, coordinate, splits.get(dim, {}), made_by) for dim, size in enumerate(shape)]
    sizes = [sum(stop - start for start, stop in held) for held in runs]
    here, there = strides_of(sizes), strides_of(shape)
    boxes: list[Box] = []
    for part in itertools.product(*(list(zip(_starts(held), held, strict=True)) for held in runs)):
        lengths = [stop - start for _, (start, stop) in part]
        offsets = [start for _, (start, _) in part]
        boxes += boxes_between(lengths, here, [at for at, _ in part], there, offsets)
    return AffineMap.of(dtype, sizes, {name: shape}, {name: boxes})


def replicas_of(
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    ranks: Sequence[int] | None = None,
) -> Replicas:
    """Return which coordinates hold the same slice: those that differ along replicated dimensions of the mesh only.

    Parameters
    ----------
    ranks : sequence of int, optional
        Of the mesh, in C order; otherwise they are counted.
    """
    numbers = range(math.prod(mesh_shape)) if ranks is None else ranks
    free = [
        range(n) if placement is None else (at,)
        for n, at, placement in zip(mesh_shape, coordinate, placements, strict=True)
    ]
    found = tuple(itertools.product(*free))
    strides = strides_of(mesh_shape)
    places = [sum(at * stride for at, stride in zip(item, strides, strict=True)) for item in found]
    return Replicas(found.index(tuple(coordinate)), found, tuple(numbers[place] for place in places))


def _splits_by_dim(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> dict[int, dict[int, int]]:
    """Return for each dimension of the tensor which of the mesh split it, ascending, and their factors."""
    if not len(mesh_shape) == len(coordinate) == len(placements) or any(
        not 0 <= at < n for at, n in zip(coordinate, mesh_shape, strict=True)
    ):
        raise InvalidInputError(
            "the coordinate or the placements do not fit the mesh",
            key=name,
            expected=f"one of each for a mesh of {list(mesh_shape)}",
            found=f"{len(placements)} placements, coordinate {list(coordinate)}",
        )
    found: dict[int, dict[int, int]] = {}
    for mesh_dim, placement in enumerate(placements):
        if placement is None:
            continue
        if not -len(shape) <= placement.dim < len(shape) or placement.factor < 1:
            raise InvalidInputError(
                "a placement splits a dimension that the tensor does not have, or into no pieces",
                key=name,
                expected=f"a dimension of {list(shape)}",
                found=str(placement),
            )
        found.setdefault(placement.dim % len(shape), {})[mesh_dim] = placement.factor
    return found


def _held(
    name: str,
    size: int,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    splits: dict[int, int],
    made_by: Maker | None,
) -> Runs:
    """Return what the coordinate holds of a dimension of the tensor."""
    order = _order(mesh_shape, splits)
    if order is None or order == list(splits):  # there is one way to read it
        return _by_placements(size, mesh_shape, coordinate, splits)
    if made_by is None and size % math.prod(mesh_shape[dim] for dim in splits):
        _require_alike(name, size, mesh_shape, splits, order)
    if made_by == "distribute_tensor":
        return _by_placements(size, mesh_shape, coordinate, splits)
    return _by_order(size, mesh_shape, coordinate, order)


def _require_alike(
    name: str, size: int, mesh_shape: Sequence[int], splits: dict[int, int], order: Sequence[int]
) -> None:
    """Refuse splits of which some rank, be it another one, cannot say in which order they were made."""
    for at in itertools.product(*(range(n) if dim in splits else (0,) for dim, n in enumerate(mesh_shape))):
        if _by_order(size, mesh_shape, at, order) != _by_placements(size, mesh_shape, at, splits):
            raise InvalidInputError(
                "the tensor is split unevenly, and its placements do not say in which order",
                key=name,
                expected=f"a multiple of {math.prod(mesh_shape[dim] for dim in splits)} in the dimension",
                found=size,
                advice="say made_by='fully_shard' for FSDP2 over tensor parallelism, else made_by='distribute_tensor'",
            )


def _order(mesh_shape: Sequence[int], splits: dict[int, int]) -> list[int] | None:
    """Return the dimensions of the mesh in the order in which they split; None if no order has these factors.

    A factor is the number of pieces at that time: it says after which of the later dimensions this one came.
    """
    order: list[int] = []
    for mesh_dim, factor in reversed(splits.items()):
        n_pieces = list(itertools.accumulate((mesh_shape[dim] for dim in order), lambda a, b: a * b, initial=1))
        if factor not in n_pieces:
            return None
        order.insert(n_pieces.index(factor), mesh_dim)
    return order


def _by_order(size: int, mesh_shape: Sequence[int], coordinate: Sequence[int], order: Sequence[int]) -> Runs:
    runs = [(0, size)] if size else []
    for mesh_dim in order:
        runs = _chunk(runs, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return runs


def _by_placements(size: int, mesh_shape: Sequence[int], coordinate: Sequence[int], splits: dict[int, int]) -> Runs:
    runs = [(0, size)] if size else []
    for mesh_dim, factor in splits.items():
        pieces = [_chunk(runs, factor, index) for index in range(factor)]
        parts = [_chunk(piece, mesh_shape[mesh_dim], coordinate[mesh_dim]) for piece in pieces]
        runs = _joined(run for part in parts for run in part)
    return runs


def _chunk(runs: Runs, n_chunks: int, index: int) -> Runs:
    """Return one of the chunks of ``torch.chunk``, which are of one size but for the last ones."""
    n = sum(stop - start for start, stop in runs)
    n_each = -(-n // n_chunks)
    low, high = index * n_each, (index + 1) * n_each
    found = []
    for at, (start, stop) in zip(_starts(runs), runs, strict=True):
        first, last = max(start, start + low - at), min(stop, start + high - at)
        if first < last:
            found.append((first, last))
    return found


def _starts(runs: Runs) -> list[int]:
    """Return where runs begin in the slice."""
    return list(itertools.accumulate((stop - start for start, stop in runs), initial=0))[: len(runs)]


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return runs with those that follow each other made one."""
    found: Runs = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
