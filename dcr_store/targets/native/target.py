"""A live engine as a target: its own ``load_weights`` is given masks, and its copies of them become XOR.

Nothing is written before a rehearsal has shown what the loader does with every tensor. What it moves bit for bit takes
masks; for the rest it gets values, or it is refused. A run that fails is taken back. After each run every block of
memory that masks went into is checked by its digest, and what fails is loaded again as values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcr_store import events
from dcr_store.errors import DcrError, IntegrityError, InvalidInputError, StorageError

if TYPE_CHECKING:
    import torch

    from dcr_store.layout.dtypes import Bits
    from dcr_store.layout.layout import Layout
    from dcr_store.targets.native.blocks import Block, Blocks
    from dcr_store.targets.native.changes import Changes
    from dcr_store.targets.native.delivery import Delivery
    from dcr_store.targets.native.memory import ModuleMemory
    from dcr_store.targets.native.plan import LoadWeights, Plan, Values

    Item = tuple[str, "Changes | Bits | None"]

_N_SHOWN = 5


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
        import torch

        from dcr_store.targets.native.memory import ModuleMemory
        from dcr_store.targets.native.watch import Watch

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
        from dcr_store.targets.native.blocks import Blocks
        from dcr_store.targets.native.memory import ModuleMemory
        from dcr_store.targets.native.plan import rehearse

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
        self._blocks.expect_nothing()
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
        from dcr_store.targets.native.delivery import Delivery
        from dcr_store.targets.native.plan import drive

        assert self._plan is not None
        assert self._blocks is not None
        load = Delivery(self._memory, self._watch, self._device, self._plan, self._blocks, can_undo=can_undo)
        counts = [0, 0]
        events.reached("native.load.before", layout.sha256)
        try:
            try:
                drive(self._load_weights, load, self._given(load, layout, items, counts))
            except DcrError:
                raise
            except Exception as error:
                if not load.problems:
                    raise StorageError(
                        f"the engine's loader failed: {error!r}; what it had written is taken back",
                        key=load.last_given,
                    ) from error
            self._check(load)
            events.reached("native.load.written", layout.sha256)
        except BaseException:
            self._memory.restore()
            load.undo()
            raise
        self._blocks.advance()
        return Loaded(*counts)

    def _given(
        self, load: Delivery, layout: Layout, items: Iterable[Item], counts: list[int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        import numpy as np

        assert self._plan is not None
        for name, item in items:
            entry = layout.entry(name)
            if isinstance(item, np.ndarray) and name not in self._plan.skipped:
                counts[1] += 1
                yield name, load.values(name, entry, item)
            else:
                changes: Any = None if isinstance(item, np.ndarray) or name in self._plan.skipped else item
                counts[0] += changes is not None
                yield name, load.changed(name, entry, changes)
            events.reached("native.tensor.given", name)

    def _check(self, load: Delivery) -> None:
        """Hold the loader to its rehearsal."""
        changed = self._memory.changed()
        if changed:
            raise IntegrityError(
                "the loader replaced parameters that it filled in the rehearsal; what it had written is taken back",
                key=", ".join(changed[:_N_SHOWN]),
            )
        if load.problems:
            name, reason = next(iter(load.problems.items()))
            raise IntegrityError(
                f"{reason}, unlike in the rehearsal; what was written is taken back", key=name
            )  # fmt: skip
        missing = load.missing()
        if missing:
            names, region, place = next(iter(missing))
            raise IntegrityError(
                f"was not copied into {self._memory.label(region, place.start)} as in the rehearsal; what was written "
                "is taken back",
                key=", ".join(sorted(names)),
            )

    # ------------------------------------------------------------------ check and heal

    def _healed(self, layout: Layout, loaded: Loaded, values: Values) -> Loaded:
        """Check the memory, and load again what is not as it ought to be."""
        assert self._blocks is not None
        assert self._plan is not None
        failing = self._blocks.failing()
        if not failing:
            return loaded
        events.reached("native.blocks.failing", str(len(failing)))
        bits = values(self._names_in(failing))
        items: Callable[[], Iterable[Item]] = lambda: ((name, bits.get(name)) for name in layout.names())  # noqa: E731
        fallbacks = self._plan.fallbacks
        missing = [name for name in fallbacks if name not in bits]
        bits = {**bits, **(values(missing) if missing else {})}
        self._blocks.zero(failing)
        self._run(layout, items(), can_undo=False)
        still = self._blocks.failing(failing)
        if still:
            self._learn(still, layout, values)
        return Loaded(loaded.n_masks, loaded.n_values, loaded.n_healed + len(failing))

    def _names_in(self, blocks: Iterable[Block]) -> list[str]:
        """Return the names of which masks are moved into blocks."""
        assert self._plan is not None
        assert self._blocks is not None
        wanted = set(blocks)
        names: dict[str, None] = {}
        for group, region, place in sorted(self._plan.writes, key=lambda write: (write[1], write[2].start)):
            if any((region, index) in wanted for index in self._blocks.of(region, place)):
                names.update(dict.fromkeys(sorted(group)))
        return list(names)

    def _learn(self, blocks: list[Block], layout: Layout, values: Values) -> None:
        """Give tensors as values from now on whose bytes do not stay what was written, although nothing was seen."""
        assert self._blocks is not None
        names = self._names_in(blocks)
        where = self._memory.label(blocks[0].region, blocks[0].index << 20)
        reason = f"does not stay in {where} as it was copied, and what changes it was not seen"
        if not self._fallback:
            raise InvalidInputError(
                f"{reason}: the loader changes it in a thread of its own; allow the fallback to give it values",
                key=", ".join(names[:_N_SHOWN]),
            )
        self._known |= dict.fromkeys(names, reason)
        pool = self._blocks._pool
        self.rehearse(layout, values, pool)
        self._blocks.take()


def chosen(bits: Mapping[str, Bits], names: Iterable[str]) -> dict[str, Bits]:
    """Return the bits of some names."""
    return {name: bits[name] for name in names}
