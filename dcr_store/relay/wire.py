"""What a relay's requests and answers look like (docs/spec/relay.md): keys, ranges, errors, connections cut off.

Knows nothing of what stands behind them. Refuses what is no request of a relay with ``RefusedError``.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final

from aiohttp import web

from dcr_store.errors import (
    DcrError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    StorageError,
)
from dcr_store.objects.keys import check_prefix
from dcr_store.objects.retry import is_transient
from dcr_store.relay.answers import Value

HEADERS: Final = {"Dcr-Relay": "1"}
_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, kind: str, message: str, facts: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.facts = status, kind, message, facts or {}


def decoded(text: str) -> str:
    """Return the text that is percent-encoded in a path or query."""
    try:
        return urllib.parse.unquote_to_bytes(text).decode("utf-8", "strict")
    except UnicodeDecodeError as error:
        raise RefusedError(400, "invalid-input", "the key is not UTF-8") from error


def prefix_of(query: str) -> str:
    """Return the prefix that a listing's query asks for."""
    name, equals, value = query.partition("=")
    if name != "prefix" or not equals or "&" in value:
        raise RefusedError(400, "invalid-input", "a listing needs ?prefix=… and nothing else")
    prefix = decoded(value)
    check_prefix(prefix)
    return prefix


def has_range(request: web.BaseRequest) -> bool:
    """Return whether a part of the object is asked for."""
    return "Range" in request.headers


def range_of(request: web.BaseRequest) -> tuple[int, int | None]:
    """Return the beginning of what is asked for, and its end or None."""
    text = request.headers.get("Range")
    if text is None:
        return 0, None
    match = _RANGE.fullmatch(text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise RefusedError(400, "invalid-input", "Range can only be bytes=A-B or bytes=A-")
    return int(match[1]), int(match[2]) + 1 if match[2] else None


def content_range(start: int, nbytes: int) -> dict[str, str]:
    """Return the header of a range of `nbytes` from `start` on; refuse one without bytes."""
    if nbytes <= 0:
        raise beyond_end()
    return {"Content-Range": f"bytes {start}-{start + nbytes - 1}/*"}


def beyond_end() -> RefusedError:
    """Return the refusal of a range at or after the end of the object."""
    return RefusedError(416, "range", "the range begins at or after the end of the object")


def found_value(value: Value) -> bytes:
    """Return an answer's body; refuse None, which says that there is no such object."""
    if value is None:
        raise RefusedError(404, "not-found", "no such object")
    return value


def json_answer(document: dict[str, Any]) -> web.Response:
    """Return an answer that is a JSON document."""
    return web.Response(headers=HEADERS, body=json.dumps(document).encode(), content_type="application/json")


def cut(request: web.BaseRequest) -> Exception:
    """Break the connection off, so that the client cannot take what it has for the whole."""
    if request.transport is not None:
        request.transport.abort()
    return ConnectionResetError("the transfer failed")


@contextlib.contextmanager
def cutting(request: web.BaseRequest) -> Iterator[None]:
    """Break the connection off where sending an answer fails: a second answer would count as the rest of the first."""
    try:
        yield
    except Exception as error:
        raise cut(request) from error


def forbidden(access: str, key: str) -> RefusedError:
    """Return the refusal of a write that is not passed on."""
    return RefusedError(403, "forbidden", f"this relay passes no such write on: its access is {access}", {"key": key})


def refusal(error: DcrError) -> RefusedError:
    """Return the answer that stands for an error of ours, or of upstream."""
    facts = {"key": error.key, "expected": error.expected, "found": error.found}
    known = {name: str(value) for name, value in facts.items() if value is not None}
    text = str(error.args[0])
    if isinstance(error, InvalidInputError):
        return RefusedError(400, "invalid-input", text, known)
    if isinstance(error, NotFoundError):
        return RefusedError(404, "not-found", text, known)
    if isinstance(error, OutcomeUnknownError):
        return RefusedError(504, "outcome-unknown", text, known)
    if isinstance(error, IntegrityError):
        return RefusedError(502, "integrity", text, known)
    if isinstance(error, StorageError) and is_transient(error):
        return RefusedError(503, "busy", text, known)
    return RefusedError(500, "storage", text, known)
