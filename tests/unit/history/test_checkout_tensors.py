"""``checkout`` of tensors and parts of them: the bits that NumPy's indexing gives, from the chunks that hold them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from states import write_hf
from watched import Watched

import dcr_store
from dcr_store.cli.main import main
from dcr_store.errors import ConflictError, InvalidInputError, NotFoundError, StorageError
from dcr_store.history import checkout_tensors
from dcr_store.layout.selection import parse
from dcr_store.payload import version as payload_version
from dcr_store.store import Store
from dcr_store.targets.safetensors_file import read_header
from dcr_store.versions import replay

GENERATOR = np.random.default_rng(3)


def bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bits, NaNs among them."""
    width = np.dtype(dtype).itemsize
    return GENERATOR.integers(0, 256, (*shape, width), np.uint8).view(dtype).reshape(shape)


STATES: list[dict[str, np.ndarray]] = [
    {
        "wide": bits((640, 48), ml_dtypes.bfloat16),
        "f8": bits((7, 5, 3), ml_dtypes.float8_e4m3fn),
        "f64": bits((9, 4), np.float64),
        "scalar": bits((), np.float32),
        "none": bits((4, 0, 2), np.int16),
        "blocks[0].w": bits((6, 6), np.uint16),
        "blocks[0]": bits((3,), np.uint8),
        "z128": bits((2,), np.complex128),
    }
]
for _ in range(3):
    changed = {name: array.copy() for name, array in STATES[-1].items()}
    for array in changed.values():
        if array.size:
            array.reshape(-1).view(np.uint8)[GENERATOR.integers(0, array.nbytes, 3)] ^= 1
    STATES.append(changed)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parts") / "s"
    with dcr_store.create(place, chunk_elements=256) as store:
        for state in STATES:
            with store.begin() as transaction:
                for name, array in state.items():
                    transaction.write(name, array)
                transaction.write("tied", state["wide"])
    return place


def contents(directory: Path) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, str]]:
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
    path = directory / "model.safetensors"
    header, data = read_header(path), path.read_bytes()
    return {t.name: (t.dtype, t.shape, data[t.begin : t.end]) for t in header.tensors}, header.metadata


PARTS = [
    ["wide"], ["tied[3:5]", "wide[3:5]"], ["wide[0:64, :]"], ["wide[5]"], ["wide[-1, ..., ::7]"], ["wide[::-3, 40:]"],
    ["wide[700:]"], ["wide[5:2]", "f64"], ["f8[..., 1]", "wide[0,0]"], ["f8[:, ::-1, 1:2]"], ["f64[2:4]"],
    ["scalar"], ["scalar[]"], ["scalar[...]", "none[1:3]"], ["none"], ["none[0, 0:0]"],
    ["blocks[0].w[0:2, 3]"], ["blocks[0][...]"], ["blocks[0].w", "f8", "none", "scalar", "f64[0]"],
]  # fmt: skip


@pytest.mark.parametrize("texts", PARTS, ids=" ".join)
def test_the_command_line_writes_what_numpy_indexing_gives(place: Path, tmp_path: Path, texts: list[str]) -> None:
    for version in (0, 3):
        out = tmp_path / str(version)
        options = [word for text in texts for word in ("--tensor", text)]
        assert main(["checkout", str(place), f"main@{version}", str(out), *options, "--json"]) == 0
        found, metadata = contents(out)
        wanted = dict(map(parse, texts))
        assert found.keys() == wanted.keys()
        for name, index in wanted.items():
            expected = STATES[version]["wide" if name == "tied" else name][... if index is None else index]
            assert found[name][1:] == (np.shape(expected), np.asarray(expected).tobytes()), name
        with dcr_store.open(place) as store:
            assert metadata["dcr.version"] == f"main@{version}"
            assert metadata["dcr.root"] == store.log()[version].root
            assert metadata["dcr.store"] == store.store_id
        told = json.loads(metadata.get("dcr.parts", "{}"))
        parts = [parse(f"{name}[{part['index']}]") for name, part in told.items()]
        assert sorted(parts, key=repr) == sorted(
            ((n, index) for n, index in wanted.items() if index is not None), key=repr
        )
        assert all(tuple(part["shape"]) == STATES[0][name.replace("tied", "wide")].shape for name, part in told.items())


