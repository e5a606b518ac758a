"""Identify: files of other shapes and order, tied names, what an exact hit reads, forgeries, torn and foreign files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import assert_same, series, write_hf
from watched import Watched

import dcr_store
from dcr_store.codec.digest import crc64
from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError
from dcr_store.history import identify as module
from dcr_store.history.identify import identify
from dcr_store.store import Store
from dcr_store.targets.safetensors_file import read_header
from dcr_store.versions.catalog import Catalog

STATES = series(4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with dcr_store.create(tmp_path / "store", chunk_elements=1024) as store:
        for state in STATES:
            with store.begin() as transaction:
                for name, array in state.items():
                    transaction.write(name, array)
        yield store


def publish(store: Store, state: dict[str, Any]) -> None:
    with store.begin() as transaction:
        for name, array in state.items():
            transaction.write(name, array)


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("strict", [False, True])
def test_directories_and_single_files(store: Store, tmp_path: Path, n_files: int, strict: bool) -> None:
    for number in (0, 2, 3):
        path = write_hf(tmp_path / str(number), STATES[number], n_files)
        found = store.identify(path, strict=strict)
        assert (found.version, found.is_exact, found.is_proven) == (f"main@{number}", True, strict)
        assert (found.versions, found.expired, found.tensors) == ((f"main@{number}",), (), ())
        assert found.root == store.show(f"main@{number}").info.root
        if n_files == 1:
            assert store.identify(path / "model.safetensors", strict=strict).version == f"main@{number}"


def test_an_exact_hit_reads_the_log_and_layouts_alone(store: Store, tmp_path: Path) -> None:
    watched = Watched(store._objects)
    catalog = Catalog(watched, store._document, store._catalog.store_sha256)
    assert identify(catalog, write_hf(tmp_path / "it", STATES[1])).version == "main@1"
    assert watched.count("get", "layouts/") == 1
    assert watched.count("get", "versions/") == 0


def test_the_nearest_reads_only_chunks_that_differ(store: Store, tmp_path: Path) -> None:
    state = {**STATES[2], "head": STATES[2]["head"] * 2}
    found = store.identify(write_hf(tmp_path / "it", state, 2))
    assert (found.version, found.is_exact, found.versions) == ("main@2", False, ())
    assert [item.to_json() for item in found.tensors] == [
        {"name": "head", "status": "differs", "differing": 35, "elements": 35}
    ]
    assert found.chunks_equal == found.n_chunks - 1


def test_torn_between_two_versions(store: Store, tmp_path: Path) -> None:
    """Of a pull that was cut off, the version that most of it is."""
    names = list(STATES[0])
    state = {name: STATES[3 if name == "embed.weight" else 2][name] for name in names}
    found = store.identify(write_hf(tmp_path / "it", state))
    assert found.version == "main@2"
    (item,) = found.tensors
    n_wrong = int((state["embed.weight"].view(np.uint16) != STATES[2]["embed.weight"].view(np.uint16)).sum())
    assert (item.name, item.status, item.differing) == ("embed.weight", "differs", n_wrong)


def test_equal_versions_and_lines(store: Store, tmp_path: Path) -> None:
    publish(store, STATES[1])
    store.fork("main@4", "exp")
    with store.begin("exp") as transaction:
        for name, array in STATES[0].items():
            transaction.write(name, array)
    path = write_hf(tmp_path / "it", STATES[1])
    assert store.identify(path).versions == ("main@4", "main@1")
    assert store.identify(write_hf(tmp_path / "first", STATES[0])).versions == ("exp@5", "main@0")


def test_expired(store: Store, tmp_path: Path) -> None:
    publish(store, STATES[0])
    store.expire(keep_last=2)
    found = store.identify(write_hf(tmp_path / "0", STATES[0]))
    assert (found.version, found.versions, found.expired) == ("main@4", ("main@4", "main@0"), ("main@0",))
    path = write_hf(tmp_path / "1", STATES[1])
    found = store.identify(path)
    assert (found.version, found.is_exact, found.expired) == ("main@1", True, ("main@1",))
    with pytest.raises(NotFoundError, match="expired"):
        store.identify(path, strict=True)
    state = {**STATES[1], "head": STATES[1]["head"] * 2}
    assert store.identify(write_hf(tmp_path / "2", state)).version in ("main@3", "main@4"), "kept ones alone"


def test_a_version_that_is_kept_comes_first(store: Store, tmp_path: Path) -> None:
    for state in STATES[:2]:
        with store.begin("a") as transaction:
            for name, array in state.items():
                transaction.write(name, array)
    store.expire("a")
    found = store.identify(write_hf(tmp_path / "it", STATES[0]), strict=True)
    assert (found.versions, found.expired) == (("main@0", "a@0"), ("a@0",))


def test_tied_names(tmp_path: Path) -> None:
    a, b = np.arange(300.0), np.ones(5)
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
        publish(store, {"embed": a, "head": a, "b": b})
        assert store.read("main@0")["head"].shape == (300,)
        for names in (("embed", "head", "b"), ("embed", "b"), ("b", "head")):
            path = write_hf(tmp_path / "-".join(names), {n: b if n == "b" else a for n in names})
            found = store.identify(path, strict=True)
            assert (found.version, found.is_exact) == ("main@0", True), names
        came_apart = np.where(np.arange(300) == 7, -1.0, a)
        found = store.identify(write_hf(tmp_path / "apart", {"embed": a, "head": came_apart, "b": b}))
        assert [(item.name, item.status, item.differing) for item in found.tensors] == [("embed", "differs", 1)]


@pytest.mark.parametrize("held", [(99, 0), (0, 99), (99, 1), (1, 2), (2, 0)])
def test_copies_that_differ_are_no_version_and_count_once(tmp_path: Path, held: tuple[int, int]) -> None:
    """Of one byte, every value that could stand for copies that differ is that of some version."""
    other = np.arange(20, dtype=np.uint8)
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
        for value in range(4):
            tensor = np.full(3, value, np.uint8)
            publish(store, {"a": other, "tied": tensor, "w": tensor})
        state = {name: np.full(3, 2, np.uint8) for name in ("w", "tied")}
        for name, value in zip(state, held, strict=True):
            state[name][1] = value
        path = write_hf(tmp_path / "torn", {"a": other, **state})
        found = store.identify(path, strict=True)
        assert (found.is_exact, found.root, found.versions) == (False, None, ())
        assert [(item.status, item.differing) for item in found.tensors] == [("differs", 3)]
        for value in range(4):
            problems = store.compare_directory(f"main@{value}", path).problems
            n = 1 if value == 2 else 2 + (held != (value, value))
            assert [(item.what, item.found) for item in problems] == [("the tensor has other bits", f"{n} differ")]


def test_other_tensors(store: Store, tmp_path: Path) -> None:
    state = dict(STATES[3])
    del state["norm.weight"]
    state["head"] = state["head"].reshape(7, 5)
    state["new"] = np.zeros(9, np.int16)
    found = store.identify(write_hf(tmp_path / "it", state))
    assert (found.version, found.root) == ("main@3", None)
    assert {item.name: (item.status, item.differing, item.elements) for item in found.tensors} == {
        "norm.weight": ("missing", 96, 96), "head": ("altered", 35, 35), "new": ("extra", 9, 9)
    }  # fmt: skip
    nothing = store.identify(write_hf(tmp_path / "foreign", {"x": np.zeros(3)}))
    assert (nothing.version, nothing.is_exact, nothing.tensors) == (None, False, ())


def test_missing_zeros_are_missing(tmp_path: Path) -> None:
    """A tensor of zeros that is not there has the digest of one that is."""
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
        publish(store, {"a": np.arange(64), "zeros": np.zeros(64)})
        found = store.identify(write_hf(tmp_path / "it", {"a": np.arange(64)}))
        assert not found.is_exact
        assert [(item.name, item.status) for item in found.tensors] == [("zeros", "missing")]


def test_a_forgery_is_told_by_strict_alone(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if somebody had found other bits with the same digests, also where the version has zeros."""
    publish(store, {**STATES[3], "zeros": np.zeros(96, np.int8)})
    state = {**STATES[3], "zeros": np.zeros(96, np.int8)}
    right = module.digests
    path = write_hf(tmp_path / "it", state)
    kept = {}

    def forged(source: Any, n_chunks: Any, chunk_elements: int) -> Any:
        return kept["tables"]

    def keep(source: Any, n_chunks: Any, chunk_elements: int) -> Any:
        kept["tables"] = right(source, n_chunks, chunk_elements)
        return kept["tables"]

    monkeypatch.setattr(module, "digests", keep)
    assert store.identify(path, strict=True).is_exact
    monkeypatch.setattr(module, "digests", forged)
    state = {**state, "zeros": np.where(np.arange(96) < 2, 1, 0).astype(np.int8), "head": state["head"] * 2}
    path = write_hf(tmp_path / "forged", state)
    assert store.identify(path).is_exact
    found = store.identify(path, strict=True)
    assert (found.version, found.is_exact, found.is_proven, found.versions) == ("main@4", False, True, ())
    assert {item.name: item.differing for item in found.tensors} == {"zeros": 2, "head": 35}


