"""Hints and checkpoints of a log (docs/spec/v1.md §10): derived, may be missing, stale or damaged.

Reading never trusts them further than their own SHA-256 and the hash chain that goes on from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dcr_store.errors import FormatError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields
from dcr_store.format.names import checkpoint_key, hint_key
from dcr_store.format.rows import VersionRow
from dcr_store.log.fold import LineState, OpenTransaction, Source
from dcr_store.log.history import UNTOUCHED, History
from dcr_store.ports import ObjectStore

SEGMENT_VERSIONS: Final = 512
MAX_TAIL_NBYTES: Final = 64 << 10
"""A hint is put with each version; records that take more are fetched one by one."""


@dataclass(frozen=True, slots=True)
class Hint:
    """The newest checkpoint, a length that the log had once, and the records between the two, if it has them."""

    checkpoint: int | None
    length: int
    last_sha256: str
    tail: tuple[bytes, ...] = ()


def _read_body(objects: ObjectStore, key: str, document_format: str) -> Fields | None:
    data = _get(objects, key)
    return None if data is None else _body_of(data, key, document_format)


def _get(objects: ObjectStore, key: str) -> bytes | None:
    try:
        return objects.get(key)
    except NotFoundError:
        return None


def _body_of(data: bytes, key: str, document_format: str) -> Fields | None:
    body = canonical.open_body(data, key)
    if body is None or body.get("format") != document_format:
        return None
    return Fields(body, key)


def read_hint(objects: ObjectStore, line: str) -> Hint | None:
    """Return the hint, or None if there is none that can be used."""
    fields = _read_body(objects, hint_key(line), "dcr-log-hint")
    if fields is None:
        return None
    try:
        if fields.line() != line:
            return None
        tail = fields.texts("tail") if "tail" in fields.document else []
        if not tail and "tail" in fields.document:
            return None
        return Hint(
            fields.optional_count("checkpoint"),
            fields.count("length", 1),
            fields.hex("last_sha256", 64),
            tuple(record.encode() for record in tail),
        )
    except FormatError:
        return None


def misfit(hint: Hint, records: Sequence[bytes | None]) -> tuple[str, str] | None:
    """Return what a hint has to say of a log, and what it says; None if it fits.

    Parameters
    ----------
    records : sequence of bytes or None
        The log's records from 0; of one that is None nothing is known. There may be fewer than the hint tells.
    """
    start = hint.checkpoint or 0
    if start > hint.length:
        return f"a checkpoint of at most {hint.length} records", f"one of {start}"
    if hint.tail and len(hint.tail) != hint.length - start:
        return f"a tail of {hint.length - start} records", f"one of {len(hint.tail)}"
    told = [*enumerate(map(canonical.sha256, hint.tail), start), (hint.length - 1, hint.last_sha256)]
    for seq, sha256 in told:
        data = records[seq] if seq < len(records) else None
        if data is not None and canonical.sha256(data) != sha256:
            return f"record {seq} with sha256 {canonical.sha256(data)}", f"one with sha256 {sha256}"
    return None


def write_hint(objects: ObjectStore, state: LineState, checkpoint: int | None, tail: Sequence[bytes] = ()) -> None:
    """Say where `state` ends and which checkpoint is newest.

    Parameters
    ----------
    tail : sequence of bytes, optional
        All records from the checkpoint to the end of `state`, so that opening the line need not fetch them one by one.
        Left out if they take more than ``MAX_TAIL_NBYTES``.
    """
    body: dict[str, Any] = {
        "format": "dcr-log-hint",
        "line": state.line,
        "checkpoint": checkpoint,
        "length": state.length,
        "last_sha256": state.last_sha256,
    }
    if tail and sum(map(len, tail)) <= MAX_TAIL_NBYTES:
        body["tail"] = [record.decode() for record in tail]
    objects.put(hint_key(state.line), canonical.seal_body(body))


def read_checkpoint(objects: ObjectStore, line: str, seq: int, store_sha256: str) -> LineState | None:
    """Return the folded state that the checkpoint at `seq` holds, or None if it cannot be used.

    The rows of a full checkpoint stay in it: the state returned names it as a segment instead.
    """
    key = checkpoint_key(line, seq)
    data = _get(objects, key)
    return None if data is None else _parse_checkpoint(data, key, line, seq, store_sha256)


def _parse_checkpoint(data: bytes, key: str, line: str, seq: int, store_sha256: str) -> LineState | None:
    fields = _body_of(data, key, "dcr-log-checkpoint")
    if fields is None:
        return None
    try:
        if (fields.text("line"), fields.count("seq"), fields.text("store_sha256")) != (line, seq, store_sha256):
            return None
        head = fields.optional_object("head")
        rows = tuple(VersionRow.from_json(item) for item in fields.objects("rows"))
        segments = tuple(fields.counts("segments"))
        if list(segments) != sorted(set(segments)) or any(item >= seq for item in segments):
            return None
        if len(rows) >= SEGMENT_VERSIONS:
            rows, segments = (), (*segments, seq)
        source = fields.object("source") if "source" in fields.document else None
        history = fields.object("history") if "history" in fields.document else None
        return LineState(
            line,
            seq,
            fields.hex("last_sha256", 64),
            None if head is None else VersionRow.from_json(head),
            OpenTransaction.from_json(fields.optional_object("open")),
            rows,
            segments,
            None if source is None else Source.from_json(source),
            UNTOUCHED if history is None else History.from_json(history),
        )
    except FormatError:
        return None


def read_rows(objects: ObjectStore, line: str, seq: int, store_sha256: str) -> tuple[VersionRow, ...] | None:
    """Return the rows of the checkpoint at `seq`, or None if it cannot be used."""
    fields = _read_body(objects, checkpoint_key(line, seq), "dcr-log-checkpoint")
    if fields is None or fields.document.get("store_sha256") != store_sha256 or fields.document.get("line") != line:
        return None
    try:
        return tuple(VersionRow.from_json(item) for item in fields.objects("rows"))
    except FormatError:
        return None


def is_fold(objects: ObjectStore, line: str, seq: int, store_sha256: str, expected: LineState | None) -> bool:
    """Whether a checkpoint can be read and, where that is known, is the fold of the records before it.

    Parameters
    ----------
    expected : LineState or None
        That fold, with all rows.
    """
    found = read_checkpoint(objects, line, seq, store_sha256)
    rows = read_rows(objects, line, seq, store_sha256)
    if found is None or rows is None or expected is None:
        return found is not None
    told = (found.length, found.last_sha256, found.head, found.open, found.source, found.history)
    if told != (
        expected.length,
        expected.last_sha256,
        expected.head,
        expected.open,
        expected.source,
        expected.history,
    ):
        return False
    earlier = [segment for segment in found.segments if segment < seq]
    n_before = sum(row.seq < earlier[-1] for row in expected.rows) if earlier else 0
    return rows == expected.rows[n_before:]


def write_checkpoint(objects: ObjectStore, state: LineState, store_sha256: str) -> LineState:
    """Store the fold; return `state`, with its rows moved to the checkpoint if that made it a full segment."""
    objects.put(checkpoint_key(state.line, state.length), checkpoint_bytes(state, store_sha256))
    return after_checkpoint(state)


def checkpoint_bytes(state: LineState, store_sha256: str) -> bytes:
    """Return the checkpoint that is this fold, as it is stored."""
    body: dict[str, Any] = {
        "format": "dcr-log-checkpoint",
        "line": state.line,
        "seq": state.length,
        "store_sha256": store_sha256,
        "last_sha256": state.last_sha256,
        "head": None if state.head is None else state.head.to_json(),
        "open": None if state.open is None else state.open.to_json(),
        "segments": list(state.segments),
        "rows": [row.to_json() for row in state.rows],
    }
    if state.source is not None:
        body["source"] = state.source.to_json()
    if state.history != UNTOUCHED:
        body["history"] = state.history.to_json()
    return canonical.seal_body(body)


def after_checkpoint(state: LineState) -> LineState:
    """Return `state`, of which there is a checkpoint now, with its rows moved there if that made it a full segment."""
    if len(state.rows) < SEGMENT_VERSIONS:
        return state
    return replace(state, rows=(), segments=(*state.segments, state.length))
