"""Affine maps of the slices that training frameworks hold, from a few operations on slices.

A map starts as a part of a canonical tensor (``whole``, ``part``, ``sharded``, ``flat_part``) and goes through what the
framework does to make its own parameter of it (``concatenated``, ``stacked``, ``permuted``, ``reshaped``, ``narrowed``,
``padded``, ``flattened``). The functions after them are the usual parameters of tensor-parallel models, put together
so. Pure; refuses shapes that do not fit with ``InvalidInputError``, which names the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import MAX_TOLD, AffineMap
from dcr_store.layout.boxes import Box, Dim, box
from dcr_store.wording import first_of


def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the strides, in elements, of a tensor in C order."""
    return list(accumulate(reversed(shape[1:]), lambda a, b: a * max(b, 1), initial=1))[::-1] if shape else []


def boxes_between(
    sizes: Sequence[int],
    here: Sequence[int],
    here_offsets: Sequence[int],
    there: Sequence[int],
    there_offsets: Sequence[int],
) -> list[Box]:
    """Return the box of `sizes` values from indices of two tensors with these strides; none if it is empty."""
    if 0 in sizes:
        return []
    dims = [Dim(*dim) for dim in zip(sizes, here, there, strict=True)]
    return [box(_dot(here, here_offsets), _dot(there, there_offsets), dims)]


def _dot(strides: Sequence[int], offsets: Sequence[int]) -> int:
    return sum(stride * offset for stride, offset in zip(strides, offsets, strict=True))


# ---------------------------------------------------------------------- parts of one tensor


def whole(name: str, dtype: str, shape: Sequence[int]) -> AffineMap:
    """Return the map of a slice that is the tensor: replicated, or not split at all."""
    return part(name, dtype, shape, [0] * len(shape), shape)


