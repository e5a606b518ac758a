"""What the processes of a simulation do: a trainer that publishes its steps, a receiver that keeps a directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.library import N_VARIANTS, STATES, State
from sim.process import Event
from sim.scheduler import ViolationError

from dcr_store.errors import ConflictError, DcrError, FencedError, IntegrityError, OutcomeUnknownError
from dcr_store.receive.copying import pull_copy
from dcr_store.targets.copy_directory import reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

    from sim.disk import Disk
    from sim.scheduler import Actor
    from sim.world import Role, World

    from dcr_store.receive.member import Member
    from dcr_store.receive.results import Applied
    from dcr_store.store import Store

    class Group(Protocol):
        """A group as its judge sees it."""

        name: str

        def watch(self, member: Member, host: Callable[[], Disk | None] = ...) -> None:
            """Note what a member prepares, and check it by the directory on the host, if it is known to have one."""

        def applied(self, version: str) -> None:
            """Check a version that a member has applied."""


@dataclass(frozen=True)
class Training:
    """What a trainer publishes: each step up to the last, once, on a line.

    Attributes
    ----------
    states : dict
        By step and start of the trainer.
    takes_over : float
        How often it takes over what another owner has open.
    has_baseline : bool
        Whether it keeps the last version on its host; otherwise it reads it again.
    """

    last_step: int
    owner: str
    takes_over: float = 0.0
    line: str = "main"
    states: Mapping[tuple[int, int], State] = field(default_factory=lambda: STATES)
    has_baseline: bool = True


def publisher(training: Training) -> Callable[[World, Role, Actor], None]:
    """Return what a trainer does.

    It goes on from what the log says, publishes against the head that it has seen, and ends when it is fenced and has a
    successor.
    """

    def act(world: World, role: Role, actor: Actor) -> None:
        store = world.store(actor)
        variant = role.n_incarnations % N_VARIANTS
        n_conflicts = 0
        while True:
            n_rotten = role.host.n_rotten
            try:
                with store:
                    if publish_next(world, role, store, training, variant):
                        return
            except FencedError:
                world.count("fenced")
                if role.newest is not actor:
                    return
            except ConflictError:
                n_conflicts += 1
                world.scheduler.sleep(world.rng.uniform(0.05, 0.5) * min(n_conflicts, 6))
            except OutcomeUnknownError:
                world.count("outcome unknown")
            except IntegrityError as error:
                # A baseline that rots while it is healed.
                if error.key != f"{role.host.root}/baseline" or role.host.n_rotten == n_rotten:
                    let_pass(error)
                world.count("healed in vain")
            except UserWarning as error:
                raise ViolationError(f"nothing is damaged here: {error}") from error
            except DcrError as error:
                let_pass(error)
                world.scheduler.sleep(0.2)
            if world.rng.random() < 0.3:
                store = world.store(actor)

    return act


def publish_next(world: World, role: Role, store: Store, training: Training, variant: int) -> bool:
    """Publish the next step; return whether there was none."""
    versions = store.log(training.line)
    for info in versions[-1:]:
        world.judge.told_version(info.version, info.root)
    step = versions[-1].metadata["step"] + 1
    if step > training.last_step:
        return True
    state = training.states[step, variant]
    transaction = store.begin(
        training.line,
        base=versions[-1].version,
        metadata={"step": step, "note": world.rng.choice(["", "", "", "", f"by {role.name} {variant}"])},
        owner=training.owner,
        takeover=world.rng.random() < training.takes_over,
        baseline=f"{role.host.root}/baseline" if training.has_baseline else None,
    )
    if transaction.attempt:
        world.count("resumed")
    world.judge.intend(transaction.txid, transaction.attempt, state)
    fails = world.rng.random() < 0.05
    try:
        with transaction:
            for name, array in state.items():
                transaction.write(name, array)
                if fails:
                    world.count("aborted")
                    raise _TrainingFailedError
            try:
                info = transaction.commit()
            except OutcomeUnknownError:
                if world.rng.random() < 0.5:
                    raise
                world.count("committed again")
                info = transaction.commit()
    except _TrainingFailedError as error:
        if not getattr(error, "__notes__", None):  # nor has the abort failed
            world.judge.told_lost(transaction.txid, transaction.attempt)
        return False
    except FencedError:
        world.judge.told_lost(transaction.txid, transaction.attempt)
        raise
    world.judge.told_version(info.version, info.root)
    return False


class _TrainingFailedError(Exception):
    """Something in the trainer fails while it publishes."""


def puller(goals: list[str]) -> Callable[[World, Role, Actor], None]:
    """Return what brings a directory to one version after the other, at somebody's command."""

    def act(world: World, role: Role, actor: Actor) -> None:
        store, host, n_conflicts = world.store(actor), role.host, 0
        where = f"{host.target}/current" if host.keeps_copies else host.target
        while goals:
            goal = goals[0]
            try:
                if host.keeps_copies:
                    catalog = store._catalog
                    result = pull_copy(catalog, catalog.resolve(goal), host.target, keep=world.rng.choice([0, 1]))
                    world.counters["files shared"] += result.files_linked
                else:
                    result = store.pull(host.target, goal)
            except ConflictError:
                world.count("target locked")
                n_conflicts += 1
                world.scheduler.sleep(world.rng.uniform(0.2, 1.0) * min(n_conflicts, 3))
                continue
            except DcrError as error:
                let_pass(error)
                world.scheduler.sleep(0.2)
                continue
            world.judge.told_version(result.version, result.root)
            world.counters["chunks healed"] += result.chunks_healed
            world.judge.require_bits(where, int(goal.rpartition("@")[2]), "was pulled")
            if goals and goals[0] == goal:
                del goals[0]

    return act


