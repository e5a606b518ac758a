"""Many side files: side by side, bounded in memory, durable before the marker says so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from states import tree, write_hf
from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.errors import IntegrityError, StorageError
from dcr_store.format.documents import ObjectRef
from dcr_store.objects.transfer import N_PARALLEL
from dcr_store.ports import ObjectStore
from dcr_store.publish.uploads import MAX_IN_FLIGHT
from dcr_store.receive import side_files
from dcr_store.store import Store

N_FILES = 200


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    place = write_hf(tmp_path / "run", {"a": np.arange(100, dtype=np.float32)})
    for i in range(N_FILES):
        path = place / f"deep{i % 7}" / f"er{i % 3}" / f"f{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(10 * i))
    return place


@pytest.fixture
def store(tmp_path: Path, checkpoint: Path) -> Iterator[Store]:
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
        yield store


def shown(directory: Path) -> dict[str, bytes]:
    return {path: data for path, data in tree(directory).items() if not path.startswith(".dcr")}


@pytest.mark.parametrize("limit", [1, 3000, 64 << 20])
def test_pulled_side_by_side_and_bounded_in_bytes(
    store: Store, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(side_files, "TOGETHER_NBYTES", limit)
    sizes = [file.nbytes for file in store._catalog.manifest(store._catalog.resolve("main")).files]
    held: list[int] = []
    most_files = most_nbytes = 0
    lock = threading.Lock()

    def fetch(objects: ObjectStore, ref: ObjectRef) -> bytes:
        nonlocal most_files, most_nbytes
        with lock:
            held.append(ref.nbytes)
            most_files, most_nbytes = max(most_files, len(held)), max(most_nbytes, sum(held))
        time.sleep(0.001)
        return real(objects, ref)

    def reached(point: str, place: str = "") -> None:
        if point == "pull.side.stored":
            with lock:
                held.remove(Path(place).stat().st_size)

    real = side_files.fetch
    monkeypatch.setattr(side_files, "fetch", fetch)
    monkeypatch.setattr(events, "reached", reached)
    result = store.pull(tmp_path / "out")
    assert shown(tmp_path / "out") == shown(checkpoint)
    assert result.nbytes_fetched > sum(len(data) for path, data in shown(checkpoint).items() if "deep" in path)
    assert not held
    assert 0 < most_nbytes <= max(limit, *sizes)
    assert (2 < most_files <= N_PARALLEL) if limit > max(sizes) else most_files <= 2


def test_only_what_differs_is_written(store: Store, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    store.pull(out)

    def file_at(path: str) -> tuple[int, int]:
        status = (out / path).stat()
        return status.st_ino, status.st_ctime_ns  # the number of a file that is gone may be given again

    before = {path: file_at(path) for path in shown(out)}
    wrong = ["deep0/er0/f0", "deep1/er1/f1", "deep2/er2/f2", "deep3/er0/f3"]
    (out / wrong[1]).write_bytes(b"x")
    (out / wrong[2]).unlink()
    (out / wrong[3]).write_bytes(b"y" * (out / wrong[3]).stat().st_size)
    watched = store._catalog.objects = Watched(store._objects)
    store.pull(out)
    assert shown(out) == shown(checkpoint)
    assert watched.count("get", "/files/") <= 3 + 1, "and the header"
    assert [path for path, file in before.items() if file_at(path) != file] == wrong[1:]


def test_one_that_is_damaged_is_named_and_the_next_pull_goes_on(store: Store, checkpoint: Path, tmp_path: Path) -> None:
    files = store._catalog.manifest(store._catalog.resolve("main")).files
    victim = next(file for file in files if file.path.endswith("f77"))
    data = store._objects.get(victim.ref.key)
    store._objects.put(victim.ref.key, b"\0" + data[1:])
    for _ in range(2):
        with pytest.raises(IntegrityError) as caught:
            store.pull(tmp_path / "out")
        assert caught.value.key == victim.ref.key
        assert not (tmp_path / "out" / victim.path).exists()
    store._objects.put(victim.ref.key, data)
    store.pull(tmp_path / "out")
    assert shown(tmp_path / "out") == shown(checkpoint)
    assert sorted(path.name for path in (tmp_path / "out" / ".dcr").iterdir()) == ["lock", "marker.json"]


def test_a_place_that_cannot_be_written_is_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "deep3").write_text("a file where a directory has to be")
    with pytest.raises(StorageError) as caught:
        store.pull(tmp_path / "out", force=True)
    assert "/deep3" in (caught.value.key or "")


@pytest.mark.parametrize("again", [False, True], ids=["first", "after a kill before the names were durable"])
def test_files_and_names_are_durable_before_the_marker(
    store: Store, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    out = tmp_path / "out"
    if again:

        def stop(_: Path) -> None:
            raise StorageError("killed")

        with monkeypatch.context() as patched:
            patched.setattr(side_files, "fsync_directory", stop)
            with pytest.raises(StorageError, match="killed"):
                store.pull(out)
    synced: set[tuple[int, int]] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        status = os.fstat(descriptor)
        synced.add((status.st_dev, status.st_ino))

    def reached(point: str, place: str = "") -> None:
        if point == "pull.applied":
            places = [path for path in (out, *out.rglob("*")) if ".dcr" not in path.parts]
            expected = [path for path in places if path.is_dir() or (not again and "deep" in str(path.parent.parent))]
            missing = [path for path in expected if (path.stat().st_dev, path.stat().st_ino) not in synced]
            assert not missing
            passed.append(len(expected))

    passed: list[int] = []
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(events, "reached", reached)
    store.pull(out)
    assert passed == [len(expected_directories(out)) + (0 if again else N_FILES)]
    assert shown(out) == shown(checkpoint)


def expected_directories(out: Path) -> list[Path]:
    return [out, *(path for path in out.rglob("*") if path.is_dir() and path.name != ".dcr")]


def test_published_side_by_side_and_bounded_in_number(tmp_path: Path, checkpoint: Path) -> None:
    with dcr_store.create(tmp_path / "other") as store:
        transaction = store.begin()
        uploads = transaction._writer.partitions._uploads
        seen: list[int] = []
        watched = transaction._writer.partitions.objects = Watched(store._objects)

        def before(method: str, key: str) -> None:
            if "/files/" in key:
                seen.append(uploads.in_flight)
                time.sleep(0.001)

        watched.before = before
        transaction.write_checkpoint(checkpoint)
        transaction.commit()
        assert 2 < max(seen) <= MAX_IN_FLIGHT
        assert uploads.in_flight == uploads.in_flight_nbytes == 0
        store.pull(tmp_path / "out")
        assert shown(tmp_path / "out") == shown(checkpoint)
