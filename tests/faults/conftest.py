"""Fixtures of the fault tests: the nursery of children, a fast scratch directory, checkpoints, places of stores."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from faults.processes import Nursery
from faults.scenes import Place, behind_relay, make_checkpoints, model_series
from servers import SeaweedS3
from states import write_hf

from dcr_store.publish import partitions

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where children come from."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture(scope="session")
def torch_nursery() -> Iterator[Nursery]:
    """Where children come from that have imported torch."""
    pytest.importorskip("torch")
    with Nursery("torch") as nursery:
        yield nursery


@contextmanager
def _temporary() -> Iterator[Path]:
    root = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="dcr-faults-", dir=root))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: what a killed process wrote survives there as on a disk."""
    with _temporary() as directory:
        yield directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one run; see ``make_checkpoints``."""
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one run in files of unchanging headers.

    Few tensors change, then all, then a tensor is added, and then the files are other ones.
    """
    root = tmp_path_factory.mktemp("versions")
    states = model_series(4, seed=3)
    states[1] = {**states[0], "norm.weight": states[1]["norm.weight"], "scale": states[1]["scale"]}
    states[3] = {**states[2], "extra.weight": np.arange(500, dtype=np.float32)}
    found = [write_hf(root / f"version{i}", state, 4) for i, state in enumerate(states)]
    found.append(write_hf(root / "version4", states[3], 2))
    for number, place in enumerate(found):
        (place / "generation.json").write_text(json.dumps({"temperature": number // 2}))
    (found[1] / "tokenizer" / "merges.txt").write_text("a b\n")
    return found


def _new_place(where: str, directory: Path, request: pytest.FixtureRequest) -> Place:
    if where.endswith("s3"):
        seaweed: SeaweedS3 = request.getfixturevalue("seaweed")
        return Place(seaweed.new_url(), seaweed.storage_options, seaweed.storage_options)
    return Place(str(directory))


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Place]:
    """Where a store may be made: ``directory``, ``s3``, ``relay``, ``relay to s3``."""
    place = _new_place(request.param, scratch / "store", request)
    if request.param.startswith("relay"):
        with behind_relay(place, scratch / "relay") as relayed:
            yield relayed
    else:
        yield place


class Library:
    """Stores that are only read, made once, with a version of each checkpoint of a series, in small partitions."""

    def __init__(self, request: pytest.FixtureRequest, root: Path) -> None:
        self._request, self._root = request, root
        self._places: dict[tuple[str, str], Place] = {}

    def place(self, where: str, series: str) -> Place:
        """Return where the store of a series is: in a ``directory`` or in ``s3``."""
        if (where, series) not in self._places:
            place = _new_place(where, self._root / f"{where}-{series}", self._request)
            with place.create() as store, patch.object(partitions, "PARTITION_NBYTES", 2048):
                for checkpoint in self._request.getfixturevalue(series):
                    with store.begin() as transaction:
                        transaction.write_checkpoint(checkpoint)
            self._places[where, series] = place
        return self._places[where, series]


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """See ``Library``."""
    with _temporary() as root:
        yield Library(request, root)
