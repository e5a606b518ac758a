"""What must hold after every step. Says so with its own eyes: it folds the log itself and reads files itself.

Reading the bits of a version goes through the product's replay, and the result is compared with the arrays that the
writer meant.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.disk import read_file
from sim.library import CHUNK_ELEMENTS, Library, State
from sim.objects import PlainObjects
from sim.scheduler import ViolationError

from dcr_store.errors import DcrError
from dcr_store.format.documents import StoreDocument
from dcr_store.format.names import STORE_KEY
from dcr_store.log.line import LineLog
from dcr_store.receive.preparing import needed
from dcr_store.targets.memory import MemoryTarget
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.replay import everywhere, replay
from dcr_store.versions.route import route

if TYPE_CHECKING:
    from sim.disk import Disk
    from sim.slice_judge import SliceJudge


@dataclass
class LineFold:
    """One line's log, as the spec says that it folds (docs/spec/v1.md §9)."""

    last_sha256: str
    length: int = 0
    open: dict[str, Any] | None = None
    begun: dict[str, Any] | None = None  # the last begin
    attempt: int = 0
    versions: list[dict[str, Any]] = field(default_factory=list)  # commit records
    steps: list[object] = field(default_factory=list)  # what the begin of each said

    def advance(self, data: bytes) -> dict[str, Any]:
        """Fold one record; ``ViolationError`` if it is illegal."""
        record: dict[str, Any] = json.loads(data)
        where = f"record {self.length} ({record['kind']})"
        self._check_place(record)
        kind, pending = record["kind"], self.open
        if kind == "begin":
            _require(pending is None, f"{where}: a transaction is open")
            _require(record["version"] == len(self.versions), f"{where} begins version {record['version']}")
            root = record["base"] and record["base"]["root"]
            _require(root == (self.versions[-1]["root"] if self.versions else None), f"{where}: base is not the head")
            self.open, self.begun, self.attempt = record, record, 0
        else:
            _require(pending is not None and pending["txid"] == record["txid"], f"{where}: it is not open")
            assert pending is not None
            if kind == "resume":
                _require(record["attempt"] == self.attempt + 1, f"{where} has attempt {record['attempt']}")
                self.attempt += 1
            elif kind == "commit":
                _require(record["attempt"] == self.attempt, f"{where}: a fenced attempt commits: {record['attempt']}")
                _require(record["version"] == pending["version"], f"{where} commits version {record['version']}")
                self.versions.append(record)
                self.steps.append(pending["metadata"].get("step"))
                self.open = None
            else:
                _require(kind == "abort", f"{where} is of no known kind")
                self.open = None
        self._went_on(data)
        return record

    def _check_place(self, record: dict[str, Any]) -> None:
        where = f"record {self.length} ({record['kind']})"
        _require(record["seq"] == self.length, f"{where} has number {record['seq']}")
        _require(record["prev"] == self.last_sha256, f"{where} does not follow the one before")

    def _went_on(self, data: bytes) -> None:
        self.length += 1
        self.last_sha256 = hashlib.sha256(data).hexdigest()


