"""A process of a bench: takes JSON lines, answers each with one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class LineChild:
    """The script `file`, run with ``--child`` and its options.

    Parameters
    ----------
    options : mapping
        JSON.
    environment : mapping of str to str, optional
        Variables besides those of this process.
    """

    def __init__(self, file: str, options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, file, "--child", json.dumps(dict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def tell(self, **what: Any) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for a line; ends the bench if there comes none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a child ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Tell it that no more comes, and wait until it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)
