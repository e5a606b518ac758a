"""The scenes that a seed chooses from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from sim import groups
from sim.actors import follower, publisher, puller, reader
from sim.library import N_STEPS, Library, long, short
from sim.world import World

from dcr_store.format.groups import Policy

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
SPAN: Final = 60  # steps, about, of a version that is published or pulled
FILE_FAULTS: Final = {"full": 0.5, "short": 0.5, "torn": 1.0, "power at a write": 1.0}


class Stage:
    """What all simulations of a process share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.short, self.long = short(), long()

    def world(self, seed: int, library: Library) -> World:
        return World(seed, library, self.root)


def publishing(stage: Stage, seed: int) -> World:
    """One run, or two, that publish a few versions."""
    world = stage.world(seed, stage.short)
    rng = world.rng
    last = rng.choice([1, 1, 1, 2, 2, 3])
    kinds = {**OBJECT_FAULTS, **PROCESS_FAULTS, **FILE_FAULTS, "power": 3.0, "rot": 2.0}
    world.set_faults(rng.choice([1, 1, 2, 2, 3, 4]), SPAN * last, kinds)
    takes_over = rng.choice([0.0, 0.0, 0.3])
    world.add_role("trainer", world.add_host(), publisher(last, "run", takes_over=takes_over))
    if rng.random() < 0.3:
        same = rng.random() < 0.5
        world.add_role("rival", world.add_host(), publisher(last, "run" if same else "rival", takes_over=takes_over))
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
    world.add_role("trainer", world.add_host(), publisher(last, "run"))
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


SCENES: Final[dict[str, tuple[Callable[[Stage, int], World], float]]] = {
    "publishing": (publishing, 0.29),
    "receiving": (receiving, 0.27),
    "copying": (copying, 0.07),
    "following": (following, 0.05),
    "grouping": (grouping, 0.32),
}
