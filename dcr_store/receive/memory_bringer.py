"""Bring live tensors to a version: a mapping of names to tensors, or a module, in place.

Memory has no marker that outlives the process, so a new bringer tells by digests what the tensors hold; after that it
remembers what it brought. A bring that failed or was interrupted leaves each chunk old or new; the next one tells them
apart by their digests and heals. Refuses tensors that are not the version's before it writes any.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcr_store import events
from dcr_store.errors import DcrError, IntegrityError, InvalidInputError
from dcr_store.format.documents import SPACES
from dcr_store.layout.tensors import memory_key
from dcr_store.payload.version import Table, root_of
from dcr_store.receive.pull import PullResult
from dcr_store.targets.state_dict import StateDictTarget, state_target, tensors_of
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept
from dcr_store.versions.path import Path
from dcr_store.versions.prefetch import Fetch
from dcr_store.versions.replay import Outcome, classify, digests, replay
from dcr_store.versions.route import Route, route


@dataclass(frozen=True, slots=True)
class _Memory:
    """Which tensors there were, where, and how often torch had changed them.

    References are weak, since the owner may let go of tensors.
    """

    tensors: Mapping[str, tuple[weakref.ref[object], Hashable]]

    @classmethod
    def of(cls, tensors: Mapping[str, object]) -> _Memory:
        return cls({name: (weakref.ref(tensor), _condition(tensor)) for name, tensor in tensors.items()})

    def is_that_of(self, tensors: Mapping[str, object]) -> bool:
        """Whether these are the same tensors in the same places, and nobody changed them through torch."""
        return self.tensors.keys() == tensors.keys() and all(
            reference() is tensors[name] and condition == _condition(tensors[name])
            for name, (reference, condition) in self.tensors.items()
        )


def _condition(tensor: object) -> Hashable:
    counts = not isinstance(tensor, np.ndarray) and not tensor.is_inference()  # type: ignore[attr-defined]
    return memory_key(tensor), tensor._version if counts else None  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Known:
    """What a bringer knows of its tensors: the version that they hold, None if it is none of the store's."""

    store_id: str
    located: Located | None
    memory: _Memory


