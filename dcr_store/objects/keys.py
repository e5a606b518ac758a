"""Which strings may be object keys: checked before any I/O, alike for every backend.

A key is a relative path of ``/``-separated components. Refuses what one backend would take and another not, and
whatever could leave the store's prefix: ``..``, ``.``, empty components, backslashes, NUL and control characters, text
that is not UTF-8, components of more than 255 bytes, keys of more than 900 bytes, and the directory in which the local
backend keeps its temporary files.
"""

from __future__ import annotations

import re
from typing import Final

from dcr_store.errors import InvalidInputError

SCRATCH: Final = ".dcr-tmp"
LONGEST_KEY_NBYTES: Final = 900  # S3 allows 1024 for the store's own prefix and the key together
LONGEST_COMPONENT_NBYTES: Final = 255  # of most file systems

_FORBIDDEN: Final = re.compile(r"[\\\x00-\x1f\x7f]")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})*")


def check_key(key: str) -> None:
    """Return if `key` may name an object, and raise ``InvalidInputError`` otherwise."""
    problem = key_problem(key)
    if problem is not None:
        raise InvalidInputError(f"not an object key: {key!r:.200} {problem}; use a relative path such as 'a/b/c'")


def check_prefix(prefix: str) -> None:
    """Return if `prefix` may be listed (empty, or a key and a ``/``), and raise ``InvalidInputError`` otherwise."""
    if prefix == "":
        return
    if not prefix.endswith("/"):
        raise InvalidInputError(f"not a prefix: {prefix!r:.200} does not end in '/'; list 'a/b/' or ''")
    check_key(prefix[:-1])


def key_problem(key: str) -> str | None:
    """Return what is wrong with `key` as an object key, or None."""
    if _PLAIN.fullmatch(key) and len(key) <= LONGEST_KEY_NBYTES:
        return None  # nearly every key; components with a leading dot take the long way
    if not key:
        return "is empty"
    if _FORBIDDEN.search(key):
        return "contains a backslash or a control character"
    try:
        nbytes = len(key.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if nbytes > LONGEST_KEY_NBYTES:
        return f"is longer than {LONGEST_KEY_NBYTES} bytes"
    components = key.split("/")
    for component in components:
        if component in ("", ".", ".."):
            return f"has the component {component!r}"
        if len(component.encode()) > LONGEST_COMPONENT_NBYTES:
            return f"has a component longer than {LONGEST_COMPONENT_NBYTES} bytes"
    if components[0] == SCRATCH:
        return f"is in {SCRATCH}, which is kept for temporary files"
    return None


def check_range(key: str, start: int, stop: int | None) -> None:
    """Return if ``[start, stop)`` is a byte range, and raise ``InvalidInputError`` otherwise."""
    if start < 0 or (stop is not None and stop < start):
        raise InvalidInputError(f"not a byte range: start {start}, stop {stop}; give 0 <= start <= stop", key=key)
