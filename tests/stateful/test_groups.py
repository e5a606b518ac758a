"""Members of a group against a model of what may be decided: crashes, sleepers, late and doubled acknowledgements, lost
answers, members dropped and admitted again, several that decide at once.

What is promoted is judged by a replay of the raw records that shares no code with the package, and by what members
really prepared. Processes are `Member` objects, each with a port of its own that misbehaves as it is told.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from group_replay import replay
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from log_records import STORE_SHA256, Writer, holding_store
from stateful.machines import machine
from watched import Watched

from dcr_store.errors import ConflictError, FencedError, OutcomeUnknownError, StorageError
from dcr_store.format.documents import StoreDocument
from dcr_store.format.groups import Ack, GroupVersion, Policy, VersionRoot
from dcr_store.log.group import GroupLog
from dcr_store.objects.open import open_objects
from dcr_store.ports import Bytes, ObjectStore
from dcr_store.receive.member import Member, Wanted
from dcr_store.versions.catalog import Catalog

NAMES = ("a", "b", "c")
DROP_AFTER_S = 10
WEIGHTS = {
    "go on": 6,
    "all go on": 4,
    "act": 5,
    "publish": 3,
    "start": 2,
    "crash": 2,
    "misbehave": 2,
    "both at once": 3,
    "dropped meanwhile": 1,
    "started meanwhile": 1,
    "again": 1,
    "wait": 1,
    "land": 2,
    "foreign": 1,
    "drop": 1,
    "admit": 1,
    "withdraw": 1,
    "propose": 3,
}
indices = st.integers(0, 11)
acts = st.sampled_from(["all", "all", "all", "step", "prepare", "apply", "promote"])


class Port(Watched):
    """A process's way to the store. ``faults`` are struck one at a conditional put."""

    def __init__(self, inner: ObjectStore, late: list[Callable[[], bool]]) -> None:
        super().__init__(inner)
        self.faults: list[str] = []
        self.intrusion: Callable[[], None] | None = None  # what happens just before the next put to a log
        self._late = late

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        if "/log/" in key and self.intrusion is not None:
            intrusion, self.intrusion = self.intrusion, None
            intrusion()
        fault = self.faults.pop() if self.faults else None
        if fault == "refused":
            raise StorageError("refused", key=key)
        if fault == "late":
            self._late.append(lambda: self.inner.put_if_absent(key, data))
        elif fault == "answer lost":
            self.inner.put_if_absent(key, data)
        if fault is not None:
            raise OutcomeUnknownError("no answer", key=key)
        return self.inner.put_if_absent(key, data)


class Process:
    """A receiver's process: at most what a receiver does, at any time."""

    def __init__(self, machine: GroupMachine, name: str) -> None:
        self._machine = machine
        self.port = Port(machine.objects, machine.late)
        catalog = Catalog(self.port, StoreDocument("0" * 32, "dcr.delta", 8, "2026-01-01T00:00:00Z"), STORE_SHA256)
        self.member = Member(catalog, "eu", name, clock=lambda: machine.now_s)
        self.wanted = Wanted(None, None)
        self.is_over = False
        self.n_seen = 0

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        """What the machine did to us is no failure; being fenced is the end."""
        try:
            yield
        except FencedError:
            self.is_over = True
        except (OutcomeUnknownError, StorageError):
            pass

    def join(self) -> None:
        with self._acting():
            self.member.join()

    def step(self) -> None:
        with self._acting():
            self.wanted = self.member.step()

    def prepare(self) -> None:
        version = self.wanted.prepare
        if version is not None:
            self._machine.prepared.add((self.member.incarnation, version.proposal))
            with self._acting():
                self.member.prepared(version, None, version.root)

    def apply(self) -> None:
        version = self.wanted.apply
        if version is not None:
            self._machine.replay()  # in the middle of what another one does, too
            assert version in self._machine.promoted, "applied before it was active"
            with self._acting():
                self.member.applied(version, version.root)

    def promote(self) -> None:
        with self._acting():
            self.member.try_promote()

    def all(self) -> None:
        for act in (self.step, self.apply, self.prepare, self.promote, self.step):
            if not self.is_over:
                act()


