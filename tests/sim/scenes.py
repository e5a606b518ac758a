"""The scenes that a seed chooses from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from sim import cuts, groups
from sim.actors import Training, follower, publisher, puller, reader
from sim.history_judge import HistoryJudge
from sim.library import CHUNK_ELEMENTS, LONGER, N_KEPT, N_STEPS, Library, kept, long, short, sliced
from sim.maintainers import Deed, doer, maintenance, naming, reading
from sim.ranks import ALONE, Launch, rank
from sim.world import World

from dcr_store.format.groups import Policy
from dcr_store.publish import partitions

OBJECT_FAULTS: Final = {
    "refused": 1.0,
    "lost": 2.0,
    "late": 2.0,
    "cut": 1.0,
    "lost, then cut": 2.0,
    "in flight": 1.0,
    "lag": 0.5,
}
PROCESS_FAULTS: Final = {"crash": 4.0, "sleep": 4.0, "power": 1.0}
LATE: Final = partitions.JOURNAL_PARTITIONS
WHOLE: Final = partitions.PARTITION_NBYTES
SPAN: Final = 60  # steps, about, of a version that is published or pulled
FILE_FAULTS: Final = {"full": 0.5, "short": 0.5, "torn": 1.0, "power at a write": 1.0}


class Stage:
    """What all simulations of a process share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.short, self.long, self.sliced, self.kept = short(), long(), sliced(), kept()

    def world(self, seed: int, library: Library) -> World:
        partitions.JOURNAL_PARTITIONS, partitions.PARTITION_NBYTES = LATE, WHOLE  # type: ignore[misc]
        return World(seed, library, self.root)


def publishing(stage: Stage, seed: int) -> World:
    """One run, or two, that publish a few versions."""
    world = stage.world(seed, stage.short)
    rng = world.rng
    last = rng.choice([1, 1, 1, 2, 2, 3])
    kinds = {**OBJECT_FAULTS, **PROCESS_FAULTS, **FILE_FAULTS, "power": 3.0, "rot": 2.0}
    world.set_faults(rng.choice([1, 1, 2, 2, 3, 4]), SPAN * last, kinds)
    takes_over = rng.choice([0.0, 0.0, 0.3])
    world.add_role("trainer", world.add_host(), publisher(Training(last, "run", takes_over)))
    if rng.random() < 0.3:
        same = rng.random() < 0.5
        world.add_role("rival", world.add_host(), publisher(Training(last, "run" if same else "rival", takes_over)))
    return world


