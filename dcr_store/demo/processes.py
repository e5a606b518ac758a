"""The trainer's end of a child process: started, listened to, always ended."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dcr_store.errors import DcrError

_END_S: Final = 5.0
SILENCE_S: Final = 300.0


class Child:
    """A running child process.

    Leaving the context ends it, whatever it is doing: its standard input closes.

    Parameters
    ----------
    title : str
        What it is, for errors.
    module : str
        Of ``dcr_store.demo``.
    arguments : list of str
    complaints : path
        File for its standard error; grows.
    """

    def __init__(self, title: str, module: str, arguments: list[str], complaints: Path) -> None:
        self._title, self._complaints = title, complaints
        with complaints.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"dcr_store.demo.{module}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def hear(self, silence_s: float = SILENCE_S) -> dict[str, Any]:
        """Wait for what it tells next.

        Raises
        ------
        DcrError
            If it failed, died, or says nothing for so long; a note holds all that it complained of.
        """
        try:
            line = self._lines.get(timeout=silence_s)
        except queue.Empty:
            report: dict[str, Any] = {"error": f"said nothing for {silence_s:.0f} s"}
        else:
            report = json.loads(line) if line else {"error": self._death()}
        if "error" in report:
            error = DcrError(f"{self._title} failed: {report['error']}")
            error.add_note(self._complaint())
            raise error
        return report

    def ask(self, **document: Any) -> None:
        """Send a line. That it is dead is noticed when it is heard."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(document) + "\n")
            self._process.stdin.flush()

    def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self._process.wait()

    def _death(self) -> str:
        code = self._process.wait()
        complaint = self._complaint().strip()
        last = complaint.splitlines()[-1] if complaint else "it said nothing"
        return f"ended by signal {-code}" if code < 0 else f"exit code {code}: {last}"

    def _complaint(self) -> str:
        return self._complaints.read_text("utf-8", "replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join()
        self._process.stdout.close()
