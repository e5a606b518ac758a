"""Whole objects on their way from upstream: one transfer each, whoever asks meanwhile, passed on as they come.

A transfer that has begun goes on when those who asked for it have left; one that still waits for its turn does not.
What arrives is kept only if it has the right SHA-256.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Final

from dcr_store.errors import StorageError
from dcr_store.objects.retry import TransientError
from dcr_store.relay.cache import Arriving, Cache

Stream = Callable[[str, str, bool], Iterator[bytes]]
"""From key, SHA-256, and whether to pass by caches: the pieces; raises at the end if they are not right."""

_Id = tuple[str, str]
READ_NBYTES: Final = 1 << 18
MOST: Final = 4096  # transfers under way or waiting for their turn


class Flight:
    """One object on its way. All but ``bring`` is called in the event loop.

    Attributes
    ----------
    is_done : bool
        Whether it has ended: whole and right if `error` is None.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, left: Callable[[], None]) -> None:
        self.is_done = False
        self.error: BaseException | None = None
        self._arriving: Arriving | None = None
        self._loop, self._left = loop, left
        self._changed = asyncio.Event()
        self._is_told = False
        self._n_users = 1  # the transfer itself

    @property
    def nbytes(self) -> int:
        """How many bytes have arrived."""
        return 0 if self._arriving is None else self._arriving.nbytes

    def take_off(self, arriving: Arriving) -> None:
        """Note where the bytes will be; called in the transfer's thread."""
        self._arriving = arriving

    def notify(self) -> None:
        """Wake those who wait; called in the transfer's thread."""
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_told = False
        self._changed.set()
        self._changed.clear()

    def end(self, error: BaseException | None) -> None:
        """Note the end of the transfer."""
        self.error = error
        self.is_done = True
        self._wake()
        self.leave()

    def join(self) -> None:
        """Keep the bytes readable until ``leave``."""
        self._n_users += 1

    def leave(self) -> None:
        """Need the bytes no longer."""
        self._n_users -= 1
        if self._n_users == 1 and not self.is_done:
            self._left()
        elif self._n_users == 0 and self._arriving is not None:
            self._arriving.close()

    async def beyond(self, position: int) -> bool:
        """Wait until there are bytes beyond `position`; return False if the flight has ended without."""
        while self.nbytes <= position:
            if self.is_done:
                return False
            await self._changed.wait()
        return True

    def read(self, position: int) -> bytes:
        """Return bytes from `position` on, as many as are there, up to a limit."""
        assert self._arriving is not None
        return self._arriving.read(position, READ_NBYTES)


class Flights:
    """All transfers of a relay.

    Parameters
    ----------
    cache : Cache
    stream : Stream
        Blocks; called in `executor`.
    executor : Executor
        As many threads as there may be transfers at a time.
    """

    def __init__(self, cache: Cache, stream: Stream, executor: Executor) -> None:
        self._cache, self._stream, self._executor = cache, stream, executor
        self._flights: dict[_Id, Flight] = {}
        self._is_closed = False
        self.n_begun = self.n_landed = 0
        self.nbytes = 0

    def find(self, key: str, sha256: str) -> Flight | None:
        """Return the transfer of an object that is on its way."""
        return self._flights.get((key, sha256))

    def begin(self, key: str, sha256: str, *, past: bool = False) -> Flight:
        """Begin a transfer; later ones who ask are given this one.

        Raises
        ------
        StorageError
            There are as many as there may be; later there may be less.
        """
        if len(self._flights) >= MOST:
            raise StorageError(
                "the relay has as many transfers to do as it can hold; repeat",
                key=key,
                expected=f"up to {MOST}",
                found=len(self._flights),
            ) from TransientError("too many transfers")
        loop = asyncio.get_running_loop()
        flight = Flight(loop, lambda: give_up())
        self._flights[key, sha256] = flight
        self.n_begun += 1

        def bring() -> None:
            error: BaseException | None = None
            arriving = self._cache.arriving()
            flight.take_off(arriving)
            try:
                for piece in self._stream(key, sha256, past):
                    if self._is_closed:
                        raise StorageError("the relay is being stopped", key=key)
                    arriving.append(piece)
                    flight.notify()
                self._cache.keep(arriving, key, sha256)
            except BaseException as found:
                error = found
                self._cache.discard(arriving)
            loop.call_soon_threadsafe(land, error)

        def land(error: BaseException | None) -> None:
            # Kept before it is no longer found here, so that nobody begins it anew in between.
            if self._flights.get((key, sha256)) is flight:
                del self._flights[key, sha256]
            self.nbytes += flight.nbytes
            self.n_landed += 1
            flight.end(error)

        def give_up() -> None:
            # Nobody waits for it any more: if it has not begun, it need not.
            if future.cancel():
                land(StorageError("nobody waited for the transfer any more", key=key))

        future: Future[None] = self._executor.submit(bring)
        return flight

    def close(self) -> None:
        """Let all transfers end at their next piece."""
        self._is_closed = True
