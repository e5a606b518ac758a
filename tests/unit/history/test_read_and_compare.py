"""Reading by name decodes only what it needs; comparing a directory names what differs and writes nothing."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from states import assert_same, raw, series, tree, write_hf
from watched import Watched

import dcr_store
from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError
from dcr_store.store import Store

STATES = series(3, seed=11)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=1024) as store:
        for i, state in enumerate(STATES):
            with store.begin() as transaction:
                transaction.write_checkpoint(write_hf(tmp_path / f"c{i}", state, 2, i))
        yield store


class TestRead:
    def test_whole(self, store: Store) -> None:
        for i, state in enumerate(STATES):
            assert_same(store.read(f"main@{i}"), state)

    def test_by_name(self, store: Store) -> None:
        for name, array in STATES[2].items():
            assert_same(store.read("main", [name]), {name: array})
        names = ["norm.weight", "head"]
        found = store.read("main", iter(names))
        assert_same(found, {name: STATES[2][name] for name in names})
        assert store.read("main", []) == {}
        assert list(store.read("main", ["head", "head"])) == ["head"]

    def test_by_name_reads_other_chunks_not_at_all(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        decoded: list[tuple[str, int]] = []
        from dcr_store.targets.memory import MemoryTarget

        real = MemoryTarget.write_chunk
        monkeypatch.setattr(
            MemoryTarget, "write_chunk", lambda self, s, c, b: (decoded.append((s, c)), real(self, s, c, b))[1]
        )
        store.read("main", ["head"])
        assert len(set(decoded)) == 1
        decoded.clear()
        store.read("main", ["norm.weight"])
        assert {space for space, _ in decoded} == {"u32"}

    @pytest.mark.parametrize("name", ["", "nothing", "HEAD", "head ", "x" * 10_000, "../head", "\0"])
    def test_no_such_tensor(self, store: Store, name: str) -> None:
        with pytest.raises(NotFoundError) as caught:
            store.read("main", ["head", name])
        assert len(str(caught.value)) < 500

    def test_a_close_name_is_suggested(self, store: Store) -> None:
        with pytest.raises(NotFoundError, match=r"did you mean norm\.weight"):
            store.read("main", ["norm.weigth"])

    def test_a_name_is_not_a_list_of_names(self, store: Store) -> None:
        with pytest.raises(InvalidInputError, match="list of names"):
            store.read("main", "head")

    def test_frameworks(self, store: Store) -> None:
        found = store.read("main", framework="torch")
        assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())
        assert found["head"].dtype == torch.bfloat16
        assert {name: raw(t) for name, t in found.items()} == {name: raw(a) for name, a in STATES[2].items()}
        assert store.read("main")["head"].dtype == ml_dtypes.bfloat16
        with pytest.raises(InvalidInputError, match="unknown framework"):
            store.read("main", framework="jax")  # type: ignore[arg-type]

    def test_what_is_returned_is_the_callers(self, store: Store) -> None:
        for framework in ("numpy", "torch"):
            first = store.read("main", framework=framework)  # type: ignore[arg-type]
            first["norm.weight"][:] = 0
            assert_same({"n": store.read("main")["norm.weight"]}, {"n": STATES[2]["norm.weight"]})

    def test_order_is_that_of_the_layout(self, store: Store) -> None:
        assert list(store.read("main")) == [name for name, *_ in store.show("main").tensors]


class TestCompare:
    def test_the_same(self, store: Store, tmp_path: Path) -> None:
        for i in range(3):
            before = tree(tmp_path / f"c{i}")
            report = store.compare_directory(f"main@{i}", tmp_path / f"c{i}")
            assert (report.ok, report.versions) == (True, [f"main@{i}"])
            assert tree(tmp_path / f"c{i}") == before
            assert not (tmp_path / f"c{i}" / ".dcr").exists()

    def test_other_bits_are_counted_by_tensor(self, store: Store, tmp_path: Path) -> None:
        report = store.compare_directory("main@2", tmp_path / "c1")
        told = {problem.key: problem.found for problem in report.problems if "other bits" in problem.what}
        for name, array in STATES[2].items():
            uint = f"u{array.itemsize}"
            n = int(np.count_nonzero(np.frombuffer(raw(array), uint) != np.frombuffer(raw(STATES[1][name]), uint)))
            assert told.get(name) == (f"{n} differ" if n else None)

    def test_another_version_is_named(self, store: Store, tmp_path: Path) -> None:
        report = store.compare_directory("main@2", tmp_path / "c1")
        first = report.problems[0]
        assert (first.key, first.expected, first.found) == (str(tmp_path / "c1"), "main@2", "main@1")
        assert "another version" in first.what
        path = next((tmp_path / "c1").glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        report = store.compare_directory("main@2", tmp_path / "c1")
        assert not [problem for problem in report.problems if "another version" in problem.what], "it is none"

    def test_another_file_structure(self, store: Store, tmp_path: Path) -> None:
        directory = write_hf(tmp_path / "one", STATES[0], 1, 0)
        report = store.compare_directory("main@0", directory)
        assert {problem.key for problem in report.problems} == {
            "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
        }  # fmt: skip

    @pytest.mark.parametrize("what", ["missing", "more", "shape", "dtype"])
    def test_other_tensors(self, store: Store, tmp_path: Path, what: str) -> None:
        state = dict(STATES[0])
        if what == "missing":
            del state["head"]
        if what == "more":
            state["tail"] = state["head"]
        if what == "shape":
            state["head"] = state["head"].reshape(7, 5)
        if what == "dtype":
            state["head"] = state["head"].view(np.float16)
        report = store.compare_directory("main@0", write_hf(tmp_path / "other", state, 2, 0))
        assert ("tail" if what == "more" else "head") in {problem.key for problem in report.problems}
        assert not report.ok

    def test_side_files(self, store: Store, tmp_path: Path) -> None:
        directory = tmp_path / "copy"
        shutil.copytree(tmp_path / "c0", directory)
        (directory / "config.json").write_text("{}")
        (directory / "tokenizer" / "vocab.txt").unlink()
        (directory / "mine.txt").write_text("not compared")
        found = {problem.key: problem.what for problem in store.compare_directory("main@0", directory).problems}
        assert found == {"config.json": "the file differs", "tokenizer/vocab.txt": "the file is missing"}

    @pytest.mark.parametrize("torn", [b"", bytes(4096), (200).to_bytes(8, "little") + b'{"a":'])
    def test_a_torn_file_is_a_difference(self, store: Store, tmp_path: Path, torn: bytes) -> None:
        path = tmp_path / "c0" / "model-00002-of-00002.safetensors"
        path.write_bytes(torn)
        report = store.compare_directory("main@0", tmp_path / "c0")
        assert [problem.key for problem in report.problems] == [str(path)]

    def test_no_checkpoint(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError):
            store.compare_directory("main@0", tmp_path / "nothing")
        (tmp_path / "empty").mkdir()
        with pytest.raises((NotFoundError, InvalidInputError)):
            store.compare_directory("main@0", tmp_path / "empty")

    def test_a_damaged_store_is_no_difference(self, store: Store, tmp_path: Path) -> None:
        key = store._catalog.contents(store._catalog.resolve("main@0")).partitions[0].key
        store._objects.delete(key)
        with pytest.raises(IntegrityError) as caught:
            store.compare_directory("main@1", tmp_path / "c0")
        assert caught.value.key == key

    def test_where_bits_agree_no_partition_is_read(self, store: Store, tmp_path: Path) -> None:
        watched = store._catalog.objects = Watched(store._objects)
        assert store.compare_directory("main@2", tmp_path / "c2").ok
        assert not [key for method, key in watched.requests if "/mask/c/" in key]
