"""An object store in front of another one that notes every request, and does what a test wants first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcr_store.ports import Bytes, ObjectStore


class Watched:
    """Satisfies ``ObjectStore``.

    Attributes
    ----------
    requests : list of (method, key)
        All requests so far.
    before : callable or None
        Called with method and key before a request is passed on; may raise.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] | None = None
        self._lock = threading.Lock()

    def _note(self, method: str, key: str) -> None:
        with self._lock:
            self.requests.append((method, key))
        if self.before is not None:
            self.before(method, key)

    def count(self, method: str | None = None, part: str = "") -> int:
        """Return how many requests of `method` concerned keys that contain `part`."""
        return sum(method in (None, name) and part in key for name, key in self.requests)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def is_local(self) -> bool:
        return self.inner.is_local

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        self._note("get", key)
        return self.inner.get(key, start, stop, sha256=sha256)

    def put(self, key: str, data: Bytes) -> None:
        self._note("put", key)
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        self._note("put_if_absent", key)
        return self.inner.put_if_absent(key, data)

    def list(self, prefix: str) -> dict[str, int]:
        self._note("list", prefix)
        return self.inner.list(prefix)

    def list_names(self, prefix: str) -> Sequence[str]:
        self._note("list_names", prefix)
        return self.inner.list_names(prefix)

    def size(self, key: str) -> int | None:
        self._note("size", key)
        return self.inner.size(key)

    def delete(self, key: str) -> None:
        self._note("delete", key)
        self.inner.delete(key)
