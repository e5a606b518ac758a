"""How long a receiver waits: between looks at the store, and after failures. Drawn, so that receivers spread out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

_LONGEST_REST_S: Final = 0.7  # what happens is acted upon within a second
_FIRST_REST_S: Final = 0.05
_FIRST_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 5.0  # of the store: its own calls have been repeated for long before
_LONGEST_BLOCK_S: Final = 30.0


@dataclass(slots=True)
class Waits:
    """Waits that grow from `first_s` to `longest_s`."""

    first_s: float
    longest_s: float
    _next_s: float = 0.0

    def next(self) -> float:
        """Return the next wait in seconds, between half of its length and the whole."""
        self._next_s = min(max(2 * self._next_s, self.first_s), self.longest_s)
        return self._next_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest again."""
        self._next_s = 0.0


def rests() -> Waits:
    """Return the waits between looks at a store in which nothing happens."""
    return Waits(_FIRST_REST_S, _LONGEST_REST_S)


def retries() -> Waits:
    """Return the waits after failures of the store."""
    return Waits(_FIRST_RETRY_S, _LONGEST_RETRY_S)


@dataclass(slots=True)
class Blocked:
    """What failed not long ago, and is not tried again before its time. Others go on meanwhile."""

    _until: dict[str, float] = field(default_factory=dict)
    _waits: dict[str, Waits] = field(default_factory=dict)

    def add(self, name: str, now_s: float) -> float:
        """Note that `name` failed; return the seconds until it may be tried again."""
        wait_s = self._waits.setdefault(name, Waits(_FIRST_RETRY_S, _LONGEST_BLOCK_S)).next()
        self._until[name] = now_s + wait_s
        return wait_s

    def holds(self, name: str, now_s: float) -> bool:
        """Whether it is too early to try `name` again."""
        return now_s < self._until.get(name, now_s)

    def clear(self) -> None:
        """Forget all failures."""
        self._until.clear()
        self._waits.clear()
