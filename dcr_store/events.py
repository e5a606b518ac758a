"""What a long operation tells about itself: named points and progress, to whoever listens.

``reached`` names a point of a protocol (the fault tests stop there), ``progress`` counts bytes (the
command line draws a bar). Without a listener both cost one truth test. Imports nothing of dcr_store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes
    ----------
    name : str
        Dotted name, e.g. ``publish.partition.stored`` or ``progress``.
    detail : str
        The key, tensor or task concerned.
    done, total : int
        Bytes so far and in all; 0 where there is nothing to count.
    """

    name: str
    detail: str = ""
    done: int = 0
    total: int = 0


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with each event of this process while the context is open.

    Listeners are called in the thread in which the event happens and must not raise.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def reached(name: str, detail: str = "") -> None:
    """Say that the point `name` of a protocol has been reached."""
    if _listeners:
        for listener in tuple(_listeners):
            listener(Event(name, detail))


def progress(task: str, done: int, total: int) -> None:
    """Say that `done` of `total` bytes of `task` are behind us."""
    if _listeners:
        for listener in tuple(_listeners):
            listener(Event("progress", task, done, total))
