"""What a process has for itself, made part of the simulation: time, random numbers, threads, its own transactions.

Done to the modules of the product after they are loaded, once; nothing in the product knows of it. Pools run what they
are given at once, in the caller's thread. Outside of a simulation nothing changes but that.
"""

from __future__ import annotations

import datetime
import importlib
import pkgutil
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from sim import disk
from sim.memory import Memory
from sim.scheduler import Killed, Scheduler

import dcr_store
from dcr_store import events
from dcr_store.codec import kernels
from dcr_store.format import canonical, groups, records
from dcr_store.format.documents import JournalEntry, Manifest, StoreDocument
from dcr_store.format.groups import Ack
from dcr_store.layout.dtypes import uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.log import fold, group_fold
from dcr_store.payload import contributions, shard, version

_UNUSED: Final = (
    "dcr_store.cli",
    "dcr_store.demo",
    "dcr_store.__main__",
    "dcr_store.relay",
    "dcr_store.codec.kernels_numba",
)
_EPOCH_S: Final = 1_700_000_000


class _Done(Future[Any]):
    """A future that needs no lock of its own: it is made when it is over."""

    _shared: Final = threading.Condition()

    def __init__(self, result: Any, error: Exception | None) -> None:
        self._condition, self._state, self._result, self._exception = self._shared, "FINISHED", result, error
        self._waiters, self._done_callbacks = [], []


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
        self.rng = Random(0)
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
        return datetime.datetime.fromtimestamp(_EPOCH_S + self.monotonic(), zone)

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
_STEPS: Final = ("baseline.chunk.", "baseline.space.", "baseline.noted")


def _scratch(space: str, chunk_elements: int, name: str = "") -> Any:
    """Return a new buffer: what threads of a pool have each for themselves, one thread has not."""
    return np.empty(chunk_elements, uint_dtype(space))


def _on_event(event: events.Event) -> None:
    scheduler = ENVIRONMENT.scheduler
    if scheduler is not None and scheduler.current is not None and event.name.startswith(_STEPS):
        scheduler.step(event.name)


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
    return {
        id(function): Memory(function, key)
        for function, key in (
            (canonical.open_body, None),
            (records.parse_record, None),
            (groups.parse_group_record, None),
            (contributions.decode, None),
            (shard.parse, None),
            (fold.apply, _of_line),
            (group_fold.apply, _of_group),
            (version.sealed_partitions, lambda manifest, entry: (id(manifest), id(entry))),
            (version._tables, lambda manifest, layout, n, stored: (id(manifest), id(layout), n, *stored.items())),
        )
    }


def _of_line(state: fold.LineState, record: object, data: bytes) -> tuple[Any, ...]:
    """Return what the fold of a record follows from: of all records before, their hash chain tells."""
    open_ = state.open and (state.open.txid, state.open.attempt)
    return state.line, state.length, state.last_sha256, len(state.rows), state.segments, open_, data


def _of_group(state: group_fold.GroupState, record: object, data: bytes) -> tuple[Any, ...]:
    return state.group, state.length, state.last_sha256, data


def install() -> None:
    """Load the product and tie it to the simulation."""
    for module in pkgutil.walk_packages(dcr_store.__path__, "dcr_store."):
        if not module.name.startswith(_UNUSED):
            importlib.import_module(module.name)
    stand_ins = {
        id(time): ENVIRONMENT,
        id(random): ENVIRONMENT,
        id(secrets): ENVIRONMENT,
        id(ThreadPoolExecutor): Inline,
        id(importlib.import_module("dcr_store.objects.threads").Threads): Inline,
        id(datetime.datetime): ENVIRONMENT,
        id(importlib.import_module("dcr_store.publish.opening").LIVE): ENVIRONMENT,
        id(importlib.import_module("dcr_store.versions.workers").scratch): _scratch,
        **_remembered(),
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("dcr_store"):
            for attribute, value in list(vars(module).items()):
                if id(value) in stand_ins:
                    setattr(module, attribute, stand_ins[id(value)])
    kernels.use_engine("numpy")  # the other one would come later, and is for larger chunks
    events._listeners.append(_on_event)
    disk.install()


__all__ = ["ENVIRONMENT", "Inline", "Killed", "install"]
