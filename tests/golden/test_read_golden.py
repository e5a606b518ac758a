"""The golden stores: this release reads what format 1 was when it was frozen, and writes the same."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from golden import history, maintained, several
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from states import raw, tree

import dcr_store
from dcr_store.errors import InvalidInputError
from dcr_store.layout.tensors import as_bits
from dcr_store.objects.threads import Threads
from dcr_store.store import Store

HERE = Path(__file__).parent
STORES = ("v1-delta", "v1-portable")
PACKED = ("F4", "F6_E2M3", "F6_E3M2")


def read_expected() -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((HERE / "expected.json").read_text("utf-8"))
    return expected


def all_versions() -> list[dict[str, Any]]:
    return [version for versions in read_expected()["lines"].values() for version in versions]


VERSIONS = all_versions()
NAMES = [version["version"] for version in VERSIONS]


@pytest.fixture(scope="module", autouse=True)
def _unchanged() -> Iterator[None]:
    """No test writes golden files."""
    before = golden_files()
    yield
    assert golden_files() == before


def golden_files() -> dict[str, dict[str, bytes]]:
    files = {name: tree(HERE / name) for name in STORES}
    return {**files, "": {"expected.json": (HERE / "expected.json").read_bytes()}}


@pytest.fixture(scope="module", params=STORES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of a store that nobody may write."""
    copy = tmp_path_factory.mktemp("golden") / request.param
    shutil.copytree(HERE / request.param, copy)
    directories = [copy, *(path for path in copy.rglob("*") if path.is_dir())]
    for path in copy.rglob("*"):
        path.chmod(0o444 if path.is_file() else 0o555)
    copy.chmod(0o555)
    before = tree(copy)
    yield copy
    assert tree(copy) == before  # a superuser writes what is read-only
    for path in directories:
        path.chmod(0o755)


@pytest.fixture(scope="module")
def store(place: Path) -> Iterator[Store]:
    with dcr_store.open(place) as store:
        yield store


