"""What pure functions of the product have returned, remembered: all actors of all seeds parse much the same documents.

Only what is the same for the same bytes, and what nobody changes: `changed` calls everything again and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

MAX_ENTRIES: Final = 2000
_Key = tuple[Any, ...]


class Memory:
    """What one function has returned.

    Parameters
    ----------
    key : callable, optional
        Returns for the arguments what the result follows from; by default they are that themselves.
    """

    all: Final[list[Memory]] = []

    def __init__(self, function: Callable[..., Any], key: Callable[..., _Key] | None = None) -> None:
        self.function, self.key = function, key
        # With the arguments, so that none of them is freed and its identity taken by another.
        self.entries: dict[_Key, tuple[Any, _Key, dict[str, Any]]] = {}
        self.all.append(self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        key = (*arguments, *options.values()) if self.key is None else self.key(*arguments)
        found = self.entries.get(key)
        if found is None:
            result = self.function(*arguments, **options)  # whoever raises does so again
            if len(self.entries) >= MAX_ENTRIES:
                self.entries.clear()
            found = self.entries[key] = result, arguments, options
        return found[0]


def changed() -> list[str]:
    """Return which functions return something else now than what is remembered."""
    return [
        f"{memory.function.__qualname__}{arguments}"
        for memory in Memory.all
        for result, arguments, options in list(memory.entries.values())
        if not _same(memory.function(*arguments, **options), result)
    ]


def _same(a: Any, b: Any) -> bool:
    """Compare values, arrays among them, with the types of what they are made of."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b))
    if isinstance(a, dict):
        return [*a] == [*b] and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return all(_same(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    return bool(a == b)
