"""The how-tos are run: each command of their samples, in order, gives what the page shows.

Before a page begins there are what its first lines say: a store ``weights`` of six versions, ``main@0`` to ``main@5``,
the checkpoints that they were published from, ``run/step0`` to ``run/step5``, a copy of ``run/step3`` called ``stray``,
and one with a few other bits called ``edited``. Times, durations and sizes are not compared, nor what a line ``…`` in a
sample stands for.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from states import series, write_hf

import dcr_store
from dcr_store.cli.main import main

DOCS = Path(__file__).parents[1] / "docs"
IN_PROCESS = ("audit.md", "history.md")
BY_SHELL = ("crash-drill.md",)
SAMPLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def samples(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of the samples with the lines that the page shows below it."""
    for block in SAMPLE.findall(text):
        command: str | None = None
        shown: list[str] = []
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                if command is not None:
                    yield command, shown
                command, shown = line[2:], []
            else:
                shown.append(line)
        assert command is not None, "a sample begins with a command"
        yield command, shown


def told(line: str) -> str:
    """Return a line without what differs from run to run."""
    line = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?Z", "TIME", line)
    line = re.sub(r"\b[\d.]+ ([KMG]i)?B\b", "SIZE", line)
    line = re.sub(r"\bin [\d.]+ s\b", "in SECONDS", line)
    line = re.sub(r"\b\d+ objects\b", "N objects", line)  # how often a journal is written depends on the time it takes
    line = re.sub(r"\b[0-9a-f]{32}\b", "ID", line)
    return " ".join(line.split())


def matches(found: list[str], shown: list[str]) -> bool:
    """Return whether what was printed is what is shown, where a line ``…`` stands for any number of lines."""
    if not shown:
        return not found
    if shown[0].strip() == "…":
        return any(matches(found[n:], shown[1:]) for n in range(len(found) + 1))
    return bool(found) and told(found[0]) == told(shown[0]) and matches(found[1:], shown[1:])


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("howto")
    prepare(place)
    return place


def prepare(place: Path) -> None:
    """Make what is there before a page begins."""
    states = series(6, seed=1)
    rewards = (0.31, 0.36, 0.42, 0.40, 0.47, 0.45)
    with dcr_store.create(place / "weights", chunk_elements=4096) as store:
        for step, (state, reward) in enumerate(zip(states, rewards, strict=True)):
            checkpoint = write_hf(place / "run" / f"step{step}", state)
            with store.begin(message=f"after step {step}", metadata={"step": step, "reward": reward}) as transaction:
                transaction.write_checkpoint(checkpoint)
    write_hf(place / "stray", states[3])
    edited = dict(states[3])
    edited["layers.0.q.weight"] = edited["layers.0.q.weight"].copy()
    edited["layers.0.q.weight"][17, :5] = 0
    write_hf(place / "edited", edited)


def run(command: str) -> list[str]:
    """Run one ``dcr`` in this process; return the lines of its output, errors last."""
    words = shlex.split(re.sub(r"\s#\s.*", "", command))
    assert words[0] == "dcr", f"a sample of this page is run without a shell: {command}"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words[1:])
    assert code in (0, 1), err.getvalue()
    return out.getvalue().splitlines() + err.getvalue().splitlines()


@pytest.mark.parametrize("page", IN_PROCESS)
def test_samples_are_what_is_printed(page: str, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text("utf-8")
    for command, shown in samples(text):
        found = run(command)
        assert matches(found, shown), "\n".join([f"$ {command}", *found])
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, {})


@pytest.mark.parametrize("page", BY_SHELL)
def test_samples_of_the_shell_are_what_is_printed(page: str, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    shell = Shell(tmp_path)
    for command, shown in samples((DOCS / page).read_text("utf-8")):
        found = shell.run(command)
        assert matches(found, shown), "\n".join([f"$ {command}", *found])
    shell.end()


class Shell:
    """A shell that keeps what was set from command to command, in which ``dcr`` is ours."""

    def __init__(self, place: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DCR_")}
        dcr = place / "bin" / "dcr"
        dcr.parent.mkdir()
        dcr.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dcr_store "$@"\n')
        dcr.chmod(0o755)
        environment["PATH"] = f"{dcr.parent}:{environment['PATH']}"
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], cwd=place, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, command: str) -> list[str]:
        """Return the lines that a command prints."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{command}\necho; echo done\n")
        self._shell.stdin.flush()
        lines: list[str] = []
        for line in self._shell.stdout:
            if line == "done\n":
                return [line for line in lines if line]
            lines.append(line.rstrip("\n"))
        raise AssertionError("\n".join(lines))

    def end(self) -> None:
        """End it."""
        self._shell.communicate(timeout=10)


def test_what_is_compared() -> None:
    assert matches(["a  1.5 KiB", "x", "y", "b"], ["a 2 B", "…", "b"])
    assert matches(["2026-01-01 10:00:00Z in 0.1 s"], ["2027-02-02 11:11:11Z  in 3 s"])
    assert not matches(["a", "b"], ["a"])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["main@1"], ["main@2"])
    assert list(samples("```console\n$ a \\\n  b\nc\n$ d\n```\n")) == [("a    b", ["c"]), ("d", [])]


def test_tables_of_the_quickstart_have_todays_columns(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(begun)
    run("dcr group weights create eu r1")
    alike = {
        "log": "dcr log weights", "diff": "dcr diff weights main@0 main@1 --counts", "status": "dcr status weights",
        "verify": "dcr verify weights",
    }  # fmt: skip
    checked = []
    for command, shown in samples((DOCS / "quickstart.md").read_text("utf-8")):
        verb = command.split()[1] if command.startswith("dcr ") else ""
        if verb in alike and shown and "|" not in command.replace("| head", ""):
            today = run(alike[verb])
            heads = [line.split() for line in today if re.match(r"(version|status|line|group) ", line)]
            then = [line.split() for line in shown if re.match(r"(version|status|line|group) ", line)]
            assert then == heads[: len(then)], command
            assert bool(then) == (verb != "verify"), command
            checked.append(verb)
    assert sorted(set(checked)) == ["diff", "log", "status", "verify"]


def test_json_that_is_shown_is_json() -> None:
    for path in sorted(DOCS.rglob("*.md")):
        for block in re.findall(r"^```json\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            json.loads(block)
