"""Verify looks at a log whole: holes, strays, breaks of the chain; and ends, whatever lies there."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from log_records import abort, begin

import dcr_store
from dcr_store.errors import StorageError
from dcr_store.format import canonical
from dcr_store.format.copies import DETACHED_KEY
from dcr_store.format.names import checkpoint_key, hint_key, record_key
from dcr_store.format.ranges import Ranges
from dcr_store.format.records import Expire, Intent
from dcr_store.history.report import Problem
from dcr_store.log.checkpoints import Hint, read_hint, write_hint
from dcr_store.log.fold import LineState
from dcr_store.log.line import next_fields
from dcr_store.objects.memory import MemoryObjects
from dcr_store.store import Store


@pytest.fixture
def store() -> Iterator[Store]:
    """A line of 9 versions, so that it has a checkpoint."""
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as store:
        for i in range(9):
            with store.begin() as transaction:
                transaction.write("a", np.full(10, i))
        yield store


def problems(store: Store, *, deep: bool = False) -> list[Problem]:
    with dcr_store.open(store.url) as other:
        return other.verify(deep=deep).problems


def keys(store: Store) -> list[str]:
    return [problem.key for problem in problems(store)]


def test_a_good_store(store: Store) -> None:
    report = store.verify(deep=True)
    assert report.ok
    assert report.problems == []
    assert report.versions == [f"main@{i}" for i in range(9)]
    assert report.unreferenced == []
    assert report.n_objects == len(store._objects.list(""))
    assert report.nbytes == sum(store._objects.list("").values())


def test_what_aborted_transactions_left_is_no_problem(store: Store) -> None:
    transaction = store.begin()
    transaction.write("a", np.arange(10_000))
    transaction._writer.finish()
    transaction._writer.partitions.flush()
    transaction.abort()
    report = store.verify()
    assert report.ok
    assert report.unreferenced
    assert all(transaction.txid in key for key in report.unreferenced)


def test_one_version(store: Store) -> None:
    report = store.verify("main@3", deep=True)
    assert report.ok
    assert report.versions == ["main@0", "main@1", "main@2", "main@3"]


def test_a_record_that_may_not_be_read_is_not_called_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    get, refused = MemoryObjects.get, record_key("main", 3)

    def forbid(self: MemoryObjects, key: str, *args: Any, **kwargs: Any) -> bytes:
        if key == refused:
            raise StorageError("access denied", key=key)
        return get(self, key, *args, **kwargs)

    with dcr_store.open(store.url) as other:
        other.log()
        monkeypatch.setattr(MemoryObjects, "get", forbid)
        (found,) = [problem for problem in other.verify(depth="log").problems if problem.key == refused]
    assert found.what == "access denied"


@pytest.mark.parametrize("seq", [0, 1, 7, 15, 16, 17])
def test_a_missing_record_is_named(store: Store, seq: int) -> None:
    store._objects.delete(record_key("main", seq))
    assert record_key("main", seq) in keys(store)


@pytest.mark.parametrize("seq", [0, 1, 7, 15, 16, 17])
def test_a_changed_record_is_named_and_no_other(store: Store, seq: int) -> None:
    """Its form is fine and its own link is; what follows it, or the hint, says that it is another one."""
    key = record_key("main", seq)
    data = store._objects.get(key)
    place = data.index(b'"id":"') + 6
    other = b"f" if data[place : place + 1] != b"f" else b"e"
    store._objects.put(key, data[:place] + other + data[place + 1 :])
    assert keys(store) == [key]


@pytest.mark.parametrize("number", [19, 40])
def test_a_hole_is_named(store: Store, number: int) -> None:
    store._objects.put(record_key("main", number), store._objects.get(record_key("main", 3)))
    assert [record_key("main", seq) for seq in range(18, number)] == keys(store)


@pytest.mark.parametrize("number", [18, 10**6, 10**15, 10**20 - 1])
def test_a_record_beyond_the_end_is_named(store: Store, number: int) -> None:
    """Somebody put a file there: it is named, and counting up to it does not take for ever."""
    store._objects.put(record_key("main", number), b"{}" if number == 18 else b"anything")
    assert keys(store) == [record_key("main", number)]


def test_a_hint_that_promises_too_much(store: Store) -> None:
    write_hint(store._objects, LineState("main", 10**15, "0" * 64), None)
    found = problems(store)
    assert 1 <= len(found) < 10
    assert any(problem.key == record_key("main", 18) for problem in found)


def test_a_legal_record_that_the_hint_does_not_know(store: Store) -> None:
    """The hint is older than the log: no problem."""
    log = store._catalog.log("main")
    log.append(begin)
    log.append(abort)
    assert problems(store) == []


def test_versions_to_which_no_way_leads(store: Store) -> None:
    """All objects and records are sound: a broken client has let go of a delta that was needed."""
    store.fork("main@8", "exp")
    with store.begin("exp") as transaction:
        transaction.write("a", np.full(10, 99))
    store.anchor("main@6")
    log = store._catalog.log("main")
    log.append(
        lambda state: Intent(**next_fields(state), txid="0" * 32, purpose="expire", owner="x", versions=Ranges.of([2]))
    )
    log.append(
        lambda state: Expire(
            **next_fields(state), txid="0" * 32, versions=Ranges.of([2]), deltas=Ranges.of([2, 4]), edges=()
        )
    )
    for depth in ("log", "objects", "replay"):
        found = dcr_store.open(store.url).verify(depth=depth).problems  # type: ignore[arg-type]
        assert {problem.key for problem in found} == {"main@3", "main@4", "main@5"}
        assert all("no path leads" in problem.what for problem in found)


def test_derived_documents(store: Store) -> None:
    objects = store._objects
    for key in (hint_key("main"), checkpoint_key("main", 16)):
        data = objects.get(key)
        objects.put(key, b"damaged")
        assert keys(store) == [key]
        objects.put(key, data)
    objects.put("log/main/checkpoints/readme.txt", b"hello")
    assert keys(store) == ["log/main/checkpoints/readme.txt"]
    objects.delete("log/main/checkpoints/readme.txt")
    objects.delete(hint_key("main"))
    assert keys(store) == [hint_key("main")]


def test_a_checkpoint_that_tells_something_else(store: Store) -> None:
    """It is whole, but not the fold of the records."""
    key = checkpoint_key("main", 16)
    body = canonical.open_body(store._objects.get(key), key)
    assert body is not None
    body["rows"][3]["root"] = "0" * 64
    store._objects.put(key, canonical.seal_body(body))
    assert keys(store) == [key]


def test_lines_that_have_no_version(store: Store) -> None:
    store.begin("exp").abort()
    assert problems(store) == []


def test_foreign_objects_are_told_apart(store: Store) -> None:
    store._objects.put("notes/todo.txt", b"hello")
    report = store.verify()
    assert report.ok
    assert report.unreferenced == ["notes/todo.txt"]


HINTS: dict[str, Callable[[Hint], Hint]] = {
    "a record that is none": lambda hint: replace(hint, tail=(b"{}", *hint.tail[1:])),
    "a record written otherwise": lambda hint: replace(hint, tail=(hint.tail[0][:-1] + b" }", *hint.tail[1:])),
    "a tail too short": lambda hint: replace(hint, tail=hint.tail[1:]),
    "a tail too long": lambda hint: replace(hint, tail=(*hint.tail, hint.tail[-1])),
    "a checkpoint past the end": lambda hint: replace(hint, checkpoint=hint.length + 1, tail=()),
    "an earlier end that never was": lambda hint: replace(hint, length=hint.length - 1, tail=()),
}


@pytest.mark.parametrize("what", HINTS)
def test_a_hint_that_is_whole_and_not_of_this_log(store: Store, what: str) -> None:
    hint = read_hint(store._objects, "main")
    assert hint is not None
    assert len(hint.tail) == 2, "one version since the checkpoint"
    told = HINTS[what](hint)
    state = LineState("main", told.length, told.last_sha256)
    write_hint(store._objects, state, told.checkpoint, told.tail)
    assert read_hint(store._objects, "main") == told
    assert [key for key in keys(store) if "checkpoints" not in key] == [hint_key("main")], "the records are right"
    write_hint(store._objects, LineState("main", hint.length, hint.last_sha256), hint.checkpoint, hint.tail)
    assert keys(store) == []


def test_an_older_hint_is_right(store: Store) -> None:
    older = store._objects.get(hint_key("main"))
    with store.begin() as transaction:
        transaction.write("a", np.full(10, 99))
    store._objects.put(hint_key("main"), older)
    assert keys(store) == []


def test_a_record_that_its_successor_contradicts_is_to_blame_and_not_the_hint(store: Store) -> None:
    key = record_key("main", 16)  # in the hint's tail
    store._objects.put(key, store._objects.get(key).replace(b'"main"', b'"mein"'))
    assert key in keys(store)
    assert hint_key("main") not in keys(store)


def test_what_says_that_a_copy_was_detached_is_read(store: Store) -> None:
    url = f"memory://{secrets.token_hex(8)}"
    store.copy_to(url)
    with dcr_store.open(url) as copy:
        assert keys(copy) == []
        copy.detach()
        assert keys(copy) == []
        sound = copy._objects.get(DETACHED_KEY)
        for wrong in (b"", b"{}", sound[:-2], sound.replace(b"created_at", b"deleted_at")):
            copy._objects.put(DETACHED_KEY, wrong)
            assert keys(copy) == [DETACHED_KEY]
