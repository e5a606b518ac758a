"""An object store of which calls fail, and what is done with it in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcr_store.errors import OutcomeUnknownError, StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import StoreDocument
from dcr_store.format.names import STORE_KEY
from dcr_store.ports import Bytes, ObjectStore
from dcr_store.store import Store


@dataclass
class FailingObjects:
    """An object store of which one call fails, or all from one on.

    Attributes
    ----------
    at : int or None
        Number of the call that fails, from 0; None: none does, and they are counted.
    lasting : bool
        Whether all calls after it fail too.
    late : bool
        Whether a write takes effect before it fails: its answer was lost.
    """

    objects: ObjectStore
    at: int | None = None
    lasting: bool = False
    late: bool = False
    n_calls: int = 0
    failed: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return self.objects.url

    @property
    def is_local(self) -> bool:
        return self.objects.is_local

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            number = self.n_calls
            self.n_calls += 1
        fails = self.at is not None and (number >= self.at if self.lasting else number == self.at)
        is_write = name in ("put", "put_if_absent", "delete")
        if not fails or (self.late and is_write):
            result = getattr(self.objects, name)(*arguments)
        if not fails:
            return result
        self.failed.append(f"{name} {arguments[0]}")
        if name == "put_if_absent":
            raise OutcomeUnknownError("no answer (injected)", key=arguments[0])
        raise StorageError("cannot do it: No space left on device (injected)", key=arguments[0])

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        return bytes(self._call("get", key, start, stop))

    def put(self, key: str, data: Bytes) -> None:
        self._call("put", key, data)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        return bool(self._call("put_if_absent", key, data))

    def list(self, prefix: str) -> dict[str, int]:
        return dict(self._call("list", prefix))

    def list_names(self, prefix: str) -> Sequence[str]:
        return list(self._call("list_names", prefix))

    def size(self, key: str) -> int | None:
        found: int | None = self._call("size", key)
        return found

    def delete(self, key: str) -> None:
        self._call("delete", key)


def over(objects: ObjectStore) -> Store:
    """Open the store that `objects` hold, without asking the ones that fail."""
    inner = objects.objects if isinstance(objects, FailingObjects) else objects
    data = inner.get(STORE_KEY)
    return Store(objects, StoreDocument.from_bytes(data), canonical.sha256(data))


def publish(store: Store, checkpoint: Path, baseline: Path) -> None:
    with store.begin(baseline=baseline, message="next") as transaction:
        transaction.write_checkpoint(checkpoint)
        transaction.commit()
