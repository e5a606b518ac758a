"""Whether a backend can hold a store: tried before one is created there.

Some servers accept ``If-None-Match`` and ignore it, some check first and write afterwards. On either, two writers would
both believe that they own a record. Refuses such a backend, and a bucket whose rules delete what a store keeps.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from dcr_store.errors import DcrError, StorageError
from dcr_store.objects.threads import Threads

if TYPE_CHECKING:
    from dcr_store.ports import ObjectStore

N_KEYS: Final = 6  # contended for at the same time
N_WRITERS: Final = 4  # of each
START_TIMEOUT_S: Final = 30.0


@runtime_checkable
class _Ruled(Protocol):
    def check_rules(self) -> None:
        """Raise if the backend's own configuration would harm a store."""


def probe(objects: ObjectStore) -> None:
    """Check that of concurrent put-if-absent calls exactly one succeeds, with scratch objects that are deleted after.

    Parameters
    ----------
    objects : ObjectStore
        Where a store is to be created. Needs permission to put, get and delete.

    Raises
    ------
    StorageError
        Puts are not conditional, not atomic or not durable there, or a lifecycle rule expires objects.
    """
    if isinstance(objects, _Ruled):
        objects.check_rules()
    prefix = f"probe/{secrets.token_hex(8)}/"
    keys = [f"{prefix}{i}" for i in range(N_KEYS)]
    try:
        _contend(objects, keys)
    finally:
        for key in keys:
            with contextlib.suppress(DcrError):  # an error in flight matters more than a scratch object
                objects.delete(key)


def _contend(objects: ObjectStore, keys: list[str]) -> None:
    objects.list_names("probe/")  # opens the connection, so that the writers below start together
    start = threading.Barrier(len(keys) * N_WRITERS)

    def write(key: str, data: bytes) -> bool:
        start.wait(START_TIMEOUT_S)
        return objects.put_if_absent(key, data)

    with Threads(len(keys) * N_WRITERS, thread_name_prefix="dcr-probe") as pool:
        contents = [secrets.token_bytes(16) for _ in range(N_WRITERS)]
        futures = {key: [pool.submit(write, key, data) for data in contents] for key in keys}
    for key in keys:
        won = [data for data, future in zip(contents, futures[key], strict=True) if future.result()]
        if len(won) != 1:
            raise _unfit(objects, key, "one writer of a key to win", f"{len(won)} of {N_WRITERS} that did")
        found = objects.get(key)
        if found != won[0]:
            raise _unfit(objects, key, "the winner's bytes", "those of a writer that was refused")
        if objects.put_if_absent(key, secrets.token_bytes(16)):
            raise _unfit(objects, key, "a put at a key that is taken to be refused", "that it succeeds")


def _unfit(objects: ObjectStore, key: str, expected: str, found: str) -> StorageError:
    return StorageError(
        f"{objects.url} ignores or breaks conditional puts (If-None-Match) and cannot hold a store, since two trainers "
        "would both own a version: use a backend that honours them",
        key=key,
        expected=expected,
        found=found,
    )
