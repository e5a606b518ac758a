"""What the logs of lines and of groups share: read on, append (docs/spec/v1.md §9).

Appending decides on a prefix and puts at that prefix's length; a lost number is read and decided again. Refuses to
append anything while the outcome of an earlier put is unknown. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

from dcr_store import events
from dcr_store.errors import ConflictError, DcrError, FormatError, IntegrityError, NotFoundError, OutcomeUnknownError
from dcr_store.format import canonical
from dcr_store.format.copies import identity
from dcr_store.format.names import STORE_KEY
from dcr_store.log.signing import UNSIGNED, Signing
from dcr_store.objects.threads import Threads
from dcr_store.ports import Doubtable, ObjectStore

_N_PARALLEL: Final = 16
_MOST_TOGETHER: Final = 1024  # records asked for at a time, after fewer have been there
_DOUBT_S: Final = 10.0  # enough for 1,024 records
_DOUBT_ONE_S: Final = 1.0


class LogRecord(Protocol):
    """What a log is made of."""

    @property
    def kind(self) -> Any:
        """The record's kind."""

    @property
    def prev(self) -> str:
        """SHA-256 of the record before."""

    def to_bytes(self) -> bytes:
        """Return the stored bytes."""


class LogState(Protocol):
    """The fold of the records before ``length``."""

    @property
    def length(self) -> int:
        """How many records it folds."""

    @property
    def last_sha256(self) -> str:
        """SHA-256 of the last of them; of ``dcr.json`` while there is none."""


S = TypeVar("S", bound=LogState)
R = TypeVar("R", bound=LogRecord)


