"""Tells engines and commands what a receiver is about to hold, and what it holds.

Each is told within a time. In a group, a version is not said to be applied, and so holds up the group, until all who
are told of it have taken it. Who could not be told of a version that is held is told again with the receiver's next
try, alone, until it has taken this version or a newer one is held.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dcr_store.errors import DcrError, InvalidInputError, StorageError
from dcr_store.receive.engines import TIMEOUT_S, Arrival, Taker, engine
from dcr_store.receive.results import Active, Applied, Prepared

_TRIES: Final = 3  # of what is told before a version is applied: it is not waited for any longer
_FIRST_WAIT_S: Final = 0.5
_SHOWN_NBYTES: Final = 500


class Command:
    """A shell command that is told by its environment: DCR_VERSION, DCR_ROOT, DCR_DIRECTORY, DCR_PREVIOUS.

    Parameters
    ----------
    command : str
        Run by ``/bin/sh``, without input, in the directory of this process.
    timeout_s : float
        After which it is killed, with all that it started and that stayed in its process group.
    """

    def __init__(self, command: str, timeout_s: float = TIMEOUT_S) -> None:
        if not command.strip() or "\0" in command:
            raise InvalidInputError("is no command", key=command, expected="a shell command", found=repr(command))
        self.name = command
        self._timeout_s = timeout_s

    def take(self, arrival: Arrival) -> None:
        """Run the command; ``StorageError`` if it fails or takes too long, with the last line that it wrote."""
        environment = {
            **os.environ,
            "DCR_VERSION": arrival.version,
            "DCR_ROOT": arrival.root,
            "DCR_DIRECTORY": arrival.directory,
            "DCR_PREVIOUS": arrival.previous or "",
        }
        # A file and no pipe: what the command leaves running would keep a pipe open, and us waiting.
        with tempfile.TemporaryFile() as output:
            try:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self.name],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise StorageError(f"the command cannot be run: {error.strerror}", key=self.name) from error
            try:
                status: int | None = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if status == 0:
                return
            output.seek(max(0, os.fstat(output.fileno()).st_size - _SHOWN_NBYTES))
            lines = output.read().decode(errors="replace").strip().splitlines()
        found = f"no end within {self._timeout_s:g} s" if status is None else f"exit status {status}"
        raise StorageError(
            f"the command failed for {arrival.version}",
            key=self.name,
            expected="exit status 0",
            found=f"{found}: {lines[-1].strip()}" if lines else f"{found}, and nothing was said",
        )

    def serve(self) -> None:
        """Do nothing: a command is told of a version once."""


class Announcer:
    """Hooks for ``Receiver.follow``.

    Parameters
    ----------
    place : callable
        Returns where the target is.
    prepared, applied : sequence of Taker
        Who is told of a version that is about to be applied, and of one that the target holds.
    report : callable
        Called with the error of a taker whose failure is not waited for.
    """

    def __init__(
        self,
        place: Callable[[], Path],
        prepared: Sequence[Taker],
        applied: Sequence[Taker],
        report: Callable[[DcrError], None],
    ) -> None:
        self._place, self._prepared, self._applied, self._report = place, prepared, applied, report
        self._told: dict[int, tuple[str, str]] = {}
        self._served: dict[int, tuple[str, str]] = {}

    def on_prepared(self, prepared: Prepared) -> None:
        """Tell of a version that is about to be applied; failures are reported, and tried again a few times."""
        arrival = Arrival(prepared.version, prepared.root, str(self._place()), prepared.base)
        for taker in self._prepared:
            wait_s = _FIRST_WAIT_S
            for nth in range(1, _TRIES + 1):
                try:
                    taker.take(arrival)
                    break
                except DcrError as error:
                    self._report(error)
                if nth < _TRIES:
                    time.sleep(wait_s)
                    wait_s *= 2

    def on_applied(self, applied: Applied) -> None:
        """Tell of a version that the target holds, those that do not know yet.

        Raises
        ------
        DcrError
            The first failure, after all have been told; to be called again.
        """
        arrival = Arrival(applied.version, applied.root, str(self._place()), applied.previous)
        self._each(self._told, (arrival.version, arrival.root), lambda taker: taker.take(arrival))

    def on_serving(self, active: Active) -> None:
        """Let all that have taken a version serve it; raises as ``on_applied`` does."""
        self._each(self._served, (active.version, active.root), lambda taker: taker.serve())

    def _each(self, done: dict[int, tuple[str, str]], version: tuple[str, str], tell: Callable[[Taker], None]) -> None:
        failure: DcrError | None = None
        for index, taker in enumerate(self._applied):
            if done.get(index) == version:
                continue
            try:
                tell(taker)
                done[index] = version
            except DcrError as error:
                if failure is not None:
                    self._report(failure)
                failure = error
        if failure is not None:
            raise failure


def announcer(
    place: Callable[[], Path],
    engines: Sequence[str],
    on_prepared: Sequence[str],
    on_applied: Sequence[str],
    report: Callable[[DcrError], None],
) -> Announcer | None:
    """Return what tells the engines (``KIND=URL``) and commands of a command line; None if there are none.

    Engines are told before the commands for ``applied``.

    Raises
    ------
    InvalidInputError
        If one of them cannot be used; nothing has been told to anybody.
    """
    applied: list[Taker] = [engine(text) for text in engines]
    applied += [Command(text) for text in on_applied]
    prepared = [Command(text) for text in on_prepared]
    return Announcer(place, prepared, applied, report) if applied or prepared else None
