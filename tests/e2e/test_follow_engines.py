"""``dcr follow`` and ``dcr pull`` with versions side by side, engines and commands, as people and scripts run them."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import SglangStandIn, VllmStandIn
from states import series, tree, write_hf

import dcr_store
from dcr_store.cli.main import main


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("checkpoints")
    return [write_hf(place / f"step{i}", state, n_files=2) for i, state in enumerate(series(3, seed=5))]


@pytest.fixture
def store(tmp_path: Path, checkpoints: list[Path]) -> str:
    """A store with one version."""
    dcr_store.create(tmp_path / "store", chunk_elements=1024).close()
    publish(str(tmp_path / "store"), checkpoints[0])
    return str(tmp_path / "store")


def publish(store: str, checkpoint: Path) -> None:
    with dcr_store.open(store) as opened, opened.begin() as transaction:
        transaction.write_checkpoint(checkpoint)


def dcr(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def weights(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def test_pull_side_by_side(store: str, checkpoints: list[Path], tmp_path: Path) -> None:
    node = tmp_path / "node"
    code, out, err = dcr("pull", store, node, "--mode", "copy")
    assert (code, err) == (0, "")
    assert out.startswith(f"{node}/current is at main@0, root ")
    assert "shares 0 files, took up to " in out
    publish(store, checkpoints[1])
    code, out, _ = dcr("pull", store, node, "--mode", "copy", "--keep", 0, "--json")
    told = json.loads(out)
    assert (code, told["version"], told["previous"]) == (0, "main@1", "main@0")
    assert Path(told["directory"]) == (node / "current").resolve()
    assert tree(node / "current") == tree(checkpoints[1])
    assert len(list(node.glob("main@*"))) == 1


@pytest.mark.parametrize("verb", ["pull", "follow"])
def test_keep_is_for_copies(store: str, tmp_path: Path, verb: str) -> None:
    code, _, err = dcr(verb, store, tmp_path / "node", "--keep", 2)
    assert code == 2
    assert "--keep is for --mode copy" in err
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("mode", ["in-place", "copy"])
def test_engines_and_commands_are_told(store: str, checkpoints: list[Path], tmp_path: Path, mode: str) -> None:
    node, told = tmp_path / "node", tmp_path / "told"
    note = 'echo "$DCR_VERSION $DCR_PREVIOUS" $(ls "$DCR_DIRECTORY" | grep -c safetensors$)'
    with SglangStandIn() as sglang, VllmStandIn(False) as vllm:
        arguments = [
            *("follow", store, node, "--once", "--mode", mode),
            *("--engine", f"sglang={sglang.url}", "--engine", f"vllm-reload={vllm.url}"),
            *("--on-prepared", f"echo prepared $DCR_VERSION >> {told}"),
            *("--on-applied", f"{note} >> {told}", "--on-applied", f'echo "$DCR_DIRECTORY" > {tmp_path}/directory'),
        ]
        for number, checkpoint in enumerate(checkpoints):
            if number:
                publish(store, checkpoint)
            code, out, err = dcr(*arguments)
            assert (code, err) == (0, "")
            assert f" is at main@{number}" in out
            served = Path((tmp_path / "directory").read_text().strip())
            assert served == ((node / "current") if mode == "copy" else node).resolve()
            assert tree(served) == tree(checkpoint)
            for engine in (sglang, vllm):
                assert (engine.version, engine.paused) == (f"main@{number}", False)
                assert engine.weights == weights(checkpoint)
    assert told.read_text().split("\n")[:-1] == [
        *("prepared main@0", "main@0  2"),
        *("prepared main@1", "main@1 main@0 2"),
        *("prepared main@2", "main@2 main@1 2"),
    ]


def test_a_command_that_fails_is_told_and_run_again(store: str, checkpoints: list[Path], tmp_path: Path) -> None:
    node, count = tmp_path / "node", tmp_path / "count"
    # Fails the first two times, as long as something is missing.
    command = f"echo $DCR_VERSION >> {count}; test $(wc -l < {count}) -ge 3 || {{ echo not yet; exit 7; }}"
    code, _, err = dcr("follow", store, node, "--once", "--on-applied", command)
    assert code == 1
    assert "exit status 7: not yet" in err
    assert tree(node) == tree(checkpoints[0]), "the directory is there all the same"
    publish(store, checkpoints[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "dcr_store", "follow", store, str(node), "--until", "main@1", "--on-applied", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.count("is at main@1") == 1
    assert err.count("exit status 7: not yet") == 1
    assert "trying again in" in err
    assert count.read_text().split() == ["main@0", "main@1", "main@1"]


def test_a_command_before_that_fails_holds_nothing_up(store: str, checkpoints: list[Path], tmp_path: Path) -> None:
    began = time.monotonic()
    code, out, err = dcr("follow", store, tmp_path / "node", "--once", "--on-prepared", "exit 9")
    assert (code, err.count("exit status 9")) == (0, 3)
    assert "is at main@0" in out
    assert time.monotonic() - began < 30
    assert tree(tmp_path / "node") == tree(checkpoints[0])


@pytest.mark.parametrize("arguments", [["--engine", "nobody=http://localhost"], ["--on-applied", " "]])
def test_what_nobody_can_be_told_by(store: str, tmp_path: Path, arguments: list[str]) -> None:
    code, _, err = dcr("follow", store, tmp_path / "node", "--once", *arguments)
    assert code == 2
    assert "is no " in err
    assert not (tmp_path / "node").exists()


def test_a_name_with_spaces_gets_through(store: str, tmp_path: Path) -> None:
    node = tmp_path / "my models; rm -rf $HOME"
    out = tmp_path / "out"
    code, _, err = dcr(
        "follow", store, node, "--once", "--on-applied", f'test -d "$DCR_DIRECTORY" && touch {shlex.quote(str(out))}'
    )
    assert (code, err) == (0, "")
    assert out.exists()
