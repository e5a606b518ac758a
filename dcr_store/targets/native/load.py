"""One run of a loader: every operator on a followed tensor, and every write into the module's memory, is judged here.

``Load`` knows the operators; ``Rehearsal`` writes nothing and notes what a loader does; ``Delivery`` writes, holds the
loader to what was noted, and can take everything back. Masks may be moved, joined with masks, and copied into the
module's memory; whatever else is done to one is a problem of the tensors that it was made of.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dcr_store.errors import InvalidInputError
from dcr_store.targets.native import moves
from dcr_store.targets.native.changes import as_integers, guise_of, values_of
from dcr_store.targets.native.geometry import Geometry
from dcr_store.targets.native.memory import ModuleMemory, Place
from dcr_store.targets.native.tensors import MaskTensor, ValueTensor

if TYPE_CHECKING:
    from dcr_store.layout.dtypes import Bits
    from dcr_store.layout.entry import TensorEntry
    from dcr_store.targets.native.watch import Watch

Names = frozenset[str]
Source = tuple[str, int, tuple[int, ...], tuple[int, ...]]


class LoaderRefusedError(InvalidInputError):
    """A loader does with a mask what cannot be done with one; raised inside of the loader."""


@dataclass(frozen=True, slots=True)
class Write:
    """A copy of a mask into the module's memory.

    Attributes
    ----------
    names : frozenset of str
        What the mask was made of.
    source : tuple or None
        The layout's tensor, offset, sizes and strides that it is a view of; None if it is a copy.
    """

    names: Names
    region: int
    geometry: Geometry
    source: Source | None

    @property
    def key(self) -> tuple[Names, int, Geometry]:
        """What a later run of the loader has to repeat."""
        return self.names, self.region, self.geometry


class Load(ABC):
    """What rehearsal and delivery have in common: the rules for operators.

    Parameters
    ----------
    memory : ModuleMemory
    watch : Watch
    device : torch.device
        Where the loader is told that its tensors are.
    """

    def __init__(self, memory: ModuleMemory, watch: Watch, device: torch.device) -> None:
        self.memory = memory
        self.watch = watch
        self.device = device
        self.problems: dict[str, str] = {}
        self.counts: Counter[tuple[Names, int, Geometry]] = Counter()
        self.last_given: str | None = None
        self._made: weakref.WeakSet[MaskTensor] = weakref.WeakSet()
        self._firsts: dict[tuple[int, Geometry], Source | None] = {}
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._n_running = 0
        self._is_closed = False

    # ------------------------------------------------------------------ making what the loader gets

    def mask(self, name: str, entry: TensorEntry, bits: torch.Tensor, present: torch.Tensor | None = None) -> Any:
        """Return the mask of a tensor; `bits` are meta where nothing changes."""
        return self._mask(bits, present, guise_of(entry).dtype, self.device, frozenset([name]), entry.name)

    def values(self, name: str, entry: TensorEntry, bits: Bits) -> torch.Tensor:
        """Return the values of a tensor."""
        return ValueTensor(values_of(entry, bits).to(self.device), frozenset([name]), self)

    def _mask(
        self,
        bits: torch.Tensor,
        present: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        names: Names,
        root: str | None,
    ) -> MaskTensor:
        with torch.inference_mode(False):  # so that a mask may pass between threads that are in that mode or not
            mask = MaskTensor(bits, present, dtype, device, names, root, self)
        with self._lock:
            self._made.add(mask)
        return mask

    def kept(self) -> set[str]:
        """Return the names of masks that somebody still has."""
        with self._lock:
            return {name for mask in self._made for name in mask.names}

    # ------------------------------------------------------------------ begin and end

    def note_thread(self) -> None:
        """Watch the thread in which a followed tensor is touched."""
        if not self._is_closed:
            self.watch.enter_thread()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise LoaderRefusedError("a mask is used after its load is over; a loader must not keep tensors")
            self._n_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_running -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Let no mask be written any more, and wait for those that are being written."""
        with self._lock:
            self._is_closed = True
            while self._n_running:
                self._idle.wait()

    # ------------------------------------------------------------------ problems

    def _note(self, names: Names, reason: str) -> None:
        with self._lock:
            for name in names:
                self.problems.setdefault(name, reason)

    def refuse(self, names: Names, reason: str) -> NoReturn:
        """Note a problem, and leave the loader."""
        self._note(names, reason)
        raise LoaderRefusedError(f"{reason}; a mask cannot stand for it", key=", ".join(sorted(names)))

    # ------------------------------------------------------------------ operators

    def operate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do what an operator with followed operands does; after the end of this load, in the one in progress."""
        load = self.watch.load if self._is_closed and self.watch.load is not None else self
        return load._operate(func, args, kwargs)

    def _operate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.note_thread()
        operands = list(moves.tensors([args, kwargs]))
        followed = [operand for operand in operands if isinstance(operand, MaskTensor | ValueTensor)]
        names = frozenset(name for operand in followed for name in operand.names)
        if func in moves.COPIES:
            for target, source in zip(args[0], args[1], strict=True):
                target.copy_(source)
            return None
        with self.watch.ours():
            if any(isinstance(operand, MaskTensor) for operand in followed):
                with self._running():
                    if any(isinstance(operand, MaskTensor) and operand.load is not self for operand in followed):
                        return self._compute(func, args, kwargs, names, "is kept by the loader for a later load")
                    return self._on_mask(func, args, kwargs, names)
            return self._on_values(func, args, kwargs, names)

    def _on_mask(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Names) -> Any:
        if func in moves.PINNED:
            return False
        first = args[0]
        if func is moves.COPY and not isinstance(first, MaskTensor | ValueTensor):
            self._copy(first, args[1])
            return first
        if func in moves.JOINS and all(isinstance(m, MaskTensor) and m.dtype == first[0].dtype for m in first):
            return self._join(func, args, kwargs, names)
        if isinstance(first, MaskTensor) and not any(
            isinstance(operand, MaskTensor | ValueTensor) for operand in moves.tensors([args[1:], kwargs])
        ):
            if func in moves.MAKES:
                guise = torch.empty_strided(first.size(), first.stride(), dtype=first.dtype, device="meta")
                return func(guise, *args[1:], **{**kwargs, "device": kwargs.get("device") or first.device})
            if func is moves.CAST and kwargs.get("dtype") in (None, first.dtype):
                return self._moved_to(first, kwargs)
            if func is moves.REINTERPRET and args[1].itemsize == first.dtype.itemsize:
                return self._mask(first.bits, first.present, args[1], first.device, names, first.root)
            if func in moves.MOVES:
                return self._move(func, first, args[1:], kwargs)
        # In inference mode operators arrive here before torch has taken them apart.
        parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func is moves.CAST:
            return self._compute(func, args, kwargs, names, f"is cast from {first.dtype} to {kwargs.get('dtype')}")
        return self._compute(func, args, kwargs, names, f"is computed with ({func})")

    def _move(self, func: Any, mask: MaskTensor, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func.overloadpacket is torch.ops.aten.constant_pad_nd:
            rest, kwargs = (rest[0], 0), {}  # a constant does not change
        try:
            bits = func(mask.bits, *rest, **kwargs)
            present = None if mask.present is None else func(mask.present, *rest, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not mask.bits.is_meta:
                raise
            self._note(mask.names, f"is moved in a way that depends on values ({func}: {error})")
            raise
        if isinstance(bits, torch.Tensor):
            return self._derived(mask, bits, present)
        parts = [None] * len(bits) if present is None else present
        return type(bits)(self._derived(mask, part, p) for part, p in zip(bits, parts, strict=True))

    def _derived(self, mask: MaskTensor, bits: torch.Tensor, present: torch.Tensor | None) -> MaskTensor:
        is_view = bits.untyped_storage()._cdata == mask.bits.untyped_storage()._cdata
        return self._mask(bits, present, mask.dtype, mask.device, mask.names, mask.root if is_view else None)

    def _moved_to(self, mask: MaskTensor, kwargs: Mapping[str, Any]) -> MaskTensor:
        device = torch.device(kwargs.get("device") or mask.device)
        order = kwargs.get("memory_format") or torch.preserve_format

        def moved(part: torch.Tensor) -> torch.Tensor:
            return part.clone(memory_format=order).to("meta" if part.is_meta else device)

        present = None if mask.present is None else moved(mask.present)
        return self._mask(moved(mask.bits), present, mask.dtype, device, mask.names, None)

    def _join(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Names) -> MaskTensor:
        masks: list[MaskTensor] = list(args[0])
        bits, present = [mask.bits for mask in masks], None
        if not all(part.is_meta for part in bits):
            bits = [torch.zeros(b.size(), dtype=b.dtype, device=m.device) if b.is_meta else b
                    for b, m in zip(bits, masks, strict=True)]  # fmt: skip
            if any(mask.present is not None for mask in masks):
                parts = [torch.zeros(b.size(), dtype=torch.bool, device=b.device) if m.present is None else m.present
                         for b, m in zip(bits, masks, strict=True)]  # fmt: skip
                present = func(parts, *args[1:], **kwargs)
        return self._mask(
            func(bits, *args[1:], **kwargs), present, masks[0].dtype, masks[0].device, names, None
        )  # fmt: skip

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Names, reason: str) -> Any:
        """Note what masks cannot do, and, where nothing is written, go on with the shape of its result."""
        self._cannot(names, reason)
        targets = moves.written(func, args, kwargs)
        plain = [target for target in targets if not isinstance(target, MaskTensor | ValueTensor)]
        if plain:
            self._judge(func, args, names, plain, lambda: None)
        try:
            shapes = {**moves.mapped(dict(kwargs), _shape), **({"device": "meta"} if "device" in kwargs else {})}
            result = func(*moves.mapped(list(args), _shape), **shapes)
        except Exception as error:
            raise LoaderRefusedError(f"{reason}; a mask cannot stand for it", key=", ".join(sorted(names))) from error
        if targets:
            return targets[0] if len(targets) == 1 else tuple(targets)
        return moves.mapped(result, lambda shape: self._shadow(shape, names))

    def _shadow(self, shape: torch.Tensor, names: Names) -> MaskTensor:
        bits = torch.empty_strided(shape.size(), shape.stride(), dtype=torch.uint8, device="meta")
        return self._mask(bits, None, shape.dtype, self.device, names, None)

    def _on_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Names) -> Any:
        def run() -> Any:
            return func(*moves.mapped(list(args), _plain), **moves.mapped(dict(kwargs), _plain))

        operands = moves.written(func, args, kwargs)
        targets = [operand for operand in operands if not isinstance(operand, ValueTensor)]
        result = self._judge(func, args, names, targets, run) if targets and not self._is_closed else run()
        if operands and result is not None:
            return operands[0] if len(operands) == 1 else tuple(operands)
        if func in moves.MAKES:
            return result
        return moves.mapped(result, lambda part: ValueTensor(part, names, self))

    def plain_write(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: list[torch.Tensor]
    ) -> Any:
        """Do what an operator does that writes and has no followed operand."""
        with self.watch.ours():
            return self._judge(func, args, frozenset(), targets, lambda: func(*args, **kwargs))

    def _judge(
        self, func: Any, args: Sequence[Any], names: Names, targets: list[torch.Tensor], run: Callable[[], Any]
    ) -> Any:
        """Run a write of values, if it may be, and return its result."""
        places = [place for target in targets if (place := self.memory.place(target)) is not None]
        if not places:
            return run()
        if not self._may_write(func, args, names, places):
            return targets[0] if len(targets) == 1 else tuple(targets)
        return run()

    # ------------------------------------------------------------------ masks into memory

    def _written(self, target: torch.Tensor, mask: MaskTensor) -> tuple[Write, bool] | None:
        """Return the write that copying a mask is, and whether these very bytes were written from it before."""
        if target.numel() == 0:
            return None
        place = self.memory.place(target)
        if place is None:
            self._cannot(mask.names, "is copied into memory that is no parameter or buffer of the module")
            return None
        if target.dtype != mask.dtype:
            self._cannot(mask.names, f"is cast from {mask.dtype} to {target.dtype} by its copy")
            return None
        bits = mask.bits.expand(target.size())
        if place.meets_itself or target.is_conj() or target.is_neg():
            self._cannot(mask.names, "is copied into memory that is several of its elements at once")
            return None
        source: Source | None = None
        if mask.root is not None:
            source = (mask.root, int(bits.storage_offset()), tuple(bits.size()), tuple(bits.stride()))
        write = Write(mask.names, place.region, place.geometry, source)
        with self._lock:
            self.counts[write.key] += 1
            where = (write.region, write.geometry)
            is_repeat = source is not None and self._firsts.get(where) == source
            self._firsts.setdefault(where, source)
        return write, is_repeat

    @abstractmethod
    def _cannot(self, names: Names, reason: str) -> None:
        """Note a problem; a delivery leaves the loader."""

    @abstractmethod
    def _copy(self, target: torch.Tensor, mask: MaskTensor) -> None:
        """Copy a mask into a plain tensor."""

    @abstractmethod
    def _may_write(self, func: Any, args: Sequence[Any], names: Names, places: list[Place]) -> bool:
        """Whether values (of `names`, or of no followed tensor) may be written into the module's memory."""


