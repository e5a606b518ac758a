"""The baseline is never trusted: whatever happens to its directory, the next version is right."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import assert_same, series
from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.errors import ConflictError, InvalidInputError, StorageError
from dcr_store.format import canonical
from dcr_store.objects.threads import Threads
from dcr_store.publish.background import Background
from dcr_store.publish.baseline import Baseline
from dcr_store.publish.spool import ChunkSpool
from dcr_store.store import Store
from dcr_store.targets.own_directories import BASELINE_TAG

STATES = series(5, seed=3)
LONG_S = 30.0


@pytest.fixture(params=["dcr.delta", "portable"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=request.param, chunk_elements=1024) as store:
        yield store


def publish(store: Store, i: int, baseline: Path | None, line: str = "main") -> None:
    with store.begin(line, baseline=baseline) as transaction:
        for name, array in STATES[i].items():
            transaction.write(name, array)
    for used in list(store._used):
        used.wait()


def rebuilds(store: Store, i: int, baseline: Path | None) -> int:
    """Publish and return how often the baseline had to be rebuilt for that."""
    seen: list[str] = []
    with events.listening(lambda event: seen.append(event.name)):
        publish(store, i, baseline)
    return seen.count("baseline.rebuild")


@pytest.fixture
def directory(store: Store, tmp_path: Path) -> Path:
    """A baseline of main@1."""
    publish(store, 0, tmp_path / "baseline")
    publish(store, 1, tmp_path / "baseline")
    return tmp_path / "baseline"


def check(store: Store, n: int) -> None:
    for i in range(n):
        assert_same(store.read(f"main@{i}"), STATES[i])
    assert [info.base is None for info in store.log()] == [True] + [False] * (n - 1)


def test_it_follows(store: Store, directory: Path) -> None:
    assert sorted(path.name for path in directory.iterdir()) == ["baseline.json", "lock", "u16.bin", "u32.bin"]
    assert rebuilds(store, 2, directory) == 0, "what commit leaves is the next base"
    assert rebuilds(store, 3, directory) == 0
    check(store, 4)


def test_another_process_goes_on_from_it(store: Store, directory: Path) -> None:
    with dcr_store.open(store.url) as other:
        assert rebuilds(other, 2, directory) == 0
    check(store, 3)


DAMAGE = {
    "deleted": shutil.rmtree,
    "note deleted": lambda d: (d / "baseline.json").unlink(),
    "note torn": lambda d: (d / "baseline.json").write_bytes(b'{"store_id":"'),
    "note empty": lambda d: (d / "baseline.json").write_bytes(b""),
    "note of two versions": lambda d: note(d, version="main@0"),
    "note of two versions, bits of neither": lambda d: [note(d, version="main@0"), flip(d / "u16.bin")],
    "note no object": lambda d: (d / "baseline.json").write_bytes(b"[1]"),
    "note of another version": lambda d: note(d, root="0" * 64, version="main@99"),
    "note of another layout": lambda d: note(d, layout="0" * 64),
    "note of another store": lambda d: note(d, store_id="0" * 32),
    "note of another line": lambda d: note(d, line="other"),
    "file deleted": lambda d: (d / "u16.bin").unlink(),
    "file cut": lambda d: (d / "u16.bin").write_bytes((d / "u16.bin").read_bytes()[:-64]),
    "file longer": lambda d: (d / "u16.bin").write_bytes((d / "u16.bin").read_bytes() + b"x" * 64),
    "file empty": lambda d: (d / "u16.bin").write_bytes(b""),
    "one bit flipped": lambda d: flip(d / "u16.bin"),
    "noise": lambda d: (d / "u16.bin").write_bytes(np.random.default_rng(0).bytes((d / "u16.bin").stat().st_size)),
    "zeros": lambda d: (d / "u16.bin").write_bytes(bytes((d / "u16.bin").stat().st_size)),
    "litter": lambda d: (d / "next-u16.bin").write_bytes(b"left by a killed process"),
}


def note(directory: Path, **changed: str) -> None:
    document = json.loads((directory / "baseline.json").read_bytes())
    (directory / "baseline.json").write_text(json.dumps({**document, **changed}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_only_costs_time(store: Store, directory: Path, damage: str) -> None:
    DAMAGE[damage](directory)
    publish(store, 2, directory)
    publish(store, 3, directory)
    check(store, 4)
    assert store.verify(deep=True).ok


def test_damage_while_the_transaction_is_open(store: Store, directory: Path) -> None:
    """A chunk goes wrong after the baseline was opened: it is found at its use, and healed."""
    with store.begin(baseline=directory) as transaction:
        names = list(STATES[2])
        transaction.write(names[0], STATES[2][names[0]])
        with (directory / "u16.bin").open("r+b") as file:
            size = file.seek(0, 2)
            file.seek(0)
            file.write(np.random.default_rng(1).bytes(size))
        for name in names[1:]:
            transaction.write(name, STATES[2][name])
    check(store, 3)


@pytest.mark.parametrize("before", ["shorter", "longer"])
def test_a_note_that_the_disk_takes_in_pieces_is_whole(
    store: Store, directory: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one of another length; or the next process would rebuild what is there."""
    path, pwrite = directory / "baseline.json", os.pwrite
    if before == "longer":
        note(directory, more=300 * "x")
    else:
        path.write_bytes(b"{}")

    def write_in_part(descriptor: int, data: memoryview, offset: int) -> int:
        return pwrite(descriptor, data[:7], offset)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", write_in_part)
        publish(store, 2, directory)
    found = json.loads(path.read_bytes())
    assert path.read_bytes().rstrip() == canonical.encode(found)
    assert (found["version"], found["root"]) == ("main@2", store.log()[-1].root)
    assert (directory / "lock").read_bytes() == BASELINE_TAG
    with dcr_store.open(store.url) as other:
        assert rebuilds(other, 3, directory) == 0
    check(store, 4)


