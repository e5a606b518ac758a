"""A child process's side of the demonstration: JSON lines, in for what is asked, out for what is told.

Ends when its standard input does, so that it cannot outlive the trainer.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from dcr_store.errors import DcrError


class Parent:
    """The trainer, which started this process."""

    def __init__(self) -> None:
        # What is told goes to the pipe alone; whatever a library prints goes where the errors go.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, **document: Any) -> None:
        """Send a line."""
        print(json.dumps(document), file=self._out, flush=True)

    def asked(self) -> dict[str, Any]:
        """Wait for a line."""
        return self._asked.get()

    def _listen(self) -> NoReturn:
        # Not through sys.stdin: its lock, held by a waiting thread, would abort an interpreter that shuts down.
        rest = b""
        while piece := os.read(0, 1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._asked.put(json.loads(line))
        os._exit(1)


def run(task: Callable[[Parent, list[str]], None]) -> NoReturn:
    """Run a task with this process's arguments; tell of its error, if it is one of ours."""
    parent = Parent()
    try:
        task(parent, sys.argv[1:])
    except DcrError as error:
        parent.tell(error=str(error))
        sys.exit(1)
    sys.exit(0)
