"""Storage that fails, at every call: a clean error that says what to do, and the plain rerun ends right."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.failing import FailingObjects, over, publish
from faults.scenes import OCCURRENCES, Place, assert_checkpoint, seeded

from dcr_store.errors import ConflictError, DcrError, OutcomeUnknownError, StorageError
from dcr_store.objects.open import open_objects
from dcr_store.publish import partitions

CAMPAIGN = OCCURRENCES > 1

# A target that cannot be opened whole leaves the files that it has opened to the collector of garbage.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Let the collector come by before the next test does."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be several partitions and entries of the journal in what is small."""
    monkeypatch.setattr(partitions, "PARTITION_NBYTES", 4096)
    monkeypatch.setattr(partitions, "JOURNAL_PARTITIONS", 2)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, checkpoints: list[Path]) -> Path:
    """A directory with a store of three versions, and with a baseline of it."""
    place = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch, Place(str(place / "whole")).create() as store:
        patch.setattr(partitions, "PARTITION_NBYTES", 4096)
        patch.setattr(partitions, "JOURNAL_PARTITIONS", 2)
        for checkpoint in checkpoints[:3]:
            with store.begin(baseline=place / "whole-baseline") as transaction:
                transaction.write_checkpoint(checkpoint)
    return place


@pytest.fixture
def published(scratch: Path, template: Path) -> Path:
    """That store and its baseline, for one test."""
    shutil.copytree(template, scratch, dirs_exist_ok=True)
    return scratch / "whole"


