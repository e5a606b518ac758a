"""Groups in the simulation: the judge of a group's log, what its members do, what an operator does to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.actors import let_pass
from sim.process import ENVIRONMENT
from sim.scheduler import ViolationError

from dcr_store.errors import ConflictError, DcrError, FencedError
from dcr_store.format.groups import GroupVersion, Policy, VersionRoot
from dcr_store.log.group import GroupLog
from dcr_store.receive.member import Member

if TYPE_CHECKING:
    from sim.disk import Disk
    from sim.scheduler import Actor
    from sim.world import Role, World

    from dcr_store.store import Store


@dataclass
class GroupFold:
    """A group's log, as the spec says that it folds (docs/spec/v1.md §12), against what members have really done.

    Attributes
    ----------
    prepared : set
        Name, incarnation, version, proposal of all that members could have applied at once.
    """

    last_sha256: str
    length: int = 0
    expected: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    members: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str | None] = field(default_factory=dict)
    proposed: tuple[str, str, int] | None = None
    actives: list[tuple[str, str, int]] = field(default_factory=list)
    prepared: set[tuple[str, str, str, int]] = field(default_factory=set)

    def advance(self, seq: int, data: bytes) -> None:
        """Fold one record; ``ViolationError`` if it is illegal."""
        record: dict[str, Any] = json.loads(data)
        where, kind = f"group record {seq} ({record['kind']})", record["kind"]
        _require(seq == self.length == record["seq"], f"{where}: the log has {self.length} records")
        _require(record["prev"] == self.last_sha256, f"{where} does not follow the one before")
        if kind == "create":
            _require(seq == 0, f"{where}: it exists")
            self.expected = set(record["expected"])
            self.awaited = set(self.expected)
        elif kind == "admit":
            self._admit(where, record)
        elif kind == "drop":
            name = record["name"]
            _require(name in self.members or name in self.awaited, f"{where}: {name} is no member")
            _require(record["incarnation"] == self.members.get(name), f"{where}: of another incarnation")
            self.members.pop(name, None)
            self.awaited.discard(name)
            self.dropped[name] = record["incarnation"]
        elif kind == "propose":
            _require(self.proposed is None, f"{where}: a proposal stands")
            self.proposed = record["new"]["version"], record["new"]["root"], seq
        elif kind == "withdraw":
            _require(self.proposed is not None, f"{where}: no proposal stands")
            self.proposed = None
        else:
            self._promote(where, record)
        self.length += 1
        self.last_sha256 = hashlib.sha256(data).hexdigest()

    def _admit(self, where: str, record: dict[str, Any]) -> None:
        name, incarnation = record["name"], record["incarnation"]
        if incarnation is None:
            self.expected.add(name)
            return
        _require(name in self.expected, f"{where}: {name} is not expected")
        _require(self.dropped.get(name) != incarnation, f"{where}: this incarnation was dropped")
        if name in self.members:
            self.dropped[name] = self.members[name]
        self.members[name] = incarnation
        self.awaited.discard(name)

    def _promote(self, where: str, record: dict[str, Any]) -> None:
        _require(self.proposed is not None, f"{where}: no proposal stands")
        assert self.proposed is not None
        version, root, proposal = self.proposed
        _require((record["new"]["version"], record["new"]["root"]) == (version, root), f"{where}: of another version")
        old = record["old"] and (record["old"]["version"], record["old"]["root"])
        _require(old == (self.actives[-1][:2] if self.actives else None), f"{where}: another version was active")
        _require(not self.awaited, f"{where}: {self.awaited} have not been admitted")
        _require(bool(self.members), f"{where}: nobody is a member")
        for name, incarnation in self.members.items():
            _require(
                (name, incarnation, version, proposal) in self.prepared,
                f"{where}: {name} in its last incarnation has not prepared {version}",
            )
        self.actives.append(self.proposed)
        self.proposed = None


class Group:
    """A group of a world, and the judge of it."""

    name = "eu"

    def __init__(self, world: World, names: list[str], policy: Policy) -> None:
        GroupLog(world.plain(), self.name, world.sha256).create("main", names, policy)
        self.judge, self.fold = world.judge, GroupFold(world.sha256)
        for key, data in sorted(world.bucket.objects.items()):
            if key.startswith(f"groups/{self.name}/log/"):
                self.fold.advance(self.fold.length, data)
        world.judge.on_group_record = lambda group, seq, data: self.fold.advance(seq, data)

    def watch(self, member: Member, host: Callable[[], Disk | None] = lambda: None) -> None:
        """Note what a member prepares, before it says so: from there on it could apply it.

        Parameters
        ----------
        host : callable
            Returns where its directory is, by which that is checked; None if it has none for itself.
        """
        acknowledge = member.prepared

        def prepared(version: GroupVersion, base_root: str | None, root: str) -> None:
            disk = host()
            if disk is not None:
                self.judge.require_prepared(disk, version.number)
            self.fold.prepared.add((member.name, member.incarnation, version.version, version.proposal))
            acknowledge(version, base_root, root)

        member.prepared = prepared  # type: ignore[method-assign]
        member._clock = ENVIRONMENT.monotonic

    def applied(self, version: str) -> None:
        """Check a version that a member has applied."""
        _require(
            any(active[0] == version for active in self.fold.actives), f"{version} is applied, and was never promoted"
        )

    def seen(self, version: GroupVersion) -> None:
        """Check a version that is shown to a member as active."""
        _require(
            (version.version, version.root, version.proposal) in self.fold.actives,
            f"{version.version} is shown as active, and was never promoted",
        )


def member(group: Group, last: int) -> Callable[[World, Role, Actor], None]:
    """Return what a member does that moves no bits, until it has said that it applied ``main@last``."""

    def act(world: World, role: Role, actor: Actor) -> None:
        store = world.store(actor)
        me: Member | None = None
        n_idle, length = 0, -1
        while True:
            try:
                if me is None:
                    me = Member(store._catalog, group.name, role.name)
                    group.watch(me)
                    me.join()
                if _take_a_turn(world, group, me) == last:
                    return
            except FencedError:
                world.count("member fenced")
                if role.has_successor(actor):
                    return
                me = None
            except ConflictError:
                pass
            except DcrError as error:
                let_pass(error)
                if me is not None and me.incarnation != group.fold.members.get(role.name):
                    me = None
            n_idle, length = n_idle + 1 if length == group.fold.length else 0, group.fold.length
            world.scheduler.sleep(world.rng.uniform(0.05, 0.4) * (1 + min(n_idle, 3)))

    return act


def _take_a_turn(world: World, group: Group, me: Member) -> int | None:
    """Do what is to be done; return the number of the active version once it is applied."""
    wanted = me.step()
    if wanted.apply is not None:
        group.seen(wanted.apply)
        me.applied(wanted.apply, me.located(wanted.apply).row.root)
    if wanted.prepare is not None:
        me.prepared(wanted.prepare, None, me.located(wanted.prepare).row.root)
    if me.try_promote():
        world.count("promoted")
    if wanted.prepare is None and wanted.apply is None and me.active is not None and me.state.proposed is None:
        group.seen(me.active)
        if me.all_applied():
            world.count("all applied")
        return me.active.number
    return None


def operator(group: Group, names: list[str], last: int, n_acts: int) -> Callable[[World, Role, Actor], None]:
    """Return what an operator does: some acts at random, then what it takes for ``main@last`` to become active.

    A group that is taken back by hand stays where it is. So the operator stays as long as a request is on its way: it
    may be his own, for another version, of which he has heard nothing.
    """

    def act(world: World, role: Role, actor: Actor) -> None:
        store, left = world.store(actor), n_acts
        log = GroupLog(store._objects, group.name, world.sha256)
        while True:
            world.scheduler.sleep(world.rng.uniform(0.1, 1.0))
            try:
                if left > 0:
                    left -= 1
                    _interfere(world, store, log, names, last)
                elif _finish(world, store, log, last) and not world.bucket.late:
                    return
            except ConflictError:
                pass
            except DcrError as error:
                let_pass(error)

    return act


def _interfere(world: World, store: Store, log: GroupLog, names: list[str], last: int) -> None:
    act = world.rng.choice(["drop", "withdraw", "propose", "propose", "admit"])
    state = log.refresh()
    if act == "drop":
        log.drop(world.rng.choice(names), "by hand")
    elif act == "withdraw" and state.proposed is not None:
        log.withdraw("by hand", version=state.proposed.version)
    elif act == "admit":
        log.admit(world.rng.choice(names))
    elif act == "propose":
        _propose(store, log, world.rng.randint(0, last))
    world.count(f"operator: {act}")


def _finish(world: World, store: Store, log: GroupLog, last: int) -> bool:
    state = log.refresh()
    if state.active is not None and state.active.number == last and state.proposed is None:
        return True
    if state.proposed is None and (state.active is None or state.active.number != last):
        _propose(store, log, last)
    elif state.proposed is not None and state.proposed.number != last:
        log.withdraw("another one is wanted", version=state.proposed.version)
    return False


def _propose(store: Store, log: GroupLog, number: int) -> None:
    located = store._catalog.resolve(f"main@{number}")
    log.propose(VersionRoot(located.name, located.row.root))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ViolationError(message)
