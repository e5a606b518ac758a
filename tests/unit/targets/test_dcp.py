"""Distributed checkpoints are published as they are, and versions are checked out as distributed checkpoints."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dcr_store
from dcr_store.cli.main import main
from dcr_store.errors import ConflictError, DcrError, FormatError, IntegrityError, InvalidInputError, StorageError
from dcr_store.targets.dcp import DcpCheckpoint, is_dcp, open_source
from dcr_store.targets.dcp_directory import write_dcp

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

ROOT = Path(__file__).parents[3]


def state() -> dict[str, Any]:
    """Dtypes of all widths, shapes of all kinds, memory of all orders, and what is no tensor."""
    import torch

    torch.manual_seed(3)
    bits = torch.randint(-(2**15), 2**15, (600,), dtype=torch.int16)
    return {
        "layers.0.weight": bits[:360].view(torch.bfloat16).view(18, 20),
        "layers.0.t": bits[:300].view(torch.bfloat16).view(15, 20).t(),
        "half": bits[:7].view(torch.float16),
        "f8": torch.arange(12, dtype=torch.uint8).view(torch.float8_e4m3fn).view(3, 4),
        "mask": torch.tensor([True, False, True]),
        "u16": torch.arange(5, dtype=torch.int16).view(torch.uint16),
        "step": torch.tensor(41),
        "empty": torch.empty(0, 4),
        "c64": torch.randn(5, 3, dtype=torch.complex64),
        "c128": torch.randn(3, 2, 2, dtype=torch.complex128).transpose(0, 1),
        "parameter": torch.nn.Parameter(torch.randn(2, 1, 3)),
        "part": torch.randn(10, 8)[2:7, 3:5],
        "nested": {"moments": [torch.randn(4), torch.randn(70).double()]},
        "lr": 0.25,
        "note": "no tensor",
    }


def flat(found: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield from flat({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        elif hasattr(value, "numel"):
            yield f"{prefix}{key}", value.detach()


def saved(folder: Path, found: dict[str, Any]) -> Path:
    import torch.distributed.checkpoint as checkpoint

    checkpoint.save(found, checkpoint_id=str(folder), no_dist=True)
    return folder


def loaded(folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as checkpoint

    blank = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    checkpoint.load(blank, checkpoint_id=str(folder), no_dist=True)
    return blank


def bits_of(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with dcr_store.create(tmp_path / "s", chunk_elements=64) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "dcp", state())


def publish(store: Any, folder: Path) -> Any:
    with store.begin() as transaction:
        return transaction.write_checkpoint(folder)


def test_a_folder_is_published_as_its_tensors_would_be(store: Any, folder: Path, tmp_path: Path) -> None:
    tensors = dict(flat(state()))
    summary = publish(store, folder)
    assert summary.n_tensors == len(tensors)
    assert summary.left_out == (("lr", "no tensor"), ("note", "no tensor"))
    found = store.read("main", framework="torch")
    assert {name: (t.dtype, t.shape, bits_of(t)) for name, t in found.items()} == {
        name: (t.dtype, t.shape, bits_of(t)) for name, t in tensors.items()
    }
    with store.begin() as transaction:
        for name, tensor in tensors.items():
            transaction.write(name, tensor)
    assert len({info.root for info in store.log()}) == 1
    assert store.log()[1].changed == 0


def test_all_ranks_chunks_become_whole_tensors(store: Any, tmp_path: Path) -> None:
    """Of four real ranks: FSDP2, HSDP, tensor parallelism, and both, with sizes that do not divide."""
    script = [sys.executable, "-W", "error", str(ROOT / "tests" / "dtensor_ranks.py"), "real", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "checkpoint").glob("*.distcp"))) == 4
    publish(store, tmp_path / "checkpoint")
    full = dict(np.load(tmp_path / "0.npz"))
    found = store.read("main")
    assert len(found) == 24
    for name, array in found.items():
        assert array.tobytes() == full[f"full/{name.partition('/')[2]}"].tobytes(), name


def test_a_version_is_checked_out_for_torch_and_comes_back(store: Any, tmp_path: Path) -> None:
    import torch

    tensors = dict(flat(state()))
    tensors["tied"] = tensors["layers.0.weight"]
    with store.begin() as transaction:
        for name, tensor in tensors.items():
            transaction.write(name, tensor)
    result = store.checkout("main", tmp_path / "new" / "out", format="dcp")
    assert (result.version, result.root, result.n_tensors) == ("main@0", store.log()[0].root, len(tensors))
    assert result.nbytes == sum(path.stat().st_size for path in (tmp_path / "new" / "out").iterdir())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    found = loaded(tmp_path / "new" / "out", tensors)
    assert {name: bits_of(tensor) for name, tensor in found.items()} == {
        name: bits_of(tensor) for name, tensor in tensors.items()
    }
    publish(store, tmp_path / "new" / "out")
    assert [(info.root, info.base) for info in store.log()] == [(result.root, None), (result.root, "main@0")]
    with torch.no_grad():
        found["half"][3] = 0.5
    publish(store, saved(tmp_path / "again", found))
    assert store.log()[2].changed == 1


def test_a_checkout_replaces_nothing_but_a_checkpoint_and_only_by_force(
    store: Any, folder: Path, tmp_path: Path
) -> None:
    publish(store, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for place, force in (("other", False), ("other", True), ("dcp", False)):
        with pytest.raises(ConflictError, match="is not empty; give another directory"):
            store.checkout("main", tmp_path / place, format="dcp", force=force)
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    (tmp_path / "dcp" / "extra").write_text("")
    store.checkout("main", tmp_path / "dcp", format="dcp", force=True)
    assert sorted([path.name for path in (tmp_path / "dcp").iterdir()]) == [".metadata", "__0_0.distcp"]
    (tmp_path / "empty").mkdir()
    store.checkout("main", tmp_path / "empty", format="dcp")
    with pytest.raises(InvalidInputError, match="or inside of one"):
        store.checkout("main", tmp_path / "s" / "x", format="dcp")
    with pytest.raises(InvalidInputError, match=r"format: unknown format .*published or dcp"):
        store.checkout("main", tmp_path / "y", format="hf")
    assert sorted([path.name for path in tmp_path.iterdir()]) == ["dcp", "empty", "other", "s"]


def test_the_command_line_takes_both_ways(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "cli")
    assert main(["init", url]) == 0
    assert main(["publish", url, str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["left_out"] == [{"path": "lr", "reason": "no tensor"}, {"path": "note", "reason": "no tensor"}]
    assert main(["checkout", url, "main", str(tmp_path / "out"), "--format", "dcp"]) == 0
    assert "as a distributed checkpoint\n  wrote 14 tensors" in capsys.readouterr().out
    assert is_dcp(tmp_path / "out")
    assert main(["checkout", url, "main", str(tmp_path / "out"), "--format", "dcp", "--json", "--force"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"version", "root", "n_tensors", "nbytes", "seconds"}
    assert main(["publish", url, str(tmp_path / "out"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["root"], again["base"], again["changed"]) == (told["root"], "main@0", 0)


def test_without_torch_folders_are_published_but_not_written(
    store: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    publish(store, folder)
    with pytest.raises(InvalidInputError, match=r"distributed checkpoints need torch; pip install dcr-store\[torch\]"):
        store.checkout("main", tmp_path / "out", format="dcp")
    assert not (tmp_path / "out").exists()


def test_little_is_in_memory_at_a_time(tmp_path: Path) -> None:
    import torch

    saved(tmp_path / "dcp", {f"w{i}": torch.full((1 << 20, 4), float(i)) for i in range(4)})
    out = np.empty(1 << 16, "<u4")
    with open_source(tmp_path / "dcp") as checkpoint:
        tracemalloc.start()
        try:
            for name in checkpoint.tensors:
                for start in range(0, 4 << 20, 1 << 20):
                    checkpoint.read_into(name, start, start + len(out), out)
                    assert (out.view("<f4") == float(name[1])).all()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 4 << 20


def test_files_that_change_while_they_are_read_are_noticed(folder: Path) -> None:
    for path in (folder / "__0_0.distcp", folder / ".metadata"):
        with open_source(folder) as checkpoint:
            checkpoint.check_unchanged()
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            os.utime(path, ns=(1, 1))
            path.write_bytes(data)
            with pytest.raises(IntegrityError, match="was changed while it was being read"):
                checkpoint.check_unchanged()
            data[-1] ^= 1
            path.write_bytes(data)
    with pytest.raises(InvalidInputError, match="the checkpoint is closed"):
        checkpoint.bits("step")


@pytest.mark.parametrize("nbytes", [0, 100, 5000])
@pytest.mark.parametrize("was_read", [True, False])
def test_a_file_that_is_cut_short_while_it_is_read_ends_nothing_but_the_read(
    folder: Path, nbytes: int, was_read: bool
) -> None:
    """By a mapping, the process would end."""
    with open_source(folder) as checkpoint:
        for name in checkpoint.tensors if was_read else ():
            checkpoint.bits(name)
        os.truncate(folder / "__0_0.distcp", nbytes)
        with pytest.raises(IntegrityError, match=r"distcp: was changed while it was being read"):
            [checkpoint.bits(name) for name in checkpoint.tensors]


def test_an_empty_file_is_refused_by_name(store: Any, folder: Path) -> None:
    (folder / "none.distcp").write_bytes(b"")

    def change(metadata: Any) -> None:
        info = first(metadata)
        info.relative_path, info.offset, info.length = "none.distcp", 0, 0

    edited(folder, change)
    with pytest.raises(FormatError, match=r"half \(none.distcp at 0\): is not what torch.save writes"):
        publish(store, folder)


def test_files_are_closed(folder: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with open_source(folder) as checkpoint:
            checkpoint.bits("half")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("start", [0, 1, 17, 358])
@pytest.mark.parametrize("stop", [2, 18, 359, 360])
def test_any_range_may_be_read(folder: Path, start: int, stop: int) -> None:
    tensors = dict(flat(state()))
    with open_source(folder) as checkpoint:
        for name in ("layers.0.weight", "layers.0.t"):
            whole = checkpoint.bits(name)
            assert whole.tobytes() == bits_of(tensors[name])
            last = min(stop, len(whole))
            out = np.empty(max(last - start, 0), whole.dtype)
            checkpoint.read_into(name, min(start, last), last, out)
            assert out.tobytes() == whole[start:last].tobytes()


def test_safetensors_go_first_and_other_directories_are_no_folders_of_dcp(tmp_path: Path, folder: Path) -> None:
    assert is_dcp(folder)
    (folder / "model.safetensors").write_bytes(b"")
    assert not is_dcp(folder)
    assert not is_dcp(tmp_path / "none")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (IntegrityError("is damaged", key="b"), IntegrityError, "b: is damaged"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(28, "No space left on device"), StorageError, "out: cannot be written: .*No space left"),
    ],
)
def test_an_error_while_a_checkpoint_is_written_is_ours_and_leaves_nothing(
    tmp_path: Path, error: BaseException, kind: type[BaseException], message: str | None
) -> None:
    import torch

    def read(name: str) -> Any:
        if name == "b":
            raise error
        return torch.zeros(3)

    with pytest.raises(kind, match=message):
        write_dcp(tmp_path / "out", {"a": ("F32", [3]), "b": ("F32", [3])}, read)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_the_disk_refuses_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed.checkpoint import FileSystemWriter

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "finish", full)
    with pytest.raises(StorageError, match=r"out: cannot be written: .*No space left on device"):
        write_dcp(tmp_path / "out", {"a": ("F32", [3])}, lambda name: torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_asked_for_in_order_where_there_is_cuda_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    asked: list[str] = []

    def read(name: str) -> Any:
        asked.append(name)
        return torch.zeros(int(name))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    write_dcp(tmp_path / "out", {str(n): ("F32", [n]) for n in (7, 2, 9, 4)}, read)
    assert asked == ["7", "2", "9", "4"]


@pytest.mark.parametrize("n_failures", [1, 2])
def test_a_checkpoint_that_cannot_be_replaced_stays(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, n_failures: int
) -> None:
    import torch

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rename, failures = Path.rename, []

    def failing(self: Path, target: Path) -> Path:
        if target == folder and len(failures) < n_failures:
            failures.append(self)
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    message = "dcp: cannot be written: Input/output error" + ("" if n_failures == 1 else "; what was there is whole")
    with pytest.raises(StorageError, match=message):
        write_dcp(folder, {"a": ("F32", [3])}, lambda name: torch.zeros(3), force=True)
    (left,) = tmp_path.iterdir()
    assert (left == folder) == (n_failures == 1)
    assert {path.name: path.read_bytes() for path in left.iterdir()} == before


def test_the_umask_is_followed_and_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def refused(mask: int) -> int:
        raise AssertionError("another thread may make files meanwhile")

    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", refused)
            write_dcp(tmp_path / "out", {"a": ("F32", [3])}, lambda name: torch.zeros(3))
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("step", [1, 2])
def test_tensors_may_lie_anywhere_in_their_storage(folder: Path, start: int, step: int) -> None:
    import torch

    with torch.no_grad():
        tensor = torch.arange(40, dtype=torch.float16)[start : start + 7 * step : step]
    archive = io.BytesIO()
    torch.save(torch.nn.Parameter(tensor), archive)
    (folder / "other.distcp").write_bytes(b"odd" + archive.getvalue())

    def change(metadata: Any) -> None:
        info = first(metadata)
        info.relative_path, info.offset, info.length = "other.distcp", 3, len(archive.getvalue())

    edited(folder, change)
    with open_source(folder) as checkpoint:
        assert checkpoint.bits("half").tobytes() == bits_of(tensor)


# ---------------------------------------------------------------------- damaged and foreign folders


class Evil:
    """Pickled, it calls what it likes when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/dcr-store-was-here",)


