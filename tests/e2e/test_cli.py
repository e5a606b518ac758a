"""``dcr`` as people and scripts run it: real processes on stores in directories.

Each run is checked for what holds of all of them: no traceback, and on standard error nothing, or one line that begins
with ``dcr:``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warmed
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from servers import SeaweedS3

import dcr_store
from dcr_store.cli.main import main
from dcr_store.errors import ConflictError
from dcr_store.layout.slices import whole

ROOT = Path(__file__).parents[2]
SIZES = {"BF16": 2, "F32": 4, "I64": 8, "U8": 1}
HEAVY = ("torch", "zarr", "numba", "transformers", "s3fs", "rich", "ml_dtypes", "numcodecs")
VERSION_FIELDS = {
    "version",
    "base",
    "root",
    "created_at",
    "changed",
    "elements",
    "nbytes",
    "metadata",
    "message",
    "kept",
}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``dcr`` as a process with piped outputs."""
    done = warmed.run(*arguments, **environment)
    if "DCR_DEBUG" not in environment:
        check_manners(done.returncode, done.stdout, done.stderr)
    return done


def check_manners(code: int, out: str, err: str) -> None:
    assert "Traceback" not in out + err
    assert "unexpected" not in err
    if code == 0:
        assert err == ""
    elif err:
        assert err.startswith("dcr: ")
        assert err.count("\n") == 1


