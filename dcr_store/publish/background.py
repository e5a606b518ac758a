"""Work that goes on in the background, after whoever asked for it was answered.

All of its threads are there from the start: the interpreter waits for them when it ends, but starts no more by then.
Refuses nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from dcr_store.errors import StorageError
from dcr_store.versions.workers import n_workers, worker_pool

T = TypeVar("T")


class Background(Generic[T]):
    """From ``start`` on calls ``work(item)`` for all items, in a thread for each core, then once ``end(error)``.

    Parameters
    ----------
    items : sequence
        Begun in this order.
    work : callable
        Called in several threads at once. After an error no other item is begun.
    end : callable
        Called with the first error or None, in one of the threads; in the caller's if there are no items, or if no
        thread can be started, which then is the error, a ``StorageError``.
    """

    def __init__(
        self, items: Sequence[T], work: Callable[[T], None], end: Callable[[BaseException | None], None]
    ) -> None:
        self._items = iter(items)
        self._n_left = len(items)
        self._work, self._end = work, end
        self._error: BaseException | None = None
        self._has_ended = False
        self.has_failed = False  # in a way that `end` did not take in
        self._then: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._running: list[Future[None]] = []

    def start(self) -> None:
        """Begin; returns at once."""
        if self._n_left == 0:
            self._finish()
            return
        pool = worker_pool("dcr-background")
        try:
            for _ in range(min(n_workers(), self._n_left)):
                self._running.append(pool.submit(self._run))
        except StorageError as error:
            if not self._running:  # one is enough
                self._error = error
                self._finish()
        finally:
            pool.shutdown(wait=False)

    def then(self, call: Callable[[], None]) -> None:
        """Call something once, after the end, in one of the threads; at once, in this thread, if the end has come.

        Whoever waits goes on after that, which the callbacks of a future do not promise.
        """
        with self._lock:
            if not self._has_ended:
                self._then.append(call)
                return
        call()

    def wait(self) -> None:
        """Wait until all has ended; raises what `end` raised."""
        for running in self._running:
            running.result()

    def _run(self) -> None:
        while True:
            with self._lock:
                item = next(self._items, None)
            if item is None:
                return
            if self._error is None:
                try:
                    self._work(item)
                except BaseException as error:  # for `end`, whatever it is: nobody may wait for ever
                    with self._lock:
                        self._error = self._error or error
            with self._lock:
                self._n_left -= 1
                is_last = self._n_left == 0
            if is_last:
                self._finish()

    def _finish(self) -> None:
        try:
            self._end(self._error)
        except BaseException:
            self.has_failed = True
            raise
        finally:
            with self._lock:
                self._has_ended = True
            # What they hold may be as large as a model: replaced files would stay on the disk as long as this does.
            del self._work, self._end
            for call in self._then:
                call()
            self._then.clear()