def test_a_layout_in_another_order_is_found_by_its_own_digests(store: Store, tmp_path: Path) -> None:
    """A line of the same tensors in another order has another layout, and other roots."""
    with store.begin("other") as transaction:
        for name in reversed(STATES[2]):
            transaction.write(name, STATES[2][name])
    path = write_hf(tmp_path / "it", STATES[2])
    assert store.identify(path).version in ("main@2", "other@0")
    assert_same(store.read("other@0"), STATES[2])
    state = {**STATES[1], "head": STATES[1]["head"] * 2}
    assert store.identify(write_hf(tmp_path / "near", state)).version == "main@1"


def test_what_changes_meanwhile_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_hf(tmp_path / "it", STATES[2])
    right = module.digests

    def touching(*arguments: Any) -> Any:
        found = right(*arguments)
        os.utime(path / "model.safetensors", (1, 1))
        return found

    monkeypatch.setattr(module, "digests", touching)
    with pytest.raises(IntegrityError, match="was changed"):
        store.identify(path)


def test_no_checkpoint(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        store.identify(tmp_path / "nothing")
    with pytest.raises(InvalidInputError):
        store.identify(tmp_path)
    with dcr_store.create(tmp_path / "empty") as empty:
        assert empty.identify(write_hf(tmp_path / "it", STATES[0])).version is None


def test_the_digest_of_a_file_is_that_of_its_bits(tmp_path: Path) -> None:
    """The digests that identify compares are CRC-64 of a chunk's elements, padded with zeros."""
    state = {"a": np.arange(100, dtype=np.uint8)}
    path = write_hf(tmp_path / "it", state)
    assert read_header(path / "model.safetensors").tensors[0].dtype == "U8"
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
        publish(store, state)
        table = store._catalog.tables_alone(store._catalog.resolve("main"))["u8"]
        data = np.concatenate([state["a"], np.zeros(28, np.uint8)])
        assert table.tolist() == [crc64(data[:64]), crc64(data[64:])]
        assert store.identify(path).is_exact
