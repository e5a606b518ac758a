"""``dcr`` in processes that need not import anything: forks of one that has.

A fresh interpreter takes longer to import what a verb needs than most verbs run. So `run` has each command line carried
out by a fork of a process that imported all of it before: a process of its own, with its own pipes, environment,
working directory and exit status, that says what a fresh one would say. Variables of Python's own are read when an
interpreter starts: where one is given, a fresh one runs, as does `command` for what depends on a terminal or a signal.

Run as a program, this is that process. It ends when its standard input does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

TIMEOUT_S = 120.0
_MODULES = ("aiohttp", "numcodecs", "rich.progress", "s3fs", "zarr")  # what verbs import when they come to it
_WITH_TORCH = ("dcr_store.demo", "dcr_store.targets.native")  # which verbs seldom need


def command(*arguments: object) -> list[str]:
    """Return the command line of a fresh interpreter."""
    return [sys.executable, "-m", "dcr_store", *map(str, arguments)]


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``dcr`` with piped outputs, in today's environment without variables of its own, but for those given."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith(("DCR_", "PYTHON"))}
    variables |= environment
    if any(name.startswith("PYTHON") for name in environment):
        return subprocess.run(
            command(*arguments), env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    global _server
    if _server is None:
        _server = _Server()
    return _server.run([str(argument) for argument in arguments], variables)


class _Server:
    """The process that is forked."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="dcr-warmed-")
        self._path = str(Path(self._directory.name) / "socket")
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("DCR_", "PYTHON"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        atexit.register(self._end)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def _end(self) -> None:
        self._process.communicate()
        self._directory.cleanup()

    def run(self, arguments: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(TIMEOUT_S)
            connection.connect(self._path)
            request = json.dumps({"arguments": arguments, "env": env, "cwd": str(Path.cwd())}).encode()
            readers, theirs = [], []
            for _ in range(2):
                ours, other = os.pipe()
                readers.append(_Reader(ours))
                theirs.append(other)
            socket.send_fds(connection, [len(request).to_bytes(8, "big")], theirs)
            for other in theirs:
                os.close(other)
            connection.sendall(request)
            answers = stack.enter_context(connection.makefile("r"))
            pid = int(answers.readline())
            try:
                status = answers.readline()
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(["dcr", *arguments], TIMEOUT_S) from None
            out, err = (reader.text() for reader in readers)
        assert status, f"dcr {' '.join(arguments)} died:\n{err}"
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.001)
        return subprocess.CompletedProcess(["dcr", *arguments], int(status), out, err)


class _Reader(threading.Thread):
    """Reads a pipe to its end."""

    def __init__(self, number: int) -> None:
        super().__init__(daemon=True)
        self._number = number
        self._found = b""
        self.start()

    def run(self) -> None:
        with os.fdopen(self._number, "rb") as stream:
            self._found = stream.read()

    def text(self) -> str:
        self.join()
        return self._found.decode()


_server: _Server | None = None


# ------------------------------------------------------------------ the process that is forked


def _warm_up() -> None:
    """Import what verbs need, and have done what is done once, without a thread that lives on."""
    import dcr_store

    for module in pkgutil.walk_packages(dcr_store.__path__, "dcr_store."):
        if not module.name.startswith(_WITH_TORCH):
            importlib.import_module(module.name)
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _serve(path: str) -> None:
    _warm_up()
    gc.collect()
    gc.freeze()  # what forks share stays shared: a collection in one would write to all of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are reaped at once, and their owners known to be dead
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            readable, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in readable:
                os.killpg(0, signal.SIGKILL)  # also what hangs, and this process
            connection, _ = server.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                server.close()
                _be_dcr(connection)
            connection.close()


def _be_dcr(connection: socket.socket) -> NoReturn:
    """Be ``python -m dcr_store`` from its start to its end, and tell how it ends."""
    from dcr_store.cli.main import main

    status = 1
    try:
        head, numbers, _, _ = socket.recv_fds(connection, 8, 2)
        with connection.makefile("rb") as stream:
            request: dict[str, Any] = json.loads(stream.read(int.from_bytes(head, "big")))
        connection.sendall(b"%d\n" % os.getpid())
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for theirs, number in zip(numbers, (1, 2), strict=True):
            os.dup2(theirs, number)
            os.close(theirs)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.argv[1:] = request["arguments"]
        status = main()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        connection.sendall(b"%d\n" % status)
        os._exit(status)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # as of `python -m`
    _serve(sys.argv[1])
