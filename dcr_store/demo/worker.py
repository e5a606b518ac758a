"""The trainer's end of the follower: started, listened to, always ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dcr_store.demo.recipe import Recipe
from dcr_store.errors import DcrError

_END_S: Final = 5.0


class Follower:
    """A running follower process.

    Leaving the context ends it, whatever it is doing: its standard input closes.
    """

    def __init__(self, store_url: str, scratch: Path, numbers: range, recipe: Recipe) -> None:
        scratch.mkdir()
        self._complaints = scratch / "stderr"
        self._numbers = numbers
        command = [sys.executable, "-m", "dcr_store.demo.follower", store_url, str(scratch)]
        command += [str(numbers[0]), str(numbers[-1]), recipe.to_json()]
        with self._complaints.open("wb") as complaints:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8"
            )

    def next_report(self) -> dict[str, Any]:
        """Wait for what the follower says of the next version.

        Raises
        ------
        DcrError
            If it failed or died; a note holds all that it complained of.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        report: dict[str, Any] = json.loads(line) if line else {"error": self._death()}
        if "error" in report:
            error = DcrError(f"the follower process failed: {report['error']}")
            error.add_note(self._complaint())
            raise error
        return report

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
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
