"""The relay's requests and answers (docs/spec/relay.md): what aiohttp's server calls for each of them.

Decides from the request alone what may be done, then asks the cache, the transfers and answers under way, or upstream.
Refuses what is no key before any I/O, writes that its access does not include, and bodies that are too long. Shows no
token to anybody.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Final

from aiohttp import web

from dcr_store.errors import DcrError, NotFoundError
from dcr_store.objects.fallback import FallbackObjects
from dcr_store.objects.keys import check_key
from dcr_store.relay import rules
from dcr_store.relay.answers import Answers, Value
from dcr_store.relay.cache import Cache
from dcr_store.relay.flights import Flight, Flights
from dcr_store.relay.wire import (
    HEADERS,
    RefusedError,
    beyond_end,
    content_range,
    cut,
    cutting,
    decoded,
    forbidden,
    found_value,
    has_range,
    json_answer,
    prefix_of,
    range_of,
    refusal,
)

N_TRANSFERS: Final = 32
N_QUESTIONS: Final = 32
N_WRITES: Final = 32
BODIES_NBYTES: Final = 2 << 30  # of all bodies held at a time, as far as they have arrived
ANSWERS_NBYTES: Final = 1 << 30  # of all answers in memory on their way to clients; beyond, no more are begun
SILENCE_S: Final = 60.0  # longest wait for more of a body, and for a client to take more of an answer
LEFT_S: Final = 1.0  # after which it is asked whether a client that waits is still there
FILE_NBYTES: Final = 1 << 20
_OBJECTS: Final = "/v1/objects/"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class Relay:
    """What stands behind the server. Used in one event loop.

    Parameters
    ----------
    upstream : FallbackObjects
    cache : Cache
    access : {"members", "publish", "all"}
        What is passed on.
    token : str, optional
        The shared secret.
    tell : callable
        Called with a sentence for what the operator should know.
    """

    def __init__(
        self,
        upstream: FallbackObjects,
        cache: Cache,
        *,
        access: str = rules.MEMBERS,
        token: str | None = None,
        tell: Callable[[str], None],
    ) -> None:
        self._upstream, self._cache, self._access, self._tell = upstream, cache, access, tell
        self._token = None if token is None else token.encode()
        # Apart, so that the end of a log is told while all transfers are busy.
        self._pools = [
            ThreadPoolExecutor(n, thread_name_prefix=f"dcr-relay-{name}")
            for name, n in (("transfer", N_TRANSFERS), ("question", N_QUESTIONS), ("write", N_WRITES), ("disk", 4))
        ]
        transfers, questions, self._writes, self._disk = self._pools
        self._flights = Flights(cache, lambda key, sha256, past: upstream.stream(key, sha256, past=past), transfers)
        self._answers = Answers(questions)
        self._bodies_nbytes = self._answers_nbytes = 0
        self._is_stopping = False
        self._counts = {"requests": 0, "refused": 0, "served_nbytes": 0, "from_cache": 0}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        self._counts["requests"] += 1
        try:
            return await self._answer(request)
        except RefusedError as refused:
            found = refused
        except DcrError as error:
            found = refusal(error)
        except ConnectionError:
            return web.Response()  # to nobody: the client has left, or was cut off
        except Exception as error:
            self._tell(f"unexpected {type(error).__name__}: {error}; please report it")
            found = RefusedError(500, "storage", "the relay failed")
        self._counts["refused"] += 1
        body = {"error": found.kind, "message": found.message, **found.facts}
        headers = {**HEADERS, "Dcr-Error": found.kind}
        if found.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(
            status=found.status, headers=headers, body=json.dumps(body).encode(), content_type="application/json"
        )

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self._check_token(request)
        if self._is_stopping:
            raise RefusedError(503, "busy", "the relay is being stopped; repeat")
        path, _, query = request.raw_path.partition("?")
        if path.startswith(_OBJECTS):
            key = decoded(path.removeprefix(_OBJECTS))
            check_key(key)
            if request.method == "GET":
                return await self._get(request, key)
            if request.method == "HEAD":
                return await self._head(request, key)
            if request.method == "PUT":
                return await self._put(request, key)
            if request.method == "DELETE":
                return await self._delete(key)
        elif request.method == "GET" and path in ("/v1/list", "/v1/names"):
            return await self._list(request, path.removeprefix("/v1/"), prefix_of(query))
        elif request.method == "GET" and path == "/v1/status":
            return json_answer(self.status())
        raise RefusedError(400, "invalid-input", f"there is no {request.method} of this path; see docs/spec/relay.md")

    def _check_token(self, request: web.BaseRequest) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token):
            raise RefusedError(401, "token", "the token is missing or wrong")

    # ------------------------------------------------------------------ reading

    async def _get(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        sha256 = request.headers.get("Dcr-Sha256")
        if sha256 is not None and not _SHA256.fullmatch(sha256):
            raise RefusedError(400, "invalid-input", "Dcr-Sha256 is no SHA-256: 64 lower-case hex digits")
        past = self._asks_past(request)
        start, stop = range_of(request)
        if sha256 is None:
            if self._answers_nbytes > ANSWERS_NBYTES:
                raise RefusedError(503, "busy", "the relay holds as many answers as it can; repeat")
            if not has_range(request):
                value = await self._answers.give(
                    ("get", key), lambda: self._read(key, 0, None), is_final=rules.is_final(key), past=past
                )
                return await self._send(request, found_value(value))
            return await self._get_range(request, key, start, stop, past)
        while True:
            if flight := self._flights.find(key, sha256):
                return await self._pass_on(request, flight, start, stop)
            n_landed = self._flights.n_landed
            file = await self._run(self._disk, lambda: self._cache.open(key, sha256, past=past))
            # While the disk was asked the object may have begun to arrive, and may even have arrived.
            if file is not None or n_landed == self._flights.n_landed:
                break
        if file is not None:
            with file:
                return await self._send_file(request, key, sha256, file, start, stop)
        if stop is not None:
            return await self._get_range(request, key, start, stop, past)
        # From a place on: somebody's transfer broke off elsewhere, and others may come with other places.
        flight = self._flights.find(key, sha256) or self._flights.begin(key, sha256, past=past)
        return await self._pass_on(request, flight, start, stop)

    def _asks_past(self, request: web.BaseRequest) -> bool:
        """Return whether a request is to be answered past caches; those on the way upward are then doubted as well."""
        past = "no-cache" in request.headers.get("Cache-Control", "")
        if past and "Dcr-Sha256" not in request.headers:
            self._upstream.doubt(1.0)
        return past

    async def _get_range(
        self, request: web.BaseRequest, key: str, start: int, stop: int | None, past: bool
    ) -> web.StreamResponse:
        name = ("range", key, str(start), str(stop))
        value = found_value(await self._answers.give(name, lambda: self._read(key, start, stop), past=past))
        return await self._send(request, value, start)

    def _read(self, key: str, start: int, stop: int | None) -> Value:
        try:
            return self._upstream.get(key, start, stop)
        except NotFoundError:
            return None

    async def _send(self, request: web.BaseRequest, value: bytes, start: int | None = None) -> web.StreamResponse:
        """Send what is in memory: whole, or as the range from `start` on."""
        response = web.StreamResponse(headers={**HEADERS, "Content-Length": str(len(value))})
        if start is not None:
            response.headers.update(content_range(start, len(value)))
            response.set_status(206)
        self._answers_nbytes += len(value)
        try:
            with cutting(request):
                await response.prepare(request)
                for at in range(0, len(value), FILE_NBYTES):
                    await self._send_piece(response, value[at : at + FILE_NBYTES])
                await response.write_eof()
        finally:
            self._answers_nbytes -= len(value)
        return response

    async def _send_piece(self, response: web.StreamResponse, piece: bytes) -> None:
        async with asyncio.timeout(SILENCE_S):
            await response.write(piece)
        self._counts["served_nbytes"] += len(piece)

    async def _send_file(
        self, request: web.BaseRequest, key: str, sha256: str, file: BinaryIO, start: int, stop: int | None
    ) -> web.StreamResponse:
        nbytes = file.seek(0, 2)
        end = nbytes if stop is None else min(stop, nbytes)
        response = web.StreamResponse(headers={**HEADERS, "Content-Length": str(max(0, end - start))})
        if has_range(request):
            response.headers.update(content_range(start, end - start))
            response.set_status(206)
        self._counts["from_cache"] += 1
        file.seek(start)
        with cutting(request):
            await response.prepare(request)
            while start < end:
                piece = await self._run(self._disk, functools.partial(_read_piece, file, min(FILE_NBYTES, end - start)))
                if not piece:
                    self._tell(f"{key}: its copy on disk cannot be read to its end, and is dropped")
                    await self._run(self._disk, lambda: self._cache.drop(key, sha256))
                    raise cut(request)
                await self._send_piece(response, piece)
                start += len(piece)
            await response.write_eof()
        return response

    async def _pass_on(
        self, request: web.BaseRequest, flight: Flight, start: int, stop: int | None
    ) -> web.StreamResponse:
        """Send what has arrived, then the rest as it arrives; end only if the whole has proved right."""
        flight.join()
        try:
            if stop is not None:
                while await flight.beyond(flight.nbytes):
                    pass
            if not await _begun(request, flight, start):
                _raise(flight)
                if has_range(request):
                    raise beyond_end()
            response = web.StreamResponse(status=206 if has_range(request) else 200, headers=HEADERS)
            end = flight.nbytes if stop is None else min(stop, flight.nbytes)
            if flight.is_done and flight.error is None:
                response.content_length = end - start
            else:
                response.enable_chunked_encoding()
            with cutting(request):
                await response.prepare(request)
                while (stop is None or start < end) and await flight.beyond(start):
                    piece = flight.read(start)
                    if stop is not None:
                        piece = piece[: end - start]
                    await self._send_piece(response, piece)
                    start += len(piece)
                if flight.error is not None:
                    raise cut(request)
                await response.write_eof()
            return response
        finally:
            flight.leave()

    async def _head(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        past = self._asks_past(request)

        def ask() -> Value:
            nbytes = self._upstream.size(key)
            return None if nbytes is None else str(nbytes).encode()

        nbytes = found_value(await self._answers.give(("size", key), ask, past=past))
        return web.Response(headers={**HEADERS, "Content-Length": nbytes.decode()})

    async def _list(self, request: web.BaseRequest, kind: str, prefix: str) -> web.StreamResponse:
        past = self._asks_past(request)

        def ask() -> Value:
            if kind == "list":
                return json.dumps({"keys": self._upstream.list(prefix)}).encode()
            return json.dumps({"names": list(self._upstream.list_names(prefix))}).encode()

        found = found_value(await self._answers.give((kind, prefix), ask, past=past))
        return web.Response(headers=HEADERS, body=found, content_type="application/json")

    # ------------------------------------------------------------------ writing

    async def _put(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        condition = request.headers.get("If-None-Match")
        if condition not in (None, "*"):
            raise RefusedError(400, "invalid-input", "If-None-Match can only be *")
        sha256 = request.headers.get("Dcr-Sha256")
        allowed = rules.may_create(self._access, key) if condition else rules.may_overwrite(self._access, key, sha256)
        if not allowed:
            raise forbidden(self._access, key)
        nbytes = request.content_length
        if nbytes is None or request.headers.get("Content-Encoding"):
            raise RefusedError(400, "invalid-input", "a put needs Content-Length, and takes no Content-Encoding")
        longest = rules.longest_body_nbytes(self._access)
        if nbytes > longest:
            raise RefusedError(413, "too-large", f"the body has {nbytes} bytes, and this relay takes up to {longest}")
        body = bytearray()
        try:
            while piece := await self._body_piece(request, len(body)):
                body += piece
                self._bodies_nbytes += len(piece)
            if hashlib.sha256(body).hexdigest() != sha256:
                raise RefusedError(400, "digest", "the body is not the one that Dcr-Sha256 speaks of; nothing was put")
            if condition is None:
                await self._write(key, lambda: self._upstream.put(key, body))
                return web.Response(status=200, headers=HEADERS)
            if problem := rules.body_problem(self._access, key, bytes(body)):
                raise RefusedError(403, "forbidden", f"access {self._access} creates no such object: {problem}")
            if await self._write(key, lambda: self._upstream.put_if_absent(key, body)):
                return web.Response(status=201, headers=HEADERS)
            raise RefusedError(412, "occupied", "the key holds something else")
        finally:
            self._bodies_nbytes -= len(body)

    async def _body_piece(self, request: web.BaseRequest, n_arrived: int) -> bytes:
        """Return more of a body, b"" at its end; refuse one that does not come, or for which there is no room."""
        if self._bodies_nbytes >= BODIES_NBYTES:
            raise RefusedError(503, "busy", "the relay holds as many bodies as it can; nothing was put, repeat")
        try:
            async with asyncio.timeout(SILENCE_S):
                return await request.content.readany()
        except TimeoutError:
            message = f"no more of the body after {n_arrived} bytes and {SILENCE_S:.0f} s; nothing was put, repeat"
            raise RefusedError(503, "busy", message) from None

    async def _delete(self, key: str) -> web.StreamResponse:
        if not rules.may_delete(self._access):
            raise forbidden(self._access, key)
        await self._write(key, lambda: self._upstream.delete(key))
        await self._run(self._disk, lambda: self._cache.drop_key(key))
        return web.Response(status=204, headers=HEADERS)

    async def _write(self, key: str, write: Callable[[], Any]) -> Any:
        async def written() -> Any:
            try:
                return await self._run(self._writes, write)
            finally:
                self._answers.forget(key)  # also where the outcome is unknown

        # The write goes on if the client leaves: what it has done must be forgotten all the same.
        task = asyncio.ensure_future(written())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    # ------------------------------------------------------------------ end

    def status(self) -> dict[str, Any]:
        """Return what ``/v1/status`` tells."""
        return {
            "upstream": [each.url for each in self._upstream.upstreams],
            "access": self._access,
            "cached_objects": len(self._cache),
            "cached_nbytes": self._cache.nbytes,
            "transfers": self._flights.n_begun,
            "transferred_nbytes": self._flights.nbytes,
            "questions": self._answers.n_asked,
            **self._counts,
        }

    def stop(self) -> None:
        """Refuse what is asked from now on; what is under way goes on."""
        self._is_stopping = True

    def close(self) -> None:
        """End what is under way, after the last request."""
        self._flights.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


async def _begun(request: web.BaseRequest, flight: Flight, position: int) -> bool:
    """Wait as ``flight.beyond``; give up when the client has left meanwhile, so that no transfer waits for nobody."""
    while True:
        try:
            async with asyncio.timeout(LEFT_S):
                return await flight.beyond(position)
        except TimeoutError:
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client has left") from None


def _read_piece(file: BinaryIO, nbytes: int) -> bytes:
    try:
        return file.read(nbytes)
    except OSError:  # the disk fails
        return b""


def _raise(flight: Flight) -> None:
    if flight.error is not None:
        raise flight.error
