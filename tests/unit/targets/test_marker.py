"""The lock and the marker of a target: exclusive, torn by nothing, readable whatever is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dcr_store import events
from dcr_store.errors import ConflictError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.targets.marker import Marker, Unreadable, lock, read_marker, write_marker

CLEAN = Marker("clean", "5" * 32, "main@3", "main@4", "a" * 64, "b" * 64, "c" * 64)
DIRTY = Marker("dirty", "5" * 32, None, "main@5", "d" * 64)


def python(code: str, *arguments: Any) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]


@pytest.mark.parametrize("marker", [CLEAN, DIRTY])
def test_there_and_back(tmp_path: Path, marker: Marker) -> None:
    assert read_marker(tmp_path) is None
    write_marker(tmp_path, DIRTY)
    write_marker(tmp_path, marker)
    assert read_marker(tmp_path) == marker
    assert [path.name for path in (tmp_path / ".dcr").iterdir()] == ["marker.json"]


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    write_marker(tmp_path, CLEAN)
    path = tmp_path / ".dcr" / "marker.json"
    body = json.loads(path.read_bytes())["body"]
    path.write_bytes(canonical.seal_body({**body, "later": [1]}))
    assert read_marker(tmp_path) == CLEAN


def body(**fields: Any) -> bytes:
    valid = {"format": "dcr-target", **asdict(CLEAN)}
    return canonical.seal_body({name: value for name, value in {**valid, **fields}.items() if value != "gone"})


def test_the_body_below_is_valid(tmp_path: Path) -> None:
    (tmp_path / ".dcr").mkdir()
    (tmp_path / ".dcr" / "marker.json").write_bytes(body())
    assert read_marker(tmp_path) == CLEAN


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 300,
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"state":"clean"}',
        body()[:-1],
        body().replace(b"main@4", b"main@5"),
        body(format="dcr-log"),
        body(state="half"),
        body(state=None),
        body(target="gone"),
        body(root=7),
        body(base=["main@1"]),
        body(layout=3),
        b'{"body":{"a":1e999},"sha256":"0"}',
        b'{"body":{"a":"\\ud800"},"sha256":"0"}',
        b'{"body":{"a":1,"a":2},"sha256":"0"}',
        b"[" * 60_000,
        body(layout="gone"),
    ],
)
def test_torn_and_foreign_markers_are_unreadable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".dcr").mkdir()
    (tmp_path / ".dcr" / "marker.json").write_bytes(content)
    result = read_marker(tmp_path)
    assert isinstance(result, Unreadable)
    assert result.reason
    write_marker(tmp_path, CLEAN)
    assert read_marker(tmp_path) == CLEAN


def test_a_marker_too_large_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / ".dcr").mkdir()
    (tmp_path / ".dcr" / "marker.json").write_bytes(body(padding="x" * 70_000))
    assert read_marker(tmp_path) == Unreadable("the marker has over 65536 bytes")


def test_every_torn_prefix_is_unreadable(tmp_path: Path) -> None:
    write_marker(tmp_path, CLEAN)
    path = tmp_path / ".dcr" / "marker.json"
    whole = path.read_bytes()
    for nbytes in range(len(whole)):
        path.write_bytes(whole[:nbytes])
        assert isinstance(read_marker(tmp_path), Unreadable)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    path.with_name("other").write_bytes(body())
    path.symlink_to("other")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_directory, make_link, make_pipe])
def test_what_is_no_file_is_unreadable(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / ".dcr").mkdir()
    make(tmp_path / ".dcr" / "marker.json")
    assert isinstance(read_marker(tmp_path), Unreadable)


def test_directories_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_marker(tmp_path / "missing")
    with pytest.raises(NotFoundError):
        write_marker(tmp_path / "missing", CLEAN)
    (tmp_path / ".dcr").touch()
    assert read_marker(tmp_path) is None
    for action in (lambda: write_marker(tmp_path, CLEAN), lambda: lock(tmp_path).__enter__()):
        with pytest.raises(StorageError, match="cannot be made"):
            action()
    (tmp_path / ".dcr").unlink()
    (tmp_path / ".dcr").symlink_to(tmp_path)
    for action in (lambda: write_marker(tmp_path, CLEAN), lambda: lock(tmp_path).__enter__()):
        with pytest.raises(InvalidInputError, match="is a link"):
            action()
    with pytest.raises(InvalidInputError, match="is a link"):
        read_marker(tmp_path)


class Crash(BaseException):
    """Ends the operation at a point, as a kill would."""


@pytest.mark.parametrize(
    ("point", "after"),
    [("target.marker.stored", DIRTY), ("target.marker.renamed", CLEAN), ("target.marker.durable", CLEAN)],
)
def test_stopped_at_every_point(tmp_path: Path, point: str, after: Marker) -> None:
    def stop(event: events.Event) -> None:
        if event.name == point:
            raise Crash

    write_marker(tmp_path, DIRTY)
    with events.listening(stop), pytest.raises(Crash):
        write_marker(tmp_path, CLEAN)
    assert read_marker(tmp_path) == after
    write_marker(tmp_path, CLEAN)
    assert read_marker(tmp_path) == CLEAN


def test_killed_while_writing_it_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    code = """
        import sys
        from dcr_store.targets.marker import Marker, write_marker
        markers = [Marker("dirty", "5" * 32, None, f"main@{i}", str(i) * 64) for i in range(2)]
        while True:
            for marker in markers:
                write_marker(sys.argv[1], marker)
                print(flush=True)
    """
    for delay_s in (0.0, 0.003, 0.008, 0.02):
        with subprocess.Popen(python(code, tmp_path), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay_s)
            process.kill()
        marker = read_marker(tmp_path)
        assert isinstance(marker, Marker)
        assert marker.root == marker.target[-1] * 64


def test_a_full_disk_leaves_the_old_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_marker(tmp_path, DIRTY)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        write_marker(tmp_path, CLEAN)
    assert read_marker(tmp_path) == DIRTY


def test_the_order_of_writing_a_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File before its name, name before its directory's end: else a power loss leaves an empty marker."""
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def spy_fsync(fd: int) -> None:
        steps.append(f"fsync {Path(f'/proc/self/fd/{fd}').readlink().name}")
        fsync(fd)

    def spy_replace(path: Path, other: Path) -> Path:
        steps.append(f"rename {path.name} {other.name}")
        return replace(path, other)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    write_marker(tmp_path, CLEAN)
    assert steps == [
        f"fsync {tmp_path.name}",
        "fsync marker.json.new",
        "rename marker.json.new marker.json",
        "fsync .dcr",
    ]


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    with lock(tmp_path):
        with pytest.raises(ConflictError, match=f"process {os.getpid()}"), lock(tmp_path):
            pass
        (tmp_path / "other").mkdir()
        with lock(tmp_path / "other"):
            pass
    with lock(tmp_path):
        pass


