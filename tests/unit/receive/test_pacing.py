"""Waits grow, within bounds, and begin small again; what failed is left alone for a while, and nothing else is."""

from __future__ import annotations

from dcr_store.receive.pacing import Blocked, Waits, rests, retries


def test_waits_grow_to_their_bound_and_are_reset() -> None:
    waits = Waits(1.0, 10.0)
    found = [waits.next() for _ in range(6)]
    for value, whole in zip(found, (1, 2, 4, 8, 10, 10), strict=True):
        assert whole / 2 <= value <= whole
    waits.reset()
    assert 0.5 <= waits.next() <= 1


def test_what_happens_is_noticed_within_a_second() -> None:
    waits = rests()
    assert max(waits.next() for _ in range(50)) < 0.8
    waits = retries()
    assert max(waits.next() for _ in range(50)) <= 5


def test_what_failed_is_left_alone_longer_and_longer() -> None:
    blocked, now_s, waits = Blocked(), 100.0, []
    for _ in range(12):
        assert not blocked.holds("main@1", now_s)
        wait_s = blocked.add("main@1", now_s)
        waits.append(wait_s)
        assert blocked.holds("main@1", now_s + 0.99 * wait_s)
        assert not blocked.holds("main@2", now_s)
        now_s += wait_s
    assert waits[0] <= 0.5
    assert 15 <= waits[-1] <= 30
    blocked.add("main@1", now_s)
    blocked.clear()
    assert not blocked.holds("main@1", now_s)
