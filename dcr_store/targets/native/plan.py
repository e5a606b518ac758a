"""What a loader does with each tensor of a checkpoint, learned by running it without writing anything.

Run again and again, each time with values in place of the masks that it does something else with than move them, until
it moves the rest bit for bit, each byte once. Refuses loaders that fail, and those that replace parameters.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from dcr_store.errors import DcrError, InvalidInputError
from dcr_store.targets.native.changes import Values, named, no_guise
from dcr_store.targets.native.geometry import Geometry, meetings
from dcr_store.targets.native.load import Names, Rehearsal

if TYPE_CHECKING:
    from dcr_store.layout.dtypes import Bits
    from dcr_store.layout.layout import Layout
    from dcr_store.targets.native.memory import ModuleMemory
    from dcr_store.targets.native.watch import Watch

LoadWeights = Callable[[Iterator[tuple[str, torch.Tensor]]], object]
_N_SHOWN: Final = 5
_N_FAILURES: Final = 64


@dataclass(frozen=True)
class Plan:
    """How a loader takes the tensors of a layout.

    Attributes
    ----------
    moved : frozenset of str
        Names of tensors that are moved bit for bit: they are updated by masks.
    fallbacks : mapping of str to str
        Names that are given as values, and why.
    skipped : frozenset of str
        Names that the loader takes no notice of.
    """

    layout_sha256: str
    moved: frozenset[str]
    fallbacks: Mapping[str, str]
    skipped: frozenset[str]
    counts: Counter[tuple[Names, int, Geometry]]
    writes: frozenset[tuple[Names, int, Geometry]]
    dense: frozenset[tuple[int, Geometry]]


def drive(load_weights: LoadWeights, load: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Run a loader on `weights` under the eyes of `load`; its exceptions pass."""

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            load.last_given = name
            yield name, tensor
            del tensor  # so that nobody but the loader can have kept it

    iterator = given()
    try:
        with torch.no_grad(), load.watch.watching(load):
            load_weights(iterator)
    finally:
        iterator.close()  # type: ignore[attr-defined]
        load.close()


def rehearse(
    load_weights: LoadWeights,
    memory: ModuleMemory,
    watch: Watch,
    device: torch.device,
    layout: Layout,
    values: Values,
    known: Mapping[str, str],
    *,
    fallback: bool,
) -> Plan:
    """Return what a loader does; nothing is written.

    Parameters
    ----------
    values : callable
        For the tensors that masks cannot stand for.
    known : mapping of str to str
        Names that are to be given as values from the start, and why.
    fallback : bool
        Whether there may be any such name.

    Raises
    ------
    InvalidInputError
        If a name cannot be moved and `fallback` is false (all are named, with reasons), the loader fails with values
        too, or replaces a parameter's storage.
    """
    fallbacks = {name: reason for name, entry in named(layout) if (reason := no_guise(entry))} | dict(known)
    bits: dict[str, Bits] = {}
    n_failures = 0
    while True:
        missing = [name for name in fallbacks if name not in bits]
        if missing:
            bits.update(values(missing))
        load = Rehearsal(memory, watch, device)
        failure = _run(load_weights, load, layout, bits)
        _check_memory(memory)
        problems = {name: reason for name, reason in load.problems.items() if name not in fallbacks}
        if failure is not None and not problems:
            n_failures += 1
            last = load.last_given
            if last is None or last in fallbacks or n_failures > _N_FAILURES or isinstance(failure, DcrError):
                raise InvalidInputError(
                    f"the loader fails in a rehearsal, in which nothing is written: {failure!r}; see whether it loads "
                    "the same checkpoint from files",
                    key=last,
                ) from failure
            problems = {last: f"makes the loader fail when a mask stands for it ({failure!r})"}
        if failure is None:
            problems |= {name: "is kept by the loader" for name in load.kept() if name not in fallbacks}
            problems = {**_conflicts(load, fallbacks), **problems}
        if not problems and fallbacks and not fallback:
            raise _refused(fallbacks)
        if not problems:
            return _plan(layout, load, fallbacks)
        fallbacks |= problems


def _run(load_weights: LoadWeights, load: Rehearsal, layout: Layout, bits: Mapping[str, Bits]) -> Exception | None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, entry in named(layout):
            yield name, load.values(name, entry, bits[name]) if name in bits else load.silent(name, entry)

    failure: Exception | None = None
    try:
        drive(load_weights, load, weights())
    except Exception as error:
        failure = error
    gc.collect()  # so that only masks are left that somebody holds
    return failure


def _check_memory(memory: ModuleMemory) -> None:
    changed = memory.changed()
    if changed:
        memory.restore()
        raise InvalidInputError(
            "the loader replaces parameters instead of filling them, so that they cannot be updated in place; give the "
            "loader that the engine's first load uses",
            key=", ".join(changed[:_N_SHOWN]),
        )


def _conflicts(load: Rehearsal, fallbacks: Mapping[str, str]) -> dict[str, str]:
    """Return the names whose bytes are written by others too, or twice."""
    by_region: dict[int, list[tuple[Names, str, bool, Geometry]]] = {}
    for write in load.writes:
        by_region.setdefault(write.region, []).append(
            (write.names, " and ".join(sorted(write.names)), True, write.geometry)
        )
    for (region, place), (names, operator) in load.dense.items():
        by_region.setdefault(region, []).append(
            (names, " and ".join(sorted(names)) or f"the loader itself ({operator})", False, place)
        )
    problems: dict[str, str] = {}
    for region, found in by_region.items():
        for pair in sorted(meetings([place for *_, place in found])):
            for mine, other in (pair, pair[::-1]):
                names, _, is_mask, place = found[mine]
                if is_mask:
                    where = load.memory.label(region, place.start)
                    by = "twice" if found[other][0] == names else f"by {found[other][1]} too"
                    problems |= dict.fromkeys(names, f"is copied into {where}, of which bytes are written {by}")
    return {name: reason for name, reason in problems.items() if name not in fallbacks}


def _plan(layout: Layout, load: Rehearsal, fallbacks: Mapping[str, str]) -> Plan:
    writes = frozenset(write.key for write in load.writes)
    moved = frozenset(name for names, *_ in load.counts for name in names)
    return Plan(
        layout_sha256=layout.sha256,
        moved=moved,
        fallbacks=dict(fallbacks),
        skipped=frozenset(name for name in layout.names() if name not in moved and name not in fallbacks),
        counts=load.counts,
        writes=writes,
        dense=frozenset(load.dense),
    )


def _refused(fallbacks: Mapping[str, str]) -> InvalidInputError:
    shown = [f"{name} {reason}" for name, reason in list(fallbacks.items())[:_N_SHOWN]]
    more = len(fallbacks) - len(shown)
    return InvalidInputError(
        "the loader does not move these tensors bit for bit, so that masks cannot go through it: "
        + "; ".join(shown)
        + (f"; and {more} more" if more > 0 else "")
        + ". Nothing was written; allow the fallback to give it their values",
        key=next(iter(fallbacks)),
        expected="copies of all its bits",
        found=f"{len(fallbacks)} that are not copied so",
    )
