"""What broke for users of other systems, one test each. The docstrings say what happened there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from faults.failing import FailingObjects, over, publish
from faults.processes import Nursery
from faults.scenes import Place, assert_checkpoint, rename_side_file, seeded
from states import assert_same, raw, tree, write_hf

from dcr_store import events
from dcr_store.errors import (
    ConflictError,
    DcrError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    StorageError,
)
from dcr_store.layout.dtypes import uint_dtype
from dcr_store.layout.layout import LayoutBuilder
from dcr_store.objects.open import open_objects
from dcr_store.ports import Bytes
from dcr_store.publish import partitions
from dcr_store.store import Store
from dcr_store.targets.directory import DirectoryTarget
from dcr_store.targets.safetensors_file import make_header

Array = np.ndarray


@pytest.fixture
def place(scratch: Path) -> Place:
    return Place(str(scratch / "store"))


@pytest.fixture
def store(place: Place) -> Store:
    return place.create(chunk_elements=64)


def commit(store: Store, state: dict[str, Any], **options: Any) -> str:
    with store.begin(**options) as transaction:
        for name, tensor in state.items():
            transaction.write(name, tensor)
        return transaction.commit().version


def test_01_a_receiver_that_dies_between_two_tensors_recovers(
    nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """A receiver died between two tensors' XOR; every retry then failed its checksum, forever."""
    store = place.create()
    for checkpoint in checkpoints[1:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    job = {"do": "pull", "directory": str(target), **place.job}
    for nth in (1, 7, 7, 3, 12):
        assert nursery.run(**job, kill=["replay.chunk.before", nth]).killed
    outcome = nursery.finish(**job)
    assert outcome.told["chunks_healed"] == 0, "chunks were at one of two versions: nothing had to be rebuilt"
    assert_checkpoint(target, checkpoints[2])


def test_02_a_number_that_was_taken_again_is_not_the_version_pulled_before(
    place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """A restarted trainer began again at version 0; receivers took the new v1 for the one they had."""
    store = place.create()
    for checkpoint in checkpoints[:2]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@1")
    # The store was lost and made anew: another store, and receivers say so.
    shutil.rmtree(place.url)
    store = place.create()
    for checkpoint in (checkpoints[2], checkpoints[3]):
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    with pytest.raises(InvalidInputError, match="follows another store") as caught:
        store.pull(target, "main@1")
    assert caught.value.key == str(target)
    assert (target / "config.json").exists()
    store.pull(target, "main@1", force=True)
    assert store.compare_directory("main@1", target).ok
    assert {path.name for path in target.glob("*.safetensors")} == {
        path.name for path in checkpoints[3].glob("*.safetensors")
    }
    # The store was restored from a copy, and number 2 was published again, otherwise.
    copy = shutil.copytree(place.url, scratch / "copy")
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoints[1])
    store.pull(target)
    shutil.rmtree(place.url)
    shutil.copytree(copy, place.url)
    store = place.open()
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoints[5])
    before = tree(target)
    for version in ("main@1", "main@2"):
        with pytest.raises(InvalidInputError, match="version that the store does not have") as caught:
            store.pull(target, version)
        assert "main@2" in str(caught.value)
        assert tree(target) == before
    store.pull(target, force=True)
    assert store.compare_directory("main@2", target).ok
    # The same weights under another number are known again.
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoints[6])
    store.pull(target)
    shutil.rmtree(place.url)
    shutil.copytree(copy, place.url)
    store = place.open()
    for checkpoint in (checkpoints[4], checkpoints[5], checkpoints[6]):
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    assert store.pull(target).chunks_written == 0
    assert store.compare_directory("main@4", target).ok


def test_03_the_base_is_compared_not_named(store: Store, scratch: Path) -> None:
    """A store opened with another base model served the previous one: the base was named, never compared."""
    model, other = {"w": np.arange(300, dtype=np.int32)}, {"w": np.arange(300, dtype=np.int32)[::-1]}
    commit(store, model)
    root = store.log()[0].root
    with pytest.raises(ConflictError) as caught:
        store.begin(base="f" * 64)
    assert "f" * 64 in str(caught.value)
    with pytest.raises(ConflictError):
        store.begin(base="main@7")
    # The trainer has another base model: every weight differs, and every weight is published.
    commit(store, other, base=root, baseline=scratch / "baseline")
    info = store.log()[1]
    assert info.changed == 300
    assert_same(store.read(), {"w": other["w"]})