class RecordLog(ABC, Generic[S, R]):
    """One log. A subclass says what its records are and what they fold to.

    Parameters
    ----------
    objects : ObjectStore
    store_sha256 : str
        SHA-256 of ``dcr.json``, with which the hash chain starts.
    signing : Signing
        How records are signed, and which keys are trusted. With trusted keys nothing is taken from log checkpoints,
        which nobody signs: all records are read.

    Attributes
    ----------
    state : S
        The fold, as of the last refresh or append.
    n_readings : int
        How many times the log was read to its end: what is to be read after it is, once it is another number.
    """

    name: str
    """Whose log it is, for messages."""
    event_prefix: str = "log"
    """What the points ``<event_prefix>.<kind>.before`` and ``.after`` begin with."""
    decides_on_records: bool = False
    """Whether nothing is appended on what a log checkpoint alone says."""

    def __init__(self, objects: ObjectStore, store_sha256: str, signing: Signing = UNSIGNED) -> None:
        self.objects = objects
        self.store_sha256 = store_sha256
        self._signing = signing
        self.state: S = self._empty()
        self.n_readings = 0
        self._is_derived = False  # whether the state began with a log checkpoint
        self._last: bytes | None = None  # the record before `state.length`, if it was read or put
        self._unresolved: tuple[str, bytes] | None = None
        self._opened = False
        self._lock = threading.RLock()

    @abstractmethod
    def _empty(self) -> S:
        """Return the fold of no record."""

    @abstractmethod
    def _key(self, seq: int) -> str:
        """Return the key of a record."""

    @abstractmethod
    def _hint_key(self) -> str:
        """Return the key of what says how long the log is; derived."""

    @abstractmethod
    def _parse(self, data: bytes, key: str) -> R:
        """Parse a record."""

    @abstractmethod
    def _apply(self, state: S, record: R, data: bytes) -> S:
        """Return `state` advanced by a record, which is refused where it is illegal."""

    @abstractmethod
    def _open(self) -> tuple[S | None, int]:
        """Return a log checkpoint's state, if one can be used, and a length that the log had once.

        None may be used where `is_trusting`.
        """

    @abstractmethod
    def _note(self, record: R) -> None:
        """Write what is derived from the log, after a record of ours. A failing backend is no error there."""

    # ------------------------------------------------------------------ reading

    @property
    def is_trusting(self) -> bool:
        """Whether records count only if keys that are trusted have signed them."""
        return self._signing.trusted is not None

    def read_record(self, data: bytes, key: str) -> R:
        """Parse a record as stored, and check its signature if keys are trusted."""
        record = self._parse(data, key)
        self._signing.check(data, key, self.store_sha256)
        return record

    def refresh(self) -> S:
        """Read on from where the state ends; return the new state.

        Raises
        ------
        IntegrityError, FormatError
            If a record is illegal, damaged or of an unknown kind, or records that the hint speaks of are gone: also
            after all records were read anew, past caches.
        """
        with self._lock:
            return self._refresh()

    def _refresh(self) -> S:
        known = at_least = self.state.length
        if not self._opened:
            opened, at_least = self._looked_up(known)
            if opened is not None:
                self.state, self._is_derived = opened, True
        is_from_records = self.state.length == 0 and not isinstance(self.objects, Doubtable)
        try:
            for state in self._following(self.state, at_least):
                self.state = state
        except (IntegrityError, FormatError):
            if is_from_records:
                raise
            # What was folded before may be wrong: a checkpoint is derived, a cache may have answered with other bytes,
            # also where it was asked for the hint.
            if isinstance(self.objects, Doubtable):
                self._doubt(True)
                _, at_least = self._looked_up(known)
            self._fold_anew(at_least, past=True)
        self._opened = True
        self.n_readings += 1
        return self.state

    def _looked_up(self, known: int) -> tuple[S | None, int]:
        """Return a log checkpoint's state, if one can be used, and how many records there have to be."""
        opened, hinted = self._open()
        return opened, max(known, hinted, 0 if opened is None else opened.length)

    def _fold_anew(self, at_least: int, *, past: bool) -> S:
        """Fold all records from 0, at least so many; a failure leaves the state, and opens the log anew next time."""
        self._opened = False
        folded = empty = self._empty()
        for state in self._following(empty, at_least, past=past):
            folded = state
        self._forget()
        self.state, self._opened = folded, True
        self.n_readings += 1
        return folded

    def _forget(self) -> None:
        """Forget what checkpoints said."""
        self._is_derived = False

    def _following(self, state: S, at_least: int, *, past: bool = False) -> Iterator[S]:
        """Fold the records after `state`, yielding each state; there have to be `at_least` records in all.

        `past` says whether caches on the way are to be passed by.
        """
        n_together = _N_PARALLEL
        while state.length < at_least:
            # A hint may promise any number: more are asked for at a time only after these were there.
            stop = min(at_least, state.length + n_together)
            n_together = min(2 * n_together, _MOST_TOGETHER)
            self._doubt(past)
            with Threads(_N_PARALLEL) as pool:
                for seq, data in zip(
                    range(state.length, stop), pool.map(self._get, range(state.length, stop)), strict=True
                ):
                    if data is None:
                        raise IntegrityError(
                            "the log record is missing, though the log had more once: restore it from a copy of the "
                            f"store, or, if none can have been lost, delete {self._hint_key()}, which is derived",
                            key=self._key(seq),
                            expected=f"at least {at_least} records, as {self.name}'s hint says",
                            found=f"{seq}",
                        )
                    state = self._advanced(state, data)
                    yield state
        self._doubt(past)
        while (data := self._get(state.length)) is not None:
            state = self._advanced(state, data)
            yield state

    def _advanced(self, state: S, data: bytes) -> S:
        advanced = self._apply(state, self.read_record(data, self._key(state.length)), data)
        self._last = data
        return advanced

    def _doubt(self, past: bool, for_s: float = _DOUBT_S) -> None:
        if past and isinstance(self.objects, Doubtable):
            self.objects.doubt(for_s)

    def _get(self, seq: int) -> bytes | None:
        try:
            return self.objects.get(self._key(seq))
        except NotFoundError:
            return None

    def _is_last(self, state: LogState) -> bool:
        """Whether the last record that a log checkpoint folds is there and the one that it says."""
        last = self._get(state.length - 1) if state.length else None
        return last is not None and canonical.sha256(last) == state.last_sha256

    def records(self) -> Iterator[tuple[R, bytes]]:
        """Iterate over all records from 0 with their bytes, folding and checking them anew.

        Raises
        ------
        IntegrityError, FormatError
            At the first record that is illegal or damaged.
        """
        state, seq = self._empty(), 0
        with Threads(_N_PARALLEL) as pool:
            while True:
                batch = list(pool.map(self._get, range(seq, seq + _N_PARALLEL)))
                for data in batch:
                    if data is None:
                        return
                    record = self.read_record(data, self._key(state.length))
                    state = self._apply(state, record, data)
                    yield record, data
                seq += _N_PARALLEL

    def since(self, start: int) -> list[tuple[R, bytes]]:
        """Return the records from number `start` to the end of the state, read again, with their bytes.

        They are those that were folded: each is signed as it has to be, and their hash chain ends where the fold does.

        Raises
        ------
        IntegrityError, FormatError
            If one is missing, or another one than when it was folded.
        """
        state = self.state
        with Threads(_N_PARALLEL) as pool:
            blobs = list(pool.map(self.raw, range(start, state.length)))
        found = [(self.read_record(data, self._key(seq)), data) for seq, data in enumerate(blobs, start)]
        expected = state.last_sha256
        for seq, (record, data) in reversed(list(enumerate(found, start))):
            if canonical.sha256(data) != expected:
                raise IntegrityError(
                    "the log record is not the one any more that was read before: the store was replaced, or set back "
                    "to an earlier state, or the record is damaged; see which store it is now, and verify it",
                    key=self._key(seq),
                    expected=f"sha256 {expected}",
                    found=f"sha256 {canonical.sha256(data)}",
                )
            expected = record.prev
        return found

    # ------------------------------------------------------------------ writing

    def append(self, decide: Callable[[S], R]) -> R:
        """Append the record that `decide` makes of the current state.

        Parameters
        ----------
        decide : callable
            Called with the fold of a prefix; returns the record for the number that is this prefix's length, or
            raises (a ``ConflictError``) if nothing may be appended. Called again with more of the log whenever its
            number was lost.

        Returns
        -------
        R
            The record that is now in the log.

        Raises
        ------
        InvalidInputError
            The log's last record is signed, and we have no key.
        OutcomeUnknownError
            The put got no answer; the next append first finds out what became of it.
        """
        with self._lock:
            return self._append(decide)

    def _append(self, decide: Callable[[S], R]) -> R:
        # What is known is tried first: if the log has gone on, the number is taken, which costs one request.
        is_fresh = self._resolve() or not self._opened
        length = self.state.length
        state = self._refresh() if is_fresh else self.state
        if self._is_derived and self.decides_on_records:
            # A checkpoint may be wrong where the records are right, and a record that only it allows would be the end
            # of the log for all who have read the records.
            state, is_fresh = self._judged_by_records(state.length), True
        while True:
            try:
                record = decide(state)
            except DcrError:
                if is_fresh:
                    raise
                state, is_fresh = self._refresh(), True  # refused for what may be over by now
                continue
            key = self._key(state.length)
            self._signing.check_writes(key)
            data = self._signing.signed(record.to_bytes(), self.store_sha256)
            # Parsed again: a record that no reader accepts would be the end of the log.
            advanced = self._apply(state, self.read_record(data, key), data)
            # What was read just now goes on from what was known, which proves that it is there.
            if state.length == length and not self._is_where_it_was(state):
                state, is_fresh, length = self._read_past(state), True, -1
                continue
            if state.length:
                self._signing.check_goes_on(self._last or self.raw(state.length - 1), key)
            events.reached(f"{self.event_prefix}.{record.kind}.before", key)
            # A crash just before leaves the log as it was; just after, the record stands and every reader sees it.
            if self._put(key, data):
                self.state, self._last = advanced, data
                events.reached(f"{self.event_prefix}.{record.kind}.after", key)
                self._note_quietly(record)
                return record
            state, is_fresh = self._refresh(), True

    def adopt(self, data: bytes, *, is_right_after: bool = False) -> R:
        """Put a record that the log of this store's source has at this place, byte for byte; the log has been read.

        `is_right_after` says that the record before was put just now, and need not be looked at again.

        Raises
        ------
        ConflictError
            If there is another record at its place.
        IntegrityError, FormatError
            If it is illegal there, or not signed by a key that is trusted.
        """
        with self._lock:
            key, state = self._key(self.state.length), self.state
            record = self.read_record(data, key)
            advanced = self._apply(state, record, data)
            if not is_right_after and not self._is_where_it_was(state):
                self._read_past(state)
            events.reached(f"{self.event_prefix}.{record.kind}.before", key)
            if not self.objects.put_if_absent(key, data):
                raise ConflictError(
                    "the line has gone on here by itself: it has another record than the source; copy to another "
                    "place, or detach this copy and go on with it",
                    key=key,
                    expected=f"sha256 {canonical.sha256(data)}",
                    found=f"sha256 {canonical.sha256(self.objects.get(key))}",
                )
            self.state, self._last = advanced, data
            events.reached(f"{self.event_prefix}.{record.kind}.after", key)
            return record

    def raw(self, seq: int) -> bytes:
        """Return a record's bytes; ``IntegrityError`` if it is missing."""
        data = self._get(seq)
        if data is None:
            raise IntegrityError("the log record is missing; restore it from a copy of the store", key=self._key(seq))
        return data

    def _judged_by_records(self, at_least: int) -> S:
        try:
            return self._fold_anew(at_least, past=False)
        except (IntegrityError, FormatError):
            if not isinstance(self.objects, Doubtable):
                raise
            return self._fold_anew(at_least, past=True)

    def _is_where_it_was(self, state: S) -> bool:
        """Whether the last record that was read is still there, and is that one, past caches.

        Where another store has taken the place of the one that was read, its log may be shorter: our record would find
        its number free, and be the end of that log for everybody.
        """
        self._doubt(True, _DOUBT_ONE_S)
        try:
            last = self.objects.get(self._key(state.length - 1) if state.length else STORE_KEY)
        except NotFoundError:
            return False
        self._last = last if state.length else None
        return (canonical.sha256 if state.length else identity)(last) == state.last_sha256

    def _read_past(self, state: S) -> S:
        """Read the log anew, past caches, one of which may have told `state`."""
        problem: DcrError | None = None
        if isinstance(self.objects, Doubtable):
            try:
                found = self._fold_anew(0, past=True)
                if self._is_where_it_was(found):
                    return found
            except (IntegrityError, FormatError) as error:
                problem = error
        raise IntegrityError(
            "the log does not have the record any more that it ended with: the store was replaced, or set back to an "
            "earlier state, while it was open; nothing was written: see which one it is now, and open it again",
            key=self._key(state.length - 1) if state.length else STORE_KEY,
            expected=state.last_sha256,
            found="another one, or none",
        ) from problem

    def reread(self) -> S:
        """Fold all records anew, past caches; return the new state.

        Raises
        ------
        IntegrityError, FormatError
            If a record is illegal or damaged; the state is as it was.
        """
        with self._lock:
            return self._fold_anew(0, past=True)

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
        if self._is_where_it_was(self.state):
            self.objects.put_if_absent(key, data)
        else:
            self._read_past(self.state)  # the record goes on from what the log does not have: not to be put again
        self._unresolved = None
        return True

    def _note_quietly(self, record: R) -> None:
        """Write hint and checkpoint. They only save time, so a failing backend is no error here."""
        try:
            self._note(record)
        except DcrError:
            events.reached(f"{self.event_prefix}.hint.failed", self.name)
