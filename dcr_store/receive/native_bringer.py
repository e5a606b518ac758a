"""Keeps a live engine at a version through its own loader: masks where it holds a version of the way, else all values.

All that a bring reads of the store is read and proven before the engine is touched, except where values have to be
loaded. Tensors that the loader does not move bit for bit are kept in host memory, so that their values need no history.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dcr_store.errors import IntegrityError, NotFoundError
from dcr_store.format.documents import SPACES
from dcr_store.payload.version import SealedPartition, VersionContents, fetch
from dcr_store.targets.memory import MemoryTarget
from dcr_store.targets.native.changes import Changes, batched, named
from dcr_store.targets.native.target import Loaded, LoaderChangedError, NativeLoaderTarget
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.changes import TensorChanges, iter_changes, require_consistent
from dcr_store.versions.prefetch import Fetch
from dcr_store.versions.replay import Outcome, only, replay
from dcr_store.versions.route import route
from dcr_store.versions.workers import worker_pool

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from dcr_store.layout.dtypes import Bits
    from dcr_store.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class _Held:
    store_sha256: str
    located: Located


@dataclass(frozen=True, slots=True)
class _Ready:
    """What was read ahead of a bring; no changes where none lead there."""

    way: tuple[str, str, str, str, str]
    reader: _Reader
    changes: Mapping[str, Changes] | None


class NativeBringer:
    """Keeps a live engine at a version; satisfies ``Bringer``.

    The engine is in flux during a bring only from the first tensor that its loader is given to the last, and then being
    checked; what the loader is given are masks of what changed between the two versions.

    Parameters
    ----------
    target : NativeLoaderTarget
        Nobody else may load weights into the engine. It must not compute with them during a bring.
    """

    is_atomic = False
    spool_directory = None

    def __init__(self, target: NativeLoaderTarget) -> None:
        self._target = target
        self._threads: Executor | None = None
        self._held: _Held | None = None
        self._kept: dict[str, Bits] = {}
        self._ready: _Ready | None = None

    def __repr__(self) -> str:
        return f"NativeBringer({self._target!r})"

    def held(self, catalog: Catalog) -> Located | None:
        """Return the version that the engine was brought to, None if none, of another store, or if memory moved."""
        held = self._held
        if held is None or held.store_sha256 != catalog.store_sha256 or self._target.has_moved():
            return None
        return held.located

    def ready(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> None:
        """Read all changes that lead to `goal` ahead, if it can be reached by masks; ``bring`` holds as many itself."""
        held = self.held(catalog)
        way = None if held is None else _way(catalog, held, goal)
        if self._ready is not None and self._ready.way == way:
            return
        self._ready = None
        if held is None or way is None:
            return
        edges = _edges(catalog, held, goal)
        reader = _Reader(catalog, goal, fetcher)
        # That nothing leads there is remembered too: a member asks again once its group has promoted the version.
        self._ready = _Ready(way, reader, None if edges is None else reader.changes(edges))

    def bring(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> Outcome:
        """Bring the engine to `goal`.

        Returns
        -------
        Outcome
            Chunks written are tensors that the loader was given with changes, chunks healed blocks of its memory.

        Raises
        ------
        InvalidInputError
            If the loader is refused; nothing was written.
        StorageError
            If the loader fails.
        IntegrityError
            If the store is damaged, or the loader does something else each time.
        """
        self.ready(catalog, goal, fetcher)
        ready, self._ready = self._ready, None
        reader, changes = (_Reader(catalog, goal, fetcher), None) if ready is None else (ready.reader, ready.changes)
        layout, plan = reader.layout, self._target.plan
        if self._threads is None or self._target.has_moved() or plan is None or plan.layout_sha256 != layout.sha256:
            self._held = changes = None
            self._target.rehearse(layout, reader.values, self._pool)
        try:
            loaded = self._load(reader, changes)
        except LoaderChangedError:
            # The engine may have changed since the rehearsal (experts may be placed anew), so nothing is known of it.
            self._held = None
            self._target.rehearse(layout, reader.values, self._pool)
            loaded = self._load(reader, None)
        self._held = _Held(catalog.store_sha256, goal)
        return Outcome(reader.nbytes_fetched, loaded.n_masks + loaded.n_values, loaded.n_healed)

    def close(self) -> None:
        """Let go of the engine, which keeps its weights; what is known of it is forgotten."""
        self._held, self._kept, self._ready = None, {}, None
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    @property
    def _pool(self) -> Executor:
        if self._threads is None:
            self._threads = worker_pool("dcr-native")
        return self._threads

    # ------------------------------------------------------------------ loading

    def _load(self, reader: _Reader, changes: Mapping[str, Changes] | None) -> Loaded:
        """Run the loader; what the engine holds is known afterwards, whatever happens."""
        before, kept = self._held, self._kept
        n_loads, plan = self._target.n_loads, self._target.plan
        assert plan is not None
        self._held, self._kept = None, {}
        try:
            if before is None or changes is None:
                loaded = self._target.load_whole(reader.layout, self._whole(reader), reader.values)
            else:
                values = self._advanced(reader, kept, changes)
                items = (
                    (name, values[entry.name] if name in plan.fallbacks else changes.get(entry.name))
                    for name, entry in named(reader.layout)
                )
                loaded = self._target.load(reader.layout, items, reader.values)
                self._kept = values
        except BaseException:
            # Only masks are taken back; a loader may have written what nobody saw besides, so the digests must agree.
            is_undone = before is not None and changes is not None and self._target.n_loads == n_loads
            if is_undone and self._target.is_intact():
                self._held, self._kept = before, kept
            raise
        return loaded

    def _whole(self, reader: _Reader) -> Iterator[tuple[str, Bits]]:
        assert self._target.plan is not None
        fallbacks = self._target.plan.fallbacks
        for name, bits in batched(reader.layout, set(reader.layout.names()), reader.values):
            assert bits is not None
            if name in fallbacks:
                self._kept[reader.layout.entry(name).name] = bits
            yield name, bits

    def _advanced(self, reader: _Reader, kept: Mapping[str, Bits], changes: Mapping[str, Changes]) -> dict[str, Bits]:
        """Return the new bits of the tensors that are given as values, by the layout's names."""
        assert self._target.plan is not None
        names = dict.fromkeys(reader.layout.entry(name).name for name in self._target.plan.fallbacks)
        advanced = {
            name: changes[name].apply(kept[name]) if name in changes else kept[name] for name in names if name in kept
        }
        missing = [name for name in names if name not in kept]
        return {**advanced, **(reader.values(missing) if missing else {})}


