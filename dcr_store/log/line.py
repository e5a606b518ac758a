"""One line's log in an object store: open, follow, append (docs/spec/v1.md §9, §10). Safe to use from several threads.

What all logs share is in ``log.record_log``; here are the line's hint, its checkpoints, and the versions they tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from dcr_store import events
from dcr_store.errors import FormatError, IntegrityError
from dcr_store.format.fields import now
from dcr_store.format.names import checkpoint_key, hint_key, new_txid, numbered, record_key, version_name
from dcr_store.format.records import Abort, Begin, Commit, Record, Resume, parse_record
from dcr_store.format.rows import VersionRow
from dcr_store.log import checkpoints, fold
from dcr_store.log.checkpoints import SEGMENT_VERSIONS
from dcr_store.log.fold import LineState, OpenTransaction
from dcr_store.log.record_log import RecordLog
from dcr_store.log.signing import UNSIGNED, Signing
from dcr_store.ports import ObjectStore

CHECKPOINT_VERSIONS: Final = 8
_KEPT_RECORDS: Final = 64  # those since a checkpoint, unless there was much maintenance


def next_fields(state: LineState) -> dict[str, Any]:
    """Return the fields that all records have, of the one that comes next after `state`."""
    return {
        "line": state.line,
        "seq": state.length,
        "id": new_txid(),
        "prev": state.last_sha256,
        "created_at": now(),
    }


class LineLog(RecordLog[LineState, Record]):
    """The log of one line.

    Parameters
    ----------
    objects : ObjectStore
    line : str
        Checked name.
    store_sha256 : str
        SHA-256 of ``dcr.json``, with which the hash chain starts.
    signing : Signing
        As of ``RecordLog``.
    """

    def __init__(self, objects: ObjectStore, line: str, store_sha256: str, signing: Signing = UNSIGNED) -> None:
        self.line = self.name = line
        self._checkpoint: int | None = None
        self._segments: dict[int, tuple[VersionRow, ...]] = {}
        self._kept: dict[int, bytes] = {}  # the last records by number, one that lost its number among them perhaps
        super().__init__(objects, store_sha256, signing)

    def _empty(self) -> LineState:
        return LineState(self.line, 0, self.store_sha256)

    def _key(self, seq: int) -> str:
        return record_key(self.line, seq)

    def _hint_key(self) -> str:
        return hint_key(self.line)

    def _parse(self, data: bytes, key: str) -> Record:
        return parse_record(data, key)

    def _apply(self, state: LineState, record: Record, data: bytes) -> LineState:
        advanced = fold.apply(state, record, data)
        self._kept[state.length] = data
        self._kept.pop(state.length - _KEPT_RECORDS, None)
        return advanced

    # ------------------------------------------------------------------ hint and checkpoints

    def _open(self) -> tuple[LineState | None, int]:
        hint = checkpoints.read_hint(self.objects, self.line)
        if self.is_trusting:
            self._checkpoint = None if hint is None else hint.checkpoint
            return None, 0 if hint is None else hint.length
        if hint is not None and hint.tail and (state := self._read_tail(hint)) is not None:
            self._checkpoint = hint.checkpoint
            return state, hint.length
        newest = [] if hint is None or hint.checkpoint is None else [hint.checkpoint]
        state = next(filter(None, map(self._read_checkpoint, newest)), None)
        if state is None and (hint is None or hint.checkpoint is not None):
            prefix = checkpoint_key(self.line, 0).rpartition("/")[0] + "/"
            seqs = [numbered(prefix + name, prefix) for name in self.objects.list_names(prefix)]
            found = sorted((seq for seq in seqs if seq is not None), reverse=True)
            state = next(filter(None, map(self._read_checkpoint, found)), None)
        self._checkpoint = None if state is None else state.length
        return state, 0 if hint is None else hint.length

    def _read_checkpoint(self, seq: int) -> LineState | None:
        """Return a checkpoint's state if it is that of the records: its last one is there and the one that it says."""
        state = checkpoints.read_checkpoint(self.objects, self.line, seq, self.store_sha256)
        return state if state is not None and self._is_last(state) else None

    def _read_tail(self, hint: checkpoints.Hint) -> LineState | None:
        """Return the state that a hint leads to by its checkpoint and tail, if that is the one of the records.

        The last record, which is there, holds the hash of the one before, and so on back into the checkpoint.
        """
        state: LineState | None = self._empty()
        if hint.checkpoint is not None:
            state = checkpoints.read_checkpoint(self.objects, self.line, hint.checkpoint, self.store_sha256)
        if state is None:
            return None
        try:
            for data in hint.tail:
                state = self._advanced(state, data)
        except (IntegrityError, FormatError):
            return None
        is_whole = (state.length, state.last_sha256) == (hint.length, hint.last_sha256)
        return state if is_whole and self._is_last(state) else None

    def _tail(self, start: int, stop: int) -> list[bytes]:
        """Return the records of these numbers, none if one is not at hand."""
        found = [self._kept.get(seq) for seq in range(start, stop)]
        return [] if None in found else [data for data in found if data is not None]

    def _forget(self) -> None:
        super()._forget()
        self._checkpoint = None
        self._segments.clear()

    def _note(self, record: Record) -> None:
        if not isinstance(record, Commit):
            return
        if (record.version + 1) % CHECKPOINT_VERSIONS == 0:
            events.reached("log.checkpoint.before", self.line)
            self._write_checkpoint()
        events.reached("log.hint.before", self.line)
        self._write_hint()

    def _write_checkpoint(self) -> None:
        length, rows = self.state.length, self.state.rows
        self.state = checkpoints.write_checkpoint(self.objects, self.state, self.store_sha256)
        if self.is_trusting and length in self.state.segments:
            self._segments[length] = rows  # what stands there may be another one by the time it is wanted
        self._checkpoint = length
        events.reached("log.checkpoint.after", self.line)

    def _write_hint(self) -> None:
        tail = self._tail(self._checkpoint or 0, self.state.length)
        checkpoints.write_hint(self.objects, self.state, self._checkpoint, tail)
        events.reached("log.hint.after", self.line)

    def note(self, *, is_last: bool = True) -> None:
        """Write the hint, and now and then a checkpoint, after records that were adopted; not the `is_last`: if due."""
        with self._lock:
            n_since = self.state.length - (self._checkpoint or 0)
            is_due = n_since >= 2 * CHECKPOINT_VERSIONS if is_last else len(self.state.rows) >= SEGMENT_VERSIONS
            if is_due:
                self._write_checkpoint()
            if is_due or is_last:
                self._write_hint()

    def is_noted(self) -> bool:
        """Whether the hint speaks of the log as it was read last."""
        hint = checkpoints.read_hint(self.objects, self.line)
        return hint is not None and hint.length == self.state.length

    # ------------------------------------------------------------------ versions

    def rows(self) -> list[VersionRow]:
        """Return all versions of the line's own, oldest first, as of the last refresh."""
        result: list[VersionRow] = []
        for seq in self.state.segments:
            result.extend(self._segment(seq))
        result.extend(self.state.rows)
        first, last = self.state.first, self.state.next_version
        if [row.version for row in result] != list(range(first, last)):
            raise IntegrityError(
                "the log's checkpoints leave out a version; delete log checkpoints, they are derived",
                key=self.line,
                expected=f"{last - first} versions",
                found=f"{len(result)}",
            )
        return result

    def row(self, version: int) -> VersionRow | None:
        """Return one version of the line's own, or the one that it goes on from, or None (as of the last refresh)."""
        head, source = self.state.head, self.state.source
        if source is not None and version == source.row.version:
            return source.row
        if head is None or not self.state.first <= version <= head.version:
            return None
        if version == head.version:
            return head
        rows, segments = self.state.rows, self.state.segments
        while not (rows and rows[0].version <= version) and segments:
            # Bisected: each segment is an object to fetch.
            middle = len(segments) // 2
            found = self._segment(segments[middle])
            if found and version > found[-1].version:
                segments = segments[middle + 1 :]
            else:
                rows, segments = found, segments[:middle]
        index = version - rows[0].version if rows else -1
        if 0 <= index < len(rows) and rows[index].version == version:
            return rows[index]
        raise IntegrityError(
            "the log's checkpoints leave out a version; delete log checkpoints, they are derived",
            key=f"{self.line}@{version}",
        )

    def _segment(self, seq: int) -> tuple[VersionRow, ...]:
        if seq not in self._segments:
            rows = checkpoints.read_rows(self.objects, self.line, seq, self.store_sha256)
            self._segments[seq] = self._refold(seq) if rows is None else rows
        return self._segments[seq]

    def _refold(self, seq: int) -> tuple[VersionRow, ...]:
        """Return the rows of a damaged segment from the records themselves."""
        before = [s for s in self.state.segments if s < seq]
        start = before[-1] if before else 0
        state = LineState(self.line, 0, self.store_sha256)
        for record, data in self.records():
            state = fold.apply(state, record, data)
            if state.length == seq:
                break
        return tuple(row for row in state.rows if row.seq >= start)

    def complete(self, row: VersionRow) -> VersionRow:
        """Return `row` with its message and metadata, reading the begin record where they were too long to keep."""
        if row.metadata is not None:
            return row
        record = self.begin_of(row)
        return replace(row, message=record.message, metadata=record.metadata)

    def abort_reason(self, pending: OpenTransaction) -> str | None:
        """Return why a transaction was aborted, None if it was not."""
        for seq in range(pending.seq + 1, self.state.length):  # until it ends, no other one begins
            record = self._record(seq)
            if not isinstance(record, Resume):
                return record.reason if isinstance(record, Abort) and record.txid == pending.txid else None
        return None

    def ending_of(self, txid: str) -> str | None:
        """Say how a transaction ended, if one of the last records tells it."""
        for seq in reversed(range(max(0, self.state.length - _KEPT_RECORDS), self.state.length)):
            record = self._record(seq)
            if isinstance(record, Abort) and record.txid == txid:
                return f"it was aborted: {record.reason}"
            if isinstance(record, Commit) and record.txid == txid:
                return f"it was committed as {version_name(self.line, record.version)}"
        return None

    def _record(self, seq: int) -> Record | None:
        data = self._get(seq)
        return None if data is None else self.read_record(data, self._key(seq))

    def begin_of(self, row: VersionRow) -> Begin:
        """Read the record that began a version.

        Raises
        ------
        IntegrityError
            If it is missing, or another one.
        """
        key = record_key(self.line, row.begin_seq)
        data = self._get(row.begin_seq)
        if data is None:
            raise IntegrityError("the log record is missing; restore it from a copy of the store", key=key)
        record = self.read_record(data, key)
        if not isinstance(record, Begin) or record.txid != row.txid:
            raise IntegrityError(
                "is not the record that began the version", key=key, expected=f"begin of {row.txid}", found=record.kind
            )
        return record
