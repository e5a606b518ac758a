"""What an adversary found: stores inside checkpoints, forks, log checkpoints that lack rows."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from states import assert_same, series, tree, write_hf

import dcr_store
from dcr_store.errors import ConflictError, IntegrityError, InvalidInputError
from dcr_store.format import canonical


def _publish(store: dcr_store.Store, checkpoint: Path) -> None:
    with store.begin() as tx:
        tx.write_checkpoint(checkpoint)


def _in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process, which ends like any other; return its exit code, -14 if it hangs."""
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(20)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_store_inside_the_checkpoint_is_not_published_nor_removed(tmp_path: Path) -> None:
    states = series(3)
    checkpoint = write_hf(tmp_path / "run", states[0])
    store = dcr_store.create(checkpoint / "store")
    for step, state in enumerate(states):
        _publish(store, write_hf(checkpoint, state, step=step))
    assert not any(path.startswith("store/") for path, _ in store.show("main@2").files)
    before = tree(checkpoint / "store")
    for version in ("main@0", "main@2", "main@1"):
        store.pull(checkpoint, version)
    assert tree(checkpoint / "store") == before
    (checkpoint / ".dcr" / "marker.json").unlink()
    store.pull(checkpoint, "main@0")
    assert store.verify(deep=True).ok
    assert_same(dcr_store.open(checkpoint / "store").read("main@2"), states[2])


def test_a_store_is_no_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "both"
    store = dcr_store.create(place)
    write_hf(place, series(1)[0])
    with pytest.raises(InvalidInputError, match="is a store"):
        _publish(store, place)
    assert store.log() == []


def test_what_only_looks_like_a_store_is_published(tmp_path: Path) -> None:
    checkpoint = write_hf(tmp_path / "run", series(1)[0])
    (checkpoint / "a").mkdir()
    (checkpoint / "a" / "dcr.json").write_text('{"format":"other"}')
    (checkpoint / "b").mkdir()
    os.mkfifo(checkpoint / "b" / "dcr.json")
    (checkpoint / "b" / "note").write_text("x")
    store = dcr_store.create(tmp_path / "store")
    _publish(store, checkpoint)
    assert {"a/dcr.json", "b/note"} <= {path for path, _ in store.show("main").files}


def test_a_link_to_itself_is_left_out(tmp_path: Path) -> None:
    checkpoint = write_hf(tmp_path / "run", series(1)[0])
    (checkpoint / "loop").symlink_to("loop")
    store = dcr_store.create(tmp_path / "store")
    with store.begin() as tx:
        assert tx.write_checkpoint(checkpoint).left_out == (("loop", "a link to itself"),)


@pytest.mark.parametrize("lost", [7, 3, 0])
def test_a_log_checkpoint_that_lacks_a_version_does_not_hide_it(tmp_path: Path, lost: int) -> None:
    store = dcr_store.create(tmp_path / "store")
    for step in range(9):
        with store.begin() as tx:
            tx.write("a", np.full(8, step, np.int16))
    (place,) = (tmp_path / "store/log/main/checkpoints").iterdir()
    body = json.loads(place.read_bytes())["body"]
    body["rows"] = [row for row in body["rows"] if row["version"] != lost]
    place.write_bytes(canonical.seal_body(body))
    with pytest.raises(IntegrityError, match="leave out a version"):
        dcr_store.open(tmp_path / "store").log()
    place.unlink()
    assert len(dcr_store.open(tmp_path / "store").log()) == 9


def test_a_transaction_stays_with_the_process_that_began_it(tmp_path: Path) -> None:
    store = dcr_store.create(tmp_path / "store", chunk_elements=64)
    with store.begin() as tx:
        tx.write("a", np.arange(1000, dtype=np.int16))
    with store.begin() as tx:
        tx.write("a", np.arange(1, 1001, dtype=np.int16))

        def child() -> None:
            for call in (lambda: tx.write("b", np.ones(3)), tx.commit, tx.abort):
                with pytest.raises(InvalidInputError, match="process"):
                    call()

        assert _in_child(child) == 0
    assert_same(store.read("main@1"), {"a": np.arange(1, 1001, dtype=np.int16)})


