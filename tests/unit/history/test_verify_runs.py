"""Verify in three depths, gone on with after it was stopped, in threads, processes and a cluster."""

from __future__ import annotations

import json
import multiprocessing
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcr_store
from dcr_store import events
from dcr_store.cli.main import main
from dcr_store.errors import FormatError, InvalidInputError
from dcr_store.history import replay_units, report_file
from dcr_store.history.report_file import Kept
from dcr_store.store import Store


def filled(place: str | Path) -> Store:
    """A line of 6 versions with a layout that changes, an anchor and a fold that no read takes, and a fork."""
    store = dcr_store.create(place, chunk_elements=64)
    for i in range(6):
        with store.begin() as transaction:
            state = np.arange(300, dtype=np.uint16)
            state[i * 40 : i * 40 + 3] += np.uint16(i)
            transaction.write("a", state)
            transaction.write("b", np.full(70 + 10 * (i // 4), i, np.float32))
    store.anchor("main@2")
    store.fold("main@0", "main@3")
    store.fork("main@1", "exp")
    with store.begin("exp") as transaction:
        transaction.write("a", np.zeros(300, np.uint16))
        transaction.write("b", np.zeros(70, np.float32))
    return store


@pytest.fixture(scope="module")
def template() -> dict[str, bytes]:
    with filled(f"memory://{secrets.token_hex(8)}") as store:
        return {key: store._objects.get(key) for key in store._objects.list("")}


@pytest.fixture
def store(template: dict[str, bytes], tmp_path: Path) -> Iterator[Store]:
    for key, data in template.items():
        (tmp_path / "store" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / key).write_bytes(data)
    with dcr_store.open(tmp_path / "store") as store:
        yield store


class Counted:
    """Counts reads of payload, by key."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        real = store._objects.get

        def get(key: str, *arguments: Any, **named: Any) -> bytes:
            if "/data/" in key:
                self.keys.append(key)
            return real(key, *arguments, **named)

        monkeypatch.setattr(store._objects, "get", get)


def keys(store: Store, form: str) -> list[str]:
    return [key for key in sorted(store._objects.list("")) if form in key]


def test_each_depth_looks_further(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(store, monkeypatch)
    log = store.verify(depth="log")
    assert log.ok
    assert counted.keys == []
    assert (log.n_objects, log.unreferenced) == (len(keys(store, "log/")) + len(keys(store, "manifest.json")) + 1, [])
    objects = store.verify()
    left = set(objects.unreferenced)  # by the try to publish main@4 as a delta
    assert objects.n_objects == len(keys(store, "")) - len(left)
    assert set(counted.keys) == set(keys(store, "/data/")) - left
    assert objects.versions == log.versions == [*["exp@2"], *(f"main@{i}" for i in range(6))]
    assert store.verify(depth="replay").n_objects == objects.n_objects
    with pytest.raises(InvalidInputError, match="unknown depth"):
        store.verify(depth="deep")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="deep is a depth"):
        store.verify(deep=True, depth="log")


def test_every_edge_is_replayed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an anchor and a fold that lead to what the deltas lead to as well."""
    taken: set[str] = set()
    real = replay_units._cut

    def cut(catalog: Any, line: str, run: Any) -> Any:
        for step in run:
            taken.update(edge.txid for edge in step.edges[step.start + 1 :])
        return real(catalog, line, run)

    monkeypatch.setattr(replay_units, "_cut", cut)
    assert store.verify(deep=True).ok
    history = store._catalog.log("main").state.history
    assert {edge.txid for edge in history.edges} <= taken
    assert {row.txid for row in store._catalog.rows("exp")} | {row.txid for row in store._catalog.rows("main")} <= taken


@pytest.mark.parametrize("least", [1, 2, 32])
def test_runs_are_cut_at_anchors_and_into_ranges(store: Store, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """However the work is cut, the same chunks are written: each of each version."""
    monkeypatch.setattr(replay_units, "_LEAST_STEPS", least)
    monkeypatch.setattr(replay_units, "RANGE_NBYTES", 256)
    points: list[str] = []
    with events.listening(lambda event: points.append(event.detail) if event.name == "verify.replay" else None):
        assert store.verify(deep=True).ok
    assert len(points) > 30
    assert set(points) == {"exp@2", *(f"main@{i}" for i in range(6))}


def spoil(store: Store, key: str) -> Callable[[], None]:
    path = Path(store.url) / key
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    def restore() -> None:
        path.write_bytes(good)

    return restore


class StoppedError(Exception):
    pass


class Stopping(Executor):
    """Does so many calls, and then is gone, as a machine is."""

    def __init__(self, n: int) -> None:
        self.n = n

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.n -= 1
        if self.n < 0:
            future.set_exception(StoppedError())
        else:
            future.set_result(function(*arguments, **named))
        return future


@pytest.mark.parametrize("depth", ["objects", "replay"])
def test_a_run_that_was_stopped_is_gone_on_with(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: Any
) -> None:
    """Stopped after each unit in turn: what was found sound is not read again, what was not, is, and all is found."""
    monkeypatch.setattr(report_file, "_INTERVAL_S", 0.0)
    whole, path = store.verify(depth=depth), tmp_path / "report.json"
    key = keys(store, "/u16/mask/c/0")[-1]
    restore = spoil(store, key)
    n, n_done = 0, 1
    while True:
        n += 1
        assert n < 60
        try:
            report = store.verify(depth=depth, executor=Stopping(2 * n), report=path)
            break
        except StoppedError:
            kept = Kept.from_bytes(path.read_bytes(), "k")
            assert not kept.is_finished
            assert 0 < n_done <= len(kept.done)
            n_done = len(kept.done)
    assert n > 2
    assert key in {problem.key for problem in report.problems}
    assert (report.n_objects, report.nbytes, report.unreferenced) == (
        whole.n_objects,
        whole.nbytes,
        whole.unreferenced,
    )
    kept = Kept.from_bytes(path.read_bytes(), "k")
    assert (kept.is_finished, kept.done, kept.report) == (True, (), report)
    restore()
    assert store.verify(depth=depth, report=path).ok, "a finished one begins anew"


def test_what_was_sound_is_not_read_again(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(StoppedError):
        store.verify(executor=Stopping(5), report=path)
    counted = Counted(store, monkeypatch)
    store.verify()
    everything = len(counted.keys)
    counted.keys.clear()
    before = json.loads(path.read_bytes())["done"]
    assert len(before) == 5
    store.verify(report=path)
    again = set(counted.keys)
    assert len(counted.keys) < everything
    first = keys(store, "versions/exp/")  # the first unit
    assert not again & {key for key in first if "/journal/" not in key}


def test_a_report_of_something_else_is_refused(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    store.verify(depth="log", report=path)
    data = path.read_bytes()
    with pytest.raises(InvalidInputError, match="another verification of this store"):
        store.verify(report=path)
    with pytest.raises(InvalidInputError, match="another verification"):
        store.verify("main@1", depth="log", report=path)
    with dcr_store.create(tmp_path / "other", chunk_elements=64) as other:
        with pytest.raises(InvalidInputError, match="report of another store") as caught:
            other.verify(depth="log", report=path)
        assert other.store_id in str(caught.value.expected)
    # What is sound here may be damaged in a copy, whose logs begin as these do.
    store.copy_to(tmp_path / "copy")
    with dcr_store.open(tmp_path / "copy") as copied, pytest.raises(InvalidInputError, match="in another place"):
        copied.verify(depth="log", report=path)
    assert path.read_bytes() == data
    path.write_bytes(b"my notes")
    with pytest.raises(FormatError, match="is no report of a verification; name another file"):
        store.verify(depth="log", report=path)
    assert path.read_bytes() == b"my notes"


def test_versions_that_changed_meanwhile_are_looked_at(store: Store, tmp_path: Path) -> None:
    """What an earlier run vouches for is known by content, not by name."""
    path = tmp_path / "report.json"
    with pytest.raises(StoppedError):
        store.verify(executor=Stopping(7), report=path)
    with store.begin() as transaction:
        transaction.write("a", np.zeros(300, np.uint16))
        transaction.write("b", np.zeros(80, np.float32))
    spoil(store, keys(store, "versions/main/000000000006")[0])
    assert [problem.key for problem in store.verify(report=path).problems] == [
        keys(store, "versions/main/000000000006")[0]
    ]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_in_an_executor(store: Store, kind: str) -> None:
    key = keys(store, "/u16/mask/c/0")[-1]
    expected = store.verify(deep=True)
    pool: Executor = (
        ThreadPoolExecutor(3)
        if kind == "threads"
        else ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    )
    with pool:
        assert store.verify(deep=True, executor=pool) == expected
        spoil(store, key)
        report = store.verify(deep=True, executor=pool)
    assert key in {problem.key for problem in report.problems}
    assert {problem.key for problem in report.problems} == {problem.key for problem in store.verify(deep=True).problems}


def test_on_a_cluster(store: Store) -> None:
    distributed = pytest.importorskip("distributed")
    expected = store.verify(deep=True)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert store.verify(deep=True, executor=client.get_executor()) == expected


def test_a_line_that_does_not_follow_from_its_parent(store: Store) -> None:
    (fork,) = [key for key in keys(store, "log/main/0") if b'"kind":"fork"' in store._objects.get(key)]
    (Path(store.url) / fork).unlink()
    assert [problem.key for problem in dcr_store.open(store.url).verify(depth="log").problems] == [fork]


def test_the_command(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "r.json")
    assert main(["verify", store.url, "--depth", "replay", "--report", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path(path).read_bytes())["report"]
    assert main(["verify", store.url, "--report", path]) == 1
    assert "name another file" in capsys.readouterr().err
    assert main(["verify", store.url, "--against", str(tmp_path), "--report", path]) == 2
    assert main(["verify", store.url, "--report", str(tmp_path / "no" / "r")]) == 1
    assert "cannot be written" in capsys.readouterr().err
