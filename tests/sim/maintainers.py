"""Who keeps a history: maintainers that anchor, fold, expire and collect, people who name versions, readers.

Each has a list of things to do, which its incarnations share: one that dies is started again with the same command.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.actors import Training, let_pass, publish_next
from sim.history_judge import HistoryJudge
from sim.library import LONGER, N_VARIANTS
from sim.objects import EPOCH_S
from sim.scheduler import ViolationError

from dcr_store.errors import ConflictError, DcrError, FencedError, NotFoundError
from dcr_store.format.names import pin_key, tag_key

if TYPE_CHECKING:
    from random import Random

    from sim.scheduler import Actor
    from sim.world import Role, World

    from dcr_store.store import Store

PATIENCE = 3  # refusals, after which somebody takes over, or gives up


@dataclass
class Deed:
    """Something to do, and how often that was refused."""

    name: str
    arguments: tuple[Any, ...]
    n_refused: int = 0


class Turn:
    """One process that does a deed: what it has, and what the judge is told."""

    def __init__(self, world: World, role: Role, store: Store, deed: Deed) -> None:
        assert isinstance(world.judge, HistoryJudge)
        self.world, self.role, self.store, self.deed = world, role, store, deed
        self.judge = world.judge
        self.owner = role.name
        self.takes_over = deed.n_refused >= PATIENCE

    def do(self) -> None:
        getattr(self, self.deed.name)(*self.deed.arguments)

    def wait(self, seconds: float) -> None:
        self.world.scheduler.sleep(seconds)

    # ------------------------------------------------------------------ maintenance

    def anchor(self, line: str, number: int) -> None:
        found = self.store.anchor(f"{line}@{number}", owner=self.owner, takeover=self.takes_over)
        assert found.base is None
        self.judge.told_edge(line, number, None)

    def fold(self, line: str, start: int, number: int) -> None:
        try:
            self.store.fold(f"{line}@{start}", f"{line}@{number}", owner=self.owner, takeover=self.takes_over)
        except ConflictError as error:
            if "no path leads" not in str(error):
                raise
            assert not self.judge.leads(line, start, number), "a fold was refused to which a path leads"
            self.world.count("no path to fold")
        else:
            self.judge.told_edge(line, number, start)

    def expire(self, line: str, keep_last: int, keep_every: int | None) -> None:
        done = self.store.expire(
            line, keep_last=keep_last, keep_every=keep_every, owner=self.owner, takeover=self.takes_over
        )
        for name in done.versions:
            self.judge.told_expired(name)
        self.world.counters["versions expired"] += len(done.versions)

    def gc(self, grace_s: int) -> None:
        done = self.store.gc(grace_s=grace_s)
        self.world.counters["objects collected"] += len(done.keys)
        self.world.counters["objects that wait"] += done.n_waiting

    # ------------------------------------------------------------------ names

    def tag(self, line: str, number: int, name: str) -> None:
        self.store.tag(f"{line}@{number}", name)
        self.judge.told_name(tag_key(line, name), f"{line}@{number}", None)

    def pin(self, line: str, number: int, name: str, until_s: float | None) -> None:
        until = None if until_s is None else datetime.datetime.fromtimestamp(EPOCH_S + until_s, datetime.UTC)
        self.store.pin(f"{line}@{number}", name, until=until)
        self.judge.told_name(pin_key(name), f"{line}@{number}", None if until is None else until.timestamp())

    def untag(self, line: str, name: str) -> None:
        self.judge.give_up(tag_key(line, name))
        self.store.delete_tag(line, name)

    def unpin(self, name: str) -> None:
        self.judge.give_up(pin_key(name))
        self.store.delete_pin(name)

    def fork(self, line: str, number: int, child: str) -> None:
        assert self.store.fork(f"{line}@{number}", child) == f"{child}@{number}"
        self.judge.told_fork(child, f"{line}@{number}")
        self.world.count("forked")

    def publish(self, line: str, last_step: int) -> None:
        training = Training(last_step, self.owner, 0.0, line, LONGER, has_baseline=False)
        while not publish_next(self.world, self.role, self.store, training, self.role.n_incarnations % N_VARIANTS):
            pass

    # ------------------------------------------------------------------ reading

    def read(self, line: str, number: int, parts: dict[str, Any] | None) -> None:
        name = f"{line}@{number}"
        was_expired = self.judge.is_expired(line, number)
        found = self.store.read(name, parts)
        if was_expired:
            self.judge.told_expired(name + " that is read")
        state = self.judge.bits[self.judge.owner(line, number)]
        self.judge.told_bits(name, found, dict.fromkeys(state) if parts is None else parts)
        self.world.count("history read")

    def walk(self, line: str, start: int) -> None:
        for state in self.store.iter_states(line, start):
            self.judge.told_bits(state.info.version, state.tensors, dict.fromkeys(state.tensors))
        self.world.count("history walked")


def doer(deeds: list[Deed], line: str = "main") -> Callable[[World, Role, Actor], None]:
    """Return what does one thing after the other, again where it is interrupted, until none is left."""

    def act(world: World, role: Role, actor: Actor) -> None:
        store = world.store(actor)
        while deeds:
            deed = deeds[0]
            try:
                with store:
                    Turn(world, role, store, deed).do()
            except FencedError:
                world.count("maintainer fenced")
                if role.has_successor(actor):
                    return
                deed.n_refused += 1
            except ConflictError as error:
                world.count("about to expire" if "about to expire" in str(error) else "maintainer refused")
                deed.n_refused += 1
            except NotFoundError as error:
                if not _is_over(world, deed, error):
                    deed.n_refused += 1
            except UserWarning as error:
                raise ViolationError(f"nothing is damaged here: {error}") from error
            except DcrError as error:
                let_pass(error)
            else:
                deed.n_refused = 2 * PATIENCE
            if deed.n_refused >= 2 * PATIENCE and deeds and deeds[0] is deed:
                del deeds[0]
            world.scheduler.sleep(world.rng.uniform(0.01, 0.6))
            if world.rng.random() < 0.3:
                store = world.store(actor)

    return act


def _is_over(world: World, deed: Deed, error: NotFoundError) -> bool:
    """Whether a deed cannot be done any more: a version has expired, which is checked, or a name is gone."""
    assert isinstance(world.judge, HistoryJudge)
    if "expired" in str(error):
        assert error.key is not None
        world.judge.told_expired(error.key)
        world.count("told that it has expired")
        deed.n_refused = 2 * PATIENCE
        return True
    return False


def maintenance(rng: Random, n: int, last: int) -> list[Deed]:
    """Return what a maintainer does, who knows that there are versions up to `last` now."""
    deeds = []
    for _ in range(n):
        kind = rng.choice(["anchor", "fold", "expire", "expire", "gc", "gc"])
        if kind == "anchor":
            deeds.append(Deed("anchor", ("main", rng.randrange(last + 1))))
        elif kind == "fold":
            start, number = sorted(rng.sample(range(last + 1), 2))
            deeds.append(Deed("fold", ("main", start, number)))
        elif kind == "expire":
            deeds.append(Deed("expire", ("main", rng.choice([1, 1, 1, 2, 3]), rng.choice([None, None, 2, 3]))))
        else:
            deeds.append(Deed("gc", (rng.choice([0, 0, 1, 2]),)))
    return deeds


def naming(rng: Random, n: int, last: int) -> list[Deed]:
    """Return what somebody does who names versions, some of them as others do at the same time."""
    deeds: list[Deed] = []
    for _ in range(n):
        kind, number = rng.choice(["tag", "pin", "pin"]), rng.randrange(last + 1)
        name = rng.choice([f"same{number}", f"own{rng.randrange(1000)}"])
        if kind == "tag":
            deeds.append(Deed("tag", ("main", number, name)))
        else:
            deeds.append(Deed("pin", ("main", number, name, rng.choice([None, None, 0.5, 3.0]))))
        if rng.random() < 0.3 and name.startswith("own"):
            deeds.append(Deed("untag", ("main", name)) if kind == "tag" else Deed("unpin", (name,)))
    return deeds


def reading(rng: Random, n: int, last: int, lines: list[str]) -> list[Deed]:
    """Return what somebody does who reads versions, whole or in part, and walks along the history."""
    deeds = []
    for _ in range(n):
        line, number = rng.choice(lines), rng.randrange(last + 1)
        if rng.random() < 0.2:
            deeds.append(Deed("walk", (line, number)))
            continue
        low, high = sorted((rng.randrange(110), rng.randrange(110)))
        parts = rng.choice([None, {"a": slice(low, high)}, {"b": slice(low // 3, high // 3), "a": None}])
        deeds.append(Deed("read", (line, number, parts)))
    return deeds
