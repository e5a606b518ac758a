"""Affine maps of Megatron's ``ShardedTensor``: where a rank's local tensor lies in a global one.

Works on anything with the attributes of `ShardedTensor`; Megatron is not imported. A global tensor may have leading
axes that local tensors lack (layers, experts), rows that only pad it (a vocabulary), and the local one may be a range
of the flattened slice (a distributed optimizer's). Refuses attributes that contradict each other, and
padding of which the caller does not say where it begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.slices import flattened, padded, part, reshaped
from dcr_store.layout.tensors import name_of_torch_dtype

_READ: Final = (
    *("data", "dtype", "local_shape", "global_shape", "global_offset", "prepend_axis_num"),
    "allow_shape_mismatch",
)


class ShardedTensor(Protocol):
    """What is read of ``megatron.core.dist_checkpointing.ShardedTensor``; older versions have `flattened_range` too."""

    @property
    def key(self) -> str:
        """Name of the global tensor."""

    @property
    def data(self) -> Any:
        """Local tensor, or None."""

    @property
    def dtype(self) -> Any:
        """torch dtype."""

    @property
    def local_shape(self) -> Sequence[int]:
        """Shape of the local tensor before it was flattened."""

    @property
    def global_shape(self) -> Sequence[int]:
        """Shape of the global tensor, with its leading axes and padding."""

    @property
    def global_offset(self) -> Sequence[int]:
        """Where the local tensor begins in the global one."""

    @property
    def replica_id(self) -> int | Sequence[int]:
        """Zero, or all zeros, for the first of several that hold the same."""

    @property
    def prepend_axis_num(self) -> int:
        """How many leading axes of the global shape the local one lacks."""

    @property
    def allow_shape_mismatch(self) -> bool:
        """Whether the global shape may be padded."""


def map_of_megatron(sharded: ShardedTensor, canonical_shape: Sequence[int] | None = None) -> AffineMap:
    """Return the map of a local tensor; the canonical tensor has the name `sharded.key`.

    Parameters
    ----------
    sharded : ShardedTensor
        One of a ``sharded_state_dict``; its `data` may be None.
    canonical_shape : sequence of int, optional
        Of the tensor without padding, where `allow_shape_mismatch` says that there may be some: local values past it
        are nobody's. Otherwise it has to be the global shape, if it is given.

    Raises
    ------
    InvalidInputError
        If shapes, offsets, range and data contradict each other, or the canonical shape is missing or none that padding
        leads from to the global one; names the tensor.

    Notes
    -----
    The map leads to the global tensor with its leading axes. Where canonical tensors are those of single layers or
    experts, ``map.then({key: slices.stacked(…)})`` leads on to them.
    """
    _require_tensor(sharded, *_READ)
    key = sharded.key
    local, full, offsets = (
        [int(n) for n in numbers] for numbers in (sharded.local_shape, sharded.global_shape, sharded.global_offset)
    )
    n_leading = int(sharded.prepend_axis_num)
    sizes = [1] * n_leading + local
    if n_leading < 0 or not len(full) == len(offsets) == len(sizes):
        raise InvalidInputError(
            "shapes and offset of the sharded tensor do not fit each other",
            key=key,
            expected=f"{len(sizes)} dimensions: {n_leading} prepended to {local}",
            found=f"global shape {full}, offset {offsets}",
        )
    dtype = name_of_torch_dtype(key, sharded.dtype)
    part(key, dtype, full, offsets, sizes)  # the slice has to lie within the padded tensor
    canonical = _canonical(sharded, full, canonical_shape)
    starts = [min(offset, n) for offset, n in zip(offsets, canonical, strict=True)]
    kept = [
        min(offset + size, n) - start for offset, size, n, start in zip(offsets, sizes, canonical, starts, strict=True)
    ]
    found = reshaped(padded(part(key, dtype, canonical, starts, kept), sizes), local)
    flat = getattr(sharded, "flattened_range", None)
    if flat is not None:
        if not isinstance(flat.start, int) or not isinstance(flat.stop, int) or flat.step not in (None, 1):
            raise InvalidInputError("the flattened range is none", key=key, expected="slice(start, stop)", found=flat)
        if not 0 <= flat.start <= flat.stop <= math.prod(local):
            raise InvalidInputError(
                "the flattened range leaves the slice",
                key=key,
                expected=f"within {math.prod(local)} values",
                found=flat,
            )
        found = flattened(found, flat.start, flat.stop)
    _require_data(sharded, found)
    return found


def is_main_replica(sharded: ShardedTensor) -> bool:
    """Return whether this rank is the one of those with the same slice that Megatron would have save it."""
    _require_tensor(sharded, "replica_id")
    replica = sharded.replica_id
    ids = list(replica) if isinstance(replica, Sequence) else [replica]
    if any(not isinstance(number, int) or number < 0 for number in ids):
        raise InvalidInputError("the replica id is none", key=sharded.key, expected="counts", found=replica)
    return not any(ids)


def _require_tensor(sharded: ShardedTensor, *attributes: str) -> None:
    """Refuse what lacks `attributes`: by its own key, or, of what has none, as the argument that it is."""
    missing = [name for name in ("key", *attributes) if not hasattr(sharded, name)]
    if missing:
        raise InvalidInputError(
            "is no ShardedTensor; build factories first (apply_factories), and leave out ShardedObjects",
            key=str(getattr(sharded, "key", "sharded")),
            expected=f"a ShardedTensor, which has {', '.join(missing)}",
            found=type(sharded).__name__,
        )


def _canonical(sharded: ShardedTensor, full: list[int], given: Sequence[int] | None) -> list[int]:
    """Return the shape of the tensor without padding."""
    if given is None and sharded.allow_shape_mismatch:
        raise InvalidInputError(
            "may be padded (allow_shape_mismatch); say what shape it has without padding (canonical_shape)",
            key=sharded.key,
            found=full,
        )
    canonical = full if given is None else [int(n) for n in given]
    is_padding = len(canonical) == len(full) and all(n <= wide for n, wide in zip(canonical, full, strict=True))
    if not is_padding or (canonical != full and not sharded.allow_shape_mismatch):
        raise InvalidInputError(
            "the canonical shape is not that of the sharded tensor",
            key=sharded.key,
            expected=f"within {full}" if sharded.allow_shape_mismatch else f"{full}: it is not padded",
            found=canonical,
        )
    return canonical


def _require_data(sharded: ShardedTensor, found: AffineMap) -> None:
    if sharded.data is None:
        return
    is_same = str(sharded.data.dtype) == str(sharded.dtype)
    if not is_same or tuple(int(n) for n in sharded.data.shape) != found.shape:
        raise InvalidInputError(
            "the data is not what the sharded tensor says",
            key=sharded.key,
            expected=f"{sharded.dtype} {list(found.shape)}",
            found=f"{sharded.data.dtype} {list(sharded.data.shape)}",
        )
