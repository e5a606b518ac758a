"""Short-lived answers: who shares a request, how long one counts, and that time does not run backwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcr_store.errors import StorageError
from dcr_store.relay import answers
from dcr_store.relay.answers import FRESH_S, Answers, Value

A, B, L = ("get", "a/x"), ("get", "b"), ("list", "a/")


class Upstream:
    """Answers as told, when told."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], Value] = {}
        self.asked: list[tuple[str, ...]] = []
        self.gate: threading.Event | None = None

    def ask(self, name: tuple[str, ...]) -> Callable[[], Value]:
        def ask() -> Value:
            self.asked.append(name)
            value, gate = self.values.get(name), self.gate
            if gate is not None:
                assert gate.wait(10)
            return value

        return ask


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """After news, too, an answer counts as long as ever: the machine may be slow."""
    monkeypatch.setattr(answers, "LIVELY_FRESH_S", FRESH_S)


def run(scene: Callable[[Answers, Upstream], Coroutine[Any, Any, None]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        asyncio.run(scene(Answers(pool), Upstream()))


def test_an_answer_counts_for_a_while() -> None:
    async def scene(given: Answers, upstream: Upstream) -> None:
        for _ in range(3):
            assert await given.give(A, upstream.ask(A)) is None
        assert upstream.asked == [A]
        upstream.values[A] = b"1"
        await asyncio.sleep(FRESH_S + 0.05)
        assert await given.give(A, upstream.ask(A)) == b"1"
        upstream.values[A] = b"2"
        assert await given.give(A, upstream.ask(A)) == b"1"
        assert await given.give(A, upstream.ask(A), past=True) == b"2"

    run(scene)


def test_after_news_an_answer_counts_for_less_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FRESH_S", 60.0)
    monkeypatch.setattr(answers, "LIVELY_FRESH_S", 0.0)
    monkeypatch.setattr(answers, "LIVELY_S", 60.0)

    async def scene(given: Answers, upstream: Upstream) -> None:
        for _ in range(2):
            await given.give(A, upstream.ask(A))
        assert upstream.asked == [A], "nothing is new"
        upstream.values[B] = b"news"
        await given.give(B, upstream.ask(B))
        for _ in range(2):
            await given.give(A, upstream.ask(A))
        assert upstream.asked == [A, B, A, A], "more may follow"
        monkeypatch.setattr(answers, "LIVELY_S", 0.0)
        for _ in range(2):
            await given.give(A, upstream.ask(A))
        assert upstream.asked == [A, B, A, A, A], "none did"

    run(scene)


def test_who_asks_after_news_joins_no_request_that_is_old_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FRESH_S", 60.0)
    monkeypatch.setattr(answers, "LIVELY_FRESH_S", 0.01)
    monkeypatch.setattr(answers, "LIVELY_S", 60.0)

    async def scene(given: Answers, upstream: Upstream) -> None:
        upstream.values[B] = b"news"
        await given.give(B, upstream.ask(B))
        upstream.gate = threading.Event()
        first = asyncio.create_task(given.give(A, upstream.ask(A)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(given.give(A, upstream.ask(A)))
        await asyncio.sleep(0.05)
        upstream.gate.set()
        await asyncio.gather(first, second)
        assert upstream.asked == [B, A, A]

    run(scene)


def test_a_final_answer_is_asked_for_once_it_is_there() -> None:
    async def scene(given: Answers, upstream: Upstream) -> None:
        assert await given.give(A, upstream.ask(A), is_final=True) is None
        await asyncio.sleep(FRESH_S + 0.05)
        upstream.values[A] = b"1"
        assert await given.give(A, upstream.ask(A), is_final=True) == b"1"
        await asyncio.sleep(FRESH_S + 0.05)
        assert await given.give(A, upstream.ask(A), is_final=True) == b"1"
        assert upstream.asked == [A, A]

    run(scene)


def test_those_who_ask_at_once_share_a_request_unless_it_is_old() -> None:
    async def scene(given: Answers, upstream: Upstream) -> None:
        upstream.gate = threading.Event()
        first = [asyncio.create_task(given.give(A, upstream.ask(A))) for _ in range(20)]
        await asyncio.sleep(0.02)
        first[0].cancel()  # whoever asked first may leave
        await asyncio.sleep(FRESH_S + 0.05)
        late = asyncio.create_task(given.give(A, upstream.ask(A)))
        await asyncio.sleep(0.02)
        assert upstream.asked == [A, A]
        upstream.gate.set()
        assert await asyncio.gather(*first[1:], late) == [None] * 20

    run(scene)


def test_news_end_whatever_was_asked_for_before() -> None:
    async def scene(given: Answers, upstream: Upstream) -> None:
        assert await given.give(A, upstream.ask(A)) is None
        upstream.gate = threading.Event()
        under_way = asyncio.create_task(given.give(L, upstream.ask(L)))
        await asyncio.sleep(0.02)
        gate, upstream.gate = upstream.gate, None
        upstream.values |= {A: b"1", L: b"[x]", B: b"news"}
        assert await given.give(B, upstream.ask(B)) == b"news"
        assert await given.give(A, upstream.ask(A)) == b"1"
        assert await given.give(L, upstream.ask(L)) == b"[x]"
        gate.set()
        assert await under_way is None  # who asked before the news is told what was true then
        assert await given.give(L, upstream.ask(L)) == b"[x]"  # and that is not kept

    run(scene)


def test_the_same_again_is_no_news() -> None:
    async def scene(given: Answers, upstream: Upstream) -> None:
        upstream.values[B] = b"old"
        await given.give(B, upstream.ask(B))
        await asyncio.sleep(FRESH_S + 0.05)
        await given.give(A, upstream.ask(A))
        await given.give(B, upstream.ask(B))
        await given.give(A, upstream.ask(A))
        assert upstream.asked == [B, A, B]

    run(scene)


def test_what_was_written_is_asked_for_again() -> None:
    async def scene(given: Answers, upstream: Upstream) -> None:
        for name in (A, B, L):
            await given.give(name, upstream.ask(name))
        given.forget("a/x")
        for name in (A, B, L):
            await given.give(name, upstream.ask(name))
        assert upstream.asked == [A, B, L, A, L]

    run(scene)


def test_a_request_that_began_before_a_write_is_not_kept() -> None:
    async def scene(given: Answers, upstream: Upstream) -> None:
        upstream.gate = threading.Event()
        before = asyncio.create_task(given.give(A, upstream.ask(A)))
        await asyncio.sleep(0.02)
        upstream.values[A] = b"1"
        given.forget("a/x")
        after = asyncio.create_task(given.give(A, upstream.ask(A)))
        await asyncio.sleep(0.02)
        upstream.gate.set()
        assert await asyncio.gather(before, after) == [None, b"1"]
        assert await given.give(A, upstream.ask(A)) == b"1"

    run(scene)


def test_failures_are_shared_and_not_kept() -> None:
    async def scene(given: Answers, upstream: Upstream) -> None:
        def fail() -> Value:
            raise StorageError("injected")

        found = await asyncio.gather(*(given.give(A, fail) for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in found] == [StorageError] * 3
        assert await given.give(A, upstream.ask(A)) is None

    run(scene)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEPT_NBYTES", 10_000)

    async def scene(given: Answers, upstream: Upstream) -> None:
        names = [("get", str(i)) for i in range(10)]
        for name in names:
            upstream.values[name] = bytes(2000)
            await given.give(name, upstream.ask(name), is_final=True)
        upstream.asked.clear()
        for name in reversed(names[-4:]):
            await given.give(name, upstream.ask(name), is_final=True)
        assert upstream.asked == []
        await given.give(names[0], upstream.ask(names[0]), is_final=True)
        assert upstream.asked == [names[0]]

    run(scene)
