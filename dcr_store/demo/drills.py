"""Which receiver is harmed at which version. Pure, but for the one that strikes its own process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dcr_store.events import Event

_STEPS_CUT_OFF: Final = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of versions; None where nothing is to happen.

    Attributes
    ----------
    kill : int or None
        One receiver is killed while it applies this version.
    cut, back : int or None
        Another receiver is cut off before `cut` is published, until `back` is.
    """

    kill: int | None = None
    cut: int | None = None
    back: int | None = None


def make_plan(first: int, steps: int) -> Plan:
    """Return what happens in a run from version `first` on; nothing where a single step leaves no room for it."""
    if steps < 2:
        return Plan()
    cut = first + max(1, steps // 2)
    return Plan(first + max(1, steps // 3), cut, min(first + steps, cut + _STEPS_CUT_OFF))


@dataclass(frozen=True, slots=True)
class Drill:
    """What was done to a receiver, and what came of it."""

    version: str
    receiver: str
    what: str


class Strike:
    """Kills its own process while a version is applied; a listener of ``events``.

    Parameters
    ----------
    version : str
        The version.
    tell : callable
        Called with the number of chunks written just before.
    """

    def __init__(self, version: str, tell: Callable[[int], None]) -> None:
        self.version = version
        self._tell = tell
        self._n_chunks: int | None = None
        self._n_written = 0
        self._lock = threading.Lock()

    def arm(self, n_chunks: int) -> None:
        """Strike after so many chunks from now on, or after the last one where there are fewer."""
        self._n_chunks = n_chunks

    def __call__(self, event: Event) -> None:
        """Take notice of an event."""
        if self._n_chunks is not None and event.name in ("replay.chunk.written", "pull.applied"):
            with self._lock:  # chunks are written by several threads
                self._n_written += event.name == "replay.chunk.written"
                if self._n_written == self._n_chunks or event.name == "pull.applied":
                    self._tell(self._n_written)
                    os.kill(os.getpid(), signal.SIGKILL)