def test_other_loaders_read_it(place: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load_file
    with dcr_store.open(place) as store:
        result = store.checkout("main@2", tmp_path / "out", tensors={"wide": (slice(10, 20), 3), "f8": None})
    loaded = load(tmp_path / "out" / "model.safetensors")
    assert loaded["wide"].view(torch.uint8).numpy().tobytes() == STATES[2]["wide"][10:20, 3].tobytes()
    assert tuple(loaded["f8"].shape) == (7, 5, 3)
    assert result.to_json()["n_tensors"] == 2
    assert result.nbytes == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_no_more_is_fetched_than_the_chunks_that_hold_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_SMALL_NBYTES", 0)  # as if partitions were as large as those of models
    monkeypatch.setattr(payload_version, "_GAP_NBYTES", 0)
    with dcr_store.open(place) as opened:

        def cost(tensors: Any) -> tuple[int, int]:
            objects = Measured(opened._objects)
            store = Store(objects, opened._document, opened._catalog.store_sha256)
            store.checkout("main@3", tmp_path / f"out{len(list(tmp_path.iterdir()))}", tensors=tensors)
            assert objects.count("list") == 0
            return objects.n_gets, objects.nbytes

        n_whole, nbytes_whole = cost(["wide"])
        n_part, nbytes_part = cost({"wide": (slice(330, 335), ...)})  # 240 elements: 2 chunks of 120 at most
        assert nbytes_whole > 60_000
        assert nbytes_part <= 16 * 256 + 4 + 2 * (512 + 16), "the index of the anchor's partition, and two chunks"
        assert n_part <= n_whole + 1
        assert cost({"wide": slice(0, 0)}) == cost(["none"]) == (0, 0)


class Measured(Watched):
    """Counts what is read of partitions."""

    n_gets = nbytes = 0

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        data = super().get(key, start, stop, sha256=sha256)
        if "/data/" in key and "/c/" in key:
            self.n_gets += 1
            self.nbytes += len(data)
        return data


def test_packed_values_are_written_whole_or_refused_by_name(tmp_path: Path) -> None:
    header = json.dumps({"q": {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1\2\3\4\5\6")
    with dcr_store.create(tmp_path / "s") as store:
        with store.begin() as transaction:
            transaction.write_checkpoint(tmp_path / "c")
        store.checkout("main", tmp_path / "out", tensors=["q"])
        assert contents(tmp_path / "out")[0] == {"q": ("F4", (3, 4), b"\1\2\3\4\5\6")}
        with pytest.raises(InvalidInputError, match="q: values of F4 are smaller than a byte; check out the whole"):
            store.checkout("main", tmp_path / "not", tensors={"q": slice(0, 1)})


@pytest.mark.parametrize(
    ("tensors", "kind", "told"),
    [
        ({}, InvalidInputError, "name the tensors"),
        ([], InvalidInputError, "name the tensors"),
        ("wide", InvalidInputError, "no list of names"),
        (7, InvalidInputError, "no list of names"),
        (["wild"], NotFoundError, "did you mean wide"),
        ({"wide": 640}, InvalidInputError, "wide: the index is out of bounds in dimension 0"),
        ({"wide": (0, 0, 0)}, InvalidInputError, "wide: the index does not fit"),
        ({"wide": slice(0, 1, 0)}, InvalidInputError, "wide: the index is wrong"),
        (["z128"], InvalidInputError, "z128: has a dtype that safetensors files cannot hold"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    place: Path, tmp_path: Path, tensors: Any, kind: type[Exception], told: str
) -> None:
    with dcr_store.open(place) as store, pytest.raises(kind, match=re.escape(told)):
        store.checkout("main", tmp_path / "out", tensors=tensors)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--tensor", "wide[a]"], 2, "argument --tensor: wide[a]: the index is wrong"),
        (["--tensor", f"wide[{'9' * 5000}]"], 2, "the index is wrong"),
        (["--tensor", "wide[::0]"], 2, "the index is wrong"),
        (["--tensor", "wide[٣]"], 2, "the index is wrong"),
        (["--tensor", "wide[0,,1]"], 2, "found nothing"),
        (["--tensor", ""], 2, "expected the name of a tensor"),
        (["--tensor", "wide[" + " " * 50_000 + "x]"], 2, "the index is wrong"),
        (["--tensor", "[" * 50_000], 2, ""),
        (["--tensor", "wide[0]", "--tensor", "wide[1]"], 2, "--tensor wide is given twice"),
        (["--tensor", "wide", "--format", "dcp"], 2, "--tensor is not for --format dcp"),
        (["--tensor", "wide[640]"], 1, "out of bounds"),
        (["--tensor", f"wide[{'9' * 19}]"], 1, "out of bounds"),
        (["--tensor", "../wide"], 1, "there is no tensor"),
    ],
)
def test_the_command_line_refuses(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, told: str
) -> None:
    assert main(["checkout", str(place), "main", str(tmp_path / "out"), *options]) == code
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert len(err) < 800
    assert not list(tmp_path.iterdir())


def test_blame_reads_its_part_as_checkout_does(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blame", str(place), "wide[x]"]) == 2
    assert "argument TENSOR: wide[x]: the index is wrong" in capsys.readouterr().err


def test_only_an_empty_place_or_by_force_such_a_checkout(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with dcr_store.open(place) as store:
        store.checkout("main@0", out, tensors=["f8"])
        with pytest.raises(ConflictError, match=r"force, which replaces a checkout of tensors.*found a checkout of"):
            store.checkout("main@1", out, tensors=["f8"])
        store.checkout("main@1", out, tensors=["f64"], force=True)
        assert contents(out)[0].keys() == {"f64"}
        with pytest.raises(InvalidInputError, match="is for whole versions"):
            store.checkout("main", tmp_path / "x", tensors=["f8"], format="dcp")  # type: ignore[call-overload]
        (out / "notes.txt").write_text("mine")
        with pytest.raises(ConflictError, match="found other files"):
            store.checkout("main@1", out, tensors=["f64"], force=True)
        foreign = write_hf(tmp_path / "foreign", {"f8": STATES[0]["f64"]})
        for path in foreign.iterdir():
            if path.name != "model.safetensors":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert [path.name for path in foreign.iterdir()] == ["model.safetensors"]
        with pytest.raises(ConflictError, match="found other files"):
            store.checkout("main@1", foreign, tensors=["f64"], force=True)
        with pytest.raises(InvalidInputError, match="or inside of one"):
            store.checkout("main", place / "x", tensors=["f8"])
    assert (out / "notes.txt").read_text() == "mine"


def test_large_ones_are_read_one_by_one(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[str]] = []
    real = checkout_tensors.read

    def noted(catalog: Any, located: Any, tensors: Any) -> Any:
        batches.append(list(tensors))
        return real(catalog, located, tensors)

    monkeypatch.setattr(checkout_tensors, "read", noted)
    monkeypatch.setattr(checkout_tensors, "_TOGETHER_NBYTES", 390)
    names = ["f8", "f64", "scalar", "wide", "blocks[0]"]
    with dcr_store.open(place) as store:
        store.checkout("main@1", tmp_path / "out", tensors=names)
    assert batches == [["f8"], ["f64", "scalar"], ["wide"], ["blocks[0]"]]
    found, _ = contents(tmp_path / "out")
    assert {name: data for name, (_, _, data) in found.items()} == {name: STATES[1][name].tobytes() for name in names}


def test_a_full_disk_leaves_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkout_tensors.os, "fsync", full)
    with dcr_store.open(place) as store, pytest.raises(StorageError, match="No space left"):
        store.checkout("main", tmp_path / "out", tensors=["wide"])
    assert not list(tmp_path.iterdir())
