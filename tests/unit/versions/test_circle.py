"""Lines that say to go on from each other, or from what is not there: whoever looks for their past is told so."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import dcr_store
from dcr_store.errors import IntegrityError, NotFoundError
from dcr_store.format.fields import now
from dcr_store.format.names import new_txid, record_key
from dcr_store.format.records import Origin
from dcr_store.format.rows import VersionRow
from dcr_store.store import Store
from dcr_store.versions import catalog

LINES = ("a", "b", "c")


def put_origin(store: Store, line: str, parent: str, row: VersionRow) -> None:
    record = Origin(
        line=line,
        seq=0,
        id=new_txid(),
        prev=store._catalog.store_sha256,
        created_at=now(),
        parent=parent,
        fork_seq=0,
        fork_sha256="0" * 64,
        row=row,
    )
    store._objects.put(record_key(line, 0), record.to_bytes())


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Three versions of main, and a circle of three lines that share them; each log by itself is a whole one."""
    url = f"memory://{secrets.token_hex(8)}"
    with dcr_store.create(url, chunk_elements=64) as store:
        for value in range(3):
            with store.begin() as transaction:
                transaction.write("w", np.full(70, value, np.int32))
        rows = store._catalog.rows("main")
        for line, parent, number in zip(LINES, (*LINES[1:], LINES[0]), (2, 1, 1), strict=True):
            put_origin(store, line, parent, rows[number])
    steps = iter(range(200))

    def read_to(self: catalog.Catalog, line: str, version: int) -> object:
        assert next(steps, None) is not None, "round and round"
        return original(self, line, version)

    original = catalog.Catalog.read_to
    monkeypatch.setattr(catalog.Catalog, "read_to", read_to)
    return url


ASKED: dict[str, Callable[[Store], object]] = {
    "log": lambda store: store.log("a"),
    "read": lambda store: store.read("a@1"),
    "show": lambda store: store.show("a@0"),
    "diff": lambda store: store.diff("a@0", "main@2"),
    "iter_states": lambda store: list(store.iter_states("a")),
    "fork": lambda store: store.fork("b@1", "d"),
    "tag": lambda store: store.tag("a@0", "x"),
    "anchor": lambda store: store.anchor("a@0"),
    "copy_to": lambda store: store.copy_to(f"memory://{secrets.token_hex(8)}"),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_circle_of_lines_is_named(url: str, what: str) -> None:
    with dcr_store.open(url) as store, pytest.raises(IntegrityError, match=r"not [abc]'s own") as caught:
        ASKED[what](store)
    assert caught.value.key in {record_key(line, 0) for line in LINES}
    assert "the line " in str(caught.value)


@pytest.mark.parametrize("depth", ["log", "objects", "replay"])
def test_verify_lists_a_circle(url: str, depth: str) -> None:
    with dcr_store.open(url) as store:
        report = store.verify(depth=depth)
        assert len([problem for problem in report.problems if problem.key.startswith("log/")]) >= len(LINES)
        assert store.verify("a@1", depth=depth).problems
        assert store.verify("main@2", depth=depth).ok


def test_a_line_from_a_version_that_its_parent_has_not(url: str) -> None:
    with dcr_store.open(url) as store:
        row = store._catalog.fresh("main").row(2)
        assert row is not None
        put_origin(store, "ahead", "main", dataclasses.replace(row, version=9))
        with pytest.raises(IntegrityError, match="lead to a version") as caught:
            list(store.iter_states("ahead"))
        assert caught.value.key == "main@3"
        with pytest.raises(NotFoundError, match="ahead@4: no such version"):
            store.read("ahead@4")
        assert not store.verify("ahead").ok


def test_a_fork_of_a_fork_from_before_it_is_none(url: str) -> None:
    """What a line shares with its parent belongs to the parent's parent, from which the new line then goes on."""
    with dcr_store.open(url) as store:
        store.fork("main@1", "exp")
        store.fork("exp@0", "more")
        source = store._catalog.source("more")
        assert source is not None
        assert (source.line, source.row.version) == ("main", 0)
        assert store.read("more@0")["w"][0] == 0
        assert store.verify("more@0").ok
