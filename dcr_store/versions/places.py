"""A store as work that is done elsewhere takes it along: opened again where it arrives, in another process or machine.

In the process that made it, it is the store that was opened there. Elsewhere it trusts the same keys and signs nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from dcr_store.log.signing import Signing, TrustedKeys
from dcr_store.objects.open import open_objects
from dcr_store.versions.catalog import Catalog
from dcr_store.versions.document import read_document

_opened: Final[dict[tuple[str, str, TrustedKeys | None], Catalog]] = {}
_lock: Final = threading.Lock()
_AHEAD: Final = 256
"""Jobs handed to an executor before the first is done: what memory they take is bounded by its workers. What is done
waits for its turn here, so results must be small: digests and references, never bits."""
J = TypeVar("J")
R = TypeVar("R")


class StorePlace:
    """Where a store is, and its catalog in this process. Can be pickled, if its options can.

    Parameters
    ----------
    url : str
        As ``dcr_store.open`` takes it.
    options : mapping, optional
        ``storage_options``.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None, catalog: Catalog) -> None:
        self.url, self.options = url, options
        self.catalog = catalog

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.url, self.options, self.catalog.signing.trusted)


def _reopened(url: str, options: Mapping[str, Any] | None, trusted: TrustedKeys | None) -> StorePlace:
    """Return the place of a store in this process, which opens it once."""
    key = url, repr(options), trusted
    with _lock:
        if key not in _opened:
            objects = open_objects(url, options)
            _opened[key] = Catalog(objects, *read_document(objects), Signing(None, trusted))
        return StorePlace(url, options, _opened[key])


def worked_on(
    place: StorePlace, do: Callable[[StorePlace, J], R], jobs: Iterable[J], executor: Executor | None
) -> Iterator[tuple[J, R]]:
    """Do jobs in an executor, a few ahead, and yield each with what came of it, in order.

    Parameters
    ----------
    do : callable
        A function of a module, for it may be called in another process.
    executor : Executor, optional
        By default one thread of this process.
    """
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(ThreadPoolExecutor(1, "dcr-place"))
        waiting: deque[tuple[J, Future[R]]] = deque()
        try:
            for job in jobs:
                waiting.append((job, pool.submit(do, place, job)))
                if len(waiting) > _AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