def refused_inside(*arguments: object, code: int = 1) -> str:
    """As `refused`, but in this process: for long lists of cases."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = main([str(argument) for argument in arguments])
    check_manners(found, out.getvalue(), err.getvalue())
    assert (found, out.getvalue()) == (code, "")
    assert err.getvalue()
    return err.getvalue()


def text(*arguments: object, **environment: str) -> str:
    """Run a verb that must succeed and return what it prints."""
    done = run(*arguments, **environment)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def document(*arguments: object, **environment: str) -> Any:
    """Run a verb with ``--json`` that must succeed and return the document."""
    out = text(*arguments, "--json", **environment)
    assert out.isascii()
    assert out.count("\n") == 1
    return json.loads(out)


def refused(*arguments: object, code: int = 1, **environment: str) -> str:
    """Run a verb that must fail and return its line."""
    done = run(*arguments, **environment)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr
    return done.stderr


def write_safetensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        assert len(data) == SIZES[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + len(data)]}
        start += len(data)
    encoded = json.dumps(header).encode()
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + body)


def tensors_at(step: int) -> Tensors:
    """A small policy whose bits differ from step to step; ``frozen`` never does."""
    rng = np.random.default_rng(7)
    weight = rng.integers(0, 1 << 15, 40 * 30, dtype=np.uint16)
    weight[: 10 * step] ^= 1
    bias = rng.integers(0, 1 << 30, 50, dtype=np.uint32)
    bias[3] += step
    return {
        "model.weight": ("BF16", (40, 30), weight.tobytes()),
        "model.bias": ("F32", (50,), bias.tobytes()),
        "frozen": ("U8", (100,), bytes(range(100))),
        "steps": ("I64", (), struct.pack("<q", step)),
    }


def write_checkpoint(directory: Path, step: int) -> Path:
    directory.mkdir(parents=True)
    write_safetensors(directory / "model.safetensors", tensors_at(step), {"format": "pt"})
    (directory / "config.json").write_text('{"hidden_size": 30}\n')
    return directory


def files(directory: Path) -> dict[str, bytes]:
    """The files of a checkpoint, without the marker of dcr_store."""
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name.split("/")[0] != ".dcr"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return [write_checkpoint(directory / f"step{step}", step) for step in range(3)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, checkpoints: list[Path]) -> Path:
    """A store with three versions on main. Tests only read it; those that break things copy it."""
    path = tmp_path_factory.mktemp("store") / "s"
    text("init", path, "--chunk-elements", 256)
    metas: list[list[str]] = [[], ["--meta", "step=1", "--meta", "reward=0.5", "--meta", "name=warm-up"], []]
    for step, checkpoint in enumerate(checkpoints):
        text("publish", path, checkpoint, "--message", f"step {step}\nsecond line", *metas[step])
    return path


@pytest.fixture
def broken(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "broken"))


# ---- each verb once, as text and as JSON


def test_init(tmp_path: Path) -> None:
    found = document("init", tmp_path / "s", "--chunk-elements", 128, "--codec", "portable")
    assert found.keys() == {"url", "store_id", "codec", "chunk_elements"}
    assert (found["codec"], found["chunk_elements"]) == ("portable", 128)
    assert found["url"].endswith(str(tmp_path / "s"))
    assert "codec dcr.delta, chunks of 1,048,576 elements" in text("init", tmp_path / "t")
    assert "already" in refused("init", tmp_path / "s")
    assert json.loads((tmp_path / "s" / "dcr.json").read_text())["store_id"] == found["store_id"]


def test_init_refuses_a_chunk_length_that_is_no_power_of_two(tmp_path: Path) -> None:
    assert "1000" in refused("init", tmp_path / "s", "--chunk-elements", 1000, code=2)
    assert not (tmp_path / "s" / "dcr.json").exists()


def test_log(store: Path) -> None:
    lines = text("log", store).splitlines()
    assert lines[0].split()[:2] == ["version", "base"]
    assert [line.split()[:2] for line in lines[1:]] == [["main@2", "main@1"], ["main@1", "main@0"], ["main@0", "-"]]
    assert lines[1].endswith("step 2")
    assert all(line == line.rstrip() for line in lines)
    versions = document("log", store)["versions"]
    assert [version["version"] for version in versions] == ["main@0", "main@1", "main@2"]
    assert [version["base"] for version in versions] == [None, "main@0", "main@1"]
    assert all(version.keys() == VERSION_FIELDS for version in versions)
    assert [version["message"] for version in versions] == [f"step {step}\nsecond line" for step in range(3)]
    assert versions[1]["metadata"] == {"step": 1, "reward": 0.5, "name": "warm-up"}
    assert versions[0]["metadata"] == {}
    # 10 weights, one bias, one counter
    assert [version["changed"] for version in versions] == [1351, 12, 12]
    assert {version["elements"] for version in versions} == {1351}
    assert len({version["root"] for version in versions}) == 3
    assert versions[2]["root"][:12] in lines[1]
    assert versions[2]["root"] not in lines[1]


def test_the_store_may_come_from_the_environment(store: Path) -> None:
    assert text("log", "-", DCR_STORE=str(store)) == text("log", store)


def test_show(store: Path) -> None:
    found = document("show", store, "main@1")
    assert found.keys() == VERSION_FIELDS | {
        "line",
        "txid",
        "layout",
        "codec",
        "n_tensors",
        "n_partitions",
        "files",
        "tensors",
    }
    assert [file["path"] for file in found["files"]] == ["model.safetensors", "config.json"]
    assert {"name": "model.weight", "dtype": "BF16", "shape": [40, 30]} in found["tensors"]
    shown = text("show", store, "main@1")
    root = document("log", store)["versions"][1]["root"]
    assert root in shown
    assert "second line" in shown
    for word in ("model.safetensors", "config.json", "model.weight", "BF16", "[40,30]", "reward", "0.5", "warm-up"):
        assert word in shown
    assert text("show", store, root[:12]) == shown
    assert text("show", store, "main") == text("show", store, "main@2")


def test_diff(store: Path) -> None:
    found = document("diff", store, "main@0", "main@2")
    assert (found["a"], found["b"], found["changed"], found["elements"]) == ("main@0", "main@2", 22, 1351)
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert {name: tensor["changed"] for name, tensor in tensors.items()} == {
        "model.weight": 20,
        "model.bias": 1,
        "frozen": 0,
        "steps": 1,
    }
    assert tensors["frozen"]["status"] == "same"
    assert tensors["model.weight"]["status"] == "changed"
    assert tensors["model.weight"]["largest_ulp"] == 1
    assert tensors["model.bias"]["largest_ulp"] == 2
    assert tensors["model.weight"]["rate"] == pytest.approx(20 / 1200)
    shown = text("diff", store, "main@0", "main@2")
    assert "1.67 %" in shown
    assert "frozen" not in shown
    assert "1 tensor unchanged" in shown
    assert "0 of 1,351 elements" in text("diff", store, "main@1", "main@1")


def test_diff_by_module(store: Path) -> None:
    found = document("diff", store, "main@0", "main@2", "--by", "module")
    assert set(found) == {"a", "b", "changed", "elements", "modules"}
    assert {item["name"]: (item["changed"], item["n_tensors"]) for item in found["modules"]} == {
        "model": (21, 2),
        "": (1, 2),
    }
    shown = text("diff", store, "main@0", "main@2", "--by", "module", "--depth", "1")
    assert "(no module)" in shown
    assert "0 modules unchanged" in shown
    assert run("diff", store, "main@0", "main@2", "--depth", "1").returncode == 2
    assert run("diff", store, "main@0", "main@2", "--by", "module", "--top", "1").returncode == 2


def test_diff_lists_rows_and_counts_alone(store: Path) -> None:
    shown = text("diff", store, "main@0", "main@2", "--top", "2")
    assert shown.splitlines()[-3].split() == ["changed", "row", "tensor"]
    found = document("diff", store, "main@0", "main@2", "--counts", "--top", "1")
    assert [len(item["top_rows"]) for item in found["tensors"] if item["changed"]] == [1, 1, 1]
    assert {item["up"] for item in found["tensors"] if item["changed"]} == {None}
    assert found["changed"] == 22


def test_log_where(store: Path) -> None:
    assert [item["version"] for item in document("log", store, "--where", "version >= 1")["versions"]] == [
        "main@1",
        "main@2",
    ]
    assert [item["version"] for item in document("log", store, "--limit", "1")["versions"]] == ["main@2"]
    refused = run("log", store, "--where", "version >")
    assert refused.returncode == 2
    assert "the filter is wrong at character 10" in refused.stderr
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        assert main(["log", str(store), "--where", "versoin >= 1"]) == 0
    assert err.getvalue() == (
        "dcr: warning: no version of main has 'versoin', which the filter asks for; did you mean version?\n"
    )


def test_blame(store: Path) -> None:
    found = document("blame", store, "model.weight[0:3]", "--version", "main@2")
    assert (found["version"], found["tensor"], found["n_rows"]) == ("main@2", "model.weight", 3)
    assert set(found["runs"][0]) == {"start", "stop", "step", "version", "exact", "kept"}
    assert "1 row, 1 run" in text("blame", store, "steps")
    assert text("blame", store, "frozen").splitlines()[-1].endswith("at or before main@0")


def test_identify(store: Path, checkpoints: list[Path]) -> None:
    found = document("identify", store, checkpoints[1], "--strict")
    assert (found["version"], found["exact"], found["proven"]) == ("main@1", True, True)
    assert "holds main@1, by its digests" in text("identify", store, checkpoints[1])


def test_identify_what_is_no_version(store: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints[1], tmp_path / "it")
    path = tmp_path / "it" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    done = run("identify", store, tmp_path / "it")
    assert done.returncode == 1
    assert "nearest is main@1" in done.stdout


def test_checkout(store: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    for step, checkpoint in enumerate(checkpoints):
        found = document("checkout", store, f"main@{step}", tmp_path / str(step))
        assert found["version"] == f"main@{step}"
        assert files(tmp_path / str(step)) == files(checkpoint)
    assert "main@2" in text("checkout", store, "main", tmp_path / "head")
    assert files(tmp_path / "head") == files(checkpoints[2])
    foreign = write_checkpoint(tmp_path / "foreign", 77)
    before = files(foreign)
    for verb in (("checkout", store, "main@0", foreign), ("pull", store, foreign)):
        assert "foreign" in refused(*verb)
        assert files(foreign) == before
    assert "main@0" in text("pull", store, foreign, "--version", "main@0", "--force")
    assert files(foreign) == files(checkpoints[0])


def test_pull(store: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    local = tmp_path / "local"
    found = document("pull", store, local, "--version", "main@0")
    assert (found["version"], found["previous"]) == ("main@0", None)
    assert files(local) == files(checkpoints[0])
    found = document("pull", store, local)
    assert (found["version"], found["previous"]) == ("main@2", "main@0")
    assert found["root"] == document("log", store)["versions"][2]["root"]
    assert {"nbytes_fetched", "chunks_written", "chunks_healed", "seconds"} <= found.keys()
    assert files(local) == files(checkpoints[2])
    shown = text("pull", store, local)
    assert "main@2" in shown
    assert "wrote 0 chunks" in shown


def test_verify(store: Path, checkpoints: list[Path]) -> None:
    for extra in ([], ["--deep"], ["main@1"], ["main@1", "--deep"]):
        found = document("verify", store, *extra)
        assert found["ok"] is True
        assert found["problems"] == []
        assert found["versions"] == ["main@0", "main@1", "main@2"][: 2 if "main@1" in extra else 3]
        assert found["n_objects"] > 0
    assert text("verify", store).startswith("all right: 3 versions")
    assert text("verify", store, "main@1", "--against", checkpoints[1]).startswith("all right")
    assert text("verify", store, "main@1", "--deep", "--against", checkpoints[1]).startswith("all right")


def test_verify_against_another_checkpoint(store: Path, checkpoints: list[Path]) -> None:
    done = run("verify", store, "main@1", "--against", checkpoints[2])
    assert done.returncode == 1
    assert done.stderr == ""
    assert "model.weight" in done.stdout
    assert "frozen" not in done.stdout
    found = json.loads(run("verify", store, "main@1", "--against", checkpoints[2], "--json").stdout)
    assert found["ok"] is False
    assert {"key", "what", "expected", "found"} <= found["problems"][0].keys()


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_verify_names_the_damaged_object(broken: Path, damage: str) -> None:
    victim = sorted(broken.glob("versions/main/000000000001-*/data/*/u16/mask/c/0"))[0]
    data = bytearray(victim.read_bytes())
    if damage == "missing":
        victim.unlink()
    else:
        data[len(data) // 2] ^= 1
        victim.write_bytes(data[:-1] if damage == "truncated" else data)
    key = str(victim.relative_to(broken))
    done = run("verify", broken, "--deep")
    assert done.returncode == 1
    assert done.stderr == ""
    assert key in done.stdout
    found = json.loads(run("verify", broken, "--deep", "--json").stdout)
    assert key in {problem["key"] for problem in found["problems"]}
    # what needs that object fails and names it; what does not still works
    assert key in refused("checkout", broken, "main@1", broken.parent / "out")
    text("checkout", broken, "main@0", broken.parent / "before")


def test_publish(store: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "s"))
    checkpoint = write_checkpoint(tmp_path / "c", 5)
    (checkpoint / "link").symlink_to("/no/such/file")
    found = document("publish", copy, checkpoint, "--line", "main", "--owner", "run-1", "--meta", "ok=true")
    assert found.keys() == VERSION_FIELDS | {"left_out"}
    assert found["version"] == "main@3"
    assert found["metadata"] == {"ok": True}
    assert [item["path"] for item in found["left_out"]] == ["link"]
    shown = text("publish", copy, checkpoint, "--baseline", tmp_path / "baseline", "--takeover")
    assert "published main@4, on main@3" in shown
    assert "0 of 1,351 elements (0 %) changed" in shown
    assert "left out link" in shown
    other = document("publish", copy, checkpoint, "--line", "exp")
    assert (other["version"], other["base"]) == ("exp@0", None)
    assert "exp@0" in text("log", copy, "--line", "exp")


# ---- refusals


VERBS = {
    "publish": ("STORE", "CHECKPOINT"),
    "log": ("STORE",),
    "show": ("STORE", "main@0"),
    "diff": ("STORE", "main@0", "main@1"),
    "checkout": ("STORE", "main@0", "OUT"),
    "pull": ("STORE", "OUT"),
    "verify": ("STORE",),
}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_missing_store_says_how_to_create_one(verb: str, checkpoints: list[Path], tmp_path: Path) -> None:
    missing = tmp_path / "no such store"
    places = {"STORE": missing, "CHECKPOINT": checkpoints[0], "OUT": tmp_path / "out"}
    line = refused_inside(verb, *(places.get(argument, argument) for argument in VERBS[verb]))
    assert f"dcr init '{missing}'" in line
    if verb == "log":
        assert refused(verb, missing) == line
    assert not missing.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("version", "says", "code"),
    [
        ("main@3", "main@2", 1),
        ("main@03", "main@03", 2),
        ("exp@0", "exp", 1),
        ("main@-1", "main@-1", 2),
        ("../main@0", "../main@0", 2),
        ("0000000000", "0000000000", 1),
        ("", "version", 2),
        ("main@0\nmain@1", "main@0", 2),
    ],
)
def test_a_version_that_does_not_exist(store: Path, tmp_path: Path, version: str, says: str, code: int) -> None:
    """One that could not exist is a mistake of the command line."""
    assert says in refused_inside("show", store, version, code=code)
    refused_inside("checkout", store, version, tmp_path / "out", code=code)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["../x", "a/b", ".hidden", "", "x" * 129, "a b", "main\n"])
def test_a_line_with_a_wrong_name(store: Path, checkpoints: list[Path], line: str) -> None:
    before = sorted(store.rglob("*"))
    refused_inside("log", store, "--line", line, code=2)
    refused_inside("publish", store, checkpoints[0], "--line", line, code=2)
    assert sorted(store.rglob("*")) == before


def test_another_publisher_at_work_is_told_in_words_of_the_command_line(broken: Path, checkpoints: list[Path]) -> None:
    with dcr_store.open(broken) as store:
        transaction = store.begin(owner="other")
        with pytest.raises(ConflictError, match=r"if you know that it is dead \(takeover\) \(expected no open"):
            store.begin(owner="third")
        told = refused_inside("publish", broken, checkpoints[0], "--owner", "mine")
        transaction.abort()
    assert "; wait for it, or take over with --takeover if you know that it is dead (expected" in told


@pytest.mark.parametrize("below", ["log", "versions", "log/x", "new/deep"])
def test_no_store_is_made_inside_of_one(broken: Path, below: str) -> None:
    assert "is a store, or inside of one" in refused_inside("init", broken / below)
    assert not (broken / below / "dcr.json").exists()
    assert [line["line"] for line in document("status", broken)["lines"]] == ["main"]


def test_a_file_where_a_directory_is_wanted(store: Path, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"x")
    file = tmp_path / "w.safetensors"
    for line in (["pull", store, file], ["pull", store, file, "--mode", "copy"], ["checkout", store, "main", file]):
        assert f"{file}: is a file; give a directory" in refused_inside(*line)
    assert f"is below {file}, which is a file; give another place" in refused_inside("pull", store, file / "a" / "b")
    assert f"{file}: is a file; give the directory of a store" in refused_inside("log", file)
    assert file.read_bytes() == b"x"


def test_a_root_that_is_too_short(store: Path) -> None:
    root = dcr_store.open(store).log()[0].root
    for text in ("9f34", "1234", root[:7], "a"):
        assert "a root needs at least 8 digits" in refused_inside("show", store, text)
    for text in ("exp", "7", "abcdefg", root[:-1] + "g"):
        assert "8 digits" not in refused_inside("show", store, text)


def test_what_is_not_there_is_not_shown_as_none(tmp_path: Path, checkpoints: list[Path]) -> None:
    told = refused_inside("init", checkpoints[0])
    assert told.endswith("were the arguments swapped? (found model.safetensors)\n")


def test_what_is_no_store(tmp_path: Path, checkpoints: list[Path]) -> None:
    (tmp_path / "file").write_text("x")
    refused_inside("log", tmp_path / "file")
    refused_inside("log", "gopher://host/x", code=2)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "dcr.json").write_text('{"format":"something-else"}')
    assert "something-else" in refused_inside("log", foreign)
    (foreign / "dcr.json").write_bytes(b'{"format":"dcr-store"')
    assert "dcr.json" in refused_inside("publish", foreign, checkpoints[0])


def test_a_store_of_a_newer_major_version(broken: Path, checkpoints: list[Path]) -> None:
    path = broken / "dcr.json"
    path.write_text(path.read_text().replace('"version":"1.0"', '"version":"2.0"'))
    assert "2.0" in refused_inside("log", broken)
    assert "2.0" in refused_inside("publish", broken, checkpoints[0])


def _header(entry: dict[str, Any], n_bytes: int = 8) -> bytes:
    encoded = json.dumps(entry).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(n_bytes)


HOSTILE = {
    "empty file": b"",
    "no header": b"\xff" * 64,
    "header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "header no JSON": struct.pack("<Q", 2) + b"{]",
    "header no object": struct.pack("<Q", 2) + b"[]",
    "dtype unknown": _header({"a": {"dtype": "Q8", "shape": [1], "data_offsets": [0, 1]}}),
    "shape negative": _header({"a": {"dtype": "U8", "shape": [-8], "data_offsets": [0, 8]}}),
    "shape huge": _header({"a": {"dtype": "U8", "shape": [1 << 62, 4], "data_offsets": [0, 8]}}),
    "shape and bytes differ": _header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
    "offsets past the end": _header({"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}),
    "offsets overlap": _header(
        {
            "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
        }
    ),
    "offsets no numbers": _header({"a": {"dtype": "U8", "shape": [8], "data_offsets": ["0", None]}}),
    "entry no object": _header({"a": 3}),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_a_hostile_checkpoint_is_refused_and_leaves_no_version(case: str, tmp_path: Path) -> None:
    store = tmp_path / "s"
    dcr_store.create(store, chunk_elements=256)
    checkpoint = tmp_path / "c"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(HOSTILE[case])
    assert "model.safetensors" in refused_inside("publish", store, checkpoint)
    assert not list(store.glob("versions/*/*/attempts/*/manifest.json"))
    # and the line is free for the next
    with dcr_store.open(store) as opened, opened.begin() as transaction:
        transaction.write_checkpoint(write_checkpoint(tmp_path / "good", 0))
        assert transaction.commit().version == "main@0"


def test_checkpoints_that_are_none(store: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for checkpoint in (tmp_path / "missing", tmp_path / "empty", tmp_path / "file"):
        assert checkpoint.name in refused_inside("publish", store, checkpoint)
    assert len(document("log", store)["versions"]) == 3


@pytest.mark.parametrize("harm", ["empty", "truncated", "a shard is missing"])
def test_what_is_no_whole_checkpoint_leaves_no_trace(
    broken: Path, checkpoints: list[Path], tmp_path: Path, harm: str
) -> None:
    checkpoint = Path(shutil.copytree(checkpoints[2], tmp_path / "run"))
    shutil.rmtree(checkpoint / ".dcr-baseline", ignore_errors=True)
    weights = sorted(checkpoint.glob("*.safetensors"))[0]
    if harm == "truncated":
        os.truncate(weights, weights.stat().st_size - 1)
    else:
        weights.unlink()
        if harm == "a shard is missing":
            names = {"weight_map": {"x": weights.name}}
            (checkpoint / "model.safetensors.index.json").write_text(json.dumps(names))
    before = sorted(broken.rglob("*"))
    assert str(checkpoint) in refused("publish", broken, checkpoint)
    assert sorted(broken.rglob("*")) == before
    assert not (tmp_path / ".dcr-baseline").exists()


def test_an_index_that_names_a_file_elsewhere(store: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c" / "inner", 1)
    (checkpoint / "model.safetensors").rename(tmp_path / "c" / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"model.weight": "../outside.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_inside("publish", store, checkpoint)


def test_names_with_control_characters_never_reach_the_terminal(tmp_path: Path) -> None:
    store, checkpoint = tmp_path / "s", tmp_path / "c"
    dcr_store.create(store, chunk_elements=256)
    checkpoint.mkdir()
    name = "evil\x1b[2J\n\u202e"
    write_safetensors(checkpoint / "model.safetensors", {name: ("U8", (4,), b"1234")})
    text("publish", store, checkpoint, "--message", "\x1b]0;title\x07")
    write_safetensors(checkpoint / "model.safetensors", {name: ("U8", (4,), b"1235")})
    text("publish", store, checkpoint)
    for out in (text("log", store), text("show", store, "main@0"), text("diff", store, "main@0", "main@1")):
        assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert "evil\\x1b[2J\\n\\u202e" in text("diff", store, "main@0", "main@1")
    assert document("show", store, "main@0")["tensors"][0]["name"] == name


# ---- a bucket


def test_verbs_on_s3(seaweed: SeaweedS3, checkpoints: list[Path], tmp_path: Path) -> None:
    """Quiet there too, with the server given by options or by the environment."""
    url = seaweed.new_url()
    options = [
        f"--storage-option={name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in seaweed.storage_options.items()
    ]
    text("init", url, "--chunk-elements", 256, *options)
    text("publish", url, checkpoints[1], *options)
    assert "main@0" in text("log", "-", DCR_STORE=url, **seaweed.environment)
    assert document("pull", url, tmp_path / "local", *options)["version"] == "main@0"
    assert files(tmp_path / "local") == files(checkpoints[1])
    assert document("verify", url, "--deep", *options)["ok"] is True
    assert "already" in refused("init", url, *options)
    assert f"dcr init {url}-missing" in refused("log", f"{url}-missing", *options)


# ---- being a good process


def test_output_is_ascii_where_the_locale_is(store: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "s"))
    text("publish", copy, write_checkpoint(tmp_path / "c", 1), "--message", "größer ✓")
    assert text("log", copy, PYTHONIOENCODING="utf-8").splitlines()[1].endswith("größer ✓")
    assert "gr\\xf6\\xdfer" in text("log", copy, PYTHONIOENCODING="ascii")


def test_a_closed_pipe_is_quiet(store: Path) -> None:
    command = warmed.command("log", store)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_progress_is_drawn_only_on_a_terminal(store: Path, tmp_path: Path) -> None:
    """Standard error is a terminal here; standard output stays plain."""
    terminal, theirs = pty.openpty()
    command = warmed.command("checkout", store, "main", tmp_path / "out")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(theirs)
        assert process.stdout is not None
        out = process.stdout.read().decode()
    drawn = b""
    with contextlib.suppress(OSError):  # Linux: EIO is the end of a terminal whose other side is closed
        while block := os.read(terminal, 4096):
            drawn += block
    os.close(terminal)
    assert process.returncode == 0
    assert "\x1b" not in out
    assert "is at main@2" in out
    assert b"\x1b[" in drawn
    assert b"Traceback" not in drawn


def test_debug_shows_the_traceback_and_the_line(tmp_path: Path) -> None:
    done = run("log", tmp_path / "x", DCR_DEBUG="1")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1].startswith("dcr: there is no store")


def test_usage_errors_are_2(store: Path) -> None:
    assert "--meta" in refused("publish", store, "c", "--meta", "x", code=2)
    assert "DCR_STORE" in refused("log", "-", code=2)


def test_log_starts_in_a_blink(store: Path) -> None:
    """By what it imports: times on a busy machine prove nothing."""
    program = (
        "import sys; from dcr_store.cli.main import main; "
        f"code = main(['log', {str(store)!r}]); "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


def test_version_and_help_import_no_store() -> None:
    program = (
        "import sys; from dcr_store.cli.main import main; main(['--version']); main(['publish', '--help']); "
        "print([n for n in ('numpy', 'fsspec', 'dcr_store.store') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == "[]"


# ---- the store that all this made


def test_every_document_of_the_store_validates(broken: Path, tmp_path: Path) -> None:
    """Against schema/, with every schema used."""
    store = broken
    text("group", store, "create", "eu", "r0")
    text("follow", store, tmp_path / "node", "--group", "eu", "--name", "r0", "--once")
    text("tag", store, "main", "best")
    text("pin", store, "main", "kept", "--until", "1d")
    with dcr_store.open(store) as opened:  # no command begins a transaction of several writers
        joint = opened.begin("joint", writers=["w"], tensors={"a": ("F32", (3,))})
        joint.write_slice(np.ones(3, np.float32), whole("a", "F32", (3,)))
        joint.commit()
    schemas = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "schema").glob("*.json")}
    registry: Registry[Any] = Registry().with_resources(
        (schema["$id"], Resource.from_contents(schema)) for schema in schemas.values()
    )
    used = set()
    for path in sorted(path for path in store.rglob("*.json") if path.name != "zarr.json"):
        parts = path.relative_to(store).parts
        name = {
            ("dcr.json",): "store",
            ("layouts",): "layout",
            ("log", "latest.json"): "log-hint",
            ("log", "checkpoints"): "log-checkpoint",
            ("log",): "log-record",
            ("versions", "journal"): "journal",
            ("versions", "attempts"): "manifest",
            ("versions", "data"): "ownership",
            ("groups", "log"): "group-record",
            ("groups", "latest.json"): "group-checkpoint",
            ("groups", "acks"): "group-ack",
            ("tags",): "tag",
            ("pins",): "pin",
        }[_place(parts)]
        data = path.read_bytes()
        found = json.loads(data)
        Draft202012Validator(schemas[name], registry=registry).validate(found)
        canonical = json.dumps(found, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        assert data == canonical, path
        used.add(name)
    # Of copies, and what is not stored.
    others = {"absent", "detached", "affine-map", "discovery", "verify-report"}
    assert used >= set(schemas) - {"defs", "log-checkpoint", *others}


def _place(parts: tuple[str, ...]) -> tuple[str, ...]:
    if parts[0] == "log":
        return ("log", parts[2]) if parts[2] in ("latest.json", "checkpoints") else ("log",)
    if parts[0] == "versions":
        return ("versions", parts[3])
    if parts[0] == "groups":
        return ("groups", "latest.json" if parts[-1] == "latest.json" else parts[2])
    return (parts[0],)
