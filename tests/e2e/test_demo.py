"""The demonstration, with a policy so small that it learns nothing: real processes, a real store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcr_store
from dcr_store.cli.main import main
from dcr_store.demo import policy
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.worker import Follower
from dcr_store.errors import DcrError

# Warmed up just so far that some answers are right: without any the gradient would be zero.
RECIPE = {"n_layers": 1, "hidden": 64, "intermediate": 128, "n_heads": 2, "n_kv_heads": 1, "n_threads": 1}
RECIPE |= {"warm_up_steps": 60, "warm_up_batch": 16, "warm_up_learning_rate": 5e-3, "n_prompts": 16, "n_samples": 32}
PROGRAM = f"""
import sys
from rich.console import Console
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.run import run
store, steps = sys.argv[1:]
sys.exit(run(store, int(steps), as_json=True, console=Console(stderr=True), recipe=Recipe(**{RECIPE!r})))
"""


@contextlib.contextmanager
def started(store: Path, steps: int, scratch: Path) -> Iterator[subprocess.Popen[str]]:
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(store), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str], scratch: Path) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert_nothing_left(process, scratch)
    document: dict[str, Any] = json.loads(out)
    return document


def assert_nothing_left(process: subprocess.Popen[str], scratch: Path) -> None:
    assert not group_exists(process.pid)
    assert list(scratch.glob("dcr-*")) == []


def wait_for(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_run_is_exact_can_be_repeated_and_gone_on_with(tmp_path: Path) -> None:
    stores = [tmp_path / "a", tmp_path / "b"]
    scratches = [tmp_path / "scratch-a", tmp_path / "scratch-b"]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(store, 2, own)) for store, own in zip(stores, scratches, strict=True)]
        first, second = (finish(process, own) for process, own in zip(processes, scratches, strict=True))

    assert first["equal"] is True
    assert [row["version"] for row in first["versions"]] == ["main@0", "main@1", "main@2"]
    assert all(row["equal"] and row["publish_s"] > 0 and row["pull_s"] > 0 for row in first["versions"])
    assert all(0 < row["changed"] < row["elements"] for row in first["versions"][1:])
    assert [row["reward"] for row in first["versions"]] == [row["reward"] for row in second["versions"]]
    roots = [[info.root for info in dcr_store.open(store).log()] for store in stores]
    assert roots[0] == roots[1]
    assert len(set(roots[0])) == 3

    # A third run takes the head for its policy and learns on.
    with started(stores[0], 1, tmp_path / "scratch-c") as process:
        third = finish(process, tmp_path / "scratch-c")
    assert [row["version"] for row in third["versions"]] == ["main@2", "main@3"]
    assert third["versions"][0]["reward"] == first["versions"][2]["reward"]
    assert third["versions"][0]["publish_s"] is None
    with dcr_store.open(stores[0]) as store:
        infos = store.log()
        assert [info.metadata["step"] for info in infos] == [0, 1, 2, 3]
        assert [info.metadata["reward"] for info in infos[1:]] == [row["reward"] for row in first["versions"]]
        assert store.verify(deep=True).ok

    # The commands that it prints work as they stand, also where the kill comes too late.
    for command in third["next"]:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "KILL" in command, (command, done.stderr)


def test_an_interrupt_leaves_the_store_and_nothing_else(tmp_path: Path) -> None:
    store, scratch = tmp_path / "store", tmp_path / "scratch"

    def has_published() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return (store / "dcr.json").exists() and len(dcr_store.open(store).log()) > 1

    with started(store, 10_000, scratch) as process:
        wait_for(has_published)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert_nothing_left(process, scratch)
    assert dcr_store.open(store).verify(deep=True).ok


@pytest.fixture
def empty_store(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    dcr_store.create(url).close()
    return url


def test_a_follower_that_fails_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(DcrError, match=r"follower process failed: .*there is no store here"),
        Follower(str(tmp_path / "none"), tmp_path / "scratch", range(1), Recipe()) as follower,
    ):
        follower.next_report()


def test_a_follower_that_dies_is_reported(tmp_path: Path, empty_store: str) -> None:
    with Follower(empty_store, tmp_path / "scratch", range(1), Recipe()) as follower:
        follower._process.kill()
        with pytest.raises(DcrError, match="ended by signal 9"):
            follower.next_report()


def test_a_follower_that_crashes_shows_its_last_line(
    tmp_path: Path, empty_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "transformers.py").write_text("raise RuntimeError('no transformers today')")
    with (
        pytest.raises(DcrError, match="exit code 1: RuntimeError: no transformers today") as caught,
        Follower(empty_store, tmp_path / "scratch", range(1), Recipe()) as follower,
    ):
        follower.next_report()
    assert "Traceback" in caught.value.__notes__[0]


def test_a_follower_ends_with_its_trainer(tmp_path: Path, empty_store: str) -> None:
    program = (
        "import sys, time; from pathlib import Path; from dcr_store.demo.recipe import Recipe\n"
        "from dcr_store.demo.worker import Follower\n"
        "follower = Follower(sys.argv[1], Path(sys.argv[2]), range(1), Recipe())\n"
        "print('started', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, empty_store, str(tmp_path / "scratch")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"started\n"
        trainer.kill()
    wait_for(lambda: not group_exists(trainer.pid))


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("foreign", ["file", "line", "version"])
def test_what_is_not_its_own_store_is_refused(tmp_path: Path, foreign: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "place"
    if foreign == "file":
        place.mkdir()
        (place / "thesis.tex").write_text("")
        says = "the directory is not empty and no store"
    else:
        with dcr_store.create(place) as store, store.begin("other" if foreign == "line" else "main") as transaction:
            transaction.write("weight", np.ones(3, np.float32))
        says = "the store was not made by the demo"
    before = sorted(place.rglob("*"))
    assert main(["demo", "--store", str(place)]) == 1
    assert says in capsys.readouterr().err
    assert sorted(place.rglob("*")) == before


def test_a_store_in_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--store", "memory://demo"]) == 1
    assert "no other process sees a store in memory" in capsys.readouterr().err


def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policy, "find_spec", lambda name: None if name == "transformers" else object())
    assert main(["demo", "--store", str(tmp_path / "store")]) == 1
    says = "dcr: the demo needs the package transformers; install it with: pip install 'dcr-store[demo]'\n"
    assert capsys.readouterr().err == says
    assert not (tmp_path / "store").exists()
