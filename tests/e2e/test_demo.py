"""The demonstration, with a policy so small that it learns nothing: real processes, a real store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
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
from dcr_store.demo.cluster import settle
from dcr_store.demo.processes import Child
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.site import Site
from dcr_store.errors import DcrError

# Warmed up just so far that some answers are right: without any the gradient would be zero.
RECIPE = {"n_layers": 1, "hidden": 64, "intermediate": 128, "n_heads": 2, "n_kv_heads": 1}
RECIPE |= {"warm_up_steps": 60, "warm_up_batch": 16, "warm_up_learning_rate": 5e-3, "n_prompts": 16, "n_samples": 32}
RECIPE |= {"chunk_elements": 4096}
PROGRAM = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
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


def run_command(command: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command that the demonstration printed, as it stands; in this process where it is a verb alone."""
    words = shlex.split(command)
    verbs = words[3:] if words[1:3] == ["-m", "dcr_store"] else words[1:]
    if Path(words[0]).name in ("dcr", Path(sys.executable).name) and ";" not in command:
        with monkeypatch.context() as context:
            context.chdir(directory)
            assert main(verbs) == 0, command
    else:  # killed on its way, or the kill came too late
        subprocess.run(["bash", "-c", command], cwd=directory, capture_output=True, check=False)


