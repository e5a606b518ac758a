"""Threads for work at memory speed, and the memory that they work in.

What NumPy and zstd allocate for one chunk is a few MiB, given back when it is done. glibc returns such memory to the
system and gets it again, page by page, for the next chunk; that took more time than the work itself. So each thread
keeps one buffer for chunks, and the allocator is made to keep what is freed.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Final

import numpy as np

from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.objects.threads import Threads

_KEEP_NBYTES: Final = 24 << 20

_own: Final = threading.local()


def n_workers() -> int:
    """Return the number of threads for work at memory speed."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def worker_pool(name: str = "dcr-work") -> Threads:
    """Return a new pool of ``n_workers`` threads."""
    _keep_freed_memory()
    return Threads(n_workers(), name)


def scratch(space: str, chunk_elements: int, use: str = "") -> Bits:
    """Return this thread's buffer for a chunk: uintN, shape (chunk_elements,), of any content; one for each `use`."""
    buffer: Bits | None = getattr(_own, f"{use}{space}", None)
    if buffer is None or buffer.size != chunk_elements:
        buffer = np.empty(chunk_elements, uint_dtype(space))
        setattr(_own, f"{use}{space}", buffer)
    return buffer


@functools.cache
def _keep_freed_memory() -> None:
    """Raise the limits from which on malloc returns memory to the system, for this process.

    glibc sets them by the largest block up to 32 MiB that was mapped and freed; other allocators take no notice.
    """
    np.empty(_KEEP_NBYTES, np.uint8)
