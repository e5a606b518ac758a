"""Threads that say what to do when the system gives none: its own word for that is a bare ``RuntimeError``."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from dcr_store.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A pool of threads whose `submit`, and so `map`, raise ``StorageError`` where no thread can be started."""

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Hand a call to the pool; ``StorageError`` if a thread it needs cannot be started."""
        try:
            return super().submit(function, *arguments, **named)
        except RuntimeError as error:
            if not is_refusal(error):
                raise
            raise refused() from error


def is_refusal(error: RuntimeError) -> bool:
    """Return whether an error says that the system gives no thread."""
    return "start new thread" in str(error)


def refused() -> StorageError:
    """Return what to raise then."""
    return StorageError(
        "cannot start a thread: the process has as many threads or as much address space as it may have; raise the "
        "limits (ulimit -u, ulimit -v, the container's pids and memory), then repeat"
    )
