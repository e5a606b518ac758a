"""Taking something out of the product, in this process and for a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Removal = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes while the context is open."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
