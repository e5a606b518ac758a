"""The verbs ``copy``, ``detach``, ``export`` and ``import`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from series import State, receive, write_checkpoint, write_delta

import dcr_store
from dcr_store.cli.main import main

STATES: list[State] = [{"w": np.arange(90, dtype=np.float32) + number} for number in range(3)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as made:
        for number, state in enumerate(STATES):
            with made.begin() as transaction:
                transaction.write_checkpoint(write_checkpoint(tmp_path / f"c{number}", state))
        made.tag("main@1", "best")
    return str(tmp_path / "store")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(item) for item in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert main([str(item) for item in arguments]) == code
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("dcr: ")
    assert found.err.count("\n") == 1
    return found.err


def test_copy_and_detach(capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    said = run(capsys, "copy", store, copy).splitlines()
    assert said[0] == "main: 3 versions; the copy has main@0 to main@2"
    assert said[1].endswith("; 1 tag changed")
    with dcr_store.open(store) as source, source.begin() as transaction:
        transaction.write_checkpoint(tmp_path / "c0")
    assert run(capsys, "copy", store, copy).startswith("main: 1 version; the copy has main@0 to main@3\n")
    assert run(capsys, "copy", store, copy).startswith(
        "main: nothing new; the copy has main@0 to main@3\ntransferred 0 objects, 0 B\n"
    )
    found = json.loads(run(capsys, "copy", store, copy, "--line", "main", "--json"))
    assert found["lines"] == [{"line": "main", "head": "main@3", "first": "main@0", "n_records": 0, "n_versions": 0}]
    assert "dcr detach COPY" in refused(capsys, 1, "tag", copy, "main@2", "x")
    assert "dcr anchor SOURCE main@3" in refused(capsys, 1, "copy", store, tmp_path / "late", "--since", "main@1")
    assert "swapped" in refused(capsys, 1, "copy", copy, store)
    assert "takes none" in refused(capsys, 2, "copy", store, copy, "--copy-storage-option", "a=b")
    assert "own now; its lines go on here: main" in run(capsys, "detach", copy)
    run(capsys, "tag", copy, "main@2", "x")
    assert "was detached" in refused(capsys, 1, "copy", store, copy)
    assert "is no copy" in refused(capsys, 1, "detach", store)


def test_a_directory_that_a_copy_brought_goes_on(
    capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path
) -> None:
    """Targets are bound to the store's id, versions and roots, which a copy shares."""
    run(capsys, "pull", store, tmp_path / "node", "--version", "main@1")
    run(capsys, "copy", store, tmp_path / "copy")
    found = json.loads(run(capsys, "pull", tmp_path / "copy", tmp_path / "node", "--json"))
    assert found["version"] == "main@2"
    assert (tmp_path / "node/model.safetensors").read_bytes() == (tmp_path / "c2/model.safetensors").read_bytes()


def test_export(capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(capsys, "export", store, "main@1", "main", "-o", out).startswith("wrote 2 versions to ")
    assert "2 versions were there already" in run(capsys, "export", store, "main@1", "main", "-o", out)
    said = run(capsys, "export", store, "main@1", "main@1", "-o", tmp_path / "one")
    assert said.startswith("wrote 1 version to ")
    said = run(capsys, "export", store, "main@1", "main@1", "-o", tmp_path / "one")
    assert said.endswith("1 version was there already\n")
    assert (out / "main@2/model.safetensors").read_bytes() == (tmp_path / "c2/model.safetensors").read_bytes()
    assert "--format slime" in refused(capsys, 2, "export", store, "main@1", "main", "-o", out, "--encoding", "xor")
    series = tmp_path / "series"
    arguments = ("export", store, "main@0", "main", "-o", series, "--format", "sglang", "--encoding", "overwrite")
    found = json.loads(run(capsys, *arguments, "--json"))
    assert found["written"] == ["main@0", "main@1", "main@2"]
    assert receive(series, 2) == {"w": STATES[2]["w"].tobytes()}
    assert "another series" in refused(
        capsys, 1, "export", store, "main@0", "main", "-o", make_series(tmp_path), "--format", "slime"
    )


def make_series(tmp_path: Path) -> Path:
    series = tmp_path / "theirs"
    for number in (1, 2):
        write_delta(series, number, STATES[number - 1], STATES[number])
    return series


def test_import(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base, series, place = write_checkpoint(tmp_path / "base", STATES[0]), make_series(tmp_path), tmp_path / "new"
    run(capsys, "init", place)
    assert "give the checkpoint on which it builds" in refused(capsys, 1, "import", place, series)
    said = run(capsys, "import", place, series, "--base", base).splitlines()
    assert said == [f"main@0 from {base}", "main@1 from weight_v000001", "main@2 from weight_v000002"]
    assert run(capsys, "import", place, series) == "nothing new: main has all versions of the series\n"
    found = json.loads(run(capsys, "import", place, series, "--line", "other", "--base", base, "--json"))
    assert [item["version"] for item in found["versions"]] == ["other@0", "other@1", "other@2"]
    with dcr_store.open(place) as store:
        assert store.read("other@2")["w"].tobytes() == STATES[2]["w"].tobytes()
