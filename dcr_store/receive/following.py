"""The loop of a receiver: look, decide, prepare, bring; wait longer the less happens, and after failures.

A failure is told and tried again. One that concerns a version keeps no other version from being tried; one that another
try cannot cure ends the loop.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dcr_store.errors import DcrError, FencedError, InvalidInputError
from dcr_store.receive.deciding import Decider, Step
from dcr_store.receive.keeper import Keeper, StoreReplacedError, brought, same
from dcr_store.receive.pacing import Blocked, rests, retries
from dcr_store.receive.results import Active, Applied, Prepared
from dcr_store.versions.catalog import Located

T = TypeVar("T")
OnPrepared = Callable[[Prepared], None]
OnApplying = Callable[[Prepared], None]
OnApplied = Callable[[Applied], None]
OnServing = Callable[[Active], None]
OnFailure = Callable[[DcrError, float], None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is called on the way; see ``Receiver.follow``."""

    on_prepared: OnPrepared | None = None
    on_applying: OnApplying | None = None
    on_applied: OnApplied | None = None
    on_serving: OnServing | None = None
    on_failure: OnFailure | None = None


class Follow:
    """One run of the loop.

    Parameters
    ----------
    until : int or None
        The number of the version at which to end.
    once : bool
        End at the version that is wanted at first; raise at the first failure.
    stop : threading.Event
        Ends the loop when it is set.
    """

    def __init__(
        self, keeper: Keeper, decider: Decider, until: int | None, once: bool, hooks: Hooks, stop: threading.Event
    ) -> None:
        self._keeper, self._decider, self._until, self._once = keeper, decider, until, once
        self._hooks, self._stop = hooks, stop
        self._at_most = until
        self._rests, self._retries, self._blocked = rests(), retries(), Blocked()
        self._unserved = Blocked()
        self._seen: object = None
        self._begun: Located | None = None
        self._announced: Located | None = None
        self._told: Located | None = None
        self._serving: Located | None = None
        self._untold: Applied | None = None
        self._last: Applied | None = None
        if keeper.length:
            keeper.check_soon()  # much may have happened since it looked last

    def run(self) -> Applied | None:
        """Run until the end is reached or `stop` is set; return the last change of the target."""
        while not self._stop.is_set():
            try:
                wait_s = self._turn()
                self._retries.reset()
            except (FencedError, InvalidInputError, StoreReplacedError):
                raise
            except DcrError as error:
                if self._once:
                    raise
                self._keeper.check_soon()
                wait_s = self._retries.next()
                self._tell(error, wait_s)
            if wait_s is None:
                break
            self._stop.wait(wait_s)
        return self._last

    def _turn(self) -> float | None:
        """Go one step further; return the seconds to wait before the next one, None at the end."""
        self._keeper.check_now_and_then()
        seen = self._keeper.look(serves=self._decider.serves and self._hooks.on_applied is None)
        try:
            step = self._decider.next(self._keeper, self._at_most)
        except FencedError:
            raise
        except DcrError:
            self._let_serve()
            raise
        # Whatever comes next takes its time, and fails perhaps; who waits to serve what is held does not wait for it.
        self._let_serve()
        # What is spooled meanwhile is no reason to look more often.
        news = (self._keeper.length, None if seen is None else (seen.txid, seen.attempt, seen.n_partitions))
        if news != self._seen:
            self._seen = news
            self._rests.reset()
        # Versions may come faster than one is prepared: the one begun is reached, and told of, first; or none would be.
        goal = self._begun if step.may_be_late and self._begun is not None else step.goal
        if goal is None:
            return None if self._once else self._rests.next()
        if self._once and self._at_most is None:
            self._at_most = goal.row.version  # what comes meanwhile is for another time
        if step.may_apply and same(self._keeper.held, goal) and self._keeper.is_checked:
            self._arrive(goal)
            return None if self._is_end(step, goal) else self._rests.next()
        if self._blocked.holds(goal.name, time.monotonic()):
            return self._rests.next()
        try:
            return self._go(step, goal)
        except (FencedError, InvalidInputError):
            raise
        except DcrError as error:
            if self._once:
                raise
            self._keeper.drop_preparation()
            self._begun = None
            self._tell(error, self._blocked.add(goal.name, time.monotonic()))
            return self._rests.next()

    def _go(self, step: Step, goal: Located) -> float:
        """Prepare the goal and, if that may be, bring the target there."""
        if step.may_apply and same(self._keeper.held, goal):
            # Writes what is not as it should be, and mostly nothing is.
            checked = self._keeper.bring(goal, serves=False)
            if checked.chunks_written:
                self._untold = self._last = checked
            return 0.0
        self._begun = goal
        preparation = self._keeper.begin(goal)
        if preparation is None:
            if not step.may_apply:
                # Nothing that was served is lost: the target holds nothing certain.
                self._untold = self._last = self._keeper.bring(goal, serves=False)
            prepared = brought(goal)
        elif preparation.wait(self._rests.next()):
            prepared = self._keeper.ready(preparation)
        else:
            return 0.0
        if not step.may_apply:
            # Before any hook is called, which may take its time: all the others wait for this.
            self._decider.prepared(goal, prepared)
        if not same(self._announced, goal):
            _call(self._hooks.on_prepared, prepared)
            self._announced = goal
        if step.may_apply:
            _call(self._hooks.on_applying, prepared)
            self._untold = self._last = self._keeper.bring(goal, serves=False)
            self._blocked.clear()
        self._rests.reset()
        return 0.0

    def _arrive(self, goal: Located) -> None:
        """The target holds what it should: say so, once."""
        self._begun = None  # whoever cannot be told of it is told of a newer one, if there is one by then
        if not same(self._told, goal):
            unchanged = Applied(goal.name, goal.row.root, goal.name, 0, 0, 0, 0, 0.0)
            told = self._untold
            _call(self._hooks.on_applied, told if told is not None and told.version == goal.name else unchanged)
            self._told, self._untold, self._announced = goal, None, None
        # Not before: an engine computes with the version before until its hook has told it.
        self._keeper.serve()
        self._decider.applied(goal)
        self._let_serve()

    def _let_serve(self) -> None:
        """Say once that all hold the version that this target was told to hold, if that is so and it still does."""
        told, hook = self._told, self._hooks.on_serving
        if told is None or hook is None or same(self._serving, told) or not same(self._keeper.held, told):
            return
        if self._unserved.holds(told.name, time.monotonic()) or not self._decider.all_applied():
            return
        try:
            hook(Active(told.name, told.row.root))
        except DcrError as error:
            if self._once:
                raise
            # The group goes on meanwhile: this one engine is told again later.
            self._tell(error, self._unserved.add(told.name, time.monotonic()))
        else:
            self._serving = told
            self._unserved.clear()

    def _is_end(self, step: Step, goal: Located) -> bool:
        if self._hooks.on_serving is not None and not same(self._serving, goal):
            return False  # whoever is told has stopped serving by now, and is to go on
        return (self._once and step.is_last) or (self._until is not None and goal.row.version >= self._until)

    def _tell(self, error: DcrError, wait_s: float) -> None:
        if self._hooks.on_failure is not None:
            self._hooks.on_failure(error, wait_s)
        else:
            warnings.warn(f"{error}; trying again in {wait_s:.1f} s", stacklevel=5)


def _call(hook: Callable[[T], None] | None, value: T) -> None:
    if hook is not None:
        hook(value)
