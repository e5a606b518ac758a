"""Pull: any directory becomes the version, file for file; what is somebody else's is refused or left alone."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import assert_same, raw, series, tree, write_hf
from watched import Watched

import dcr_store
from dcr_store.errors import ConflictError, FormatError, IntegrityError, InvalidInputError, NotFoundError
from dcr_store.store import Store
from dcr_store.targets.checkpoint import open_checkpoint
from dcr_store.targets.marker import Marker, lock, read_marker

STATES = series(5, seed=7)
OTHER = {"only": np.arange(5000, dtype=np.float32), "x": np.zeros((3, 4), np.int8)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Versions in one file, in one again, in three, in two with other side files, and of other tensors."""
    place = tmp_path_factory.mktemp("checkpoints")
    found = [write_hf(place / f"checkpoint{i}", STATES[i], n, i) for i, n in enumerate((1, 1, 3, 2))]
    (found[3] / "tokenizer" / "vocab.txt").unlink()
    (found[3] / "tokenizer").rmdir()
    (found[3] / "extra").mkdir()
    (found[3] / "extra" / "notes.md").write_text("hello\n")
    (found[2] / "config.json").write_text('{"changed": true}')
    return [*found, write_hf(place / "checkpoint4", OTHER, 1, 4)]


@pytest.fixture(scope="module")
def urls(checkpoints: list[Path]) -> dict[str, str]:
    """A store of each codec that holds the checkpoints as main@0 to main@4."""
    found = {}
    for codec in ("dcr.delta", "portable"):
        with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=codec, chunk_elements=1024) as store:
            for directory in checkpoints:
                with store.begin() as transaction:
                    transaction.write_checkpoint(directory)
            found[codec] = store.url
    return found


@pytest.fixture
def store(urls: dict[str, str]) -> Iterator[Store]:
    with dcr_store.open(urls["dcr.delta"]) as store:
        yield store


@pytest.fixture(params=["dcr.delta", "portable"])
def either(request: pytest.FixtureRequest, urls: dict[str, str]) -> Iterator[Store]:
    with dcr_store.open(urls[request.param]) as store:
        yield store


def marker(directory: Path) -> Marker:
    found = read_marker(directory)
    assert isinstance(found, Marker)
    return found


