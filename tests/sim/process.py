"""What a process has for itself, made part of the simulation: time, random numbers, threads, its own transactions.

Done to the modules of the product after they are loaded, once; nothing in the product knows of it. Pools run what they
are given at once, in the caller's thread. Outside of a simulation nothing changes but that.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import pkgutil
import random
import secrets
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from random import Random
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from sim import disk
from sim.memory import Memory
from sim.objects import EPOCH_S
from sim.scheduler import Killed, Scheduler

import dcr_store
from dcr_store import events
from dcr_store.codec import chunk, kernels, portable
from dcr_store.format import canonical, groups, records
from dcr_store.format.documents import JournalEntry, Manifest, StoreDocument
from dcr_store.format.groups import Ack
from dcr_store.layout import pieces
from dcr_store.layout.dtypes import uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.log import checkpoints, fold, group_fold, line
from dcr_store.payload import contributions, shard, version
from dcr_store.publish import ownership, slice_writer, state, waiting
from dcr_store.publish.ownership import Ownership
from dcr_store.receive import structure
from dcr_store.targets import own_directories, safetensors_file
from dcr_store.targets.file_map import FileMap

_UNUSED: Final = (
    "dcr_store.cli",
    "dcr_store.demo",
    "dcr_store.__main__",
    "dcr_store.relay",
    "dcr_store.codec.kernels_numba",
    "dcr_store.receive.native_bringer",
    "dcr_store.targets.native",
)
_N_PATHS: Final = 20_000


class _Done(Future[Any]):
    """A future that needs no lock of its own: it is made when it is over."""

    _shared: Final = threading.Condition()

    def __init__(self, result: Any, error: Exception | None) -> None:
        self._condition, self._state, self._result, self._exception = self._shared, "FINISHED", result, error
        self._waiters, self._done_callbacks = [], []

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        if self._exception is not None:
            raise self._exception
        return self._result


class Inline:
    """A pool that calls at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        try:
            return _Done(function(*arguments, **options), None)
        except Exception as error:  # not the death of the process, which ends the caller too
            return _Done(None, error)

    def map(
        self, function: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None
    ) -> Iterator[Any]:
        calls = [self.submit(function, *arguments) for arguments in zip(*iterables, strict=False)]
        return (call.result() for call in calls)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class Event:
    """An event for which the simulation waits in its own time."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        ENVIRONMENT.sleep(timeout_s)
        return self._is_set


class Environment:
    """Clock, random numbers and transactions as the running simulation has them; stands in for several modules."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None
        self.rng = Random("libraries")  # that of no seed: else its first transaction has the name of one there
        self.own: set[str] = set()

    # time, random, secrets, datetime.datetime

    def monotonic(self) -> float:
        return 0.0 if self.scheduler is None else self.scheduler.clock

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        if self.scheduler is not None:
            self.scheduler.sleep(seconds)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def random(self) -> float:
        return self.rng.random()

    def token_hex(self, nbytes: int) -> str:
        return f"{self.rng.getrandbits(8 * nbytes):0{2 * nbytes}x}"

    def now(self, zone: datetime.timezone) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(EPOCH_S + self.monotonic(), zone)

    def fromisoformat(self, text: str) -> datetime.datetime:
        return datetime.datetime.fromisoformat(text)

    # publish.opening.LIVE

    def _live(self) -> set[str]:
        actor = None if self.scheduler is None else self.scheduler.current
        return self.own if actor is None else actor.live

    @property
    def add(self) -> Callable[[str], None]:
        return self._live().add

    @property
    def discard(self) -> Callable[[str], None]:
        return self._live().discard

    def __contains__(self, txid: object) -> bool:
        return txid in self._live()


ENVIRONMENT: Final = Environment()
_look_for_store: Final = own_directories.holds_store
_COUNTED: Final = {
    "publish.resealed": "sealed again",
    "slices.read": "slices read",
    "slices.healed": "slices healed",
}
_STEPS: Final = ("baseline.chunk.", "baseline.space.", "baseline.noted")


def _scratch(space: str, chunk_elements: int, name: str = "") -> Any:
    """Return a new buffer: what threads of a pool have each for themselves, one thread has not."""
    return np.empty(chunk_elements, uint_dtype(space))


