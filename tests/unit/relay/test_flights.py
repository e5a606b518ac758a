"""Transfers under way: how many there may be, and what becomes of those that nobody waits for."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcr_store.errors import StorageError
from dcr_store.objects.retry import is_transient
from dcr_store.relay import flights as module
from dcr_store.relay.cache import Cache
from dcr_store.relay.flights import Flights

DATA = b"right"
SHA256 = hashlib.sha256(DATA).hexdigest()


class Upstream:
    """Sends an object once it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked: list[str] = []

    def stream(self, key: str, sha256: str, past: bool) -> Iterator[bytes]:
        self.asked.append(key)
        assert self.gate.wait(10)
        yield DATA


def run(path: Path, scene: Callable[[Flights, Upstream], Coroutine[Any, Any, None]]) -> None:
    """Run `scene` with one transfer at a time."""
    upstream, cache = Upstream(), Cache(path, 1 << 20)
    with ThreadPoolExecutor(1) as pool:
        asyncio.run(scene(Flights(cache, upstream.stream, pool), upstream))
    cache.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_waiting_transfer_that_nobody_waits_for_is_dropped(tmp_path: Path) -> None:
    async def scene(flights: Flights, upstream: Upstream) -> None:
        first = flights.begin("a", SHA256)
        first.join()
        await until(lambda: upstream.asked == ["a"])
        second, third = flights.begin("b", SHA256), flights.begin("c", SHA256)
        for flight in (second, third, third):
            flight.join()
        assert len(list((tmp_path / "arriving").iterdir())) == 1  # those that wait have no file yet
        second.leave()
        third.leave()
        assert flights.find("b", SHA256) is None
        assert flights.find("c", SHA256) is third  # somebody still waits
        first.leave()  # has begun, and goes on
        upstream.gate.set()
        assert await third.beyond(0)
        assert third.read(0) == DATA
        third.leave()
        await until(lambda: flights.n_landed == 3)
        assert upstream.asked == ["a", "c"]
        again = flights.begin("b", SHA256)
        again.join()
        assert await again.beyond(0)
        again.leave()
        await until(lambda: flights.n_landed == 4)

    run(tmp_path, scene)
    assert list((tmp_path / "arriving").iterdir()) == []
    assert len(list((tmp_path / "objects").glob("*/*"))) == 3


def test_there_are_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)

    async def scene(flights: Flights, upstream: Upstream) -> None:
        for key in "abc":
            flights.begin(key, SHA256).join()
        with pytest.raises(StorageError, match="as many transfers") as caught:
            flights.begin("d", SHA256)
        assert is_transient(caught.value)
        upstream.gate.set()
        await until(lambda: flights.n_landed == 3)
        flights.begin("d", SHA256)
        await until(lambda: flights.n_landed == 4)

    run(tmp_path, scene)
