"""Temporary directories: what a killed process leaves of one is found by its lock, and removed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from dcr_store.targets import temporary
from dcr_store.targets.own_directories import LOCK


class _KilledError(BaseException):
    pass


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with files and a directory in it, whose owner has let it go."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory, descriptor = temporary.make_locked("dcr-test-")
    for name in ("a.bin", "z.bin"):
        (directory / name).write_bytes(b"x")
    (directory / "inner").mkdir()
    (directory / "inner" / "b.bin").write_bytes(b"x")
    os.close(descriptor)
    return directory


@pytest.mark.parametrize("n_removed", range(5))
def test_one_whose_removal_was_killed_is_swept_later(
    made: Path, n_removed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [n_removed]

    def killed_when_due() -> None:
        if left[0] == 0:
            raise _KilledError
        left[0] -= 1

    unlink, os_unlink = Path.unlink, os.unlink

    def unlink_path(path: Path, missing_ok: bool = False) -> None:
        killed_when_due()
        unlink(path, missing_ok)

    def unlink_in(path: str, *, dir_fd: int | None = None) -> None:
        killed_when_due()
        os_unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_path)
        patch.setattr(os, "unlink", unlink_in)
        with contextlib.suppress(_KilledError):
            temporary.remove(made)
    temporary.sweep("dcr-test-")
    assert not made.exists(), sorted(made.iterdir())


def test_one_in_use_stays(made: Path) -> None:
    used, descriptor = temporary.make_locked("dcr-test-")
    assert not made.exists(), "whoever makes one removes those of the dead"
    temporary.sweep("dcr-test-")
    assert [path.name for path in used.iterdir()] == [LOCK]
    os.close(descriptor)
    temporary.sweep("dcr-test-")
    assert not used.exists()
