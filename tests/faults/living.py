"""Processes that live together in one store for a while: trainers, receivers, readers, and those who keep house.

What a version holds follows from its line and number, so that each process knows it. Whoever meets anything else than
the right bits, or a version that has expired, or somebody who is at the same work, ends with what it met.
"""

from __future__ import annotations

import collections
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dcr_store.errors import ConflictError, DcrError, NotFoundError
from dcr_store.receive.results import Applied
from dcr_store.store import Store

State = dict[str, np.ndarray[Any, Any]]
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("uint16", (60, 40)),
    "layers.0.w": ("uint16", (48, 33)),
    "layers.1.w": ("uint16", (48, 33)),
    "norm": ("uint32", (130,)),
    "steps": ("int64", ()),
}
GRACE_S = 1
"""Of collections: shorter than what some readers take, so that things are collected under them."""


def _seeded(text: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def state_of(line: str, number: int) -> State:
    """Return what a version holds; versions of a line that goes on from main hold main's up to where it does."""
    origin = int(line.partition("-")[2]) if line.startswith("exp-") else -1
    line = "main" if number <= origin else line
    found = {}
    for name, (kind, shape) in SHAPES.items():
        bits = _seeded(f"base {name}").integers(0, 1 << 16, shape).astype(kind)
        rng = _seeded(f"{line}@{number} {name}")
        mask = np.where(rng.random(shape) < 0.02, rng.integers(1, 4, shape), 0).astype(kind)
        found[name] = np.asarray(bits ^ mask)
    found["steps"] = np.asarray(np.int64(number))
    return found


def is_expected(error: DcrError) -> bool:
    """Whether who shares a store with others has to reckon with this: a version expired, others are at the same."""
    return isinstance(error, ConflictError | NotFoundError)


def number_of(version: str) -> int:
    return int(version.rpartition("@")[2])


def require(found: State, line: str, number: int) -> None:
    """Require that arrays are those of a version, bit for bit."""
    expected = state_of(line, number)
    assert found.keys() == expected.keys(), f"{line}@{number}: {sorted(found)}"
    for name, array in found.items():
        assert array.dtype == expected[name].dtype, f"{line}@{number} {name}"
        assert np.array_equal(array, expected[name]), f"{line}@{number} {name}: other bits"


class Life:
    """What one process does, again and again, until the file `end` is there; counts what came of it."""

    def __init__(self, store: Store, job: dict[str, Any]) -> None:
        self.store, self.job = store, job
        self.random = Random(job["seed"])
        self.counts: Counter[str] = Counter()
        self._end = Path(job["end"])

    def turns(self, rest_s: float = 0.02) -> Iterator[None]:
        while not self._end.exists():
            yield
            time.sleep(self.random.uniform(0, 2 * rest_s))

    @contextmanager
    def act(self, name: str) -> Iterator[None]:
        """Do something that may come too late for its version, or meet somebody who does the same."""
        try:
            yield
            self.counts[name] += 1
        except DcrError as error:
            if not is_expected(error):
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            self.counts[f"{name}: {error.kind}"] += 1

    def kept(self, line: str = "main") -> list[int]:
        """Return the numbers of the versions that were kept a moment ago."""
        return [number_of(info.version) for info in self.store.log(line) if info.is_kept]

    def any_kept(self, line: str = "main") -> int:
        kept = self.kept(line)
        if not kept:
            raise NotFoundError("there is no version yet", key=line)
        return self.random.choice(kept)


def begin(life: Life) -> None:
    for line in ("main", "side"):
        publish_next(life, line)


def publish(life: Life) -> None:
    line = life.job["line"]
    for _ in life.turns(0.05):
        publish_next(life, line)


def publish_next(life: Life, line: str) -> None:
    """Publish the line's next version; who is started again finishes what he had begun."""
    with life.act("publish"), life.store.begin(line, owner=f"trainer of {line}") as transaction:
        for name, array in state_of(line, number_of(transaction.version)).items():
            transaction.write(name, array)


def fork(life: Life) -> None:
    """Begin lines that go on from versions of main, and publish on them."""
    for _ in life.turns(0.3):
        with life.act("fork"):
            number = life.any_kept()
            line = f"exp-{number}"
            life.store.fork(f"main@{number}", line)
            publish_next(life, line)
            info = life.store.log(line)[-1]
            require(life.store.read(info.version), line, number_of(info.version))


def receive(life: Life) -> None:
    """Follow main in memory, alone or as a member of a group; look at all bits after each version."""
    target = {name: np.zeros_like(array) for name, array in state_of("main", 0).items()}
    told = {name: life.job[name] for name in ("group", "name") if name in life.job}

    def look(done: Applied) -> None:
        require(target, "main", number_of(done.version))
        life.counts["apply"] += 1

    def fail(error: DcrError, _: float) -> None:
        if not is_expected(error):
            raise AssertionError(f"a receiver failed: {error}") from error

    with life.store.receiver(target, line="main", **told) as receiver:
        watch = threading.Thread(target=lambda: (collections.deque(life.turns(), 0), receiver.stop()))
        watch.start()
        receiver.follow(on_applied=look, on_failure=fail)
        watch.join()


def read(life: Life) -> None:
    """Read versions of all lines, whole and in part, one by one and in a walk, and compare two."""
    for _ in life.turns():
        line = life.random.choice(life.store.lines())
        way = life.random.choice(("read", "read part", "walk", "diff"))
        with life.act(way):
            number = life.any_kept(line)
            if way == "read":
                require(life.store.read(f"{line}@{number}"), line, number)
            elif way == "read part":
                part = life.store.read(f"{line}@{number}", {"layers.0.w": (slice(10, 20), slice(None, None, 2))})
                assert np.array_equal(part["layers.0.w"], state_of(line, number)["layers.0.w"][10:20, ::2])
            elif way == "walk":
                for state in life.store.iter_states(line, number, number + 4):
                    require(state.tensors, line, number_of(state.info.version))
            else:
                other = life.any_kept(line)
                before, after = state_of(line, other), state_of(line, number)
                n_changed = {name: int(np.count_nonzero(before[name] != after[name])) for name in before}
                found = life.store.diff(f"{line}@{other}", f"{line}@{number}").tensors
                assert {tensor.name: tensor.changed for tensor in found} == n_changed


def anchor(life: Life) -> None:
    for _ in life.turns(0.1):
        with life.act("anchor"):
            life.store.anchor(f"main@{life.any_kept()}", owner="who anchors")
        with life.act("anchor if due"):
            life.store.anchor_if_due("main", every=10, owner="who anchors")


def fold(life: Life) -> None:
    for _ in life.turns(0.1):
        with life.act("fold"):
            kept = life.kept()
            start = life.random.randrange(max(1, len(kept) - 1))
            if len(kept) > start + 1:
                goal = kept[min(start + life.random.randint(1, 5), len(kept) - 1)]
                life.store.fold(f"main@{kept[start]}", f"main@{goal}", owner="who folds")


def expire(life: Life) -> None:
    for _ in life.turns(0.3):
        with life.act("expire"):
            expiry = life.store.expire("main", keep_last=life.random.randint(3, 9), keep_every=7, owner="who lets go")
            life.counts["versions expired"] += len(expiry.versions)


def collect(life: Life) -> None:
    for _ in life.turns(0.2):
        with life.act("gc"):
            life.counts["objects collected"] += len(life.store.gc(grace_s=GRACE_S).keys)


def name(life: Life) -> None:
    """Put tags and pins and take them away; what one of them names stays."""
    for _ in life.turns(0.1):
        kind = life.random.choice(("tag", "pin"))
        own = f"{kind}{life.random.randrange(3)}"
        with life.act("take away"):
            if kind == "tag":
                life.store.delete_tag("main", own)
            else:
                life.store.delete_pin(own)
        is_named = False
        with life.act(kind):
            number = life.any_kept()
            getattr(life.store, kind)(f"main@{number}", own)
            is_named = True
        if is_named:
            time.sleep(life.random.uniform(0, 0.5))
            require(life.store.read(f"main@{number}"), "main", number)


ROLES: dict[str, Callable[[Life], None]] = {
    role.__name__: role for role in (begin, publish, fork, receive, read, anchor, fold, expire, collect, name)
}


def live(store: Store, job: dict[str, Any]) -> dict[str, Any]:
    """Play a role until the end; return how often what came of it."""
    life = Life(store, job)
    ROLES[job["role"]](life)
    return {"counts": life.counts}
