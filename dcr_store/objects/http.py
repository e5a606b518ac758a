"""Objects behind a relay, over HTTP (docs/spec/relay.md).

Makes one request a try; what another try may cure is left to ``retry``. Compares whole objects with the SHA-256 that
the caller expects, and asks once more past the relay's cache before it reports a difference. Refuses answers that are
not a relay's, and URLs that carry a secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, Final

from dcr_store.errors import IntegrityError, NotFoundError, StorageError
from dcr_store.objects import http_options
from dcr_store.objects.flat import flat
from dcr_store.objects.http_connections import Connections, UntrustedError
from dcr_store.objects.keys import check_key, check_prefix, check_range, key_problem
from dcr_store.objects.retry import RetryPolicy, TransientError, resolving, retrying

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from http.client import HTTPResponse

    from dcr_store.ports import Bytes

TIMEOUTS_S: Final = (20.0, 60.0)  # longest silence of a relay that reads, and of one that passes a write upward
EACH_TIMEOUTS_S: Final = (8.0, 20.0)  # the same where there is another way
BLOCK_NBYTES: Final = 1 << 18
_SUCCESS: Final = (200, 201, 204, 206)
_RETRIED: Final = {408, 425, 429, 502, 503, 504}  # of whatever stands before a relay
_ERROR_NBYTES: Final = 1 << 16  # that are read of the body of an error
_LISTING_NBYTES: Final = 1 << 28  # the longest listing that is taken
_OBJECT_NBYTES: Final = 1 << 30  # the longest object that is taken where its SHA-256 is not known
_RANGE: Final = re.compile(r"bytes=([0-9]+)-([0-9]*)")
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(?:\*|([0-9]{1,18}))")


class _BeyondEndError(Exception):
    """A range begins at or past the end of the object."""


class HttpObjects:
    """An object store behind a relay. See ``dcr_store.ports.ObjectStore``.

    Parameters
    ----------
    url : str
        ``http://host:port`` or ``https://…``, with a path if the relay stands behind one.
    storage_options : mapping, optional
        ``relay_token`` or ``relay_token_file`` (the shared secret, or the file that holds it), ``relay_ca_file``
        (certificates of the authority that signed the relay's). By default the environment variables of the same
        names: ``DCR_RELAY_TOKEN``, ``DCR_RELAY_TOKEN_FILE``, ``DCR_RELAY_CA_FILE``.
    policy : RetryPolicy, optional
        How long failing operations are repeated.
    timeouts_s : (float, float), optional
        Longest silence in reading and in writing.

    Raises
    ------
    InvalidInputError
        The URL or an option cannot be used.
    """

    is_local = False

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        policy: RetryPolicy | None = None,
        timeouts_s: tuple[float, float] = TIMEOUTS_S,
    ) -> None:
        parts = http_options.split(url)
        options = http_options.options(url, storage_options or {})
        self._path = parts.path.rstrip("/")
        self._policy = policy or RetryPolicy()
        self._read_timeout_s, self._write_timeout_s = timeouts_s
        self._headers = {"Accept-Encoding": "identity"}
        if token := http_options.token(options):
            self._headers["Authorization"] = f"Bearer {token}"
        tls = http_options.tls(options.get("relay_ca_file")) if parts.scheme == "https" else None
        self._connections = Connections(parts.hostname or "", parts.port or (443 if tls else 80), tls)
        self._doubts_until = 0.0
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"

    def doubt(self, for_s: float) -> None:
        """Ask past the relay's short-lived answers for a while.

        For those who come from another relay and may have seen newer ones there. A shorter doubt ends no longer one.
        """
        self._doubts_until = max(self._doubts_until, time.monotonic() + for_s)

    # ------------------------------------------------------------------ reading

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of an object; ``NotFoundError`` if there is none.

        A whole object is compared with `sha256`; ``IntegrityError`` if the relay has only other bytes.
        """
        check_key(key)
        check_range(key, start, stop)
        if stop == start:
            if self.size(key) is None:
                raise NotFoundError(f"no such object in {self.url}", key=key)
            return b""
        try:
            data = retrying(self._policy, "get", key, lambda: self._get_once(key, start, stop, sha256))
            if sha256 is None or start > 0 or stop is not None or _sha256(data) == sha256:
                return data
            data = retrying(self._policy, "get", key, lambda: self._get_once(key, start, stop, sha256, past=True))
        except _BeyondEndError:
            return b""
        found = _sha256(data)
        if found != sha256:
            raise IntegrityError(f"{self.url} answers with other bytes", key=key, expected=sha256, found=found)
        return data

    def _get_once(self, key: str, start: int, stop: int | None, sha256: str | None, *, past: bool = False) -> bytes:
        headers = self._asking(start, stop, sha256, past)
        with self._ask("get", key, "GET", _object(key), headers) as response:
            nbytes = _check_range(response, headers)
            longest = stop - start if stop is not None else None if sha256 is not None else _OBJECT_NBYTES
            data = _body(response, longest)
            if "Range" in headers and (not data or len(data) != (nbytes or len(data))):
                raise TransientError(f"answered {len(data)} bytes of {headers['Range']!r}")
            return data

    def blocks(self, key: str, sha256: str, start: int = 0, *, past: bool = False) -> Iterator[bytes]:
        """Yield the object from `start` on, in pieces as they come; one try, and nothing is compared.

        Parameters
        ----------
        key, sha256 : str
            The object, and what it should be.
        start : int
            Where to begin.
        past : bool
            Whether to ask past the relay's cache.

        Raises
        ------
        TransientError
            The transfer ended early.
        """
        headers = self._asking(start, None, sha256, past)
        try:
            with self._ask("get", key, "GET", _object(key), headers) as response:
                _check_range(response, headers)
                while piece := response.read1(BLOCK_NBYTES):
                    yield piece
                if response.length:  # read1 does not say so itself
                    raise TransientError(f"the answer ended {response.length} bytes early")
        except _BeyondEndError:
            return

    def _asking(self, start: int, stop: int | None, sha256: str | None, past: bool) -> dict[str, str]:
        headers = {}
        if sha256 is not None:
            headers["Dcr-Sha256"] = sha256
        if start > 0 or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        if past or (sha256 is None and time.monotonic() < self._doubts_until):
            headers["Cache-Control"] = "no-cache"
        return headers

    def size(self, key: str) -> int | None:
        """Return an object's nbytes, or None if there is none."""
        check_key(key)

        def look() -> int:
            with self._ask("look up", key, "HEAD", _object(key), self._asking(0, None, None, False)) as response:
                response.read()
                nbytes = response.headers.get("Content-Length", "")
                if not re.fullmatch(r"[0-9]{1,18}", nbytes):
                    raise TransientError(f"told no size: Content-Length is {nbytes!r}")
                return int(nbytes)

        try:
            return retrying(self._policy, "look up", key, look)
        except NotFoundError:
            return None

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → nbytes of every object whose key starts with `prefix`."""
        found = self._listing("list", prefix).get("keys")
        if not isinstance(found, dict) or not all(type(nbytes) is int and nbytes >= 0 for nbytes in found.values()):
            raise StorageError(f"{self.url} answered a listing without keys and their nbytes", key=prefix)
        return {key: nbytes for key, nbytes in found.items() if key_problem(key) is None}

    def list_names(self, prefix: str) -> Sequence[str]:
        """Return the sorted next path components below `prefix`."""
        found = self._listing("names", prefix).get("names")
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise StorageError(f"{self.url} answered a listing without names", key=prefix)
        return [name for name in found if key_problem(prefix + name) is None]

    def _listing(self, kind: str, prefix: str) -> dict[str, Any]:
        check_prefix(prefix)
        target = f"/v1/{kind}?prefix={urllib.parse.quote(prefix, safe='')}"

        def attempt() -> dict[str, Any]:
            with self._ask("list", prefix, "GET", target, self._asking(0, None, None, False)) as response:
                found = _document(_body(response, _LISTING_NBYTES))
                if found is None:
                    raise TransientError("answered a listing that is no JSON object")
                return found

        return retrying(self._policy, "list", prefix, attempt)

    # ------------------------------------------------------------------ writing

    def put(self, key: str, data: Bytes) -> None:
        """Store an object, atomically and durably, over whatever is there."""
        check_key(key)
        body = flat(data)
        retrying(self._policy, "put", key, lambda: self._put_once("put", key, body, {}))

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        """Create an object unless the key is taken; see ``dcr_store.ports.ObjectStore``."""
        check_key(key)
        body = flat(data)
        return resolving(
            self._policy,
            key,
            body,
            lambda: self._put_once("create", key, body, {"If-None-Match": "*"}),
            lambda: self._get_once(key, 0, None, None, past=True),
        )

    def _put_once(self, action: str, key: str, body: memoryview, condition: dict[str, str]) -> bool:
        headers = {"Dcr-Sha256": _sha256(body), "Content-Type": "application/octet-stream", **condition}
        with self._ask(action, key, "PUT", _object(key), headers, body) as response:
            _body(response, _ERROR_NBYTES)
            if condition and response.status not in (201, 412):
                # Something on the way may have dropped the condition: what was there may be overwritten, or not.
                raise TransientError(f"answered {response.status} to a conditional put, instead of 201 or 412")
            return response.status != 412

    def delete(self, key: str) -> None:
        """Delete an object; one that does not exist is no error."""
        check_key(key)

        def attempt() -> None:
            with self._ask("delete", key, "DELETE", _object(key), {}) as response:
                _body(response, _ERROR_NBYTES)

        retrying(self._policy, "delete", key, attempt)

    # ------------------------------------------------------------------ the wire

    @contextlib.contextmanager
    def _ask(
        self, action: str, key: str, method: str, target: str, headers: dict[str, str], body: memoryview | None = None
    ) -> Iterator[HTTPResponse]:
        """Yield the response to one request if it is a success, or a refused creation; raise what else it is."""
        timeout_s = self._write_timeout_s if method in ("PUT", "DELETE") else self._read_timeout_s
        problem: Exception | None = None
        try:
            with self._connections.request(
                method, self._path + target, {**self._headers, **headers}, body, timeout_s
            ) as response:
                from_relay = response.headers.get("Dcr-Relay") is not None
                if not response.headers or (from_relay and response.status != 204 and not _tells_its_end(response)):
                    raise TransientError("the answer ended in its head")
                if from_relay and (response.status in _SUCCESS or (response.status, action) == (412, "create")):
                    yield response
                else:
                    # Read to its end, so that the connection can be used again: the end of a log is a 404.
                    problem = _problem(response, from_relay, self.url, action, key, has_range="Range" in headers)
            if problem is not None:
                raise problem
        except TransientError as error:
            raise TransientError(f"{self.url}: {error}", sent=error.sent) from error
        except UntrustedError as error:
            raise StorageError(f"cannot {action} at {self.url}: {error}", key=key) from error

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()


def _problem(
    response: HTTPResponse, from_relay: bool, url: str, action: str, key: str, *, has_range: bool
) -> Exception:
    """Return the exception that stands for an answer that is no success."""
    status, kind = response.status, response.headers.get("Dcr-Error", "")
    told = _told(response)
    text = str(told.get("message", ""))
    said = f"answered {status} {kind or response.reason}" + (f" ({text})" if text else "")
    if not from_relay:
        if status in _RETRIED:
            return TransientError(said)
        return StorageError(f"cannot {action}: {url} {said}, and is no relay: check the URL", key=key)
    if kind == "not-found" and action in ("get", "look up"):
        return NotFoundError(f"no such object in {url}", key=key)
    if kind == "range":
        return _BeyondEndError(said) if has_range else TransientError(f"{said} to a request without Range")
    if kind == "integrity":
        found = {name: str(told[name]) for name in ("expected", "found") if name in told}
        return IntegrityError(f"{url} has only other bytes: {text}", key=key, **found)
    if kind in ("busy", "digest"):
        return TransientError(said, sent=False)
    if kind == "outcome-unknown":
        return TransientError(said)
    hint = ""
    if kind == "token":
        hint = "; give it with the storage option relay_token_file or the environment variable DCR_RELAY_TOKEN_FILE"
    return StorageError(f"cannot {action}: {url} {said}{hint}", key=key)


def _tells_its_end(response: HTTPResponse) -> bool:
    return "Content-Length" in response.headers or "Transfer-Encoding" in response.headers


def _check_range(response: HTTPResponse, headers: Mapping[str, str]) -> int | None:
    """Return how many bytes the body must have, or None where the answer does not tell; refuse one of other bytes."""
    if ("Range" in headers) != (response.status == 206):
        raise TransientError(
            f"answered {response.status} to a request {'with' if 'Range' in headers else 'without'} Range"
        )
    text = response.headers.get("Content-Range")
    wanted = _RANGE.fullmatch(headers.get("Range", ""))
    if wanted is None or text is None:
        return None
    told = _CONTENT_RANGE.fullmatch(text)
    start, longest = int(wanted[1]), int(wanted[2]) if wanted[2] else None
    if told is None or int(told[1]) != start or (longest is not None and int(told[2]) > longest):
        raise TransientError(f"answered the range {text!r} to a request for {headers['Range']!r}")
    nbytes = int(told[2]) - start + 1
    if told[3]:
        end = int(told[3]) if longest is None else min(int(told[3]), longest + 1)
        if start + nbytes != end:
            raise TransientError(f"answered the range {text!r} to a request for {headers['Range']!r}")
    return nbytes


def _body(response: HTTPResponse, longest: int | None) -> bytes:
    """Return the body; ``TransientError`` for one of more than `longest` bytes, of which no more are read."""
    told = response.length  # None where it comes in chunks
    if longest is not None and told is not None and told > longest:
        raise TransientError(f"answered {told} bytes, more than the {longest} that are taken")
    if longest is None or told is not None:
        return response.read()
    data = response.read(longest + 1)
    if len(data) > longest:
        raise TransientError(f"answered more than the {longest} bytes that are taken")
    return data


def _document(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object that `data` is, or None if it is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _told(response: HTTPResponse) -> dict[str, Any]:
    """Return what the body of an error tells; the connection is not used again where it is longer than that."""
    return _document(response.read(_ERROR_NBYTES)) or {}


def _object(key: str) -> str:
    return "/v1/objects/" + urllib.parse.quote(key)


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
