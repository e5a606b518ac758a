"""Objects in the memory of this process, over fsspec's ``MemoryFileSystem``: for tests and trials.

One lock for the whole process makes every operation atomic. Nothing outlives the process or is seen by another one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from dcr_store.errors import NotFoundError, StorageError
from dcr_store.objects.flat import flat
from dcr_store.objects.keys import check_key, check_prefix, check_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcr_store.ports import Bytes

_LOCK: Final = threading.Lock()  # fsspec's memory is one for the process, whichever instance looks at it


class MemoryObjects:
    """An object store below a path of fsspec's process-wide memory. See ``dcr_store.ports.ObjectStore``.

    Parameters
    ----------
    path : str
        What stands after ``memory://``; may be empty.
    """

    is_local = True

    def __init__(self, path: str) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self._files = MemoryFileSystem()
        self._root = "/" + path.strip("/") if path.strip("/") else ""
        self.url = f"memory://{self._root.lstrip('/')}"

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._root}/{key}"

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of an object; ``NotFoundError`` if there is none."""
        path = self._path(key)
        check_range(key, start, stop)
        with _LOCK:
            file = self._files.store.get(path)
            if file is None:
                raise NotFoundError(f"no such object in {self.url}", key=key)
            return bytes(file.getbuffer()[start:stop])

    def put(self, key: str, data: Bytes) -> None:
        """Store an object over whatever is there."""
        path = self._path(key)
        with _LOCK:
            self._store(key, path, data)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        """Create an object unless the key is taken; True if the key now holds exactly `data`."""
        path = self._path(key)
        with _LOCK:
            file = self._files.store.get(path)
            if file is None:
                self._store(key, path, data)
                return True
            return bool(file.getbuffer() == flat(data))

    def _store(self, key: str, path: str, data: Bytes) -> None:
        try:
            self._files.pipe_file(path, bytes(flat(data)))
        except OSError as error:
            raise StorageError(f"cannot put: {error!r}; a part of the key's path is an object", key=key) from error

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → nbytes of every object whose key starts with `prefix`."""
        check_prefix(prefix)
        start = f"{self._root}/{prefix}"
        cut = len(self._root) + 1
        with _LOCK:
            found = {path[cut:]: file.size for path, file in self._files.store.items() if path.startswith(start)}
        return dict(sorted(found.items()))

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Return key → (nbytes, when it was put) of every object whose key starts with `prefix`."""
        check_prefix(prefix)
        start = f"{self._root}/{prefix}"
        cut = len(self._root) + 1
        with _LOCK:
            found = {
                path[cut:]: (int(file.size), file.modified.timestamp())
                for path, file in self._files.store.items()
                if path.startswith(start)
            }
        return dict(sorted(found.items()))

    def list_names(self, prefix: str) -> Sequence[str]:
        """Return the sorted next path components below `prefix`."""
        return sorted({key[len(prefix) :].partition("/")[0] for key in self.list(prefix)})

    def size(self, key: str) -> int | None:
        """Return an object's nbytes, or None if there is none."""
        path = self._path(key)
        with _LOCK:
            file = self._files.store.get(path)
            return None if file is None else int(file.size)

    def delete(self, key: str) -> None:
        """Delete an object; one that does not exist is no error."""
        path = self._path(key)
        with _LOCK:
            self._files.store.pop(path, None)
