"""Legal log records, one after another, without a publisher: what tests of the log are written with."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from dcr_store.format.documents import Base, Counts, ObjectRef
from dcr_store.format.names import STORE_KEY, record_key
from dcr_store.format.ranges import Ranges
from dcr_store.format.records import (
    Abort,
    Anchor,
    Begin,
    Commit,
    Expire,
    Fold,
    Fork,
    Gc,
    Intent,
    Origin,
    Record,
    Resume,
)
from dcr_store.format.rows import VersionRow
from dcr_store.log import fold
from dcr_store.log.fold import LineState

if TYPE_CHECKING:
    from dcr_store.ports import ObjectStore

STORE = b"a store document"
STORE_SHA256 = hashlib.sha256(STORE).hexdigest()
TIME = "2026-01-01T00:00:00.000Z"
COUNTS = Counts(1, 2, 3, 4, 5)


def holding_store(objects: ObjectStore) -> ObjectStore:
    """Return `objects`, with the document in it that logs begin with."""
    objects.put(STORE_KEY, STORE)
    return objects


def digits(text: str, n: int) -> str:
    """Return `n` hex digits that follow from `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:n]


def common(state: LineState, txid: str | None = None) -> dict[str, Any]:
    if txid is None:
        txid = digits(f"tx{state.length}", 32) if state.open is None else state.open.txid
    return {
        "line": state.line,
        "seq": state.length,
        "id": digits(f"id{state.length}", 32),
        "prev": state.last_sha256,
        "created_at": TIME,
        "txid": txid,
    }


def begin(state: LineState, **changed: Any) -> Begin:
    """Return the begin that is legal in `state`, with fields changed."""
    fields: dict[str, Any] = {
        **common(state),
        "owner": "me",
        "version": state.next_version,
        "base": state.head_base,
        "layout": None,
        "writers": ("w0",),
    }
    return Begin(**{**fields, **changed})


def commit(state: LineState, **changed: Any) -> Commit:
    """Return the commit that is legal in `state`, with fields changed: a delta wherever there is a base."""
    pending = state.open
    fields: dict[str, Any] = {
        **common(state),
        "attempt": 0 if pending is None else pending.attempt,
        "version": state.next_version,
        "base": None if pending is None else pending.base,
        "layout": digits("layout", 64),
        "root": digits(f"{state.line}@{state.next_version}", 64),
        "manifest": ObjectRef(f"m/{state.next_version}", digits(f"m{state.next_version}", 64), 9),
        "counts": COUNTS,
    }
    return Commit(**{**fields, **changed})


def resume(state: LineState, **changed: Any) -> Resume:
    """Return the resume that is legal in `state`, with fields changed."""
    attempt = 1 if state.open is None else state.open.attempt + 1
    return Resume(**{**common(state), "attempt": attempt, "owner": "me", **changed})


def abort(state: LineState, **changed: Any) -> Abort:
    """Return the abort that is legal in `state`, with fields changed."""
    return Abort(**{**common(state), "reason": "why not", **changed})


def intent(state: LineState, purpose: str = "anchor", versions: Ranges | None = None, **changed: Any) -> Intent:
    """Return an intent about version 0, with fields changed."""
    wanted = Ranges.of([0]) if versions is None else versions
    fields = {**common(state), "txid": digits(f"work{state.length}", 32), "owner": "me"}
    return Intent(**{**fields, "purpose": purpose, "versions": wanted, "base": None, **changed})


def edge(state: LineState, **changed: Any) -> Anchor | Fold:
    """Return the anchor or fold that the last intent of `state` speaks of, with fields changed."""
    work = state.history.works[-1]
    number = next(iter(work.versions))
    fields = {
        **common(state, work.txid),
        "attempt": work.attempt,
        "version": number,
        "root": digits(f"{state.line}@{number}", 64),
        "base": work.base,
        "manifest": ObjectRef(f"e/{work.txid}", digits(work.txid, 64), 9),
        "counts": COUNTS,
    }
    return (Anchor if work.base is None else Fold)(**{**fields, **changed})


def expire(state: LineState, **changed: Any) -> Expire:
    """Return the expiry of what the last intent of `state` names, with fields changed."""
    work = state.history.works[-1]
    fields = {**common(state, work.txid), "versions": work.versions, "deltas": Ranges(), "edges": ()}
    return Expire(**{**fields, **changed})


def _without_txid(state: LineState) -> dict[str, Any]:
    return {name: value for name, value in common(state).items() if name != "txid"}


def gc(state: LineState, **changed: Any) -> Gc:
    """Return a mark of time, with fields changed."""
    return Gc(**{**_without_txid(state), "grace_s": 60, **changed})


def fork(state: LineState, number: int = 0, **changed: Any) -> Fork:
    """Return the fork of a version, with fields changed."""
    version = Base(f"{state.line}@{number}", digits(f"{state.line}@{number}", 64))
    return Fork(**{**_without_txid(state), "child": "exp", "version": version, **changed})


def origin(state: LineState, row: VersionRow, **changed: Any) -> Origin:
    """Return the first record of a line that goes on from a version of ``main``, with fields changed."""
    fields = {**_without_txid(state), "parent": "main", "fork_seq": 9, "fork_sha256": digits("fork", 64), "row": row}
    return Origin(**{**fields, **changed})


def apply(state: LineState, *makers: Any) -> LineState:
    """Return `state` after the records that `makers` make one after another."""
    for make in makers:
        record = make(state) if callable(make) else make
        state = fold.apply(state, record, record.to_bytes())
    return state


def empty(line: str = "main") -> LineState:
    return LineState(line, 0, STORE_SHA256)


class Writer:
    """Puts legal records into a store directly: no hint, no checkpoint."""

    def __init__(self, objects: ObjectStore, line: str = "main") -> None:
        self.objects = objects
        self.state = empty(line)

    def put(self, record: Record) -> None:
        data = record.to_bytes()
        self.state = fold.apply(self.state, record, data)
        self.objects.put(record_key(self.state.line, record.seq), data)

    def versions(self, n: int, **begun: Any) -> None:
        """Commit `n` versions, an anchor and then deltas."""
        for _ in range(n):
            self.put(begin(self.state, **begun))
            self.put(commit(self.state))
