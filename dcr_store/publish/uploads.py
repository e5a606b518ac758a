"""Objects on their way to the store, in several threads, bounded by bytes and number.

Refuses nothing: the error of an upload is raised where the next one starts, or where all are waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from dcr_store.objects.threads import Threads

IN_FLIGHT_NBYTES: Final = 128 << 20
MAX_IN_FLIGHT: Final = 64  # tiny files would be so many that looking through them takes longer than storing them
N_UPLOADS: Final = 8


class Uploads:
    """A pool of ``N_UPLOADS`` threads. Not for several threads at once."""

    def __init__(self) -> None:
        self.in_flight, self.in_flight_nbytes = 0, 0
        self.futures: list[Future[object]] = []
        self._pool = Threads(N_UPLOADS, "dcr-upload")
        self._changed = threading.Condition()

    def start(self, nbytes: int, upload: Callable[..., object], *arguments: object) -> None:
        """Have `nbytes` uploaded; waits while too much is in flight, and raises what an earlier upload met."""
        self._raise_first()
        self._admit(nbytes)
        try:
            self.futures.append(self._pool.submit(self._upload, nbytes, upload, arguments))
        except BaseException:
            self._leave(nbytes)
            raise

    def start_small(self, upload: Callable[..., object], *arguments: object) -> None:
        """Have something uploaded that counts for nothing."""
        self.futures.append(self._pool.submit(upload, *arguments))

    def _upload(self, nbytes: int, upload: Callable[..., object], arguments: tuple[object, ...]) -> None:
        try:
            upload(*arguments)
        finally:
            self._leave(nbytes)

    def _admit(self, nbytes: int) -> None:
        with self._changed:
            while self.in_flight and (
                self.in_flight_nbytes + nbytes > IN_FLIGHT_NBYTES or self.in_flight >= MAX_IN_FLIGHT
            ):
                self._changed.wait()
            self.in_flight += 1
            self.in_flight_nbytes += nbytes

    def _leave(self, nbytes: int) -> None:
        with self._changed:
            self.in_flight -= 1
            self.in_flight_nbytes -= nbytes
            self._changed.notify_all()

    def _raise_first(self) -> None:
        """Raise the error of an upload that has failed, if any, and forget those that have succeeded."""
        waiting = []
        for future in self.futures:
            if future.done():
                future.result()
            else:
                waiting.append(future)
        self.futures = waiting

    def wait(self) -> None:
        """Wait until all is stored."""
        for future in self.futures:
            future.result()
        self.futures.clear()

    def close(self) -> None:
        """Stop the threads; what has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
