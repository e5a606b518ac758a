"""The fold of a line's log (docs/spec/v1.md §9): one pure function from state and record to state. No I/O.

Refuses a record that is illegal at its place, naming it, so that every reader sees the same history or none. What
maintenance does is folded in ``log.history``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from dcr_store.errors import IntegrityError
from dcr_store.format import canonical
from dcr_store.format.documents import Base
from dcr_store.format.fields import MAX_VERSION, Fields
from dcr_store.format.names import record_key, version_name
from dcr_store.format.records import Abort, Begin, Commit, OfTransaction, Origin, Record, Resume
from dcr_store.format.rows import VersionRow
from dcr_store.log import history
from dcr_store.log.history import UNTOUCHED, History, Illegal, Place

INLINE_NBYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """The one transaction of a line that may be open."""

    txid: str
    owner: str
    attempt: int
    version: int
    base: Base | None
    layout: str | None
    writers: tuple[str, ...]
    message: str | None
    metadata: dict[str, Any]
    seq: int
    created_at: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "txid": self.txid,
            "owner": self.owner,
            "attempt": self.attempt,
            "version": self.version,
            "base": None if self.base is None else self.base.to_json(),
            "layout": self.layout,
            "writers": list(self.writers),
            "message": self.message,
            "metadata": self.metadata,
            "seq": self.seq,
            "created_at": self.created_at,
        }

    @classmethod
    def from_json(cls, fields: Fields | None) -> OpenTransaction | None:
        """Parse; None stays None."""
        if fields is None:
            return None
        return cls(
            fields.hex("txid", 32),
            fields.text("owner", empty=False),
            fields.count("attempt"),
            fields.count("version", 0, MAX_VERSION),
            Base.from_json(fields.optional_object("base")),
            fields.optional_hex("layout", 64),
            fields.writers(),
            fields.optional_text("message"),
            fields.object("metadata").document,
            fields.count("seq"),
            fields.time("created_at"),
        )


@dataclass(frozen=True, slots=True)
class Source:
    """Where a line comes from that goes on from another one: a version of that line's own."""

    line: str
    row: VersionRow

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"line": self.line, "row": self.row.to_json()}

    @classmethod
    def from_json(cls, fields: Fields) -> Source:
        """Parse; ``FormatError`` names the field."""
        return cls(fields.line(), VersionRow.from_json(fields.object("row")))


@dataclass(frozen=True, slots=True)
class LineState:
    """A line's log folded up to record ``length - 1``.

    Attributes
    ----------
    head : VersionRow or None
        The last version; the one that the line goes on from, while it has none of its own.
    last_sha256 : str
        SHA-256 of the last record; of ``dcr.json`` while there is none.
    rows : tuple of VersionRow
        The versions since the last segment of checkpoints, oldest first.
    segments : tuple of int
        Checkpoints that hold the rows before those.
    source : Source or None
        The version of another line that this one goes on from.
    """

    line: str
    length: int
    last_sha256: str
    head: VersionRow | None = None
    open: OpenTransaction | None = None
    rows: tuple[VersionRow, ...] = ()
    segments: tuple[int, ...] = ()
    source: Source | None = None
    history: History = UNTOUCHED

    @property
    def first(self) -> int:
        """The number of the line's first own version, whether or not it has one."""
        return 0 if self.source is None else self.source.row.version + 1

    @property
    def next_version(self) -> int:
        """The number of the version that a next commit makes."""
        return 0 if self.head is None else self.head.version + 1

    @property
    def head_base(self) -> Base | None:
        """The head as a base, None while the line has no version."""
        return None if self.head is None else Base(version_name(self.line, self.head.version), self.head.root)


def apply(state: LineState, record: Record, data: bytes) -> LineState:
    """Return `state` advanced by one record.

    Parameters
    ----------
    state : LineState
        The fold of all records before.
    record : Record
        The record parsed from `data`.
    data : bytes
        The bytes as stored, for the hash chain.

    Raises
    ------
    IntegrityError
        If the record is illegal at this place; names its key and the rule.
    """
    key = record_key(state.line, state.length)

    def require(condition: bool, rule: str, expected: object, found: object) -> None:
        if not condition:
            raise IntegrityError(
                f"the log record is illegal: {rule}; the log is damaged or was written by a broken client",
                key=key,
                expected=expected,
                found=found,
            )

    require(record.line == state.line, "it belongs to another line", state.line, record.line)
    require(record.seq == state.length, "its number is not its place", state.length, record.seq)
    require(record.prev == state.last_sha256, "the hash chain is broken", state.last_sha256, record.prev)
    advanced = replace(state, length=state.length + 1, last_sha256=canonical.sha256(data))
    pending = state.open
    if isinstance(record, Begin):
        require(pending is None, "a transaction is open", "none", pending and pending.txid)
        require(record.version == state.next_version, "it begins another version", state.next_version, record.version)
        require(record.base == state.head_base, "its base is not the head", state.head_base, record.base)
        require(len(record.writers) > 0, "it names no writer", "at least one", 0)
        return replace(
            advanced,
            open=OpenTransaction(
                record.txid,
                record.owner,
                0,
                record.version,
                record.base,
                record.layout,
                record.writers,
                record.message,
                record.metadata,
                record.seq,
                record.created_at,
            ),
        )
    if isinstance(record, Origin):
        require(record.seq == 0, "a line comes from another one by its first record alone", 0, record.seq)
        require(record.parent != state.line, "a line cannot come from itself", "another line", record.parent)
        return replace(advanced, head=record.row, source=Source(record.parent, record.row))
    is_of_open = isinstance(record, OfTransaction) and pending is not None and pending.txid == record.txid
    if not isinstance(record, Commit) and not is_of_open:
        head = -1 if state.head is None else state.head.version
        try:
            return replace(advanced, history=history.apply(state.history, record, Place(state.line, state.first, head)))
        except Illegal as error:
            require(False, error.rule, error.expected, error.found)
    assert isinstance(record, OfTransaction)
    require(is_of_open, "its transaction is not open", pending and pending.txid, record.txid)
    assert pending is not None
    if isinstance(record, Resume):
        require(
            record.attempt == pending.attempt + 1, "its attempt is not the next", pending.attempt + 1, record.attempt
        )
        return replace(advanced, open=replace(pending, attempt=record.attempt, owner=record.owner))
    if isinstance(record, Commit):
        require(record.attempt == pending.attempt, "its attempt is fenced", pending.attempt, record.attempt)
        require(record.version == pending.version, "it commits another version", pending.version, record.version)
        require(record.base in (None, pending.base), "its base is another one", pending.base, record.base)
        inline = len(canonical.encode([pending.message, pending.metadata])) <= INLINE_NBYTES
        row = VersionRow(
            record.version,
            record.seq,
            pending.seq,
            record.txid,
            record.attempt,
            record.base,
            record.layout,
            record.root,
            record.manifest,
            record.counts,
            pending.message if inline else None,
            pending.metadata if inline else None,
            record.created_at,
            advanced.last_sha256,
        )
        return replace(advanced, open=None, head=row, rows=(*state.rows, row))
    require(isinstance(record, Abort), "its transaction is another kind of work", "abort", record.kind)
    return replace(advanced, open=None)