class GroupMachine(RuleBasedStateMachine):
    """One line, one group, as many processes as hypothesis likes."""

    @initialize(
        expected=st.sampled_from([("a", "b"), ("a",), ("a", "b", "c"), ()]),
        admission=st.sampled_from(["expected", "anyone"]),
        proposing=st.sampled_from(["newest", "newest", "manual"]),
        drop_after_s=st.sampled_from([None, DROP_AFTER_S]),
        n_absent=st.integers(0, 1),
    )
    def start(
        self, expected: tuple[str, ...], admission: str, proposing: str, drop_after_s: int | None, n_absent: int
    ) -> None:
        self.objects = holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store"))
        self.line = Writer(self.objects)
        self.late: list[Callable[[], bool]] = []
        self.now_s = 0.0
        self.everybody: list[Process] = []
        self.prepared: set[tuple[str, int]] = set()
        self.promoted: list[GroupVersion] = []
        self.operator = GroupLog(self.objects, "eu", STORE_SHA256)
        self.operator.create("main", expected, Policy(admission, proposing, drop_after_s))
        self.line.versions(1)
        for name in expected[n_absent:]:
            self.start_a_process(name)

    # ------------------------------------------------------------------ processes

    def start_a_process(self, name: str) -> None:
        process = Process(self, name)
        try:
            process.join()
            self.everybody.append(process)
        except ConflictError:
            assert not self.operator.refresh().may_admit_itself(name)

    # One rule draws among all kinds by weight: hypothesis leaves out half of the rules of most runs, and then nothing
    # is ever promoted in them.
    @rule(
        kind=st.sampled_from([kind for kind, weight in WEIGHTS.items() for _ in range(weight)]),
        index=indices,
        other=indices,
        act=acts,
        name=st.sampled_from(NAMES),
        faults=st.lists(st.sampled_from(["late", "answer lost", "never", "refused"]), max_size=3),
    )
    def turn(self, kind: str, index: int, other: int, act: str, name: str, faults: list[str]) -> None:
        """Something happens."""
        alive = [process for process in self.everybody if not process.is_over]
        if kind == "publish":
            self.line.versions(1)
        elif kind == "wait":
            self.now_s += (1, DROP_AFTER_S)[index % 2]
        elif kind in ("drop", "admit", "withdraw", "propose"):
            self.operate(kind, name, index)
        elif kind == "start":
            self.start_a_process(name)  # the earlier incarnation of the name, if there is one, may sleep
        elif kind == "land" and self.late:
            self.late.pop(index % len(self.late))()
        elif kind == "foreign":
            self.acknowledge_wrongly(index, other)
        elif alive:
            process, second = alive[index % len(alive)], alive[other % len(alive)]
            if kind == "go on":
                process.all()
            elif kind == "all go on":
                for each in alive[index % len(alive) :] + alive[: index % len(alive)]:
                    each.all()
            elif kind == "act":
                getattr(process, act)()
            elif kind == "crash":
                self.everybody.remove(process)
                if other % 3:
                    self.start_a_process(process.member.name)
            elif kind == "misbehave":
                process.port.faults = faults
            elif kind == "again":
                self.propose_the_same_again(process)
            elif kind == "both at once" and process is not second:
                self.interrupt(process, getattr(second, act))
            elif kind == "dropped meanwhile":
                self.interrupt(process, lambda: self.operate("drop", name, 0))
            elif kind == "started meanwhile":
                self.interrupt(process, lambda: self.start_a_process(name))

    def interrupt(self, process: Process, intrusion: Callable[[], None]) -> None:
        """Let something happen between what a process read and what it puts."""
        process.port.intrusion = intrusion
        process.all()
        process.port.intrusion = None

    def operate(self, what: str, name: str, index: int) -> None:
        """Let an operator act by hand."""
        row = self.line.state.rows[index % len(self.line.state.rows)]
        with contextlib.suppress(ConflictError):
            if what == "drop":
                self.operator.drop(name, "by hand")
            elif what == "admit":
                self.operator.admit(name)
            elif what == "withdraw":
                self.operator.withdraw("by hand")
            else:
                self.operator.propose(VersionRoot(f"main@{row.version}", row.root))

    def propose_the_same_again(self, process: Process) -> None:
        """What members have prepared for the proposal before does not count for this one."""
        process.step()
        process.prepare()
        proposed = self.operator.refresh().proposed
        if proposed is not None:
            self.operator.withdraw("by hand")
            self.operator.propose(proposed.ref)

    def acknowledge_wrongly(self, index: int, how: int) -> None:
        """Somebody says again, or something else than, what a process said."""
        keys = sorted(self.objects.list("groups/eu/acks/"))
        if not keys:
            return
        ack = Ack.from_bytes(self.objects.get(keys[index % len(keys)]), "ack")
        subject, proposed = ack.subject, self.operator.refresh().proposed
        changes: list[dict[str, Any]] = [
            {},
            {"name": "d"},
            {"incarnation": "0" * 16},
            {"subject": GroupVersion(subject.version, "0" * 64, subject.proposal)},
            {"subject": subject if proposed is None else replace(subject, version=proposed.version)},
        ]
        other = replace(ack, **changes[how % len(changes)])
        self.objects.put_if_absent(other.key, other.to_bytes())

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "objects"):
            self.replay()
            self.nobody_sees_another_active_version()
            self.reading_from_the_checkpoint_tells_the_same()

    def replay(self) -> None:
        """What is promoted was prepared by all who were members then; what is decided stays."""
        found = replay(self.objects, "eu", self.prepared)
        promoted = [GroupVersion(*proposal) for proposal in found.promoted]
        assert promoted[: len(self.promoted)] == self.promoted
        self.promoted, self.members = promoted, found.members

    def nobody_sees_another_active_version(self) -> None:
        for process in self.everybody:
            active = process.member.active
            if active is not None:
                assert active in self.promoted[max(0, process.n_seen - 1) :], "it went back, or was never promoted"
                process.n_seen = self.promoted.index(active, max(0, process.n_seen - 1)) + 1

    def reading_from_the_checkpoint_tells_the_same(self) -> None:
        log = GroupLog(self.objects, "eu", STORE_SHA256)
        state = log.refresh()
        assert dict(state.members) == self.members
        assert state.active == (self.promoted[-1] if self.promoted else None)

    def teardown(self) -> None:
        """Faults stop: the newest version gets promoted and applied by everybody who is there."""
        if not hasattr(self, "objects"):
            return
        for land in self.late:
            land()
        for process in self.everybody:
            process.port.faults.clear()
            if not process.is_over:
                process.step()
        state = self.operator.refresh()
        there = {process.member.incarnation for process in self.everybody if not process.is_over}
        for name in sorted({*state.awaited, *(name for name, found in state.members.items() if found not in there)}):
            self.operator.drop(name, "it crashed")
        if not self.operator.state.members:
            self.operator.admit("a")
            process = Process(self, "a")
            process.join()
            self.everybody.append(process)
        self.line.versions(1)
        newest = self.line.state.head
        assert newest is not None
        goal = f"main@{newest.version}"
        for _ in range(4):
            if self.operator.refresh().policy.proposing == "manual" and self.operator.state.proposed is None:
                with contextlib.suppress(ConflictError):
                    self.operator.propose(VersionRoot(goal, newest.root))
            for _ in range(2):
                for process in self.everybody:
                    if not process.is_over:
                        process.all()
        self.all_is_well()
        assert self.promoted
        assert self.promoted[-1].version == goal, "no progress"
        for process in self.everybody:
            if not process.is_over:
                process.all()
                assert process.member.all_applied()


TestGroups = GroupMachine.TestCase
TestGroups.settings = machine(30, 30)
