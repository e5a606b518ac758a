"""Fixtures that all tests share: real servers, made once, and the snapshots."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from servers import SeaweedS3
from states import real_snapshots, series, write_hf

# How long an example takes says how loaded the machine is.
hypothesis.settings.register_profile("dcr", deadline=None)
hypothesis.settings.load_profile("dcr")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Lengths of what can be run for as long as one likes."""
    group = parser.getgroup("dcr_store")
    group.addoption("--seeds", type=int, default=20_000, help="how many seeds tests/sim runs")
    group.addoption("--soak-seconds", type=float, default=20, help="how long tests/faults/test_soak.py lives")
    group.addoption("--first-seed", type=int, default=0, help="the first of them")


# What takes long, in this order: begun first, so that the end of a run on several cores is made of what is short.
LONGEST = (
    "sim/test_simulation.py",
    "stateful/test_history.py",
    "e2e/test_cli.py",
    "faults/test_storage_failures.py",
    "property/test_roundtrip.py",
    "faults/test_soak.py",
    "unit/receive/test_copying.py",
    "property/test_discovery.py",
    "faults/test_upkeep_races.py",
    "native/test_hostile_loaders.py",
    "unit/publish/test_baseline.py",
    "unit/publish/test_joint.py",
    "objects/test_port.py",
    "faults/test_damage.py",
    "faults/test_field_receivers.py",
    "e2e/test_demo.py",
    "unit/test_hostile.py",
    "stateful/test_joint.py",
    "test_site.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long. xdist keeps the order where it is told to: ``--no-loadscope-reorder``."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), "LONGEST names files that are not there"
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Keep what is there by now, torch and all tests, out of later collections of garbage: it takes long to walk."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedS3]:
    """A real S3 server on loopback."""
    with SeaweedS3() as server:
        yield server


@pytest.fixture(scope="session")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one training run, in order: the real ones where present, else made."""
    out = tmp_path_factory.mktemp("snapshots")
    return real_snapshots(out) or [write_hf(out / f"step{i}", state, step=i) for i, state in enumerate(series(6))]
