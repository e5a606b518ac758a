"""A live engine as a target: its own ``load_weights`` is given masks, and its copies of them become XOR.

Nothing is written before a rehearsal has shown what the loader does with every tensor. What it moves bit for bit takes
masks; for the rest it gets values, or it is refused. A run that fails is taken back. After each run every block of
memory that masks went into is checked by its digest, and what fails is loaded again as values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from dcr_store import events
from dcr_store.errors import DcrError, IntegrityError, InvalidInputError, StorageError
from dcr_store.targets.native.blocks import BLOCK_NBYTES, Block, Blocks, blocks_of
from dcr_store.targets.native.changes import Changes, Values, batched
from dcr_store.targets.native.delivery import Delivery
from dcr_store.targets.native.load import LoaderRefusedError
from dcr_store.targets.native.memory import ModuleMemory
from dcr_store.targets.native.plan import LoadWeights, Plan, drive, rehearse
from dcr_store.targets.native.watch import Watch

if TYPE_CHECKING:
    from dcr_store.layout.dtypes import Bits
    from dcr_store.layout.layout import Layout

    Item = tuple[str, Changes | Bits | None]

_N_SHOWN: Final = 5
_N_AHEAD: Final = 2
"""Tensors that are made ready while the loader works on the one before."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did.

    Attributes
    ----------
    n_masks, n_values : int
        Tensors that were changed by masks, and given as values.
    n_healed : int
        Blocks whose check failed and that were loaded again.
    """

    n_masks: int
    n_values: int
    n_healed: int = 0


class LoaderChangedError(IntegrityError):
    """A loader did something else than in its rehearsal; nothing of it stayed."""


class NativeLoaderTarget:
    """A live engine's weights, reached through its own loader.

    Parameters
    ----------
    load_weights : callable
        The engine's own: takes an iterable of (name, tensor) and copies into the parameters of `module`. It is also
        called to rehearse, without anything being written into parameters and buffers; what it does to other things
        (its own counters, say) it does then too.
    module : torch.nn.Module
        All whose parameters and buffers it fills.
    fallback : bool
        Whether tensors that the loader does not move bit for bit (it casts, scales, merges them, writes them twice) are
        given as values; if false, such a loader is refused by name. Their bits are kept in host memory.
    device : str or torch.device
        Where the tensors that the loader is given are.

    Attributes
    ----------
    n_loads : int
        Runs of the loader that were not taken back.

    Raises
    ------
    InvalidInputError
        If `module` has a parameter without storage of its own.
    """

    def __init__(
        self,
        load_weights: LoadWeights,
        module: torch.nn.Module,
        *,
        fallback: bool = True,
        device: str | torch.device = "cpu",
    ) -> None:
        if not callable(load_weights):
            raise InvalidInputError("is not callable", key="load_weights", found=type(load_weights).__name__)
        if not isinstance(module, torch.nn.Module):
            raise InvalidInputError("is no module", key="module", expected="Module", found=type(module).__name__)
        self._load_weights = load_weights
        self._module = module
        self._fallback = fallback
        self._device = torch.device(device)
        self._watch = Watch()
        self._memory: ModuleMemory = ModuleMemory(module)
        self._known: dict[str, str] = {}
        self._blocks: Blocks | None = None
        self._plan: Plan | None = None
        self._pool: Executor
        self.n_loads = 0

    @property
    def plan(self) -> Plan | None:
        """What the loader does with each tensor; None before the first rehearsal."""
        return self._plan

    def has_moved(self) -> bool:
        """Whether a parameter or buffer is another tensor, or elsewhere in memory, than when it was last loaded."""
        return bool(self._memory.changed())

    def rehearse(self, layout: Layout, values: Values, pool: Executor) -> Plan:
        """Learn what the loader does with the tensors of a layout; writes nothing.

        Parameters
        ----------
        values : callable
            Returns the bits of tensors by name, for those that masks cannot stand for.

        Raises
        ------
        InvalidInputError
            If the loader is refused; names the tensors and says why.
        """
        self._pool = pool
        self._plan = None  # a loader that is refused now must not be run by what it did before
        if self.has_moved():
            self._memory = ModuleMemory(self._module)
        self._plan = rehearse(
            self._load_weights, self._memory, self._watch, self._device, layout, values, self._known,
            fallback=self._fallback,
        )  # fmt: skip
        self._blocks = Blocks(self._memory.regions, ((region, place) for _, region, place in self._plan.writes), pool)
        return self._plan

    def load_whole(self, layout: Layout, weights: Iterable[tuple[str, Bits]], values: Values) -> Loaded:
        """Load all tensors as values, whatever the module holds. A failure leaves it in no known state.

        Parameters
        ----------
        weights : iterable of (str, ndarray)
            All names of the layout with their bits.
        values : callable
            Returns the same bits by name, for what has to be loaded again.

        Raises
        ------
        StorageError
            If the loader fails.
        """
        assert self._blocks is not None
        self._blocks.zero()
        loaded = self._run(layout, weights, can_undo=False)
        return self._healed(layout, loaded, values)

    def load(self, layout: Layout, items: Iterable[Item], values: Values) -> Loaded:
        """Change the module by masks.

        Parameters
        ----------
        items : iterable of (str, Changes, ndarray or None)
            All names of the layout: with changes, or None for none; with bits for the plan's fallbacks.
        values : callable
            Returns the new bits by name, for what has to be loaded again.

        Raises
        ------
        StorageError
            If the loader fails; the old bits are back.
        IntegrityError
            If the loader does something else than it did in the rehearsal; the old bits are back.
        """
        loaded = self._run(layout, items, can_undo=True)
        return self._healed(layout, loaded, values)

    def is_intact(self) -> bool:
        """Whether all that masks went into has the bits that it ought to have; reads it all."""
        return self._blocks is not None and not self._blocks.failing()

    # ------------------------------------------------------------------ one run of the loader

    def _run(self, layout: Layout, items: Iterable[Item], *, can_undo: bool) -> Loaded:
        assert self._plan is not None
        assert self._blocks is not None
        load = Delivery(self._memory, self._watch, self._device, self._plan, self._blocks, can_undo=can_undo)
        counts = [0, 0]
        events.reached("native.load.before", layout.sha256)
        try:
            try:
                drive(self._load_weights, load, self._given(load, layout, items, counts))
            except DcrError as error:
                if isinstance(error, LoaderRefusedError):
                    self._check(load)
                raise
            except Exception as error:
                self._check(load)
                raise StorageError(
                    f"the engine's loader failed: {error!r}; what it had written is taken back", key=load.last_given
                ) from error
            self._check(load, is_over=True)
            events.reached("native.load.written", layout.sha256)
        except BaseException:
            self._memory.restore()
            load.undo()
            events.reached("native.load.undone", layout.sha256)
            raise
        self._blocks.advance()
        self.n_loads += 1
        return Loaded(*counts)

    def _given(
        self, load: Delivery, layout: Layout, items: Iterable[Item], counts: list[int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._plan is not None
        ahead: deque[tuple[str, Future[torch.Tensor]]] = deque()
        for name, item in items:
            entry, skipped = layout.entry(name), name in self._plan.skipped
            if isinstance(item, np.ndarray) and not skipped:
                counts[1] += 1
                ahead.append((name, self._pool.submit(load.values, name, entry, item)))
            else:
                changes = None if isinstance(item, np.ndarray) or skipped else item
                counts[0] += changes is not None
                ahead.append((name, self._pool.submit(load.changed, name, entry, changes)))
            if len(ahead) > _N_AHEAD:
                yield _oldest(ahead)
        while ahead:
            yield _oldest(ahead)

    def _check(self, load: Delivery, *, is_over: bool = False) -> None:
        """Hold the loader to its rehearsal."""
        changed, missing = self._memory.changed(), load.missing() if is_over else None
        if changed:
            key, problem = ", ".join(changed[:_N_SHOWN]), "is replaced by the loader, which filled it"
        elif load.problems:
            key, problem = next(iter(load.problems.items()))
        elif missing:
            names, region, place = next(iter(missing))
            key = ", ".join(sorted(names))
            problem = f"is not copied into {self._memory.label(region, place.start)}, where it was copied"
        else:
            return
        raise LoaderChangedError(f"{problem} in the rehearsal; what was written is taken back", key=key)

    # ------------------------------------------------------------------ check and heal

    def _healed(self, layout: Layout, loaded: Loaded, values: Values) -> Loaded:
        """Check the memory, and load again what is not as it ought to be."""
        assert self._blocks is not None
        assert self._plan is not None
        failing = self._blocks.failing()
        if not failing:
            return loaded
        events.reached("native.blocks.failing", str(len(failing)))
        wanted = self._names_in(failing) | set(self._plan.fallbacks)
        self._blocks.zero(failing)
        self._run(layout, batched(layout, wanted, values), can_undo=False)
        still = self._blocks.failing(failing)
        if still:
            self._learn(still, layout, values)
        return Loaded(loaded.n_masks, loaded.n_values, len(failing))

    def _names_in(self, blocks: Iterable[Block]) -> set[str]:
        """Return the names of which masks are moved into blocks, and all that the loader joins with them."""
        assert self._plan is not None
        wanted, names, n_names = set(blocks), set[str](), -1
        for group, region, place in self._plan.writes:
            if any((region, block) in wanted for block in blocks_of(place)):
                names |= group
        while len(names) > n_names:
            n_names = len(names)
            names.update(*(group for group, *_ in self._plan.writes if not names.isdisjoint(group)))
        return names

    def _learn(self, blocks: list[Block], layout: Layout, values: Values) -> None:
        """Give tensors as values from now on whose bytes do not stay what was written, although nothing was seen."""
        assert self._blocks is not None
        names = sorted(self._names_in(blocks))
        where = self._memory.label(blocks[0].region, blocks[0].block * BLOCK_NBYTES)
        reason = f"does not stay in {where} as it was copied, and what changes it there could not be seen"
        if not self._fallback:
            raise InvalidInputError(f"{reason}; allow the fallback to give it values", key=", ".join(names[:_N_SHOWN]))
        self._known |= dict.fromkeys(names, reason)
        plan = self.rehearse(layout, values, self._pool)
        # What cannot be seen may have happened in the rehearsal too.
        self._run(layout, batched(layout, plan.fallbacks, values), can_undo=False)
        self._blocks.take()


def _oldest(ahead: deque[tuple[str, Future[torch.Tensor]]]) -> tuple[str, torch.Tensor]:
    name, task = ahead.popleft()
    tensor = task.result()
    events.reached("native.tensor.given", name)
    return name, tensor
