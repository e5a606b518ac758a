"""Canonical JSON (docs/spec/v1.md §3): one document, one byte string, one SHA-256.

Refuses duplicate keys, NaN and infinities, and bytes that are not UTF-8.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any, Final, NoReturn

from dcr_store.errors import FormatError, IntegrityError, InvalidInputError

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
MAX_DEPTH: Final = 64
MAX_METADATA_DEPTH: Final = 32  # documents wrap metadata in levels of their own


def encode(document: object, max_depth: int = MAX_DEPTH) -> bytes:
    """Return `document` as canonical JSON.

    Parameters
    ----------
    document : object
        Dicts with text keys, lists, tuples, text, numbers, bools and None.
    max_depth : int
        How many levels it may nest.

    Raises
    ------
    InvalidInputError
        If it holds something that JSON cannot say (NaN, infinity, a key that is no string, an object of another type),
        or nests so deep that a reader might not get to its end.
    """
    try:
        _check(document, max_depth)
        return _ENCODER.encode(document).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"cannot be written as JSON: {error}; use text, finite numbers, lists, objects"
        ) from error


def _check(value: object, levels: int) -> None:
    """Refuse keys that json.dumps would turn into text by itself (two of them could meet), and too many levels."""
    if type(value) in _PLAIN or not isinstance(value, _NESTED):
        return
    if levels == 0:
        raise InvalidInputError("cannot be written as JSON: it nests too many levels of objects and lists; flatten it")
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str and not isinstance(key, str):
                raise InvalidInputError(f"cannot be written as JSON: the key {key!r} is no string; use str({key!r})")
        value = value.values()
    for item in value:
        if type(item) not in _PLAIN:  # which most are, and which costs less to ask
            _check(item, levels - 1)


def decode(data: bytes, key: str) -> Any:
    """Parse JSON strictly.

    Parameters
    ----------
    data : bytes
        UTF-8.
    key : str
        Where the bytes come from, for errors.

    Raises
    ------
    FormatError
        If the bytes are no JSON of the strict kind.
    """
    try:
        value = _DECODER.decode(data.decode())
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()  # fails where half a pair stands alone
        return value
    except UnicodeEncodeError as error:
        raise FormatError(
            "is not a JSON document of dcr_store: it holds text that is not valid Unicode; restore it from a good copy",
            key=key,
        ) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"is not a JSON document of dcr_store: {error}; restore it from a good copy", key=key
        ) from error


def decode_object(data: bytes, key: str, document_format: str) -> dict[str, Any]:
    """Parse a document and check its ``format`` field; ``FormatError`` if it is another one's."""
    document = decode(data, key)
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != document_format:
        raise FormatError(
            "is a foreign document; is this the right store?", key=key, expected=document_format, found=found
        )
    result: dict[str, Any] = document
    return result


def sha256(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of `data` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def check_sha256(data: bytes, expected: str, key: str) -> None:
    """Compare an object with its reference; ``IntegrityError`` naming the key if it is another one."""
    found = sha256(data)
    if found != expected:
        raise IntegrityError(
            "the stored object is damaged or not the one recorded; restore it from a copy of the store",
            key=key,
            expected=f"sha256 {expected}",
            found=f"sha256 {found}, {len(data)} bytes",
        )


def seal_body(body: dict[str, Any]) -> bytes:
    """Return a derived document (§10): `body` beside the SHA-256 of its canonical JSON."""
    return encode({"body": body, "sha256": sha256(encode(body))})


def open_body(data: bytes, key: str) -> dict[str, Any] | None:
    """Return the body of a derived document, or None if it is damaged or foreign: then it counts as missing."""
    try:
        document = decode(data, key)
        if not isinstance(document, dict) or not isinstance(document.get("body"), dict):
            return None
        body: dict[str, Any] = document["body"]
        return body if sha256(encode(body)) == document.get("sha256") else None
    except (FormatError, InvalidInputError):  # the latter: text that is not Unicode cannot be encoded again
        return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"duplicate key {name!r}")
            seen.add(name)
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_NESTED: Final = (dict, list, tuple)
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
