"""An object store that counts what is asked of it, for benches."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dcr_store.format.canonical import sha256
from dcr_store.format.documents import StoreDocument
from dcr_store.format.names import STORE_KEY
from dcr_store.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcr_store.ports import Bytes, ObjectStore


@dataclass
class Metered:
    """An object store in front of another one, which counts, and waits before each request.

    Attributes
    ----------
    requests : Counter of str
        By method.
    keys : list of str
        What was asked for.
    nbytes : int
        What was returned.
    """

    inner: ObjectStore
    latency_s: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    keys: list[str] = field(default_factory=list)
    nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    is_local = False

    @property
    def url(self) -> str:
        return self.inner.url

    def _count(self, method: str, key: str, nbytes: int = 0) -> None:
        with self._lock:
            self.requests[method] += 1
            self.keys.append(key)
            self.nbytes += nbytes

    def _wait(self) -> None:
        if self.latency_s:
            time.sleep(self.latency_s)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        self._wait()
        try:
            data = self.inner.get(key, start, stop, sha256=sha256)
        except BaseException:
            self._count("get", key)
            raise
        self._count("get", key, len(data))
        return data

    def put(self, key: str, data: Bytes) -> None:
        self._wait()
        self._count("put", key)
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        self._wait()
        self._count("put", key)
        return self.inner.put_if_absent(key, data)

    def list(self, prefix: str) -> dict[str, int]:
        self._wait()
        self._count("list", prefix)
        return self.inner.list(prefix)

    def list_names(self, prefix: str) -> Sequence[str]:
        self._wait()
        self._count("list", prefix)
        return self.inner.list_names(prefix)

    def size(self, key: str) -> int | None:
        self._wait()
        self._count("size", key)
        return self.inner.size(key)

    def delete(self, key: str) -> None:
        self._wait()
        self._count("delete", key)
        self.inner.delete(key)


def opened(objects: ObjectStore) -> Store:
    """Open the store in `objects`, with the one request that ``dcr_store.open`` makes."""
    data = objects.get(STORE_KEY)
    return Store(objects, StoreDocument.from_bytes(data), sha256(data))
