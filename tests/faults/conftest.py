"""Fixtures of the fault tests: the nursery of children, a fast scratch directory, checkpoints, places of stores."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.processes import Nursery
from faults.scenes import Place, make_checkpoints
from servers import FaultProxy, SeaweedS3

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where children come from."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: what a killed process wrote survives there as on a disk."""
    root = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="dcr-faults-", dir=root))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one run; see ``make_checkpoints``."""
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def whole_requests(seaweed: SeaweedS3) -> Iterator[FaultProxy]:
    """A proxy before the S3 server that passes on whole requests only.

    SeaweedFS takes a request whose sender dies before the body for one with an empty body, and stores that; S3 itself
    stores nothing. See ``test_puts_say_what_their_body_is``.
    """
    with FaultProxy(seaweed.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, scratch: Path) -> Place:
    """Where a store may be made."""
    if request.param == "directory":
        return Place(str(scratch / "store"))
    seaweed: SeaweedS3 = request.getfixturevalue("seaweed")
    proxy: FaultProxy = request.getfixturevalue("whole_requests")
    return Place(seaweed.new_url(), seaweed.options_at(proxy.endpoint_url), seaweed.storage_options)