class StateDictBringer:
    """Keeps live tensors at a version; satisfies ``receive.bringing.Bringer``. Used by one thread at a time.

    Parameters
    ----------
    state : mapping of str to ndarray or torch.Tensor, or torch.nn.Module
        Changed in place. Whoever else changes the tensors calls `forget`, and does so, like everybody who reads them,
        only while nothing is being brought.

    Raises
    ------
    InvalidInputError
        If `state` is neither.
    """

    is_atomic = False
    spool_directory = None

    def __init__(self, state: object) -> None:
        tensors_of(state)
        self._state = state
        self._known: _Known | None = None
        self._tried: dict[str, Located] = {}  # versions that an unfinished bring may have left

    def __repr__(self) -> str:
        return f"StateDictBringer({type(self._state).__name__})"

    def held(self, catalog: Catalog) -> Located | None:
        """Return the version that was brought last; else the one that the tensors' digests are those of, or None."""
        known = self._recall(catalog)
        if known is None:
            known = _Known(catalog.document.store_id, self._identify(catalog), _Memory.of(tensors_of(self._state)))
            self._known = known
        return known.located

    def ready(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> None:
        """Do nothing: chunks are read and written one by one."""

    def bring(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> Outcome:
        """Bring the tensors to `goal`; errors are those of ``load``."""
        return self._bring(catalog, goal, fetcher)[0]

    def forget(self) -> None:
        """Take nothing for granted any more: the tensors may have been changed by others."""
        self._known = None

    def close(self) -> None:
        """Let go of what is known; the tensors stay as they are."""
        self.forget()

    def load(self, catalog: Catalog, goal: Located) -> PullResult:
        """Bring the tensors to `goal` and tell what was done.

        Raises
        ------
        InvalidInputError
            If they are not exactly the version's tensors; nothing was written.
        IntegrityError
            If the store is damaged; names the key. Each chunk is then old or new, and another call heals.
        """
        started = time.perf_counter()
        outcome, previous = self._bring(catalog, goal, None)
        return PullResult(
            goal.name,
            goal.row.root,
            None if previous is None else previous.name,
            outcome.nbytes_fetched,
            outcome.chunks_written,
            outcome.chunks_healed,
            round(time.perf_counter() - started, 6),
        )

    def _bring(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> tuple[Outcome, Located | None]:
        return while_kept(catalog, [goal], lambda: self._bring_on(catalog, goal, fetcher))

    def _bring_on(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> tuple[Outcome, Located | None]:
        target = state_target(self._state, catalog.layout(goal.row.layout), catalog.document.chunk_elements)
        known = self._recall(catalog)
        previous = None if known is None else known.located
        # Interrupted from here on, the next call knows only which versions the chunks may be of.
        self._known = None
        self._tried.update({item.name: item for item in (previous, goal) if item is not None})
        events.reached("memory.begun", goal.name)
        try:
            outcome = None
            if previous is not None and previous.row.layout == goal.row.layout:
                outcome = _go_on(catalog, goal, previous, target, fetcher)
            if outcome is not None and outcome.chunks_healed:
                # Where a chunk was not what it should have been, those that were not looked at may not be either.
                events.reached("memory.distrusted", f"{outcome.chunks_healed} chunks")
                rest, _ = _heal(catalog, goal, list(self._tried.values()), target, fetcher)
                outcome, previous = _sum(outcome, rest), None
            if outcome is None:
                outcome, previous = _heal(catalog, goal, list(self._tried.values()), target, fetcher)
        finally:
            target.settle()
        events.reached("memory.applied", goal.name)
        self._known = _Known(catalog.document.store_id, goal, _Memory.of(tensors_of(self._state)))
        self._tried.clear()
        return outcome, previous

    def _recall(self, catalog: Catalog) -> _Known | None:
        """Return what is known of the tensors, if they are still the same and the store still has their version."""
        known = self._known
        if known is None or known.store_id != catalog.document.store_id:
            return None
        if not known.memory.is_that_of(tensors_of(self._state)):
            return None
        if known.located is None:
            return known
        located = catalog.find(known.located.name, known.located.row.root)
        return None if located is None else _Known(known.store_id, located, known.memory)

    def _identify(self, catalog: Catalog) -> Located | None:
        roots: dict[str, Located] = {}
        for located in catalog.find_root(""):
            roots.setdefault(located.row.root, located)
        chunk_elements = catalog.document.chunk_elements
        for sha256 in sorted({located.row.layout for located in roots.values()}):
            layout = catalog.layout(sha256)
            try:
                target = state_target(self._state, layout, chunk_elements)
            except InvalidInputError:
                continue
            n_chunks = {space: layout.n_chunks(space, chunk_elements) for space in SPACES}
            found = roots.get(root_of(layout, digests(target, n_chunks, chunk_elements), chunk_elements))
            if found is not None:
                return found
        return None


def _go_on(
    catalog: Catalog, goal: Located, held: Located, target: StateDictTarget, fetcher: Fetch | None
) -> Outcome | None:
    """Apply what lies between; None if the tensors turn out not to hold what they should, or the way is damaged.

    Chunks that change are digested on the way; those that do not are not looked at.
    """
    try:
        way = route(catalog, goal, [held])
        if held.name not in way.places:
            return None
        tables = way.path.states[way.places[held.name]].tables
        places = classify(way.path, tables, way.between([held.name]))
        return replay(catalog.objects, way.path, target, places, fetcher=fetcher)
    except IntegrityError as error:
        events.reached("memory.distrusted", str(error))
        return None


def _sum(one: Outcome, other: Outcome) -> Outcome:
    return Outcome(
        one.nbytes_fetched + other.nbytes_fetched,
        one.chunks_written + other.chunks_written,
        one.chunks_healed + other.chunks_healed,
    )


def _heal(
    catalog: Catalog, goal: Located, tried: Sequence[Located], target: StateDictTarget, fetcher: Fetch | None
) -> tuple[Outcome, Located | None]:
    """Digest every chunk and bring it on from whatever version it is of, or rebuild it."""
    way = _way(catalog, goal, tried)
    path = way.path
    found = digests(target, path.all_chunks(), path.chunk_elements)
    readable = _readable(path)
    outcome = replay(catalog.objects, path, target, classify(path, found, readable), fetcher=fetcher)
    names = {index: name for name, index in way.places.items()}
    held = next((names[i] for i in [path.goal, *readable] if _is_state(path, i, found)), None)
    return outcome, None if held is None else catalog.resolve(held)


def _way(catalog: Catalog, goal: Located, tried: Sequence[Located]) -> Route:
    """Return the path to the goal, and on to newer versions that chunks may be of, where these can be read."""
    try:
        way = route(catalog, goal, tried)
        for index in range(way.path.goal, len(way.path.states)):
            _ = way.path.states[index]
    except DcrError:
        return route(catalog, goal)
    return way


def _readable(path: Path) -> list[int]:
    """Return the states of a path whose tables can be read, the nearest to the goal last."""
    order = sorted(range(len(path.states)), key=lambda index: -abs(index - path.goal))
    try:
        for _ in path.each(order):
            pass
    except IntegrityError:
        return [index for index in order if _can_read(path, index)]
    return order


def _can_read(path: Path, index: int) -> bool:
    try:
        _ = path.states[index]
    except IntegrityError:
        return False
    return True


def _is_state(path: Path, index: int, found: Mapping[str, Table]) -> bool:
    return all(np.array_equal(found[space], path.states[index].tables[space]) for space in SPACES)
