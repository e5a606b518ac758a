"""Work in the background: all of it, once, and the end after it, whatever fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref

import pytest

from dcr_store.errors import StorageError
from dcr_store.publish.background import Background
from dcr_store.versions.workers import n_workers

LONG_S = 30.0


def test_all_items_then_the_end_then_the_rest() -> None:
    seen: list[object] = []
    gate = threading.Event()

    def work(item: int) -> None:
        assert gate.wait(LONG_S)
        seen.append(item)

    going = Background(list(range(100)), work, lambda error: seen.append(("end", error)))
    going.start()
    going.then(lambda: seen.append("then"))
    assert seen == [], "whoever asked for it has gone on"
    gate.set()
    going.wait()
    assert sorted(seen[:100]) == list(range(100))  # type: ignore[type-var]
    assert seen[100:] == [("end", None), "then"]
    going.then(lambda: seen.append("late"))
    assert seen[-1] == "late"


def test_nothing_to_do_has_ended_at_once() -> None:
    seen: list[object] = []
    going: Background[int] = Background([], seen.append, seen.append)
    assert seen == []
    going.start()
    assert seen == [None]
    going.then(lambda: seen.append("then"))
    going.wait()
    assert seen == [None, "then"]


@pytest.mark.parametrize("fault", [ValueError, SystemExit])
def test_after_an_error_nothing_is_begun(fault: type[BaseException]) -> None:
    seen: list[object] = []
    failed = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            failed.set()
            raise fault("first")
        assert failed.wait(LONG_S)
        time.sleep(0.01)  # until the other thread has said so
        seen.append(item)

    ends: list[BaseException | None] = []
    going = Background(list(range(1000)), work, ends.append)
    going.start()
    going.wait()
    assert [str(error) for error in ends] == ["first"]
    assert len(seen) < 2 * n_workers(), "only what had been begun when it failed"


def test_an_end_that_fails_is_told_to_who_waits_and_the_rest_follows() -> None:
    seen: list[str] = []
    gate = threading.Event()

    def end(error: BaseException | None) -> None:
        raise KeyError("end")

    going = Background([1], lambda item: bool(gate.wait(LONG_S)) or None, end)
    going.start()
    going.then(lambda: seen.append("then"))
    gate.set()
    with pytest.raises(KeyError, match="end"):
        going.wait()
    assert seen == ["then"]
    assert going.has_failed


@pytest.mark.parametrize("n_given", [0, 1])
def test_where_threads_are_not_given(n_given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is enough; without any there is the end alone."""
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

    going = Background(list(range(10)), work, seen.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_some)
        going.start()
    if n_given == 0:
        assert [type(error) for error in seen] == [StorageError]
        going.then(lambda: seen.append("then"))
        assert seen[1:] == ["then"]
        return
    gate.set()
    going.wait()
    assert seen == [*range(10), None]


def test_it_keeps_nothing_that_it_was_given() -> None:
    """That would be the files of a model that was replaced."""

    class Large:
        def work(self, item: int) -> None:
            pass

        def end(self, error: BaseException | None) -> None:
            pass

    large = Large()
    alive = weakref.ref(large)
    going = Background([1, 2, 3], large.work, large.end)
    del large
    going.start()
    going.wait()
    for _ in range(1000):  # the other thread may be about to leave
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None


def test_the_interpreter_waits_for_it() -> None:
    code = (
        "import threading, time\n"
        "from dcr_store.publish.background import Background\n"
        "Background(range(40), lambda item: time.sleep(0.01), lambda error: print('end', error, flush=True)).start()\n"
        "print('main', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "main\nend None\n"
    assert done.stderr == ""
