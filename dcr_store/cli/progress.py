"""A progress bar on standard error while a long verb runs, if that is a terminal; otherwise not even an import."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dcr_store import events


@contextmanager
def shown() -> Iterator[None]:
    """Draw the ``progress`` events of this process while the context is open, one bar per task."""
    if not (sys.stderr and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    bars: dict[str, TaskID] = {}
    lock = threading.Lock()  # events come from many threads; two of them must not add the same bar
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def draw(event: events.Event) -> None:
            if event.name != "progress":
                return
            with lock:
                if event.detail not in bars:
                    bars[event.detail] = progress.add_task(escape(event.detail), total=event.total or None)
                progress.update(bars[event.detail], completed=event.done, total=event.total or None)

        with events.listening(draw):
            yield
