"""Pulls that are killed in particular places; all places, and random instants, are in ``test_kill_matrix``."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from random import Random

import pytest
from faults.conftest import Library
from faults.harms import MARKER, file_truncated
from faults.kept import Costs, Kept
from faults.processes import Nursery
from faults.scenes import SMALL, Place, Strike, assert_checkpoint, seeded

from dcr_store.errors import ConflictError


def _strike(nursery: Nursery, job: dict[str, object], strike: Strike) -> None:
    assert nursery.run(**job, kill=strike).killed


def test_a_pull_that_changed_its_mind_twice_leaves_no_files_of_the_version_between(
    nursery: Nursery, scratch: Path, checkpoints: list[Path]
) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in (checkpoints[0], checkpoints[1], checkpoints[3]):  # one file, three files, two files
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    job = {"do": "pull", "directory": str(target), **place.job}
    _strike(nursery, {**job, "version": "main@1"}, ("pull.file.moved", 2))
    _strike(nursery, {**job, "version": "main@2"}, ("pull.dirty", 1))
    nursery.finish(**job, version="main@2")
    assert_checkpoint(target, checkpoints[3])


def test_files_of_a_way_that_was_given_up_are_not_taken_for_the_old_ones(
    nursery: Nursery, scratch: Path, checkpoints: list[Path]
) -> None:
    """The version between has files of the same names as the old one, with other tensors in them."""
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in (checkpoints[3], checkpoints[5], checkpoints[0]):  # two files, two files alike, one file
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    job = {"do": "pull", "directory": str(target), **place.job}
    _strike(nursery, {**job, "version": "main@1"}, ("pull.file.moved", 1))
    _strike(nursery, {**job, "version": "main@0"}, ("pull.dirty", 1))
    nursery.finish(**job, version="main@2")
    assert_checkpoint(target, checkpoints[0])


@pytest.mark.parametrize("point", ["pull.file.removed", "target.marker.durable", "pull.file.moved"])
def test_a_pull_that_lost_its_marker_and_is_killed(
    nursery: Nursery, scratch: Path, checkpoints: list[Path], point: str
) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in checkpoints[:4]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@1")
    (target / MARKER).unlink()
    file_truncated(target, target, seeded("lost"))
    job = {"do": "pull", "directory": str(target), "version": "main@3", **place.job}
    nursery.run(**job, kill=[point, 1])
    nursery.finish(**job)
    assert_checkpoint(target, checkpoints[3])


def test_a_forced_pull_that_is_killed_is_finished_without_force(
    nursery: Nursery, scratch: Path, checkpoints: list[Path]
) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoints[3])
    target = shutil.copytree(checkpoints[6], scratch / "target")  # model.safetensors, which loaders take first
    job = {"do": "pull", "directory": str(target), **place.job}
    refused = nursery.run(**job)
    assert (refused.ok, refused.kind) == (False, "invalid-input")
    _strike(nursery, {**job, "force": True}, ("pull.dirty", 1))
    nursery.finish(**job)
    assert store.compare_directory("main", target).ok
    assert not (target / "model.safetensors").exists()


def test_nothing_that_is_right_is_fetched_again(nursery: Nursery, scratch: Path, checkpoints: list[Path]) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in checkpoints[:2]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    whole = store.pull(scratch / "whole", "main@0").nbytes_fetched
    target = scratch / "target"
    job = {"do": "pull", "directory": str(target), "version": "main@0", **place.job}
    _strike(nursery, job, ("pull.replayed", 1))
    (target / MARKER).unlink()
    outcome = nursery.finish(**job)
    assert outcome.told["nbytes_fetched"] < whole / 10  # side files only
    assert outcome.told["chunks_written"] == 0
    assert_checkpoint(target, checkpoints[0])


def test_chunks_of_a_newer_version_beside_torn_ones_are_not_worth_masks(
    nursery: Nursery, library: Library, scratch: Path, checkpoints: list[Path]
) -> None:
    """Partitions that are fetched to rebuild torn chunks hold what those beside need; going back would cost more."""
    place = library.place("directory", "checkpoints")
    kept, costs = Kept(place, checkpoints, scratch, "pull"), Costs(place.open())
    kept.set_out(4)
    kept.start = None  # what leads back to the old version is not to be counted
    kept.reset()
    _strike(nursery, kept.job(5), ("pull.staged", 1))
    kept.harm(_a_byte_of_each_partition, seeded("torn"))
    limits = kept.limits(costs, 1)
    told = nursery.finish(**kept.job(1)).told
    kept.assert_done(1)
    assert limits is not None
    assert told["chunks_written"] == limits[0]
    assert told["nbytes_fetched"] <= limits[1]
    assert 0 < told["chunks_healed"] < told["chunks_written"], "some were of a newer version"


def _a_byte_of_each_partition(target: Path, old: Path, rng: Random) -> None:
    for weights in target.glob("*.safetensors"):
        data = bytearray(weights.read_bytes())
        for place in range(8 + int.from_bytes(data[:8], "little"), len(data), SMALL["partition_nbytes"]):
            data[place] ^= 1
        weights.write_bytes(data)


def test_two_pulls_of_one_directory(nursery: Nursery, scratch: Path, checkpoints: list[Path]) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in checkpoints[1:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0")
    job = {"do": "pull", "directory": str(target), **place.job}
    first = nursery.start(**job, stop=["replay.chunk.before", 5])
    first.wait_stopped()
    second = nursery.run(**job, version="main@0")
    assert (second.ok, second.kind) == (False, ConflictError.kind)
    assert str(first.pid) in second.message
    first.signal(signal.SIGCONT)
    assert first.wait().ok
    assert_checkpoint(target, checkpoints[2])
    nursery.finish(**job, version="main@0")
    assert_checkpoint(target, checkpoints[1])