def test_there_is_something_to_read() -> None:
    directories = {path.name for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert directories == {*STORES, several.STORE, maintained.STORE}
    assert len(VERSIONS) == 14
    for name in STORES:
        files = tree(HERE / name)
        assert len(files) > 400, name
        assert sum(map(len, files.values())) < 400_000, name
        assert list((HERE / name / "log" / "main" / "checkpoints").iterdir()), name
    assert len({t["dtype"] for version in VERSIONS for t in version["tensors"].values()}) == 21
    kinds = [kind for records in read_expected()["records"].values() for kind in records]
    assert set(kinds) == {"begin", "resume", "commit", "abort"}
    assert any(version["base"] is None for version in VERSIONS[1:])
    assert any(len(json.dumps([v["message"], v["metadata"]]).encode()) > 1024 for v in VERSIONS)


SCHEMAS = {
    "dcr.json": "store",
    "layouts/*.json": "layout",
    "log/*/latest.json": "log-hint",
    "log/*/checkpoints/*.json": "log-checkpoint",
    "log/*/*.json": "log-record",
    "versions/*/*/journal/*.json": "journal",
    "versions/*/*/attempts/*/manifest.json": "manifest",
    "versions/*/*/data/*/ownership.json": "ownership",
    "groups/*/log/latest.json": "group-checkpoint",
    "groups/*/log/*.json": "group-record",
    "groups/*/acks/*/*/*.json": "group-ack",
    "tags/*/*.json": "tag",
    "pins/*.json": "pin",
}
KEEPING = {"group-checkpoint", "group-record", "group-ack", "tag", "pin"}
MISSING = {several.STORE: KEEPING | {"log-checkpoint"}, maintained.STORE: {"ownership"}}


@pytest.mark.parametrize("name", [*STORES, several.STORE, maintained.STORE])
def test_documents_fit_their_schemas(name: str) -> None:
    directory = HERE.parents[1] / "schema"
    schemas = {path.stem: json.loads(path.read_text("utf-8")) for path in directory.glob("*.json")}
    registry: Registry[Any] = Registry().with_resources(
        (schema["$id"], Resource.from_contents(schema)) for schema in schemas.values()
    )
    validators = {stem: Draft202012Validator(schema, registry=registry) for stem, schema in schemas.items()}
    seen = set()
    for key, data in tree(HERE / name).items():
        if not key.endswith(".json") or key.endswith("/zarr.json"):
            continue
        schema = next(schema for pattern, schema in SCHEMAS.items() if PurePosixPath(key).match(pattern))
        assert [error.message for error in validators[schema].iter_errors(json.loads(data))] == [], key
        seen.add(schema)
    assert seen == set(SCHEMAS.values()) - MISSING.get(name, KEEPING | {"ownership"})


def test_log(store: Store) -> None:
    found = [info for line in ("exp-1.x", "main") for info in store.log(line)]
    told = {
        info.version: {name: getattr(info, name) for name in ("root", "base", "message", "metadata")} for info in found
    }
    assert told == {v["version"]: {name: v[name] for name in ("root", "base", "message", "metadata")} for v in VERSIONS}
    assert store.lines() == ["exp-1.x", "main"]
    assert store.chunk_elements == read_expected()["chunk_elements"]


@pytest.mark.parametrize("version", VERSIONS, ids=NAMES)
def test_read(store: Store, version: dict[str, Any]) -> None:
    for name in (version["version"], version["root"]):
        found = store.read(name)
        assert set(found) == set(version["tensors"])
    for name, expected in version["tensors"].items():
        tensor = found[name]
        assert hashlib.sha256(raw(tensor)).hexdigest() == expected["sha256"], name
        if expected["dtype"] not in PACKED:
            bits = as_bits(name, tensor)
            assert (bits.dtype, list(bits.shape)) == (expected["dtype"], expected["shape"])
    for alias, name in version["aliases"].items():
        assert found[alias].ctypes.data == found[name].ctypes.data
    some = sorted(found)[::3]
    assert {name: raw(tensor) for name, tensor in store.read(version["version"], some).items()} == {
        name: raw(found[name]) for name in some
    }


def check_files(store: Store, version: dict[str, Any], directory: Path) -> None:
    found = tree(directory)
    if version["files"]:
        told = {path: {"nbytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for path, d in found.items()}
        assert told == version["files"]
    else:
        assert set(found) == {"model.safetensors"}
    assert store.compare_directory(version["version"], directory).ok


@pytest.mark.parametrize("version", VERSIONS, ids=NAMES)
def test_checkout(store: Store, version: dict[str, Any], tmp_path: Path) -> None:
    if any(tensor["dtype"] == "C128" for tensor in version["tensors"].values()):
        with pytest.raises(InvalidInputError, match="safetensors files cannot hold"):
            store.checkout(version["version"], tmp_path / "out")
        return
    store.checkout(version["version"], tmp_path / "out")
    check_files(store, version, tmp_path / "out")


def test_pull_through_the_history_and_back(store: Store, tmp_path: Path) -> None:
    versions = [version for version in VERSIONS if version["version"].startswith("main")]
    for version in [*versions, *versions[::-3]]:
        store.pull(tmp_path / "model", version["version"])
        check_files(store, version, tmp_path / "model")


def test_verify(store: Store) -> None:
    report = store.verify(deep=True)
    assert report.problems == []
    assert sorted(report.versions) == sorted(NAMES)
    assert report.unreferenced  # of the transactions that came to nothing
    assert all(not path.startswith(("log/", "layouts/")) for path in report.unreferenced)


def test_history_goes_on(place: Path, tmp_path: Path) -> None:
    """This release continues a store of an earlier one: on a copy that may be written."""
    shutil.copytree(place, tmp_path / "store")
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        path.chmod(0o755)
    with dcr_store.open(tmp_path / "store") as store:
        head = store.read("main")
        with store.begin("main") as transaction:
            for name, tensor in head.items():
                transaction.write(name, tensor)
        info = store.log("main")[-1]
        assert (info.version, info.changed, info.root) == ("main@12", 0, store.log("main")[-2].root)
        resumed = store.begin("exp-1.x", metadata={"open": True}, owner="trainer-1")
        assert (resumed.txid, resumed.attempt) == (read_expected()["open"]["exp-1.x"], 1)
        for name, tensor in store.read("exp-1.x").items():
            resumed.write(name, tensor)
        assert resumed.commit().version == "exp-1.x@2"
        assert store.verify(deep=True).ok


def dawdle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all threads fall behind whoever gives them work, as on a busy machine."""
    submit = Threads.submit

    def slow(pool: Threads, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        def later() -> Any:
            time.sleep(0.001)
            return function(*arguments, **named)

        return submit(pool, later)

    monkeypatch.setattr(Threads, "submit", slow)


def test_the_generator_makes_these_files(monkeypatch: pytest.MonkeyPatch) -> None:
    dawdle(monkeypatch)
    stores, expected = history.make()
    written = read_expected()
    assert {**expected, "probes": None} == {**written, "probes": None}
    for name, codec in history.STORES.items():
        if expected["probes"][codec] == written["probes"][codec]:
            assert stores[name] == tree(HERE / name), f"{name}: if the format changed, run tools/make_golden.py"
        else:  # another zstd: what is stored differs; that it means the same was compared above
            assert set(stores[name]) == set(tree(HERE / name)), name
    if expected["probes"] == written["probes"]:
        assert history.to_json(expected) == (HERE / "expected.json").read_bytes()
