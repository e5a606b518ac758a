"""Two exports into one directory: one of them writes, the other is refused; a dead one stands in nobody's way."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from series import State, read_checkpoint, receive, write_checkpoint

import dcr_store
from dcr_store import events
from dcr_store.errors import ConflictError, StorageError
from dcr_store.exchange.export_lock import LOCK
from dcr_store.store import Store

STATES: list[State] = [{"w": np.arange(90, dtype=np.float32) + number} for number in range(2)]
NAMES = {"safetensors": ("main@0", "main@1"), "slime": ("weight_v000000", "weight_v000001")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = dcr_store.create(tmp_path / "store", chunk_elements=64)
    for number, state in enumerate(STATES):
        with made.begin() as transaction:
            transaction.write_checkpoint(write_checkpoint(tmp_path / f"c{number}", state))
    return made


def written(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != LOCK)


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("other", NAMES)
def test_a_second_export_is_refused(store: Store, tmp_path: Path, format: str, other: str) -> None:
    """The first one has built a folder, which has no name yet, when the second one comes."""
    out = tmp_path / "out"
    has_built, goes_on, failures = threading.Event(), threading.Event(), list[BaseException]()

    def first() -> None:
        try:
            store.export("main@0", "main@0", out, format=format)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=first)

    def stop(event: events.Event) -> None:
        if event.name == "export.built" and threading.current_thread() is thread:
            has_built.set()
            assert goes_on.wait(60)

    with events.listening(stop):
        thread.start()
        try:
            assert has_built.wait(60)
            with pytest.raises(ConflictError, match="another export writes here; wait for it") as caught:
                store.export("main@1", "main@1", out, format=other)
        finally:
            goes_on.set()
            thread.join()
    assert failures == []
    assert str(out) in str(caught.value)
    name = NAMES[format][0]
    assert written(out) == [name]
    assert read_checkpoint(out / name) == {"w": STATES[0]["w"].tobytes()}
    store.export("main@1", "main@1", out, format=other)
    assert written(out) == sorted([name, NAMES[other][1]])
    assert read_checkpoint(out / NAMES[other][1]) == {"w": STATES[1]["w"].tobytes()}


KILLED = """
import os, signal, sys
import dcr_store
from dcr_store import events

def die(event):
    if event.name == "export.built":
        os.kill(os.getpid(), signal.SIGKILL)

with events.listening(die):
    dcr_store.open(sys.argv[1]).export("main@1", "main@1", sys.argv[2], format=sys.argv[3])
"""


@pytest.mark.parametrize("format", NAMES)
def test_after_a_kill_the_next_one_goes_on(store: Store, tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "store", out, format], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(written(out)) == 1, "what it was building"
    store.export("main@0", "main", out, format=format)
    assert written(out) == list(NAMES[format])
    for number, state in enumerate(STATES):
        found = read_checkpoint(out / f"main@{number}") if format == "safetensors" else receive(out, number)
        assert found == {"w": state["w"].tobytes()}


def test_a_lock_that_cannot_be_taken(store: Store, tmp_path: Path) -> None:
    (tmp_path / "out" / LOCK).mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot be locked"):
        store.export("main@0", "main", tmp_path / "out")
    assert written(tmp_path / "out") == []
