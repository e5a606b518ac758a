"""An object store seen through a spool: whole objects whose SHA-256 the caller knows come from there if they are there.

So a target is brought further without the network, its headers and side files too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from dcr_store.ports import Bytes, ObjectStore
from dcr_store.receive.spool import Spool

_DATA: Final = "/data/"
"""In the keys of what writers store: partitions, files, contributions."""


class SpooledObjects:
    """See ``dcr_store.ports.ObjectStore``.

    Attributes
    ----------
    nbytes_found, nbytes_passed : int
        Bytes of writers' objects that came from the spool, and of those that did not.
    """

    def __init__(self, objects: ObjectStore, spool: Spool) -> None:
        self._objects, self._spool = objects, spool
        self._lock = threading.Lock()
        self.nbytes_found = self.nbytes_passed = 0
        self.url = objects.url
        self.is_local = objects.is_local

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of an object; ``NotFoundError`` if there is none."""
        found = self._spool.find(sha256) if sha256 is not None and (start, stop) == (0, None) else None
        data = self._objects.get(key, start, stop, sha256=sha256) if found is None else found
        if _DATA in key:
            with self._lock:
                self.nbytes_found += 0 if found is None else len(data)
                self.nbytes_passed += len(data) if found is None else 0
        return data

    def put(self, key: str, data: Bytes) -> None:
        """Store an object, atomically and durably, over whatever is there."""
        self._objects.put(key, data)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        """Create an object unless the key is taken; return whether it holds `data`."""
        return self._objects.put_if_absent(key, data)

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → nbytes of every object whose key starts with `prefix`."""
        return self._objects.list(prefix)

    def list_names(self, prefix: str) -> Sequence[str]:
        """Return the sorted next path components below `prefix`."""
        return self._objects.list_names(prefix)

    def size(self, key: str) -> int | None:
        """Return an object's nbytes, or None if there is none."""
        return self._objects.size(key)

    def delete(self, key: str) -> None:
        """Delete an object; one that does not exist is no error."""
        self._objects.delete(key)
