"""Targets of every kind, seen from outside: how children keep them, what may happen to them, what has to be true.

``Kept`` is one target in a directory of its own. It is put back to an old version, children bring it to another and
are killed, it is harmed, and judged: just after the kill, and after the plain rerun.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from faults import harms
from faults.holding import (
    GARBAGE,
    Tensors,
    image_in_engine,
    image_of_files,
    image_of_tensors,
    memory_of,
    places_of,
    read_tensors,
    tensors_in,
)
from faults.processes import Outcome
from faults.scenes import Place, assert_checkpoint
from states import raw, tree

from dcr_store.errors import DcrError
from dcr_store.layout.dtypes import uint_dtype
from dcr_store.store import Store
from dcr_store.targets.marker import Marker, read_marker

Job = dict[str, Any]
Chunks = dict[tuple[str, int], bytes]
FAST = {"rest_s": 0.05}


class Kept:
    """One target.

    Parameters
    ----------
    place : Place
        The store.
    checkpoints : list of Path
        What its versions are.
    by : {"pull", "load", "follow", "command"}
        How children bring it further.
    """

    kind: ClassVar[str] = "directory"
    harms: ClassVar[Sequence[harms.Harm]] = harms.IN_PLACE
    ways_of_bringing: ClassVar[tuple[str, ...]] = ("pull", "follow", "command")
    outlives: ClassVar[bool] = True
    """Whether what it holds outlives the process that keeps it."""

    def __init__(self, place: Place, checkpoints: list[Path], scratch: Path, by: str, name: str = "target") -> None:
        self.place, self.checkpoints, self.by = place, checkpoints, by
        self.target, self.old, self.claims = scratch / name, scratch / f"{name}-old", scratch / f"{name}-claims"
        self.start: int | None = None
        self.is_harmed = False
        self._digests: dict[int, str] = {}
        self._read: dict[int, Tensors] = {}
        self._cut: dict[tuple[int, int], Chunks] = {}

    @property
    def goals(self) -> range:
        """The versions that it can be brought to."""
        return range(len(self.checkpoints))

    @property
    def only_forward(self) -> bool:
        """Whether a version that is held is never left for an older one: who follows does not go back."""
        return self.outlives and self.by in ("follow", "command")

    @property
    def spool(self) -> Path:
        """Where what is fetched ahead is kept."""
        return self.target / ".dcr" / "spool"

    # ------------------------------------------------------------------ children

    def job(self, goal: int, **options: object) -> Job:
        """Return what a child is told to bring the target to version `goal`."""
        version = f"main@{goal}"
        job: Job = {"do": self.by, "kind": self.kind, "directory": str(self.target), **self.place.job, **options}
        if self.by == "follow":
            return {**job, "until": version, "claims": str(self.claims), **FAST}
        if self.by == "command":
            mode = ["--mode", "copy"] if self.kind == "copy" else []
            words = ["follow", self.place.url_of_children, str(self.target), *mode, "--until", version]
            words += [
                word for name in ("group", "name") if name in options for word in (f"--{name}", str(options[name]))
            ]
            return {**job, "arguments": words, "version": version, **FAST}
        return {**job, "version": version, "claims": str(self.claims)}

    def set_out(self, start: int | None) -> None:
        """Make version `start` what the target is put back to; None: there is nothing."""
        self.start = start
        shutil.rmtree(self.old, ignore_errors=True)
        if start is not None:
            self._make_old(start)

    def _make_old(self, start: int) -> None:
        with self.place.open() as store:
            store.pull(self.old, f"main@{start}")

    def reset(self) -> None:
        """Put the target back."""
        self.is_harmed = False
        for path in (self.target, self.spool):
            shutil.rmtree(path, ignore_errors=True)
        if self.old.exists():
            shutil.copytree(self.old, self.target, symlinks=True)

    def harm(self, how: harms.Harm, rng: random.Random) -> None:
        """Do something to the target; what it says of itself need not be true until it has been brought further."""
        how(self.target, self.old, rng)
        self.is_harmed = self.is_harmed or how is not harms.no_harm

    def keep_as_old(self) -> None:
        """Make what the target is now, and right, what power loss takes it back to."""
        self.is_harmed = False
        shutil.rmtree(self.old, ignore_errors=True)
        if self.target.exists():
            shutil.copytree(self.target, self.old, symlinks=True)

    # ------------------------------------------------------------------ judging

    def assert_old_or_new(self, allowed: Iterable[int | None]) -> None:
        """Assert what holds at any instant, when all that may have been brought there are the versions allowed."""
        number = None if self.is_harmed else _clean(self.target)
        if number is not None:
            assert number in allowed
            assert tree(self.target) == tree(self.checkpoints[number]), f"says it is main@{number}, and is not"
        self.assert_claims()

    def assert_done(self, goal: int) -> None:
        """Assert that the target is a version and that nothing is left over."""
        assert_checkpoint(self.target, self.checkpoints[goal], own=False)
        assert {path.name for path in (self.target / ".dcr").iterdir()} <= {"lock", "marker.json", "spool"}
        assert self.spool.parent == self.target / ".dcr" or not self.spool.exists()
        self.assert_claims()

    def assert_claims(self) -> None:
        """Assert that whatever was said to be held was held, bit for bit."""
        for claim in self.said():
            if claim["digest"]:
                numbers = range(len(self.checkpoints)) if not claim["version"] else [_number(claim["version"])]
                assert claim["digest"] in {self._digest(n) for n in numbers}, f"{claim['said']} {claim['version']}"

    def said(self) -> list[dict[str, Any]]:
        """Return what children said."""
        lines = self.claims.read_text().splitlines() if self.claims.exists() else []
        return [json.loads(line) for line in lines]

    def _digest(self, number: int) -> str:
        if number not in self._digests:
            self._digests[number] = hashlib.sha256(self.image(self.checkpoints[number])).hexdigest()
        return self._digests[number]

    def image(self, checkpoint: Path) -> bytes:
        """Return the image of a target that holds a checkpoint."""
        return image_of_files(checkpoint)

    # ------------------------------------------------------------------ what is missing, and what is wrong

    def held(self, goal: int) -> Tensors | None:
        """Return the tensors that a run to `goal` finds, None if it cannot take anything for granted."""
        return _readable(self.target)

    def certain(self) -> int | None:
        """Return the version that the target says it holds."""
        return _clean(self.target)

    def is_told(self) -> bool:
        """Whether the target tells which versions may be in it."""
        return _marker(self.target) is not None

    def limits(self, costs: Costs, goal: int) -> tuple[int, int] | None:
        """Return how many chunks a run may write now, and how many bytes it may fetch; None if there is no telling."""
        held, wanted = self.held(goal), self._tensors(goal)
        if held is None or _table(held) != _table(wanted):
            return None
        now, right = costs.chunks(goal, held), self._chunks(costs, goal, goal)
        wrong = {key: data for key, data in now.items() if data != right[key]}
        is_alike = self.start is not None and _table(self._tensors(self.start)) == _table(wanted)
        old = self._chunks(costs, goal, self.start) if is_alike and self.start is not None else {}
        certain = self.certain() if self.by == "follow" else None
        at_hand = self._at_hand() if self.by == "follow" else []
        # A newer version than the wanted one is not looked for where nothing tells that it may be there.
        may_be_old = self.start is not None and (self.start < goal or self.is_told())
        is_old = {key: may_be_old and old.get(key) == data for key, data in wrong.items()}
        return len(wrong), costs.nbytes(goal, self.start, is_old, certain, at_hand, by_pull=self.by != "follow")

    def _tensors(self, number: int) -> Tensors:
        if number not in self._read:
            self._read[number] = read_tensors(self.checkpoints[number])
        return self._read[number]

    def _chunks(self, costs: Costs, goal: int, number: int) -> Chunks:
        """Return the chunks of a version, by the layout of `goal`."""
        if (goal, number) not in self._cut:
            self._cut[goal, number] = costs.chunks(goal, self._tensors(number))
        return self._cut[goal, number]

    def _at_hand(self) -> list[str]:
        """Return what is in the spool, and right."""
        names = harms.spooled(self.spool)
        digests = [hashlib.sha256((self.spool / name).read_bytes()).hexdigest() for name in names]
        return [digest for digest, name in zip(digests, names, strict=True) if name.startswith(digest)]

    def counts(self, outcome: Outcome) -> tuple[int, int] | None:
        """Return chunks written and bytes fetched of a run; None if it does not tell."""
        told = outcome.told
        if self.by == "command":
            return None
        if self.by == "follow":
            return sum(applied["chunks_written"] for applied in told["applied"]), told["fetched"]
        return told["chunks_written"], told["nbytes_fetched"]


class Costs:
    """What it takes to come to the versions of a store."""

    def __init__(self, store: Store) -> None:
        self._catalog = store._catalog
        self._n = store._catalog.document.chunk_elements
        self._versions = [self._catalog.contents(self._catalog.resolve(info.version)) for info in store.log()]

    def chunks(self, number: int, tensors: Tensors) -> Chunks:
        """Cut a state into chunks, by the layout of a version."""
        layout, chunks = self._versions[number].layout, Chunks()
        for space in layout.spaces:
            n_chunks = layout.n_chunks(space, self._n)
            bits = np.zeros(n_chunks * self._n, uint_dtype(space))
            for entry in layout.tensors:
                if entry.space == space:
                    bits[entry.start : entry.stop] = np.frombuffer(tensors[entry.name][2], uint_dtype(space))
            pieces = bits.reshape(n_chunks, self._n)
            chunks |= {(space, chunk): pieces[chunk].tobytes() for chunk in range(n_chunks)}
        return chunks

    def nbytes(
        self,
        goal: int,
        start: int | None,
        wrong: Mapping[tuple[str, int], bool],
        certain: int | None,
        at_hand: Sequence[str],
        *,
        by_pull: bool,
    ) -> int:
        """Return the bytes that a run may fetch.

        Parameters
        ----------
        start : int or None
            The version that wrong chunks may be of; None: any.
        wrong : mapping
            Space and chunk → whether it is of `start`.
        certain : int or None
            A version from which all that leads to `goal` is got before the target is looked at.
        at_hand : sequence of str
            Objects in a spool.
        by_pull : bool
            Whether side files that are not there are counted, too; who follows counts those alone that differ.
        """
        chain = [edge.version for edge in self._catalog.path(self._catalog.resolve(f"main@{goal}"))]
        refs = {}
        for (space, chunk), is_old in wrong.items():
            steps = _between(start, goal) if is_old and start is not None else chain
            for item in [item for step in steps for item in self._versions[step].partitions]:
                if item.array.array.split("/")[0] == space and 0 <= chunk - item.first_chunk < item.n_chunks:
                    refs[item.ref.sha256] = item.ref.nbytes
        files = self._versions[goal].manifest.files
        if by_pull:
            refs |= {file.ref.sha256: file.ref.nbytes for file in files if file.kind == "side"}
        if certain is not None:
            for step in _between(certain, goal):
                refs |= {item.ref.sha256: item.ref.nbytes for item in self._versions[step].partitions}
            held = self._versions[certain].manifest.files
            there = {(file.path, file.ref.sha256) for file in held if file.kind == "side"}
            new = [
                file for file in (*files, *held) if file.kind == "weights" or (file.path, file.ref.sha256) not in there
            ]
            refs |= {file.ref.sha256: file.ref.nbytes for file in new}
        return sum(nbytes for sha256, nbytes in refs.items() if sha256 not in at_hand)


def _between(a: int, b: int) -> range:
    return range(min(a, b) + 1, max(a, b) + 1)


def _marker(directory: Path) -> Marker | None:
    try:
        marker = read_marker(directory)
    except DcrError:
        return None
    return marker if isinstance(marker, Marker) else None


def _clean(directory: Path) -> int | None:
    marker = _marker(directory)
    return _number(marker.target) if marker is not None and marker.state == "clean" else None


def _table(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}


def _readable(directory: Path) -> Tensors | None:
    try:
        return read_tensors(directory)
    except (DcrError, OSError):
        return None


def _number(version: str) -> int:
    return int(version.rpartition("@")[2])


class SideBySide(Kept):
    """Versions side by side: ``current`` leads to the old or the new one at every instant."""

    kind = "copy"
    harms = harms.SIDE_BY_SIDE

    def _make_old(self, start: int) -> None:
        with self.place.open() as store:
            store.pull(self.old, f"main@{start}", mode="copy")

    def reset(self) -> None:
        super().reset()
        self._before = self._content()

    def keep_as_old(self) -> None:
        super().keep_as_old()
        self._before = self._content()

    def harm(self, how: harms.Harm, rng: random.Random) -> None:
        """Do something to the target, also to a version that was current before and is no more."""
        super().harm(how, rng)
        self._before = {p: (p.stat().st_ino, p.read_bytes()) for p in self._before if p.exists()}

    def _content(self) -> dict[Path, tuple[int, bytes]]:
        """Return the files of the current version: inode and content."""
        directory = (self.target / "current").resolve()
        return {path: (path.stat().st_ino, path.read_bytes()) for path in directory.rglob("*") if path.is_file()}

    def assert_old_or_new(self, allowed: Iterable[int | None]) -> None:
        allowed = set(allowed)
        if (self.target / "current").is_symlink():
            found = tree(self.target / "current")
            assert any(found == tree(self.checkpoints[number]) for number in allowed if number is not None), allowed
        else:
            assert None in allowed
        self._assert_untouched()
        self.assert_claims()

    def _assert_untouched(self) -> None:
        for path, (inode, data) in self._before.items():
            if path.exists():  # else it was removed, whole
                assert (path.stat().st_ino, path.read_bytes()) == (inode, data), f"{path} was written again"

    def assert_done(self, goal: int) -> None:
        assert_checkpoint(self.target / "current", self.checkpoints[goal])
        self._assert_untouched()
        self.assert_claims()

    def assert_tidy(self, numbers: set[int]) -> None:
        """Assert that the directory has the versions named, the link, and nothing else."""
        found = {path.name.partition("-")[0] for path in self.target.iterdir()}
        assert found == {".dcr", "current", *(f"main@{number}" for number in numbers)}
        assert {path.name for path in (self.target / ".dcr").iterdir()} <= {"lock", "copies.json", "spool"}
        for path in self.target.glob("*@*"):
            assert {item.name for item in (path / ".dcr").iterdir()} <= {"lock", "marker.json"}

    def held(self, goal: int) -> Tensors | None:
        """Return what is half-built of `goal`, if that is known to be it; else what is current."""
        half = [path for path in harms.half_built(self.target) if path.name.startswith(f"main@{goal}-")]
        if half and _marker(half[0]) is not None:
            return _readable(half[0]) if len(half) == 1 else None
        return read_tensors(self.target / "current") if (self.target / "current").is_symlink() else None

    def certain(self) -> int | None:
        return _clean(self.target / "current") if (self.target / "current").exists() else None

    def is_told(self) -> bool:
        return self.certain() is not None

    def _at_hand(self) -> list[str]:
        """Return nothing where the directory may be somebody else's: then its spool is not looked into."""
        return super()._at_hand() if (self.target / ".dcr" / "copies.json").exists() else []


