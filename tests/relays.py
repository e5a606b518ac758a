"""Relays for tests: in a thread of this process, or a process of their own that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from dcr_store.objects.open import open_upstreams
from dcr_store.ports import ObjectStore

pytest.importorskip("aiohttp")


class RelayThread:
    """A relay in a thread; a context manager.

    Attributes
    ----------
    url : str
        Where it listens.
    told : list of str
        What it told its operator.
    """

    def __init__(
        self,
        upstream: str | ObjectStore | Sequence[str],
        directory: Path,
        *,
        max_nbytes: int = 1 << 30,
        **settings: Any,
    ) -> None:
        from dcr_store.relay.serving import Settings

        options = settings.pop("storage_options", None)
        urls = [upstream] if isinstance(upstream, str) else upstream
        self._upstreams = open_upstreams(urls, options) if isinstance(urls, Sequence) else [urls]
        self._settings = Settings(
            **{"host": "127.0.0.1", "port": 0, "access": "all", **settings},
            directory=str(directory),
            max_nbytes=max_nbytes,
        )
        self.told: list[str] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def __enter__(self) -> Self:
        from dcr_store.relay.serving import serving

        self._thread.start()
        self._serving = serving(self._settings, self._upstreams, self.told.append)
        try:
            self.url = self._run(self._serving.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._run(self._serving.__aexit__(None, None, None))
        self._end()

    def _end(self) -> None:
        self._run(asyncio.sleep(0.01))  # connections that were cut off are closed in the loop's next round
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def status(self) -> dict[str, Any]:
        return status(self.url)


class RelayProcess:
    """``dcr relay`` as a process; a context manager."""

    def __init__(
        self, *upstreams: str, directory: Path, port: int = 0, arguments: Sequence[str] = (), **environment: str
    ) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "dcr_store", "relay", "--listen", f"127.0.0.1:{port}"]
        command += ["--cache", str(directory), "--max-bytes", "1GiB"]
        for upstream in upstreams:
            command += ["--upstream", upstream]
        self._command = [*command, *arguments]
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline()
        if not self.line:
            raise AssertionError(self._process.communicate()[1])
        self.url = self.line.split()[0]
        return self

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and what it told."""
        _, told = self._process.communicate(timeout=60)
        return self._process.returncode, told

    def stop(self) -> tuple[int, str]:
        """Stop it as an operator would."""
        self.send(signal.SIGTERM)
        return self.wait()

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def status(self) -> dict[str, Any]:
        return status(self.url)


def status(url: str) -> dict[str, Any]:
    """Return what a relay says of itself."""
    with urllib.request.urlopen(f"{url}/v1/status", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