def receiving(stage: Stage, seed: int) -> World:
    """A directory that goes through versions of many structures, on a machine that dies."""
    world = stage.world(seed, stage.long)
    rng = world.rng
    goals = [f"main@{rng.randrange(N_STEPS)}" for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    kinds = {**OBJECT_FAULTS, **PROCESS_FAULTS, **FILE_FAULTS, "power": 3.0, "power at a write": 5.0}
    world.set_faults(rng.choice([1, 1, 2, 2, 3]), SPAN * len(goals), kinds)
    world.add_role("node", world.add_host(), puller(goals))
    return world


def copying(stage: Stage, seed: int) -> World:
    """Versions side by side, with a link to one of them and an engine that reads it."""
    world = stage.world(seed, stage.long)
    rng = world.rng
    goals = [f"main@{rng.randrange(N_STEPS)}" for _ in range(rng.choice([2, 2, 2, 3]))]
    kinds = {**OBJECT_FAULTS, **PROCESS_FAULTS, **FILE_FAULTS, "power": 4.0, "power at a write": 2.0}
    world.set_faults(rng.choice([1, 1, 2, 3]), SPAN * len(goals), kinds)
    host = world.add_host()
    host.keeps_copies = True
    world.add_role("node", host, puller(goals))
    if rng.random() < 0.5:
        world.add_role("engine", host, reader(goals))
    return world


def following(stage: Stage, seed: int) -> World:
    """A run that publishes, and directories that are kept at the head."""
    world = stage.world(seed, stage.short)
    rng = world.rng
    last, n_receivers = rng.choice([1, 1, 1, 2, 4]), rng.choice([1, 1, 2])
    kinds = {**OBJECT_FAULTS, **PROCESS_FAULTS, **FILE_FAULTS, "power": 3.0, "rot": 2.0}
    world.set_faults(rng.choice([1, 2, 3, 4, 6]), SPAN * (last + 1) * n_receivers, kinds)
    world.add_role("trainer", world.add_host(), publisher(Training(last, "run")))
    for index in range(n_receivers):
        world.add_role(f"node{index}", world.add_host(), follower(last))
    return world


def grouping(stage: Stage, seed: int) -> World:
    """Receivers that promote versions together, while an operator drops and proposes."""
    world = stage.world(seed, stage.long)
    rng = world.rng
    names = ["ann", "bob", "cy"][: rng.choice([1, 2, 2, 3])]
    last = N_STEPS - 1
    policy = Policy(proposing=rng.choice(["newest", "manual"]), drop_after_s=rng.choice([None, None, 1, 3]))
    group = groups.Group(world, names, policy)
    world.set_faults(rng.choice([0, 1, 2, 3, 4, 6]), SPAN * len(names), OBJECT_FAULTS | PROCESS_FAULTS)
    on_disk = rng.random() < 0.1
    for name in names:
        act = follower(last, group) if on_disk else groups.member(group, last)
        world.add_role(name, world.add_host(has_files=on_disk), act)
    world.add_role(
        "operator", world.add_host(has_files=False), groups.operator(group, names, last, rng.choice([0, 1, 2, 4]))
    )
    return world


def joining(stage: Stage, seed: int) -> World:
    """Ranks that publish their slices of each step together, and receivers that follow."""
    world = stage.world(seed, stage.sliced)
    rng = world.rng
    n_ranks, last = rng.choice([2, 2, 2, 3, 3, 4]), rng.choice([1, 1, 1, 2, 2])
    kinds = tuple(rng.sample(cuts.KINDS, rng.choice([1, 2]))) + ((ALONE,) if rng.random() < 0.1 else ())
    has_other_bits = rng.random() < 0.3
    faults = {**OBJECT_FAULTS, **PROCESS_FAULTS, "rot": 4.0, "gone": 0.7, "twin": 12.0 if has_other_bits else 1.0}
    world.set_faults(rng.choice([1, 2, 2, 3, 4, 6]), SPAN * last * n_ranks, faults)
    if rng.random() < 0.3:  # several partitions, journaled one by one
        partitions.JOURNAL_PARTITIONS, partitions.PARTITION_NBYTES = 1, CHUNK_ELEMENTS  # type: ignore[misc]
    launch = Launch(
        world,
        last,
        kinds,
        rng.choice([0, 0, 0, 1, 2]),
        has_other_bits=has_other_bits,
        is_impatient=rng.random() < 0.2,
        has_straggler=rng.random() < (0.7 if has_other_bits else 0.1),
    )
    _add_ranks(launch, n_ranks)
    if rng.random() < 0.05:
        world.add_role("node", world.add_host(), follower(last))
    return world


def joining_rot(stage: Stage, seed: int) -> World:
    """Ranks whose memory rots, and nothing else happens."""
    world = stage.world(seed, stage.sliced)
    world.set_faults(6, SPAN * 4, {"rot": 1.0})
    kinds = (world.rng.choice(cuts.KINDS),)
    _add_ranks(Launch(world, 2, kinds, 0, has_other_bits=False, is_impatient=False, has_straggler=False), 2)
    return world


def joining_twins(stage: Stage, seed: int) -> World:
    """Ranks of which several processes live at a time, with other weights, while one rank is late."""
    world = stage.world(seed, stage.sliced)
    world.set_faults(3, SPAN, {"twin": 2.0, "sleep": 1.0})
    kinds = (world.rng.choice(cuts.KINDS),)
    _add_ranks(Launch(world, 1, kinds, 0, has_other_bits=True, is_impatient=False, has_straggler=True), 3)
    return world


def _add_ranks(launch: Launch, n: int) -> None:
    shared = launch.add_host()
    for index in range(n):
        host = shared if launch.world.rng.random() < 0.4 else launch.add_host()
        launch.roles.append(launch.world.add_role(f"r{index}", host, rank(launch)))
        launch.roles[-1].may_leave = index > 0


def history(stage: Stage, seed: int) -> World:
    """A store whose history is kept at a bounded cost, beside who publishes, names, reads and receives."""
    world, rng = _kept(stage, seed)
    last = N_KEPT - 1
    faults = {**OBJECT_FAULTS, **PROCESS_FAULTS, "power": 0.0, "twin": 1.0}
    world.set_faults(rng.choice([0, 1, 1, 2, 3, 4]), 4 * SPAN, faults)
    last_step = last + rng.choice([0, 0, 1, 1, 2, 3])
    if last_step > last:
        training = Training(last_step, "run", 0.0, "main", LONGER, has_baseline=False)
        world.add_role("trainer", world.add_host(has_files=False), publisher(training))
    for name in ("keeper", "other")[: rng.choice([1, 1, 2])]:
        _add_doer(world, name, maintenance(rng, rng.choice([1, 2, 3]), last))
    for name in ("ann", "bob")[: rng.choice([0, 1, 1, 2])]:
        _add_doer(world, name, naming(rng, rng.choice([1, 2]), last))
    if rng.random() < 0.3:
        number, steps = rng.randrange(last + 1), rng.choice([0, 1, 2])
        deeds = [Deed("fork", ("main", number, "exp"))]
        if steps:
            deeds += [Deed("publish", ("exp", number + steps)), Deed("read", ("exp", number + 1, None))]
        if rng.random() < 0.3:
            deeds += [Deed("expire", ("exp", 1, None)), Deed("gc", (0,))]
        _add_doer(world, "branch", deeds)
    _add_doer(world, "reader", reading(rng, rng.choice([1, 1, 2]), last, ["main"]))
    if rng.random() < 0.08:
        world.add_role("node", world.add_host(), follower(last_step))
    if rng.random() < 0.15:
        _add_group(world, last_step)
    return world


def history_named(stage: Stage, seed: int) -> World:
    """Names, or a group's proposals, that come at the moment of an expiry."""
    world, rng = _kept(stage, seed)
    last = N_KEPT - 1
    world.set_faults(rng.choice([0, 0, 1, 2]), SPAN, {"sleep": 2.0, "crash": 1.0, "twin": 1.0})
    keeping: list[Deed] = []
    for keep_last in rng.choice([(1,), (3, 2, 1), (2, 1)]):
        keeping += [Deed("wait", (rng.uniform(0.0, 0.5),)), Deed("expire", ("main", keep_last, None))]
    _add_doer(world, "keeper", [*keeping, Deed("gc", (0,))])
    if rng.random() < 0.4:
        _add_group(world, last)
        return world
    number, kind = rng.randrange(last), rng.choice(["tag", "pin"])
    more = (None,) if kind == "pin" else ()
    for name in ("ann", "bob"):
        _add_doer(world, name, [Deed("wait", (rng.uniform(0.0, 1.0),)), Deed(kind, ("main", number, "best", *more))])
    return world


def history_graces(stage: Stage, seed: int) -> World:
    """Expiries with time between them, and collections that come soon after."""
    world, rng = _kept(stage, seed)
    deeds: list[Deed] = []
    for keep_last in (3, 2, 1):
        deeds += [Deed("expire", ("main", keep_last, None)), Deed("wait", (rng.uniform(0.0, 2.0),))]
        deeds += [Deed("gc", (rng.choice([1, 2]),))]
    _add_doer(world, "keeper", deeds)
    return world


def history_read(stage: Stage, seed: int) -> World:
    """Versions that expire, and are collected, while readers sleep."""
    world, rng = _kept(stage, seed)
    world.set_faults(4, SPAN // 2, {"sleep": 1.0})
    _add_doer(world, "keeper", [Deed("expire", ("main", 1, None)), Deed("gc", (0,))])
    for name in ("reader", "other", "third"):
        _add_doer(world, name, reading(rng, 1, N_KEPT - 1, ["main"]))
    return world


def _kept(stage: Stage, seed: int) -> tuple[World, Random]:
    world = stage.world(seed, stage.kept)
    world.has_coarse_times = world.rng.random() < 0.5
    world.judge = HistoryJudge(stage.kept, world.bucket, world.now)
    return world, world.rng


def _add_doer(world: World, name: str, deeds: list[Deed]) -> None:
    world.add_role(name, world.add_host(has_files=False), doer(deeds))


def _add_group(world: World, last: int) -> None:
    """A member, and an operator who proposes versions by hand, also such as are about to expire."""
    group = groups.Group(world, ["eve"], Policy(proposing="manual"))
    assert isinstance(world.judge, HistoryJudge)
    world.judge.groups.append(group.fold)
    world.add_role("eve", world.add_host(has_files=False), groups.member(group, last))
    act = groups.operator(group, ["eve"], last, world.rng.choice([1, 2, 3]))
    world.add_role("operator", world.add_host(has_files=False), act)


SCENES: Final[dict[str, tuple[Callable[[Stage, int], World], float]]] = {
    "publishing": (publishing, 0.18),
    "receiving": (receiving, 0.23),
    "copying": (copying, 0.042),
    "following": (following, 0.012),
    "grouping": (grouping, 0.43),
    "joining": (joining, 0.06),
    "history": (history, 0.025),
    "history, named": (history_named, 0.005),
    "history, graces": (history_graces, 0.0),
    "history, read": (history_read, 0.0),
    "joining, rot": (joining_rot, 0.0),  # these are there for rules that few others show
    "joining, twins": (joining_twins, 0.0),
}
