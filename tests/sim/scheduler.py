"""One actor runs at a time: they pass a baton, in an order drawn from a seed.

Each actor has a stack of its own (a greenlet: passing the baton between threads costs more than what most steps do),
so that the code under test is called as it is; it gives up the baton at every call of a port. So the whole run is one
sequence of steps, and the same seed gives the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from greenlet import getcurrent, greenlet


class Killed(BaseException):
    """The actor's process is dead: nothing that it still does takes effect."""


class ViolationError(Exception):
    """An invariant does not hold."""


class Actor:
    """One process. `is_killed` from the instant of its death, `has_ended` when its stack has unwound."""

    def __init__(self, name: str, function: Callable[[Actor], None]) -> None:
        self.name, self.function = name, function
        self.stack: greenlet | None = None
        self.wake_at = 0.0
        self.is_killed = self.has_ended = False
        self.hands_to: Actor | None = None
        self.live: set[str] = set()  # the transactions of this process
        self.locks: dict[int, int] = {}  # descriptors and inodes of files that it has locked, or is about to

    def __repr__(self) -> str:
        return self.name


class Scheduler:
    """Who runs next.

    Attributes
    ----------
    current : Actor or None
        Who holds the baton.
    clock : float
        Seconds; goes on a little with each step, and to the next who wakes when all wait.
    on_step : callable
        Called at every step, by the one who runs: late effects, checks, faults. May raise `Killed` for that one.
    on_end : callable
        Called when an actor has ended, with how.
    """

    STEP_S = 0.002

    def __init__(self, rng: Random, *, stays: float, max_steps: int) -> None:
        self.rng, self.stays, self.max_steps = rng, stays, max_steps
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.clock, self.n_steps = 0.0, 0
        self.on_step: Callable[[Actor, str], None] = lambda actor, label: None
        self.on_end: Callable[[Actor], None] = lambda actor: None
        self.failure: BaseException | None = None
        self.trace: list[str] | None = None
        self._main = getcurrent()
        self._heir: Actor | None = None

    def start(self, name: str, function: Callable[[Actor], None], *, delay_s: float = 0.0) -> Actor:
        actor = Actor(name, function)
        actor.wake_at = self.clock + delay_s
        self.actors.append(actor)
        return actor

    def run(self) -> None:
        """Run until every actor has ended; raise the first failure."""
        heir = self._choose(None)
        while heir is not None:
            self._give(heir)
            heir = self._heir  # of the one that has ended
        if self.failure is not None:
            raise self.failure

    # ------------------------------------------------------------------ called by actors

    def step(self, label: str) -> None:
        """Give up the baton and wait for it. Called at every call of a port, before it takes effect."""
        me = self.current
        assert me is not None
        if me.is_killed:
            raise Killed
        if self.failure is not None:
            me.is_killed = True
            raise Killed
        self.n_steps += 1
        self.clock += self.STEP_S
        if self.trace is not None:
            self.trace.append(f"{me.name} {label}")
        if self.n_steps > self.max_steps:
            waiting = ", ".join(f"{actor.name}" for actor in self.actors)
            self.fail(ViolationError(f"no progress: {waiting} have not ended after {self.max_steps} steps"))
            raise Killed
        self._next(me)
        self.on_step(me, label)

    def sleep(self, seconds: float) -> None:
        """Wait, as ``time.sleep``."""
        me = self.current
        if me is None:
            return
        me.wake_at = self.clock + seconds
        self.step("sleep")

    def fail(self, error: BaseException) -> None:
        """End the run with an error: all actors unwind."""
        if self.failure is None:
            self.failure = error
        if self.current is not None:
            self.current.is_killed = True

    def kill(self, victim: Actor) -> None:
        """End another actor now: it unwinds before this returns."""
        me = self.current
        victim.is_killed = True
        if victim.stack is None:
            self._ended(victim)
            return
        assert me is not None
        assert me is not victim
        victim.hands_to = me
        self._give(victim)
        self.current = me

    # ------------------------------------------------------------------ the baton

    def _choose(self, me: Actor | None) -> Actor | None:
        """Return who runs next: often the same one again, else one that is awake; None if nobody is left."""
        if not self.actors:
            return None
        clock, rng = self.clock, self.rng
        if me is not None and me.wake_at <= clock and rng.random() < self.stays:
            return me
        awake = [actor for actor in self.actors if actor.wake_at <= clock]
        if not awake:
            first = min(self.actors, key=lambda actor: actor.wake_at)
            self.clock = first.wake_at
            return first
        return awake[0] if len(awake) == 1 else awake[int(rng.random() * len(awake))]

    def _next(self, me: Actor) -> None:
        chosen = self._choose(me)
        if chosen is not me:
            assert chosen is not None
            self._give(chosen)
            self.current = me
            if me.is_killed or self.failure is not None:
                me.is_killed = True
                raise Killed

    def _give(self, actor: Actor) -> None:
        """Run another actor; returns when it is the caller's turn again."""
        self.current = actor
        if actor.stack is None:
            actor.stack = greenlet(self._carry, self._main)
            actor.stack.switch(actor)
        else:
            actor.stack.switch()

    def _carry(self, actor: Actor) -> None:
        """Run an actor to its end, on its own stack, and say who is next."""
        try:
            if self.failure is None:
                actor.function(actor)
        except Killed:
            actor.is_killed = True
        except BaseException as error:
            self.fail(error)
        self.current = None
        self._ended(actor)
        self._heir = actor.hands_to or self._choose(None)

    def _ended(self, actor: Actor) -> None:
        actor.has_ended = True
        self.actors.remove(actor)
        try:
            self.on_end(actor)
        except BaseException as error:
            self.failure = self.failure or error
