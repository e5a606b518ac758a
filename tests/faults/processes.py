"""Starts, kills, stops and waits for the children of ``child.py``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

TIMEOUT_S = 120.0
_PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True)
class Outcome:
    """What a child told before it ended; `killed` if it told nothing."""

    killed: bool
    ok: bool = False
    kind: str = ""
    key: str | None = None
    message: str = ""
    points: dict[str, int] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)


class Child:
    """One running child."""

    def __init__(self, nursery: Nursery, job: dict[str, Any]) -> None:
        self._nursery = nursery
        self.job = job
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(str(nursery.path))
        self._stream = self._socket.makefile("rw", encoding="utf-8")
        self._stream.write(json.dumps(job) + "\n")
        self._stream.flush()
        self.pid = int(json.loads(self._stream.readline())["pid"])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait_stopped(self) -> None:
        """Wait until the child has stopped itself."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            status = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if status in "Tt":
                return
            time.sleep(0.005)
        raise AssertionError(f"the child did not stop: {self.job}")

    def wait(self) -> Outcome:
        """Wait for the end."""
        with self._socket, self._stream:
            try:
                line = self._stream.readline()
            except TimeoutError:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"the child hangs: {self.job}\n{self._nursery.errors()}") from None
        self._wait_gone()
        if not line:
            return Outcome(killed=True)
        told = json.loads(line)
        return Outcome(
            False,
            told.pop("ok"),
            told.pop("kind", ""),
            told.pop("key", None),
            told.pop("message", ""),
            told.pop("points"),
            told,
        )

    def _wait_gone(self) -> None:
        """Wait until the process is reaped: its locks are free then, and its owner known to be dead."""
        deadline = time.monotonic() + TIMEOUT_S
        while Path(f"/proc/{self.pid}").exists():
            assert time.monotonic() < deadline, f"the child does not end: {self.job}"
            time.sleep(0.001)


class Nursery:
    """The process that children are forked from; a context manager that leaves none behind.

    Parameters
    ----------
    preload : str
        What it imports before, if children need more than the package: ``torch``.
    """

    def __init__(self, *preload: str) -> None:
        self._preload = preload

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="dcr-faults-"))
        self.path = self.directory / "socket"
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir()
        with (self.directory / "stderr").open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("child.py")),
                    str(self.path),
                    str(self.directory),
                    *self._preload,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": _PYTHONPATH},
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", self.errors()
        return self

    def __exit__(self, *exc: object) -> None:
        import shutil

        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)

    def errors(self) -> str:
        """Return what children wrote to stderr: tracebacks of errors that are no ``DcrError``."""
        return (self.directory / "stderr").read_text(errors="replace")

    def start(self, **job: Any) -> Child:
        """Start a child."""
        return Child(self, job)

    def run(self, **job: Any) -> Outcome:
        """Start a child and wait for its end."""
        return self.start(**job).wait()

    def finish(self, **job: Any) -> Outcome:
        """Run a job that must succeed."""
        before = len(self.errors())
        outcome = self.run(**job)
        assert not outcome.killed, f"the child died: {job}\n{self.errors()[before:]}"
        assert outcome.ok, f"{outcome.kind}: {outcome.message}\n{job}"
        return outcome