class Rehearsal(Load):
    """A run in which nothing is written.

    Attributes
    ----------
    writes : list of Write
        The copies of masks.
    dense : dict
        Region and geometry of all other writes into the module's memory → the names of the values, or the operator.
    """

    def __init__(self, memory: ModuleMemory, watch: Watch, device: torch.device) -> None:
        super().__init__(memory, watch, device)
        self.writes: list[Write] = []
        self.dense: dict[tuple[int, Geometry], tuple[Names, str]] = {}

    def silent(self, name: str, entry: TensorEntry) -> Any:
        """Return a mask without bits."""
        return self.mask(name, entry, as_integers(guise_of(entry)))

    def _cannot(self, names: Names, reason: str) -> None:
        self._note(names, reason)

    def _copy(self, target: torch.Tensor, mask: MaskTensor) -> None:
        found = self._written(target, mask)
        if found is not None and not found[1]:
            with self._lock:
                self.writes.append(found[0])

    def _may_write(self, func: Any, args: Sequence[Any], names: Names, places: list[Place]) -> bool:
        with self._lock:
            for place in places:
                self.dense.setdefault((place.region, place.geometry), (names, str(func)))
        return False


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same guise."""
    if isinstance(tensor, ValueTensor):
        tensor = tensor.plain
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain if isinstance(tensor, ValueTensor) else tensor
