"""The golden store of several writers: this release reads what ranks made together when it was frozen, and makes it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden import history, several
from golden.contents import Random, make_state, step
from golden.test_read_golden import HERE, dawdle
from states import raw, tree

import dcr_store
from dcr_store.layout.tensors import as_bits
from dcr_store.store import Store

EXPECTED = HERE / "expected-writers.json"
VERSIONS: list[dict[str, Any]] = json.loads(EXPECTED.read_text("utf-8"))["lines"]["main"]
NAMES = [version["version"] for version in VERSIONS]


@pytest.fixture(scope="module", autouse=True)
def _unchanged() -> Iterator[None]:
    """No test writes golden files."""
    before = tree(HERE / several.STORE), EXPECTED.read_bytes()
    yield
    assert (tree(HERE / several.STORE), EXPECTED.read_bytes()) == before


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of a copy, which may be written."""
    shutil.copytree(HERE / several.STORE, tmp_path / "store")
    with dcr_store.open(tmp_path / "store") as store:
        yield store


def seals(store: Store, version: str) -> dict[str, Any]:
    """The seals of a version by writer."""
    contents = store._catalog.contents(store._catalog.resolve(version))
    found = {}
    for item in contents.manifest.seals:
        found[item.writer] = json.loads(store._objects.get(item.ref.key))
    return found


def test_there_is_something_to_read(store: Store) -> None:
    assert NAMES == ["main@0", "main@1", "main@2"]
    assert [version["base"] for version in VERSIONS] == [None, "main@0", "main@1"]  # another topology, and yet a delta
    by_version = [seals(store, name) for name in NAMES]
    assert [sorted(found) for found in by_version] == [["tp0", "tp1"], ["tp0", "tp1"], ["tp0", "tp1", "tp2"]]
    # What a writer owns is stored once as long as it stays.
    owned = [{writer: entry["seal"]["ownership"]["key"] for writer, entry in found.items()} for found in by_version]
    assert owned[0] == owned[1]
    assert len(set(owned[0].values()) | set(owned[2].values())) == 5
    # Slices are masks, and fragments overwrites, of several writers in one chunk.
    for found in by_version[1:]:
        arrays = [{array["array"] for array in entry["seal"]["arrays"]} for entry in found.values()]
        assert all({"u16/mask", "u8/value", "u8/present", "u32/value", "u32/present"} <= names for names in arrays)
    # A writer that was started again stored only what was not there.
    entry = by_version[2]["tp2"]
    incarnations = {item["incarnation"] for item in entry["seal"]["partitions"]}
    assert len(incarnations) == 2
    assert entry["incarnation"] in incarnations
    files = tree(HERE / several.STORE)
    assert 100 < len(files) < 250
    assert sum(map(len, files.values())) < 150_000


@pytest.mark.parametrize("version", VERSIONS, ids=NAMES)
def test_read(store: Store, version: dict[str, Any]) -> None:
    found = store.read(version["version"])
    assert set(found) == set(version["tensors"])
    for name, expected in version["tensors"].items():
        assert hashlib.sha256(raw(found[name])).hexdigest() == expected["sha256"], name
        bits = as_bits(name, found[name])
        assert (bits.dtype, list(bits.shape)) == (expected["dtype"], expected["shape"])
    for alias, name in version["aliases"].items():
        assert found[alias].ctypes.data == found[name].ctypes.data
    info = store.show(version["version"]).info
    assert {name: getattr(info, name) for name in ("root", "message", "metadata")} == {
        name: version[name] for name in ("root", "message", "metadata")
    }


def test_verify(store: Store) -> None:
    report = store.verify(deep=True)
    assert report.problems == []
    assert sorted(report.versions) == NAMES
    assert report.unreferenced  # the journal of the writer that was started again


def test_history_goes_on(store: Store) -> None:
    """This release continues a store of an earlier one, with yet another topology, from no baseline."""
    random = Random("golden writers")
    state = make_state(several.TENSORS, random)
    for _ in range(3):
        state = step(state, random, 0.1)
    several.publish(store, state, 2)
    info = store.log("main")[-1]
    assert (info.version, info.base) == ("main@3", "main@2")
    found = store.read("main")
    assert {name: raw(found[name]) for name in state} == {name: t.bits.tobytes() for name, t in state.items()}
    assert store.verify(deep=True).ok


def test_the_generator_makes_these_files(monkeypatch: pytest.MonkeyPatch) -> None:
    dawdle(monkeypatch)
    files, expected = several.make()
    written = json.loads(EXPECTED.read_text("utf-8"))
    assert {**expected, "probes": None} == {**written, "probes": None}
    if expected["probes"] == written["probes"]:
        assert files == tree(HERE / several.STORE), "if the format changed, run tools/make_golden.py"
        assert history.to_json(expected) == EXPECTED.read_bytes()
    else:  # another zstd: what is stored differs; that it means the same was compared above
        assert set(files) == set(tree(HERE / several.STORE))
