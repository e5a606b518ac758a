"""The asyncio twin of a receiver: the same calls, run in a thread of their own so that the event loop goes on.

A call that is cancelled is finished first, and its result dropped; ``follow`` ends as after ``stop``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from dcr_store.objects.threads import Threads
from dcr_store.receive.following import OnApplied, OnApplying, OnFailure, OnPrepared, OnServing
from dcr_store.receive.receiver import Receiver
from dcr_store.receive.results import Active, Applied, Polled, Prepared

T = TypeVar("T")


class AsyncReceiver:
    """See ``Receiver``. Hooks are called in the receiver's thread. An asynchronous context manager."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._pool = Threads(1, "dcr-receiver")

    async def poll(self) -> Polled:
        """See ``Receiver.poll``."""
        return await self._run(self._receiver.poll)

    async def prepare(self, version: str) -> Prepared:
        """See ``Receiver.prepare``."""
        return await self._run(lambda: self._receiver.prepare(version))

    async def apply(self) -> Applied:
        """See ``Receiver.apply``."""
        return await self._run(self._receiver.apply)

    async def follow(
        self,
        *,
        until: str | None = None,
        once: bool = False,
        on_prepared: OnPrepared | None = None,
        on_applying: OnApplying | None = None,
        on_applied: OnApplied | None = None,
        on_serving: OnServing | None = None,
        on_failure: OnFailure | None = None,
    ) -> Applied | None:
        """See ``Receiver.follow``. Cancelled, it stops the receiver for good."""
        receiver = self._receiver

        def follow() -> Applied | None:
            return receiver.follow(
                until=until,
                once=once,
                on_prepared=on_prepared,
                on_applying=on_applying,
                on_applied=on_applied,
                on_serving=on_serving,
                on_failure=on_failure,
            )

        return await self._run(follow, receiver.stop)

    def active(self) -> Active | None:
        """See ``Receiver.active``."""
        return self._receiver.active()

    def stop(self) -> None:
        """See ``Receiver.stop``."""
        self._receiver.stop()

    async def close(self) -> None:
        """See ``Receiver.close``."""
        self._receiver.stop()
        try:
            await self._run(self._receiver.close)
        finally:
            self._pool.shutdown(wait=False)

    async def _run(self, call: Callable[[], T], cancel: Callable[[], None] | None = None) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._pool, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if cancel is not None:
                cancel()
            # The thread ends before the caller goes on: nobody changes the target behind its back.
            await asyncio.wait([future])
            _ = future.cancelled() or future.exception()  # nobody asks for it any more
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