def part(name: str, dtype: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> AffineMap:
    """Return the map of a slice that is a rectangular part of the tensor.

    Parameters
    ----------
    shape : sequence of int
        Of the tensor.
    offsets, sizes : sequence of int
        Where the part begins in each dimension, and its shape.
    """
    if not len(shape) == len(offsets) == len(sizes) or any(
        not 0 <= offset <= offset + size <= full for offset, size, full in zip(offsets, sizes, shape, strict=True)
    ):
        raise InvalidInputError(
            "the part leaves the tensor",
            key=name,
            expected=f"within {list(shape)}",
            found=f"{list(sizes)} at {list(offsets)}",
        )
    boxes = boxes_between(sizes, strides_of(sizes), [0] * len(sizes), strides_of(shape), offsets)
    return AffineMap.of(dtype, sizes, {name: shape}, {name: boxes})


def sharded(name: str, dtype: str, shape: Sequence[int], dim: int, rank: int, n_ranks: int) -> AffineMap:
    """Return the map of rank `rank` of `n_ranks` that split dimension `dim` as ``torch.chunk`` does.

    Where it does not divide, the last ranks hold less, or nothing.
    """
    if not -len(shape) <= dim < len(shape) or not 0 <= rank < n_ranks:
        raise InvalidInputError(
            "there is no such slice",
            key=name,
            expected=f"a dimension of {list(shape)} and a rank below {n_ranks}",
            found=f"dimension {dim}, rank {rank}",
        )
    dim %= len(shape)
    n_each = -(-shape[dim] // n_ranks)
    start = min(rank * n_each, shape[dim])
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, min(start + n_each, shape[dim]) - start
    return part(name, dtype, shape, offsets, sizes)


def flat_part(name: str, dtype: str, shape: Sequence[int], start: int, stop: int) -> AffineMap:
    """Return the map of a 1-D slice of the values `start` to `stop` of the flattened tensor."""
    return flattened(whole(name, dtype, shape), start, stop)


# ---------------------------------------------------------------------- what becomes of slices


def concatenated(maps: Sequence[AffineMap], dim: int = 0) -> AffineMap:
    """Return the map of slices concatenated along a dimension."""
    first = _first(maps)
    n_dims = len(first.shape)
    if not -n_dims <= dim < n_dims:
        raise InvalidInputError("there is no such dimension", key=_names(*maps), expected=f"below {n_dims}", found=dim)
    dim %= n_dims
    shape = list(first.shape)
    shape[dim] = sum(mapped.shape[dim] for mapped in maps)
    tensors: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[Box]] = {}
    start = 0
    for mapped in maps:
        if mapped.dtype != first.dtype or [*mapped.shape[:dim], *mapped.shape[dim + 1 :]] != [
            *shape[:dim],
            *shape[dim + 1 :],
        ]:
            raise InvalidInputError(
                "slices of these shapes cannot be concatenated",
                key=_names(mapped),
                expected=f"{first.dtype} {list(first.shape)} but for dimension {dim}",
                found=f"{mapped.dtype} {list(mapped.shape)}",
            )
        offsets = [start if index == dim else 0 for index in range(n_dims)]
        view = boxes_between(mapped.shape, strides_of(shape), offsets, strides_of(mapped.shape), [0] * n_dims)
        moved = mapped.through(shape, view)
        for name, full in moved.tensors.items():
            if tensors.setdefault(name, full) != full:
                raise InvalidInputError("a tensor has two shapes", key=name, expected=tensors[name], found=full)
            boxes.setdefault(name, []).extend(moved.boxes[name])
        start += mapped.shape[dim]
    return AffineMap.of(first.dtype, shape, tensors, boxes)


def stacked(maps: Sequence[AffineMap], dim: int = 0) -> AffineMap:
    """Return the map of slices of one shape stacked along a new dimension."""
    shape = _first(maps).shape
    if not -len(shape) - 1 <= dim <= len(shape):
        raise InvalidInputError(
            "there is no such dimension", key=_names(*maps), expected=f"at most {len(shape)}", found=dim
        )
    at = dim % (len(shape) + 1)
    return concatenated([reshaped(mapped, [*shape[:at], 1, *shape[at:]]) for mapped in maps], at)


def reshaped(mapped: AffineMap, shape: Sequence[int]) -> AffineMap:
    """Return the map of the slice in another shape of as many values."""
    if math.prod(shape) != math.prod(mapped.shape):
        raise InvalidInputError(
            "the slice cannot have this shape", key=_names(mapped), expected=list(mapped.shape), found=list(shape)
        )
    return AffineMap.of(mapped.dtype, shape, mapped.tensors, mapped.boxes)


def permuted(mapped: AffineMap, dims: Sequence[int]) -> AffineMap:
    """Return the map of ``slice.permute(dims)``."""
    if sorted(dims) != list(range(len(mapped.shape))):
        raise InvalidInputError(
            "these are no permutation of the dimensions",
            key=_names(mapped),
            expected=list(range(len(mapped.shape))),
            found=list(dims),
        )
    shape = [mapped.shape[dim] for dim in dims]
    old = strides_of(mapped.shape)
    zeros = [0] * len(shape)
    return mapped.through(shape, boxes_between(shape, strides_of(shape), zeros, [old[dim] for dim in dims], zeros))


def transposed(mapped: AffineMap) -> AffineMap:
    """Return the map of the slice with its last two dimensions exchanged."""
    dims = list(range(len(mapped.shape)))
    return permuted(mapped, [*dims[:-2], *dims[:-3:-1]])


def narrowed(mapped: AffineMap, dim: int, start: int, n: int) -> AffineMap:
    """Return the map of ``slice.narrow(dim, start, n)``."""
    shape, offsets = list(mapped.shape), [0] * len(mapped.shape)
    if not -len(shape) <= dim < len(shape) or not 0 <= start <= start + n <= shape[dim]:
        raise InvalidInputError(
            "the part leaves the slice",
            key=_names(mapped),
            expected=f"within {shape}",
            found=f"{start}:{start + n} of dimension {dim}",
        )
    shape[dim], offsets[dim] = n, start
    view = boxes_between(shape, strides_of(shape), [0] * len(shape), strides_of(mapped.shape), offsets)
    return mapped.through(shape, view)


def padded(mapped: AffineMap, shape: Sequence[int]) -> AffineMap:
    """Return the map of the slice with values that are nobody's appended in each dimension, up to `shape`."""
    if len(shape) != len(mapped.shape) or any(new < old for new, old in zip(shape, mapped.shape, strict=True)):
        raise InvalidInputError(
            "padding cannot make this smaller", key=_names(mapped), expected=list(mapped.shape), found=list(shape)
        )
    zeros = [0] * len(shape)
    return mapped.through(shape, boxes_between(mapped.shape, strides_of(shape), zeros, strides_of(mapped.shape), zeros))


def flattened(mapped: AffineMap, start: int, stop: int) -> AffineMap:
    """Return the map of ``slice.flatten()[start:stop]``."""
    n_local = math.prod(mapped.shape)
    if not 0 <= start <= stop <= n_local:
        raise InvalidInputError(
            "the range leaves the slice", key=_names(mapped), expected=f"within {n_local}", found=f"{start}:{stop}"
        )
    return mapped.through([stop - start], boxes_between([stop - start], [1], [0], [1], [start]))


def _first(maps: Sequence[AffineMap]) -> AffineMap:
    if not maps:
        raise InvalidInputError(
            "there are no slices to put together", key="maps", expected="one at least", found="none"
        )
    return maps[0]


def _names(*maps: AffineMap) -> str | None:
    """Return the tensors of slices, for an error."""
    return first_of(list(dict.fromkeys(name for mapped in maps for name in mapped.tensors)), MAX_TOLD) or None


# ---------------------------------------------------------------------- usual parameters


def column_parallel(name: str, dtype: str, shape: Sequence[int], rank: int, n_ranks: int) -> AffineMap:
    """Return the map of rows of a weight, or of a bias: output features over the ranks."""
    return sharded(name, dtype, shape, 0, rank, n_ranks)


def row_parallel(name: str, dtype: str, shape: Sequence[int], rank: int, n_ranks: int) -> AffineMap:
    """Return the map of columns of a weight: input features over the ranks."""
    return sharded(name, dtype, shape, 1, rank, n_ranks)


def fused(tensors: Mapping[str, Sequence[int]], dtype: str, rank: int, n_ranks: int) -> AffineMap:
    """Return the map of tensors that are each split over the ranks in dimension 0, and then concatenated on each.

    So a gated MLP has gate and up (``{gate: shape, up: shape}``). Where the checkpoint has them as one: `sections`.
    """
    return concatenated([column_parallel(name, dtype, shape, rank, n_ranks) for name, shape in tensors.items()])


def sections(
    name: str, dtype: str, shape: Sequence[int], n_rows: Sequence[int], rank: int, n_ranks: int, dim: int = 0
) -> AffineMap:
    """Return the map of one tensor whose sections are each split over the ranks, and then concatenated on each.

    So Mamba has in_proj (z, x, B, C and dt) and conv1d (x, B and C), and a gated MLP whose gate and up are one tensor.

    Parameters
    ----------
    n_rows : sequence of int
        How much of dimension `dim` each section has; together all of it.
    """
    at = dim % max(len(shape), 1)
    if not -len(shape) <= dim < len(shape) or sum(n_rows) != shape[at] or not _divide(n_rows, rank, n_ranks):
        raise InvalidInputError(
            "sections do not divide over the ranks",
            key=name,
            expected=f"all of dimension {dim} of {list(shape)}, in multiples of {n_ranks}, and a rank below",
            found=f"{list(n_rows)}, rank {rank}",
        )
    full = whole(name, dtype, shape)
    parts, start = [], 0
    for n in n_rows:
        section = narrowed(full, at, start, n)
        parts.append(narrowed(section, at, rank * (n // n_ranks), n // n_ranks))
        start += n
    return concatenated(parts, at)


def interleaved(tensors: Mapping[str, Sequence[int]], dtype: str, n_groups: int) -> AffineMap:
    """Return the map of tensors that are each cut into `n_groups` in dimension 0; a group has its part of each in turn.

    So Megatron has QKV: per group of queries the rows of q, then k, then v (``{q: shape, k: shape, v: shape}``), or q,
    gate, k, v, or k and v alone. What a rank holds of it is a part in turn (`narrowed`), also where it has less than
    one group.
    """
    for name, shape in tensors.items():
        if not shape or n_groups < 1 or shape[0] % n_groups:
            raise InvalidInputError(
                "rows do not divide into groups",
                key=name,
                expected=f"rows, a multiple of {n_groups}",
                found=list(shape),
            )
    grouped = [
        reshaped(whole(name, dtype, shape), [n_groups, shape[0] // n_groups, *shape[1:]])
        for name, shape in tensors.items()
    ]
    joined = concatenated(grouped, 1)
    return reshaped(joined, [n_groups * joined.shape[1], *joined.shape[2:]])


def qkv(
    tensors: Mapping[str, Sequence[int]],
    dtype: str,
    n_groups: int,
    rank: int,
    n_ranks: int,
    *,
    copied: Collection[str] = (),
) -> AffineMap:
    """Return the map of a rank's part of ``interleaved`` tensors.

    Parameters
    ----------
    copied : collection of str
        Where there are more ranks than groups: the tensors (k and v) of which all ranks of a group hold the group's
        rows. They are the first rank's in the maps, so that one writes them; in the others' they are nobody's. By
        default ranks share all rows of a group, as Megatron has it.
    """
    if unknown := sorted(set(copied) - set(tensors)):
        raise InvalidInputError("is none of the tensors", key=unknown[0], expected=sorted(tensors), found="in copied")
    if n_ranks <= n_groups or not copied:
        return _rank_of(interleaved(tensors, dtype, n_groups), rank, n_ranks)
    n_each, rest = divmod(n_ranks, max(n_groups, 1))
    if n_groups < 1 or rest or not 0 <= rank < n_ranks:
        raise InvalidInputError(
            "groups do not divide over the ranks",
            key=first_of(list(tensors), MAX_TOLD),
            expected=f"a multiple of {n_groups} ranks, and a rank below",
            found=f"rank {rank} of {n_ranks}",
        )
    group, which = divmod(rank, n_each)
    parts = []
    for name, shape in tensors.items():
        mine = _rank_of(whole(name, dtype, shape), group, n_groups)
        if name not in copied:
            mine = _rank_of(mine, which, n_each)
        parts.append(AffineMap.of(dtype, mine.shape, {}, {}) if name in copied and which else mine)
    return concatenated(parts)


def stacked_experts(
    tensors: Mapping[str, Sequence[int]],
    dtype: str,
    *,
    is_transposed: bool = False,
    dim: int | None = None,
    rank: int = 0,
    n_ranks: int = 1,
) -> AffineMap:
    """Return the map of one parameter [experts, rows, columns] of tensors of one expert each, in their order.

    Parameters
    ----------
    is_transposed : bool
        Whether each expert lies as [columns, rows].
    dim, rank, n_ranks : int
        The dimension of an expert's tensor that ranks split, and the rank; None: whole experts.
    """
    experts = [
        whole(name, dtype, shape) if dim is None else sharded(name, dtype, shape, dim, rank, n_ranks)
        for name, shape in tensors.items()
    ]
    return stacked([transposed(expert) for expert in experts] if is_transposed else experts)


def padded_vocabulary(name: str, dtype: str, shape: Sequence[int], n_padded: int, rank: int, n_ranks: int) -> AffineMap:
    """Return the map of rows of a vocabulary that was padded to `n_padded` rows before it was split."""
    return _rank_of(padded(whole(name, dtype, shape), [n_padded, *shape[1:]]), rank, n_ranks)


def _rank_of(mapped: AffineMap, rank: int, n_ranks: int) -> AffineMap:
    if not mapped.shape or not _divide(mapped.shape[:1], rank, n_ranks):
        raise InvalidInputError(
            "rows do not divide over the ranks",
            key=_names(mapped),
            expected=f"rows, a multiple of {n_ranks}, and a rank below",
            found=f"{list(mapped.shape)}, rank {rank}",
        )
    n_each = mapped.shape[0] // n_ranks
    return narrowed(mapped, 0, rank * n_each, n_each)


def _divide(n_rows: Sequence[int], rank: int, n_ranks: int) -> bool:
    return 0 <= rank < n_ranks and not any(n % n_ranks for n in n_rows)
