"""The run of a loader that writes: masks by XOR, values as they are, all as rehearsed; and the way back.

A copy that was not rehearsed is refused at once. What was written is kept in a short form (where, and the sparse
changes of the tensor), so that a run that fails is taken back by the same XOR again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dcr_store.targets.native import moves
from dcr_store.targets.native.blocks import Blocks, image_of
from dcr_store.targets.native.changes import Changes, as_integers, dense_of, guise_of
from dcr_store.targets.native.geometry import Geometry
from dcr_store.targets.native.load import Load, Names, Source
from dcr_store.targets.native.memory import ModuleMemory, Place, view_of
from dcr_store.targets.native.tensors import MaskTensor

if TYPE_CHECKING:
    from dcr_store.layout.entry import TensorEntry
    from dcr_store.targets.native.plan import Plan
    from dcr_store.targets.native.watch import Watch

Undo = Callable[[], None]


class Delivery(Load):
    """A run that writes.

    Parameters
    ----------
    plan : Plan
        What was rehearsed.
    blocks : Blocks
        Is told what changes.
    can_undo : bool
        Whether to keep what `undo` needs.
    """

    def __init__(
        self, memory: ModuleMemory, watch: Watch, device: torch.device, plan: Plan, blocks: Blocks, *, can_undo: bool
    ) -> None:
        super().__init__(memory, watch, device)
        self._plan = plan
        self._blocks = blocks
        self._can_undo = can_undo
        self._undo: list[Undo] = []
        self._sparse: dict[str, tuple[TensorEntry, Changes]] = {}

    def changed(self, name: str, entry: TensorEntry, changes: Changes | None) -> Any:
        """Return the mask for a tensor's changes; None for no changes."""
        if changes is None or len(changes.positions) == 0:
            return self.mask(name, entry, as_integers(guise_of(entry)))
        bits, present = dense_of(entry, changes, self.device)
        self._sparse[entry.name] = entry, changes
        return self.mask(name, entry, bits, present)

    def missing(self) -> Counter[tuple[Names, int, Geometry]]:
        """Return the copies that were rehearsed and did not happen."""
        return self._plan.counts - self.counts

    def undo(self) -> None:
        """Take back all that was written, the last first."""
        with self.watch.ours():
            while self._undo:
                self._undo.pop()()
        self._blocks.forget()

    # ------------------------------------------------------------------ masks

    def _cannot(self, names: Names, reason: str) -> None:
        self.refuse(names, reason)

    def _copy(self, target: torch.Tensor, mask: MaskTensor) -> None:
        found = self._written(target, mask)
        if found is None:
            return
        write, is_repeat = found
        if write.key not in self._plan.counts:
            self.refuse(mask.names, "is copied to where it was not copied in the rehearsal")
        if is_repeat or mask.bits.is_meta:
            return
        ints = view_of(target, mask.bits.dtype)
        bits = mask.bits.expand(target.size()).to(ints.device)
        if mask.present is None:
            ints.bitwise_xor_(bits)
            changes, source = bits, write.source
        else:
            present = mask.present.expand(target.size()).to(ints.device)
            changes = torch.where(present, bits ^ ints, bits)
            ints.bitwise_xor_(changes)
            source = None  # the mask of what is overwritten is known here alone
        if self._can_undo:
            self._remember(_Again(self, ints, source) if source is not None else _Sparse(ints, changes))
        self._blocks.add(write.region, write.geometry, image_of(changes, ints, write.geometry))

    def _remember(self, undo: Undo) -> None:
        with self._lock:
            self._undo.append(undo)

    def bits_at(self, source: Source) -> torch.Tensor:
        """Return the bits of a mask again that was a view of a tensor's."""
        root, offset, sizes, strides = source
        entry, changes = self._sparse[root]
        return dense_of(entry, changes, self.device)[0].as_strided(sizes, strides, offset)

    # ------------------------------------------------------------------ values

    def _may_write(self, func: Any, args: Sequence[Any], names: Names, places: list[Place]) -> bool:
        if func is moves.COPY and names and names <= self._plan.moved:
            self._copy_values(args[0], args[1], names, places[0])
            return False
        for place in places:
            if (place.region, place.geometry) not in self._plan.dense:
                self.refuse(names or frozenset([self._label(place)]), f"is written as it was not rehearsed ({func})")
            if self._can_undo:
                octets = self.memory.regions[place.region].octets
                self._remember(_Old(octets, place.geometry))
        return True

    def _label(self, place: Place) -> str:
        return self.memory.label(place.region, place.geometry.start)

    def _copy_values(self, target: torch.Tensor, value: Any, names: Names, place: Place) -> None:
        """Overwrite what the mask of the same tensor would change."""
        if (names, place.region, place.geometry) not in self._plan.counts:
            self.refuse(names, "is copied to where it was not copied in the rehearsal")
        with self._lock:
            self.counts[names, place.region, place.geometry] += 1
            where = (place.region, place.geometry)
            is_repeat = where in self._firsts
            self._firsts.setdefault(where, None)
        if self._can_undo:
            self._remember(_Old(self.memory.regions[place.region].octets, place.geometry))
        target.copy_(value.plain)
        if not is_repeat:
            ints = as_integers(value.plain).expand(target.size())
            image = image_of(ints, view_of(target, ints.dtype), place.geometry)
            self._blocks.add(place.region, place.geometry, image)


class _Again:
    """XORs what a view of a tensor's mask was XORed into, again."""

    def __init__(self, delivery: Delivery, ints: torch.Tensor, source: Source) -> None:
        self._delivery, self._ints, self._source = delivery, ints, source

    def __call__(self) -> None:
        self._ints.bitwise_xor_(self._delivery.bits_at(self._source).to(self._ints.device))


class _Sparse:
    """XORs changes again, of which only those that are none are kept."""

    def __init__(self, ints: torch.Tensor, changes: torch.Tensor) -> None:
        flat = changes.reshape(-1)
        self._ints, self._positions = ints, flat.nonzero().reshape(-1)
        self._values = flat[self._positions]

    def __call__(self) -> None:
        changes = torch.zeros(self._ints.numel(), dtype=self._ints.dtype, device=self._ints.device)
        changes[self._positions] = self._values
        self._ints.bitwise_xor_(changes.reshape(self._ints.size()))


class _Old:
    """Puts old bytes back."""

    def __init__(self, octets: torch.Tensor, place: Geometry) -> None:
        sizes, strides = zip(*place.dims, strict=True)
        self._view = octets.as_strided(sizes, strides, place.start)
        self._old = self._view.clone()

    def __call__(self) -> None:
        self._view.copy_(self._old)