def _reached(name: str, detail: str = "") -> None:
    scheduler = ENVIRONMENT.scheduler
    if name in _COUNTED and disk.CALLS.world is not None:
        disk.CALLS.world.count(_COUNTED[name])
    if scheduler is not None and name.startswith(_STEPS) and scheduler.current is not None:
        scheduler.step(name)


def _progress(task: str, done: int, total: int) -> None:
    pass


def _holds_store(directory: Path) -> bool:
    """Whether a directory is a store: above what simulations have to do with there is none."""
    world = disk.CALLS.world
    return (world is None or str(directory).startswith(f"{world.root}/")) and _look_for_store(directory)


def _in_chunks() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what stand in for `encode_delta` and `chunk.apply`: pure functions but for the chunk that they change."""

    def encoded(space: str, chunk: int, base: bytes, base_digest: int, new: bytes) -> Any:
        dtype = uint_dtype(space)
        return encode(codec, space, chunk, np.frombuffer(base, dtype), base_digest, np.frombuffer(new, dtype).copy())

    def applied(data: bytes, bits: bytes, dtype: np.dtype[Any]) -> tuple[int, bytes]:
        result = np.frombuffer(bits, dtype).copy()
        return apply(data, result), result.tobytes()

    def encode_delta(codec: object, space: str, chunk: int, base: Any, base_digest: int, new: Any) -> Any:
        found = encodings(space, chunk, base.tobytes(), base_digest, new.tobytes())
        if found is not None:
            new[:] = base
        return found

    def apply_chunk(data: Any, bits: Any, base: Any = None) -> int:
        n_changed, content = applications(bytes(data), bits.tobytes(), bits.dtype)
        bits[:] = np.frombuffer(content, bits.dtype)
        return int(n_changed)

    codec, encode, apply = portable.get_codec("dcr.delta"), state.encode_delta, chunk.apply
    encodings, applications = Memory(encoded), Memory(applied)
    return encode_delta, apply_chunk


def _in_pieces() -> dict[int, Any]:
    """Return what stand in for functions of slices, by their identity: pure ones, of bits that do not stay."""

    def encoded_whole(codec: Any, piece: Any, new: bytes, n: int) -> Any:
        return encode_all(codec, piece, np.frombuffer(new, uint_dtype(piece.space)), n)

    def encode_whole(codec: Any, piece: Any, new: Any, n: int) -> Any:
        return of_anchors(codec, piece, new.tobytes(), n)

    encode_all = slice_writer.encode_whole
    of_anchors = Memory(encoded_whole)
    cut = pieces.pieces
    return {
        id(encode_all): encode_whole,
        id(cut): Memory(
            lambda mapped, layout, n: tuple(cut(mapped, layout, n)),
            lambda mapped, layout, n: (mapped.digest, id(layout), n),
        ),
    }


def _remembered() -> dict[int, Any]:
    """Return what stands in for pure functions, by their identity; class methods are replaced at once."""
    for owner, name in (
        (StoreDocument, "from_bytes"),
        (Manifest, "from_bytes"),
        (JournalEntry, "from_bytes"),
        (Ack, "from_bytes"),
        (Layout, "from_json_bytes"),
    ):
        setattr(owner, name, Memory(getattr(owner, name)))
    FileMap.of = Memory(FileMap.of, lambda layout, files: (id(layout), *((path, row.raw) for path, row in files)))  # type: ignore[method-assign]
    Ownership.from_bytes = Memory(Ownership.from_bytes, lambda data, key: (data,))  # type: ignore[method-assign]
    occupied = Memory(Layout.occupied, lambda layout, *place: (id(layout), *place))
    Layout.occupied = lambda *arguments: occupied(*arguments).copy()  # type: ignore[method-assign]
    return {
        id(function): Memory(function, key)
        for function, key in (
            (canonical.open_body, None),
            (records.parse_record, None),
            (groups.parse_group_record, None),
            (contributions.decode, None),
            (shard.parse, lambda data, n_chunks, key: (data, n_chunks)),
            (safetensors_file.parse_header, None),
            (structure.single_file, lambda layout: (id(layout),)),
            (checkpoints._parse_checkpoint, None),
            (fold.apply, _of_line),
            (group_fold.apply, _of_group),
            (version.sealed_partitions, lambda manifest, entry: (id(manifest), id(entry))),
            (
                ownership.ones_of,
                lambda layout, boxes, n: (id(layout), n, *((name, *items) for name, items in boxes.items())),
            ),
            (version._tables, lambda manifest, layout, n, stored: (id(manifest), id(layout), n, *stored.items())),
        )
    }


def _of_line(state: fold.LineState, record: object, data: bytes) -> tuple[Any, ...]:
    """Return what the fold of a record follows from: of all records before, their hash chain tells."""
    open_ = state.open and (state.open.txid, state.open.attempt)
    return state.line, state.length, state.last_sha256, len(state.rows), state.segments, open_, data


def _of_group(state: group_fold.GroupState, record: object, data: bytes) -> tuple[Any, ...]:
    return state.group, state.length, state.last_sha256, data


def _share_paths() -> None:
    """Make each path once: all seeds name much the same files, and pathlib takes each apart anew."""
    # The one that a path was made from stays with it, so that nothing else gets its identity.
    made: dict[object, tuple[Any, Any]] = {}
    new, join, plain = Path.__new__, PurePath.__truediv__, type(Path())
    parent, parents = PurePath.parent.fget, PurePath.parents.fget  # type: ignore[attr-defined]

    def remember(key: object, origin: Any, path: Any) -> Any:
        if len(made) >= _N_PATHS:
            made.clear()
        made[key] = origin, path
        return path

    def of(cls: type, *parts: Any, **options: Any) -> Any:
        part = parts[0] if len(parts) == 1 else None
        if type(part) is plain and cls is Path:
            return part
        if type(part) is not str:
            return new(cls, *parts, **options)
        found = made.get((cls, part))
        return remember((cls, part), cls, new(cls, part)) if found is None else found[1]

    def joined(path: Any, name: Any) -> Any:
        if type(name) is not str:
            return join(path, name)
        found = made.get((id(path), name))
        return remember((id(path), name), path, join(path, name)) if found is None else found[1]

    def parent_of(path: Any) -> Any:
        found = made.get(id(path))
        return remember(id(path), path, parent(path)) if found is None else found[1]

    def parents_of(path: Any) -> Any:
        found = made.get((id(path), None))
        return remember((id(path), None), path, tuple(parents(path))) if found is None else found[1]

    Path.__new__ = of  # type: ignore[method-assign, assignment]
    PurePath.__truediv__ = joined  # type: ignore[method-assign]
    PurePath.parent = property(parent_of)  # type: ignore[method-assign, assignment]
    PurePath.parents = property(parents_of)  # type: ignore[method-assign, assignment]
    PurePath.__fspath__ = PurePath.__str__  # type: ignore[method-assign]
    Path.resolve = lambda path, strict=False: Path(os.path.realpath(path, strict=strict))  # type: ignore[method-assign]


def install() -> None:
    """Load the product and tie it to the simulation."""
    for module in pkgutil.walk_packages(dcr_store.__path__, "dcr_store."):
        if not module.name.startswith(_UNUSED):
            importlib.import_module(module.name)
    encode_delta, apply_chunk = _in_chunks()
    stand_ins = {
        id(time): ENVIRONMENT,
        id(random): ENVIRONMENT,
        id(secrets): ENVIRONMENT,
        id(ThreadPoolExecutor): Inline,
        id(importlib.import_module("dcr_store.objects.threads").Threads): Inline,
        id(datetime.datetime): ENVIRONMENT,
        id(importlib.import_module("dcr_store.publish.opening").LIVE): ENVIRONMENT,
        id(importlib.import_module("dcr_store.versions.workers").scratch): _scratch,
        id(state.encode_delta): encode_delta,
        id(_look_for_store): _holds_store,
        **_remembered(),
        **_in_pieces(),
    }
    portable.DeltaCodec.apply = staticmethod(apply_chunk)  # type: ignore[assignment]
    events.reached, events.progress = _reached, _progress
    line.CHECKPOINT_VERSIONS = 3  # type: ignore[misc]
    waiting._FIRST_DELAY_S = 0.1  # type: ignore[misc]
    if hasattr(typing, "_get_protocol_attrs") and sys.version_info < (3, 12):  # later ones remember it themselves
        typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)
    for name, module in list(sys.modules.items()):
        if name.startswith("dcr_store"):
            for attribute, value in list(vars(module).items()):
                if id(value) in stand_ins:
                    setattr(module, attribute, stand_ins[id(value)])
    kernels.use_engine("numpy")  # the other one would come later, and is for larger chunks
    disk.install()
    _share_paths()


__all__ = ["ENVIRONMENT", "Inline", "Killed", "install"]
