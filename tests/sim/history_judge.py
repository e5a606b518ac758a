"""What must hold of a history: which versions are kept, by which ways, and what nobody may delete.

Folds the records of all lines anew, as the spec says (docs/spec/v1.md §14), and knows what everybody was told.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from sim.history_fold import Document, HistoryFold, Version, number_of, numbers_of
from sim.judge import Judge, _require
from sim.library import CHUNK_ELEMENTS, Library, State
from sim.objects import EPOCH_S, Bucket, PlainObjects
from sim.scheduler import ViolationError
from upkeep import edge_keys, head_keys, require_no_waste, version_keys

from dcr_store.errors import DcrError, NotFoundError
from dcr_store.store import Store
from dcr_store.targets.memory import MemoryTarget
from dcr_store.versions.catalog import LazyStates
from dcr_store.versions.path import Path
from dcr_store.versions.replay import everywhere, replay

if TYPE_CHECKING:
    from sim.groups import GroupFold

GRACE_S = 1000


class HistoryJudge(Judge):
    """Follows a bucket whose history is kept, and all that anybody was told of it."""

    def __init__(self, library: Library, bucket: Bucket, now: Callable[[], float]) -> None:
        super().__init__(library, bucket.objects)
        self.bucket, self.now = bucket, now
        before = self.line
        self.line = self._main = HistoryFold(
            before.last_sha256, before.length, versions=before.versions, steps=before.steps
        )
        for record in self._main.versions:
            self._main.ended[record["txid"]] = EPOCH_S
        self.lines: dict[str, HistoryFold] = {"main": self._main}
        self.groups: list[GroupFold] = []
        self.bits: dict[Version, State] = {("main", number): state for number, state in enumerate(self.states)}
        self.names: dict[str, tuple[Version, float | None]] = {}
        self.given_up: set[str] = set()
        self.edges_ever: set[tuple[Version, int | None]] = set()
        self._proposed_before: dict[str, set[str]] = {}
        self.let_go: dict[str, float] = {}  # when a key was needed last
        self._refs: dict[tuple[str, str], set[str]] = {}
        self._led_to: set[str] = set()
        self.needed: set[str] = set()
        self._look_at_needs()

    # ------------------------------------------------------------------ objects

    def on_put(self, key: str, data: bytes, before: bytes | None) -> None:
        """Look at an object that has just been stored over `before`."""
        parts = key.split("/")
        is_record = parts[0] == "log" and len(parts) == 3 and parts[2] != "latest.json"
        if not is_record or before is not None:
            super().on_put(key, data, before)
            if parts[0] == "groups" and before is None:
                self._look_at_groups()
            return
        line = parts[1]
        fold = self.lines.get(line)
        if fold is None:
            self._begun(line, data)
            return
        _require(int(parts[2].removesuffix(".json")) == fold.length, f"{key}: the log has {fold.length} records")
        standing = self._standing()
        record = fold.follow(data, self.now())
        kind = record["kind"]
        if kind == "intent" and record["purpose"] == "expire":
            self._proposed_before[record["txid"]] = standing
        elif kind == "commit":
            self._look_at_commit(line, record)
        elif kind in ("anchor", "fold"):
            self._look_at_edge(line, record)
        elif kind == "expire":
            self._look_at_expiry(line, record)
        if kind in ("commit", "anchor", "fold", "expire"):
            self._look_at_needs()

    def on_delete(self, key: str) -> None:
        """Look at an object that is about to be deleted."""
        if key not in self.objects:
            return
        kind, *parts = key.split("/")
        if kind in ("tags", "pins"):
            _require(key not in self.names, f"{key} is taken away, and who put it was told that it is there")
        elif kind == "groups":
            _require(parts[1] == "acks", f"{key} is deleted")
            version, proposal = parts[2], int(key.split(".")[-2])
            _require(
                (version, proposal) not in self._acknowledged(), f"{key} is deleted, and {version} stands in its group"
            )
        else:
            _require(kind == "versions", f"{key} is deleted")
            self._look_at_deletion(key, self.lines.get(parts[0]), parts[1].partition("-")[2])

    def _look_at_deletion(self, key: str, fold: HistoryFold | None, txid: str) -> None:
        _require(fold is not None, f"{key} is deleted, and nothing is known of its line")
        assert fold is not None
        _require(not fold.is_open(txid), f"{key} is deleted while what it belongs to is open")
        _require(txid in fold.ended, f"{key} is deleted, and no record names it")
        _require(key not in self.needed, f"{key} is deleted, and is needed")
        ended = self.let_go.get(key, fold.ended[txid])
        waited = [(when, grace_s) for when, grace_s in fold.collections if when - ended >= grace_s]
        _require(bool(waited), f"{key} is deleted before its grace is over: it ended at {ended - EPOCH_S}")

    # ------------------------------------------------------------------ records

    def _begun(self, line: str, data: bytes) -> None:
        """Fold the first record of a line that goes on from another one."""
        record = json.loads(data)
        _require(record["kind"] == "origin" and record["seq"] == 0, f"{line} begins with {record['kind']}")
        row, parent = record["row"], self.lines[record["parent"]]
        number = int(row["version"])
        _require(parent.forks.get(line) == number, f"{line} goes on from a version, and {parent.line} does not say so")
        _require(
            parent.fork_shas.get(record["fork_seq"]) == record["fork_sha256"],
            f"{line} names another record as its fork",
        )
        _require(number in parent.own(), f"{line} goes on from a version of another line")
        commit = parent.versions[number]
        _require((row["root"], row["txid"]) == (commit["root"], commit["txid"]), f"{line} goes on from another version")
        fold = HistoryFold(
            self._main_sha(),
            line=line,
            first=number + 1,
            source=(parent.line, number),
            versions=parent.versions[: number + 1],
            steps=parent.steps[: number + 1],
        )
        fold._check_place(record)
        fold._went_on(data)
        fold.last_time = self.now()
        self.lines[line] = fold

    def _main_sha(self) -> str:
        return self.catalog.store_sha256

    def _look_at_commit(self, line: str, record: Document) -> None:
        fold, number = self.lines[line], record["version"]
        state = self._meant(f"{line}@{number}", record)
        before = [step for step in fold.steps[:-1] if step == fold.steps[-1]]
        _require(not before, f"{line}@{number} publishes step {fold.steps[-1]}, which was published already")
        self.bits[line, number] = state
        if line == "main":
            self.states.append(state)
            self.trees.append(None)
        self._look_at_bits(line, record)

    def _look_at_edge(self, line: str, record: Document) -> None:
        base = record["base"]
        self.edges_ever.add(((line, record["version"]), base and number_of(base)))
        self._look_at_bits(line, record)

    def _look_at_bits(self, line: str, record: Document) -> None:
        """Require that what a record adds leads from its base to the bits of its version."""
        number, base = record["version"], record["base"]
        log = self.catalog.log(line)
        log.refresh()
        row = log.row(number)
        assert row is not None
        edge = next(edge for edge in self.catalog.edges_to(line, number) if edge.txid == record["txid"])
        layout, name = self.catalog.layout(row.layout), f"{record['kind']} {line}@{number}"
        target, edges, start = MemoryTarget(layout, CHUNK_ELEMENTS), [edge], -1
        try:
            if base is not None:
                _fill(target, self.bits[self.owner(line, number_of(base))])
                edges, start = [self.catalog.edges_to(line, number_of(base))[0], edge], 0
            path = Path(LazyStates(self.catalog, line, edges), len(edges) - 1, CHUNK_ELEMENTS)
            replay(self.catalog.objects, path, target, everywhere(path, start))
        except DcrError as error:
            raise ViolationError(f"{name} does not lead there: {error}") from error
        found = {key: tensor.bits.tobytes() for key, tensor in target.tensors().items()}
        wanted = {key: array.tobytes() for key, array in self.bits[line, number].items()}
        _require(found == wanted, f"{name} leads to other bits")

    def _look_at_expiry(self, line: str, record: Document) -> None:
        """Require that nothing that names a version was in the way; names are told, or stood before the intent."""
        gone = {(line, number) for number in numbers_of(record["versions"])}
        clock = self.lines[line].last_time
        for key, (version, until) in self.names.items():
            if until is None or until > clock:
                _require(version not in gone, f"{key} was put for {version[1]}, which expires")
        for fold in self.groups:
            if fold.actives:
                _require(self._of(fold.actives[-1][0]) not in gone, f"{fold.actives[-1][0]} is active, and expires")
            if fold.proposed is not None and str(fold.proposed) in self._proposed_before.get(record["txid"], ()):
                _require(self._of(fold.proposed[0]) not in gone, f"{fold.proposed[0]} is proposed, and expires")

    def _look_at_groups(self) -> None:
        for fold in self.groups:
            if fold.actives:
                line, number = self._of(fold.actives[-1][0])
                _require(number not in self.lines[line].expired, f"{line}@{number} is active, and has expired")

    def _standing(self) -> set[str]:
        return {str(fold.proposed) for fold in self.groups if fold.proposed is not None}

    def _acknowledged(self) -> set[tuple[str, int]]:
        found = [item for fold in self.groups for item in (fold.proposed, *fold.actives[-1:]) if item is not None]
        return {(version, proposal) for version, _, proposal in found}

    # ------------------------------------------------------------------ what is needed

    def _look_at_needs(self) -> None:
        """See what is needed from now on, that it is there, and that a way leads to each version that is kept."""
        needed: set[str] = set()
        of_heads: set[str] = set()
        for fold in self.lines.values():
            for number in fold.own():
                record = fold.versions[number]
                if number not in fold.dead:
                    needed |= self._keys("edge", record)
                elif number not in fold.expired:
                    needed |= self._keys("version", record)
                    if number == fold.head:
                        of_heads |= self._keys("head", record)
            for record in fold.edges.values():
                needed |= self._keys("edge", record)
        lost = (needed | of_heads) - self.objects.keys()
        _require(not lost, f"needed, and not there: {sorted(lost)[:3]}")
        for key in self._led_to - needed:
            self.let_go[key] = self.now()
        self._led_to, self.needed = needed, needed | of_heads
        reached: set[Version] = set()
        for fold in sorted(self.lines.values(), key=lambda item: item.first):
            for number, start, _ in sorted(fold.ways(), key=lambda way: way[0]):
                if start is None or self.owner(fold.line, start) in reached:
                    reached.add((fold.line, number))
            lost_ways = {(fold.line, number) for number in fold.kept()} - reached
            _require(not lost_ways, f"no way leads to {lost_ways}, which have not expired")

    def _keys(self, kind: str, record: Document) -> set[str]:
        key = kind, record["manifest"]["key"]
        if key not in self._refs:
            read = {"edge": edge_keys, "head": head_keys, "version": version_keys}[kind]
            self._refs[key] = read(self.catalog.objects, record)
        return self._refs[key]

    # ------------------------------------------------------------------ who asks

    def owner(self, line: str, number: int) -> Version:
        """Return a version as the own one of a line."""
        fold = self.lines[line]
        while fold.source is not None and number < fold.first:
            fold = self.lines[fold.source[0]]
        return fold.line, number

    def _of(self, name: str) -> Version:
        line, _, number = name.rpartition("@")
        return self.owner(line, int(number))

    def is_expired(self, line: str, number: int) -> bool:
        """Whether a version is not to be read any more, now."""
        if line not in self.lines:
            return False
        owner, _ = self.owner(line, number)
        return number in self.lines[owner].expired

    def leads(self, line: str, start: int, goal: int) -> bool:
        """Whether a way leads from a version to another one of the line's own."""
        reached = {start}
        for number, base, _ in sorted(self.lines[line].ways(), key=lambda way: way[0]):
            if base in reached:
                reached.add(number)
        return goal in reached

    # ------------------------------------------------------------------ what people were told

    def told_version(self, name: str, root: str) -> None:
        """Somebody was told that a version is committed."""
        line, _, number = name.rpartition("@")
        _require(line in self.lines, f"{name} is shown to somebody, and there is no such line")
        versions = self.lines[line].versions
        _require(int(number) < len(versions), f"{name} is shown to somebody, and not committed")
        _require(versions[int(number)]["root"] == root, f"{name} is shown to somebody with another root")

    def told_lost(self, txid: str, attempt: int) -> None:
        """A writer was told that nothing of its attempt is committed, nor will be."""
        self.lost.add((txid, attempt))
        for fold in self.lines.values():
            for record in fold.versions:
                is_it = (record["txid"], record["attempt"]) == (txid, attempt)
                _require(not is_it, f"{fold.line}@{record['version']} was committed, and its writer is told otherwise")

    def told_name(self, key: str, version: str, until: float | None) -> None:
        """Somebody was told that a tag or a pin is there: it keeps its version until it is taken away."""
        owner = self._of(version)
        if key in self.given_up:
            return
        _require(owner[1] not in self.lines[owner[0]].expired, f"{key} is said to keep {version}, which has expired")
        _require(key in self.objects, f"{key} is said to be there, and is not")
        self.names[key] = owner, until

    def give_up(self, key: str) -> None:
        """Somebody is about to take a name away; it is not given again."""
        self.names.pop(key, None)
        self.given_up.add(key)

    def told_edge(self, line: str, number: int, base: int | None) -> None:
        """Somebody was told that a way is there."""
        version = self.owner(line, number)
        record = self.lines[version[0]].versions[number]
        is_own = (record["base"] and number_of(record["base"])) == base
        _require(is_own or (version, base) in self.edges_ever, f"a way from {base} to {version} is told, and not there")

    def told_expired(self, name: str) -> None:
        """Somebody was told that a version has expired."""
        line, number = self._of(name)
        _require(number in self.lines[line].expired, f"{name} is said to have expired, and is kept")

    def told_fork(self, name: str, version: str) -> None:
        """Somebody was told that a line goes on from a version."""
        found = self.lines.get(name)
        _require(found is not None and found.source == self._of(version), f"{name} is told to go on from {version}")

    def told_bits(self, name: str, found: dict[str, Any], parts: dict[str, Any]) -> None:
        """Somebody has read parts of a version."""
        state = self.bits[self._of(name)]
        wanted = {key: state[key][... if part is None else part] for key, part in parts.items()}
        same = found.keys() == wanted.keys() and all(
            np.asarray(found[key]).shape == wanted[key].shape
            and np.asarray(found[key]).tobytes() == wanted[key].tobytes()
            for key in wanted
        )
        _require(same, f"{name} is read with other bits")

    # ------------------------------------------------------------------ the end

    def look_at_all(self) -> None:
        """Collect when everything has ended, twice: nothing is left but what is needed; and read all that is kept."""
        objects = Judged(self)
        store = self._opened(objects)
        store.gc(grace_s=1)
        wait = [GRACE_S]
        now, self.now = self.now, lambda: now() + wait[0]
        store = self._opened(objects)
        unknown = store.gc(grace_s=GRACE_S // 2).unknown
        _require(not unknown, f"no log says anything of {unknown[:3]}")
        self._require_no_waste(store)
        wait[0] += GRACE_S
        late = [self._late_key(fold, txid) for fold in self.lines.values() for txid in fold.stored[-2:]]
        for key in late:
            objects.put(key, b"late")
        store.gc(grace_s=GRACE_S // 2)
        self._require_no_waste(store)
        self._read_all(self._opened(PlainObjects(self.objects)))
        self.now = now

    def _opened(self, objects: PlainObjects) -> Store:
        return Store(objects, self.catalog.document, self.catalog.store_sha256)

    def _late_key(self, fold: HistoryFold, txid: str) -> str:
        """Return where somebody who slept puts something that nobody waits for any more."""
        return f"versions/{fold.line}/{0:012d}-{txid}/data/w0.{'0' * 16}/u16/mask/c/0"

    def _require_no_waste(self, store: Store) -> None:
        try:
            require_no_waste(store)
        except AssertionError as error:
            raise ViolationError(f"after everything has ended: {error}") from error

    def _read_all(self, store: Store) -> None:
        for fold in self.lines.values():
            for number in fold.own():
                name = f"{fold.line}@{number}"
                try:
                    found = store.read(name)
                except NotFoundError as error:
                    _require(number in fold.expired and "expired" in str(error), f"{name}: {error}")
                except DcrError as error:
                    raise ViolationError(f"{name} cannot be read: {error}") from error
                else:
                    _require(number not in fold.expired, f"{name} has expired, and is read")
                    self.told_bits(name, found, dict.fromkeys(self.bits[fold.line, number]))


class Judged(PlainObjects):
    """The bucket when everything has ended: no faults, and every change is judged."""

    def __init__(self, judge: HistoryJudge) -> None:
        super().__init__(judge.objects)
        self.judge = judge

    def put(self, key: str, data: Any) -> None:
        before = self.objects.get(key)
        super().put(key, data)
        self.judge.bucket.stored_at[key] = self.judge.now()
        self.judge.on_put(key, self.objects[key], before)

    def put_if_absent(self, key: str, data: Any) -> bool:
        if key in self.objects:
            return super().put_if_absent(key, data)
        self.put(key, data)
        return True

    def delete(self, key: str) -> None:
        self.judge.on_delete(key)
        super().delete(key)

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        times = self.judge.bucket.stored_at
        return {key: (nbytes, times.get(key, EPOCH_S)) for key, nbytes in self.list(prefix).items()}


def _fill(target: MemoryTarget, state: State) -> None:
    for name, tensor in target.tensors().items():
        tensor.bits[:] = np.frombuffer(state[name].tobytes(), tensor.bits.dtype)
