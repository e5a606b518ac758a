"""Engines that are told over HTTP to take a version from a directory: SGLang and vLLM (docs/engines.md).

Generation is paused and the weights are loaded; it goes on when the version is to be served. An engine that has said
that it took nothing up goes on with its old weights; one whose weights may be neither the old nor the new stays
paused, and the next try, which repeats everything, ends that. Refuses URLs and options that it does not know, before
any request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, urlencode, urlsplit

from dcr_store.errors import DcrError, InvalidInputError, StorageError

TIMEOUT_S: Final = 600.0
TOKEN_VARIABLE: Final = "DCR_ENGINE_TOKEN"
_MAX_ANSWER_NBYTES: Final = 1 << 20
_MAX_SHOWN: Final = 500
_NOT_TAKEN_UP: Final = (401, 403, 404, 405)
"""Answers of a server that has not handed the request to its engine."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version that a target is about to hold, or holds.

    Attributes
    ----------
    version, root : str
        ``line@number``, and its state root.
    directory : str
        Where the target is; of versions side by side the directory of the current one itself.
    previous : str or None
        The version that the target held before, if that was known.
    """

    version: str
    root: str
    directory: str
    previous: str | None


class Taker(Protocol):
    """Whom a version is told to."""

    @property
    def name(self) -> str:
        """Who it is, for people."""

    def take(self, arrival: Arrival) -> None:
        """Tell it, and wait until it has taken the version; repeating that does no harm. Raises ``StorageError``."""

    def serve(self) -> None:
        """Let it serve what it has taken; repeating that does no harm. Raises ``StorageError``."""


class EngineError(StorageError):
    """An engine did not take a version.

    Attributes
    ----------
    status : int or None
        What it answered; None if there was no answer, so that nobody knows what it did.
    """

    def __init__(self, message: str, *, key: str, status: int | None, found: str) -> None:
        super().__init__(message, key=key, expected="200", found=found)
        self.status = status


class Http:
    """Posts JSON to one server, each request within a time.

    Parameters
    ----------
    url : str
        ``http://host:port`` or ``https://…``, possibly with a path before those of the requests.
    timeout_s : float
        For a whole request.

    Raises
    ------
    InvalidInputError
        If the URL is none that a request can be sent to, or the token none that can be sent.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        expected = "http://host:port, or https"
        try:
            parts = urlsplit(url)
            host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
            if parts.scheme not in ("http", "https") or not host or parts.username is not None or not _is_plain(url):
                raise InvalidInputError("is no address of an engine", key=url, expected=expected, found=url)
            host.encode("idna")  # as each request will do
        except ValueError as error:
            raise InvalidInputError(
                f"is no address of an engine: {error}", key=url, expected=expected, found=url
            ) from error
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._timeout_s = host, timeout_s
        self._headers = _headers()

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Return the decoded answer to a request, None if it is no JSON; ``EngineError`` if it is no success."""
        key = self.url + path.partition("?")[0]
        deadline_s = time.monotonic() + self._timeout_s
        connection = self._make(self._host, self._port, timeout=self._timeout_s)
        is_late = threading.Event()
        timer: threading.Timer | None = None
        try:
            connection.connect()
            # The time-out of a socket starts again with each byte.
            timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), _cut, [connection.sock, is_late])
            timer.daemon = True
            timer.start()
            connection.request("POST", self._prefix + path, json.dumps(body or {}).encode(), self._headers)
            with connection.getresponse() as response:
                status, data = response.status, response.read(_MAX_ANSWER_NBYTES)
        except (OSError, ValueError, http.client.HTTPException) as error:
            late = is_late.is_set() or isinstance(error, TimeoutError)
            what = f"no answer within {self._timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            raise EngineError("the engine did not answer", key=key, status=None, found=what) from error
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()
        if is_late.is_set():  # what came until then may pass for an answer
            what = f"no whole answer within {self._timeout_s:g} s"
            raise EngineError("the engine did not answer", key=key, status=None, found=what)
        text = data.decode(errors="replace")
        if status != 200:
            raise EngineError("the engine refused", key=key, status=status, found=f"{status}: {text[:_MAX_SHOWN]}")
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return None


def _is_plain(text: str) -> bool:
    """Whether a text can stand in a request as it is."""
    return text.isascii() and text.isprintable() and " " not in text


def _headers() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not _is_plain(token):
        # The token itself is shown nowhere.
        raise InvalidInputError(
            "is no token that can be sent",
            key=TOKEN_VARIABLE,
            expected="printable ASCII characters, no space between them",
            found=f"{len(token)} characters, others among them",
        )
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})


def _cut(connected: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _loading(resume: Callable[[], object]) -> Iterator[None]:
    """Let generation go on if loading was not even taken up; say that it does not if weights may be a mixture."""
    try:
        yield
    except EngineError as error:
        if error.status in _NOT_TAKEN_UP:
            with contextlib.suppress(DcrError):
                resume()
            raise
        raise EngineError(
            f"{error.args[0]}; it stays paused, because its weights may be neither the old nor the new ones",
            key=str(error.key),
            status=error.status,
            found=str(error.found),
        ) from error


class Sglang:
    """An SGLang server; `pause` is ``retract``, ``abort`` or ``in_place``."""

    modes: Final = ("retract", "abort", "in_place")

    def __init__(self, server: Http, pause: str) -> None:
        self._server, self._pause = server, pause
        self.name = f"sglang {server.url}"

    def take(self, arrival: Arrival) -> None:
        """Pause, load from the directory."""
        server = self._server
        server.post("/pause_generation", {"mode": self._pause})
        with _loading(self.serve):
            # Requests that are paused in place keep their KV cache, and flushing it would fail.
            flushes = self._pause != "in_place"
            body = {"model_path": arrival.directory, "weight_version": arrival.version, "flush_cache": flushes}
            answer = server.post("/update_weights_from_disk", body)
            if not isinstance(answer, dict) or answer.get("success") is not True:
                key = f"{server.url}/update_weights_from_disk"
                raise EngineError("the engine refused", key=key, status=200, found=f"{answer!r:.{_MAX_SHOWN}}")

    def serve(self) -> None:
        """Let generation go on."""
        self._server.post("/continue_generation")


class _Vllm:
    """What both ways of telling a vLLM server have in common; `pause` is ``keep``, ``abort`` or ``wait``."""

    modes: Final = ("keep", "abort", "wait")
    kind: str

    def __init__(self, server: Http, pause: str) -> None:
        self._server, self._pause = server, pause
        self.name = f"{self.kind} {server.url}"

    def take(self, arrival: Arrival) -> None:
        """Pause, load from the directory."""
        self._server.post("/pause?" + urlencode({"mode": self._pause, "clear_cache": "true"}))
        self._load(arrival)

    def serve(self) -> None:
        """Let generation go on."""
        self._server.post("/resume")

    def _load(self, arrival: Arrival) -> None:
        raise NotImplementedError


class VllmReload(_Vllm):
    """A vLLM server that loads the directory itself, by its workers' ``reload_weights``."""

    kind = "vllm-reload"

    def _load(self, arrival: Arrival) -> None:
        with _loading(self.serve):
            body = {"method": "reload_weights", "kwargs": {"weights_path": arrival.directory}}
            self._server.post("/collective_rpc", body)
        self._server.post("/update_weight_version", {"new_version": arrival.version})


