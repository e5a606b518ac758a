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
from servers import SeaweedS3

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


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, scratch: Path) -> Place:
    """Where a store may be made."""
    if request.param == "directory":
        return Place(str(scratch / "store"))
    seaweed: SeaweedS3 = request.getfixturevalue("seaweed")
    return Place(seaweed.new_url(), seaweed.storage_options, seaweed.storage_options)
