"""Logs through relays: a record that came wrong once is not kept for ever, by relay or reader."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from log_records import STORE_SHA256, Writer, begin, commit, empty, holding_store
from relays import RelayThread
from watched import Watched

from dcr_store.format.names import hint_key, record_key
from dcr_store.format.records import parse_record
from dcr_store.log import fold
from dcr_store.log.checkpoints import write_hint
from dcr_store.log.fold import LineState
from dcr_store.log.line import LineLog
from dcr_store.objects.open import open_objects
from dcr_store.ports import ObjectStore


@pytest.mark.parametrize("n_relays", [1, 2])
def test_a_hint_that_came_wrong_once_is_read_past_the_relays(tmp_path: Path, n_relays: int) -> None:
    """A length that the log never had, and nobody has it in the store."""
    upstream = WrongOnce(open_objects(f"memory://{secrets.token_hex(8)}"))
    writer = Writer(upstream.inner)
    writer.versions(3)
    write_hint(upstream, writer.state, None)
    good = upstream.inner.get(hint_key("main"))
    write_hint(upstream, LineState("main", 10**15, "0" * 64), None)
    upstream.wrong[hint_key("main")] = upstream.inner.get(hint_key("main"))
    upstream.inner.put(hint_key("main"), good)
    with ExitStack() as stack:
        above: str | ObjectStore = upstream
        for level in range(n_relays):
            above = stack.enter_context(RelayThread(above, tmp_path / f"{level}")).url
        assert isinstance(above, str)
        assert LineLog(open_objects(above), "main", STORE_SHA256).refresh() == writer.state
        assert upstream.count("get") < 100


@pytest.mark.parametrize("n_relays", [1, 2])
def test_nothing_is_appended_to_a_wrong_last_record(tmp_path: Path, n_relays: int) -> None:
    """No record after it tells that it is wrong: our own would, and be the end of the log."""
    upstream = WrongOnce(open_objects(f"memory://{secrets.token_hex(8)}"))
    writer = Writer(holding_store(upstream.inner))
    writer.versions(1)
    writer.put(begin(writer.state))
    upstream.wrong[record_key("main", 2)] = begin(before(writer, 2), owner="somebody else").to_bytes()
    with ExitStack() as stack:
        above: str | ObjectStore = upstream
        for level in range(n_relays):
            above = stack.enter_context(RelayThread(above, tmp_path / f"{level}")).url
        assert isinstance(above, str)
        log = LineLog(open_objects(above), "main", STORE_SHA256)
        state = log.refresh()
        assert state.open is not None
        assert state.open.owner == "somebody else"
        log.append(commit)
        assert log.state.open is None
    assert LineLog(upstream.inner, "main", STORE_SHA256).refresh() == log.state


def before(writer: Writer, length: int) -> LineState:
    """Return the state of a writer's log after so many records."""
    state = empty()
    for seq in range(length):
        data = writer.objects.get(record_key("main", seq))
        state = fold.apply(state, parse_record(data, record_key("main", seq)), data)
    return state


class WrongOnce(Watched):
    """Gives a wrong answer for each of some keys, once."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.wrong: dict[str, bytes] = {}

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        wrong = self.wrong.pop(key, None)
        return super().get(key, start, stop, sha256=sha256) if wrong is None else wrong


def of_somebody_else() -> bytes:
    """Return a record that may stand where the first one does."""
    writer = Writer(open_objects(f"memory://{secrets.token_hex(8)}"))
    return begin(writer.state, owner="somebody else").to_bytes()


@pytest.mark.parametrize("n_relays", [1, 2])
@pytest.mark.parametrize("wrong", [b"damaged", of_somebody_else()], ids=["damaged", "another record"])
def test_a_record_that_came_wrong_once_is_fetched_past_the_relays(tmp_path: Path, n_relays: int, wrong: bytes) -> None:
    upstream = WrongOnce(open_objects(f"memory://{secrets.token_hex(8)}"))
    writer = Writer(upstream.inner)
    writer.put(begin(writer.state))
    upstream.wrong[record_key("main", 0)] = wrong
    with ExitStack() as stack:
        above: str | ObjectStore = upstream
        for level in range(n_relays):
            above = stack.enter_context(RelayThread(above, tmp_path / f"{level}")).url
        assert isinstance(above, str)
        readers = [LineLog(open_objects(above), "main", STORE_SHA256) for _ in range(3)]
        early = readers[0].refresh()
        writer.put(commit(writer.state))
        time.sleep(0.2 * n_relays + 0.1)  # for which the relays may say that there is none
        assert [reader.refresh() for reader in readers[:2]] == [writer.state] * 2
        assert early != writer.state
        n_requests = upstream.count("get", "/00000000000000000000.json")
        assert readers[2].refresh() == writer.state
        assert upstream.count("get", "/00000000000000000000.json") == n_requests, "the relay keeps the right one now"
