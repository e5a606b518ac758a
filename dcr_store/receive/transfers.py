"""Objects on their way into a spool, in the background; each is fetched once, however many ask for it.

What a version needs goes before what an open transaction may turn out to need. Memory is bounded by bytes in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dcr_store import events
from dcr_store.errors import DcrError
from dcr_store.format.documents import ObjectRef
from dcr_store.objects.threads import Threads
from dcr_store.payload.version import SealedPartition, fetch
from dcr_store.ports import ObjectStore
from dcr_store.receive.spool import Spool, Tag

IN_FLIGHT_NBYTES: Final = 128 << 20
_N_FETCHERS: Final = 8
_N_AHEAD: Final = 4


@dataclass(slots=True)
class Counts:
    """What was moved so far, in bytes.

    Attributes
    ----------
    fetched : int
        From the store, all in all.
    ahead : int
        Of these, for transactions that were open.
    spooled : int
        Taken from the spool when they were needed.
    """

    fetched: int = 0
    ahead: int = 0
    spooled: int = 0


@dataclass(frozen=True, slots=True)
class _Flying:
    """A transfer that has not ended, and whether it is of something that is surely needed."""

    future: Future[bool]
    is_needed: bool


class Transfers:
    """Fetches objects into a spool and takes them from there. Safe to use from several threads."""

    def __init__(self, objects: ObjectStore, spool: Spool) -> None:
        self.objects, self.spool = objects, spool
        self.counts = Counts()
        self._flying: dict[str, _Flying] = {}
        self._in_flight_nbytes = 0
        self._changed = threading.Condition()
        self._needed = Threads(_N_FETCHERS, "dcr-fetch")
        self._ahead = Threads(_N_AHEAD, "dcr-ahead")

    def want(self, ref: ObjectRef, tag: Tag | None = None) -> Future[bool]:
        """Have an object in the spool.

        Parameters
        ----------
        tag : Tag, optional
            The open transaction that it is of, which may never be committed; None if it is surely needed.

        Returns
        -------
        Future of bool
            Whether the spool has it. If there is no room for it, what is needed is still fetched, and found to be
            right; what only may be needed is not. Raises what ``fetch`` raises.
        """
        with self._changed:
            flying = self._flying.get(ref.sha256)
            if flying is not None and (tag is not None or flying.is_needed):
                return flying.future
            # What is only fetched ahead, and runs already, may end without having fetched anything.
            before = None if flying is None or flying.future.cancel() else flying.future
            pool = self._needed if tag is None else self._ahead
            future = pool.submit(self._bring, ref, tag, before)
            self._flying[ref.sha256] = _Flying(future, tag is None)
        future.add_done_callback(lambda done: self._land(ref.sha256, done))
        return future

    def drop_ahead(self, ref: ObjectRef, future: Future[bool]) -> bool:
        """Drop what was asked for with a tag, as far as it has not begun and nobody is known to need it.

        Returns
        -------
        bool
            Whether nothing of it will come to lie in the spool any more.
        """
        with self._changed:
            flying = self._flying.get(ref.sha256)
            is_needed = flying is not None and flying.future is future and flying.is_needed
            return not is_needed and future.cancel()

    def _land(self, sha256: str, future: Future[bool]) -> None:
        with self._changed:
            flying = self._flying.get(sha256)
            if flying is not None and flying.future is future:
                del self._flying[sha256]

    def _bring(self, ref: ObjectRef, tag: Tag | None, before: Future[bool] | None) -> bool:
        if before is not None:
            wait([before])
        if self.spool.has(ref, tag):
            return True
        slot = self.spool.reserve(ref, tag)
        if slot is None:
            if tag is None:
                with self._admitted(ref.nbytes):
                    self._fetch(ref, None)
            return False
        with slot, self._admitted(ref.nbytes):
            return slot.write(self._fetch(ref, tag))

    def read(self, item: SealedPartition) -> bytes:
        """Return a partition's verified bytes, from the spool if it is there or under way; what is fetched is not kept.

        Raises
        ------
        IntegrityError, FormatError, StorageError
            If it has to be fetched and cannot be.
        """
        with self._changed:
            flying = self._flying.get(item.ref.sha256)
        if flying is not None and not flying.future.cancel():
            try:
                flying.future.result()
            except (DcrError, CancelledError):
                events.reached("transfer.lost", item.key)  # fetched now, and if that fails too, with its own error
        data = self.spool.get(item.ref)
        if data is not None:
            with self._changed:
                self.counts.spooled += len(data)
            return data
        with self._admitted(item.ref.nbytes):
            return self._fetch(item.ref, None)

    def _fetch(self, ref: ObjectRef, tag: Tag | None) -> bytes:
        events.reached("transfer.before", ref.key)
        data = fetch(self.objects, ref)
        events.reached("transfer.fetched", ref.key)
        with self._changed:
            self.counts.fetched += len(data)
            self.counts.ahead += len(data) if tag is not None else 0
        return data

    @contextmanager
    def _admitted(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            while self._in_flight_nbytes and self._in_flight_nbytes + nbytes > IN_FLIGHT_NBYTES:
                self._changed.wait()
            self._in_flight_nbytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._in_flight_nbytes -= nbytes
                self._changed.notify_all()

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        for pool in (self._needed, self._ahead):
            pool.shutdown(wait=True, cancel_futures=True)