class _Reader:
    """Reads what leads to one version, and its values."""

    def __init__(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> None:
        self._objects = catalog.objects
        self._path = route(catalog, goal).path
        self._fetcher = fetcher
        self.layout: Layout = catalog.layout(goal.row.layout)
        self.nbytes_fetched = 0
        self._lock = threading.Lock()

    def _fetch(self, item: SealedPartition) -> bytes:
        data = fetch(self._objects, item.ref) if self._fetcher is None else self._fetcher(item)
        with self._lock:
            self.nbytes_fetched += len(data)
        return data

    def values(self, names: Iterable[str]) -> dict[str, Bits]:
        """Return the bits of tensors by name."""
        names = list(names)
        target = MemoryTarget(self.layout, self._path.chunk_elements, names)
        chunks: dict[str, set[int]] = {space: set() for space in SPACES}
        for entry in map(self.layout.entry, names):
            if entry.n_elements:
                chunks[entry.space].update(entry.chunks(self._path.chunk_elements))
        replay(self._objects, self._path, target, only(self._path, chunks), fetcher=self._fetch)
        return {name: tensor.bits for name, tensor in target.tensors().items()}

    def changes(self, edges: Iterable[VersionContents]) -> dict[str, Changes]:
        """Return what versions change one after the other, as one change of each tensor, by the layout's names."""
        result: dict[str, Changes] = {}
        for contents in edges:
            for found in iter_changes(self._objects, contents, self._path.chunk_elements, fetcher=self._fetch):
                name = found.entry.name
                result[name] = _then(result.get(name), found)
        return result


def _way(catalog: Catalog, held: Located, goal: Located) -> tuple[str, str, str, str, str]:
    return catalog.store_sha256, held.name, held.row.root, goal.name, goal.row.root


def _edges(catalog: Catalog, held: Located, goal: Located) -> list[VersionContents] | None:
    """Return the versions whose changes lead from `held` to `goal`; None if there are none that do.

    Raises
    ------
    IntegrityError
        If a version on the way forward is defective: whatever is built of it is not the goal.
    """
    forward = _between(catalog, held, goal)
    if forward is not None:
        base, *edges = forward
        require_consistent(base, edges)
        return edges
    back = _between(catalog, goal, held)
    if back is None:
        return None
    base, *edges = back
    with contextlib.suppress(IntegrityError):
        require_consistent(base, edges)
        # The way back is masks alone; what was overwritten is not known any more.
        is_masks = not any(item.array.array.endswith("/present") for e in edges for item in e.partitions)
        return edges if is_masks else None
    return None


def _between(catalog: Catalog, start: Located, end: Located) -> list[VersionContents] | None:
    """Return `start` and the versions after it, to `end`; None if it is not in the history of that, or not told."""
    with contextlib.suppress(IntegrityError, NotFoundError):  # one of them may have expired
        if start.line == end.line and start.row.version < end.row.version:
            path = catalog.path_from(start, end)
            if path is not None:
                return [catalog.contents(start), *catalog.contents_of_path(end.line, path)]
        path = catalog.path(end)
        roots = [located.row.root for located in catalog.along(end.line, path)]
        if start.row.root in roots:
            at = len(roots) - 1 - roots[::-1].index(start.row.root)
            return catalog.contents_of_path(end.line, path[at:])
    return None


def _then(first: Changes | None, second: TensorChanges) -> Changes:
    """Return one change that does what two do one after the other."""
    small = np.int32 if second.entry.n_elements < 1 << 31 else np.int64
    if first is None and not len(second.written):
        return Changes(second.positions.astype(small, copy=False), second.masks, None)
    positions = np.concatenate([second.positions, second.written])
    if first is not None:
        positions = np.union1d(first.positions, positions)
    elif len(second.written):
        positions = np.sort(positions)
    bits = np.zeros(len(positions), second.masks.dtype)
    present = np.zeros(len(positions), np.bool_)
    if first is not None:
        places = np.searchsorted(positions, first.positions)
        bits[places] = first.bits
        if first.present is not None:
            present[places] = first.present
    bits[np.searchsorted(positions, second.positions)] ^= second.masks
    places = np.searchsorted(positions, second.written)
    bits[places], present[places] = second.values, True
    stays = (bits != 0) | present
    is_any = bool(present.any())
    return Changes(positions[stays].astype(small), bits[stays], present[stays] if is_any else None)
