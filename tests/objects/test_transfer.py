"""Bounded parallel transfers: order, window, first error, cleaning up."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from dcr_store.objects.transfer import map_bounded

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("n_parallel", [1, 2, 16])
def test_results_come_in_order(n_parallel: int) -> None:
    def slow_first(i: int) -> int:
        time.sleep(0.002 * (i % 5))
        return i * i

    assert list(map_bounded(slow_first, range(50), n_parallel=n_parallel)) == [i * i for i in range(50)]
    assert list(map_bounded(slow_first, [], n_parallel=n_parallel)) == []


def test_the_window_is_bounded() -> None:
    lock = threading.Lock()
    running = most = 0
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(60):
            taken.append(i)
            yield i

    def work(i: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.001)
        with lock:
            running -= 1
        return i

    for n_yielded, _ in enumerate(map_bounded(work, items(), n_parallel=4)):
        assert len(taken) <= n_yielded + 4
    assert most == 4


def test_the_first_error_is_raised_before_earlier_results() -> None:
    release = threading.Event()
    begun: list[int] = []

    def work(i: int) -> int:
        begun.append(i)
        if i == 0:
            release.wait(10)
        if i == 2:
            threading.Timer(0.05, release.set).start()
            raise KeyError("two")
        return i

    with pytest.raises(KeyError, match="two"):
        list(map_bounded(work, range(1000), n_parallel=4))
    assert release.is_set()
    assert max(begun) < 8
    assert not any(thread.name.startswith("dcr-transfer") for thread in threading.enumerate())


def test_closing_early_stops_the_rest() -> None:
    begun: list[int] = []

    def work(i: int) -> int:
        begun.append(i)
        return i

    results = map_bounded(work, range(1000), n_parallel=3)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert len(begun) <= 4
    assert not any(thread.name.startswith("dcr-transfer") for thread in threading.enumerate())


def test_an_error_of_the_items_is_raised() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("items")

    with pytest.raises(KeyError, match="items"):
        list(map_bounded(lambda i: i, items()))


def test_no_window_is_refused() -> None:
    with pytest.raises(ValueError, match="n_parallel"):
        list(map_bounded(str, [1], n_parallel=0))
