"""Checkpoints on disk: what is taken along, what is refused, and what happens when files change below us."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from dcr_store.errors import DcrError, FormatError, IntegrityError, InvalidInputError, NotFoundError
from dcr_store.targets.checkpoint import Checkpoint, CheckpointFile, open_checkpoint
from dcr_store.targets.checkpoint_listing import LeftOut, SideFile
from dcr_store.targets.safetensors_file import read_header

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def save(path: Path, **tensors: Any) -> None:
    safetensors.numpy.save_file({name: np.asarray(value) for name, value in tensors.items()}, path)


def write_index(root: Path, **weight_map: Any) -> None:
    (root / INDEX).write_text(json.dumps({"metadata": {"total_size": 1e9}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    save(root / FIRST, a=np.arange(6, dtype=np.float32).reshape(2, 3), b=np.arange(5, dtype=np.uint8))
    save(root / SECOND, c=np.arange(4, dtype=np.int64))
    write_index(root, a=FIRST, b=FIRST, c=SECOND)
    (root / "config.json").write_text("{}")
    return root


def test_a_sharded_checkpoint(sharded: Path) -> None:
    with open_checkpoint(sharded) as checkpoint:
        assert [file.path for file in checkpoint.files] == [FIRST, SECOND]
        assert {name: (file.path, tensor.dtype) for name, (file, tensor) in checkpoint.tensors.items()} == {
            "a": (FIRST, "F32"),
            "b": (FIRST, "U8"),
            "c": (SECOND, "I64"),
        }
        assert [side.path for side in checkpoint.side_files] == ["config.json", INDEX]
        assert checkpoint.left_out == ()
        assert checkpoint.nbytes == 24 + 5 + 32
        assert checkpoint.bits("a").view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
        assert checkpoint.bits("c").dtype == "<u8"
        assert checkpoint.read_side_file("config.json") == b"{}"
        checkpoint.check_unchanged()


def test_one_file(tmp_path: Path) -> None:
    save(tmp_path / "my.safetensors", a=np.arange(3, dtype=np.float16))
    (tmp_path / "other.json").write_text("{}")
    with open_checkpoint(tmp_path / "my.safetensors") as checkpoint:
        assert [file.path for file in checkpoint.files] == ["my.safetensors"]
        assert checkpoint.side_files == ()
        assert checkpoint.bits("a").view("<f2").tolist() == [0, 1, 2]


def test_relative_paths(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sharded)
    for path in (".", FIRST):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.root == sharded
            assert checkpoint.bits("b").tolist() == [0, 1, 2, 3, 4]


def test_parts_of_tensors_are_copied(sharded: Path) -> None:
    with open_checkpoint(sharded) as checkpoint:
        out = np.empty(3, "<u4")
        checkpoint.read_into("a", 2, 5, out)
        assert out.view("<f4").tolist() == [2, 3, 4]
        checkpoint.read_into("a", 6, 6, np.empty(0, "<u4"))
        for start, stop in ((-1, 2), (5, 7), (3, 2)):
            with pytest.raises(InvalidInputError, match="outside of the tensor"):
                checkpoint.read_into("a", start, stop, np.empty(max(stop - start, 0), "<u4"))
        read_only = np.empty(2, "<u4")
        read_only.flags.writeable = False
        for array in (np.empty(2, "<u2"), np.empty(3, "<u4"), np.empty(4, "<u4")[::2], read_only):
            with pytest.raises(InvalidInputError, match="cannot be read into"):
                checkpoint.read_into("a", 0, 2, array)
        with pytest.raises(NotFoundError, match="no tensor z"):
            checkpoint.read_into("z", 0, 1, out)
        with pytest.raises(NotFoundError, match="no side file"):
            checkpoint.read_side_file(FIRST)


def test_every_dtype_at_unaligned_offsets(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "half": {"dtype": "BF16", "shape": [3], "data_offsets": [1, 7]},
            "empty": {"dtype": "F64", "shape": [0], "data_offsets": [7, 7]},
            "double": {"dtype": "F64", "shape": [2], "data_offsets": [7, 23]},
        }
    ).encode()
    data = np.arange(23, dtype=np.uint8).tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, (_, tensor) in checkpoint.tensors.items():
            bits = checkpoint.bits(name)
            assert bits.flags.aligned
            assert not bits.flags.writeable or not bits.size
            start = checkpoint.files[0].header.data_start
            assert bits.tobytes() == data[tensor.begin - start : tensor.end - start]
            out = np.empty_like(bits)
            checkpoint.read_into(name, 0, bits.size, out)
            assert out.tobytes() == bits.tobytes()


def test_views_outlive_the_checkpoint(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    bits = checkpoint.bits("c")
    checkpoint.close()
    checkpoint.close()
    assert bits.tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidInputError, match="closed"):
        checkpoint.bits("c")
    with pytest.raises(InvalidInputError, match="closed"):
        checkpoint.read_into("a", 0, 1, np.empty(1, "<u4"))


def test_a_hugging_face_cache(sharded: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    (snapshot / "onnx").mkdir(parents=True)
    for i, file in enumerate(sorted(sharded.iterdir())):
        blob = tmp_path / f"blob{i}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (snapshot / "onnx" / "config.json").symlink_to(tmp_path / "blob0")
    with open_checkpoint(snapshot) as checkpoint:
        assert [side.path for side in checkpoint.side_files] == ["config.json", INDEX, "onnx/config.json"]
        assert checkpoint.bits("b").tolist() == [0, 1, 2, 3, 4]
        assert checkpoint.read_side_file("onnx/config.json") == b"{}"
    with open_checkpoint(snapshot / FIRST) as checkpoint:
        assert checkpoint.files[0].path == FIRST


def test_what_is_taken_along_and_what_is_not(sharded: Path) -> None:
    for skipped in (".git", ".cache", ".dcr", ".dcr-old"):
        (sharded / skipped).mkdir()
        (sharded / skipped / "x").write_text("x")
    (sharded / "1_Pooling").mkdir()
    (sharded / "1_Pooling" / "config.json").write_text("{ }")
    (sharded / "1_Pooling" / "model.safetensors").write_text("not looked at")
    (sharded / "tokenizer 層.json").write_text("[]")
    (sharded / ".gitattributes").touch()
    with (sharded / "optimizer.pt").open("wb") as file:
        file.truncate((64 << 20) + 1)
    (sharded / "loop").symlink_to(sharded)
    (sharded / "dangling").symlink_to("nowhere")
    os.mkfifo(sharded / "pipe")
    with open_checkpoint(sharded) as checkpoint:
        assert checkpoint.side_files == (
            SideFile(".gitattributes", 0),
            SideFile("1_Pooling/config.json", 3),
            SideFile("1_Pooling/model.safetensors", 13),
            SideFile("config.json", 2),
            SideFile(INDEX, (sharded / INDEX).stat().st_size),
            SideFile("tokenizer 層.json", 2),
        )
        assert checkpoint.left_out == (
            LeftOut("dangling", "a link to no file"),
            LeftOut("loop", "a link to a directory"),
            LeftOut("optimizer.pt", f"{(64 << 20) + 1} bytes, and side files may have {64 << 20}"),
            LeftOut("pipe", "no regular file"),
        )


def no_directory(root: Path) -> Path:
    return root / "missing"


def below_a_file(root: Path) -> Path:
    (root / "file").touch()
    return root / "file" / "x"


def empty_directory(root: Path) -> Path:
    return root


def other_file(root: Path) -> Path:
    (root / "pytorch_model.bin").touch()
    return root / "pytorch_model.bin"


def pickled(root: Path) -> Path:
    (root / "pytorch_model.bin").touch()
    (root / "config.json").touch()
    return root


def distributed(root: Path) -> Path:
    (root / ".metadata").touch()
    (root / "__0_0.distcp").touch()
    return root


def distributed_in_part(root: Path) -> Path:
    (root / "__0_0.distcp").touch()
    return root


def distributed_file(root: Path) -> Path:
    return distributed(root) / "__0_0.distcp"


def distributed_metadata(root: Path) -> Path:
    return distributed(root) / ".metadata"


def distributed_below(root: Path) -> Path:
    for name in ("step-2", "step-1"):
        (root / name).mkdir()
        distributed(root / name)
    return root


def nested(root: Path) -> Path:
    (root / "unet").mkdir()
    save(root / "unet" / "model.safetensors", a=np.zeros(1))
    return root


def large_only(root: Path) -> Path:
    with (root / "x.gguf").open("wb") as file:
        file.truncate(1 << 30)
    return root


def dangling(root: Path) -> Path:
    (root / "model.safetensors").symlink_to("nowhere")
    return root


def loop(root: Path) -> Path:
    (root / "model.safetensors").symlink_to("model.safetensors")
    return root


def named_directory(root: Path) -> Path:
    (root / "elsewhere").mkdir()
    (root / "model.safetensors").symlink_to("elsewhere")
    return root


def pipe(root: Path) -> Path:
    os.mkfifo(root / "model.safetensors")
    return root


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (no_directory, NotFoundError, "no such checkpoint"),
        (below_a_file, NotFoundError, "no such checkpoint"),
        (
            empty_directory,
            InvalidInputError,
            r"no safetensors files at its top.*\.metadata of a torch.*found nothing",
        ),
        (other_file, InvalidInputError, r"found 'pytorch_model\.bin'"),
        (pickled, InvalidInputError, r"save_pretrained.*found config\.json, pytorch_model\.bin"),
        (distributed, InvalidInputError, "torch distributed checkpoint, which cannot stand for safetensors"),
        (distributed_in_part, InvalidInputError, r"distributed checkpoint without its \.metadata: finish the copy"),
        (distributed_file, InvalidInputError, r"file of a torch distributed checkpoint; give its folder \(expected /"),
        (distributed_metadata, InvalidInputError, r"file of a torch distributed checkpoint; give its folder"),
        (distributed_below, InvalidInputError, "distributed checkpoints: give /.*/step-1 or /.*/step-2 "),
        (nested, InvalidInputError, "did you mean .*unet"),
        (large_only, InvalidInputError, r"found x\.gguf"),
        (dangling, InvalidInputError, r"/model\.safetensors: is a link to a file that is not there; finish"),
        (loop, InvalidInputError, r"/model\.safetensors: is a link to itself; "),
        (named_directory, InvalidInputError, r"/model\.safetensors: is a link to a directory; "),
        (pipe, InvalidInputError, r"/model\.safetensors: is not a regular file; "),
    ],
)
def test_what_is_no_checkpoint(make: Callable[[Path], Path], kind: type[DcrError], match: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    with pytest.raises(kind, match=match) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_name_with_nul_is_no_traceback() -> None:
    with pytest.raises(DcrError):
        open_checkpoint("a\0b")


def break_header(root: Path) -> None:
    (root / SECOND).write_bytes(b"\x80\x02" * 50)


def cut(root: Path) -> None:
    os.truncate(root / SECOND, (root / SECOND).stat().st_size - 1)


def no_part(root: Path) -> None:
    (root / SECOND).unlink()


def no_part_and_no_index(root: Path) -> None:
    (root / SECOND).unlink()
    (root / INDEX).unlink()


def rename_in_index(root: Path) -> None:
    write_index(root, a=FIRST, b=FIRST, c="weights.safetensors")


def escaping_index(root: Path) -> None:
    write_index(root, a=FIRST, b=FIRST, c="../" + SECOND)


def tensor_only_in_index(root: Path) -> None:
    write_index(root, a=FIRST, b=FIRST, c=SECOND, d=SECOND)


def tensor_only_in_file(root: Path) -> None:
    write_index(root, a=FIRST, c=SECOND)


def tensor_elsewhere(root: Path) -> None:
    write_index(root, a=FIRST, b=SECOND, c=SECOND)


def twice(root: Path) -> None:
    save(root / "model.safetensors", c=np.zeros(1))


@pytest.mark.parametrize(
    ("damage", "kind", "match"),
    [
        (break_header, FormatError, f"{SECOND}.*is no safetensors file"),
        (cut, FormatError, rf"{SECOND}#c.*outside of the file"),
        (no_part, InvalidInputError, f"finish the download.*expected {SECOND}, found 1 of 2 files"),
        (no_part_and_no_index, InvalidInputError, f"expected {SECOND}, found 1 of 2 files"),
        (rename_in_index, InvalidInputError, r"not there: weights\.safetensors"),
        (escaping_index, InvalidInputError, r"not there: \.\./model"),
        (tensor_only_in_index, InvalidInputError, f"tensor d.*expected it in {SECOND}, found it not in {SECOND}"),
        (tensor_only_in_file, InvalidInputError, f"tensor b.*expected it not in {FIRST}, found it in {FIRST}"),
        (tensor_elsewhere, InvalidInputError, f"tensor b.*expected it in {SECOND}, found it in {FIRST}"),
        (twice, InvalidInputError, rf"tensor c is in two files.*{SECOND} and model\.safetensors"),
    ],
)
def test_incomplete_checkpoints(
    damage: Callable[[Path], None], kind: type[DcrError], match: str, sharded: Path
) -> None:
    damage(sharded)
    with pytest.raises(kind, match=match):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"a":1,"a":2}', "\xff"]
)
def test_malformed_indexes(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_bytes(content.encode("latin-1"))
    with pytest.raises(FormatError, match=INDEX.replace(".", r"\.")):
        open_checkpoint(sharded)


def test_files_that_the_index_does_not_name(sharded: Path) -> None:
    save(sharded / "extra.safetensors", d=np.zeros(2))
    with open_checkpoint(sharded) as checkpoint:
        assert list(checkpoint.tensors) == ["d", "a", "b", "c"]


@pytest.mark.parametrize("name", [b"a\\b", b"a\nb", b"\x7f", b"\x1b[31m", b"\xff.json"])
def test_odd_names_are_refused(name: bytes, sharded: Path) -> None:
    Path(os.fsdecode(os.fsencode(sharded) + b"/" + name)).touch()
    with pytest.raises(InvalidInputError, match=r"cannot be a file of a checkpoint.*rename it") as caught:
        open_checkpoint(sharded)
    assert str(caught.value).isprintable()


def test_a_socket_is_left_out(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sharded)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with open_checkpoint(sharded) as checkpoint:
            assert checkpoint.left_out == (LeftOut("s", "no regular file"),)


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def overwrite_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"c"', b'"d"'))


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


@pytest.mark.parametrize("change", [overwrite, replace, Path.unlink])
def test_changes_while_open_are_noticed(change: Callable[[Path], None], sharded: Path) -> None:
    with open_checkpoint(sharded) as checkpoint:
        change(sharded / SECOND)
        with pytest.raises(IntegrityError, match=f"{SECOND}.*was changed while it was being read"):
            checkpoint.check_unchanged()


@pytest.mark.parametrize("change", [overwrite_header, lengthen])
def test_changes_between_header_and_data_are_noticed(sharded: Path, change: Callable[[Path], None]) -> None:
    file = CheckpointFile(SECOND, read_header(sharded / SECOND))
    change(sharded / SECOND)
    with pytest.raises(IntegrityError, match=f"{SECOND}.*was changed while it was being read"):
        Checkpoint(sharded, (file,))


def test_a_file_cut_while_open_is_an_error(sharded: Path) -> None:
    with open_checkpoint(sharded) as checkpoint:
        os.truncate(sharded / SECOND, (sharded / SECOND).stat().st_size - 8)
        with pytest.raises(IntegrityError, match="shorter"):
            checkpoint.read_into("c", 0, 4, np.empty(4, "<u8"))
        (sharded / "config.json").write_text("longer")
        with pytest.raises(IntegrityError, match="changed while"):
            checkpoint.read_side_file("config.json")


def test_what_torch_saves(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.tensor([1.5, -0.0, float("nan")]).bfloat16(),
        "fp8": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            assert checkpoint.bits(name).tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert checkpoint.files[0].header.metadata == {"format": "pt"}
