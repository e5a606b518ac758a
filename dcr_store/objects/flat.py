"""Any bytes-like object as one flat ``memoryview`` of bytes, without a copy where it is contiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcr_store.ports import Bytes


def flat(data: Bytes) -> memoryview:
    """Return `data` as a memoryview of unsigned bytes, shape (nbytes,), in C order; a view where possible."""
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    return view.cast("B")
