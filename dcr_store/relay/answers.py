"""Short-lived and final answers in memory; who asks for the same thing at the same time shares one request upstream.

Answers never go back in time. When an answer brings news, whatever upstream was asked for before is forgotten, and
nobody joins a request that began before: otherwise a reader could learn from a hint that a log has ten records, and
then be told, from memory, that the tenth is not there. When another store takes the place of the one before, which its
``dcr.json`` tells, nothing of that one is final any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from dcr_store.format.names import STORE_KEY

FRESH_S: Final = 0.2
LIVELY_FRESH_S: Final = 0.05
LIVELY_S: Final = 1.0  # after news more follow: what was journaled is committed, what was proposed is prepared
KEPT_NBYTES: Final = 64 << 20
_LONGEST_NBYTES: Final = 1 << 20  # of an answer that is kept
_OVERHEAD_NBYTES: Final = 300
_MOST_SEEN: Final = 16_384

Name = tuple[str, ...]
Value = bytes | None
"""An answer's body; None: there is no such object."""


@dataclass(frozen=True, slots=True)
class _KeptAnswer:
    value: Value
    until: float

    @property
    def nbytes(self) -> int:
        return _OVERHEAD_NBYTES + (0 if self.value is None else len(self.value))


@dataclass(frozen=True, slots=True)
class _Asking:
    task: asyncio.Task[Value]
    since: float


class Answers:
    """What upstream said lately. Used in one event loop only.

    Parameters
    ----------
    executor : Executor
        Where upstream is asked.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._kept: OrderedDict[Name, _KeptAnswer] = OrderedDict()
        self._nbytes = 0
        self._asking: dict[Name, _Asking] = {}
        self._seen: OrderedDict[Name, bytes] = OrderedDict()
        self._store = b""  # the digest of dcr.json
        self._news_at = -math.inf
        self.n_asked = 0

    async def give(self, name: Name, ask: Callable[[], Value], *, is_final: bool = False, past: bool = False) -> Value:
        """Return upstream's answer, one that it gave a moment ago, or one that cannot change.

        Parameters
        ----------
        name : tuple of str
            What is asked: the kind, then the key or prefix.
        ask : callable
            Asks upstream, in another thread.
        is_final : bool
            Whether an answer other than None never changes.
        past : bool
            Whether upstream is to be asked in any case.
        """
        now = asyncio.get_running_loop().time()
        kept = self._kept.get(name)
        if kept is not None and now < kept.until and not past:
            self._kept.move_to_end(name)
            return kept.value
        asking = self._asking.get(name)
        if asking is None or past or now - asking.since > self._fresh_s(now):
            asking = _Asking(asyncio.ensure_future(self._ask(name, ask, now, is_final)), now)
            asking.task.add_done_callback(_retrieve)
            self._asking[name] = asking
        return await asyncio.shield(asking.task)  # who asked first may leave; the others still wait

    async def _ask(self, name: Name, ask: Callable[[], Value], since: float, is_final: bool) -> Value:
        self.n_asked += 1
        mine = asyncio.current_task()

        def asked() -> tuple[Value, bytes]:
            value = ask()
            return value, b"" if value is None else hashlib.sha256(value).digest()

        try:
            value, digest = await asyncio.get_running_loop().run_in_executor(self._executor, asked)
        except BaseException:
            if name in self._asking and self._asking[name].task is mine:
                del self._asking[name]
            raise
        is_current = name in self._asking and self._asking[name].task is mine
        if is_current:
            del self._asking[name]
        if name == ("get", STORE_KEY) and value is not None and digest != self._store:
            if self._store:
                self._forget(lambda *_: True)
            self._store = digest
        if self._is_news(name, digest):
            self._news_at = asyncio.get_running_loop().time()
            self._forget(lambda other, kept: kept is None or kept.until < math.inf)
        if is_current and (value is None or len(value) <= _LONGEST_NBYTES):
            until = math.inf if is_final and value is not None else since + self._fresh_s(since)
            self._keep(name, _KeptAnswer(value, until))
        return value

    def _fresh_s(self, now: float) -> float:
        """Return for how long an answer counts that upstream was asked for at `now`."""
        return LIVELY_FRESH_S if now - self._news_at < LIVELY_S else FRESH_S

    def _is_news(self, name: Name, found: bytes) -> bool:
        before = self._seen.pop(name, b"")
        self._seen[name] = found
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return found != before

    def _keep(self, name: Name, kept: _KeptAnswer) -> None:
        self._drop(name)
        self._kept[name] = kept
        self._nbytes += kept.nbytes
        while self._nbytes > KEPT_NBYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: Name) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._nbytes -= kept.nbytes

    def forget(self, key: str) -> None:
        """Forget what concerns a key that was written or deleted, or may have been."""
        self._forget(lambda name, _: name[1] == key or (name[0] in ("list", "names") and key.startswith(name[1])))

    def _forget(self, concerns: Callable[[Name, _KeptAnswer | None], bool]) -> None:
        for name in [name for name, kept in self._kept.items() if concerns(name, kept)]:
            self._drop(name)
        for name in [name for name in self._asking if concerns(name, None)]:
            del self._asking[name]  # it goes on for those who wait already


def _retrieve(task: asyncio.Task[Value]) -> None:
    if not task.cancelled():
        task.exception()
