"""The history of a store against a dict of full states: publishes, forks, tags, pins, anchors, folds, expiries,
collections, groups, transactions that stay open, and processes that die inside each of them.

Whatever happens, each version that is kept reads back bit for bit, whole, in part and on walks; one that is not says
that it has expired; and what lies in the store is what the log leads to.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from stateful.machines import machine
from states import assert_same, raw, write_hf
from upkeep import KilledError, Mortal, edges_that_lead_on, facts, require_no_waste, through

import dcr_store
from dcr_store.errors import ConflictError, InvalidInputError, NotFoundError
from dcr_store.layout import slices
from dcr_store.publish import opening, partitions
from dcr_store.publish.transaction import Transaction
from dcr_store.receive.member import Member
from dcr_store.store import Store

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {"a": ("BF16", (5, 61)), "b": ("F32", (9, 20)), "c": ("I8", (70,)), "d": ("F32", ())}
OTHER = {**SHAPES, "c": ("I8", (7, 3)), "e": ("BF16", (40,))}
NUMPY = {"BF16": BF16, "F32": np.dtype("<f4"), "I8": np.dtype("i1")}
WRITERS = ("w0", "w1")
DAY_S = 86400
State = dict[str, np.ndarray[Any, Any]]
WEIGHTS = {
    "publish": 6,
    "publish jointly": 4,
    "open": 1,
    "end": 2,
    "fork": 2,
    "tag": 2,
    "untag": 1,
    "pin": 2,
    "unpin": 1,
    "decide": 2,
    "anchor": 3,
    "fold": 4,
    "expire": 5,
    "gc": 4,
    "wait": 1,
    "read": 3,
    "walk": 2,
    "diff": 1,
    "load": 1,
    "reopen": 1,
    "die": 8,
}
MORTAL = ("publish", "fork", "tag", "untag", "pin", "unpin", "anchor", "fold", "expire", "expire", "gc")


@dataclass(eq=False)
class Version:
    """A version as the model knows it; forks hold the same object as their parents."""

    line: str
    number: int
    state: State
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    expired: bool = False

    @property
    def name(self) -> str:
        return f"{self.line}@{self.number}"


def changed(state: State, rng: np.random.Generator) -> State:
    found, rate = {}, float(rng.choice([0.0, 0.003, 0.05, 1.0], p=[0.1, 0.4, 0.4, 0.1]))
    for name, array in state.items():
        octets = np.frombuffer(raw(array), np.uint8).copy()
        hit = rng.random(octets.shape) < rate
        octets[hit] ^= rng.integers(1, 256, int(hit.sum()), dtype=np.uint8)
        if rng.random() < 0.05:
            octets[:] = 0
        found[name] = octets.view(array.dtype).reshape(array.shape)
    return found


def a_state(shapes: dict[str, tuple[str, tuple[int, ...]]], rng: np.random.Generator) -> State:
    return {
        name: np.frombuffer(rng.bytes(int(np.prod(shape)) * NUMPY[dtype].itemsize), NUMPY[dtype]).reshape(shape).copy()
        for name, (dtype, shape) in shapes.items()
    }


class HistoryMachine(RuleBasedStateMachine):
    """One store, as many processes as hypothesis likes."""

    @initialize(codec=st.sampled_from(["dcr.delta", "dcr.delta", "portable"]), seed=st.integers(0, 2**32 - 1))
    def make(self, codec: str, seed: int) -> None:
        self.small = patch.object(partitions, "PARTITION_NBYTES", 512)
        self.small.start()
        self.rng = np.random.default_rng(seed)
        self.store = dcr_store.create(f"memory://history-{secrets.token_hex(8)}", codec=codec, chunk_elements=64)
        self.lines: dict[str, list[Version]] = {"main": []}
        self.said: dict[tuple[str, str], Version] = {}  # by parent and child: what the parent's log says
        self.sources: dict[str, Version] = {}
        self.tags: dict[tuple[str, str], Version] = {}
        self.pins: dict[str, tuple[Version, bool]] = {}
        self.standing: list[Version] = []
        self.begun: dict[str, tuple[Transaction, Version]] = {}
        self.loaded: State | None = None
        self.joint = dcr_store.open(self.store.url)
        self.publish(self.store)
        self.store.create_group("g", ["a"], proposing="manual")
        self.member = Member(self.store._catalog, "g", "a")
        self.member.join()

    # ------------------------------------------------------------------ what a rule draws

    def a_line(self) -> str:
        return str(self.rng.choice(list(self.lines)))

    def a_version(self, *, kept: bool | None = None) -> tuple[str, Version] | None:
        """Return a version and the name of a line on which it is."""
        line = self.a_line()
        among = [item for item in self.lines[line] if kept is None or item.expired != kept]
        return (line, among[int(self.rng.integers(len(among)))]) if among else None

    def part_of(self, shape: tuple[int, ...]) -> Any:
        found: list[Any] = []
        for size in shape:
            start, stop = sorted(int(n) for n in self.rng.integers(0, size + 1, 2))
            which = int(self.rng.integers(4))
            found.append(
                [
                    slice(start, stop),
                    int(self.rng.integers(size)),
                    slice(None, None, int(self.rng.choice([-2, -1, 2]))),
                    slice(None),
                ][which]
            )
        return tuple(found[: int(self.rng.integers(len(found) + 1))]) if found else None

    # ------------------------------------------------------------------ the rule

    # One rule draws among all kinds by weight: hypothesis leaves out half of the rules of most runs.
    @rule(
        kind=st.sampled_from([kind for kind, weight in WEIGHTS.items() for _ in range(weight)]),
        seed=st.integers(0, 2**32 - 1),
    )
    def turn(self, kind: str, seed: int) -> None:
        """Something happens, then some version is read by a process that knows nothing."""
        self.rng = np.random.default_rng(seed)
        if kind == "die":
            self.die(str(self.rng.choice(MORTAL)))
        else:
            getattr(self, kind.replace(" ", "_"))(self.store)
        self.check(dcr_store.open(self.store.url), self.a_version())

    def die(self, kind: str) -> None:
        """Let a process die inside of something, before or after any request."""
        dying = Mortal(self.store._objects, int(self.rng.integers(1, 70)), after=bool(self.rng.integers(2)))
        store = through(self.store, dying)
        try:
            getattr(self, kind)(store)
        except KilledError:
            self.take_stock(kind)

    def take_stock(self, kind: str) -> None:
        """See what the dead process got done: that, all of it, or nothing."""
        self.store = dcr_store.open(self.store.url)
        opening.LIVE.intersection_update({transaction.txid for transaction, _ in self.begun.values()})
        lines = set(self.store.lines())
        if kind == "publish":
            line, version = self.trying
            n_known = len(self.lines[line])
            rows = self.store._catalog.rows(line) if self.store._catalog.log(line).refresh().head else []
            assert len(rows) in (n_known, n_known + 1)
            if len(rows) > n_known:
                self.lines[line].append(version)
        elif kind == "fork":
            parent, version, name = self.forking
            said = self.store._catalog.log(version.line).refresh().history.forks
            if any(item.child == name for item in said):
                self.said[version.line, name] = version
            if name in lines and name not in self.lines:
                self.sources[name] = version
                self.lines[name] = self.lines[parent][: version.number + 1]
        elif kind == "expire":
            line, expected = self.expiring
            expired = facts(self.store._objects, line).expired
            known = {item.number for item in self.lines[line] if item.line == line and item.expired}
            assert expired in (known, known | expected)
            for item in self.lines[line]:
                item.expired |= item.line == line and item.number in expired
        elif kind in ("tag", "untag", "pin", "unpin"):
            key, name, version = self.naming
            names: dict[Any, Any] = self.tags if key.startswith("tags/") else self.pins
            if self.store._objects.size(key) is None:
                names.pop(name, None)
            else:
                names.setdefault(name, version)

    # ------------------------------------------------------------------ publishing

    def next_version(self, line: str) -> Version:
        before = self.lines[line]
        shapes = before[-1].shapes if before else SHAPES
        if not before:
            state = a_state(shapes, self.rng)
        elif self.rng.random() < 0.12:
            shapes = OTHER if shapes is SHAPES else SHAPES
            fresh, old = a_state(shapes, self.rng), before[-1].state
            state = {n: old[n] if n in old and old[n].shape == fresh[n].shape else fresh[n] for n in fresh}
        else:
            state = changed(before[-1].state, self.rng)
        return Version(line, len(before), state, shapes)

    def publish(self, store: Store) -> None:
        line = self.a_line()
        if line in self.begun:
            return
        self.trying = line, self.next_version(line)
        with store.begin(line, owner="run") as transaction:
            if self.rng.random() < 0.2:
                with tempfile.TemporaryDirectory() as directory:
                    files = write_hf(Path(directory) / "run", self.trying[1].state, step=int(self.rng.integers(2)))
                    transaction.write_checkpoint(files)
            else:
                for name, array in self.trying[1].state.items():
                    transaction.write(name, array)
            transaction.commit()
        self.lines[line].append(self.trying[1])

    def publish_jointly(self, store: Store) -> None:
        """Two writers, of whom each has the half of each tensor, as slices or as residual."""
        line = self.a_line()
        if line in self.begun:
            return
        version = self.next_version(line)
        first = store.begin(line, owner="run", writers=WRITERS, tensors=version.shapes)
        second = self.joint.join(first.txid, line=line, writer="w1", timeout_s=5)
        for name, (dtype, shape) in version.shapes.items():
            flat = version.state[name].reshape(-1)
            cut = int(self.rng.integers(len(flat) + 1))
            for transaction, start, stop in ((first, 0, cut), (second, cut, len(flat))):
                if self.rng.random() < 0.5:
                    transaction.write_residual(name, flat[start:stop], start)
                else:
                    transaction.write_slice(flat[start:stop], slices.flat_part(name, dtype, shape, start, stop))
        second.seal()
        first.commit(timeout_s=5)
        second.commit(timeout_s=5)
        self.lines[line].append(version)

    def open(self, store: Store) -> None:
        line = self.a_line()
        if line not in self.begun:
            version = self.next_version(line)
            transaction = store.begin(line, owner="run")
            for name in list(version.state)[:2]:
                transaction.write(name, version.state[name])
            self.begun[line] = transaction, version

    def end(self, store: Store) -> None:
        if self.begun:
            line = str(self.rng.choice(list(self.begun)))
            transaction, version = self.begun.pop(line)
            if self.rng.random() < 0.3:
                transaction.abort()
                return
            for name in list(version.state)[2:]:
                transaction.write(name, version.state[name])
            transaction.commit()
            self.lines[line].append(version)

    # ------------------------------------------------------------------ names

    def fork(self, store: Store) -> None:
        drawn = self.a_version()
        if drawn is None or (drawn[1].number == len(self.lines[drawn[0]]) - 1 and drawn[0] in self.begun):
            return
        (parent, version), name = drawn, f"f{self.rng.integers(4)}"
        self.forking = parent, version, name
        reference = f"{parent}@{version.number}"
        if (
            self.said.get((version.line, name), version) is not version
            or self.sources.get(name, version) is not version
        ):
            with pytest.raises((ConflictError, NotFoundError)):
                store.fork(reference, name)
            return
        if version.expired:
            with pytest.raises(NotFoundError, match="expired"):
                store.fork(reference, name)
            return
        assert store.fork(reference, name) == f"{name}@{version.number}"
        self.said[version.line, name] = self.sources[name] = version
        self.lines.setdefault(name, self.lines[parent][: version.number + 1])

    def tag(self, store: Store) -> None:
        drawn = self.a_version()
        if drawn is None:
            return
        (line, version), name = drawn, str(self.rng.choice(["best", "v1"]))
        self.naming = f"tags/{line}/{name}.json", (line, name), version
        self.name(lambda: store.tag(f"{line}@{version.number}", name), self.tags.get((line, name)), version)
        if not version.expired and not self.is_about_to_expire(version):
            self.tags.setdefault((line, name), version)

    def pin(self, store: Store) -> None:
        drawn = self.a_version()
        if drawn is None:
            return
        (line, version), name = drawn, str(self.rng.choice(["p", "q"]))
        days = [None, 1, -1][int(self.rng.integers(3))]
        until = None if days is None else datetime.now(UTC) + timedelta(days=days)
        self.naming = f"pins/{name}.json", name, (version, days != -1)
        if name in self.pins:
            return
        self.name(lambda: store.pin(f"{line}@{version.number}", name, until=until), None, version)
        if not version.expired and not self.is_about_to_expire(version):
            self.pins[name] = version, days != -1

    def name(self, act: Callable[[], object], held: Version | None, version: Version) -> None:
        if version.expired:
            with pytest.raises(NotFoundError, match="expired"):
                act()
        elif (held is not None and held is not version) or self.is_about_to_expire(version):
            with pytest.raises(ConflictError):
                act()
        else:
            act()

    def is_about_to_expire(self, version: Version) -> bool:
        """Whether a killed expiry has left word of it, by which it may be going on for all that others know."""
        works = self.store._catalog.log(version.line).refresh().history.works
        return any(work.purpose == "expire" and version.number in work.versions for work in works)

    def untag(self, store: Store) -> None:
        if self.tags:
            line, name = list(self.tags)[int(self.rng.integers(len(self.tags)))]
            self.naming = f"tags/{line}/{name}.json", (line, name), self.tags[line, name]
            store.delete_tag(line, name)
            del self.tags[line, name]

    def unpin(self, store: Store) -> None:
        if self.pins:
            name = str(self.rng.choice(list(self.pins)))
            self.naming = f"pins/{name}.json", name, self.pins[name]
            store.delete_pin(name)
            del self.pins[name]

    def decide(self, store: Store) -> None:
        """A group proposes a version, and mostly promotes it."""
        versions = self.lines["main"]
        version = versions[int(self.rng.integers(len(versions)))]
        if version.expired:
            with pytest.raises((NotFoundError, ConflictError)):
                store.group("g").propose(version.name)
            return
        with contextlib.suppress(ConflictError):
            store.group("g").propose(version.name)
        wanted = self.member.step().prepare
        if wanted is not None and self.is_about_to_expire(versions[int(wanted.version.rpartition("@")[2])]):
            with pytest.raises(ConflictError, match="about to expire"):
                self.member.prepared(wanted, None, wanted.root)
        elif wanted is not None and self.rng.random() < 0.8:
            self.member.prepared(wanted, None, wanted.root)
            self.member.try_promote()
            applying = self.member.step().apply
            if applying is not None:
                self.member.applied(applying, applying.root)
        status = self.member.refresh()
        named = [item.version for item in (status.active, status.proposed) if item is not None]
        self.standing = [versions[int(name.rpartition("@")[2])] for name in named]

    # ------------------------------------------------------------------ maintenance

    def anchor(self, store: Store) -> None:
        drawn = self.a_version()
        if drawn is not None:
            line, version = drawn
            if version.expired:
                with pytest.raises(NotFoundError, match="expired"):
                    store.anchor(f"{line}@{version.number}")
            else:
                store.anchor(f"{line}@{version.number}")

    def fold(self, store: Store) -> None:
        line = self.a_line()
        versions = self.lines[line]
        if len(versions) < 2:
            return
        low, high = sorted(int(n) for n in self.rng.choice(len(versions), 2, replace=False))
        if self.rng.random() < 0.1:
            low, high = high, low
        base, goal = versions[low], versions[high]
        names = f"{line}@{low}", f"{line}@{high}"
        between = versions[low : high + 1]
        # Tensors that come back after a change may have another order: the order is that of the publisher who did it.
        reordered = any(item.shapes is not base.shapes for item in between) and self.layout(base) != self.layout(goal)
        if base.expired or goal.expired:
            with pytest.raises(NotFoundError, match="expired"):
                store.fold(*names)
        elif low > high or base.line != goal.line or base.shapes is not goal.shapes or reordered:
            with pytest.raises(InvalidInputError):
                store.fold(*names)
        else:
            try:
                store.fold(*names)
            except ConflictError:
                # Only where no path leads from one to the other.
                assert any(item.expired or item.shapes is not base.shapes for item in between) or not self.leads(
                    goal.line, low, high
                )

    def layout(self, version: Version) -> str:
        layout: str = facts(self.store._objects, version.line).commits[version.number]["layout"]
        return layout

    def leads(self, line: str, low: int, high: int) -> bool:
        edges, reached = edges_that_lead_on(facts(self.store._objects, line)), {low}
        for version, base in sorted(edges, key=lambda edge: edge[0]):
            if base in reached:
                reached.add(version)
        return high in reached

    def needed(self, line: str, *, tagged: bool) -> set[int]:
        """Return the line's own versions that something needs."""
        found = [*self.said.values(), *self.standing, *(version for version, counts in self.pins.values() if counts)]
        found += self.tags.values() if tagged else []
        numbers = {version.number for version in found if version.line == line}
        for work in self.store._catalog.log(line).refresh().history.works:
            if work.purpose != "expire":
                numbers |= {*work.versions} | (
                    set() if work.base is None else {int(work.base.version.rpartition("@")[2])}
                )
        return numbers

    def expire(self, store: Store) -> None:
        line = self.a_line()
        own = [item for item in self.lines[line] if item.line == line]
        last, tagged, dry = int(self.rng.choice([1, 1, 2, 4])), self.rng.random() < 0.7, self.rng.random() < 0.1
        every = [None, 2, 3][int(self.rng.integers(3))]
        age = [None, 0.0, float(DAY_S)][int(self.rng.choice(3, p=[0.6, 0.3, 0.1]))]
        needed = self.needed(line, tagged=tagged)
        expected = {
            item.number
            for item in own[:-last]
            if not item.expired
            and (every is None or item.number % every)
            and item.number not in needed
            and age != DAY_S
        }
        self.expiring = line, set() if dry else expected
        options = {"keep_last": last, "keep_every": every, "older_than_s": age, "keep_tagged": tagged}
        result = store.expire(line, dry_run=dry, **options)  # type: ignore[arg-type]
        assert set(result.versions) == {f"{line}@{number}" for number in expected}
        if dry:
            return
        for item in own:
            item.expired |= item.number in expected
        if expected:
            for number, base in edges_that_lead_on(facts(store._objects, line)):
                assert not self.lines[line][number].expired
                assert base is None or not self.lines[line][base].expired

    def gc(self, store: Store) -> None:
        for line, (transaction, _) in self.begun.items():  # what its writer still uploads
            assert transaction.txid in facts(store._objects, line).open
        store.gc(grace_s=0)
        require_no_waste(store)

    def wait(self, store: Store) -> None:
        """What ended less than the grace period ago stays; what would go is told."""
        assert store.gc(grace_s=DAY_S).keys == []
        before = store._objects.list("")
        assert set(store.gc(grace_s=0, dry_run=True).keys) <= set(before)
        assert store._objects.list("") == before

    # ------------------------------------------------------------------ reading

    def check(self, store: Store, drawn: tuple[str, Version] | None) -> None:
        """Read parts of a version, or be told that it has expired."""
        if drawn is None:
            return
        line, version = drawn
        reference = f"{line}@{version.number}"
        names = [str(name) for name in self.rng.permutation(list(version.state))[: int(self.rng.integers(1, 4))]]
        parts = {name: self.part_of(version.state[name].shape) for name in names}
        if version.expired:
            with pytest.raises(NotFoundError, match="expired"):
                store.read(reference, parts)
            return
        found = store.read(reference, parts)
        expected = {name: version.state[name][... if part is None else part] for name, part in parts.items()}
        assert_same(found, {name: np.asarray(array) for name, array in expected.items()})

    def read(self, store: Store) -> None:
        drawn = self.a_version()
        if drawn is not None:
            line, version = drawn
            if version.expired:
                with pytest.raises(NotFoundError, match="expired"):
                    store.read(f"{line}@{version.number}")
            else:
                assert_same(store.read(f"{line}@{version.number}"), version.state)

    def walk(self, store: Store) -> None:
        line = self.a_line()
        versions = self.lines[line]
        if not versions:
            return
        start, step = int(self.rng.integers(len(versions))), int(self.rng.integers(1, 4))
        wanted = None if self.rng.random() < 0.4 else {name: self.part_of(SHAPES[name][1]) for name in ("a", "b")}
        found = list(store.iter_states(line, start, step=step, tensors=wanted))
        expected = [item for item in versions[start::step] if not item.expired]
        assert [state.info.version for state in found] == [f"{line}@{item.number}" for item in expected]
        for state, item in zip(found, expected, strict=True):
            parts = wanted or dict.fromkeys(item.state)
            assert_same(
                state.tensors,
                {name: np.asarray(item.state[name][... if part is None else part]) for name, part in parts.items()},
            )

    def diff(self, store: Store) -> None:
        drawn, second = self.a_version(kept=True), self.a_version(kept=True)
        if drawn is None or second is None:
            return
        one, other = drawn[1].state, second[1].state
        found = store.diff(f"{drawn[0]}@{drawn[1].number}", f"{second[0]}@{second[1].number}")
        for item in found.tensors:
            if item.status in ("changed", "same"):
                bits = np.dtype(f"u{one[item.name].dtype.itemsize}")
                a, b = (np.frombuffer(raw(state[item.name]), bits) for state in (one, other))
                assert item.changed == int((a != b).sum())

    def load(self, store: Store) -> None:
        """Live tensors, of whatever version they are, are brought to another one."""
        drawn = self.a_version(kept=True)
        if drawn is not None:
            line, version = drawn
            if self.loaded is None or {n: a.shape for n, a in self.loaded.items()} != {
                n: a.shape for n, a in version.state.items()
            }:
                self.loaded = {name: np.zeros_like(array) for name, array in version.state.items()}
            store.load_into(self.loaded, f"{line}@{version.number}")
            assert_same(self.loaded, version.state)

    def reopen(self, store: Store) -> None:
        self.store = dcr_store.open(store.url)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.end_well()
        finally:
            self.small.stop()

    def end_well(self) -> None:
        for line in [*self.begun]:
            self.begun.pop(line)[0].abort()
        store = dcr_store.open(self.store.url)
        for _ in range(2):
            report = store.verify(deep=True)
            assert report.ok, report.problems
            assert {*self.lines} - {"main"} <= {*store.lines()}
            for line, versions in self.lines.items():
                assert [item.version for item in store.log(line)] == [f"{line}@{n}" for n in range(len(versions))]
                for item in versions:
                    if item.expired:
                        with pytest.raises(NotFoundError, match="expired"):
                            store.read(f"{line}@{item.number}")
                    else:
                        assert_same(store.read(f"{line}@{item.number}"), item.state)
            store = dcr_store.open(self.store.url)
            store.gc(grace_s=0)
            require_no_waste(store)
        assert {tag.version: tag.name for line in self.lines for tag in store.tags(line)}.keys() == {
            f"{line}@{version.number}" for (line, _), version in self.tags.items()
        }


TestHistory = HistoryMachine.TestCase
TestHistory.settings = machine(40, 50)