def test_the_lock_names_its_last_holder_only(tmp_path: Path) -> None:
    (tmp_path / ".dcr").mkdir()
    (tmp_path / ".dcr" / "lock").write_text("1234567890\n")
    with lock(tmp_path):
        assert (tmp_path / ".dcr" / "lock").read_text() == f"{os.getpid()}\n"


def test_the_lock_is_released_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock(tmp_path):
        raise KeyError
    with lock(tmp_path):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = """
        import sys, time
        from dcr_store.targets.marker import lock
        with lock(sys.argv[1]):
            print("locked", flush=True)
            time.sleep(600)
    """
    with subprocess.Popen(python(code, tmp_path), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(ConflictError, match=f"process {process.pid}"), lock(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with lock(tmp_path):
            assert (tmp_path / ".dcr" / "lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_file_that_was_removed_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    flock, calls = fcntl.flock, []

    def remove_first(fd: int, how: int) -> None:
        flock(fd, how)
        calls.append(fd)
        if len(calls) == 1:
            (tmp_path / ".dcr" / "lock").unlink()

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with lock(tmp_path):
        assert len(calls) == 2
        monkeypatch.undo()
        with pytest.raises(ConflictError), lock(tmp_path):
            pass


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".dcr").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".dcr" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError), lock(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "mine"