@pytest.mark.parametrize("late", [False, True])
def test_04_the_baseline_does_not_advance_before_the_commit(
    store: Store, place: Place, scratch: Path, late: bool
) -> None:
    """The sender's snapshot advanced before the publish was durable; the next delta had no base anywhere."""
    states = [{"w": np.arange(300, dtype=np.int32) * factor} for factor in (1, 2, 3)]
    commit(store, states[0], baseline=scratch / "baseline")
    before = (scratch / "baseline" / "u32.bin").read_bytes()
    objects = FailingObjects(open_objects(place.url), late=late)
    failing = over(objects)
    transaction = failing.begin(baseline=scratch / "baseline")
    transaction.write("w", states[1]["w"])

    def fail(event: events.Event) -> None:
        if event.name == "log.commit.before":
            objects.at, objects.lasting = objects.n_calls, True

    with events.listening(fail), pytest.raises(DcrError):
        transaction.commit()
    assert (scratch / "baseline" / "u32.bin").read_bytes() == before
    objects.at = None
    transaction.abort()
    fresh = place.open()
    commit(fresh, states[2], baseline=scratch / "baseline")
    assert_same(fresh.read(), states[2])
    assert [info.base for info in fresh.log()] == [None, "main@0", "main@1"][: len(fresh.log())]
    assert fresh.verify(deep=True).ok


@pytest.mark.parametrize("content", [b"", b"{", b'{"body": {', b"null", b"[]", b"\x00" * 100, b"\xff\xfe"])
def test_05_a_torn_state_file_is_no_error(store: Store, scratch: Path, content: bytes) -> None:
    """State file torn by a crash: JSON error at start."""
    states = [{"w": np.arange(300, dtype=np.int32) * factor} for factor in (1, 2, 3)]
    for state in states[:2]:
        commit(store, state, baseline=scratch / "baseline")
    store.pull(scratch / "target", "main@0")
    (scratch / "baseline" / "baseline.json").write_bytes(content)
    (scratch / "target" / ".dcr" / "marker.json").write_bytes(content)
    store._objects.put("log/main/latest.json", content)
    fresh = Place(store.url).open()
    commit(fresh, states[2], baseline=scratch / "baseline")
    fresh.pull(scratch / "target")
    assert fresh.compare_directory("main", scratch / "target").ok
    assert_same(fresh.read(), states[2])