class InMemory(Kept):
    """Live tensors, which are lost with their process."""

    kind = "memory"
    harms: ClassVar[Sequence[harms.Harm]] = [harms.no_harm]
    ways_of_bringing = ("load", "follow")
    outlives = False

    @property
    def goals(self) -> range:
        """Versions of the first one's layout: tensors stay what they are."""
        return range(3)

    @property
    def spool(self) -> Path:
        return self.target.with_name(f"{self.target.name}-spool")

    def job(self, goal: int, **options: object) -> Job:
        """Return what a child is told; what it is to hold first, it brings there itself."""
        first = {} if self.start is None or self.by == "load" or self.outlives else {"first": f"main@{self.start}"}
        return super().job(goal, spool=str(self.spool), **{**first, **options})

    def _make_old(self, start: int) -> None:
        """There is nothing that outlives a process."""

    def reset(self) -> None:
        super().reset()
        self.target.mkdir(exist_ok=True)

    def assert_old_or_new(self, allowed: Iterable[int | None]) -> None:
        self.assert_claims()

    def assert_done(self, goal: int) -> None:
        assert [claim["version"] for claim in self.said()][-1:] == [f"main@{goal}"]
        self.assert_claims()

    def image(self, checkpoint: Path) -> bytes:
        return image_of_tensors(read_tensors(checkpoint))

    def held(self, goal: int) -> Tensors | None:
        """Return garbage: a new process begins with nothing."""
        tensors = read_tensors(self.checkpoints[0])
        return {n: (dtype, shape, bytes([GARBAGE]) * len(data)) for n, (dtype, shape, data) in tensors.items()}

    def certain(self) -> int | None:
        return None

    def is_told(self) -> bool:
        return False