def given_fields(call: bytes, fields: bytes) -> bytes:
    """Return a pickle that makes something and sets its fields (BUILD)."""
    return b"\x80\x02" + call + fields + b"b."


FIELDS = b"}X\x05\x00\x00\x00wrongI1\ns"
SLOTS = b"N" + FIELDS + b"\x86"
REBUILT = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x01\x00\x00\x000NtI0\n(I3\nt(I1\nttR"


@pytest.mark.parametrize("fields", [FIELDS, SLOTS])
def test_a_pickle_cannot_change_what_it_may_call(fields: bytes) -> None:
    from dcr_store.targets import dcp_pickle

    for known, read in (
        (dcp_pickle._METADATA, dcp_pickle.read_metadata),
        (dcp_pickle._TENSORS, dcp_pickle.read_tensor),
    ):
        for (module, name), item in known.items():
            with pytest.raises(FormatError):
                read(given_fields(f"c{module}\n{name}\n".encode(), fields), "p")
            assert not hasattr(item, "wrong")
            assert not hasattr(getattr(item, "_function", None), "wrong")
            assert isinstance(item, type | str | dcp_pickle._Call), name


@pytest.mark.parametrize("fields", [b"I-9\n(I3\nt(I1\nt", b"I0\n(I3\nt(I-1\nt", b"I0\n(I3\nt(t", b"NNN"])
def test_a_pickle_cannot_change_a_tensor_that_was_found_sound(fields: bytes) -> None:
    from dcr_store.targets.dcp_pickle import read_tensor

    assert read_tensor(b"\x80\x02" + REBUILT + b".", "p").shape == (3,)
    state = b"(X\x01\x00\x00\x000X\x03\x00\x00\x00F32" + fields + b"l"
    with pytest.raises(FormatError, match="p: holds a tensor whose shape is none"):
        read_tensor(given_fields(REBUILT, state), "p")


def edited(folder: Path, change: Any) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # our own, made by torch just now
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def first(metadata: Any, name: str = "half") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def cut(folder: Path) -> None:
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[:-100])


def zeroed(folder: Path) -> None:
    size = (folder / "__0_0.distcp").stat().st_size
    (folder / "__0_0.distcp").write_bytes(bytes(size))


def swapped(folder: Path) -> None:
    def change(metadata: Any) -> None:
        a, b = first(metadata, "half"), first(metadata, "u16")
        a.offset, b.offset = b.offset, a.offset

    edited(folder, change)


def shared(name: str, other: str) -> Any:
    """Let a tensor be where another, that is read before it, is."""

    def change(metadata: Any) -> None:
        its, others = first(metadata, name), first(metadata, other)
        its.offset, its.length = others.offset, others.length

    return lambda folder: edited(folder, change)


def without(name: str) -> Any:
    def change(metadata: Any) -> None:
        key = next(index for index in metadata.storage_data if index.fqn == name)
        del metadata.storage_data[key]

    return lambda folder: edited(folder, change)


def with_evil(folder: Path) -> None:
    edited(folder, lambda metadata: setattr(metadata, "planner_data", Evil()))


def with_evil_tensor(folder: Path) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps(Evil()))
        made.writestr("archive/data/0", bytes(14))
    data = archive.getvalue()
    (folder / "evil.distcp").write_bytes(data)

    def change(metadata: Any) -> None:
        info = first(metadata)
        info.relative_path, info.offset, info.length = "evil.distcp", 0, len(data)

    edited(folder, change)


