"""The memory of a module's parameters and buffers: which of it a tensor lies in, and whether it is still the same.

Refuses modules with tensors that have no storage of their own (meta tensors, DTensor and other wrappers), or whose
storages overlap without being one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from dcr_store.errors import InvalidInputError
from dcr_store.targets.native.geometry import Geometry, geometry

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers(itemsize: int) -> torch.dtype | None:
    """Return the integer dtype in which elements of a width are XORed, or None."""
    return _INTEGERS.get(itemsize)


def view_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a tensor as another dtype of the same width: plain, of no graph, of the same memory."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One storage.

    Attributes
    ----------
    octets : torch.Tensor
        All of its bytes: uint8, shape (nbytes,), not a copy.
    """

    index: int
    octets: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.octets.numel()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a view lies.

    Attributes
    ----------
    region : int
        The index of its region.
    geometry : Geometry
        Its bytes; if it meets itself, all from its first to its last.
    meets_itself : bool
        Whether one byte is several of its elements.
    """

    region: int
    geometry: Geometry
    meets_itself: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A parameter or buffer as it was found; `alias` keeps its storage."""

    owner: torch.nn.Module
    kind: str
    key: str
    name: str
    tensor: torch.Tensor
    alias: torch.Tensor
    geometry: tuple[object, ...]


def _shape_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        str(tensor.device), tensor.dtype, tensor.data_ptr(), tuple(tensor.size()), tuple(tensor.stride())
    )  # fmt: skip


class ModuleMemory:
    """The storages of a module's parameters and buffers.

    Parameters
    ----------
    module : torch.nn.Module

    Raises
    ------
    InvalidInputError
        If a parameter or buffer has no plain storage.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._held = [self._hold(*found) for found in _tensors(module)]
        storages: dict[tuple[str, int], tuple[torch.UntypedStorage, torch.device]] = {}
        for held in self._held:
            storage = held.alias.untyped_storage()
            if storage.nbytes():
                storages.setdefault((str(held.alias.device), storage.data_ptr()), (storage, held.alias.device))
        self.regions: list[Region] = []
        self._starts: dict[str, list[int]] = {}
        self._indices: dict[str, list[int]] = {}
        for (device, start), (storage, where) in sorted(storages.items(), key=lambda item: item[0]):
            starts = self._starts.setdefault(device, [])
            if starts and starts[-1] + self.regions[-1].nbytes > start:
                raise InvalidInputError(
                    "two storages of the module overlap in memory; give views of one storage",
                    key=self.label(self.regions[-1].index, start - starts[-1]),
                )
            octets = torch.empty(0, dtype=torch.uint8, device=where).set_(storage)
            self._indices.setdefault(device, []).append(len(self.regions))
            starts.append(start)
            self.regions.append(Region(len(self.regions), octets))

    @staticmethod
    def _hold(owner: torch.nn.Module, kind: str, key: str, name: str, tensor: torch.Tensor) -> _Held:
        found = (
            ("has no data yet; load the engine's weights first", "a meta tensor")
            if tensor.is_meta
            else ("is not strided; load it densely", str(tensor.layout))
            if tensor.layout != torch.strided
            else ("has no storage of its own; load it without that wrapper", type(tensor).__name__)
            if hasattr(tensor, "__tensor_flatten__")
            else None
        )
        if found:
            raise InvalidInputError(found[0], key=name, expected="a plain tensor of torch", found=found[1])
        return _Held(owner, kind, key, name, tensor, tensor.detach(), _shape_of(tensor))

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Return where a plain tensor lies in the module; None if elsewhere, or if it has no elements."""
        starts = self._starts.get(str(tensor.device))
        if not starts or tensor.layout != torch.strided or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        at = bisect_right(starts, address) - 1
        if at < 0:
            return None
        region = self.regions[self._indices[str(tensor.device)][at]]
        if address >= starts[at] + region.nbytes:
            return None
        first, sizes, strides = address - starts[at], tuple(tensor.size()), tuple(tensor.stride())
        found = geometry(first, tensor.itemsize, sizes, strides)
        if found is None:
            n_span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
            return Place(region.index, Geometry(first, ((n_span * tensor.itemsize, 1),)), meets_itself=True)
        return Place(region.index, found)

    def label(self, region: int, offset: int) -> str:
        """Return the name of the parameter or buffer that a byte of a region belongs to."""
        names = [
            held.name
            for held in self._held
            if (place := self.place(held.alias)) is not None
            and place.region == region
            and place.geometry.start <= offset < place.geometry.stop
        ]
        return names[0] if names else f"bytes of no parameter in storage {region}"

    def changed(self) -> list[str]:
        """Return the parameters and buffers that are other tensors, or in other memory, than they were."""
        names = []
        for held in self._held:
            now = getattr(held.owner, held.kind).get(held.key)
            if now is not held.tensor or _shape_of(now) != held.geometry:
                names.append(held.name)
        return names

    def restore(self) -> None:
        """Give the module back the tensors and storages that it had."""
        for held in self._held:
            getattr(held.owner, held.kind)[held.key] = held.tensor
            if _shape_of(held.tensor) != held.geometry:
                held.tensor.data = held.alias


def _tensors(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str, str, torch.Tensor]]:
    for path, owner in module.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(owner, kind).items():
                if tensor is not None:
                    yield owner, kind, key, f"{path}.{key}" if path else key, tensor
