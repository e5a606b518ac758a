"""Fetch partitions ahead of their use, in order, bounded by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

from dcr_store.objects.threads import Threads
from dcr_store.payload.version import SealedPartition

AHEAD_NBYTES: Final = 96 << 20
Fetch = Callable[[SealedPartition], bytes]
T = TypeVar("T")


class Prefetch(Generic[T]):
    """Fetches partitions in the order of their use, some way ahead, bounded by bytes."""

    def __init__(self, pool: Threads, read: Callable[[SealedPartition], T], plan: Sequence[SealedPartition]) -> None:
        self._pool, self._read, self._plan = pool, read, plan
        self._next = 0
        self._taken = 0
        self._ahead = 0
        self._futures: list[Future[T]] = []

    def _submit(self) -> None:
        self._futures.append(self._pool.submit(self._read, self._plan[self._next]))
        self._ahead += self._plan[self._next].partition.nbytes
        self._next += 1

    def take(self, items: Sequence[SealedPartition]) -> list[T]:
        """Return the next partitions of the plan, which must be `items`."""
        while self._next < len(self._plan) and (self._next < self._taken + len(items) or self._ahead < AHEAD_NBYTES):
            self._submit()
        result = []
        for item in items:
            result.append(self._futures[self._taken].result())
            self._futures[self._taken] = _DONE
            self._taken += 1
            self._ahead -= item.partition.nbytes
        return result

    def cancel(self) -> None:
        """Drop what has not started."""
        for future in self._futures[self._taken :]:
            future.cancel()


_DONE: Final[Future[Any]] = Future()
