"""No thread to be had: an error that says what to do, at every door of a store; afterwards everything works."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from states import assert_same, series, write_hf

import dcr_store
from dcr_store.errors import StorageError
from dcr_store.objects.threads import Threads
from dcr_store.objects.transfer import map_bounded

STACK_NBYTES = 512 << 20
SAYS = r"cannot start a thread.*raise the limits \(ulimit -u, ulimit -v"


@contextmanager
def no_threads() -> Iterator[None]:
    """Leave address space for the work, but for no stack of a thread."""
    used = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = threading.stack_size(STACK_NBYTES)
    resource.setrlimit(resource.RLIMIT_AS, (used + STACK_NBYTES // 2, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        threading.stack_size(before)


def test_a_pool() -> None:
    with no_threads():
        with Threads(2) as pool, pytest.raises(StorageError, match=SAYS):
            pool.submit(int, "3")
        with Threads(2) as pool, pytest.raises(StorageError, match=SAYS):
            list(pool.map(int, "345"))
        with pytest.raises(StorageError, match=SAYS):
            list(map_bounded(int, "345"))
    with Threads(2) as pool:
        assert list(pool.map(int, "345")) == [3, 4, 5]


def test_other_errors_of_a_pool_stay_what_they_are() -> None:
    pool = Threads(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int, "3")


def test_a_store(tmp_path: Path) -> None:
    states = series(2)
    with dcr_store.create(tmp_path / "store") as store:
        with store.begin() as transaction:
            transaction.write_checkpoint(write_hf(tmp_path / "run", states[0]))
        write_hf(tmp_path / "run", states[1], step=1)

        def publish() -> None:
            with store.begin() as transaction:
                transaction.write_checkpoint(tmp_path / "run")

        calls: dict[str, Callable[[], object]] = {
            "create": lambda: dcr_store.create(tmp_path / "other"),
            "publish": publish,
            "read": store.read,
            "pull": lambda: store.pull(tmp_path / "out"),
            "verify": store.verify,
        }
        for name, call in calls.items():
            with no_threads(), pytest.raises(StorageError, match=SAYS):
                pytest.fail(f"{name} went through: {call()}")
        publish()
        assert [info.version for info in store.log()] == ["main@0", "main@1"]
        store.pull(tmp_path / "out")
        assert_same(store.read("main@1"), states[1])
        assert store.verify(deep=True).ok


def test_s3() -> None:
    """The first thread there is the one that fsspec starts; without one a second try would wait for ever."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import s3fs, dcr_store\n"
        "from dcr_store.errors import DcrError\n"
        "from test_threads import no_threads\n"
        "for _ in range(2):\n"
        "    with no_threads():\n"
        "        try: dcr_store.open('s3://bucket/store', storage_options={'anon': True})\n"
        "        except DcrError as error: print(type(error).__name__, error)\n"
    )
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here.parent}", "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(here)],
        capture_output=True, text=True, timeout=60, env=environment, check=True,
    )  # fmt: skip
    lines = ran.stdout.splitlines()
    assert len(lines) == 2, ran
    assert all(re.match(rf"StorageError {SAYS}", line) for line in lines), lines


def test_the_command(tmp_path: Path) -> None:
    """Memory that cannot be had is one line as well."""
    dcr_store.create(tmp_path / "store")
    script = (
        "import sys, dcr_store.cli.main as cli, dcr_store\n"
        "def fail(*_, **__): raise MemoryError('Unable to allocate 8.00 GiB')\n"
        "dcr_store.open = fail\n"
        "sys.exit(cli.main(['log', sys.argv[1]]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("dcr: out of memory: Unable to allocate 8.00 GiB; raise the limit")
    assert ran.stderr.count("\n") == 1