def compressed(method: int, member: str) -> Any:
    """A member that is compressed, to a thousandth: it is not even looked into."""

    def damage(folder: Path) -> None:
        import torch

        saved, archive = io.BytesIO(), io.BytesIO()
        torch.save(torch.zeros(7, dtype=torch.float16), saved)
        with zipfile.ZipFile(saved) as whole, zipfile.ZipFile(archive, "w") as made:
            for info in whole.infolist():
                if info.filename.partition("/")[2] != member:
                    made.writestr(info.filename, whole.read(info))
            made.writestr(f"archive/{member}", bytes(1 << 20), method)
        data = archive.getvalue()
        (folder / "packed.distcp").write_bytes(data)

        def change(metadata: Any) -> None:
            info = first(metadata)
            info.relative_path, info.offset, info.length = "packed.distcp", 0, len(data)

        edited(folder, change)

    return damage


def outside(folder: Path) -> None:
    edited(folder, lambda metadata: setattr(first(metadata), "relative_path", "../secret"))


def transformed(folder: Path) -> None:
    edited(folder, lambda metadata: setattr(first(metadata), "transform_descriptors", ["zstd"]))


def overlapping(folder: Path) -> None:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["half"]
        entry.chunks = entry.chunks * 2

    edited(folder, change)


def more_than_there_is(part: str) -> Any:
    """Chunks that overlap, of a tensor as the files cannot hold it: counting its values would take hours."""

    def change(metadata: Any) -> None:
        import torch

        entry, huge = metadata.state_dict_metadata["half"], torch.Size([1 << 45])
        if part == "tensor":
            entry.size = huge
        entry.chunks = [replace(chunk, offsets=torch.Size([0]), sizes=huge) for chunk in entry.chunks * 2]

    return lambda folder: edited(folder, change)


