"""One actor runs at a time: threads that pass a baton, in an order drawn from a seed.

Each actor is a real thread, so that the code under test is called as it is; it runs only while it holds the baton and
gives it up at every call of a port. So the whole run is one sequence of steps, and the same seed gives the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random


class Killed(BaseException):
    """The actor's process is dead: nothing that it still does takes effect."""


class ViolationError(Exception):
    """An invariant does not hold."""


class Actor:
    """One process. `is_killed` from the instant of its death, `has_ended` when its thread has unwound."""

    def __init__(self, name: str, function: Callable[[Actor], None]) -> None:
        self.name, self.function = name, function
        self.turn = threading.Lock()
        self.turn.acquire()
        self.wake_at = 0.0
        self.is_started = self.is_killed = self.has_ended = False
        self.hands_to: Actor | None = None
        self.live: set[str] = set()  # the transactions of this process
        self.locks: dict[int, int] = {}  # descriptors and inodes of files that it has locked, or is about to

    def __repr__(self) -> str:
        return self.name


class Carriers:
    """Threads that run one actor after the other: they keep what the code under test keeps for each thread."""

    def __init__(self) -> None:
        self.idle: list[Carrier] = []

    def carry(self, run: Callable[[Carrier], None]) -> None:
        carrier = self.idle.pop() if self.idle else Carrier()
        carrier.run = run
        carrier.go.release()


class Carrier:
    def __init__(self) -> None:
        self.go = threading.Lock()
        self.go.acquire()
        self.run: Callable[[Carrier], None] | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.go.acquire()
            run, self.run = self.run, None
            assert run is not None
            run(self)
            del run


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

    def __init__(self, rng: Random, carriers: Carriers, *, stays: float, max_steps: int) -> None:
        self.rng, self.stays, self.max_steps = rng, stays, max_steps
        self.carriers = carriers
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.clock, self.n_steps = 0.0, 0
        self.on_step: Callable[[Actor, str], None] = lambda actor, label: None
        self.on_end: Callable[[Actor], None] = lambda actor: None
        self.failure: BaseException | None = None
        self.trace: list[str] | None = None
        self._main = threading.Lock()
        self._main.acquire()

    def start(self, name: str, function: Callable[[Actor], None], *, delay_s: float = 0.0) -> Actor:
        actor = Actor(name, function)
        actor.wake_at = self.clock + delay_s
        self.actors.append(actor)
        return actor

    def run(self) -> None:
        """Run until every actor has ended; raise the first failure."""
        first = self._choose(None)
        if first is not None:
            self._give(first)
            self._main.acquire()
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
        if not victim.is_started:
            self._ended(victim)
            return
        assert me is not None
        assert me is not victim
        victim.hands_to = me
        self._give(victim)
        me.turn.acquire()
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
            me.turn.acquire()
            self.current = me
            if me.is_killed or self.failure is not None:
                me.is_killed = True
                raise Killed

    def _give(self, actor: Actor) -> None:
        self.current = actor
        if actor.is_started:
            actor.turn.release()
        else:
            actor.is_started = True
            self.carriers.carry(lambda carrier: self._carry(actor, carrier))

    def _carry(self, actor: Actor, carrier: Carrier) -> None:
        """Run an actor to its end, and pass the baton on. In a carrier's thread."""
        self.current = actor
        try:
            if self.failure is None:
                actor.function(actor)
        except Killed:
            actor.is_killed = True
        except BaseException as error:
            self.fail(error)
        self.current = None
        self._ended(actor)
        self.carriers.idle.append(carrier)  # before the baton goes: whoever gets it may start another actor
        heir = actor.hands_to or self._choose(None)
        if heir is None:
            self._main.release()
        elif heir is actor.hands_to:
            heir.turn.release()
        else:
            self._give(heir)

    def _ended(self, actor: Actor) -> None:
        actor.has_ended = True
        self.actors.remove(actor)
        try:
            self.on_end(actor)
        except BaseException as error:
            self.failure = self.failure or error
