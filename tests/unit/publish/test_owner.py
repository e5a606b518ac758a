"""Owners: one name a process, and death only where it is certain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcr_store.publish import owner

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def of_child(code: str = "") -> tuple[str, int]:
    """Return the default owner of a process that has ended, and its pid."""
    child = subprocess.run(
        [sys.executable, "-c", f"from dcr_store.publish import owner; print(owner.default_owner()); {code}"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    text = child.stdout.strip()
    return text, int(text.split(":")[4])


def test_this_process_is_alive() -> None:
    mine = owner.default_owner()
    assert mine == owner.default_owner(), "the same for the whole process"
    assert mine.split(":")[4] == str(os.getpid())
    assert not owner.is_dead(mine)


def test_a_process_that_has_ended_is_dead() -> None:
    theirs, _ = of_child()
    assert owner.is_dead(theirs)
    assert theirs != owner.default_owner()


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    parts = owner.default_owner().split(":")
    parts[4] = str(child.pid)
    parts[5] = owner._start_time(child.pid) or "0"
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is not None
    assert owner.is_dead(":".join(parts))
    child.wait()


def test_a_process_that_proc_does_not_show_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    # hidepid, or too many open files: /proc shows nothing, but the process is there.
    mine = owner.default_owner()
    monkeypatch.setattr(owner, "_start_time", lambda pid: None)
    assert not owner.is_dead(mine)


def test_a_living_child_is_not_dead() -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from dcr_store.publish import owner; print(owner.default_owner(), flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        theirs = child.stdout.readline().strip()
        assert not owner.is_dead(theirs)
        child.communicate("\n")
    assert owner.is_dead(theirs)


def test_a_fork_is_another_owner() -> None:
    _, pid = of_child()
    script = (
        "import os, sys; from dcr_store.publish import owner; one = owner.default_owner(); sys.stdout.flush();\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    assert owner.default_owner() != one; assert not owner.is_dead(one); os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert pid > 0


def test_another_process_with_the_same_pid_is_not_the_owner() -> None:
    """The pid was used again: the start time tells."""
    parts = owner.default_owner().split(":")
    parts[5] = str(int(parts[5]) - 1)
    assert owner.is_dead(":".join(parts))


@pytest.mark.parametrize("place", [1, 2, 3], ids=["host", "boot", "pid namespace"])
def test_elsewhere_nothing_is_known(place: int) -> None:
    theirs, _ = of_child()
    parts = theirs.split(":")
    parts[place] = "elsewhere"
    assert not owner.is_dead(":".join(parts))


@pytest.mark.parametrize("place", [2, 3, 4, 5])
def test_what_is_not_known_is_not_dead(place: int) -> None:
    theirs, _ = of_child()
    parts = theirs.split(":")
    parts[place] = "unknown"
    assert not owner.is_dead(":".join(parts))


@pytest.mark.parametrize(
    "text", ["", "run-17", "process", ":" * 6, "process:a:b:c:d:e:f", "slurm:1:2:3:4:5:6", "process:::::", "x" * 10_000]
)
def test_any_text_may_be_an_owner(text: str) -> None:
    assert not owner.is_dead(text)


def test_systems_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc nobody is dead, and owners still differ."""
    theirs, _ = of_child()

    def fail(self: Path, *args: object) -> str:
        raise FileNotFoundError

    owner._default_owner.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        patch.setattr(Path, "stat", fail)
        mine = owner.default_owner()
        assert "unknown" in mine
        assert not owner.is_dead(mine)
        assert not owner.is_dead(theirs)
    owner._default_owner.cache_clear()
