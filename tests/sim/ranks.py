"""Ranks of a sharded trainer in the simulation: one begins and commits, the others join, through the store alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sim.actors import let_pass
from sim.cuts import EVERYONE, STATES, parts_of, shapes_of
from sim.disk import Disk
from sim.slice_judge import SliceJudge

from dcr_store.errors import (
    ConflictError,
    DcrError,
    FencedError,
    IntegrityError,
    LagError,
    OutcomeUnknownError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from sim.cuts import Part
    from sim.scheduler import Actor
    from sim.world import Role, World

    from dcr_store.publish.joint import SliceTransaction
    from dcr_store.publish.slice_baseline import SliceBaseline
    from dcr_store.store import Store
    from dcr_store.versions.info import VersionInfo

ALONE: Final = "alone"  # a version that the first rank publishes by itself
OWNER: Final = "run"


class RankHost(Disk):
    """A host of ranks: what can rot there is the memory of their baselines.

    Attributes
    ----------
    baselines : dict of Actor to SliceBaseline
        Of the processes that have one.
    rotten : set of str
        What has rotted at any time: ``bits`` and ``digests`` heal; what the committer compares makes it refuse.
    """

    baselines: dict[Actor, SliceBaseline]
    rotten: set[str]

    def rot(self, rng: Random) -> None:
        """Change one bit of a baseline, or of what is known about it, if there is one."""
        alive = [actor for actor in self.baselines if not actor.has_ended]
        if not alive:
            return
        baseline = self.baselines[alive[int(rng.random() * len(alive))]]
        owned = baseline.owned
        if owned is not None and rng.random() < 0.3:
            rows = owned.ones["u16"].copy()
            if len(rows):
                # Any bit: the same one of two writers would not show.
                rows[int(rng.random() * len(rows)), 1] ^= 1 << int(rng.random() * 63)
                # Not in place: the simulation remembers what a pure function returned, and shares it.
                baseline.owned = replace(owned, ones={**owned.ones, "u16": rows})
                self.rotten.add("ones")
            return
        held = [bits for bits in baseline.slices.values() if bits.pieces]
        if not held:
            return
        bits = held[int(rng.random() * len(held))]
        what = rng.choice(["bits", "bits", "digests", "owned", "owned"])
        array = getattr(bits, what)
        array[int(rng.random() * len(array))] ^= 1 << 3
        self.rotten.add(what)
        self.n_rotten += 1


class Launch:
    """What the launcher of the ranks knows and does: who writes which step, cut in which way.

    Parameters
    ----------
    last : int
        The last step.
    n_mistakes : int
        How often ranks are told the wrong cut.
    has_other_bits : bool
        Whether some processes compute other weights for the same step.
    is_impatient : bool
        Whether the first rank gives up waiting although everybody may still come.
    has_straggler : bool
        Whether the last rank comes later than the others.
    """

    def __init__(
        self,
        world: World,
        last: int,
        kinds: tuple[str, ...],
        n_mistakes: int,
        *,
        has_other_bits: bool,
        is_impatient: bool,
        has_straggler: bool,
    ) -> None:
        self.world, self.last, self.kinds, self.n_mistakes = world, last, kinds, n_mistakes
        self.has_other_bits, self.is_impatient, self.has_straggler = has_other_bits, is_impatient, has_straggler
        self.judge = SliceJudge(world.judge, world.count)
        self.roles: list[Role] = []
        self.mistaken: set[str] = set()  # transactions in which somebody was told the wrong cut
        self._plans: dict[int, tuple[tuple[str, ...], str]] = {}
        self._cuts: list[tuple[int, str]] = []

    def add_host(self) -> RankHost:
        host = self.world.add_host(RankHost, has_files=False)
        assert isinstance(host, RankHost)
        host.baselines, host.rotten = {}, set()
        return host

    def plan(self, step: int) -> tuple[tuple[str, ...], str]:
        """Return who writes a step, and the cut; another one where somebody has left for good."""
        found = self._plans.get(step)
        if found is None or self.has_left(found[0]):
            rng = self.world.rng
            alive = [role.name for role in self.roles if not role.has_left]
            names = tuple(alive[: 1 + int(rng.random() * len(alive))]) if rng.random() < 0.3 else tuple(alive)
            kind = self.kinds[int(rng.random() * len(self.kinds))]
            if self.n_mistakes and len(names) > 1 and rng.random() < 0.3:
                kind, self.n_mistakes = EVERYONE, self.n_mistakes - 1
            found = self._plans[step] = names, kind
        return found

    def drop(self, step: int) -> None:
        """Forget who was to write a step: it is to be begun otherwise."""
        self._plans.pop(step, None)

    def has_left(self, names: tuple[str, ...]) -> bool:
        return any(role.has_left for role in self.roles if role.name in names)

    def variant_of(self, actor: Actor) -> int:
        """Return which weights a process computes for a step: all the same, but for a few that are mistaken."""
        return int(self.has_other_bits and self.world.rng.random() < 0.4)

    def parts(self, transaction: str, step: int, kind: str, names: tuple[str, ...], writer: str) -> tuple[Part, ...]:
        """Return what a rank writes, now and then as if they were more, or fewer."""
        rank, n = names.index(writer), len(names)
        rng = self.world.rng
        if kind == EVERYONE:
            self.mistaken.add(transaction)
        elif self.n_mistakes and rng.random() < 0.2:
            other = n + 1 if rank == n - 1 or rng.random() < 0.5 else n - 1
            self.n_mistakes -= 1
            if other <= 4:
                self.mistaken.add(transaction)
                return parts_of(step, kind, rank, other)
        return parts_of(step, kind, rank, n)

    def committed(self, names: tuple[str, ...], kind: str) -> None:
        self._cuts.append((len(names), kind))
        if len(self._cuts) > 1 and self._cuts[-1] != self._cuts[-2]:
            self.world.count("cut otherwise")

    def explains(self, error: DcrError) -> bool:
        """Whether an error is what has to come of a mistake, or of what rotted."""
        if not isinstance(error, IntegrityError):
            return False
        rotten = set().union(*(role.host.rotten for role in self.roles if isinstance(role.host, RankHost)))
        return any(
            text in str(error) and (self.mistaken or what in rotten)
            for text, what in (
                ("elements were written", ""),
                ("digests of what they own", "ones"),
                ("the baseline is not the base", "owned"),
            )
        )


def rank(launch: Launch) -> Callable[[World, Role, Actor], None]:
    """Return what a rank does until the last step is committed: the first begins and commits, the others join."""

    def act(world: World, role: Role, actor: Actor) -> None:
        store, variant = world.store(actor), launch.variant_of(actor)
        is_first, n_conflicts = role is launch.roles[0], 0
        take_part = _begin_next if is_first else _join_next
        while True:
            try:
                if take_part(launch, role, actor, store, variant):
                    return
            except FencedError:
                world.count("ended for all")
                if role.has_successor(actor):
                    return
            except ConflictError as error:
                world.count(_of(error))
                if role.has_successor(actor):
                    return
                n_conflicts += 1
                world.scheduler.sleep(world.rng.uniform(0.05, 0.5) * min(n_conflicts, 6))
            except OutcomeUnknownError:
                world.count("outcome unknown")
            except LagError:
                world.count("waited in vain")
            except _TrainingFailedError:
                pass
            except DcrError as error:
                if not launch.explains(error):
                    let_pass(error)
                world.count("refused by the committer" if error.kind == "integrity" else "rank failed")
                world.scheduler.sleep(0.2)
            if world.rng.random() < 0.1:
                store = world.store(actor)  # a baseline anew

    return act


def _of(error: ConflictError) -> str:
    for text, name in (
        ("has other bits than it stored before", "other bits refused"),
        ("two processes sealed as writer", "two seals refused"),
        ("was committed with what another process", "another seal counted"),
    ):
        if text in str(error):
            return name
    return "begun by another"


def _begin_next(launch: Launch, role: Role, actor: Actor, store: Store, variant: int) -> bool:
    world = launch.world
    versions = store.log()
    for info in versions[-1:]:
        world.judge.told_version(info.version, info.root)
    step = versions[-1].metadata["step"] + 1
    if step > launch.last:
        return True
    names, kind = launch.plan(step)
    if kind == ALONE:
        _publish_alone(launch, store, versions[-1].version, step, variant)
        return False
    parts = parts_of(step, kind, 0, len(names))
    announced = [part.mapped for part in parts] if world.rng.random() < 0.5 else None
    transaction = store.begin(
        base=versions[-1].version,
        metadata={"step": step, "cut": kind},
        owner=OWNER,
        writers=names,
        tensors=shapes_of(step),
        slices=announced,
    )
    if transaction.attempt:
        world.count("resumed")
    if kind == EVERYONE:
        launch.mistaken.add(transaction.txid)
    try:
        _take_part(launch, role, actor, transaction, step, variant, parts)
    except (LagError, ConflictError, IntegrityError):
        launch.drop(step)
        raise
    launch.committed(names, kind)
    return False


def _join_next(launch: Launch, role: Role, actor: Actor, store: Store, variant: int) -> bool:
    world, log = launch.world, store._catalog.log("main")
    line = log.refresh()
    if line.next_version > launch.last:
        return True
    if launch.has_straggler and role is launch.roles[-1]:
        world.scheduler.sleep(world.rng.uniform(0.5, 3.0))
    pending = line.open
    if pending is not None and role.name in pending.writers:
        step, kind = pending.metadata["step"], pending.metadata["cut"]
        parts = launch.parts(pending.txid, step, kind, pending.writers, role.name)
        announced = [part.mapped for part in parts] if world.rng.random() < 0.5 else None
        transaction = store.join(pending.txid, writer=role.name, slices=announced, timeout_s=0)
    elif world.rng.random() < 0.5 and role.name in launch.plan(line.next_version)[0]:
        names, _ = launch.plan(line.next_version)
        transaction = store.join(writer=role.name, writers=names, timeout_s=1.0)
        metadata = transaction._pending.metadata
        step = metadata["step"]
        parts = launch.parts(transaction.txid, step, metadata["cut"], names, role.name)
    else:
        world.scheduler.sleep(world.rng.uniform(0.05, 0.4))
        return False
    _take_part(launch, role, actor, transaction, step, variant, parts)
    return False


class _TrainingFailedError(Exception):
    """Something in a rank fails while it publishes."""


def _take_part(
    launch: Launch,
    role: Role,
    actor: Actor,
    transaction: SliceTransaction,
    step: int,
    variant: int,
    parts: tuple[Part, ...],
) -> None:
    """Write, seal, and wait for the outcome; check what the process believes then."""
    world, judge = launch.world, launch.judge
    meaning = judge.joined(transaction, actor, step, variant)
    baseline = transaction._baseline
    assert isinstance(role.host, RankHost)
    role.host.baselines[actor] = baseline
    if meaning.durable:
        world.count("joined again")
    fails = world.rng.random() < 0.03
    try:
        with transaction:
            for part in parts:
                meaning.parts.append(part)
                _write(transaction, part, meaning.flat)
                if fails:
                    world.count("aborted by a rank")
                    raise _TrainingFailedError
            transaction.seal()
            judge.look_at(baseline)
            info = _committed(launch, transaction)
    except (DcrError, _TrainingFailedError) as error:
        if isinstance(error, FencedError) and transaction.is_committer:
            world.judge.told_lost(transaction.txid, transaction.attempt)
        elif isinstance(error, FencedError) or transaction._state == "aborted":
            judge.told_aborted(transaction.txid)
        judge.look_at(baseline)
        raise
    judge.look_at(baseline)
    world.judge.told_version(info.version, info.root)
    judge.told_version(info.version, meaning)


def _write(transaction: SliceTransaction, part: Part, flat: dict[str, object]) -> None:
    values = part.values(flat)  # type: ignore[arg-type]
    if part.fragment is None:
        transaction.write_slice(values, part.mapped)
    else:
        transaction.write_residual(part.fragment[0], values, part.fragment[1])


def _committed(launch: Launch, transaction: SliceTransaction) -> VersionInfo:
    """Commit, or wait for it, as long as everybody may still come; after a lost answer perhaps once more."""
    world = launch.world
    while True:
        try:
            return transaction.commit(timeout_s=world.rng.choice([2.0, 10.0]))
        except LagError:
            if transaction.is_committer and launch.has_left(transaction._pending.writers):
                world.count("given up for one who left")
                raise
            if launch.is_impatient and world.rng.random() < 0.1:
                raise
        except (OutcomeUnknownError, StorageError):
            if world.rng.random() < 0.5:
                raise
            world.count("committed again")


def _publish_alone(launch: Launch, store: Store, base: str, step: int, variant: int) -> None:
    world, state = launch.world, STATES[step, variant]
    with store.begin(base=base, metadata={"step": step, "cut": ALONE}, owner=OWNER) as transaction:
        world.judge.intend(transaction.txid, transaction.attempt, state)
        for name, array in state.items():
            transaction.write(name, array)
        try:
            info = transaction.commit()
        except FencedError:
            world.judge.told_lost(transaction.txid, transaction.attempt)
            raise
    world.judge.told_version(info.version, info.root)
    world.count("published alone")
