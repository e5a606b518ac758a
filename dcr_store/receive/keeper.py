"""Keeps one target at versions of one line: looks at the store, prepares, brings. Decides nothing about which version.

After any failure the target is known to hold what it held, or known to hold nothing certain; then it is brought from
there. Where verified objects do not give the recorded bits, it is brought back.
"""

from __future__ import annotations

import time
from typing import Final

from dcr_store import events
from dcr_store.errors import DcrError, FormatError, IntegrityError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.format.copies import identity
from dcr_store.format.names import STORE_KEY, record_key
from dcr_store.ports import Doubtable
from dcr_store.receive.bringing import Bringer, NoRoomError
from dcr_store.receive.preparing import Preparation, prepare
from dcr_store.receive.results import Active, Applied, Prepared
from dcr_store.receive.spool import Spool, Tag
from dcr_store.receive.spooled import SpooledObjects
from dcr_store.receive.streaming import Seen, Streaming
from dcr_store.receive.transfers import Transfers
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import Told, have_moved, told_of, while_kept
from dcr_store.versions.replay import Outcome

CHECK_INTERVAL_S: Final = 30.0
_DOUBT_S: Final = 1.0


class StoreReplacedError(IntegrityError):
    """The store is not the one any more that was opened."""


class Keeper:
    """The parts of a receiver. Used by one thread; only ``active`` is read by others.

    Parameters
    ----------
    catalog : Catalog
        The store.
    line : str
    bringer : Bringer
        The target.
    spool : Spool

    Attributes
    ----------
    catalog : Catalog
        The store, seen through the spool.
    held : Located or None
        The version that the target surely holds; None if it is on its way, or nothing is known of it.
    is_checked : bool
        Whether the target was looked at, bit by bit, since this process has it; what a target says of itself may be
        older than its bits.
    active : Active or None
        The version held, unless it may not be served yet.
    """

    def __init__(
        self,
        catalog: Catalog,
        line: str,
        bringer: Bringer,
        spool: Spool,
    ) -> None:
        self.line = line
        objects, document = catalog.objects, catalog.document
        self._through = SpooledObjects(objects, spool)
        self.catalog = Catalog(self._through, document, catalog.store_sha256, catalog.signing)
        self.held: Located | None = None
        self.is_checked = False
        self.active: Active | None = None
        self._objects, self._store_sha256 = objects, catalog.store_sha256
        self._log = self.catalog.log(line)
        self._bringer = bringer
        self._transfers = Transfers(objects, spool)
        self._streaming = Streaming(self._log, self._transfers, Tag.family_of(document.store_id, line))
        self._knows_held = False
        self._served: Located | None = None
        self._preparation: Preparation | None = None
        self._told: Told = []  # of what leads to its goal, when it began
        self._taken = (0, 0)
        self._check_at_s = time.monotonic() + CHECK_INTERVAL_S

    # ------------------------------------------------------------------ looking

    def look(self, *, serves: bool) -> Seen | None:
        """Read on in the log, and in the journal of the transaction that is open, if any; have that fetched.

        Parameters
        ----------
        serves : bool
            Whether a target that is found to hold a version may serve it.
        """
        self._log.refresh()
        try:
            seen = self._streaming.look()
        except DcrError as error:
            # What is not committed is only fetched ahead: no committed version waits for it.
            events.reached("stream.failed", str(error))
            seen = None
        if not self._knows_held:
            self._find_held()
        if serves:
            self.serve()
        return seen

    def serve(self) -> None:
        """Let the version that the target holds be served."""
        self._served = self.held
        self._tell_active()

    def serve_nothing(self) -> None:
        """Let the target serve nothing from now on."""
        self._served = None
        self._tell_active()

    def _tell_active(self) -> None:
        self.active = active_of(self.held) if same(self.held, self._served) else None

    @property
    def length(self) -> int:
        """The number of records in the line's log, as of the last look."""
        return self._log.state.length

    def head(self, at_most: int | None = None) -> Located | None:
        """Return the newest version as of the last look, but none after number `at_most`."""
        row = self._log.state.head
        if row is not None and at_most is not None and row.version > at_most:
            row = self._log.row(at_most)
        return None if row is None else Located(self.line, row)

    def spool_nbytes(self) -> int:
        """Return the bytes in the spool."""
        return self._transfers.spool.nbytes()

    def check_soon(self) -> None:
        """See next time whether the store is still the one that was opened."""
        self._check_at_s = 0.0

    def check_now_and_then(self) -> None:
        """See whether the store is still the one that was opened, if it is time to: numbers alone do not tell."""
        if time.monotonic() >= self._check_at_s:
            self.check_store()
            self._check_at_s = time.monotonic() + CHECK_INTERVAL_S

    def check_store(self) -> None:
        """Raise ``StoreReplacedError`` if the store is another one by now; ``StorageError`` if it is not there.

        A record that only a cache on the way had is forgotten, and the log read anew.
        """
        if isinstance(self._objects, Doubtable):
            self._objects.doubt(_DOUBT_S)
        last = self._log.state.length - 1
        expected = {STORE_KEY: self._store_sha256}
        if last >= 0:
            expected[record_key(self.line, last)] = self._log.state.last_sha256
        for key, sha256 in expected.items():
            try:
                data = self._objects.get(key)
                found = identity(data) if key == STORE_KEY else canonical.sha256(data)
            except NotFoundError as error:
                # Not mounted just now, or behind a proxy that does not reach it.
                raise StorageError(
                    "the store, or the end of its log, is not where it was; it is waited for", key=key
                ) from error
            if found != sha256 and not (key != STORE_KEY and self._was_misled()):
                raise StoreReplacedError(
                    "the store was replaced, or set back to an earlier state, while it was followed; see which one it "
                    "is now, and start the receiver again",
                    key=key,
                    expected=sha256,
                    found=found,
                )

    def _was_misled(self) -> bool:
        """Whether the end of the log was one that a cache on the way had told, and the log goes on where it is."""
        if not isinstance(self._objects, Doubtable):
            return False
        length = self._log.state.length
        try:
            is_whole = self._log.reread().length >= length
        except (IntegrityError, FormatError):
            return False
        events.reached("receiver.misled", self.line)
        held = self.held
        return is_whole and (held is None or same(held, self.catalog.find(held.name, held.row.root)))

    def _find_held(self) -> None:
        self.held = self._bringer.held(self.catalog)
        self._knows_held = True
        self._tell_active()

    # ------------------------------------------------------------------ preparing

    def begin(self, goal: Located) -> Preparation | None:
        """Begin to prepare `goal`, or go on with it.

        Returns
        -------
        Preparation or None
            None if nothing certain is known of the target: then it can only be brought there.
        """
        if not self._knows_held:
            self._find_held()
        known = self._preparation
        if known is not None and not (same(known.goal, goal) and same(known.base, self.held)):
            self.drop_preparation()
        if self.held is None:
            return None
        if self._preparation is None:
            events.reached("receiver.prepare", goal.name)
            self._preparation = while_kept(self.catalog, [goal], lambda: self._prepared(goal))
        return self._preparation

    def _prepared(self, goal: Located) -> Preparation:
        assert self.held is not None
        self._told = told_of(self.catalog, [goal])
        return prepare(self.catalog, self._transfers, self.held, goal)

    def drop_preparation(self) -> None:
        """Forget what was begun; what has been fetched stays in the spool while there is room."""
        if self._preparation is not None:
            self._preparation.cancel()
            self._preparation = None
        self._taken = (0, 0)

    def prepare(self, goal: Located, *, serves: bool) -> Prepared:
        """Prepare `goal`, or bring the target there where nothing certain is known of it; waits.

        Parameters
        ----------
        serves : bool
            Whether a target that was brought there may serve it.
        """
        preparation = self.begin(goal)
        if preparation is None:
            self.bring(goal, serves=serves)
            return brought(goal)
        try:
            return self.ready(preparation)
        except DcrError:
            self.drop_preparation()
            raise

    def ready(self, preparation: Preparation) -> Prepared:
        """Wait until everything is at hand, and do ahead what need not happen while the target is in flux.

        Where what was to be fetched was collected meanwhile, what leads to the goal now is.
        """
        while True:
            try:
                return self._ready(preparation)
            except IntegrityError as error:
                goal = preparation.goal
                if not have_moved(self.catalog, [goal], self._told, error):
                    raise
                self.drop_preparation()
                again = self.begin(goal)
                assert again is not None
                preparation = again

    def _ready(self, preparation: Preparation) -> Prepared:
        prepared, (spooled, fetched) = preparation.result(), self._moved()
        self._bringer.ready(self.catalog, preparation.goal, self._transfers.read)
        after = self._moved()
        # Moved for the bring that follows, which tells of it.
        self._taken = (self._taken[0] + after[0] - spooled, self._taken[1] + after[1] - fetched)
        return prepared

    # ------------------------------------------------------------------ bringing

    def bring(self, goal: Located, *, serves: bool = True) -> Applied:
        """Bring the target to `goal`, from whatever it holds.

        Parameters
        ----------
        serves : bool
            Whether the version may be served then.

        Raises
        ------
        IntegrityError, FormatError
            If the store is damaged or defective on the way. The target is back where it was, if that was known.
        DcrError
            Any other failure.
        """
        started, base = time.perf_counter(), self.held
        spooled, fetched = (moved - taken for moved, taken in zip(self._moved(), self._taken, strict=True))
        if not self._bringer.is_atomic:
            self.active = None
        self._knows_held = False
        events.reached("receiver.apply.before", goal.name)
        try:
            outcome = while_kept(self.catalog, [goal], lambda: self._brought(goal))
        except (IntegrityError, FormatError) as error:
            self._go_back(base, error)
            raise
        finally:
            self.drop_preparation()
        self.held, self._knows_held, self.is_checked = goal, True, True
        if serves:
            self._served = goal
        self._tell_active()
        self._transfers.spool.need(())
        events.reached("receiver.apply.after", goal.name)
        after = self._moved()
        return Applied(
            goal.name,
            goal.row.root,
            None if base is None else base.name,
            after[0] - spooled,
            after[1] - fetched,
            outcome.chunks_written,
            outcome.chunks_healed,
            round(time.perf_counter() - started, 6),
        )

    def _brought(self, goal: Located) -> Outcome:
        """Bring the target further; where a disk has no room for that, it gets what the spool can spare."""
        try:
            return self._bringer.bring(self.catalog, goal, self._transfers.read)
        except NoRoomError as error:
            if not self._transfers.spool.spare():
                raise
            events.reached("receiver.spared", str(error))
        return self._bringer.bring(self.catalog, goal, self._transfers.read)

    def _moved(self) -> tuple[int, int]:
        """Return the bytes taken from the spool and those fetched, without what is fetched ahead of any commit."""
        counts, through = self._transfers.counts, self._through
        return counts.spooled + through.nbytes_found, counts.fetched - counts.ahead + through.nbytes_passed

    def _go_back(self, base: Located | None, error: DcrError) -> None:
        """Bring the target back to `base`, unless it is there still."""
        try:
            self._find_held()
            if base is not None and self.held is None:
                events.reached("receiver.back", base.name)
                self._bringer.bring(self.catalog, base, self._transfers.read)
                self.held = base
                self._tell_active()
        except DcrError as second:
            self._knows_held = False
            error.add_note(f"the target could not be brought back either: {second}")

    def close(self) -> None:
        """Stop transfers, let go of the target."""
        self.drop_preparation()
        self._transfers.close()
        self._bringer.close()


def same(a: Located | None, b: Located | None) -> bool:
    """Whether two versions are one, by name and content; nothing is the same as nothing."""
    return a is b or (a is not None and b is not None and (a.name, a.row.root) == (b.name, b.row.root))


def active_of(located: Located | None) -> Active | None:
    """Return a version as what a target may serve."""
    return None if located is None else Active(located.name, located.row.root)


def brought(goal: Located) -> Prepared:
    """Return what is prepared where a target is brought to a version without."""
    return Prepared(goal.name, goal.row.root, None, None, 0, 0, 0)
