"""Workers that copy what they are given, then encode the copies, while whoever gave it goes on.

What is given may change as soon as all of it is copied, long before it is encoded. Refuses nothing: what a worker meets
is raised where more is given or waited for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from dcr_store.versions.workers import n_workers, worker_pool

N_TOGETHER: Final = 4
"""How many items a batch has at the most: each change of threads costs."""
_AHEAD: Final = 8  # items for each worker; chunks that tensors share take a buffer each

Item = TypeVar("Item")
Copy = TypeVar("Copy")


class Encoders:
    """A thread for each core. Not for several threads at once."""

    def __init__(self) -> None:
        self.n_workers = n_workers()
        self._pool = worker_pool("dcr-encode")
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._n_waiting = 0
        self._was_read = threading.Condition()
        self._n_unread = 0  # batches

    def give(self, batch: Sequence[Item], copied: Callable[[Item], Copy], encode: Callable[[Item, Copy], None]) -> None:
        """Have each item copied and encoded in turn, by one worker; waits while too many wait already."""
        with self._was_read:
            self._n_unread += 1
        self._waiting.append((len(batch), self._pool.submit(self._work, batch, copied, encode)))
        self._n_waiting += len(batch)
        while self._n_waiting > _AHEAD * self.n_workers:
            self._await_first()

    def _await_first(self) -> None:
        n_items, first = self._waiting.popleft()
        self._n_waiting -= n_items
        first.result()

    def _work(
        self, batch: Sequence[Item], copied: Callable[[Item], Copy], encode: Callable[[Item, Copy], None]
    ) -> None:
        n_unread = len(batch)
        try:
            for item in batch:
                copy = copied(item)
                n_unread -= 1
                if n_unread == 0:
                    self._say_read()
                encode(item, copy)
        finally:
            if n_unread:
                self._say_read()

    def _say_read(self) -> None:
        with self._was_read:
            self._n_unread -= 1
            if self._n_unread == 0:  # not each time: whoever waits would only wake to wait again
                self._was_read.notify_all()

    def settle(self) -> None:
        """Wait until all that was given is copied, and may change."""
        with self._was_read:
            self._was_read.wait_for(lambda: self._n_unread == 0)
        while self._waiting and self._waiting[0][1].done():
            self._await_first()

    def drain(self) -> None:
        """Wait until all is encoded."""
        while self._waiting:
            self._await_first()

    def close(self) -> None:
        """Stop the workers; what has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
