"""What a rank holds of a torch module, tensor by tensor, and what of it the rank writes.

All ranks come to the same names, ties and shares without a word between them. Refuses entries that are no tensors,
modules of FSDP1 (whose ``state_dict`` gathers), and a layout that is of other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.dtypes import dtype as dtype_row
from dcr_store.layout.from_dtensor import is_dtensor, local_tensor, map_of_dtensor, replicas_of_dtensor
from dcr_store.layout.layout import Layout
from dcr_store.layout.placements import Maker
from dcr_store.layout.tensors import memory_key, name_of_torch_dtype
from dcr_store.wording import first_of

if TYPE_CHECKING:
    import torch

_MAX_TOLD: Final = 5
_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel")


@dataclass(frozen=True, slots=True)
class Item:
    """What this rank holds of one name.

    Attributes
    ----------
    tensor : torch.Tensor
        Of the module; a DTensor, or plain.
    ranks : tuple of int
        Who holds the same.
    tie : hashable or None
        What tied names have in common; None if this rank holds no value of it.
    """

    name: str
    tensor: Any
    mapped: AffineMap
    ranks: tuple[int, ...]
    tie: Hashable | None
    dtype: torch.dtype | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.mapped.tensors[self.name]

    @property
    def nbytes(self) -> int:
        """Of what this rank holds."""
        row = dtype_row(self.mapped.dtype)
        return self.mapped.n_values * row.bits // 8

    def local(self) -> Any:
        """Return this rank's values."""
        local = local_tensor(self.tensor) if is_dtensor(self.tensor) else self.tensor.detach()
        return local if self.dtype is None else local.to(self.dtype)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is published, as one rank sees it: all names alike on all ranks, and its own part of each."""

    items: tuple[Item, ...]
    ranks: tuple[int, ...]

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape by name, without aliases."""
        aliases = self.aliases
        return {item.name: (item.mapped.dtype, item.shape) for item in self.items if item.name not in aliases}

    @property
    def aliases(self) -> dict[str, str]:
        """Names of tensors that a name before them has too."""
        firsts: dict[Hashable, str] = {}
        found = {}
        for item in self.items:
            if item.tie is not None and firsts.setdefault(item.tie, item.name) != item.name:
                found[item.name] = firsts[item.tie]
        return found

    def require(self, layout: Layout, version: str) -> None:
        """Check that a layout is of these tensors."""
        there, here = set(layout.names()), {item.name for item in self.items}
        lacking, further = sorted(there - here), sorted(here - there)
        if lacking or further:
            raise InvalidInputError(
                f"the rank that began {version} has other tensors; give all ranks the same module and `rename`",
                key=min(there ^ here),
                expected=f"{first_of(lacking, _MAX_TOLD)} too" if lacking else f"no {first_of(further, _MAX_TOLD)}",
                found=f"{len(here)} names on this rank",
            )
        ties: dict[str, Item] = {}
        for item in self.items:
            entry = layout.entry(item.name)
            if (entry.dtype, tuple(entry.shape)) != (item.mapped.dtype, item.shape):
                raise InvalidInputError(
                    f"the rank that began {version} has another tensor of this name; give all ranks the same module",
                    key=item.name,
                    expected=f"{entry.dtype} {list(entry.shape)}",
                    found=f"{item.mapped.dtype} {list(item.shape)}",
                )
            if item.tie is not None and ties.setdefault(entry.name, item).tie != item.tie:
                raise InvalidInputError(
                    f"is tied to {ties[entry.name].name} on the rank that began {version}; tie them on all ranks",
                    key=item.name,
                    expected="one tensor of two names",
                    found="two tensors on this rank",
                )

    def owned(self, layout: Layout, rank: int) -> Iterator[Item]:
        """Yield what this rank writes: of what several hold, its share by bytes."""
        items: dict[str, Item] = {}
        for item in self.items:
            entry = layout.find(item.name)
            if entry is not None:
                items.setdefault(entry.name, item)
        groups: dict[tuple[int, ...], list[Item]] = {}
        for item in items.values():
            groups.setdefault(item.ranks, []).append(item)
        mine: set[str] = set()
        for ranks, group in groups.items():
            # All of them have the same group, since what they hold alike makes it; and so come to the same.
            loads = dict.fromkeys(ranks, 0)
            for item in sorted(group, key=lambda item: (-item.nbytes, item.name)):
                owner = min(ranks, key=lambda number: loads[number])
                loads[owner] += item.nbytes
                if owner == rank:
                    mine.add(item.name)
        yield from (item for item in items.values() if item.name in mine)

    def maps(self, layout: Layout, rank: int) -> list[AffineMap]:
        """Return the maps of what this rank writes, as far as the layout has it."""
        return [
            item.mapped
            for item in self.owned(layout, rank)
            if (entry := layout.entry(item.name)).dtype == item.mapped.dtype and tuple(entry.shape) == item.shape
        ]