def untouched(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """All files with content, inode and time of change."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def test_a_checkout_is_what_was_published(either: Store, checkpoints: list[Path], tmp_path: Path) -> None:
    store = either
    for number, directory in enumerate(checkpoints):
        result = store.checkout(f"main@{number}", tmp_path / f"out{number}")
        assert tree(tmp_path / f"out{number}") == tree(directory)
        assert (result.version, result.previous, result.chunks_healed) == (f"main@{number}", None, 0)
        assert result.root == store.show(f"main@{number}").info.root
        assert result.nbytes_fetched > 0
        assert result.chunks_written > 0


def test_from_any_version_to_any_other(either: Store, checkpoints: list[Path], tmp_path: Path) -> None:
    """In place, with files renamed, split, added and removed on the way."""
    store = either
    out = tmp_path / "out"
    previous = None
    for number in (0, 1, 2, 3, 4, 3, 2, 1, 0, 2, 0, 3, 1, 4, 0, 4, 2, 4, 1, 3, 0):
        result = store.pull(out, f"main@{number}")
        assert tree(out) == tree(checkpoints[number]), (previous, number)
        assert result.previous == previous
        assert result.chunks_healed == 0 or number == 4 or previous == "main@4"
        assert (marker(out).state, marker(out).target) == ("clean", f"main@{number}")
        assert sorted(path.name for path in (out / ".dcr").iterdir()) == ["lock", "marker.json"]
        previous = f"main@{number}"


def test_nothing_to_do_costs_nothing(store: Store, tmp_path: Path) -> None:
    store.pull(tmp_path / "out", "main@2")
    before = {name: entry for name, entry in untouched(tmp_path / "out").items() if not name.startswith(".dcr")}
    result = store.pull(tmp_path / "out", "main@2")
    assert (result.nbytes_fetched, result.chunks_written, result.chunks_healed) == (0, 0, 0)
    after = {name: entry for name, entry in untouched(tmp_path / "out").items() if not name.startswith(".dcr")}
    assert before == after, "not even rewritten"


def test_forwards_fetches_the_delta_only(store: Store, tmp_path: Path) -> None:
    store.pull(tmp_path / "out", "main@0")
    watched = store._catalog.objects = Watched(store._objects)
    store.pull(tmp_path / "out", "main@1")
    anchor = store._catalog.resolve("main@0").row.txid
    assert not [key for method, key in watched.requests if anchor in key and "/c/" in key and "/digests/" not in key]


def test_main_is_where_one_goes_by_default(store: Store, tmp_path: Path) -> None:
    assert store.pull(tmp_path / "out").version == "main@4"


def test_a_directory_that_is_there_already(store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
    """Somebody has copied a version: it is recognised by its bits and nothing but the difference is fetched."""
    out = tmp_path / "out"
    shutil.copytree(checkpoints[1], out)
    result = store.pull(out, "main@1")
    assert (result.previous, result.chunks_written) == ("main@1", 0)
    shutil.rmtree(out / ".dcr")
    result = store.pull(out, "main@2")
    assert (result.previous, result.chunks_healed) == ("main@1", 0)
    assert tree(out) == tree(checkpoints[2])


def test_files_of_others_are_left_alone(store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    (out / "runs").mkdir()
    (out / "runs" / "log.txt").write_text("mine too")
    for number in (3, 0, 4):
        store.pull(out, f"main@{number}")
        mine = {"README.md": b"mine", "runs/log.txt": b"mine too"}
        assert tree(out) == {**tree(checkpoints[number]), **mine}


def test_a_side_file_that_its_owner_changed_is_not_removed(
    store: Store, checkpoints: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    store.pull(out, "main@3")
    (out / "extra" / "notes.md").write_text("mine now")
    store.pull(out, "main@0")
    assert tree(out) == {**tree(checkpoints[0]), "extra/notes.md": b"mine now"}


def test_a_side_file_that_belongs_to_the_version_is_put_right(
    store: Store, checkpoints: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    store.pull(out, "main@0")
    (out / "config.json").write_text("{}")
    (out / "tokenizer" / "vocab.txt").unlink()
    store.pull(out, "main@0")
    assert tree(out) == tree(checkpoints[0])


class TestRefusals:
    def check_untouched(self, out: Path, action: Callable[[], object], error: type, match: str) -> None:
        before = untouched(out)
        with pytest.raises(error, match=match):
            action()
        assert untouched(out) == before
        assert not (out / ".dcr").exists()

    def test_foreign_weights(self, store: Store, tmp_path: Path) -> None:
        out = write_hf(tmp_path / "out", {**STATES[0], "head": STATES[0]["head"] + 1})
        for number in range(5):
            self.check_untouched(
                out, lambda n=number: store.pull(out, f"main@{n}"), InvalidInputError, "no version of this store"
            )  # type: ignore[misc]
        store.pull(out, "main@0", force=True)
        assert_same(_tensors(out), STATES[0])

    def test_weights_that_nobody_can_read(self, store: Store, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"rubbish")
        self.check_untouched(out, lambda: store.pull(out, "main@0"), InvalidInputError, "no version of this store")
        store.pull(out, "main@0", force=True)
        assert_same(_tensors(out), STATES[0])

    def test_a_side_file_in_the_way(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "config.json").write_text("precious")
        self.check_untouched(out, lambda: store.pull(out, "main@0"), InvalidInputError, "config.json")
        store.pull(out, "main@0", force=True)
        assert tree(out) == tree(checkpoints[0])

    def test_a_version_that_does_not_exist(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError):
            store.pull(tmp_path / "out", "main@99")
        assert not (tmp_path / "out").exists()

    def test_a_file_where_the_directory_should_be(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("x")
        with pytest.raises(InvalidInputError, match=r"/out: is a file; give a directory$"):
            store.pull(tmp_path / "out", "main@0")
        assert (tmp_path / "out").read_text() == "x"

    def test_another_process_writes_it(self, store: Store, tmp_path: Path) -> None:
        out = tmp_path / "out"
        store.pull(out, "main@0")
        with lock(out), pytest.raises(ConflictError):
            store.pull(out, "main@1")
        store.pull(out, "main@1")

    def test_a_directory_of_another_store(self, store: Store, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=1024) as other:
            with other.begin() as transaction:
                transaction.write("a", np.arange(3))
            other.pull(out)
            before = tree(out)
            with pytest.raises(InvalidInputError, match="follows another store"):
                store.pull(out, "main@0")
            assert tree(out) == before
            store.pull(out, "main@0", force=True)
            assert_same(_tensors(out), STATES[0])
            with pytest.raises(InvalidInputError, match="follows another store"):
                other.pull(out)

    def test_links_are_not_written_through(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        """As in a cache of downloads: the files are links to blobs that others share."""
        blobs, out = tmp_path / "blobs", tmp_path / "out"
        shutil.copytree(checkpoints[0], blobs)
        before = untouched(blobs)
        for kind in ("symlink", "hard link"):
            shutil.rmtree(out, ignore_errors=True)
            for path in sorted(blobs.rglob("*")):
                place = out / path.relative_to(blobs)
                place.parent.mkdir(parents=True, exist_ok=True)
                if path.is_file() and kind == "symlink":
                    place.symlink_to(path)
                elif path.is_file():
                    os.link(path, place)
            for number in (1, 2, 4):
                store.pull(out, f"main@{number}")
                assert tree(out) == tree(checkpoints[number])
                assert {name: data for name, (data, *_) in untouched(blobs).items()} == {
                    name: data for name, (data, *_) in before.items()
                }

    def test_a_directory_that_is_a_link(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        store.pull(tmp_path / "link", "main@1")
        assert tree(tmp_path / "real") == tree(checkpoints[1])


def _tensors(directory: Path) -> dict[str, Any]:
    """Parse the files with the library of the format."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    import torch

    names = {torch.bfloat16: STATES[0]["head"].dtype}
    return {
        name: np.frombuffer(raw(t), names.get(t.dtype, str(t.dtype).removeprefix("torch."))).reshape(t.shape)
        for name, t in found.items()
    }


class TestTorn:
    """What kills, disks and editors leave: the next pull ends right."""

    DAMAGE: dict[str, Callable[[Path], object]] = {  # noqa: RUF012
        "bit": lambda d: _edit(d, lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:]),
        "block of zeros": lambda d: _edit(d, lambda b: b[: len(b) // 2] + bytes(4096) + b[len(b) // 2 + 4096 :]),
        "cut": lambda d: _edit(d, lambda b: b[: len(b) // 2]),
        "longer": lambda d: _edit(d, lambda b: b + b"x" * 100),
        "empty": lambda d: _edit(d, lambda b: b""),
        "header": lambda d: _edit(d, lambda b: b[:20] + bytes(30) + b[50:]),
        "all noise": lambda d: _edit(d, lambda b: np.random.default_rng(0).bytes(len(b))),
        "gone": lambda d: next(d.glob("*.safetensors")).unlink(),
        "all gone": lambda d: [path.unlink() for path in d.glob("*.safetensors")],
        "everything gone but ours": lambda d: [
            shutil.rmtree(p) if p.is_dir() else p.unlink() for p in d.iterdir() if p.name != ".dcr"
        ],
        "mixture": lambda d: None,
    }

    @pytest.mark.parametrize("damage", DAMAGE)
    @pytest.mark.parametrize("note", ["clean", "dirty", "none", "torn", "lies"])
    def test_it_ends_right(self, store: Store, checkpoints: list[Path], tmp_path: Path, damage: str, note: str) -> None:
        out = tmp_path / "out"
        store.pull(out, "main@2")
        if damage == "mixture":
            for path in out.glob("*.safetensors"):
                other = write_hf(tmp_path / "other", STATES[1], 3, 2) / path.name
                data = path.read_bytes()
                path.write_bytes(other.read_bytes()[: len(data) // 2] + data[len(data) // 2 :])
        self.DAMAGE[damage](out)
        place = out / ".dcr" / "marker.json"
        if note == "dirty":
            document = json.loads(place.read_bytes())["body"]
            from dcr_store.format import canonical

            place.write_bytes(canonical.seal_body({**document, "state": "dirty", "base": "main@1"}))
        if note == "none":
            place.unlink()
        if note == "torn":
            place.write_bytes(place.read_bytes()[:50])
        if note == "lies":
            document = json.loads(place.read_bytes())["body"]
            place.write_bytes(json.dumps({"body": {**document, "target": "main@4"}, "sha256": "0" * 64}).encode())
        for number in (2, 1):
            store.pull(out, f"main@{number}")
            assert tree(out) == tree(checkpoints[number])
            assert store.compare_directory(f"main@{number}", out).ok

    def test_what_is_healed_is_counted(self, store: Store, tmp_path: Path) -> None:
        out = tmp_path / "out"
        store.pull(out, "main@0")
        self.DAMAGE["bit"](out)
        result = store.pull(out, "main@0")
        assert (result.chunks_healed, result.chunks_written) == (1, 1)


def _edit(directory: Path, change: Callable[[bytes], bytes]) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(change(path.read_bytes()))


class TestDamagedStore:
    def test_the_directory_can_be_pulled_again(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        out = tmp_path / "out"
        store.pull(out, "main@0")
        partitions = store._catalog.contents(store._catalog.resolve("main@1")).partitions
        key = partitions[-1].key
        data = store._objects.get(key)
        store._objects.put(key, data[:-1] + bytes([data[-1] ^ 1]))
        for _ in range(2):
            with pytest.raises(IntegrityError) as caught:
                store.pull(out, "main@1")
            assert caught.value.key == key
            assert marker(out).state == "dirty"
        store.pull(out, "main@0")
        assert tree(out) == tree(checkpoints[0])
        store._objects.put(key, data)
        store.pull(out, "main@1")
        assert tree(out) == tree(checkpoints[1])

    def test_a_new_directory_is_left_empty(self, store: Store, tmp_path: Path) -> None:
        key = store._catalog.contents(store._catalog.resolve("main@0")).manifest.files[0].ref.key
        data = store._objects.get(key)
        store._objects.delete(key)
        with pytest.raises(IntegrityError) as caught:
            store.pull(tmp_path / "out", "main@0")
        store._objects.put(key, data)
        assert caught.value.key == key
        assert not any(tmp_path.glob("out/*"))


class TestWithoutFiles:
    """Versions that were written tensor by tensor come as one file."""

    def test_round_trip(self, tmp_path: Path) -> None:
        a = np.arange(100, dtype=np.float32)
        state = {"z": a, "a": np.ones((2, 3), np.int8), "tied": a, "empty": np.zeros((0, 4), np.float16)}
        with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
            with store.begin() as transaction:
                for name, array in state.items():
                    transaction.write(name, array)
            store.checkout("main", tmp_path / "out")
            assert [path.name for path in (tmp_path / "out").iterdir() if path.name != ".dcr"] == ["model.safetensors"]
            with open_checkpoint(tmp_path / "out") as checkpoint:
                assert set(checkpoint.tensors) == set(state)
            assert_same(_tensors(tmp_path / "out"), state)
            with store.begin() as transaction:
                transaction.write_checkpoint(tmp_path / "out")
            assert store.log()[-1].changed == 0
            assert store.log()[-1].base == "main@0", (
                "two tensors of a file that are tied in the base, and alike, still are"
            )
            assert_same(store.read(), state)

    def test_a_tensor_that_no_file_can_hold(self, tmp_path: Path) -> None:
        with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
            with store.begin() as transaction:
                transaction.write("a", np.zeros(3, np.complex128))
            assert store.read()["a"].dtype == np.complex128
            with pytest.raises((InvalidInputError, FormatError), match="safetensors"):
                store.checkout("main", tmp_path / "out")
            assert not any(tmp_path.glob("out/*"))