def numbers(n_calls: int, n_chosen: int, *of: object) -> range:
    """Return the calls to fail: at most `n_chosen` of them, others with each seed; in a campaign all."""
    step = 1 if CAMPAIGN else max(1, -(-n_calls // n_chosen))
    return range(seeded("calls", *of).randrange(step), n_calls, step)


@pytest.mark.parametrize(("lasting", "late"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("goal", [1, 5])
def test_every_call_of_a_publish_fails(
    scratch: Path, checkpoints: list[Path], published: Path, lasting: bool, late: bool, goal: int
) -> None:
    """`goal` 1 is a delta, 5 another layout and so an anchor."""

    def attempt(at: int | None) -> tuple[FailingObjects, DcrError | None]:
        for name in ("", "-baseline"):
            shutil.rmtree(scratch / f"store{name}", ignore_errors=True)
            shutil.copytree(scratch / f"whole{name}", scratch / f"store{name}")
        objects = FailingObjects(open_objects(scratch / "store"), at, lasting, late)
        with over(objects) as store:
            try:
                publish(store, checkpoints[goal], scratch / "store-baseline")
            except DcrError as error:
                return objects, error
        return objects, None

    counted, error = attempt(None)
    assert error is None
    for at in numbers(counted.n_calls, 3, goal, lasting, late):
        objects, error = attempt(at)
        told = f"call {at}, {objects.failed[0]}: {error!r}"
        with over(open_objects(scratch / "store")) as store:
            before = store.log()
            if error is None:
                # Hints are no part of the version.
                assert all("latest.json" in call or "checkpoints" in call for call in objects.failed), told
            else:
                assert not isinstance(error, ConflictError), told
                assert error.key, told
                if len(before) == 4:
                    assert isinstance(error, OutcomeUnknownError), f"committed, and a failure was told: {told}"
            publish(store, checkpoints[goal], scratch / "store-baseline")
            assert len(store.log()) == len(before) + 1, told
            shutil.rmtree(scratch / "target", ignore_errors=True)
            store.pull(scratch / "target")
            assert_checkpoint(scratch / "target", checkpoints[goal])
            report = store.verify(deep=True)
            assert report.ok, (told, report.problems)


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(("start", "goal"), [(None, 2), (0, 2), (1, 2)])
def test_every_call_of_a_pull_fails(
    scratch: Path, checkpoints: list[Path], published: Path, lasting: bool, start: int | None, goal: int
) -> None:
    whole = open_objects(published)
    if start is not None:
        over(whole).pull(scratch / "start", f"main@{start}")

    def attempt(at: int | None) -> tuple[FailingObjects, DcrError | None]:
        shutil.rmtree(scratch / "target", ignore_errors=True)
        if start is not None:
            shutil.copytree(scratch / "start", scratch / "target")
        objects = FailingObjects(whole, at, lasting)
        try:
            over(objects).pull(scratch / "target", f"main@{goal}")
        except DcrError as error:
            return objects, error
        return objects, None

    counted, error = attempt(None)
    assert error is None
    for at in numbers(counted.n_calls, 3, start, goal, lasting):
        objects, error = attempt(at)
        assert isinstance(error, StorageError), f"call {at}, {objects.failed}: {error!r}"
        assert "No space left" in str(error)
        over(whole).pull(scratch / "target", f"main@{goal}")
        assert_checkpoint(scratch / "target", checkpoints[goal])


# ---------------------------------------------------------------------- the operating system says no

CALLS = ["open", "write", "pwrite", "pwritev", "fsync", "replace", "rename", "link", "mkdir", "ftruncate", "unlink"]
CALLS += ["posix_fallocate", "pread", "preadv", "scandir", "lstat", "stat"]


class FailingCalls:
    """Fails the n-th call of a function of ``os`` that touches a directory (or any open file)."""

    def __init__(self, name: str, at: int | None, number: int, below: Path) -> None:
        self.name, self.at, self.number, self.below = name, at, number, str(below)
        self.n_calls = 0
        self.has_failed = False
        self._real: Callable[..., Any] = getattr(os, name)
        self._lock = threading.Lock()

    def _concerns(self, first: object) -> bool:
        if isinstance(first, int):
            try:
                path = str(Path(f"/proc/self/fd/{first}").readlink())
            except OSError:
                return False
        else:
            path = os.fspath(first)  # type: ignore[call-overload]
        return path.startswith(self.below)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if arguments and self._concerns(arguments[0]):
            with self._lock:
                fails = self.at is not None and self.n_calls == self.at
                self.n_calls += 1
            if fails:
                self.has_failed = True
                name = arguments[0] if not isinstance(arguments[0], int) else None
                raise OSError(self.number, os.strerror(self.number), name)
        return self._real(*arguments, **options)

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        setattr(os, self.name, self)
        try:
            yield
        finally:
            setattr(os, self.name, self._real)


def errors_of(name: str, nth: int) -> list[int]:
    """Return the errors that the `nth` call chosen is to meet: of several one after the other, in a campaign all."""
    if name in ("write", "pwrite", "pwritev", "posix_fallocate", "ftruncate"):
        both = [errno.ENOSPC, errno.EIO]
        return both if CAMPAIGN else [both[nth % 2]]
    if name in ("fsync", "pread", "preadv"):
        return [errno.EIO]
    return [errno.EACCES]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("where", ["store", "baseline"])
def test_the_disk_of_a_publish_fails(
    scratch: Path, checkpoints: list[Path], published: Path, name: str, where: str
) -> None:
    below = scratch / ("store" if where == "store" else "store-baseline")

    def attempt(goal: int, at: int | None, number: int) -> tuple[FailingCalls, DcrError | None]:
        for suffix in ("", "-baseline"):
            shutil.rmtree(scratch / f"store{suffix}", ignore_errors=True)
            shutil.copytree(scratch / f"whole{suffix}", scratch / f"store{suffix}")
        calls = FailingCalls(name, at, number, below)
        store = over(open_objects(scratch / "store"))
        with calls.injected():
            try:
                publish(store, checkpoints[goal], scratch / "store-baseline")
            except DcrError as error:
                return calls, error
            finally:
                store.close()
        return calls, None

    for goal in (1, 5):
        counted, error = attempt(goal, None, 0)
        assert error is None
        for nth, at in enumerate(numbers(counted.n_calls, 2, name, where, goal)):
            for number in errors_of(name, nth):
                error = attempt(goal, at, number)[1]
                told = f"{name} {at} of {counted.n_calls}, {errno.errorcode[number]}: {error!r}"
                with over(open_objects(scratch / "store")) as store:
                    before = store.log()
                    if error is not None:
                        assert not isinstance(error, ConflictError), told
                        assert error.key, told
                        assert len(before) == 3 or isinstance(error, OutcomeUnknownError), told
                    publish(store, checkpoints[goal], scratch / "store-baseline")
                    shutil.rmtree(scratch / "target", ignore_errors=True)
                    store.pull(scratch / "target")
                    assert_checkpoint(scratch / "target", checkpoints[goal])
                    assert len(store.log()) == len(before) + 1, told


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("start", "goal"), [(None, 2), (1, 2), (0, 1)])
def test_the_disk_of_a_pull_fails(
    scratch: Path, checkpoints: list[Path], published: Path, name: str, start: int | None, goal: int
) -> None:
    store = over(open_objects(published))
    if start is not None:
        store.pull(scratch / "start", f"main@{start}")

    def attempt(at: int | None, number: int) -> tuple[FailingCalls, DcrError | None]:
        shutil.rmtree(scratch / "target", ignore_errors=True)
        if start is not None:
            shutil.copytree(scratch / "start", scratch / "target")
        calls = FailingCalls(name, at, number, scratch / "target")
        with calls.injected():
            try:
                over(open_objects(published)).pull(scratch / "target", f"main@{goal}")
            except DcrError as error:
                return calls, error
        return calls, None

    counted, error = attempt(None, 0)
    assert error is None
    for nth, at in enumerate(numbers(counted.n_calls, 3, name, start, goal)):
        for number in errors_of(name, nth):
            error = attempt(at, number)[1]
            told = f"{name} {at} of {counted.n_calls}, {errno.errorcode[number]}: {error!r}"
            if error is None:  # there is a way round, or nothing was lost
                assert_checkpoint(scratch / "target", checkpoints[goal], own=False)
            else:
                assert error.key, told
            store.pull(scratch / "target", f"main@{goal}")
            assert_checkpoint(scratch / "target", checkpoints[goal])


# ---------------------------------------------------------------------- a disk that is really full


@pytest.fixture
def small_disk(scratch: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = scratch / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode(errors='replace').strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # a failed attempt may have files open


def fill(disk: Path, leave_nbytes: int) -> Path:
    """Fill a disk up to `leave_nbytes`; return the file that does."""
    ballast = disk / "ballast"
    free = shutil.disk_usage(disk).free
    with ballast.open("wb") as file:
        file.write(b"x" * max(0, free - leave_nbytes))
    return ballast


@pytest.mark.parametrize("what", ["store", "baseline", "target", "temporary"])
@pytest.mark.parametrize("leave_nbytes", [0, 16 << 10, 64 << 10])
def test_a_full_disk(
    scratch: Path,
    checkpoints: list[Path],
    published: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    leave_nbytes: int,
) -> None:
    place, baseline, target = published, scratch / "whole-baseline", scratch / "target"
    if what == "store":
        place = shutil.copytree(published, small_disk / "store")
    elif what == "baseline":
        baseline = small_disk / "baseline"
    elif what == "target":
        target = small_disk / "target"
    else:
        monkeypatch.setattr("tempfile.tempdir", str(small_disk))
        monkeypatch.setattr("dcr_store.publish.spool.SPOOL_NBYTES", 1)
    ballast = fill(small_disk, leave_nbytes)
    errors: list[DcrError] = []

    @contextlib.contextmanager
    def tried() -> Iterator[None]:
        try:
            yield
        except DcrError as error:
            errors.append(error)

    for goal in (3, 5):
        with over(open_objects(place)) as store:
            before = len(store.log())
            with tried():
                publish(store, checkpoints[goal], baseline)
            assert len(over(open_objects(place)).log()) in (before, before + 1)
    with tried():
        over(open_objects(published)).pull(target, "main@1")
    assert errors or leave_nbytes
    for error in errors:
        assert "No space left on device" in str(error), error
        assert error.key, error
    ballast.unlink()
    with over(open_objects(place)) as store:
        publish(store, checkpoints[3], baseline)
        publish(store, checkpoints[5], baseline)
        assert store.verify(deep=True).ok
        store.pull(target, "main")
        assert_checkpoint(target, checkpoints[5])


def test_directories_that_may_not_be_written(
    scratch: Path, checkpoints: list[Path], published: Path, tmp_path: Path
) -> None:
    """Read-only mounts say so even to root."""
    store = over(open_objects(published))
    store.pull(scratch / "target", "main@1")
    if subprocess.run(["mount", "--bind", str(scratch), str(scratch)], capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(scratch)], check=True)
        for directory in ("target", "new"):
            with pytest.raises(StorageError, match="Read-only file system") as caught:
                over(open_objects(published)).pull(scratch / directory, "main@2")
            assert str(caught.value.key).startswith(str(scratch))
        with pytest.raises(StorageError, match="baseline directory cannot be used: Read-only"):
            publish(over(open_objects(published)), checkpoints[1], scratch / "baseline")
        with pytest.raises(StorageError, match="the file system is read-only"):
            publish(over(open_objects(published)), checkpoints[1], tmp_path / "baseline")
    finally:
        subprocess.run(["umount", str(scratch)], check=True)
    store.pull(scratch / "target", "main@2")
    assert_checkpoint(scratch / "target", checkpoints[2])