def test_06_a_partial_refit_is_finished_by_the_same_process(
    place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """A partial refit needed operators: recover without a restart, never XOR twice, versions checked before commit."""
    store = place.create()
    for checkpoint in checkpoints[1:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    objects = FailingObjects(open_objects(place.url))
    receiver = over(objects)
    n_failures = 0
    for at in range(100):
        objects.at, objects.n_calls = at, 0
        try:
            receiver.pull(target, "main@1")
        except StorageError:
            n_failures += 1
            continue
        break
    assert n_failures > 3
    assert_checkpoint(target, checkpoints[2])


def test_07_a_payload_that_comes_twice_changes_nothing(store: Store, place: Place, scratch: Path) -> None:
    """A late duplicate payload re-applied its XOR and reverted weights."""
    states = [{"w": np.arange(300, dtype=np.int32) * factor} for factor in (1, 2)]
    for state in states:
        commit(store, state)
    target = scratch / "target"
    store.pull(target, "main@0")
    for nth in range(3):
        result = store.pull(target, "main@1")
        assert (result.chunks_written == 0) == (nth > 0)
        assert store.compare_directory("main@1", target).ok
    # The marker says that nothing has been applied yet: a client that asks again from the old version.
    note = (target / ".dcr" / "marker.json").read_bytes()
    store.pull(target, "main@0")
    old = (target / ".dcr" / "marker.json").read_bytes()
    store.pull(target, "main@1")
    assert note != old
    (target / ".dcr" / "marker.json").write_bytes(old)
    assert store.pull(target, "main@1").chunks_written == 0
    assert store.compare_directory("main@1", target).ok
    # The uploader repeats each put, late.
    objects = open_objects(place.url)
    for key in objects.list("versions/"):
        objects.put(key, objects.get(key))
    assert place.open().verify(deep=True).ok


def test_08_a_weight_that_becomes_nan_is_a_change(store: Store) -> None:
    """A weight that became NaN was skipped (NaN as "unchanged"), and verification reported zero mismatches."""
    for dtype, quiet, other in [
        (ml_dtypes.bfloat16, 0x7FC0, 0x7FC1),
        (np.float32, 0x7FC00000, 0xFFC00001),
        (np.float16, 0x7E00, 0xFE01),
        (np.float64, 0x7FF8000000000000, 0x7FF8000000000001),
        (ml_dtypes.float8_e4m3fn, 0x7F, 0xFF),
    ]:
        line = np.dtype(dtype).name
        width = np.dtype(dtype).itemsize
        states = [np.ones(200, dtype) for _ in range(4)]
        states[1].view(f"u{width}")[5] = quiet
        states[2].view(f"u{width}")[5] = other
        for state in states:
            commit(store, {"w": state}, line=line)
        assert [info.changed for info in store.log(line)] == [200, 1, 1, 1]
        for number, state in enumerate(states):
            assert raw(store.read(f"{line}@{number}")["w"]) == raw(state)
    assert store.verify(deep=True).ok


def test_09_minus_zero_is_not_zero(store: Store) -> None:
    """-0.0 against +0.0 compared equal."""
    for dtype in (ml_dtypes.bfloat16, np.float32, np.float64, np.float16, ml_dtypes.float8_e5m2):
        line = np.dtype(dtype).name
        zero, minus = np.zeros(100, dtype), np.zeros(100, dtype)
        minus[17] = -minus[17]
        assert raw(minus) != raw(zero)
        for state in (zero, minus, zero):
            commit(store, {"w": state}, line=line)
        assert [info.changed for info in store.log(line)] == [100, 1, 1]
        assert raw(store.read(f"{line}@1")["w"]) == raw(minus)


@pytest.mark.parametrize(
    ("dtype", "n_elements"), [("U8", (1 << 32) + 1000), ("BF16", (1 << 31) + 70_000), ("F32", (1 << 31) + 5)]
)
def test_10_positions_beyond_32_bits(scratch: Path, dtype: str, n_elements: int) -> None:
    """32-bit positions wrapped for tensors over 4 GiB, or 2^31 elements."""
    builder = LayoutBuilder()
    builder.add("first", dtype, (64,))
    entry = builder.add("large", dtype, (n_elements,))
    layout = builder.build()
    chunk_elements = 1 << 20
    space = entry.space
    uint = uint_dtype(space)
    header = make_header([("first", dtype, (64,)), ("large", dtype, (n_elements,))])
    nbytes = len(header) + (64 + n_elements) * uint.itemsize
    os.truncate(_made(scratch / "model.safetensors", header), nbytes)  # sparse: it takes no space
    with DirectoryTarget(scratch, layout, [("model.safetensors", header, nbytes)], chunk_elements) as target:
        last = layout.n_chunks(space, chunk_elements) - 1
        for chunk in (last, (1 << 31) // chunk_elements, (1 << 30) // chunk_elements):
            pieces = layout.pieces(space, chunk * chunk_elements, (chunk + 1) * chunk_elements)
            assert pieces[0].tensor_start == chunk * chunk_elements - entry.start
            bits = np.zeros(chunk_elements, uint)
            n_real = pieces[0].tensor_stop - pieces[0].tensor_start
            bits[:n_real] = np.arange(n_real) % 200 + 1
            target.write_chunk(space, chunk, bits)
            found = np.empty_like(bits)
            target.read_chunk(space, chunk, found)
            assert np.array_equal(found, bits)
            offset = len(header) + (64 + pieces[0].tensor_start) * uint.itemsize
            with (scratch / "model.safetensors").open("rb") as file:
                file.seek(offset)
                assert file.read(n_real * uint.itemsize) == bits[:n_real].tobytes()
        found = np.empty(chunk_elements, uint)
        target.read_chunk(space, 0, found)
        assert not found.any(), "nothing wrapped round to the front"


def _made(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_11_a_tensor_that_comes_twice_is_refused(store: Store, scratch: Path) -> None:
    """A tensor exported by two pipeline stages was XORed twice."""
    state = {"w": np.arange(300, dtype=np.int32), "v": np.arange(64, dtype=np.int32)}
    commit(store, state)
    transaction = store.begin()
    transaction.write("w", state["w"] * 2)
    with pytest.raises(InvalidInputError, match="already written"):
        transaction.write("w", state["w"] * 2)
    transaction.abort()
    checkpoint = write_hf(scratch / "checkpoint", state)
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "model-2.safetensors")
    with pytest.raises(InvalidInputError, match="model-2"), store.begin() as transaction:
        transaction.write_checkpoint(checkpoint)
    assert len(store.log()) == 1
    assert_same(store.read(), state)


def test_12_the_version_does_not_move_when_applying_fails(place: Place, scratch: Path, checkpoints: list[Path]) -> None:
    """The version moved although apply had failed."""
    store = place.create()
    for checkpoint in checkpoints[1:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    objects = open_objects(place.url)
    damaged = next(key for key in objects.list("versions/") if "/000000000001-" in key and "/u64/mask/c/" in key)
    whole = objects.get(damaged)
    objects.put(damaged, whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(IntegrityError) as caught:
            place.open().pull(target, "main@1")
        assert caught.value.key == damaged
        marker = json.loads((target / ".dcr" / "marker.json").read_bytes())["body"]
        assert (marker["state"], marker["base"]) == ("dirty", "main@0")
    objects.put(damaged, whole)
    result = place.open().pull(target, "main@1")
    assert result.previous == "main@0"
    assert_checkpoint(target, checkpoints[2])


def test_13_an_anchor_holds_every_parameter(store: Store, place: Place) -> None:
    """Anchors left out parameters that had not changed."""
    state: dict[str, Array] = {"w": np.arange(300, dtype=np.int32), "zeros": np.zeros(200, np.float32)}
    commit(store, state)
    grown = {**state, "extra": np.ones(10, np.int8)}
    commit(store, grown)
    assert store.log()[1].base is None
    assert store.log()[1].changed == 300 + 200 + 10
    # Nothing of the versions before is needed.
    objects = open_objects(place.url)
    for key in objects.list("versions/"):
        if "/000000000000-" in key:
            objects.delete(key)
    assert_same(place.open().read("main@1"), grown)


def test_14_a_chain_with_a_hole_and_a_base_of_another_training(
    place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    """A chain pruned under a reader; a base from another training checkpoint corrupted silently."""
    store = place.create()
    for checkpoint in checkpoints[:4]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    foreign = write_hf(scratch / "foreign", {"embed.weight": np.ones((67, 48), ml_dtypes.bfloat16)})
    with pytest.raises(InvalidInputError, match="no version of this store"):
        store.pull(foreign, "main@3")
    # Of the right tensors, but with weights of another training: taken for what they are, not for a base.
    alike = shutil.copytree(checkpoints[2], scratch / "alike")
    for path in alike.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-9] ^= 0x40
        path.write_bytes(data)
    with pytest.raises(InvalidInputError, match="no version of this store"):
        store.pull(alike, "main@3")
    assert not (alike / ".dcr").exists()
    store.pull(alike, "main@3", force=True)
    assert store.compare_directory("main@3", alike).ok
    store.pull(scratch / "behind", "main@2")
    objects = open_objects(place.url)
    pruned = next(key for key in objects.list("versions/") if "/000000000001-" in key and "/u16/mask/c/" in key)
    objects.delete(pruned)
    with pytest.raises(IntegrityError, match="missing") as caught:
        place.open().read("main@3")
    assert caught.value.key == pruned
    with pytest.raises(IntegrityError) as caught:
        place.open().pull(scratch / "new", "main@3")
    assert caught.value.key == pruned
    # Who is past the hole goes on.
    place.open().pull(scratch / "behind", "main@3")
    assert_checkpoint(scratch / "behind", checkpoints[3])


def test_16_replaying_costs_one_fetch_a_delta(store: Store, place: Place, scratch: Path) -> None:
    """Replaying N deltas cost O(N²)."""
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 1 << 16, 4000).astype(np.uint16)
    costs: dict[int, tuple[int, int]] = {}
    for number in range(33):
        weight = weight.copy()
        weight[rng.integers(0, 4000, 40)] ^= 1
        commit(store, {"w": weight})
        if number in (8, 16, 32):
            objects = FailingObjects(open_objects(place.url))
            over(objects).read(f"main@{number}")
            fetched = over(open_objects(place.url)).pull(scratch / f"target{number}", f"main@{number}").nbytes_fetched
            costs[number] = objects.n_calls, fetched
    for part in (0, 1):
        first, second = costs[16][part] - costs[8][part], costs[32][part] - costs[16][part]
        assert second <= 2 * first * 1.3, costs


HOSTILE = ["../evil", "/tmp/dcr-evil", "a/../../evil", ".", "..", "", "a//b", ".dcr/marker.json", "a\\b", "a\0b", "./a"]


@pytest.mark.parametrize("path", HOSTILE)
def test_17_paths_of_a_hostile_manifest_are_refused(
    place: Place, scratch: Path, checkpoints: list[Path], path: str
) -> None:
    """Names from a manifest used as paths (`..`, absolute, ".")."""
    store = place.create()
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoints[0])
    objects = open_objects(place.url)
    manifest_key = rename_side_file(objects, path)
    objects.delete("log/main/latest.json")
    before = set(scratch.parent.iterdir()) | set(scratch.iterdir())
    for attempt in (
        lambda: place.open().pull(scratch / "in" / "target"),
        lambda: place.open().read(),
        lambda: place.open().show("main@0"),
    ):
        with pytest.raises((FormatError, InvalidInputError)) as caught:
            attempt()
        assert caught.value.key is not None or repr(path) in str(caught.value)
    after = set(scratch.parent.iterdir()) | set(scratch.iterdir())
    assert {item.name for item in after - before} <= {"in"}
    assert not Path("/tmp/dcr-evil").exists()
    report = place.open().verify()
    assert manifest_key in {problem.key for problem in report.problems}


def test_17_names_of_tensors_are_no_paths(store: Store, scratch: Path) -> None:
    state = {name: np.full(70, number, np.int16) for number, name in enumerate(["../../up", "/etc/x", ".", "a/b", "ü"])}
    commit(store, state)
    store.pull(scratch / "target")
    assert sorted(item.name for item in (scratch / "target").iterdir()) == [".dcr", "model.safetensors"]
    assert_same(store.read(), state)


def test_18_tensors_that_are_not_contiguous(store: Store) -> None:
    """Non-contiguous tensors written as if contiguous."""
    whole = np.arange(6000, dtype=np.float32).reshape(60, 100)
    views: dict[str, Any] = {
        "transposed": whole.T,
        "strided": whole[::3, 1::7],
        "reversed": whole[::-1, ::-1],
        "column": whole[:, 5],
        "fortran": np.asfortranarray(whole),
        "broadcast": np.broadcast_to(whole[0], (4, 100)),
        "swapped": whole.astype(">f4"),
        "zero-d": whole[3, 4],
    }
    for factor in (1, 3):
        commit(store, {name: view * factor if name == "column" else view for name, view in views.items()})
    for number, factor in enumerate((1, 3)):
        found = store.read(f"main@{number}")
        for name, view in views.items():
            expected = np.ascontiguousarray(view * factor if name == "column" else view).astype("<f4")
            assert raw(found[name]) == expected.tobytes(), name
            assert found[name].shape == np.shape(view), name


def test_18_torch_tensors_that_are_not_contiguous(store: Store) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.arange(6000, dtype=torch.float32).reshape(60, 100).to(torch.bfloat16)
    views = {
        "transposed": whole.T,
        "strided": whole[::3, 1::7],
        "expanded": whole[:1].expand(5, 100),
        "part": whole[7:9],
    }
    commit(store, views)
    found = store.read(framework="torch")
    for name, view in views.items():
        assert torch.equal(found[name].view(torch.uint16), view.contiguous().view(torch.uint16)), name


def test_20_tied_weights_and_tensors_that_are_gone(store: Store, place: Place, scratch: Path) -> None:
    """Tied weights: one copy stale; absent tensors skipped in silence."""
    embed = np.arange(700, dtype=np.float32).reshape(70, 10)
    for factor in (1, 2):
        tied = embed * factor
        with store.begin() as transaction:
            transaction.write("embed.weight", tied)
            transaction.write("lm_head.weight", tied)
            transaction.write("norm", np.ones(10, np.float32))
    target = scratch / "target"
    for number, factor in enumerate((1, 2)):
        found = store.read(f"main@{number}")
        assert raw(found["lm_head.weight"]) == raw(found["embed.weight"]) == raw(embed * factor)
        store.pull(target, f"main@{number}")
        assert store.compare_directory(f"main@{number}", target).ok
    # One copy stale, as after a crash between the two.
    path = target / "model.safetensors"
    data = bytearray(path.read_bytes())
    place_of = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["lm_head.weight"]["data_offsets"][0]
    start = 8 + int.from_bytes(data[:8], "little") + place_of
    data[start : start + 400] = raw(embed)[:400]
    path.write_bytes(data)
    assert not store.compare_directory("main@1", target).ok
    store.pull(target, "main@1")
    assert store.compare_directory("main@1", target).ok
    # Untied again: both are there, each with its own bits.
    untied = {"embed.weight": embed, "lm_head.weight": embed * 5, "norm": np.ones(10, np.float32)}
    commit(store, untied)
    assert_same(store.read("main@2"), untied)
    # A tensor that is not written is not there, rather than silently the old one.
    del untied["norm"]
    commit(store, untied)
    assert_same(store.read("main@3"), untied)
    store.pull(target, "main@3")
    assert_same(place.open().read("main@3"), untied)
    assert store.verify(deep=True).ok


@dataclass
class WritingOnce:
    """An object store that keeps what was put, and objects to a key that gets a second content."""

    inner: Any
    contents: dict[str, bytes] = field(default_factory=dict)
    watch: Callable[[str], None] = lambda key: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _note(self, key: str, data: Bytes) -> None:
        if not key.endswith("/latest.json") and "/checkpoints/" not in key:
            assert self.contents.setdefault(key, bytes(data)) == bytes(data), f"{key} has two contents"
        self.watch(key)

    def put(self, key: str, data: Bytes) -> None:
        self._note(key, data)
        self.inner.put(key, data)
        self.watch(key)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        done: bool = self.inner.put_if_absent(key, data)
        if done:
            self._note(key, data)
        return done


def test_23_nothing_is_visible_before_the_commit_and_nothing_is_written_twice(
    place: Place, scratch: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest valid while its files were uploaded again; files visible before the index."""
    monkeypatch.setattr(partitions, "PARTITION_NBYTES", 2048)
    monkeypatch.setattr(partitions, "JOURNAL_PARTITIONS", 2)
    place.create()
    objects = WritingOnce(open_objects(place.url))
    store = over(objects)  # type: ignore[arg-type]
    publish(store, checkpoints[0], scratch / "baseline")
    looks = 0
    one_at_a_time = threading.Lock()

    def look(key: str) -> None:
        nonlocal looks
        with one_at_a_time:
            looks += 1
            see(key)

    def see(key: str) -> None:
        reader = place.open()
        if "/log/" not in f"/{key}":
            assert [info.version for info in reader.log()] == [f"main@{n}" for n in range(len(done))]
        if looks % 5 == 0 and len(reader.log()) == len(done):
            reader.pull(scratch / "target")
            assert_checkpoint(scratch / "target", done[len(reader.log()) - 1])

    done = [checkpoints[0], checkpoints[1]]
    objects.watch = lambda key: None
    publish(store, checkpoints[1], scratch / "baseline")
    objects.watch = look
    for failing in ("publish.partition.stored", "publish.seal.stored", "publish.proposal.stored", "log.commit.before"):

        def fail(event: events.Event, failing: str = failing) -> None:
            if event.name == failing:
                raise KeyboardInterrupt

        transaction = store.begin(message="next")
        with events.listening(fail), contextlib.suppress(KeyboardInterrupt):
            transaction.write_checkpoint(checkpoints[2])
            transaction.commit()
            pytest.fail(f"{failing} was not reached")
        transaction._close()  # what a process that is gone holds no more
    with store.begin(message="next") as transaction:
        transaction.write_checkpoint(checkpoints[2])
    assert looks > 50
    objects.watch = lambda key: None
    assert place.open().verify(deep=True).ok
    place.open().pull(scratch / "target")
    assert_checkpoint(scratch / "target", checkpoints[2])


@pytest.mark.parametrize("n_elements", [1, 5000, 30_000])
def test_24_a_buffer_that_changes_while_it_is_read(store: Store, n_elements: int) -> None:
    """The live buffer changed while it was being read: what is published is one state, proven, whichever it is."""
    buffer = np.zeros(n_elements, np.uint16)
    commit(store, {"w": buffer})
    stop = threading.Event()

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            buffer[:] = step & 0xFFFF

    old_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(4):
            commit(store, {"w": buffer})
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(old_interval)
    report = store.verify(deep=True)
    assert report.ok, report.problems
    assert len(store.log()) == 5
    for number in range(5):
        assert store.read(f"main@{number}")["w"].shape == (n_elements,)


def test_24_a_checkpoint_that_changes_while_it_is_read(store: Store, scratch: Path) -> None:
    """A trainer saves over the checkpoint that is being published."""
    states = [{"a": np.full(5000, step, np.int32), "b": np.full(5000, step, np.int32)} for step in (1, 2)]
    checkpoint = write_hf(scratch / "checkpoint", states[0])
    commit(store, states[0])
    other = write_hf(scratch / "other", states[1])

    def overwrite(event: events.Event) -> None:
        if event.name == "progress" and event.detail.startswith("publish"):
            (checkpoint / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-4000])

    with events.listening(overwrite), pytest.raises(IntegrityError) as caught, store.begin() as transaction:
        transaction.write_checkpoint(checkpoint)
    assert caught.value.key is not None
    assert len(store.log()) == 1
    assert store.verify(deep=True).ok


def _changes(n: int) -> dict[str, Array]:
    """Return masks by name: which elements of a chunk change, at all densities and gaps that a coding may choose by."""
    rng = seeded("codec")
    gaps = {f"gaps of {gap}": np.arange(0, n, gap + 1) for gap in (1, 2, 127, 254, 255, 256, 257, 510, 511, 4096)}
    wide = {f"gap of {gap}": np.array([0, gap + 1]) for gap in (65_534, 65_535, 65_536, 65_537, n - 2)}
    some = {
        f"1 in {every}": np.flatnonzero(np.array([rng.random() < 1 / every for _ in range(n)]))
        for every in (2, 3, 8, 30, 1000)
    }
    ends = {"none": np.array([], np.int64), "first": np.array([0]), "last": np.array([n - 1]), "all": np.arange(n)}
    return {**gaps, **wide, **some, **ends}


def test_25_every_branch_of_the_codec_is_reached_by_a_publish(
    place: Place, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec's middle branch (uint32 gaps) that no test reached."""
    n = 1 << 17
    store = place.create(chunk_elements=n)
    rng = np.random.default_rng(1)
    base = rng.integers(1, 1 << 16, n).astype(np.uint16)
    n_versions = 0
    methods: set[int] = set()
    for positions in _changes(n).values():
        for kind in ("one", "coded", "any"):
            if kind != "one" and len(positions) > n // 4 and len(positions) < n:
                continue
            mask = np.zeros(n, np.uint16)
            mask[positions] = {"one": 1, "coded": rng.choice([1, 3, 7, 15], len(positions)), "any": 0}[kind]
            if kind == "any":
                mask[positions] = rng.integers(1, 1 << 16, len(positions))
            base = base ^ mask
            commit(store, {"w": base})
            n_versions += 1
            assert raw(store.read("main")["w"]) == raw(base)
    for line, whole in {"weights": rng.normal(0, 0.02, n).astype(ml_dtypes.bfloat16), "noise": base}.items():
        commit(store, {"w": whole}, line=line)
        assert raw(store.read(line)["w"]) == raw(whole)
    objects = open_objects(place.url)
    for key in objects.list("versions/"):
        if "/u16/mask/c/" in key:
            methods.add(objects.get(key)[0])
    assert methods == {1, 2, 3, 4}, methods  # raw, dense, sparse, bitmap
    assert len(store.log()) == n_versions
    store.pull(scratch / "target")
    assert store.compare_directory("main", scratch / "target").ok
