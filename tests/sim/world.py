"""One simulation: a bucket, hosts with disks, roles whose processes die and are started again, faults from a seed.

A *role* is what has to be done (publish all steps; keep a directory at the head); its *incarnations* are the
processes that do it. One that dies, or that the launcher believes dead because it sleeps, gets a successor. Faults are
drawn until their number is used up; then everything has to come to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final, NoReturn

from sim.disk import CALLS, Disk, release, remove_tree
from sim.judge import Judge
from sim.library import Library
from sim.objects import EPOCH_S, Bucket, PlainObjects, SimObjects
from sim.process import ENVIRONMENT
from sim.scheduler import Actor, Killed, Scheduler, ViolationError

from dcr_store.format import canonical
from dcr_store.format.documents import StoreDocument
from dcr_store.format.names import STORE_KEY
from dcr_store.store import Store

FILE_FATES: Final = ("full", "short", "torn")
MAX_STEPS: Final = 6000


@dataclass
class Role:
    """What has to be done, on a host, by one process after the other."""

    name: str
    host: Disk
    act: Callable[[World, Role, Actor], None]
    restart_s: tuple[float, float] = (0.0, 0.3)
    n_incarnations: int = 0
    newest: Actor | None = None
    is_done: bool = False
    may_leave: bool = False  # for good, before it is done
    has_left: bool = False
    actors: set[Actor] = field(default_factory=set)

    def has_successor(self, actor: Actor) -> bool:
        """Whether a later process does what is to be done. One that is done does nothing more: it is none."""
        return self.newest is not actor and self.newest is not None and not self.newest.has_ended


class Fates:
    """The faults of one simulation, as they are drawn.

    Parameters
    ----------
    n : int
        How many there are.
    span : int
        How many steps the simulation takes about: they come within that, spread over all of it or close together.
    kinds : mapping of str to float
        What may happen, and how often compared with the rest.
    """

    def __init__(self, world: World, n: int, span: int, kinds: Mapping[str, float]) -> None:
        self.world, self.rng = world, world.rng
        width = self.rng.choice([0.1, 0.4, 1.0]) * span
        first = self.rng.random() * (span - width)
        self._due = sorted((int(first + self.rng.random() * width) for _ in range(n)), reverse=True)
        self._kinds, self._weights = list(kinds), list(kinds.values())
        self._waiting: list[tuple[str, tuple[str, ...]]] = []  # faults, and the calls that may meet them
        self._cut_until: dict[Actor, float] = {}
        self._lagging_until = 0

    def is_due(self, n_steps: int) -> bool:
        """Whether a step meets a fault."""
        return bool(self._due) and n_steps >= self._due[-1]

    def draw(self) -> str | None:
        """Return the fault that is due, if any now; those of requests and writes wait for the next of these."""
        self._due.pop()
        kind = self.rng.choices(self._kinds, self._weights)[0]
        if kind in ("crash", "sleep", "power", "rot", "gone", "twin"):
            return kind
        if kind == "lag":
            self.world.count("lag")
            self._lagging_until = self.world.scheduler.n_steps + 200
            return None
        if kind in FILE_FATES or kind == "power at a write":
            # Mostly of weights: few of the others are worth much.
            awaits: tuple[str, ...] = ("pwritev",) if self.rng.random() < 0.8 else ("pwritev", "pwrite")
        elif kind in ("refused", "cut"):
            awaits = ("get", "put", "create", "list", "size", "read back", "delete", "take away")
        else:
            # What becomes of a conditional put is what the protocols turn on.
            awaits = ("create",) if self.rng.random() < 0.6 else ("put", "create", "delete")
        self._waiting.append((kind, awaits))
        return None

    def _meets(self, name: str) -> str | None:
        for index, (kind, awaits) in enumerate(self._waiting):
            if name in awaits:
                del self._waiting[index]
                self.world.count(kind)
                return kind
        return None

    def of_request(self, actor: Actor, name: str) -> str | None:
        """Return what becomes of a request to the object store: None if it succeeds."""
        if not (self._waiting or self._cut_until):
            return None
        clock = self.world.scheduler.clock
        until = self._cut_until.get(actor)
        if until is not None:
            if clock < until:
                return "unreachable"
            del self._cut_until[actor]
        kind = self._meets(name)
        if kind == "cut":
            self._cut_until[actor] = clock + self.rng.choice([0.1, 0.5, 2.0, 5.0])
            return "unreachable"
        if kind == "lost, then cut":
            self._cut_until[actor] = clock + self.rng.choice([0.5, 2.0, 3.0])
            return self.rng.choice(["lost", "late"])
        return kind

    def of_write(self, name: str) -> str | None:
        """Return what becomes of a write to a file: None if it succeeds."""
        return self._meets(name)

    def lags(self, key: str) -> bool:
        """Whether a listing does not show an object yet."""
        step = self.world.scheduler.n_steps
        return step < self._lagging_until and step - self.world.bucket.put_at.get(key, -1000) < 100


class World:
    """One simulation."""

    def __init__(self, seed: int, library: Library, root: Path) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.counters: Counter[str] = Counter()
        self.scheduler = Scheduler(self.rng, stays=self.rng.choice([0.0, 0.5, 0.8, 0.9, 0.97]), max_steps=MAX_STEPS)
        self.bucket = Bucket(dict(library.objects))
        self.judge = Judge(library, self.bucket.objects)
        self.is_local = self.rng.random() < 0.5
        self.has_coarse_times = False  # whole seconds, as of S3
        self.root = str(root)
        self.disks: list[Disk] = []
        self.roles: list[Role] = []
        self._role_of: dict[Actor, Role] = {}
        self._without_power: set[int] = set()
        self.fates = Fates(self, 0, 0, {"crash": 1.0})
        store = library.objects[STORE_KEY]
        self._document, self.sha256 = StoreDocument.from_bytes(store), canonical.sha256(store)

    def add_host(self, kind: type[Disk] = Disk, *, has_files: bool = True) -> Disk:
        """Return a new host; one without files is there to lose power only."""
        disk = kind(Path(self.root) / f"{len(self.disks)}", has_files=has_files)
        if has_files:
            self.disks.append(disk)
        return disk

    def add_role(self, name: str, host: Disk, act: Callable[[World, Role, Actor], None]) -> Role:
        role = Role(name, host, act)
        self.roles.append(role)
        self._start(role, 0.0)
        return role

    def set_faults(self, n: int, span: int, kinds: Mapping[str, float]) -> None:
        self.fates = Fates(self, n, span, kinds)

    def run(self) -> None:
        """Run to the end; raises what went wrong."""
        scheduler = self.scheduler
        scheduler.on_step, scheduler.on_end = self._on_step, self._on_end
        before, ENVIRONMENT.scheduler, ENVIRONMENT.rng, CALLS.world = ENVIRONMENT.rng, scheduler, self.rng, self
        try:
            scheduler.run()
            self._end()
        finally:
            ENVIRONMENT.scheduler, ENVIRONMENT.rng, CALLS.world = None, before, None
            for disk in self.disks:
                remove_tree(disk.root)

    def _end(self) -> None:
        """Look once more, at what must be so for good: the log, and every target after a last power loss."""
        for disk in self.disks:
            self._lose(disk)
        self.judge.look_at_all()

    # ------------------------------------------------------------------ for actors

    def store(self, actor: Actor) -> Store:
        """Return the store, opened by a process."""
        return Store(SimObjects(self, actor), self._document, self.sha256)

    def plain(self) -> PlainObjects:
        """Return the bucket as the one who sets the scene writes to it."""
        return PlainObjects(self.bucket.objects)

    def count(self, name: str) -> None:
        self.counters[name] += 1

    # ------------------------------------------------------------------ objects

    def store_object(self, key: str, data: bytes) -> None:
        before = self.bucket.objects.get(key)
        self.bucket.objects[key] = data
        self.bucket.stored_at[key] = self.now()
        if before is None:
            self.bucket.put_at[key] = self.scheduler.n_steps
        try:
            self.judge.on_put(key, data, before)
        except ViolationError as error:
            self.scheduler.fail(error)  # at once: whoever put it may still abort, and let others run
            raise

    def remove_object(self, key: str) -> None:
        try:
            self.judge.on_delete(key)
        except ViolationError as error:
            self.scheduler.fail(error)
            raise
        self.bucket.objects.pop(key, None)

    def now(self) -> float:
        """Return the time by the object store's own clock, as it tells it of objects."""
        now = EPOCH_S + self.scheduler.clock
        return float(int(now)) if self.has_coarse_times else now

    def put_off(self, effect: Callable[[], object]) -> None:
        """Let a request take effect later."""
        due = self.scheduler.n_steps + int(self.rng.choice([3, 20, 60, 200]) * (1 + self.rng.random()))
        self.bucket.late.append((due, effect))

    # ------------------------------------------------------------------ processes

    def _start(self, role: Role, delay_s: float) -> None:
        role.n_incarnations += 1
        actor = self.scheduler.start(
            f"{role.name}.{role.n_incarnations}", lambda me: self._act(role, me), delay_s=delay_s
        )
        role.newest = actor
        role.actors.add(actor)
        self._role_of[actor] = role

    def _act(self, role: Role, actor: Actor) -> None:
        role.act(self, role, actor)
        if actor is role.newest:
            role.is_done = True

    def die(self) -> NoReturn:
        """The process that runs dies here."""
        me = self.scheduler.current
        assert me is not None
        me.is_killed = True
        raise Killed

    def _on_step(self, actor: Actor, label: str) -> None:
        scheduler = self.scheduler
        if self.bucket.late:
            self._land()
        for disk in self.disks:
            if disk.has_changed:
                disk.has_changed = False
                self.judge.look_at(disk)
        if label == "baseline.noted":
            self.judge.look_at_baseline(str(Path(self._role_of[actor].host.root, "baseline")))
        if not self.fates.is_due(scheduler.n_steps) or (kind := self.fates.draw()) is None:
            return
        role = self._role_of[actor]
        if kind == "gone" and not role.may_leave:
            kind = "crash"
        self.count(kind)
        if kind == "gone":
            role.is_done = role.has_left = True
            self.die()
        elif kind == "crash":
            self.die()
        elif kind == "sleep":
            actor.wake_at = scheduler.clock + self.rng.choice([0.5, 1.5, 4.0, 8.0])
            if actor is role.newest and not role.is_done:
                self._start(role, self.rng.uniform(*role.restart_s))
            scheduler.step("asleep")
        elif kind == "twin":
            if actor is role.newest and not role.is_done:  # believed dead, and not even asleep
                self._start(role, self.rng.uniform(0.0, 0.05))
        elif kind == "rot":
            role.host.rot(self.rng)
        else:
            self.cut_power()

    def _land(self) -> None:
        now, late = self.scheduler.n_steps, self.bucket.late
        due = [item for item in late if item[0] <= now]
        if due:
            self.bucket.late = [item for item in late if item[0] > now]
            for _, effect in due:
                self.count("landed late")
                effect()

    def cut_power(self) -> NoReturn:
        """Kill all processes of the host of the one that runs; what was not synced is lost when the last has ended."""
        me = self.scheduler.current
        assert me is not None
        host = self._role_of[me].host
        self._without_power.add(id(host))
        for role in self.roles:
            if role.host is host:
                for other in list(role.actors):
                    if other is not me:
                        self.scheduler.kill(other)
        self.die()

    def _on_end(self, actor: Actor) -> None:
        role = self._role_of[actor]
        role.actors.discard(actor)
        release(actor.locks)
        host = role.host
        failed = self.scheduler.failure is not None
        if id(host) in self._without_power and not any(other.actors for other in self.roles if other.host is host):
            self._without_power.discard(id(host))
            if not failed:
                self._lose(host)
        if failed or role.is_done or actor is not role.newest:
            return
        if actor.is_killed:
            self._start(role, self.rng.uniform(*role.restart_s))

    def _lose(self, host: Disk) -> None:
        if not host.has_files:
            return
        current, self.scheduler.current = self.scheduler.current, None
        self.counters["pages reverted"] += host.lose_power(self.rng)
        self.scheduler.current = current
        host.has_changed = False
        self.judge.look_at(host)
