"""The golden store of maintenance: this release reads what was kept, and knows what was let go, when it was frozen."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden import history, maintained
from golden.test_read_golden import HERE, dawdle
from states import raw, tree

import dcr_store
from dcr_store.errors import NotFoundError
from dcr_store.store import Store

EXPECTED: dict[str, Any] = json.loads((HERE / "expected-history.json").read_text("utf-8"))
VERSIONS = {version["version"]: version for versions in EXPECTED["lines"].values() for version in versions}
KEPT = [name for name in VERSIONS if name not in EXPECTED["expired"]]


@pytest.fixture(scope="module", autouse=True)
def _unchanged() -> Iterator[None]:
    """No test writes golden files."""
    before = tree(HERE / maintained.STORE)
    yield
    assert tree(HERE / maintained.STORE) == before


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of a copy, which may be written."""
    shutil.copytree(HERE / maintained.STORE, tmp_path / "store")
    with dcr_store.open(tmp_path / "store") as store:
        yield store


def check(store: Store, name: str, version: str) -> None:
    """Read by one name what another one says is there."""
    found, expected = store.read(name), VERSIONS[version]
    assert {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in found.items()} == {
        name: tensor["sha256"] for name, tensor in expected["tensors"].items()
    }


def test_there_is_something_to_read() -> None:
    kinds = {kind for records in EXPECTED["records"].values() for kind in records}
    assert kinds == {
        *("begin", "commit", "abort", "intent", "resume", "anchor", "fold", "expire", "gc", "fork", "origin"),
    }
    assert EXPECTED["expired"] == ["main@0", "main@3", "main@5"]
    assert EXPECTED["edges"] == [["main@4", 7], [None, 1], [None, 4], [None, 6], ["main@4", 8]]
    assert EXPECTED["n_collected"] > 100
    checkpoints = sorted((HERE / maintained.STORE / "log" / "main" / "checkpoints").iterdir())
    assert len(checkpoints) == 2  # the last one was made after the expiry and knows of it
    history_of_last = json.loads(checkpoints[-1].read_bytes())["body"]["history"]
    assert all(history_of_last[name] for name in ("expired", "dead", "edges", "forks"))


@pytest.mark.parametrize("name", KEPT)
def test_what_was_kept(store: Store, name: str) -> None:
    check(store, name, name)


@pytest.mark.parametrize("name", EXPECTED["expired"])
def test_what_was_let_go(store: Store, name: str) -> None:
    with pytest.raises(NotFoundError, match="expired"):
        store.read(name)


def test_names(store: Store) -> None:
    assert [named.name for named in store.tags("main")] == EXPECTED["tags"]
    assert {named.name: named.version for named in store.pins()} == EXPECTED["pins"]
    check(store, "main@before-the-fork", "main@4")
    check(store, "exp@4", "main@4")
    group = store.group("eu").status()
    assert (group.active, group.proposed) == ("main@7", None)


def test_verify(store: Store) -> None:
    report = store.verify(deep=True)
    assert report.problems == []
    assert sorted(report.versions) == sorted(KEPT)


def test_history_goes_on(store: Store) -> None:
    """This release keeps house in a store of an earlier one: what was kept then and is kept now reads as before."""
    store.delete_pin("for-ever")
    expiry = store.expire("main", keep_last=2)
    assert expiry.versions == tuple(f"main@{number}" for number in (1, 6, 8, 9, 10, 11, 12, 13))
    store.gc(grace_s=0)
    for name in ("main@2", "main@4", "main@7", "main@14", "main@15", "exp@5", "exp@6"):
        check(store, name, name)
    assert store.verify(deep=True).problems == []


def test_the_generator_makes_these_files(monkeypatch: pytest.MonkeyPatch) -> None:
    dawdle(monkeypatch)
    files, expected = maintained.make()
    assert {**expected, "probes": None} == {**EXPECTED, "probes": None}
    if expected["probes"] == EXPECTED["probes"]:
        assert files == tree(HERE / maintained.STORE), "if the format changed, run tools/make_golden.py"
        assert history.to_json(expected) == (HERE / "expected-history.json").read_bytes()
    else:  # another zstd: what is stored differs; that it means the same was compared above
        assert set(files) == set(tree(HERE / maintained.STORE))
