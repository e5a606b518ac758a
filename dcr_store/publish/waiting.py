"""Waiting for what others put in the store: for a transaction that somebody begins, or for any other change of it.

Nobody is told: who waits looks again and again, less and less often.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from dcr_store.errors import FencedError, LagError
from dcr_store.log.fold import OpenTransaction
from dcr_store.log.line import LineLog
from dcr_store.publish.owner import describe, is_dead
from dcr_store.wording import first_of

_FIRST_DELAY_S: Final = 0.02
_LONGEST_DELAY_S: Final = 0.5
_MOST_TOLD: Final = 8


def awaited(
    log: LineLog,
    writer: str,
    txid: str | None,
    last: str | None,
    timeout_s: float | None,
    writers: tuple[str, ...] | None = None,
) -> OpenTransaction:
    """Return the transaction that is open on a line: `txid`, or else the next one that is not `last`.

    Without `txid`, one of several writers that was begun for `writers`, or else for `writer` among others, and not by a
    process that is known to be gone.

    Raises
    ------
    LagError
        If it was not begun in time.
    FencedError
        If `txid` has ended.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for _ in tries(deadline):
        pending = log.refresh().open
        if pending is not None and (
            pending.txid == txid or (txid is None and pending.txid != last and _is_for(pending, writer, writers))
        ):
            return pending
        if txid is not None:
            ending = log.ending_of(txid) or f"none of the last records of {log.line} tells of it"
            raise FencedError(f"the transaction is not open: {ending}; join another one", key=txid)
    raise LagError(
        f"nobody has begun a transaction on {log.line} for writer {writer} in {timeout_s:g} s",
        key=log.line,
        expected=f"writers {first_of(writers, _MOST_TOLD)}" if writers else f"writer {writer} among the writers",
        found="no open transaction" if pending is None else _told(pending, last),
        advice="join again",
    )


def _is_for(pending: OpenTransaction, writer: str, writers: tuple[str, ...] | None) -> bool:
    is_meant = writer in pending.writers if writers is None else writers == pending.writers
    return pending.layout is not None and is_meant and not is_dead(pending.owner)


def _told(pending: OpenTransaction, last: str | None) -> str:
    """Say whose an open transaction is that cannot be joined."""
    of = f"one of writers {first_of(pending.writers, _MOST_TOLD)}" if pending.layout else "one of a sole writer"
    state = ", which is gone" if is_dead(pending.owner) else ""
    been = ", which this process has been in" if pending.txid == last else ""
    return f"{of}{been}, begun by {describe(pending.owner)}{state}"


def tries(deadline: float | None) -> Iterator[None]:
    """Yield until the deadline, at intervals of a tenth of what was waited; at least once, and once after it."""
    start = time.monotonic()
    while True:
        yield
        now_s = time.monotonic()
        delay_s = min(max(_FIRST_DELAY_S, (now_s - start) / 10), _LONGEST_DELAY_S)
        left_s = delay_s if deadline is None else deadline - now_s
        if left_s <= 0:
            return
        time.sleep(min(delay_s, left_s))
