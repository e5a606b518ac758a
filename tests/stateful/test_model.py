"""A store against a dict: any sequence of publishes, aborts, pulls, damage to local copies, reopened stores.

Whatever happens, every version reads back as it was written, and every pulled directory holds the version pulled.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stateful.machines import machine
from states import assert_same, raw, tree, write_hf

import dcr_store
from dcr_store.targets.safetensors_file import read_header

DTYPES = (ml_dtypes.bfloat16, np.float32, np.int8, np.float64)
NAMES = ("a", "b.weight", "c/d", "é")
seeds = st.integers(0, 2**32 - 1)


def _tensor(seed: int) -> np.ndarray[Any, Any]:
    """Return a tensor of any dtype and shape, 0-d and empty ones too, with any bits."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(DTYPES[int(rng.integers(len(DTYPES)))])
    shape = tuple(int(n) for n in rng.integers(0, 30, int(rng.integers(0, 3))))
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(n_bytes), dtype).reshape(shape)


def _changed(array: np.ndarray[Any, Any], seed: int, rate: float) -> np.ndarray[Any, Any]:
    """Return `array` with about `rate` of its bits' bytes flipped."""
    rng = np.random.default_rng(seed)
    data = np.frombuffer(raw(array), np.uint8).copy()
    hit = rng.random(data.shape) < rate
    data[hit] ^= rng.integers(1, 256, int(hit.sum()), dtype=np.uint8)
    return data.view(array.dtype).reshape(array.shape)