def test_a_forked_process_leaves_its_parents_baseline_alone(tmp_path: Path) -> None:
    store = dcr_store.create(tmp_path / "store")
    with store.begin() as tx:
        tx.write("a", np.arange(1000, dtype=np.int16))
    directory = store._baselines["main"].directory

    def child() -> None:
        with store, store.begin("other") as tx:
            tx.write("a", np.ones(3))
        with store.begin() as tx:
            tx.write("a", np.arange(1, 1001, dtype=np.int16))

    assert _in_child(child) == 0
    assert (directory / "lock").exists()
    with store.begin() as tx:
        tx.write("a", np.arange(2, 1002, dtype=np.int16))
    assert_same(store.read("main@2"), {"a": np.arange(2, 1002, dtype=np.int16)})
    store.close()
    assert not directory.exists()


def test_a_forked_process_does_not_keep_the_lock_of_a_baseline(tmp_path: Path) -> None:
    store = dcr_store.create(tmp_path / "store")
    tx = store.begin(baseline=tmp_path / "baseline")
    tx.write("a", np.ones(3))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is through
        os._exit(0)
    try:
        tx.commit()
        with store.begin(baseline=tmp_path / "baseline") as tx:
            with pytest.raises(ConflictError):
                store.begin("other", baseline=tmp_path / "baseline")
            tx.write("a", np.zeros(3))
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)
    assert len(store.log()) == 2


def _lose_data_of(store: Path, number: int) -> None:
    (found,) = store.glob(f"versions/main/{number:012d}-*/data")
    shutil.rmtree(found)


def test_a_line_with_a_lost_delta_goes_on_with_a_version_stored_whole(tmp_path: Path) -> None:
    states = series(6)
    with dcr_store.create(tmp_path / "store", chunk_elements=4096) as store:
        for state in states[:5]:
            with store.begin() as tx:
                for name, array in state.items():
                    tx.write(name, array)
    _lose_data_of(tmp_path / "store", 2)
    with dcr_store.open(tmp_path / "store") as store:
        with pytest.warns(UserWarning, match="main@5 is stored whole, because its base cannot be read"):
            tx = store.begin()
        with tx:
            for name, array in states[5].items():
                tx.write(name, array)
        assert store.log()[-1].base is None
        assert_same(store.read("main@5"), states[5])
        assert_same(store.read("main@1"), states[1])
        with pytest.raises(IntegrityError):
            store.read("main@3")


def test_a_directory_beyond_a_lost_delta_is_pulled_back_before_it(tmp_path: Path) -> None:
    states = series(5)
    with dcr_store.create(tmp_path / "store", chunk_elements=4096) as store:
        for state in states:
            with store.begin() as tx:
                for name, array in state.items():
                    tx.write(name, array)
        store.pull(tmp_path / "node")
    _lose_data_of(tmp_path / "store", 2)
    with dcr_store.open(tmp_path / "store") as store:
        assert store.pull(tmp_path / "node", "main@1").version == "main@1"
        assert store.compare_directory("main@1", tmp_path / "node").problems == []
        with pytest.raises(IntegrityError):
            store.pull(tmp_path / "node", "main@3")
        store.pull(tmp_path / "node", "main@0")
        assert store.compare_directory("main@0", tmp_path / "node").problems == []