def test_a_baseline_that_is_behind(store: Store, directory: Path, tmp_path: Path) -> None:
    """Others have published meanwhile: only the differences are fetched."""
    publish(store, 2, tmp_path / "other")
    publish(store, 3, tmp_path / "other")
    watched = Watched(store._objects)
    store._catalog.objects = watched
    assert rebuilds(store, 4, directory) == 1
    anchor = store._catalog.resolve("main@0").row.txid
    fetched = [key for method, key in watched.requests if method == "get" and "/c/" in key and "/digests/" not in key]
    assert fetched
    assert not [key for key in fetched if anchor in key], "the anchor is not read again"
    check(store, 5)


def test_a_baseline_that_is_ahead(store: Store, directory: Path, tmp_path: Path) -> None:
    """As after a commit whose process died before it knew: the files hold the next version already."""
    shutil.copytree(directory, tmp_path / "kept")
    publish(store, 2, directory)
    for name in ("u16.bin", "u32.bin"):
        shutil.copy(directory / name, tmp_path / "kept" / name)
    publish(store, 3, tmp_path / "kept")
    check(store, 4)


def test_one_publisher_at_a_time(store: Store, directory: Path) -> None:
    with store.begin(baseline=directory) as transaction:
        with pytest.raises(ConflictError, match="another publisher is using this baseline"):
            Baseline(directory, store.store_id, "main", 1024)
        transaction.abort()
    publish(store, 2, directory)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Advances stop before their first chunk until ``gate`` is set; ``waits`` is set when somebody waits for one."""
    gate, waits, seen = threading.Event(), threading.Event(), list[str]()
    wait = Baseline.wait

    def listen(event: events.Event) -> None:
        seen.append(event.name)
        if event.name == "baseline.chunk.advanced":
            assert gate.wait(LONG_S)

    def watched(self: Baseline) -> None:
        if self._advancing is not None:
            waits.set()
        wait(self)

    monkeypatch.setattr(Baseline, "wait", watched)
    with events.listening(listen):
        yield Held(gate, waits, seen)
    gate.set()


@dataclass(frozen=True)
class Held:
    gate: threading.Event
    waits: threading.Event
    seen: list[str]

    def goes_on_behind(self, call: Callable[[], object]) -> None:
        """Check that `call` waits for an advance, and no longer than that."""
        ended: list[object] = []
        caller = threading.Thread(target=lambda: ended.append(call()))
        caller.start()
        assert self.waits.wait(LONG_S)
        caller.join(0.05)
        assert not ended
        self.gate.set()
        caller.join(LONG_S)
        assert len(ended) == 1, "it raised nothing, and is done"


def commit(store: Store, i: int, baseline: Path | None) -> None:
    """Publish, and do not wait for the baseline."""
    with store.begin(baseline=baseline) as transaction:
        for name, array in STATES[i].items():
            transaction.write(name, array)


@pytest.mark.parametrize("who", ["the same store", "another store"])
def test_commit_does_not_wait_for_it_but_the_next_begin_does(
    store: Store, directory: Path, held: Held, who: str
) -> None:
    commit(store, 2, directory)
    assert [info.version for info in store.log()][-1] == "main@2", "it is published"
    assert json.loads((directory / "baseline.json").read_bytes())["version"] == "main@1"
    with contextlib.nullcontext(store) if who == "the same store" else dcr_store.open(store.url) as following:
        held.goes_on_behind(lambda: publish(following, 3, directory))
    assert "baseline.rebuild" not in held.seen
    assert "baseline.lost" not in held.seen
    check(store, 4)


def test_close_waits_for_it_in_each_thread(store: Store, directory: Path, held: Held) -> None:
    publish(store, 3, None, "other")
    commit(store, 2, directory)
    with store.begin("other") as transaction:
        for name, array in STATES[4].items():
            transaction.write(name, array)
    temporary = store._baselines["other"].directory
    first = threading.Thread(target=store.close)
    first.start()
    assert held.waits.wait(LONG_S)
    held.waits.clear()
    held.goes_on_behind(store.close)
    first.join(LONG_S)
    assert held.seen.count("baseline.noted") == 3  # of a rebuilt temporary one, and of two advances
    assert not temporary.exists()
    assert json.loads((directory / "baseline.json").read_bytes())["version"] == "main@2"


def test_a_temporary_one_is_waited_for_too(store: Store, held: Held) -> None:
    publish(store, 0, None)
    commit(store, 1, None)
    held.goes_on_behind(lambda: publish(store, 2, None))
    assert "baseline.rebuild" not in held.seen
    check(store, 3)


def test_an_anchor_on_a_history_that_cannot_be_read_waits_too(store: Store, held: Held) -> None:
    """Or the advance would note its version over that of the anchor."""
    publish(store, 0, None)
    commit(store, 1, None)
    store._objects.delete(store._catalog.resolve("main@1").row.manifest.key)
    following = dcr_store.open(store.url)
    following._baselines = store._baselines
    following._used = store._used

    def go_on() -> None:
        with pytest.warns(UserWarning, match="stored whole"):
            publish(following, 2, None)

    held.goes_on_behind(go_on)
    assert [name for name in held.seen if name.startswith("baseline.")][-1] == "baseline.noted"
    assert store._baselines["main"]._located is not None
    assert store._baselines["main"]._located.name == "main@2"
    assert_same(following.read("main@2"), STATES[2])


def test_replaced_files_are_let_go(store: Store, directory: Path) -> None:
    publish(store, 2, directory)
    advancing = store.begin(baseline=directory)
    advancing.write("only", np.arange(3000, dtype=np.int64))
    advancing.commit()
    store.close()
    mapped = Path("/proc/self/maps").read_text()
    assert not [line for line in mapped.splitlines() if str(directory) in line]


def test_who_changes_directory_after_the_commit_changes_nothing(
    store: Store, directory: Path, tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    commit(store, 2, Path(directory.name))
    elsewhere = tmp_path / "elsewhere" / directory.name
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere.parent)
    held.goes_on_behind(store.close)
    assert list(elsewhere.iterdir()) == []
    assert json.loads((directory / "baseline.json").read_bytes())["version"] == "main@2"


def test_an_interrupt_while_it_is_waited_for_leaves_nothing_open(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Baseline) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Baseline, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.begin(baseline=directory)
    assert store._catalog.log("main").refresh().open is None
    assert rebuilds(store, 2, directory) == 0


def test_an_interrupt_while_it_starts_keeps_the_lock_until_it_has_ended(
    store: Store, directory: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Background.start

    def interrupted(self: Background[object]) -> None:
        start(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Background, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            commit(store, 2, directory)
    held.goes_on_behind(lambda: publish(store, 3, directory))
    assert "baseline.rebuild" not in held.seen
    check(store, 4)


def test_masks_are_dropped_where_no_thread_can_be_started(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise StorageError("cannot start a thread")

    submit = Threads.submit

    def refuse_background(self: Threads, *arguments: Any) -> Any:
        return (refuse if self._thread_name_prefix == "dcr-background" else submit)(self, *arguments)

    closed, close = list[ChunkSpool](), ChunkSpool.close
    with monkeypatch.context() as patch:
        patch.setattr(Threads, "submit", refuse_background)
        patch.setattr(ChunkSpool, "close", lambda self: (closed.append(self), close(self))[1])
        publish(store, 2, directory)
    assert len(closed) == 1
    assert rebuilds(store, 3, directory) == 1
    check(store, 4)


def test_a_forked_process_does_not_wait_for_its_parents_threads(store: Store, directory: Path) -> None:
    """Nor does it keep the baseline locked."""
    gate = threading.Event()

    def listen(event: events.Event) -> None:
        if event.name == "baseline.chunk.advanced":
            assert gate.wait(LONG_S)

    with events.listening(listen):
        with store.begin(baseline=directory) as transaction:
            for name, array in STATES[2].items():
                transaction.write(name, array)
        child = os.fork()
        if child == 0:
            signal.alarm(int(LONG_S))  # instead of waiting for ever
            try:
                store.close()
                time.sleep(0.5)
            except BaseException:
                os._exit(1)
            os._exit(7)
        gate.set()
        assert rebuilds(store, 3, directory) == 0
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    check(store, 4)


def test_what_nobody_expected_is_told_once_and_mended(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ChunkSpool, space: str, chunk: int) -> bytes | None:
        if threading.current_thread().name.startswith("dcr-background"):
            raise MemoryError("none left")
        return get(self, space, chunk)

    get = ChunkSpool.get

    with monkeypatch.context() as patch:
        patch.setattr(ChunkSpool, "get", fail)
        with pytest.raises(MemoryError, match="none left"):
            publish(store, 2, directory)
    assert [info.version for info in store.log()][-1] == "main@2", "it was committed"
    assert rebuilds(store, 3, directory) == 1
    check(store, 4)


def test_a_baseline_serves_one_line(store: Store, directory: Path) -> None:
    publish(store, 3, directory, "other")
    publish(store, 4, directory, "other")
    publish(store, 2, directory)
    check(store, 3)
    assert_same(store.read("other@1"), STATES[4])


@pytest.mark.parametrize("end", ["abort", "exception", "layout"])
def test_after_transactions_without_a_version(store: Store, directory: Path, end: str) -> None:
    def fail() -> None:
        with store.begin(baseline=directory) as transaction:
            for name, array in STATES[4].items():
                transaction.write(name, array)
            if end == "layout":
                transaction.write("new", np.arange(5))
            if end == "abort":
                transaction.abort()
            else:
                raise KeyError("out")

    if end == "abort":
        fail()
    else:
        with pytest.raises(KeyError):
            fail()
    assert rebuilds(store, 2, directory) == 0
    check(store, 3)


def test_layouts_change_and_change_back(store: Store, directory: Path) -> None:
    with store.begin(baseline=directory) as transaction:
        transaction.write("only", np.arange(3000, dtype=np.int64))
    assert sorted(path.name for path in directory.iterdir()) == ["baseline.json", "lock", "u64.bin"]
    publish(store, 2, directory)
    publish(store, 3, directory)
    assert [info.base is None for info in store.log()] == [True, False, True, True, False]
    assert_same(store.read("main@4"), STATES[3])


def test_a_place_that_cannot_be_used(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidInputError, match="file: is a file; give a directory"):
        publish(store, 0, tmp_path / "file")
    with pytest.raises(
        StorageError, match="baseline directory cannot be used: File name too long; name a writable one"
    ):
        publish(store, 0, tmp_path / ("x" * 300))
    assert store._catalog.log("main").refresh().open is None, "nothing was begun"
    publish(store, 0, None)


def test_a_full_disk_at_the_start_keeps_no_lock(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", fail)
        with pytest.raises(StorageError, match="No space left"):
            publish(store, 0, tmp_path / "baseline")
    publish(store, 0, tmp_path / "baseline")
    check(store, 1)


def test_a_store_that_was_closed_goes_on(store: Store) -> None:
    publish(store, 0, None)
    tensors = {"w": ("F32", (2,))}
    with store.begin("joint", writers=["a"], tensors=tensors) as transaction:
        transaction.write_residual("w", np.zeros(2, np.float32))
    store.close()
    store.close()
    publish(store, 1, None)
    check(store, 2)
    with store.begin("joint", writers=["a"], tensors=tensors) as transaction:
        transaction.write_residual("w", np.ones(2, np.float32))
    store.close()
    assert store.read("joint@1")["w"].tolist() == [1, 1]
    assert store.verify(deep=True).ok


def test_temporary_ones_go_away(store: Store) -> None:
    publish(store, 0, None)
    (baseline,) = store._baselines.values()
    assert baseline.directory.is_dir()
    publish(store, 1, None)
    assert list(store._baselines.values()) == [baseline]
    store.close()
    assert not baseline.directory.exists()


def test_a_full_disk_after_the_commit_is_no_failed_publish(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def fail(self: Baseline, located: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, events.listening(lambda event: seen.append(event.name)):
        patch.setattr(Baseline, "_write_state", fail)
        publish(store, 2, directory)
    assert "baseline.lost" in seen
    assert not (directory / "baseline.json").exists()
    publish(store, 3, directory)
    check(store, 4)