def held_of(
    module: torch.nn.Module, rename: Callable[[str], str | None] | None, dtype: Any, made_by: Maker | None
) -> dict[str, tuple[Any, Maker | None]]:
    """Return the module's tensors by name, and who sharded each; ``InvalidInputError`` if one cannot be published."""
    try:
        import torch
    except ImportError as error:
        raise InvalidInputError("modules need torch; pip install dcr-store[torch]", key="module") from error
    if not isinstance(module, torch.nn.Module):
        raise InvalidInputError("is no module", key="module", expected="torch.nn.Module", found=type(module).__name__)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidInputError("is none to convert to", key="dtype", expected="a floating dtype", found=repr(dtype))
    kinds = {base.__name__ for part in module.modules() for base in type(part).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise InvalidInputError(
            "a module of FSDP1 gathers its tensors to give them; shard it with fully_shard (FSDP2)",
            key="module",
            expected="a plain module, or one with DTensors",
            found="FullyShardedDataParallel",
        )
    if rename is not None and not callable(rename):
        raise InvalidInputError(
            "is no function of names; of a mapping give its get, which leaves out what is not in it",
            key="rename",
            expected="a function from names to names, or None to leave one out",
            found=type(rename).__name__,
        )
    wrapped = tuple(
        f"{path}.module." if path else "module."
        for path, part in module.named_modules()
        if any(base.__name__ in _WRAPPERS for base in type(part).__mro__)
    )
    parameters = made_by or ("fully_shard" if "FSDPModule" in kinds else None)
    found: dict[str, tuple[Any, Maker | None]] = {}
    for key, tensor in module.state_dict(keep_vars=True).items():
        name = key if rename is None else rename(key)
        if name is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(
                "is no tensor; leave it out with a `rename` that returns None for it",
                key=key,
                expected="a tensor",
                found=type(tensor).__name__,
            )
        if not isinstance(name, str):
            raise InvalidInputError(
                "has no name by rename", key=key, expected="a name, or None to leave it out", found=type(name).__name__
            )
        if wrapped and name.startswith(wrapped):
            raise InvalidInputError(
                "is named by the wrapper of data parallelism; give what it wraps, its .module, or names without it by"
                " `rename`",
                key=key,
                expected="a name without the wrapper's module",
                found=name,
            )
        if "_orig_mod" in name.split("."):
            raise InvalidInputError(
                "is named by torch.compile's wrapper; give module._orig_mod, or names without it by `rename`",
                key=key,
                expected="a name without _orig_mod",
                found=name,
            )
        if name in found:
            raise InvalidInputError(
                "is the name of two entries; give each its own", key=name, expected="one", found=f"{key} too"
            )
        found[name] = tensor, parameters if isinstance(tensor, torch.nn.Parameter) else made_by
    if not found:
        raise InvalidInputError("the module has no tensors", key="module", expected="one at least", found="none")
    return found


def item_of(
    name: str,
    tensor: Any,
    made_by: Maker | None,
    mesh: Any,
    ranks: tuple[int, ...],
    dtype: torch.dtype | None,
) -> Item:
    """Return what this rank holds of a tensor; `mesh` is that of all `ranks`, if there is one."""
    mapped = map_of_dtensor(name, tensor, made_by)
    cast = dtype if dtype is not None and tensor.dtype.is_floating_point and tensor.dtype != dtype else None
    if cast is not None:
        mapped = replace(mapped, dtype=name_of_torch_dtype(name, cast))
    if not is_dtensor(tensor):
        return Item(name, tensor, mapped, ranks, memory_key(tensor), cast)
    held = replicas_of_dtensor(name, tensor, None if mesh == tensor.device_mesh else mesh)
    memory = memory_key(local_tensor(tensor))
    tie = None if memory is None else (memory, tuple(tensor.shape), str(tensor.placements), id(tensor.device_mesh))
    return Item(name, tensor, mapped, held.ranks, tie, cast)