class StoreMachine(RuleBasedStateMachine):
    """One store, one baseline directory, one pulled directory."""

    @initialize(codec=st.sampled_from(["dcr.delta", "portable"]), seed=seeds)
    def start(self, codec: str, seed: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="dcr-model-"))
        self.store = dcr_store.create(self.root / "store", codec=codec, chunk_elements=64)
        self.model: list[dict[str, np.ndarray[Any, Any]]] = []
        self.pulled: int | None = None
        self.state = {name: _tensor(seed + i) for i, name in enumerate(NAMES)}

    def teardown(self) -> None:
        if hasattr(self, "root"):
            assert self.store.verify(deep=True).problems == []
            self.store.close()
            shutil.rmtree(self.root)

    def _publish(self, state: dict[str, np.ndarray[Any, Any]], *, as_files: int, keep: bool, order_seed: int) -> None:
        baseline = self.root / "baseline" if keep else None
        with self.store.begin(metadata={"n": len(self.model)}, baseline=baseline) as tx:
            if as_files:
                shutil.rmtree(self.root / "run", ignore_errors=True)
                tx.write_checkpoint(write_hf(self.root / "run", state, as_files, step=len(self.model)))
            else:
                names = list(state)
                np.random.default_rng(order_seed).shuffle(names)
                for name in names:
                    tx.write(name, state[name])
            info = tx.commit()
        assert info.version == f"main@{len(self.model)}"
        self.model.append(dict(state))

    @rule(seed=seeds, rate=st.sampled_from([0.0, 0.01, 0.3, 1.0]), files=st.integers(0, 2), keep=st.booleans())
    def publish(self, seed: int, rate: float, files: int, keep: bool) -> None:
        self.state = {name: _changed(array, seed + i, rate) for i, (name, array) in enumerate(self.state.items())}
        self._publish(self.state, as_files=files, keep=keep, order_seed=seed)

    @rule(seed=seeds, name=st.sampled_from(NAMES), keep=st.booleans())
    def publish_another_layout(self, seed: int, name: str, keep: bool) -> None:
        state = dict(self.state)
        if name in state and len(state) > 1 and seed % 2:
            del state[name]
        else:
            state[name] = _tensor(seed)
        self.state = state
        self._publish(state, as_files=0, keep=keep, order_seed=seed)

    @rule(seed=seeds)
    def fail_in_the_middle(self, seed: int) -> None:
        def fail() -> None:
            with self.store.begin() as tx:
                tx.write("a", _tensor(seed))
                raise RuntimeError("the trainer died")

        with pytest.raises(RuntimeError, match="the trainer died"):
            fail()

    @rule()
    def abort(self) -> None:
        self.store.begin().abort()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = dcr_store.open(self.root / "store")

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.model) - 1))
        result = self.store.pull(self.root / "node", f"main@{number}")
        assert result.version == f"main@{number}"
        self.pulled = number
        self._check_pulled()

    @precondition(lambda self: self.pulled is not None)
    @rule(seed=seeds, marker=st.sampled_from(["kept", "torn", "gone"]))
    def damage_the_directory_and_pull(self, seed: int, marker: str) -> None:
        rng = np.random.default_rng(seed)
        for path in (self.root / "node").glob("*.safetensors"):
            data = bytearray(path.read_bytes())
            start = read_header(path).data_start
            if len(data) > start:
                at = int(rng.integers(start, len(data)))
                data[at : at + 40] = bytes(len(data[at : at + 40])) if seed % 2 else rng.bytes(len(data[at : at + 40]))
                path.write_bytes(data)
        note = self.root / "node" / ".dcr" / "marker.json"
        if marker == "torn":
            note.write_bytes(note.read_bytes()[: int(rng.integers(0, 40))])
        elif marker == "gone":
            note.unlink()
        self.store.pull(self.root / "node", f"main@{self.pulled}")
        self._check_pulled()

    @rule(seed=seeds, how=st.sampled_from(["delete", "scribble", "note"]))
    def damage_the_baseline(self, seed: int, how: str) -> None:
        baseline = self.root / "baseline"
        rng = np.random.default_rng(seed)
        if how == "delete":
            shutil.rmtree(baseline, ignore_errors=True)
        for path in baseline.glob("*.bin" if how == "scribble" else "*.json"):
            data = bytearray(path.read_bytes())
            if data:
                at = int(rng.integers(len(data)))
                data[at : at + 8] = rng.bytes(len(data[at : at + 8]))
                path.write_bytes(data)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def read_some(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.model) - 1))
        names = data.draw(st.lists(st.sampled_from(sorted(self.model[number])), unique=True, min_size=1))
        found = self.store.read(f"main@{number}", names)
        assert_same(found, {name: self.model[number][name] for name in names})

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def diff(self, data: st.DataObject) -> None:
        numbers = st.integers(0, len(self.model) - 1)
        a, b = data.draw(numbers), data.draw(numbers)
        old, new = self.model[a], self.model[b]
        found = {item.name: item for item in self.store.diff(f"main@{a}", f"main@{b}").tensors}
        assert set(found) == set(old) | set(new)
        for name, array in new.items():
            if name not in old:
                assert found[name].status == "added"
            elif (old[name].dtype, old[name].shape) != (array.dtype, array.shape):
                assert found[name].status == "altered"
            else:
                bits = np.dtype(f"u{array.dtype.itemsize}")
                one = np.frombuffer(raw(old[name]), bits)
                assert found[name].changed == int((one != np.frombuffer(raw(array), bits)).sum())

    def _check_pulled(self) -> None:
        assert self.pulled is not None
        expected = self.model[self.pulled]
        shutil.rmtree(self.root / "fresh", ignore_errors=True)
        self.store.checkout(f"main@{self.pulled}", self.root / "fresh")
        assert tree(self.root / "node") == tree(self.root / "fresh")
        found = {}
        for path in (self.root / "fresh").glob("*.safetensors"):
            data = path.read_bytes()
            found.update({t.name: data[t.begin : t.end] for t in read_header(path).tensors})
        assert found == {name: raw(array) for name, array in expected.items()}

    @invariant()
    def every_version_is_there(self) -> None:
        if not hasattr(self, "model"):
            return
        log = self.store.log()
        assert [info.version for info in log] == [f"main@{n}" for n in range(len(self.model))]
        assert [info.metadata["n"] for info in log] == list(range(len(self.model)))
        if self.model:
            assert_same(self.store.read(), self.model[-1])


TestStore = StoreMachine.TestCase
TestStore.settings = machine(12, 14)
