"""A receiver: follows a line, fetches what it will need, brings its target from version to version.

Whatever is killed, cut off or torn, the same receiver started again ends at the right version with the right bits: the
log says which, digests say where the target is, the spool only saves time. Refuses to be used by two threads at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType
from typing import Self

from dcr_store.errors import ConflictError, FencedError, InvalidInputError, StorageError
from dcr_store.format.names import VersionRef, check_line
from dcr_store.log.group import GroupLog
from dcr_store.receive.bringing import Bringer, bringer_of
from dcr_store.receive.deciding import Alone, Decider, InGroup
from dcr_store.receive.following import Follow, Hooks, OnApplied, OnApplying, OnFailure, OnPrepared, OnServing
from dcr_store.receive.keeper import Keeper, active_of, same
from dcr_store.receive.member import Member
from dcr_store.receive.results import Active, Applied, Polled, Prepared
from dcr_store.receive.spool import Spool
from dcr_store.targets.own_directories import refuse_inside_store
from dcr_store.targets.paths import local_path
from dcr_store.targets.temporary import make_locked, remove
from dcr_store.versions.catalog import Catalog, Located


class Receiver:
    """Keeps one target at the versions of a line. Made by ``Store.receiver``; a context manager.

    For one thread at a time; ``active`` and ``stop`` may be called from any.
    """

    def __init__(self, keeper: Keeper, decider: Decider, release: Callable[[], None]) -> None:
        self.line = keeper.line
        self._keeper, self._decider, self._release = keeper, decider, release
        self._goal: Located | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._user = 0  # the thread that is inside
        self._closed = False

    def __repr__(self) -> str:
        return f"<dcr_store Receiver of {self.line}, at {self._keeper.active and self._keeper.active.version}>"

    def poll(self) -> Polled:
        """Look at the store: one request where nothing is new, two while a transaction is open; in a group, one more.

        What an open transaction has journaled since the last look is fetched in the background. In a group, a target
        that has not been looked at yet is wanted to be brought to the version that it says it holds.

        Raises
        ------
        StorageError
            If the store cannot be reached.
        IntegrityError, FormatError
            If its log is damaged, or too new, or the store is another one by now than was opened.
        """
        with self._used():
            keeper = self._keeper
            keeper.check_now_and_then()
            seen = keeper.look(serves=self._decider.serves)
            step = self._decider.next(keeper, None)
            goal = step.goal
            # What a target says of itself is not told to a group: its bits may be others.
            is_sure = keeper.is_checked or self._decider.serves
            if goal is not None and step.may_apply and is_sure and same(goal, keeper.held):
                keeper.serve()
                self._decider.applied(goal)
                goal = None
            wanted, may_apply = (None, False) if goal is None else (goal.name, step.may_apply)
            return Polled(active_of(keeper.head()), seen, keeper.active, wanted, may_apply, keeper.spool_nbytes())

    def prepare(self, version: str) -> Prepared:
        """Have all that is needed to bring the target to `version`, and know what the target holds.

        Parameters
        ----------
        version : str
            A version of the receiver's line: ``main@42``, ``main`` (its newest), or the first digits of a root. If
            it is the one that the receiver's group proposes, that is acknowledged.

        Returns
        -------
        Prepared
            A target that is empty, or of which nothing certain is known, is at the version already.

        Raises
        ------
        NotFoundError
            If there is no such version.
        IntegrityError
            If the store is damaged on the way there; the target is as it was.
        """
        with self._used():
            goal = self._keeper.catalog.resolve(version)
            if goal.line != self.line:
                raise InvalidInputError(
                    "is no version of the line that the receiver follows",
                    key=version,
                    expected=self.line,
                    found=goal.line,
                )
            self._goal = None
            prepared = self._keeper.prepare(goal, serves=self._decider.serves)
            self._goal = goal
            self._decider.prepared(goal, prepared)
            return prepared

    def apply(self) -> Applied:
        """Bring the target to the version that was prepared last; in a group, to the one that it promoted last.

        Raises
        ------
        InvalidInputError, ConflictError
            If none was prepared, or promoted.
        IntegrityError
            If verified objects do not give the recorded bits. The target is back at the version before, if that
            was known.
        DcrError
            Any other failure; ``apply`` may be called again.
        """
        with self._used():
            goal = self._decider.decided(self._goal)
            applied = self._keeper.bring(goal)
            self._decider.applied(goal)
            return applied

    def follow(
        self,
        *,
        until: str | None = None,
        once: bool = False,
        on_prepared: OnPrepared | None = None,
        on_applying: OnApplying | None = None,
        on_applied: OnApplied | None = None,
        on_serving: OnServing | None = None,
        on_failure: OnFailure | None = None,
    ) -> Applied | None:
        """Keep the target at the newest version, or at what its group decides, until told to stop.

        Failures of the store, of the disk and of single versions are told and tried again, at longer and longer
        intervals; the target stays at the version that it holds, and newer versions are tried at once.

        Parameters
        ----------
        until : str, optional
            ``line@number``; return once the target holds this version, or a later one.
        once : bool
            Return once the target holds the version that is the newest now; raise at the first failure.
        on_prepared : callable, optional
            Called with ``Prepared`` once all that a version needs is at hand.
        on_applying, on_applied : callable, optional
            Called with ``Prepared`` just before the target is changed, and with ``Applied`` once it holds the version,
            also if it does so from the start. What a hook raises ends the loop, unless it is a ``DcrError``: then it
            is called again.
        on_serving : callable, optional
            Called with ``Active`` once all members of the group have applied the version; at once without a group.
        on_failure : callable, optional
            Called with the error and the seconds until the next try. By default a warning tells.

        Returns
        -------
        Applied or None
            The last change of the target; None if there was none.

        Raises
        ------
        InvalidInputError
            If the target may not be changed: it holds what is not this store's.
        FencedError
            If the group has dropped this receiver; nothing may be served any more.
        IntegrityError
            If the store is another one by now than was opened.
        """
        number = None if until is None else self._number(until)
        hooks = Hooks(on_prepared, on_applying, on_applied, on_serving, on_failure)
        with self._used():
            return Follow(self._keeper, self._decider, number, once, hooks, self._stop).run()

    def _number(self, until: str) -> int:
        ref = VersionRef.parse(until)
        if ref.line != self.line or ref.number is None:
            raise InvalidInputError(
                "is no version to follow the line until", key=until, expected=f"{self.line}@NUMBER", found=until
            )
        return ref.number

    def active(self) -> Active | None:
        """Return the version that the target holds and may serve, to stamp rollouts with.

        None while it is on its way, and until the first ``poll`` or ``follow``; with a hook ``on_applied``, until that
        has returned. Asks nobody. Until this receiver has
        applied a version, or ``follow`` has looked at every bit, it is what the target says of itself.
        """
        return self._keeper.active

    def stop(self) -> None:
        """Let ``follow`` return soon, after what it is applying just now, and never begin again. From any thread."""
        self._stop.set()

    def close(self) -> None:
        """Stop, wait for transfers under way, let go of the target, which stays as it is. Not from a hook."""
        self.stop()
        if self._user == threading.get_ident():
            raise ConflictError(
                "the receiver is following; call stop() in a hook, and close() afterwards", key=self.line
            )
        with self._lock:
            if not self._closed:
                self._closed = True
                try:
                    self._keeper.close()
                finally:
                    self._release()

    @contextmanager
    def _used(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ConflictError("another thread is using the receiver; stop it there first", key=self.line)
        try:
            if self._closed:
                raise InvalidInputError("the receiver is closed; make another one", key=self.line)
            self._user = threading.get_ident()
            yield
        except FencedError:
            self._keeper.serve_nothing()
            raise
        finally:
            self._user = 0
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_receiver(
    catalog: Catalog,
    target: object,
    *,
    group: str | None,
    name: str | None,
    line: str | None,
    spool: str | os.PathLike[str] | None,
    spool_nbytes: int | None,
) -> Receiver:
    """Make a receiver; see ``Store.receiver``."""
    if line is not None:
        check_line(line)
    if (group is None) != (name is None):
        raise InvalidInputError(
            "a receiver in a group has a name", key="group and name", expected="both or none", found=(group, name)
        )
    if spool_nbytes is not None and (type(spool_nbytes) is not int or spool_nbytes < 0):
        raise InvalidInputError(
            "is no number of bytes", key="spool_nbytes", expected="0 or more", found=f"{spool_nbytes!r:.80}"
        )
    bringer = bringer_of(target)
    if group is not None:
        line = _line_of(catalog.group_log(group), line)
    place, release = _spool_place(bringer, spool)
    keeper = Keeper(catalog, line or "main", bringer, Spool(place, spool_nbytes))
    try:
        decider = Alone() if group is None or name is None else InGroup(Member(keeper.catalog, group, name))
    except InvalidInputError:
        keeper.close()
        release()
        raise
    return Receiver(keeper, decider, release)


def _line_of(group: GroupLog, line: str | None) -> str:
    found = group.existing().line
    if line not in (None, found):
        raise InvalidInputError(
            f"group {group.group} follows another line; leave out the line", key="line", expected=found, found=line
        )
    return found


def _spool_place(bringer: Bringer, given: str | os.PathLike[str] | None) -> tuple[Path, Callable[[], None]]:
    """Return where the spool is to be, and what to call at the end."""
    place = bringer.spool_directory if given is None else local_path(given, "spool")
    if place is not None:
        refuse_inside_store(place, "the spool")
        place = Path(os.path.realpath(place))
        if place.exists() and not place.is_dir():
            raise InvalidInputError(
                "cannot be a spool; name another place", key=str(place), expected="a directory", found="something else"
            )
        return place, lambda: None
    try:
        directory, descriptor = make_locked("dcr-spool-")
    except OSError as error:
        raise StorageError(f"there is no place for a spool: {error.strerror}; name one", key=gettempdir()) from error

    def release() -> None:
        remove(directory)
        os.close(descriptor)

    return directory, release
