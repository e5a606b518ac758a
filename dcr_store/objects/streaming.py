"""One object of known SHA-256 in pieces, as they come, from any object store; nothing is compared here.

From a relay in one request; from the other backends by ranges, some of them side by side where waiting costs most.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from dcr_store.objects.transfer import map_bounded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcr_store.ports import ObjectStore

RANGE_NBYTES: Final = 4 << 20
N_RANGES: Final = 3  # beyond the first: most objects are shorter than one


@runtime_checkable
class Streamed(Protocol):
    """What an object store may offer besides the port."""

    def blocks(self, key: str, sha256: str, start: int = 0, *, past: bool = False) -> Iterator[bytes]:
        """Yield the object from `start` on; see ``HttpObjects.blocks``."""


def blocks(objects: ObjectStore, key: str, sha256: str, start: int = 0, *, past: bool = False) -> Iterator[bytes]:
    """Yield the object at `key` from `start` on, in pieces that are not empty.

    Parameters
    ----------
    objects : ObjectStore
    key, sha256 : str
        The object, and the SHA-256 that the whole should have.
    start : int
        Where to begin.
    past : bool
        Whether caches on the way are to be passed by.

    Raises
    ------
    NotFoundError, StorageError, TransientError
        As the object store's ``get``, also after some pieces.
    """
    if isinstance(objects, Streamed):
        yield from objects.blocks(key, sha256, start, past=past)
        return
    first = objects.get(key, start, start + RANGE_NBYTES, sha256=sha256)
    if first:
        yield first
    if len(first) < RANGE_NBYTES:
        return

    def fetch(at: int) -> bytes:
        return objects.get(key, at, at + RANGE_NBYTES, sha256=sha256)

    starts = itertools.count(start + RANGE_NBYTES, RANGE_NBYTES)
    for piece in map_bounded(fetch, starts, n_parallel=1 if objects.is_local else N_RANGES):
        if piece:
            yield piece
        if len(piece) < RANGE_NBYTES:
            return
