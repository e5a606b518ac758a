"""A headless Chromium, spoken to through a pipe: pages as they are drawn, and what the browser says of them."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium")
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page.

    Attributes
    ----------
    complaints : list of str
        What the browser logged, and exceptions of scripts, since the page was opened.
    requests : list of str
        The URLs that were asked for since then.
    """

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._write, self._read = commands, answers
        self._ids = itertools.count(1)
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return what the browser answers to a command of its protocol."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, width: int, height: int, *, scheme: str = "light", media: str = "") -> None:
        """Show a file at a size and in a colour scheme, on paper if `media` is ``print``."""
        self.complaints, self.requests, self._loaded = [], [], False
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)
        self.ask("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript says of the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """Return the whole page as PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser is gone")
            data += byte
        message: dict[str, Any] = json.loads(data)
        method, told = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(told)[:1000])
        elif method == "Page.loadEventFired":
            self._loaded = True
        return message


@contextmanager
def browser(scratch: Path, timeout_s: float = 600) -> Iterator[Browser]:
    """Start a browser; it ends with the context, or when the time is over."""
    assert CHROMIUM is not None
    ours, its = os.pipe(), os.pipe()
    # It reads from descriptor 3 and writes to 4, which may be taken here.
    given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (ours[0], its[1])]
    script = f'exec "$0" "$@" 3<&{given[0]} 4>&{given[1]}'
    command = ["bash", "-c", script, CHROMIUM, *_OPTIONS, f"--user-data-dir={scratch}"]
    process = subprocess.Popen(
        command, pass_fds=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=scratch,
        env={**os.environ, "HOME": str(scratch)},
    )  # fmt: skip
    for descriptor in (ours[0], its[1], *given):
        os.close(descriptor)
    end = threading.Timer(timeout_s, process.kill)
    end.start()
    with os.fdopen(ours[1], "wb") as commands, os.fdopen(its[0], "rb") as answers:
        try:
            yield Browser(commands, answers)
        finally:
            end.cancel()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
