"""Transactions of several writers against a dict of arrays: any topology, order, change rate, crash and abort.

Each version has the root of a store in which one process published the same states, and reads back bit for bit. What
the writers sealed satisfies the identities of docs/spec/v1.md §8, computed here from the bits and the maps alone.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stateful.machines import machine
from states import assert_same, raw

import dcr_store
from dcr_store.codec.digest import crc64, linear
from dcr_store.errors import FencedError, InvalidInputError, LagError
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.dtypes import uint_dtype, width
from dcr_store.payload import contributions
from dcr_store.publish.joint import SliceTransaction
from dcr_store.publish.ownership import Ownership
from dcr_store.store import Store

CHUNK_ELEMENTS = 64
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "a": ("BF16", (12, 20)),
    "b": ("BF16", (12, 20)),
    "c": ("F32", (9, 7, 4)),
    "d": ("C128", (8, 6)),
    "e": ("I64", (130,)),
    "f": ("F8_E4M3", (10, 31)),
    "g": ("F32", ()),
    "h": ("BF16", (0, 4)),
    "i": ("BF16", (3,)),
}
OTHER_SHAPES = {**SHAPES, "i": ("BF16", (4, 2)), "j": ("F32", (5,))}
NUMPY = {
    "BF16": BF16,
    "F32": np.dtype("<f4"),
    "C128": np.dtype("<c16"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
NAMES = ("w0", "w1", "w2", "w3")
MAPPED = ("w0", "w2")  # have their baselines in files, which outlive their processes
MEMORY = "/dev/shm"
State = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Write:
    """One write of one writer: a slice by its map, or `n` values of a tensor from `start` as residual."""

    writer: str
    mapped: AffineMap | None
    tensor: str = ""
    start: int = 0
    n: int = 0

    def give(self, transaction: SliceTransaction, state: State) -> None:
        if self.mapped is None:
            flat = state[self.tensor].reshape(-1)
            transaction.write_residual(self.tensor, flat[self.start : self.start + self.n], self.start)
            return
        local = np.frombuffer(b"\x5a" * math.prod(self.mapped.shape) * 16, np.uint8)
        row = NUMPY[self.mapped.dtype]
        local = local[: math.prod(self.mapped.shape) * row.itemsize].view(row).copy()
        for name in self.mapped.tensors:
            there = self.mapped.canonical_of(name, np.arange(len(local)))
            local[there >= 0] = state[name].reshape(-1)[there[there >= 0]]
        transaction.write_slice(local.reshape(self.mapped.shape), self.mapped)

    @property
    def announced(self) -> AffineMap:
        if self.mapped is not None:
            return self.mapped
        return slices.flat_part(self.tensor, *_shapes(self.tensor), self.start, self.start + self.n)


_told: dict[str, tuple[str, tuple[int, ...]]] = {}


def _shapes(name: str) -> tuple[str, tuple[int, ...]]:
    return _told[name]


def split(data: st.DataObject, shapes: dict[str, tuple[str, tuple[int, ...]]], writers: tuple[str, ...]) -> list[Write]:
    """Draw who writes what: each element once."""
    _told.clear()
    _told.update(shapes)
    seed = data.draw(st.integers(0, 2**32 - 1), "topology")
    rng = np.random.default_rng(seed)

    def who() -> str:
        return str(rng.choice(writers))

    found: list[Write] = []
    names = list(shapes)
    if rng.random() < 0.4:  # two tensors of one shape in one slice
        names.remove("a")
        names.remove("b")
        both = {"a": shapes["a"][1], "b": shapes["b"][1]}
        for rank in range(2):
            kind = rng.integers(3)
            if kind == 0:
                mapped = slices.fused(both, "BF16", rank, 2)
            elif kind == 1:
                mapped = slices.qkv(both, "BF16", 2, rank, 2)
            else:
                mapped = slices.stacked([slices.column_parallel(n, "BF16", s, rank, 2) for n, s in both.items()], 1)
            if rng.random() < 0.3:
                mapped = slices.padded(mapped, [n + int(rng.integers(3)) for n in mapped.shape])
            found.append(Write(who(), mapped))  # in each way the rows 0-5 of both, then 6-11
    for name in names:
        dtype, shape = shapes[name]
        n = math.prod(shape)
        kind = int(rng.integers(4))
        if kind == 0 or n < 2:
            mapped = slices.whole(name, dtype, shape)
            found.append(Write(who(), mapped) if rng.random() < 0.7 else Write(who(), None, name, 0, n))
        elif kind == 1:  # any cuts of the flat tensor, some of nothing
            cuts = sorted({0, n, *rng.integers(0, n + 1, int(rng.integers(1, 5))).tolist()})
            for start, stop in itertools.pairwise(cuts):
                if rng.random() < 0.5:
                    found.append(Write(who(), None, name, start, stop - start))
                else:
                    found.append(Write(who(), slices.flat_part(name, dtype, shape, start, stop)))
        else:
            dim, n_ranks = int(rng.integers(len(shape))), int(rng.integers(1, 5))
            for rank in range(n_ranks):
                mapped = slices.sharded(name, dtype, shape, dim, rank, n_ranks)
                if len(shape) > 1 and rng.random() < 0.5:
                    mapped = slices.transposed(mapped)
                if 0 not in mapped.shape and rng.random() < 0.3:
                    mapped = slices.padded(mapped, [size + int(rng.integers(3)) for size in mapped.shape])
                found.append(Write(who(), mapped))
    rng.shuffle(found)  # type: ignore[arg-type]
    return found


def changed(state: State, seed: int, rate: float) -> State:
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in state.items():
        octets = np.frombuffer(raw(array), np.uint8).copy()
        hit = rng.random(octets.shape) < rate
        octets[hit] ^= rng.integers(1, 256, int(hit.sum()), dtype=np.uint8)
        if rng.random() < 0.3:
            octets[rng.random(octets.shape) < rate] = 0
        if rng.random() < 0.1:
            octets[:] = 0
        found[name] = octets.view(array.dtype).reshape(array.shape)
    return found


def random_state(shapes: dict[str, tuple[str, tuple[int, ...]]], seed: int) -> State:
    rng = np.random.default_rng(seed)
    if seed % 4 == 0:
        return {name: np.zeros(shape, NUMPY[dtype]) for name, (dtype, shape) in shapes.items()}
    return {
        name: np.frombuffer(rng.bytes(math.prod(shape) * NUMPY[dtype].itemsize), NUMPY[dtype]).reshape(shape).copy()
        for name, (dtype, shape) in shapes.items()
    }


class JointMachine(RuleBasedStateMachine):
    """A store written by writers, each through a store of its own, and one written by a sole publisher."""

    n_stores = 0

    @initialize(codec=st.sampled_from(["dcr.delta", "portable"]), seed=st.integers(0, 2**32 - 1))
    def make(self, codec: str, seed: int) -> None:
        JointMachine.n_stores += 1
        url = f"memory://stateful-joint-{JointMachine.n_stores}"
        self.store = dcr_store.create(url, codec=codec, chunk_elements=CHUNK_ELEMENTS)
        self.alone = dcr_store.create(f"{url}-alone", codec=codec, chunk_elements=CHUNK_ELEMENTS)
        self.url = url
        self.stores: dict[str, Store] = {}
        self.directory = tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.shapes = SHAPES
        self.state = random_state(self.shapes, seed)
        self.model: list[State] = []
        self.n_txids = 0

    def _store_of(self, writer: str) -> Store:
        if writer not in self.stores:
            self.stores[writer] = dcr_store.open(self.url)
        return self.stores[writer]

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 2**32 - 1), rate=st.sampled_from([0.0, 0.0005, 0.01, 0.3, 1.0]))
    def train(self, seed: int, rate: float) -> None:
        self.state = changed(self.state, seed, rate)

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 2**32 - 1))
    def change_the_model(self, seed: int) -> None:
        self.shapes = OTHER_SHAPES if self.shapes is SHAPES else SHAPES
        fresh = random_state(self.shapes, seed)
        self.state = {
            name: self.state[name] if name in self.state and self.state[name].shape == array.shape else array
            for name, array in fresh.items()
        }

    @rule(writer=st.sampled_from(NAMES))
    def end_a_process(self, writer: str) -> None:
        if writer in self.stores:
            self.stores.pop(writer).close()

    @rule(ending=st.sampled_from(["abort", "commit"]))
    def publish_alone(self, ending: str) -> None:
        transaction = self.store.begin(owner="run")
        for name, array in self.state.items():
            transaction.write(name, array)
        if ending == "abort":
            transaction.abort()
        else:
            transaction.commit()
            self._committed()

    @rule(
        data=st.data(),
        n_writers=st.integers(1, 4),
        crashes=st.lists(st.sampled_from(["writer", "sealed", "committer"]), max_size=2),
        ending=st.sampled_from(["commit", "commit", "commit", "abort"]),
    )
    def publish_jointly(self, data: st.DataObject, n_writers: int, crashes: list[str], ending: str) -> None:
        writers = NAMES[:n_writers]
        writes = split(data, self.shapes, writers)
        self.announces = {name: data.draw(st.booleans(), f"{name} announces") for name in writers}
        open_: dict[str, SliceTransaction] = {}
        for writer in writers:
            open_[writer] = self._enter(writer, writers, writes)
        order = data.draw(st.permutations(range(len(writes))), "order")
        crash_at = {data.draw(st.integers(0, len(writes)), "crash at"): kind for kind in crashes}
        written: set[int] = set()
        for step, index in enumerate(order):
            item = writes[index]
            if step in crash_at:
                victim = writers[0] if crash_at[step] == "committer" else item.writer
                self._crash(open_, victim, writers, writes, written, sealed=crash_at[step] == "sealed")
            if index not in written:
                item.give(open_[item.writer], self.state)
                written.add(index)
        for writer in reversed(writers[1:]):
            with pytest.raises(LagError):  # sealed, for the last attempt too
                open_[writer].commit(timeout_s=0)
        if ending == "abort":
            open_[data.draw(st.sampled_from(writers), "who aborts")].abort()
            for transaction in open_.values():
                with pytest.raises((FencedError, InvalidInputError), match="abort"):
                    transaction.commit(timeout_s=5)
            return
        for writer in writers:
            open_[writer].commit(timeout_s=5)
        self._committed()
        self._require_identities(writes, writers)

    def _enter(self, writer: str, writers: tuple[str, ...], writes: list[Write]) -> SliceTransaction:
        told = [item.announced for item in writes if item.writer == writer] if self.announces[writer] else None
        store = self._store_of(writer)
        baseline = self.directory.name if writer in MAPPED else None
        if writer == writers[0]:
            return store.begin(writers=writers, tensors=self.shapes, slices=told, owner="run", baseline=baseline)
        pending = store._catalog.log("main").refresh().open
        assert pending is not None
        return store.join(pending.txid, writer=writer, slices=told, baseline=baseline, timeout_s=5)

    def _crash(
        self,
        open_: dict[str, SliceTransaction],
        victim: str,
        writers: tuple[str, ...],
        writes: list[Write],
        written: set[int],
        *,
        sealed: bool,
    ) -> None:
        """End a writer, after it sealed all of its part or not, and let it join again in a new process."""
        own = [index for index, item in enumerate(writes) if item.writer == victim]
        if sealed:
            for index in own:
                if index not in written:
                    writes[index].give(open_[victim], self.state)
            open_[victim].seal()
        open_.pop(victim)._close()
        gc.collect()
        self.stores.pop(victim).close()
        open_[victim] = self._enter(victim, writers, writes)
        for index in own:
            if sealed or index in written:
                writes[index].give(open_[victim], self.state)
                written.add(index)

    def _committed(self) -> None:
        with self.alone.begin() as transaction:
            for name, array in self.state.items():
                transaction.write(name, array)
        self.model.append({name: array.copy() for name, array in self.state.items()})

    def _require_identities(self, writes: list[Write], writers: tuple[str, ...]) -> None:
        located = self.store._catalog.resolve("main")
        contents = self.store._catalog.contents(located)
        layout = self.store._catalog.layout(located.row.layout)
        is_delta = located.row.base is not None
        objects = self.store._objects
        seals = {ref.writer: seal for ref, (_, seal) in zip(contents.manifest.seals, contents.seals, strict=True)}
        assert set(seals) == set(writers)
        before = self.model[-2] if is_delta else None
        n_changed = 0
        for writer in writers:
            owned = {entry.name: np.zeros(entry.n_elements, bool) for entry in layout.tensors}
            residual = {entry.name: np.zeros(entry.n_elements, bool) for entry in layout.tensors}
            for item in writes:
                if item.writer != writer:
                    continue
                mapped = item.announced
                for name in mapped.tensors:
                    entry = layout.entry(name)
                    per = entry.n_elements // max(1, math.prod(entry.shape)) or 1
                    there = mapped.canonical_of(name, np.arange(math.prod(mapped.shape)))
                    owned[name].reshape(-1, per)[there[there >= 0]] = True
                    if item.mapped is None and is_delta:
                        residual[name].reshape(-1, per)[there[there >= 0]] = True
            rows = contributions.decode(objects.get(seals[writer].contributions.key), "")
            told = Ownership.from_bytes(objects.get(seals[writer].ownership.key), "")
            for space, length in layout.spaces.items():
                n_chunks = -(-length // CHUNK_ELEMENTS)
                kind = uint_dtype(space)
                base, mask, overwritten, ones = (np.zeros(n_chunks * CHUNK_ELEMENTS, kind) for _ in range(4))
                for entry in layout.tensors:
                    if entry.space != space:
                        continue
                    place = slice(entry.start, entry.start + entry.n_elements)
                    mine = owned[entry.name]
                    new = np.frombuffer(raw(self.state[entry.name]), kind)
                    old = np.zeros_like(new) if before is None else np.frombuffer(raw(before[entry.name]), kind)
                    base[place][mine] = old[mine]
                    over = residual[entry.name]
                    mask[place][mine & ~over] = (old ^ new)[mine & ~over]
                    overwritten[place][over] = (old ^ new)[over]
                    ones[place][mine] = np.iinfo(kind).max
                n_changed += int(np.count_nonzero(mask) + np.count_nonzero(overwritten))

                def digests(bits: np.ndarray[Any, Any], kind: Any = kind, space: str = space) -> dict[int, int]:
                    nbytes = CHUNK_ELEMENTS * width(space)
                    chunks = bits.reshape(-1, CHUNK_ELEMENTS)
                    return {n: linear(crc64(chunk.copy()), nbytes) for n, chunk in enumerate(chunks)}

                wanted_ones = {n: d for n, d in digests(ones).items() if ones.reshape(-1, CHUNK_ELEMENTS)[n].any()}
                assert dict(told.ones[space].tolist()) == wanted_ones
                found = {int(row[0]): row[1:] for row in rows[space]}
                assert list(found) == sorted(wanted_ones), "a row for each chunk of which it owns something"
                for chunk, row in found.items():
                    assert row.tolist() == [digests(bits)[chunk] for bits in (mask, overwritten, base)]
        counts = located.row.counts
        assert counts.changed == (n_changed if is_delta else counts.elements)

    @invariant()
    def roots_and_bits_are_those_of_one_publisher(self) -> None:
        if not hasattr(self, "model"):
            return
        log = self.store.log()
        assert [info.root for info in log] == [info.root for info in self.alone.log()]
        if self.model:
            assert_same(self.store.read(), self.model[-1])

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for store in self.stores.values():
                store.close()
            self.directory.cleanup()
            report = self.store.verify(deep=True)
            assert report.ok, report.problems
            for number, state in enumerate(self.model):
                assert_same(self.store.read(f"main@{number}"), state)


TestJoint = JointMachine.TestCase
TestJoint.settings = machine(10, 12)
