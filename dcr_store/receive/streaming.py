"""What a transaction that is still open has journaled: read from its journal, and fetched ahead of its commit.

A journal is believed in nothing but where to look: partitions are compared with the SHA-256 that it names, and whether
they count, the seals of a committed version tell. Never writes anywhere but into the spool.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from dcr_store import events
from dcr_store.errors import DcrError, FormatError, StorageError
from dcr_store.format.documents import JournalEntry, ObjectRef
from dcr_store.format.names import TransactionKeys, version_name
from dcr_store.log.fold import OpenTransaction
from dcr_store.log.line import LineLog
from dcr_store.objects.transfer import map_bounded
from dcr_store.receive.spool import Tag, Verdict
from dcr_store.receive.transfers import Transfers

_ENTRY: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,127})\.([0-9a-f]{16})\.([0-9]{6,})\.json")
_ENTRY_NBYTES: Final = 64 << 20  # an entry names partitions, a few hundred bytes each


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of an open transaction.

    Attributes
    ----------
    version : str
        ``line@number`` that it may become.
    n_partitions, nbytes : int
        What is journaled so far.
    n_spooled, nbytes_spooled : int
        Of these, what the spool has.
    """

    version: str
    txid: str
    attempt: int
    n_partitions: int
    nbytes: int
    n_spooled: int
    nbytes_spooled: int


@dataclass(slots=True)
class _Journaled:
    """A partition of the newest attempt that has journaled this place."""

    attempt: int
    ref: ObjectRef
    future: Future[bool]

    @property
    def is_spooled(self) -> bool:
        """Whether it has been fetched and kept."""
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None and future.result()


class Streaming:
    """Follows the open transaction of one line into the spool. Used by one thread.

    Parameters
    ----------
    family : str
        See ``Tag.family_of``.
    """

    def __init__(self, log: LineLog, transfers: Transfers, family: str) -> None:
        self._log, self._transfers, self._family = log, transfers, family
        self._txid: str | None = None
        self._settled: tuple[str | None, int] | None = None
        self._ended: set[str] = set()
        self._ending: list[Future[bool]] = []
        self._read: set[str] = set()
        self._places: dict[tuple[str, str, int], _Journaled] = {}

    def look(self) -> Seen | None:
        """Read what is new in the journal of the open transaction, if any, and have it fetched.

        One request, and one more for each new journal entry. What belongs to transactions that have ended meanwhile
        is adopted or dropped.
        """
        pending = self._log.state.open
        self._settle(pending)
        if pending is None:
            return None
        keys = TransactionKeys(self._log.line, pending.version, pending.txid)
        prefix = f"{keys.prefix}journal/"
        listed = self._transfers.objects.list(prefix)
        new = [key for key, nbytes in listed.items() if self._is_to_be_read(key.removeprefix(prefix), nbytes, pending)]
        new = [key for key in new if key not in self._read]
        tag = Tag(self._family, pending.version, pending.txid)
        read = zip(new, map_bounded(self._entry, new), strict=True)
        named = [entry for key, entry in read if entry and self._is_of(entry, key.removeprefix(prefix), pending)]
        for entry in sorted(named, key=lambda entry: -entry.attempt):
            self._take(entry, keys, tag)
        places = self._places.values()
        for item in places:
            # Cancelled by a preparation that it was a part of, and that was given up.
            if item.future.cancelled() or (item.future.done() and isinstance(item.future.exception(), StorageError)):
                item.future = self._transfers.want(item.ref, tag)
        spooled = [item.ref.nbytes for item in places if item.is_spooled]
        return Seen(
            version_name(self._log.line, pending.version),
            pending.txid,
            pending.attempt,
            len(places),
            sum(item.ref.nbytes for item in places),
            len(spooled),
            sum(spooled),
        )

    def _settle(self, pending: OpenTransaction | None) -> None:
        """Adopt or drop what was spooled for transactions that have ended, if one has since the last look."""
        txid = None if pending is None else pending.txid
        if self._txid != txid:
            dropped = self._transfers.drop_ahead
            self._ending = [item.future for item in self._places.values() if not dropped(item.ref, item.future)]
            if self._txid is not None:
                self._ended.add(self._txid)
            self._txid = txid
            self._read.clear()
            self._places.clear()
        if self._settled != self._standing() or self._ending:
            # What was under way when its transaction ended comes to lie there later.
            self._ending = [future for future in self._ending if not future.done()]
            self._transfers.spool.settle(self._family, self._judge)
            self._settled = self._standing()

    def _standing(self) -> tuple[str | None, int]:
        state = self._log.state
        return (None if state.open is None else state.open.txid, state.next_version)

    def _judge(self, version: int, txid: str) -> Verdict:
        state = self._log.state
        if version >= state.next_version and not _is_open(state.open, txid) and txid not in self._ended:
            # Another process that shares the spool may have read on: what it has spooled, it has read of before.
            state = self._log.refresh()
        if _is_open(state.open, txid):
            return "open"
        row = self._log.row(version)
        return "committed" if row is not None and row.txid == txid else "aborted"

    def _entry(self, key: str) -> JournalEntry | None:
        """Return a journal entry, once; None if it is no entry, or cannot be had yet."""
        try:
            data = self._transfers.objects.get(key)
        except DcrError as error:
            events.reached("stream.unreadable", str(error))
            return None
        self._read.add(key)
        try:
            return JournalEntry.from_bytes(data, key)
        except FormatError as error:
            events.reached("stream.unreadable", str(error))
            return None

    def _is_to_be_read(self, name: str, nbytes: int, pending: OpenTransaction) -> bool:
        match = _ENTRY.fullmatch(name)
        return match is not None and match[1] in pending.writers and nbytes <= _ENTRY_NBYTES

    def _is_of(self, entry: JournalEntry, name: str, pending: OpenTransaction) -> bool:
        """Whether an entry says the same as its key, and is of a writer of this transaction."""
        match = _ENTRY.fullmatch(name)
        named = (entry.writer, entry.incarnation, entry.seq)
        return (
            match is not None
            and (match[1], match[2], int(match[3])) == named
            and (entry.line, entry.txid) == (self._log.line, pending.txid)
            and entry.writer in pending.writers
            and entry.attempt <= pending.attempt
        )

    def _take(self, entry: JournalEntry, keys: TransactionKeys, tag: Tag) -> None:
        for item in (*entry.partitions, *(entry.seal.partitions if entry.seal else ())):
            place = (entry.writer, item.array, item.index)
            known = self._places.get(place)
            # A later attempt says anew what it has, and what an earlier one had otherwise will not count.
            if known is not None and (known.attempt > entry.attempt or known.ref.sha256 == item.sha256):
                continue
            ref = item.ref(keys, entry.writer)
            events.reached("stream.journaled", ref.key)
            self._places[place] = _Journaled(entry.attempt, ref, self._transfers.want(ref, tag))


def _is_open(pending: OpenTransaction | None, txid: str) -> bool:
    return pending is not None and pending.txid == txid