def reader(goals: list[str]) -> Callable[[World, Role, Actor], None]:
    """Return what an engine does that reads what ``current`` leads to, while others bring the directory further.

    It ends when there are no goals left.
    """

    def act(world: World, role: Role, actor: Actor) -> None:
        while goals:
            try:
                with reading(role.host.target) as place:
                    number = int(place.name.partition("-")[0].rpartition("@")[2])
                    for _ in range(3):
                        world.judge.require_bits(str(place), number, "is read")
                        world.scheduler.sleep(world.rng.uniform(0.0, 0.5))
                    world.count("read")
            except (DcrError, OSError):
                pass  # nothing is there yet
            world.scheduler.sleep(world.rng.uniform(0.1, 1.0))

    return act


def follower(last: int, group: Group | None = None) -> Callable[[World, Role, Actor], None]:
    """Return what keeps a directory at the newest version, or at what its group decides, until ``main@last``."""

    def act(world: World, role: Role, actor: Actor) -> None:
        store = world.store(actor)
        while True:
            try:
                if _follow(world, role, store, last, group):
                    return
            except FencedError:
                world.count("member fenced")
                if role.has_successor(actor):
                    return
            except ConflictError:
                world.scheduler.sleep(world.rng.uniform(0.1, 0.5))
            except DcrError as error:
                let_pass(error)
                world.scheduler.sleep(0.2)

    return act


def _follow(world: World, role: Role, store: Store, last: int, group: Group | None) -> bool:
    """Run a receiver; return whether it has come to the end."""
    target, judge = role.host.target, world.judge
    was_alone, number = len(role.actors) == 1, role.n_incarnations

    def is_alone() -> bool:
        # Two incarnations may bring one directory further in turns: then what one knows of it may be over.
        return was_alone and role.n_incarnations == number

    def on_applied(applied: Applied) -> None:
        judge.told_version(applied.version, applied.root)
        if is_alone():
            judge.require_bits(target, int(applied.version.rpartition("@")[2]), "was applied")
        world.counters["chunks healed"] += applied.chunks_healed
        world.counters["bytes from the spool"] += applied.nbytes_spooled
        if group is not None:
            group.applied(applied.version)

    def on_failure(error: DcrError, wait_s: float) -> None:
        let_pass(error)
        world.count("target locked" if error.kind == "conflict" else "follower failed")

    options = {} if group is None else {"group": group.name, "name": role.name}
    with store.receiver(target, **options) as receiver:
        receiver._stop = Event()  # type: ignore[assignment]
        if group is not None:
            host = role.host
            group.watch(receiver._decider._member, lambda: host if is_alone() else None)  # type: ignore[attr-defined]
        held = receiver.follow(until=f"main@{last}", on_applied=on_applied, on_failure=on_failure)
        active = receiver.active()
        assert active is not None
        judge.told_version(active.version, active.root)
        if held is not None:
            judge.told_version(held.version, held.root)
        return True


def let_pass(error: DcrError) -> None:
    """Let errors pass that faults explain; a damaged store or a wrong call is none of these."""
    if error.kind not in ("storage", "outcome-unknown", "conflict", "fenced", "not-found"):
        raise ViolationError(f"an error that no fault explains: {error!r}") from error