class Judge:
    """Follows the bucket and the disks of one simulation."""

    def __init__(self, library: Library, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.states: list[State] = list(library.states)
        self.trees = list(library.trees)
        store = objects[STORE_KEY]
        folded = _folded(library)
        self.line = replace(folded, versions=[*folded.versions], steps=[*folded.steps])
        self.intents: dict[tuple[str, int], State] = {}
        self.lost: set[tuple[str, int]] = set()
        self.catalog = Catalog(
            PlainObjects(objects), StoreDocument.from_bytes(store), hashlib.sha256(store).hexdigest()
        )
        self.catalog._cache = OrderedDict(library.cache)
        self._held: tuple[int, MemoryTarget] | None = None
        self._markers: dict[str, tuple[bytes, int | None]] = {}
        self.on_group_record: Callable[[str, int, bytes], None] = lambda group, seq, data: None
        self.slices: SliceJudge | None = None

    # ------------------------------------------------------------------ objects

    def on_put(self, key: str, data: bytes, before: bytes | None) -> None:
        """Look at an object that has just been stored over `before`."""
        if before is not None:
            derived = key.endswith("/latest.json") or "/checkpoints/" in key
            _require(derived or before == data, f"{key} is written with two contents")
            return
        if key.startswith("log/main/") and key.count("/") == 2 and not key.endswith("latest.json"):
            number = int(key.rpartition("/")[2].removesuffix(".json"))
            _require(number == self.line.length, f"{key}: the log has {self.line.length} records")
            if self.line.advance(data)["kind"] == "commit":
                self._committed()
        elif key.startswith("groups/") and "/log/" in key and key.rpartition("/")[2][:20].isdecimal():
            self.on_group_record(key.split("/")[1], int(key.rpartition("/")[2][:20]), data)
        elif self.slices is not None and key.startswith("versions/"):
            self.slices.on_object(key, data)

    def on_delete(self, key: str) -> None:
        """Look at an object that is about to be deleted."""
        _require(key not in self.objects, f"{key} is deleted, and nobody has let go of anything")

    def _committed(self) -> None:
        """Check a version that has just become visible: it holds what its writer meant."""
        record, number = self.line.versions[-1], len(self.line.versions) - 1
        begun = self.line.begun
        assert begun is not None
        self._require_not_lost(f"main@{number}", record)
        if self.slices is not None and begun["layout"] is not None:
            state = self.slices.committed(record, begun)
        else:
            state = self._meant(f"main@{number}", record)
        self.states.append(state)
        self.trees.append(None)
        before = [step for step in self.line.steps[:-1] if step == self.line.steps[-1]]
        _require(not before, f"main@{number} publishes step {self.line.steps[-1]}, which was published already")
        try:
            self._read(number, state)
        except DcrError as error:
            raise ViolationError(f"main@{number} cannot be read: {error}") from error

    def _require_not_lost(self, name: str, record: dict[str, Any]) -> None:
        attempt = record["txid"], record["attempt"]
        _require(attempt not in self.lost, f"{name} is committed, and its writer was told that it was not")

    def _meant(self, name: str, record: dict[str, Any]) -> State:
        """Return what the writer of a version meant to commit."""
        self._require_not_lost(name, record)
        attempt = record["txid"], record["attempt"]
        _require(attempt in self.intents, f"{name}: nobody has meant to commit it")
        return self.intents[attempt]

    def _read(self, number: int, state: State) -> None:
        located = self.located(number)
        path = route(self.catalog, located).path
        held, target = self._held or (-1, None)
        if target is None or held != number - 1 or target.layout is not path.target.layout or path.target.is_anchor:
            target = MemoryTarget(path.target.layout, CHUNK_ELEMENTS)
            places = everywhere(path, -1)
        else:
            places = everywhere(path, path.goal - 1)
        self._held = None
        replay(self.catalog.objects, path, target, places)
        self._held = number, target
        found = {name: tensor.bits.tobytes() for name, tensor in target.tensors().items()}
        _require(found == {name: array.tobytes() for name, array in state.items()}, f"main@{number} has other bits")

    def located(self, number: int) -> Located:
        log = self.catalog.log("main")
        log.refresh()
        row = log.row(number)
        assert row is not None
        return Located("main", row)

    def look_at_all(self) -> None:
        """Check the whole log with the product's eyes too, from its first record on, and each version's root."""
        log = LineLog(self.catalog.objects, "main", self.catalog.store_sha256)
        found = [json.loads(data) for _, data in log.records()]
        _require(len(found) == self.line.length, f"the log has {len(found)} records, and had {self.line.length}")
        rows = Catalog(self.catalog.objects, self.catalog.document, self.catalog.store_sha256).fresh("main").rows()
        roots = [record["root"] for record in self.line.versions]
        _require([row.root for row in rows] == roots, "opened anew, the line has other versions")

    # ------------------------------------------------------------------ what writers were told

    def intend(self, txid: str, attempt: int, state: State) -> None:
        """A writer is about to commit `state`."""
        self.intents[txid, attempt] = state

    def told_lost(self, txid: str, attempt: int) -> None:
        """A writer was told that nothing of its attempt is committed, nor will be."""
        self.lost.add((txid, attempt))
        for number, record in enumerate(self.line.versions):
            _require(
                (record["txid"], record["attempt"]) != (txid, attempt),
                f"main@{number} was committed, and its writer is told that it was not",
            )

    def told_version(self, name: str, root: str) -> None:
        """Somebody was told that a version is committed."""
        number = int(name.rpartition("@")[2])
        versions = self.line.versions
        _require(number < len(versions), f"{name} is shown to somebody, and not committed")
        _require(versions[number]["root"] == root, f"{name} is shown to somebody with another root")

    # ------------------------------------------------------------------ disks

    def look_at(self, disk: Disk) -> None:
        """Check a target that has changed: a clean marker tells the truth, and ``current`` leads to a whole version."""
        directory, has_marked, disk.has_marked = disk.target, disk.has_marked, False
        if disk.keeps_copies:
            directory = f"{directory}/current"
            if not Path(directory).is_symlink():
                return
        version = self._clean_version(directory) if has_marked else self._markers.get(directory, (b"", None))[1]
        if version is not None:
            self.require_bits(directory, version, "is marked clean")
        _require(version is not None or not disk.keeps_copies, f"{directory} leads to a version that is not whole")

    def look_at_baseline(self, directory: str) -> None:
        """Check a baseline's note: it is never ahead of the log."""
        try:
            note = json.loads(Path(directory, "baseline.json").read_bytes())
        except (OSError, ValueError):
            return
        self.told_version(note["version"], note["root"])

    def _clean_version(self, directory: str) -> int | None:
        try:
            data = read_file(f"{directory}/.dcr/marker.json")
        except OSError:
            self._markers.pop(directory, None)
            return None
        seen, version = self._markers.get(directory, (None, None))
        if seen != data:
            version = None
            try:
                body = json.loads(data)["body"]
                if body["state"] == "clean":
                    version = int(body["target"].rpartition("@")[2])
            except (ValueError, KeyError, TypeError):
                pass  # torn, and so not clean
            self._markers[directory] = data, version
        return version

    def require_prepared(self, disk: Disk, number: int) -> None:
        """Require that a directory could be brought to a version with what is in it and in its spool, alone."""
        base = self._clean_version(disk.target)
        _require(base is not None, f"{disk.target} says that main@{number} is prepared, and knows nothing of itself")
        assert base is not None
        there = {hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(disk.target, ".dcr/spool").glob("*")}
        lacking = [] if base == number else needed(self.catalog, self.located(base), self.located(number))
        missing = [ref.key for ref in lacking if ref.sha256 not in there]
        _require(not missing, f"{disk.target} says that main@{number} is prepared, and lacks {missing}")

    def require_bits(self, directory: str, number: int, why: str) -> None:
        """Require that a directory holds a version, bit for bit, file for file where it was published as files."""
        _require(number < len(self.states), f"{directory} {why} as main@{number}, which is not committed")
        wanted = self.trees[number]
        if wanted is not None:
            _require(_tree(directory) == wanted, f"{directory} {why} as main@{number} and holds other files or bits")
            return
        found = {}
        for path, data in _tree(directory).items():
            try:
                found.update(_tensors(data))
            except (ValueError, KeyError, TypeError, struct.error) as error:
                raise ViolationError(f"{directory} {why} as main@{number}, and {path} is torn: {error}") from error
        state = {name: array.tobytes() for name, array in self.states[number].items()}
        _require(found == state, f"{directory} {why} as main@{number} and holds other bits")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ViolationError(message)


@cache
def _folded(library: Library) -> LineFold:
    line = LineFold(hashlib.sha256(library.objects[STORE_KEY]).hexdigest())
    while (data := library.objects.get(_record_key(line.length))) is not None:
        line.advance(data)
    return line


def _record_key(seq: int) -> str:
    return f"log/main/{seq:020d}.json"


def _tree(directory: str) -> dict[str, bytes]:
    """Return the files below a directory by relative path, without the target's own notes."""
    found: dict[str, bytes] = {}
    left = [""]
    while left:
        below = left.pop()
        if not Path(directory, below).is_dir():
            continue  # gone: then its files are missed
        with os.scandir(f"{directory}/{below}") as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    found[below + entry.name] = read_file(entry.path)
                elif entry.name != ".dcr":
                    left.append(f"{below}{entry.name}/")
    return found


def _tensors(data: bytes) -> dict[str, bytes]:
    """Return the tensors of a safetensors file."""
    (nbytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + nbytes])
    begin = 8 + nbytes
    return {
        name: data[begin + row["data_offsets"][0] : begin + row["data_offsets"][1]]
        for name, row in header.items()
        if name != "__metadata__"
    }
