"""Hints and checkpoints of a log (docs/spec/v1.md §10): derived, may be missing, stale or damaged.

Reading never trusts them further than their own SHA-256 and the hash chain that goes on from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dcr_store.errors import FormatError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields
from dcr_store.format.names import checkpoint_key, hint_key
from dcr_store.log.fold import LineState, OpenTransaction, VersionRow
from dcr_store.ports import ObjectStore

SEGMENT_VERSIONS: Final = 512


@dataclass(frozen=True, slots=True)
class Hint:
    """The newest checkpoint, and a length that the log had once."""

    checkpoint: int | None
    length: int
    last_sha256: str


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
        return Hint(fields.optional_count("checkpoint"), fields.count("length", 1), fields.hex("last_sha256", 64))
    except FormatError:
        return None


def write_hint(objects: ObjectStore, state: LineState, checkpoint: int | None) -> None:
    """Say where `state` ends and which checkpoint is newest."""
    body = {
        "format": "dcr-log-hint",
        "line": state.line,
        "checkpoint": checkpoint,
        "length": state.length,
        "last_sha256": state.last_sha256,
    }
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
        return LineState(
            line,
            seq,
            fields.hex("last_sha256", 64),
            None if head is None else VersionRow.from_json(head),
            OpenTransaction.from_json(fields.optional_object("open")),
            rows,
            segments,
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


def write_checkpoint(objects: ObjectStore, state: LineState, store_sha256: str) -> LineState:
    """Store the fold; return `state`, with its rows moved to the checkpoint if that made it a full segment."""
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
    objects.put(checkpoint_key(state.line, state.length), canonical.seal_body(body))
    if len(state.rows) < SEGMENT_VERSIONS:
        return state
    return LineState(
        state.line,
        state.length,
        state.last_sha256,
        state.head,
        state.open,
        (),
        (*state.segments, state.length),
    )
