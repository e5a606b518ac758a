"""Many object operations at once, within a bounded window.

Results come in the order of the items; at most `n_parallel` calls are running or waiting to be taken, so memory stays
bounded however long the list is. The first error stops the rest: nothing new is begun, and it is raised once the calls
that were running have ended, so that none of them works on behind the caller's back.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from dcr_store.objects.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator


T = TypeVar("T")
R = TypeVar("R")

N_PARALLEL: Final = 16


def map_bounded(
    function: Callable[[T], R], items: Iterable[T], *, n_parallel: int = N_PARALLEL
) -> Generator[R, None, None]:
    """Yield ``function(item)`` for each item, in order, computed by up to `n_parallel` threads.

    Parameters
    ----------
    function : callable
        Called in other threads.
    items : iterable
        Consumed in the caller's thread, no further than `n_parallel` items ahead of what was yielded.
    n_parallel : int
        Largest number of calls running or finished and not yet yielded; at least 1.

    Raises
    ------
    Exception
        The first error of any call, also where results before it are still to come. Closing the iterator early
        has the same effect as an error: calls not yet begun are dropped, the running ones are waited for. Who may leave
        it early has to close it: left to the garbage collector, it would wait wherever that happens to run.
    """
    if n_parallel < 1:
        raise ValueError(f"n_parallel is {n_parallel}; it must be at least 1")
    window: deque[Future[R]] = deque()
    pool = Threads(n_parallel, thread_name_prefix="dcr-transfer")
    try:
        for item in items:
            window.append(pool.submit(function, item))
            if len(window) == n_parallel:
                yield _first(window)
        while window:
            yield _first(window)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Room:
    """Memory that calls on their way may take together; one that needs more than all of it goes alone.

    Parameters
    ----------
    nbytes : int
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._taken = nbytes, 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Take `nbytes` while the context is open, waiting until there is room for them."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken == 0 or self._taken + nbytes <= self._nbytes)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()


def _first(window: deque[Future[R]]) -> R:
    """Take the oldest result off `window`; raise the first error of any of them."""
    while True:
        running = [future for future in window if not future.done()]
        for future in window:
            if future.done():
                future.result()
        if not running or running[0] is not window[0]:
            return window.popleft().result()
        wait(running, return_when=FIRST_COMPLETED)
