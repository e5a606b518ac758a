"""Opening a transaction: begin a new one, or take up the one that is open (docs/spec/v1.md §9).

Refuses to touch an open transaction unless its owner is the same, is certainly dead, or the caller says takeover.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dcr_store.errors import ConflictError, DcrError, FencedError
from dcr_store.format.names import new_txid, version_name
from dcr_store.format.records import Abort, Begin, OfTransaction, Record, Resume
from dcr_store.log.fold import LineState, OpenTransaction
from dcr_store.log.line import LineLog, next_fields
from dcr_store.publish.ending import abort_record
from dcr_store.publish.owner import describe, is_dead

WRITER: Final = "w0"
# Transactions and attempts of this process that somebody still works on: their owner is alive, whatever else its name
# says. Of an attempt that was taken over the end says nothing about the one that follows.
LIVE: Final[set[tuple[str, int]]] = set()


@dataclass(frozen=True, slots=True)
class Intent:
    """What a caller of begin wants.

    Attributes
    ----------
    base : str or None
        The version that must be the head, as ``line@number`` or root; None takes the head as it is.
    takeover : bool
        Whether an open transaction of another owner may be taken over.
    writers : tuple of str
        Who seals.
    layout : str or None
        The SHA-256 of the layout, where several writers have to know it.
    """

    owner: str
    message: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    takeover: bool = False
    writers: tuple[str, ...] = (WRITER,)
    layout: str | None = None


def begin(log: LineLog, intent: Intent, check_base: Callable[[LineState], None]) -> OpenTransaction:
    """Open a transaction on a line, or take up the open one where that is allowed.

    An open transaction is taken up if its owner is the same or certainly dead, or `intent` says takeover: resumed if it
    was begun with the same message, metadata, writers and layout, else aborted.

    Raises
    ------
    ConflictError
        If another owner's transaction is open.
    """
    txid = new_txid()
    LIVE.add((txid, 0))
    try:
        record = log.append(lambda state: _decide_begin(state, intent, check_base, txid))
        if isinstance(record, Abort):
            record = log.append(lambda state: _decide_begin(state, intent, check_base, txid))
        pending = log.state.open
        if isinstance(record, Abort) or pending is None or not _is_of(record, pending):
            raise FencedError("another publisher takes over transactions at the same time", key=log.line)
        LIVE.add((pending.txid, pending.attempt))
        if pending.txid != txid:
            LIVE.discard((txid, 0))
        return pending
    except BaseException:
        LIVE.discard((txid, 0))  # begun or not, nobody works on it
        raise


def _is_of(record: Record, pending: OpenTransaction) -> bool:
    return isinstance(record, OfTransaction) and record.txid == pending.txid


def abandon(log: LineLog, pending: OpenTransaction, reason: str) -> None:
    """Abort a transaction that could not start, if it is still ours; leaves it open if the store does not answer."""

    def decide(state: LineState) -> Abort:
        if state.open is None or (state.open.txid, state.open.attempt) != (pending.txid, pending.attempt):
            raise FencedError("the transaction is somebody else's by now", key=pending.txid)
        return abort_record(state, pending.txid, reason)

    try:
        with contextlib.suppress(DcrError):
            log.append(decide)
    finally:
        LIVE.discard((pending.txid, pending.attempt))


def _decide_begin(state: LineState, intent: Intent, check_base: Callable[[LineState], None], txid: str) -> Record:
    pending = state.open
    common = next_fields(state)
    if pending is None:
        check_base(state)
        return Begin(
            **common,
            txid=txid,
            owner=intent.owner,
            version=state.next_version,
            base=state.head_base,
            layout=intent.layout,
            writers=intent.writers,
            message=intent.message,
            metadata=dict(intent.metadata),
        )
    ours = pending.owner == intent.owner and (pending.txid, pending.attempt) not in LIVE
    if not (intent.takeover or ours or is_dead(pending.owner)):
        raise ConflictError(
            f"another publisher has the transaction for {version_name(state.line, pending.version)} open since "
            f"{pending.created_at}",
            key=state.line,
            expected="no open transaction",
            found=f"owner {describe(pending.owner)}",
            advice="wait for it, or take over if you know that it is dead (takeover)",
        )
    said = (pending.message, pending.metadata, pending.writers, pending.layout)
    if said == (intent.message, dict(intent.metadata), intent.writers, intent.layout):
        check_base(state)
        return Resume(**common, txid=pending.txid, attempt=pending.attempt + 1, owner=intent.owner)
    return Abort(**common, txid=pending.txid, reason=f"replaced by {intent.owner}")
