"""Work behind the caller's back: all of it, once, and the end after it, whatever fails."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from dcr_store.errors import StorageError
from dcr_store.publish.behind import Behind
from dcr_store.versions.workers import n_workers

LONG_S = 30.0


def test_all_items_then_the_end_then_the_rest() -> None:
    seen: list[object] = []
    gate = threading.Event()

    def work(item: int) -> None:
        assert gate.wait(LONG_S)
        seen.append(item)

    behind = Behind(list(range(100)), work, lambda error: seen.append(("end", error)))
    behind.then(lambda: seen.append("then"))
    assert seen == [], "whoever asked for it has gone on"
    gate.set()
    behind.wait()
    assert sorted(seen[:100]) == list(range(100))  # type: ignore[type-var]
    assert seen[100:] == [("end", None), "then"]
    behind.then(lambda: seen.append("late"))
    assert seen[-1] == "late"


def test_nothing_to_do_has_ended_at_once() -> None:
    seen: list[object] = []
    behind: Behind[int] = Behind([], seen.append, seen.append)
    assert seen == [None]
    behind.then(lambda: seen.append("then"))
    behind.wait()
    assert seen == [None, "then"]


def test_after_an_error_nothing_is_begun() -> None:
    seen: list[object] = []
    failed = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            failed.set()
            raise ValueError("first")
        assert failed.wait(LONG_S)
        seen.append(item)

    ends: list[Exception | None] = []
    Behind(list(range(1000)), work, ends.append).wait()
    assert [str(error) for error in ends] == ["first"]
    assert len(seen) < 2 * n_workers(), "only what had been begun when it failed"


def test_an_end_that_fails_is_told_to_who_waits_and_the_rest_follows() -> None:
    seen: list[str] = []
    gate = threading.Event()

    def end(error: Exception | None) -> None:
        raise KeyError("end")

    behind = Behind([1], lambda item: bool(gate.wait(LONG_S)) or None, end)
    behind.then(lambda: seen.append("then"))
    gate.set()
    with pytest.raises(KeyError, match="end"):
        behind.wait()
    assert seen == ["then"]


@pytest.mark.parametrize("n_given", [0, 1])
def test_where_threads_are_not_given(n_given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is enough; without any nothing is called, not even the end."""
    start, n_left = threading.Thread.start, [n_given]

    def start_some(thread: threading.Thread) -> None:
        if n_left[0] == 0:
            raise RuntimeError("can't start new thread")
        n_left[0] -= 1
        start(thread)

    seen: list[object] = []
    gate = threading.Event()

    def work(item: int) -> None:
        assert gate.wait(LONG_S)
        seen.append(item)

    def make() -> Behind[int]:
        return Behind(list(range(10)), work, lambda error: seen.append(error))

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_some)
        if n_given == 0:
            with pytest.raises(StorageError, match="cannot start a thread"):
                make()
            assert seen == []
            return
        behind = make()
    gate.set()
    behind.wait()
    assert seen == [*range(10), None]


def test_the_interpreter_waits_for_it() -> None:
    code = (
        "import threading, time\n"
        "from dcr_store.publish.behind import Behind\n"
        "Behind(range(40), lambda item: time.sleep(0.01), lambda error: print('end', error, flush=True))\n"
        "print('main', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "main\nend None\n"
    assert done.stderr == ""
