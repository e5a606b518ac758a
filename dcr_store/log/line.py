"""One line's log in an object store: open, follow, append (docs/spec/v1.md §9, §10). Safe to use from several threads.

Appending decides on a prefix and puts at that prefix's length; a lost number is read and decided again. Refuses to
append anything while the outcome of an earlier put is unknown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from dcr_store import events
from dcr_store.errors import DcrError, FormatError, IntegrityError, NotFoundError, OutcomeUnknownError, StorageError
from dcr_store.format import canonical
from dcr_store.format.names import checkpoint_key, record_key
from dcr_store.format.records import Begin, Commit, Record, parse_record
from dcr_store.log import checkpoints, fold
from dcr_store.log.fold import LineState, VersionRow
from dcr_store.objects.threads import Threads
from dcr_store.ports import ObjectStore

CHECKPOINT_VERSIONS: Final = 8
_N_PARALLEL: Final = 16


class LineLog:
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
        self.objects = objects
        self.line = line
        self.store_sha256 = store_sha256
        self.state = LineState(line, 0, store_sha256)
        self._checkpoint: int | None = None
        self._unresolved: tuple[str, bytes] | None = None
        self._segments: dict[int, tuple[VersionRow, ...]] = {}
        self._opened = False
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ reading

    def refresh(self) -> LineState:
        """Read on from where the state ends; return the new state.

        Raises
        ------
        IntegrityError
            If a record is illegal, or records that the hint speaks of are gone.
        """
        with self._lock:
            return self._refresh()

    def _refresh(self) -> LineState:
        if self._opened:
            return self._read_on(0)
        at_least = self._open()
        try:
            self._read_on(at_least)
        except IntegrityError:
            if self._checkpoint is None:
                raise
            # A checkpoint is derived and may be wrong: the records alone decide.
            self.state, self._checkpoint = LineState(self.line, 0, self.store_sha256), None
            self._read_on(at_least)
        self._opened = True
        return self.state

    def _read_on(self, at_least: int) -> LineState:
        """Fold the records after the state; there have to be `at_least` in all."""
        while self.state.length < at_least:
            stop = min(at_least, self.state.length + 1024)
            with Threads(_N_PARALLEL) as pool:
                for seq, data in zip(
                    range(self.state.length, stop), pool.map(self._get, range(self.state.length, stop)), strict=True
                ):
                    if data is None:
                        raise IntegrityError(
                            "the log record is missing; restore it from a copy of the store",
                            key=record_key(self.line, seq),
                            expected=f"at least {at_least} records, as {self.line}'s hint says",
                            found=f"{seq}",
                        )
                    self._advance(data)
        while (data := self._get(self.state.length)) is not None:
            self._advance(data)
        return self.state

    def _open(self) -> int:
        """Start from the newest usable checkpoint; return a length that the log had once."""
        hint = checkpoints.read_hint(self.objects, self.line)
        seqs = [] if hint is None or hint.checkpoint is None else [hint.checkpoint]
        state = next(filter(None, map(self._read_checkpoint, seqs)), None)
        if state is None and (hint is None or hint.checkpoint is not None):
            prefix = checkpoint_key(self.line, 0).rpartition("/")[0] + "/"
            names = [name.removesuffix(".json") for name in self.objects.list_names(prefix)]
            found = sorted((int(name) for name in names if name.isdecimal() and len(name) == 20), reverse=True)
            state = next(filter(None, map(self._read_checkpoint, found)), None)
        if state is not None:
            self.state, self._checkpoint = state, state.length
        return max(0 if hint is None else hint.length, self.state.length)

    def _read_checkpoint(self, seq: int) -> LineState | None:
        """Return a checkpoint's state if it is that of the records: its last one is there and the one that it says."""
        state = checkpoints.read_checkpoint(self.objects, self.line, seq, self.store_sha256)
        if state is None or seq == 0:
            return None
        last = self._get(seq - 1)
        return state if last is not None and canonical.sha256(last) == state.last_sha256 else None

    def _get(self, seq: int) -> bytes | None:
        try:
            return self.objects.get(record_key(self.line, seq))
        except NotFoundError:
            return None

    def _advance(self, data: bytes) -> None:
        key = record_key(self.line, self.state.length)
        self.state = fold.apply(self.state, parse_record(data, key), data)

    def records(self) -> Iterator[tuple[Record, bytes]]:
        """Iterate over all records from 0 with their bytes, folding and checking them anew.

        Raises
        ------
        IntegrityError, FormatError
            At the first record that is illegal or damaged.
        """
        state, seq = LineState(self.line, 0, self.store_sha256), 0
        with Threads(_N_PARALLEL) as pool:
            while True:
                batch = list(pool.map(self._get, range(seq, seq + _N_PARALLEL)))
                for data in batch:
                    if data is None:
                        return
                    record = parse_record(data, record_key(self.line, state.length))
                    state = fold.apply(state, record, data)
                    yield record, data
                seq += _N_PARALLEL

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

    # ------------------------------------------------------------------ writing

    def append(self, decide: Callable[[LineState], Record]) -> Record:
        """Append the record that `decide` makes of the current state.

        Parameters
        ----------
        decide : callable
            Called with the fold of a prefix; returns the record for the number that is this prefix's length, or
            raises (a ``ConflictError``) if nothing may be appended. Called again with more of the log whenever its
            number was lost.

        Returns
        -------
        Record
            The record that is now in the log.

        Raises
        ------
        OutcomeUnknownError
            The put got no answer; the next append first finds out what became of it.
        """
        with self._lock:
            return self._append(decide)

    def _append(self, decide: Callable[[LineState], Record]) -> Record:
        # What is known is tried first: if the log has gone on, the number is taken, which costs one request.
        is_fresh = self._resolve() or not self._opened
        state = self._refresh() if is_fresh else self.state
        while True:
            try:
                record = decide(state)
            except DcrError:
                if is_fresh:
                    raise
                state, is_fresh = self._refresh(), True  # refused for what may be over by now
                continue
            data = record.to_bytes()
            key = record_key(self.line, state.length)
            # Parsed again: a record that no reader accepts would be the end of the line.
            advanced = fold.apply(state, parse_record(data, key), data)
            events.reached(f"log.{record.kind}.before", key)
            # A crash just before leaves the log as it was; just after, the record stands and every reader sees it.
            if self._put(key, data):
                self.state = advanced
                events.reached(f"log.{record.kind}.after", key)
                self._note(record)
                return record
            state, is_fresh = self._refresh(), True

    def _put(self, key: str, data: bytes) -> bool:
        try:
            return self.objects.put_if_absent(key, data)
        except OutcomeUnknownError:
            self._unresolved = (key, data)
            raise

    def _resolve(self) -> bool:
        """Find out what became of a put without an answer; return whether there was one."""
        if self._unresolved is None:
            return False
        key, data = self._unresolved
        self.objects.put_if_absent(key, data)
        self._unresolved = None
        return True

    def _note(self, record: Record) -> None:
        """Write hint and checkpoint. They only save time, so a failing backend is no error here."""
        if not isinstance(record, Commit):
            return
        try:
            if (record.version + 1) % CHECKPOINT_VERSIONS == 0:
                length = self.state.length
                events.reached("log.checkpoint.before", self.line)
                self.state = checkpoints.write_checkpoint(self.objects, self.state, self.store_sha256)
                self._checkpoint = length
                events.reached("log.checkpoint.after", self.line)
            events.reached("log.hint.before", self.line)
            checkpoints.write_hint(self.objects, self.state, self._checkpoint)
            events.reached("log.hint.after", self.line)
        except (StorageError, FormatError):
            events.reached("log.hint.failed", self.line)