@pytest.mark.parametrize("where", [".", "versions", "log/main", "new", "a/new", "link"])
def test_nothing_is_pulled_into_a_store(tmp_path: Path, where: str) -> None:
    """Its own and another one; named directly, or through a link."""
    place = tmp_path / "store"
    store = dcr_store.create(place)
    _publish(store, write_hf(tmp_path / "run", series(1)[0]))
    other = dcr_store.create(tmp_path / "other")
    _publish(other, tmp_path / "run")
    (tmp_path / "aside").symlink_to(place)
    target = tmp_path / "aside" if where == "link" else place / where
    before = tree(place)
    for source in (store, other):
        for call in (
            lambda s: s.pull(target),
            lambda s: s.pull(target, force=True),
            lambda s: s.checkout("main", target),
        ):
            with pytest.raises(InvalidInputError, match=rf"inside of one.*found the store {place}\)") as caught:
                call(source)
            assert caught.value.key == str(target)
    with pytest.raises(InvalidInputError, match="inside of one"):
        store.begin(baseline=target)
    assert tree(place) == before
    assert not (place / "new").exists()
    assert not (place / "a").exists()
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("kind", ["store", "baseline"])
def test_no_file_of_a_version_goes_into_a_store_or_baseline_below(tmp_path: Path, kind: str) -> None:
    store = dcr_store.create(tmp_path / "store")
    checkpoint = write_hf(tmp_path / "run", series(1)[0])
    (checkpoint / "sub" / "own" / "deep").mkdir(parents=True)
    (checkpoint / "sub" / "own" / "deep" / "note").write_text("x")
    _publish(store, checkpoint)
    out = tmp_path / "out"
    out.mkdir()
    own = out / "sub" / "own"
    if kind == "store":
        dcr_store.create(own)
    else:
        with store.begin(baseline=own) as tx:
            tx.write("a", np.ones(3))
    before = tree(out)
    for force in (False, True):
        with pytest.raises(InvalidInputError, match=f"found the {kind} {own}"):
            store.pull(out, "main@0", force=force)
    assert tree(out) == before


def test_a_baseline_inside_the_checkpoint_is_not_published(tmp_path: Path) -> None:
    """Neither this one, which holds next to nothing before its first commit, nor that of another line or run."""
    states = series(3)
    checkpoint = write_hf(tmp_path / "run", states[0])
    store = dcr_store.create(tmp_path / "store")
    for step, state in enumerate(states):
        write_hf(checkpoint, state, step=step)
        for line in ("main", "exp"):
            with store.begin(line, baseline=checkpoint / f"base-{line}") as tx:
                left_out = tx.write_checkpoint(checkpoint).left_out
            assert ("base-main", "a baseline") in left_out
            assert not any("base" in path for path, _ in store.show(line).files)
    before = tree(checkpoint / "base-main")
    store.pull(checkpoint, "main@0")
    (checkpoint / ".dcr" / "marker.json").unlink()
    store.pull(checkpoint, "main@1")
    assert tree(checkpoint / "base-main") == before
    with store.begin("exp", baseline=checkpoint / "base-exp") as tx:
        tx.write_checkpoint(checkpoint)
    assert_same(store.read("exp@3"), states[1])


def test_a_baseline_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint = write_hf(tmp_path / "run", series(1)[0])
    before = tree(checkpoint)
    store = dcr_store.create(tmp_path / "store")
    with pytest.raises(InvalidInputError, match="is a checkpoint; give the baseline a directory of its own"):
        store.begin(baseline=checkpoint)
    assert tree(checkpoint) == before
    with store.begin(baseline=tmp_path / "base") as tx:
        tx.write("a", np.ones(3))
    write_hf(tmp_path / "base", series(1)[0])
    with pytest.raises(InvalidInputError, match="is a baseline too"):
        _publish(store, tmp_path / "base")


def test_what_only_looks_like_a_baseline_is_published(tmp_path: Path) -> None:
    checkpoint = write_hf(tmp_path / "run", series(1)[0])
    for name, content in (("a", b""), ("b", b"4711\n"), ("c", b"dcr")):
        (checkpoint / name).mkdir()
        (checkpoint / name / "lock").write_bytes(content)
    store = dcr_store.create(tmp_path / "store")
    _publish(store, checkpoint)
    assert {"a/lock", "b/lock", "c/lock"} <= {path for path, _ in store.show("main").files}