class Vllm(_Vllm):
    """A vLLM server with a weight transfer backend whose ``update_info`` is the path of a directory."""

    kind = "vllm"

    def __init__(self, server: Http, pause: str) -> None:
        super().__init__(server, pause)
        self._is_initialised = False

    def _load(self, arrival: Arrival) -> None:
        try:
            self._start()
        except EngineError:
            self._is_initialised = False  # it may have been started anew
            with contextlib.suppress(DcrError):
                self.serve()
            raise
        with _loading(self.serve):
            self._server.post("/update_weights", {"update_info": {"path": arrival.directory}})
            self._server.post("/finish_weight_update", {"weight_version": arrival.version})

    def _start(self) -> None:
        """Begin an update; one that an earlier try has left open is ended first, and all of it is loaded again."""
        server = self._server
        if not self._is_initialised:
            server.post("/init_weight_transfer_engine", {"init_info": {}})
            self._is_initialised = True
        try:
            server.post("/start_weight_update")
        except EngineError as error:
            if error.status in (None, *_NOT_TAKEN_UP):
                raise
            with contextlib.suppress(EngineError):
                server.post("/finish_weight_update")
            server.post("/start_weight_update")


_KINDS: Final[dict[str, type[Sglang] | type[Vllm] | type[VllmReload]]] = {
    "sglang": Sglang,
    "vllm": Vllm,
    "vllm-reload": VllmReload,
}


def engine(text: str) -> Taker:
    """Return the engine that ``KIND=URL`` names, with ``?pause=MODE&timeout_s=SECONDS`` behind the URL.

    Raises
    ------
    InvalidInputError
        If there is no such kind, mode or option, or the URL is none.
    """
    kind, _, url = text.partition("=")
    if kind not in _KINDS:
        raise InvalidInputError(
            "is no kind of engine", key=text, expected=" or ".join(f"{name}=URL" for name in _KINDS), found=kind
        )
    made = _KINDS[kind]
    address, _, query = url.partition("?")
    options = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    unknown = sorted(set(options) - {"pause", "timeout_s"})
    pause = options.get("pause", made.modes[0])
    if unknown or pause not in made.modes:
        raise InvalidInputError(
            "is no option of the engine",
            key=text,
            expected=f"pause={'|'.join(made.modes)} or timeout_s=SECONDS",
            found=unknown[0] if unknown else f"pause={pause}",
        )
    return made(Http(address, _seconds(text, options.get("timeout_s"))), pause)


def _seconds(text: str, value: str | None) -> float:
    if value is None:
        return TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e6:
        raise InvalidInputError("is no time", key=text, expected="timeout_s above 0", found=value)
    return seconds