def unsupported(folder: Path) -> None:
    import torch

    edited(folder, lambda m: setattr(m.state_dict_metadata["half"].properties, "dtype", torch.complex32))


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (cut, InvalidInputError, "__0_0.distcp: a file of the checkpoint is cut short; copy it again"),
        (zeroed, FormatError, "is not what torch.save writes; .*archive with data.pkl"),
        (swapped, FormatError, r"is another tensor than the metadata says.*F16 \[7\].*U16 \[5\]"),
        (shared("u16", "half"), FormatError, r"u16 .*is another tensor than the metadata says.*U16 \[5\].*F16 \[7\]"),
        (shared("half", "layers.0.t"), FormatError, r"half .*is another tensor than.*F16 \[7\].*BF16 \[20, 15\]"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), InvalidInputError, "a file of the checkpoint is missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b"junk"), FormatError, "metadata: cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(b""), FormatError, "metadata: cannot be read: EOFError"),
        (
            lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])),
            FormatError,
            "metadata: is no metadata of a distributed checkpoint",
        ),
        (without("half"), FormatError, "half: the metadata does not say where a chunk is"),
        (with_evil, FormatError, "metadata: names something that no tensor needs.*posix.mkdir"),
        (with_evil_tensor, FormatError, r"half \(evil.distcp at 0\): names something that no tensor.*posix.mkdir"),
        *(
            (compressed(method, member), FormatError, r"half \(packed.distcp at 0\): is compressed; save")
            for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
            for member in ("data.pkl", "byteorder")
        ),
        (outside, DcrError, r"\.\./secret"),
        (transformed, FormatError, "half: is compressed or otherwise transformed"),
        (overlapping, InvalidInputError, "half: chunks of the checkpoint overlap"),
        (more_than_there_is("tensor"), FormatError, "half: the metadata tells of more values than the files hold"),
        (more_than_there_is("chunk"), FormatError, "half: the metadata tells of more values than the files hold"),
        (unsupported, InvalidInputError, "half: has a dtype that format 1 cannot store"),
    ],
)
def test_what_is_not_whole_or_not_of_dcp_is_refused_by_name(
    store: Any, folder: Path, damage: Any, kind: type[DcrError], message: str
) -> None:
    damage(folder)
    with pytest.raises(kind, match=message):
        publish(store, folder)
    assert store.log() == []
    assert not Path("/tmp/dcr-store-was-here").exists()


