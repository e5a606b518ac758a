"""The golden stores by a reader that knows docs/spec/v1.md and nothing of this package; and by Zarr."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zarr

import dcr_store

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
READER = HERE / "reader.py"
STORES = {"v1-delta": "expected.json", "v1-portable": "expected.json", "v1-writers": "expected-writers.json"}
ALLOWED = {"zarr", "numpy", "numcodecs", "json", "hashlib", "struct", "pathlib", "sys", "typing", "__future__"}

# Runs a script in an interpreter in which this package cannot be imported, wherever it is installed.
WITHOUT = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dcr_store":
            raise ModuleNotFoundError("dcr_store is not to be used here", name=name)
sys.meta_path.insert(0, Refuse())
script, *sys.argv = sys.argv[1:]
sys.argv.insert(0, script)
runpy.run_path(script, run_name="__main__")
assert not any(name.partition(".")[0] == "dcr_store" for name in sys.modules)
"""


def without_dcr_store(tmp_path: Path, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-W", "error", "-X", "utf8", "-c", WITHOUT, str(script), *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, encoding="utf-8")


def expected(name: str) -> dict[str, Any]:
    document = json.loads((GOLDEN / STORES[name]).read_text("utf-8"))
    assert document["lines"]["main"], "the golden stores are empty"
    return {name: document[name] for name in ("lines", "records", "open")}


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compat_reader", READER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reader_imports_nothing_else() -> None:
    found = set()
    for node in ast.walk(ast.parse(READER.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module or "")
    assert {name.partition(".")[0] for name in found} <= ALLOWED


def test_the_package_is_out_of_reach(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import dcr_store\n")
    done = without_dcr_store(tmp_path, script)
    assert done.returncode != 0
    assert "dcr_store is not to be used here" in done.stderr


@pytest.mark.parametrize("name", STORES)
def test_every_version_is_read_from_the_specification_alone(name: str, tmp_path: Path) -> None:
    done = without_dcr_store(tmp_path, READER, str(GOLDEN / name))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected(name)


def test_the_golden_chunks_cover_the_coding(reader: ModuleType) -> None:
    """What the reader understands has been seen: all methods but zero, which a writer leaves out; all else."""
    store = reader.Reader(GOLDEN / "v1-delta")
    store.read()
    assert store.seen == {
        *(("method", method) for method in (1, 2, 3, 4)),
        *(("mode", mode) for mode in (0, 1)),
        *(("coding", coding) for coding in (0, 1, 2)),
    }


@pytest.mark.parametrize("name", ["v1-delta", "v1-writers"])
def test_zarr_with_the_package_decodes_every_version(name: str, reader: ModuleType) -> None:
    """With ``dcr.delta`` registered by its entry point, Zarr reads masks, values and presence as dense arrays."""
    assert reader.read_store(GOLDEN / name, through_zarr=True) == expected(name)


def arrays(store: Path) -> list[Path]:
    return sorted(path.parent.relative_to(store) for path in store.rglob("zarr.json"))


@pytest.mark.parametrize("name", STORES)
def test_zarr_opens_every_array_where_it_lies(name: str, reader: ModuleType) -> None:
    """The keys of a store are those of Zarr arrays. A partition that an earlier incarnation stored lies elsewhere."""
    found = arrays(GOLDEN / name)
    assert {path.name for path in found if "data" in path.parts} == {"mask", "value", "present"}
    assert {path.name for path in found if "digests" in path.parts} == {"u8", "u16", "u32", "u64"}
    for path in found:
        metadata = json.loads((GOLDEN / name / path / "zarr.json").read_text("utf-8"))
        array = zarr.open_array(GOLDEN / name / path, mode="r")
        dense: Any = array[:]
        (length,) = metadata["shape"]
        assert (dense.shape, dense.dtype) == ((length,), np.dtype(metadata["data_type"]))
        objects = {int(file.name): file.read_bytes() for file in (GOLDEN / name / path).glob("c/*")}
        if "digests" in path.parts:
            assert dense.astype("<u8").tobytes() == objects[0]
            continue
        (sharding,) = metadata["codecs"]
        description = {
            "array": "/".join(path.parts[-2:]),
            "shape": length,
            "chunk": sharding["configuration"]["chunk_shape"][0],
            "shard": metadata["chunk_grid"]["configuration"]["chunk_shape"][0],
            "codec": "dcr.delta",
        }
        if name != "v1-portable":
            own = reader.decode_array(description, None, objects, through_zarr=False)
            assert np.array_equal(own[:length], dense), path
            assert dense.any() == bool(objects)
        if name == "v1-delta":  # the other codec stores the same array under the same key
            assert np.array_equal(zarr.open_array(GOLDEN / "v1-portable" / path, mode="r")[:], dense), path


@pytest.mark.parametrize("name", STORES)
def test_the_reader_reads_all_that_counts(name: str, reader: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves alone is what this package calls unreferenced: of transactions that came to nothing."""
    get, found = reader.Reader.get, set()

    def noted(self: Any, key: str) -> bytes:
        found.add(key)
        data: bytes = get(self, key)
        return data

    monkeypatch.setattr(reader.Reader, "get", noted)
    reader.read_store(GOLDEN / name)
    keys = {str(path.relative_to(GOLDEN / name)) for path in (GOLDEN / name).rglob("*") if path.is_file()}
    with dcr_store.open(GOLDEN / name) as store:
        assert keys - found == set(store.verify().unreferenced)
    assert found <= keys


DAMAGE = (
    ("*/c/0", 0),
    ("*/c/0", -1),
    ("*manifest.json", 40),
    ("*contributions.bin", 20),
    ("log/main/00000000000000000003.json", 40),
    ("log/main/checkpoints/*.json", 40),
    ("layouts/*.json", 40),
    ("*/digests/*/zarr.json", 40),
    ("*/files/*", 9),
)


@pytest.mark.parametrize(("pattern", "place"), DAMAGE)
def test_the_reader_would_notice(reader: ModuleType, monkeypatch: pytest.MonkeyPatch, pattern: str, place: int) -> None:
    """One flipped bit anywhere, and the reader does not agree: it checks what it reads."""
    get = reader.Reader.get
    hit: list[str] = []

    def damaged(self: Any, key: str) -> bytes:
        data: bytes = get(self, key)
        if Path(key).match(pattern) and data and (not hit or hit == [key]):
            hit[:] = [key]
            changed = bytearray(data)
            changed[place] ^= 1
            return bytes(changed)
        return data

    monkeypatch.setattr(reader.Reader, "get", damaged)
    with pytest.raises(ValueError, match=r".+"):
        reader.read_store(GOLDEN / "v1-delta")
    assert hit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda owned: owned["tensors"][0]["boxes"].pop(), "other ones"),
        (lambda owned: owned["tensors"][0]["boxes"].append(owned["tensors"][0]["boxes"][0]), "owns an element twice"),
        (lambda owned: owned["ones"]["u16"][0].__setitem__(1, "0123456789abcdef"), "other ones"),
        (lambda owned: owned["tensors"].reverse(), "tensors out of order"),
        (lambda owned: owned.update(writer="tp1"), "somebody else's"),
        (lambda owned: owned.update(layout="0" * 64), "somebody else's"),
    ],
)
def test_the_reader_would_notice_another_ownership(
    reader: ModuleType, monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    parse = reader.parse

    def other(data: bytes, document_format: str) -> Any:
        document = parse(data, document_format)
        if document_format == "dcr-ownership" and document["writer"] == "tp0":
            change(document)
        return document

    monkeypatch.setattr(reader, "parse", other)
    with pytest.raises(ValueError, match=message):
        reader.read_store(GOLDEN / "v1-writers")


def _doubled(writers: Any) -> None:
    for _, _, owned in writers:
        owned["u16"][0], owned["u16"][1] = True, False  # as many as before


def _swapped(writers: Any) -> None:
    writers[:2] = [(*writers[0][:2], writers[1][2]), (*writers[1][:2], writers[0][2])]


def _mixed(writers: Any) -> None:
    first, second = (tables["u16"] for _, tables, _ in writers[:2])
    for table in (first, second):
        table[min(set(first) & set(second))][2] ^= 1  # no change of the sum


@pytest.mark.parametrize(
    ("check", "change", "message"),
    [
        ("ownership", _doubled, "elements of no owner or two"),
        ("ownership", _swapped, "a writer writes what it does not own"),
        ("ownership", lambda writers: writers[0][2]["u16"].__setitem__(-1, True), "elements of no tensor"),
        ("ownership", lambda writers: writers.__setitem__(0, (*writers[0][:2], None)), "some writers do not say"),
        ("contributions", _mixed, "a contribution of another base"),
        ("contributions", lambda writers: writers[0][2]["u32"].fill(False), "a row of another chunk"),
    ],
)
def test_the_reader_holds_writers_to_what_they_own(
    reader: ModuleType, monkeypatch: pytest.MonkeyPatch, check: str, change: Any, message: str
) -> None:
    checked = getattr(reader.Reader, f"check_{check}")

    def other(self: Any, place: Any, writers: Any) -> None:
        change(writers)
        checked(self, place, writers)

    monkeypatch.setattr(reader.Reader, f"check_{check}", other)
    with pytest.raises(ValueError, match=message):
        reader.read_store(GOLDEN / "v1-writers")