class InSharedMemory(InMemory):
    """Live tensors in memory that outlives their process, as of an engine that is started again beside its weights."""

    kind = "shared"
    outlives = True
    harms = harms.IN_SHARED_MEMORY

    def _make_old(self, start: int) -> None:
        self.old.mkdir(exist_ok=True)
        (self.old / "memory").write_bytes(memory_of(read_tensors(self.checkpoints[start])))

    def reset(self) -> None:
        super().reset()
        if not (self.target / "memory").exists():
            nbytes = len(memory_of(read_tensors(self.checkpoints[0])))
            (self.target / "memory").write_bytes(bytes([GARBAGE]) * nbytes)

    def assert_done(self, goal: int) -> None:
        assert self.held(goal) == read_tensors(self.checkpoints[goal])
        super().assert_done(goal)

    def held(self, goal: int) -> Tensors | None:
        table = [(name, dtype, shape) for name, (dtype, shape, _) in read_tensors(self.checkpoints[0]).items()]
        assert places_of(table)[1] == (self.target / "memory").stat().st_size
        found = tensors_in((self.target / "memory").read_bytes(), table)
        return {name: (dtype, shape, raw(found[name])) for name, dtype, shape in table}

    def certain(self) -> int | None:
        held = self.held(0)
        return next((n for n in self.goals if held == read_tensors(self.checkpoints[n])), None)


class InEngine(InMemory):
    """An engine behind its own loader."""

    kind = "engine"
    ways_of_bringing = ("follow",)

    def image(self, checkpoint: Path) -> bytes:
        return image_in_engine(read_tensors(checkpoint))

    def limits(self, costs: Costs, goal: int) -> tuple[int, int] | None:
        """Return nothing: it counts tensors, and reads values as often as its loader needs them."""
        return None


KINDS: Mapping[str, type[Kept]] = {
    "in place": Kept,
    "copy": SideBySide,
    "memory": InMemory,
    "shared memory": InSharedMemory,
    "engine": InEngine,
}


def harm_spool(kept: Kept, rng: random.Random) -> str:
    """Do something to what was fetched ahead; return what."""
    harm = rng.choice(harms.SPOOLS)
    harm(kept.spool, rng)
    return harm.__name__
