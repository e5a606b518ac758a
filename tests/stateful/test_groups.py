"""Members of a group against a model of what may be decided: crashes, sleepers, late and doubled acknowledgements, lost
answers, members dropped and admitted again, several that decide at once.

What is promoted is judged by a replay of the raw records that shares no code with the package, and by what members
really prepared. Processes are `Member` objects, each with a port of its own that misbehaves as it is told.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from log_records import STORE_SHA256, Writer
from watched import Watched

from dcr_store.errors import ConflictError, FencedError, OutcomeUnknownError, StorageError
from dcr_store.format.groups import Ack, GroupVersion, Policy, VersionRoot
from dcr_store.log.group import GroupLog
from dcr_store.objects.open import open_objects
from dcr_store.ports import Bytes, ObjectStore
from dcr_store.receive.member import Member, Wanted
from dcr_store.versions.catalog import Catalog

NAMES = ("a", "b", "c")
DROP_AFTER_S = 10


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
        catalog = Catalog(self.port, None, STORE_SHA256)  # type: ignore[arg-type]
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
    """One line, one group, up to as many processes as hypothesis likes."""

    processes: Bundle[Process] = Bundle("processes")

    @initialize(
        target=processes,
        expected=st.sampled_from([("a", "b"), ("a", "b"), ("a",), ("a", "b", "c"), ()]),
        admission=st.sampled_from(["expected", "anyone"]),
        proposing=st.sampled_from(["newest", "newest", "manual"]),
        drop_after_s=st.sampled_from([None, DROP_AFTER_S]),
        n_there=st.sampled_from([3, 3, 3, 1, 0]),
    )
    def start(
        self, expected: tuple[str, ...], admission: str, proposing: str, drop_after_s: int | None, n_there: int
    ) -> Any:
        self.objects = open_objects(f"memory://{secrets.token_hex(8)}/store")
        self.line = Writer(self.objects)
        self.late: list[Callable[[], bool]] = []
        self.now_s = 0.0
        self.everybody: list[Process] = []
        self.prepared: set[tuple[str, int]] = set()
        self.promoted: list[GroupVersion] = []
        self.operator = GroupLog(self.objects, "eu", STORE_SHA256)
        self.operator.create("main", expected, Policy(admission, proposing, drop_after_s))
        self.line.versions(1)
        there = [Process(self, name) for name in expected[:n_there]]
        for process in there:
            process.join()
            self.everybody.append(process)
        return multiple(*there)

    # ------------------------------------------------------------------ processes

    @rule(target=processes, name=st.sampled_from(NAMES))
    def start_another(self, name: str) -> Any:
        return self.start_a_process(name)

    def start_a_process(self, name: str) -> Any:
        process = Process(self, name)
        try:
            process.join()
        except ConflictError:
            assert not self.operator.refresh().may_admit_itself(name)
            return multiple()
        self.everybody.append(process)
        return process

    @rule(target=processes, process=processes)
    def start_again(self, process: Process) -> Any:
        """The earlier incarnation may be dead, or sleep."""
        return self.start_a_process(process.member.name)

    @rule(process=consumes(processes))
    def crash(self, process: Process) -> None:
        self.everybody.remove(process)

    @rule(process=processes)
    def go_on(self, process: Process) -> None:
        if not process.is_over:
            process.all()

    @rule(process=processes, act=st.sampled_from(["step", "prepare", "apply", "promote"]))
    def one_act(self, process: Process, act: str) -> None:
        if not process.is_over:
            getattr(process, act)()

    @rule(process=processes, other=processes, act=st.sampled_from(["step", "prepare", "promote", "all"]))
    def both_at_once(self, process: Process, other: Process, act: str) -> None:
        """`other` acts between what `process` read and what it puts."""
        if process is other or process.is_over or other.is_over:
            return
        process.port.intrusion = getattr(other, act)
        process.all()
        process.port.intrusion = None

    @rule(process=processes, name=st.sampled_from(NAMES))
    def an_operator_drops_at_the_same_time(self, process: Process, name: str) -> None:
        if not process.is_over:
            process.port.intrusion = lambda: self.operate("drop", name, 0)
            process.all()
            process.port.intrusion = None

    @rule(process=processes, faults=st.lists(st.sampled_from(["late", "answer lost", "never", "refused"]), max_size=3))
    def misbehave(self, process: Process, faults: list[str]) -> None:
        process.port.faults = faults

    # ------------------------------------------------------------------ the world

    @rule()
    def publish(self) -> None:
        self.line.versions(1)

    @rule(
        what=st.sampled_from(["drop", "admit", "withdraw", "propose"]), name=st.sampled_from(NAMES), n=st.integers(0, 3)
    )
    def operate(self, what: str, name: str, n: int) -> None:
        head = self.line.state.head
        assert head is not None
        row = self.line.state.rows[n % len(self.line.state.rows)]
        with contextlib.suppress(ConflictError):
            if what == "drop":
                self.operator.drop(name, "by hand")
            elif what == "admit":
                self.operator.admit(name)
            elif what == "withdraw":
                self.operator.withdraw("by hand")
            else:
                self.operator.propose(VersionRoot(f"main@{row.version}", row.root))

    @rule()
    def the_same_is_proposed_again(self) -> None:
        """What members have prepared for the proposal before does not count for this one."""
        proposed = self.operator.refresh().proposed
        if proposed is not None:
            self.operator.withdraw("by hand")
            self.operator.propose(proposed.ref)

    @rule(seconds=st.sampled_from([1, DROP_AFTER_S]))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(data=st.data())
    def a_late_put_lands(self, data: st.DataObject) -> None:
        if self.late:
            self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))()

    @rule(data=st.data(), change=st.sampled_from(["none", "root", "proposal", "incarnation", "kind", "name"]))
    def a_foreign_acknowledgement(self, data: st.DataObject, change: str) -> None:
        """Somebody says again, or something else than, what a process said."""
        keys = sorted(key for key in self.objects.list("groups/eu/acks/"))
        if not keys:
            return
        ack = Ack.from_bytes(self.objects.get(keys[data.draw(st.integers(0, len(keys) - 1))]), "ack")
        subject, proposed = ack.subject, self.operator.refresh().proposed
        if change == "root":
            subject = GroupVersion(subject.version, "0" * 64, subject.proposal)
        elif change == "proposal" and proposed is not None:
            subject = GroupVersion(proposed.version, proposed.root, subject.proposal)
        other = Ack(
            "applied" if change == "kind" else ack.kind,
            "eu",
            "d" if change == "name" else ack.name,
            "0" * 16 if change == "incarnation" else ack.incarnation,
            subject,
        )
        if change in ("none", "name", "incarnation", "proposal", "root"):
            self.objects.put_if_absent(other.key, other.to_bytes())

    # ------------------------------------------------------------------ what has to hold

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "objects"):
            self.replay()
            self.nobody_sees_another_active_version()
            self.reading_from_the_checkpoint_tells_the_same()

    def replay(self) -> None:
        """Replay the raw records: what is promoted was prepared by all who were members then."""
        members: dict[str, str] = {}
        awaited: set[str] = set()
        dropped: set[str] = set()
        proposed: GroupVersion | None = None
        active: dict[str, Any] | None = None
        promoted = []
        for key in sorted(key for key in self.objects.list("groups/eu/log/") if not key.endswith("latest.json")):
            record = json.loads(self.objects.get(key))
            kind = record["kind"]
            if kind == "create":
                awaited = set(record["expected"])
            elif kind == "admit" and record["incarnation"]:
                assert record["incarnation"] not in dropped, "a dropped incarnation came back"
                members[record["name"]] = record["incarnation"]
                awaited.discard(record["name"])
            elif kind == "drop":
                dropped.add(members.pop(record["name"], ""))
                awaited.discard(record["name"])
            elif kind == "propose":
                assert proposed is None
                proposed = GroupVersion(**record["new"], proposal=record["seq"])
            elif kind == "withdraw":
                proposed = None
            elif kind == "promote":
                assert proposed is not None
                assert not awaited, "promoted before all expected members had come"
                assert members, "promoted for nobody"
                assert record["new"] == {"version": proposed.version, "root": proposed.root}
                assert record["old"] == active
                for name, incarnation in members.items():
                    assert (incarnation, proposed.proposal) in self.prepared, f"{name} has not prepared {proposed}"
                promoted.append(proposed)
                active, proposed = record["new"], None
        assert promoted[: len(self.promoted)] == self.promoted
        self.promoted = promoted
        self.members = members

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
TestGroups.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