def test_a_run_is_exact_whatever_happens_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, scratch = tmp_path / "store", tmp_path / "scratch"
    with started(store, 2, scratch) as process:
        first = finish(process, scratch)

    assert first["equal"] is True
    rows = first["versions"]
    assert [row["version"] for row in rows] == ["main@0", "main@1", "main@2"]
    for row in rows:
        assert row["curve_equal"]
        assert row["bits_equal"]
        assert row["publish_s"] > 0
        assert (row["reward"], row["loss"]) == (row["reference_reward"], row["reference_loss"])
        assert list(row["receivers"]) == ["eu", "us"]
    assert rows[0]["loss"] is None
    assert len({row["loss"] for row in rows}) == 3
    assert all(0 < row["reward"] < 1 for row in rows)
    assert all(0 < row["changed"] < row["elements"] for row in rows[1:])
    jumped = [(row["version"], name) for row in rows for name, item in row["receivers"].items() if item["jumped_over"]]
    assert jumped == [("main@1", "us")]
    assert all((item["promote_s"] is None) == item["jumped_over"] for row in rows for item in row["receivers"].values())
    drills = [(drill["version"], drill["receiver"], drill["what"]) for drill in first["drills"]]
    assert [drill[:2] for drill in drills] == [("main@1", "us"), ("main@1", "eu"), ("main@2", "us"), ("main@2", "us")]
    assert "its relay is killed" in drills[0][2]
    killed = re.search(r"SIGKILL.*, chunks written: (\d+); .*finished alone, chunks written: (\d+)", drills[1][2])
    assert killed is not None
    n_chunks = -(-rows[0]["elements"] // RECIPE["chunk_elements"])
    assert int(killed[1]) == n_chunks // 2
    assert 0 < int(killed[2]) <= n_chunks - n_chunks // 2, "chunks that were written stay"
    assert "caught up from main@0 in one go" in drills[2][2]

    with dcr_store.open(store) as opened:
        for group in opened.status().groups:
            assert (group.active, group.lag) == ("main@2", 0)
            assert [(member.name, member.version) for member in group.members] == [(f"{group.group}-1", "main@2")]

    # The commands that it prints work as they stand, also where the kill comes too late.
    for command in first["next"]:
        run_command(command, tmp_path, monkeypatch)
    assert "us-1" in capsys.readouterr().out
    with dcr_store.open(store) as opened:
        assert {dtype for _, dtype, _ in opened.show("main@2").tensors} == {"BF16"}
    for directory in ("earlier", "policy"):
        config = json.loads((tmp_path / directory / "config.json").read_text())
        assert config["dtype"] == "bfloat16", "what computes is float32, what is saved is not"

    # Another run takes the head for its policy and learns on, until it is interrupted.
    with started(store, 10_000, tmp_path / "again") as process:
        wait_for(lambda: process.poll() is not None or len(dcr_store.open(store).log()) > 3)
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert_nothing_left(process, tmp_path / "again")
    with dcr_store.open(store) as opened:
        infos = opened.log()
        assert [info.metadata["step"] for info in infos] == list(range(len(infos)))
        assert [info.metadata["reward"] for info in infos[1:4]] == [row["reward"] for row in rows]
        assert opened.verify(deep=True).ok


@pytest.fixture
def empty_store(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    dcr_store.create(url).close()
    return url


def test_a_receiver_that_fails_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(DcrError, match=r"receiver eu failed: .*there is no store here"),
        Site("eu", str(tmp_path / "none"), tmp_path / "scratch", Recipe(), None) as site,
    ):
        site.await_version("main@0")


def test_a_receiver_that_dies_is_reported(tmp_path: Path, empty_store: str) -> None:
    with Site("eu", empty_store, tmp_path / "scratch", Recipe(), None) as site:
        site._child._process.kill()
        with pytest.raises(DcrError, match="receiver eu failed: ended by signal 9"):
            site.await_version("main@0")


def test_a_receiver_that_crashes_shows_its_last_line(
    tmp_path: Path, empty_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "torch.py").write_text("raise RuntimeError('no torch today')")
    with (
        pytest.raises(DcrError, match="exit code 1: RuntimeError: no torch today") as caught,
        Site("eu", empty_store, tmp_path / "scratch", Recipe(), None) as site,
    ):
        site.await_version("main@0")
    assert "Traceback" in caught.value.__notes__[0]


def test_a_relay_that_cannot_listen_or_says_nothing_is_reported(tmp_path: Path, empty_store: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = [empty_store, str(tmp_path / "cache"), str(port)]
        with (
            pytest.raises(DcrError, match=r"the relay failed: .*cannot listen"),
            Child("the relay", "relaying", arguments, tmp_path / "stderr") as relay,
        ):
            relay.hear()
    with Child("the relay", "relaying", arguments, tmp_path / "stderr") as relay:
        assert relay.hear()["url"] == f"http://127.0.0.1:{port}"
        with pytest.raises(DcrError, match="the relay failed: said nothing for"):
            relay.hear(0.1)


def test_all_processes_end_with_the_trainer(tmp_path: Path, empty_store: str) -> None:
    program = (
        "import sys, time; from pathlib import Path; import dcr_store; from dcr_store.demo.recipe import Recipe\n"
        "from dcr_store.demo.cluster import Cluster; from dcr_store.demo.drills import Plan\n"
        "store = dcr_store.open(sys.argv[1])\n"
        "cluster = Cluster(store, sys.argv[1], None, Plan(), Path(sys.argv[2]), Recipe(), print)\n"
        "print('started', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, empty_store, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"started\n"
        trainer.kill()
    wait_for(lambda: not group_exists(trainer.pid))


@pytest.mark.parametrize("left", ["a proposal", "an older version", "nothing"])
def test_groups_go_on_from_what_an_earlier_run_left(tmp_path: Path, empty_store: str, left: str) -> None:
    with dcr_store.open(empty_store) as store:
        for value in (0, 1):
            with store.begin() as transaction:
                transaction.write("weight", np.full(3, value, np.float32))
        group = store.create_group("eu", ["eu-1"])
        with store.receiver(tmp_path / "target", group="eu", name="eu-1") as receiver:
            receiver.follow(once=True)
        if left == "a proposal":
            group.propose("main@0")
        elif left == "an older version":
            group.propose("main@0")
            with store.receiver(tmp_path / "target", group="eu", name="eu-1") as receiver:
                receiver.follow(once=True)
            assert group.status().active == "main@0"
        settle(store, "eu", store.log()[-1])
        status = group.status()
        assert (status.active, status.proposed) == {
            "a proposal": ("main@1", None),
            "an older version": ("main@0", "main@1"),
            "nothing": ("main@1", None),
        }[left]


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


@pytest.mark.parametrize("package", ["transformers", "aiohttp"])
def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setattr(policy, "find_spec", lambda name: None if name == package else object())
    assert main(["demo", "--store", str(tmp_path / "store")]) == 1
    says = f"dcr: the demo needs the package {package}; install it with: pip install 'dcr-store[demo]'\n"
    assert capsys.readouterr().err == says
    assert not (tmp_path / "store").exists()
