"""``dcr follow`` as people and scripts run it."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from states import series, tree, write_hf

import dcr_store
from dcr_store.cli.main import main

STATES = series(4, seed=9)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("checkpoints")
    return [write_hf(place / f"step{i}", state, n_files=2, step=i) for i, state in enumerate(STATES)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with one version."""
    dcr_store.create(tmp_path / "store", chunk_elements=1024).close()
    return str(tmp_path / "store")


def publish(store: str, checkpoint: Path) -> None:
    with dcr_store.open(store) as opened, opened.begin() as transaction:
        transaction.write_checkpoint(checkpoint)


def dcr(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def test_a_directory_is_kept_at_the_newest_version(store: str, checkpoints: list[Path], tmp_path: Path) -> None:
    node = tmp_path / "node"
    assert dcr("follow", store, node, "--once") == (0, "", ""), "nothing has been published"
    publish(store, checkpoints[0])
    code, out, err = dcr("follow", store, node, "--once")
    assert (code, err) == (0, "")
    assert out.startswith(f"{node} is at main@0, root ")
    assert "\n  had 0 B, fetched " in out
    assert tree(node) == tree(checkpoints[0])
    process = subprocess.Popen(
        [sys.executable, "-m", "dcr_store", "follow", store, str(node), "--json", "--spool", str(tmp_path / "spool")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told = [json.loads(process.stdout.readline())]
    for checkpoint in checkpoints[1:]:
        publish(store, checkpoint)
        told.append(json.loads(process.stdout.readline()))
        assert tree(node) == tree(checkpoint)
    assert [item["version"] for item in told] == ["main@0", "main@1", "main@2", "main@3"]
    assert set(told[0]) == {
        "version",
        "root",
        "previous",
        "nbytes_spooled",
        "nbytes_fetched",
        "chunks_written",
        "chunks_healed",
        "seconds",
    }
    assert told[3]["previous"] == "main@2"
    assert told[3]["nbytes_spooled"] > 0
    assert told[3]["nbytes_fetched"] == 0
    assert list((tmp_path / "spool").iterdir())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert time.monotonic() - began < 5


def test_until_and_groups(store: str, checkpoints: list[Path], tmp_path: Path) -> None:
    for checkpoint in checkpoints[:3]:
        publish(store, checkpoint)
    code, out, err = dcr("follow", store, tmp_path / "node", "--until", "main@1")
    assert (code, err) == (0, "")
    assert tree(tmp_path / "node") == tree(checkpoints[1])
    assert dcr("group", store, "create", "eu", "r0")[0] == 0
    code, out, err = dcr("follow", store, tmp_path / "node", "--group", "eu", "--name", "r0", "--until", "main@2")
    assert (code, err) == (0, "")
    assert "is at main@2 (was main@1)" in out
    assert tree(tmp_path / "node") == tree(checkpoints[2])
    assert '"version": "main@2"' in dcr("status", store, "--json")[1]


def test_mistakes(store: str, checkpoints: list[Path], tmp_path: Path) -> None:
    publish(store, checkpoints[0])
    foreign = write_hf(tmp_path / "foreign", STATES[2])
    before = tree(foreign)
    for arguments, expected in (
        ((foreign,), "no version of this store"),
        ((tmp_path / "node", "--group", "eu", "--name", "r0"), "no group 'eu'"),
        ((tmp_path / "node", "--spool", Path(store) / "spool"), "is a store, or inside of one"),
        ((Path(store) / "node",), "is a store, or inside of one"),
    ):
        code, out, err = dcr("follow", store, *arguments)
        assert (code, out) == (1, ""), arguments
        assert expected in err
        assert err.startswith("dcr: ")
        assert err.count("\n") == 1
    assert tree(foreign) == before
    assert dcr("follow", store, tmp_path / "node", "--spool-bytes", "10KB")[0] == 2
    assert dcr("follow", store, tmp_path / "node", "--until", "main")[0] == 2
    assert not (tmp_path / "node").exists()


def test_failures_are_told_and_survived(store: str, checkpoints: list[Path], tmp_path: Path) -> None:
    publish(store, checkpoints[0])
    node = tmp_path / "node"
    assert dcr("follow", store, node, "--once")[0] == 0
    publish(store, checkpoints[1])
    with dcr_store.open(store) as opened:
        key = opened._catalog.contents(opened._catalog.resolve("main@1")).partitions[0].key
    place = Path(store) / key
    good = place.read_bytes()
    place.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    code, out, err = dcr("follow", store, node, "--once")
    assert (code, out) == (1, "")
    assert key in err
    assert tree(node) == tree(checkpoints[0])
    process = subprocess.Popen(
        [sys.executable, "-m", "dcr_store", "follow", store, str(node), "--until", "main@1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith(f"dcr: {key}")
    assert "; trying again in " in line
    assert tree(node) == tree(checkpoints[0])
    place.write_bytes(good)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert tree(node) == tree(checkpoints[1])


def test_what_is_not_there_is_no_success(store: str, checkpoints: list[Path], tmp_path: Path) -> None:
    node = tmp_path / "node"
    code, _, err = dcr("follow", store, node, "--once", "--until", "main@0")
    assert code == 1
    assert "the version is not there yet (expected main@0, found no version)" in err
    publish(store, checkpoints[0])
    code, _, err = dcr("follow", store, node, "--once", "--until", "main@99")
    assert code == 1
    assert "the version is not there yet (expected main@99, found main@0)" in err
    assert dcr("follow", store, node, "--once", "--until", "main@0")[0] == 0
    code, _, err = dcr("follow", store, tmp_path / "other", "--once", "--line", "other")
    assert code == 1
    assert "has no version on line 'other'; other lines: main" in err
    code, _, err = dcr("follow", store, node, "--name", "r1")
    assert (code, err) == (2, "dcr: --group and --name go together; see: dcr follow --help\n")
