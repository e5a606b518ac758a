"""Stand-ins for engines: servers that take exactly the requests that SGLang and vLLM document, and do what these say.

They check methods, paths, queries, bodies and their order; ``weights`` is what a real load of the directory gave.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

Answer = tuple[int, Any]
BAD = 422, {"detail": "Unprocessable"}


class Engine:
    """One server.

    Attributes
    ----------
    requests : list of (path, query, body)
        As they came.
    paused : bool
    weights : dict of str to bytes, or None
        Files of the directory that was loaded last.
    version : str or None
        The label that was set last.
    fail : dict of str to list
        Path → what to answer instead, once each: a status and body, or a callable that is given the handler.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paused = False
        self.weights: dict[str, bytes] | None = None
        self.version: str | None = None
        self.fail: dict[str, list[Answer | Callable[[BaseHTTPRequestHandler], None]]] = {}

    def __enter__(self) -> Self:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                parts = urlsplit(self.path)
                query = dict(parse_qsl(parts.query))
                request = parts.path, query, json.loads(body)
                engine.requests.append(request)
                engine.headers.append(dict(self.headers))
                pending = engine.fail.get(parts.path)
                planned = pending.pop(0) if pending else None
                if callable(planned):
                    planned(self)
                    return
                status, answer = planned or engine.answer(*request)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    def load(self, directory: str) -> bool:
        place = Path(directory)
        if not place.is_absolute() or place.is_symlink() or not list(place.glob("*.safetensors")):
            return False
        self.weights = {path.name: path.read_bytes() for path in sorted(place.glob("*.safetensors"))}
        return True

    def answer(self, path: str, query: dict[str, str], body: Any) -> Answer:
        raise NotImplementedError


class SglangStandIn(Engine):
    """SGLang 0.5.23: ``pause_generation``, ``update_weights_from_disk``, ``continue_generation``."""

    def answer(self, path: str, query: dict[str, str], body: Any) -> Answer:
        if query or not isinstance(body, dict):
            return BAD
        if path == "/pause_generation":
            if set(body) - {"mode"} or body.get("mode", "abort") not in ("abort", "retract", "in_place"):
                return BAD
            self.paused, self.mode = True, body.get("mode", "abort")
            return 200, {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            if set(body) - {"torch_empty_cache"}:
                return BAD
            self.paused = False
            return 200, {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/update_weights_from_disk":
            known = {"model_path": str, "load_format": str, "weight_version": str, "flush_cache": bool}
            if set(body) - set(known) or any(not isinstance(body[name], known[name]) for name in body):
                return BAD
            if not self.paused or (self.mode == "in_place" and body.get("flush_cache", True)):
                return 400, {"success": False, "message": "Cache flush failed", "num_paused_requests": 0}
            if not self.load(body["model_path"]):
                return 400, {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
            self.version = body.get("weight_version", self.version)
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        return 404, {"detail": "Not Found"}


class VllmStandIn(Engine):
    """vLLM 0.32.0 in development mode; `transfers`: with a weight transfer backend that reads directories."""

    def __init__(self, transfers: bool) -> None:
        super().__init__()
        self.transfers = transfers
        self.initialised = self.active = False

    def answer(self, path: str, query: dict[str, str], body: Any) -> Answer:
        if path == "/pause":
            if set(query) - {"mode", "clear_cache"} or query.get("mode", "abort") not in ("abort", "wait", "keep"):
                return BAD
            self.paused = True
            return 200, {"status": "paused"}
        if query:
            return BAD
        if path == "/resume":
            self.paused = False
            return 200, {"status": "resumed"}
        if path == "/update_weight_version":
            if set(body) != {"new_version"} or not isinstance(body["new_version"], str):
                return BAD
            self.version = body["new_version"]
            return 200, {"success": True, "new_version": self.version}
        if path == "/collective_rpc":
            if body.get("method") != "reload_weights" or set(body) - {"method", "kwargs", "args", "timeout"}:
                return 500, "Internal Server Error"
            if set(body["kwargs"]) != {"weights_path"} or not self.load(body["kwargs"]["weights_path"]):
                return 500, "Internal Server Error"
            return 200, {"results": [None]}
        return self._transfer(path, body)

    def _transfer(self, path: str, body: Any) -> Answer:
        if path == "/init_weight_transfer_engine":
            if not isinstance(body.get("init_info"), dict):
                return BAD
            if not self.transfers:
                return 500, "Internal Server Error"
            self.initialised = True
            return 200, {"message": "Weight transfer initialized"}
        if path == "/start_weight_update":
            if not self.initialised or self.active:
                return 500, "Internal Server Error"
            self.active = True
            return 200, {"message": "Weight update started"}
        if path == "/update_weights":
            if set(body) != {"update_info"}:
                return BAD
            if not self.active or set(body["update_info"]) != {"path"} or not self.load(body["update_info"]["path"]):
                self.active = False
                return 500, "Internal Server Error"
            return 200, {"message": "Weights updated"}
        if path == "/finish_weight_update":
            if set(body) - {"weight_version"}:
                return BAD
            if not self.active:
                return 500, "Internal Server Error"
            self.active = False
            self.version = body.get("weight_version", self.version)
            return 200, {"message": "Weight update finished"}
        return 404, {"detail": "Not Found"}


def hang(handler: BaseHTTPRequestHandler) -> None:
    """Never answer."""
    time.sleep(30)


def dribble(handler: BaseHTTPRequestHandler) -> None:
    """Answer so slowly that each byte is in time and the whole never is."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    try:
        for _ in range(600):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        return


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection instead of an answer."""
    handler.connection.close()


def nonsense(handler: BaseHTTPRequestHandler) -> None:
    """Answer with what is not HTTP."""
    handler.wfile.write(b"\x00\x01 hello\r\n\r\n")
