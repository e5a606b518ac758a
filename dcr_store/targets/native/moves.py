"""What torch's operators do to bits: which only move them, which only make new memory, which write into what.

No rule about any model or loader; an operator that is in none of the tables computes, and is refused for masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch

_aten: Final = torch.ops.aten


def _operators(*names: str) -> frozenset[object]:
    """Return the operators of these names that this torch has."""
    found = set()
    for name in names:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(_aten, packet, None), overload or "default", None)
        if operator is not None:
            found.add(operator)
    return frozenset(found)


MOVES: Final = _operators(
    "alias", "detach", "lift_fresh", "clone", "contiguous", "view", "_unsafe_view", "_reshape_alias", "reshape",
    "as_strided", "t", "transpose.int", "permute", "slice.Tensor", "select.int", "narrow", "split.Tensor",
    "split_with_sizes", "unsafe_split.Tensor", "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "unbind.int",
    "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "expand", "unfold", "diagonal", "flip", "roll", "repeat",
    "index.Tensor", "index_select", "gather", "constant_pad_nd",
)  # fmt: skip
"""The first operand's elements, each bit for bit, at other places. (A pad's constant is no change: its mask is 0.)"""

JOINS: Final = _operators("cat", "stack")
"""The elements of a list of operands, one after the other."""

MAKES: Final = _operators(
    "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full",
    "new_empty_strided",
)  # fmt: skip
"""New memory that takes shape and dtype of the operand, not its elements."""

CAST: Final = _aten._to_copy.default
REINTERPRET: Final = _aten.view.dtype
COPY: Final = _aten.copy_.default
COPIES: Final = _operators("_foreach_copy_")
PINNED: Final = _operators("is_pinned")
DEVICE: Final = torch.ops.prim.device.default


@cache
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    places, names = [], []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names.append(argument.name)
            if not argument.kwarg_only:
                places.append(index)
    return tuple(places), tuple(names)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the operands that an operator writes."""
    places, names = _writes(func)
    if not names:
        return []
    found = [args[index] for index in places if index < len(args)] + [kwargs[n] for n in names if n in kwargs]
    return list(tensors(found))


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in operands: lists, tuples and mappings are looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def mapped(value: Any, change: Any) -> Any:
    """Return operands or results with `change` applied to each tensor in them."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value