def test_many_entries_that_are_no_tensors_are_counted(
    store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    for n, expected in ((4, ["  left out k0: no tensor"]), (5, ["  left out 5 entries, such as k0: no tensor"])):
        entries = {"w": torch.zeros(3), **{f"k{i}": 0.5 for i in range(n)}}
        folder = saved(tmp_path / f"{n}", entries)
        (folder / "README").write_text("hello")
        assert main(["publish", str(store.url), str(folder)]) == 0
        told = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
        assert told[:1] == expected
        assert told[-1] == "  left out README: no tensors of the distributed checkpoint"
        assert len(told) == (5 if n == 4 else 2)
        assert main(["publish", str(store.url), str(folder), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["left_out"]) == n + 1


def test_only_safetensors_are_compared(store: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(store, folder)
    with pytest.raises(InvalidInputError, match="only directories of safetensors files can be compared"):
        store.compare_directory("main", folder)
    assert main(["verify", str(store.url), "--against", str(folder)]) != 0
    assert "only directories of safetensors files can be compared" in capsys.readouterr().err


def test_metadata_of_torch_and_ours_say_the_same(folder: Path) -> None:
    import torch.distributed.checkpoint as checkpoint

    from dcr_store.layout.from_dcp import maps_of_dcp
    from dcr_store.targets.dcp_pickle import read_metadata

    theirs = checkpoint.FileSystemReader(str(folder)).read_metadata()
    ours = read_metadata((folder / ".metadata").read_bytes(), "m")
    assert maps_of_dcp(ours) == maps_of_dcp(theirs)
    with DcpCheckpoint(folder) as opened:
        for name, tensor in flat(state()):
            assert opened.bits(name).tobytes() == bits_of(tensor), name


def test_a_copied_folder_is_the_same(store: Any, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "README").write_text("hello")
    assert publish(store, tmp_path / "copy").left_out[-1] == ("README", "no tensors of the distributed checkpoint")


def test_members_of_the_one_enumeration_come_by_getattr_and_nothing_else_does() -> None:
    """As Python before 3.11.4 pickles them."""
    from dcr_store.targets.dcp_pickle import read_metadata

    def asking(of: bytes) -> bytes:
        return b"\x80\x02cbuiltins\ngetattr\n" + of + b"X\x05\x00\x00\x00value\x86R."

    encoding = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    with pytest.raises(FormatError, match="found str"):  # the member, which is no metadata
        read_metadata(asking(encoding), "m")
    for of in (b"K\x01", b"ctorch\nSize\n", b"cbuiltins\ngetattr\n"):
        with pytest.raises(FormatError) as caught:
            read_metadata(asking(of), "m")
        assert "found str" not in str(caught.value)
