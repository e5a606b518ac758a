"""Verify goes on where it may not look, and says where that was."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import dcr_store
from dcr_store.cli.main import main
from dcr_store.history.report import VerifyReport

NOBODY = 65534


@contextmanager
def not_root() -> Iterator[None]:
    """Be somebody whom permissions hold back."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def place() -> Iterator[Path]:
    """A store of two lines that anybody may read, with an object that nothing refers to in each part."""
    root = Path(tempfile.mkdtemp(prefix="dcr-test-"))
    root.chmod(0o755)
    with dcr_store.create(root / "store", chunk_elements=64) as store:
        for line in ("main", "exp"):
            for i in range(3):
                with store.begin(line) as transaction:
                    transaction.write("a", np.full(1000, i))
        for directory in ("log", "versions/main", "versions/exp", "other"):
            store._objects.put(f"{directory}/stray", b"x")
    for path in [root / "store", *(root / "store").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield root / "store"
    for path in [root / "store", *(root / "store").rglob("*")]:
        path.chmod(path.stat().st_mode | 0o700)
    shutil.rmtree(root)


def verify(place: Path) -> VerifyReport:
    with not_root():
        return dcr_store.open(place).verify()


def version_of(place: Path, number: int) -> str:
    (found,) = (place / "versions" / "main").glob(f"{number:012d}-*")
    return f"versions/main/{found.name}"


def test_nothing_is_hidden(place: Path) -> None:
    report = verify(place)
    assert report.ok
    assert {"log/stray", "versions/main/stray", "versions/exp/stray", "other/stray"} <= set(report.unreferenced)


@pytest.mark.parametrize("mode", [0o000, 0o111, 0o444], ids=["nothing", "enter", "list"])
@pytest.mark.parametrize("where", ["other", "version", "journal", "versions/exp", "log/exp", "log"])
def test_a_directory_that_may_not_be_looked_at(place: Path, where: str, mode: int) -> None:
    key = {"version": version_of(place, 1), "journal": f"{version_of(place, 1)}/journal"}.get(where, where)
    (place / key).chmod(mode)
    report = verify(place)
    assert not report.ok
    assert all(problem.key.startswith(key) for problem in report.problems if "ermission" in problem.what)
    assert any("ermission" in problem.what for problem in report.problems), report.problems
    elsewhere = {"log/stray", "versions/main/stray", "versions/exp/stray", "other/stray"}
    assert {name for name in elsewhere if not name.startswith(key)} <= set(report.unreferenced)
    if where in ("other", "versions/exp"):
        assert report.versions == ["exp@0", "exp@1", "exp@2", "main@0", "main@1", "main@2"]
    if mode == 0o111 and where in ("other", "version", "journal", "versions/exp"):
        assert [problem.key for problem in report.problems] == [f"{key}/"], report.problems


def test_a_root_that_may_not_be_listed(place: Path) -> None:
    place.chmod(0o111)
    report = verify(place)
    assert [problem.key for problem in report.problems] == [str(place)]
    assert len(report.versions) == 6


def test_the_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "other").chmod(0)
    with not_root():
        assert main(["verify", str(place)]) == 1
    out, err = capsys.readouterr()
    assert "other/" in out + err
    assert "unexpected" not in err
    assert stat.S_IMODE((place / "other").stat().st_mode) == 0
