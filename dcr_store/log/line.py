"""One line's log in an object store: open, follow, append (docs/spec/v1.md §9, §10). Safe to use from several threads.

What all logs share is in ``log.record_log``; here are the line's hint, its checkpoints, and the versions they tell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dcr_store import events
from dcr_store.errors import IntegrityError
from dcr_store.format.names import checkpoint_key, hint_key, record_key
from dcr_store.format.records import Begin, Commit, Record, parse_record
from dcr_store.log import checkpoints, fold
from dcr_store.log.fold import LineState, VersionRow
from dcr_store.log.record_log import RecordLog
from dcr_store.ports import ObjectStore

CHECKPOINT_VERSIONS: Final = 8


class LineLog(RecordLog[LineState, Record]):
    """The log of one line.

    Parameters
    ----------
    objects : ObjectStore
    line : str
        Checked name.
    store_sha256 : str
        SHA-256 of ``dcr.json``, with which the hash chain starts.
    """

    def __init__(self, objects: ObjectStore, line: str, store_sha256: str) -> None:
        self.line = self.name = line
        self._checkpoint: int | None = None
        self._segments: dict[int, tuple[VersionRow, ...]] = {}
        super().__init__(objects, store_sha256)

    def _empty(self) -> LineState:
        return LineState(self.line, 0, self.store_sha256)

    def _key(self, seq: int) -> str:
        return record_key(self.line, seq)

    def _hint_key(self) -> str:
        return hint_key(self.line)

    def _parse(self, data: bytes, key: str) -> Record:
        return parse_record(data, key)

    def _apply(self, state: LineState, record: Record, data: bytes) -> LineState:
        return fold.apply(state, record, data)

    # ------------------------------------------------------------------ hint and checkpoints

    def _open(self) -> tuple[LineState | None, int]:
        hint = checkpoints.read_hint(self.objects, self.line)
        seqs = [] if hint is None or hint.checkpoint is None else [hint.checkpoint]
        state = next(filter(None, map(self._read_checkpoint, seqs)), None)
        if state is None and (hint is None or hint.checkpoint is not None):
            prefix = checkpoint_key(self.line, 0).rpartition("/")[0] + "/"
            names = [name.removesuffix(".json") for name in self.objects.list_names(prefix)]
            found = sorted((int(name) for name in names if name.isdecimal() and len(name) == 20), reverse=True)
            state = next(filter(None, map(self._read_checkpoint, found)), None)
        self._checkpoint = None if state is None else state.length
        return state, 0 if hint is None else hint.length

    def _read_checkpoint(self, seq: int) -> LineState | None:
        """Return a checkpoint's state if it is that of the records: its last one is there and the one that it says."""
        state = checkpoints.read_checkpoint(self.objects, self.line, seq, self.store_sha256)
        return state if state is not None and self._is_last(state) else None

    def _forget(self) -> None:
        super()._forget()
        self._checkpoint = None
        self._segments.clear()

    def _note(self, record: Record) -> None:
        if not isinstance(record, Commit):
            return
        if (record.version + 1) % CHECKPOINT_VERSIONS == 0:
            length = self.state.length
            events.reached("log.checkpoint.before", self.line)
            self.state = checkpoints.write_checkpoint(self.objects, self.state, self.store_sha256)
            self._checkpoint = length
            events.reached("log.checkpoint.after", self.line)
        events.reached("log.hint.before", self.line)
        checkpoints.write_hint(self.objects, self.state, self._checkpoint)
        events.reached("log.hint.after", self.line)

    # ------------------------------------------------------------------ versions

    def rows(self) -> list[VersionRow]:
        """Return all versions, oldest first, as of the last refresh."""
        result: list[VersionRow] = []
        for seq in self.state.segments:
            result.extend(self._segment(seq))
        result.extend(self.state.rows)
        n_versions = 0 if self.state.head is None else self.state.head.version + 1
        if [row.version for row in result] != list(range(n_versions)):
            raise IntegrityError(
                "the log's checkpoints leave out a version; delete log checkpoints, they are derived",
                key=self.line,
                expected=f"{n_versions} versions",
                found=f"{len(result)}",
            )
        return result

    def row(self, version: int) -> VersionRow | None:
        """Return one version, or None if the line has no such version (as of the last refresh)."""
        head = self.state.head
        if head is None or version > head.version:
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
        record = parse_record(data, key)
        if not isinstance(record, Begin) or record.txid != row.txid:
            raise IntegrityError(
                "is not the record that began the version", key=key, expected=f"begin of {row.txid}", found=record.kind
            )
        return record
