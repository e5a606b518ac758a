"""Pulls by copy on write that are killed in particular places; all places are in ``test_kill_matrix``."""

from __future__ import annotations

import signal
from pathlib import Path

from faults.kept import SideBySide
from faults.processes import Nursery
from faults.scenes import Place, assert_checkpoint

from dcr_store.errors import ConflictError


def test_what_is_right_in_a_half_built_version_is_not_fetched_again(
    nursery: Nursery, scratch: Path, versions: list[Path]
) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in versions[:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    whole = store.pull(scratch / "whole", "main@2", mode="copy").nbytes_fetched
    job = {"do": "pull", "kind": "copy", "directory": str(scratch / "target"), "version": "main@2", **place.job}
    assert nursery.run(**job, kill=["copy.replayed", 1]).killed
    outcome = nursery.finish(**job)
    assert outcome.told["nbytes_fetched"] < whole / 10  # side files only
    assert outcome.told["chunks_written"] == 0
    assert_checkpoint(scratch / "target" / "current", versions[2])


def test_two_pulls_of_one_directory(nursery: Nursery, scratch: Path, versions: list[Path]) -> None:
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in versions[1:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    store.pull(target, "main@0", mode="copy")
    job = {"do": "pull", "kind": "copy", "directory": str(target), **place.job}
    first = nursery.start(**job, stop=["replay.chunk.before", 5])
    first.wait_stopped()
    second = nursery.run(**job, version="main@0")
    assert (second.ok, second.kind) == (False, ConflictError.kind)
    assert str(first.pid) in second.message
    assert_checkpoint(target / "current", versions[1])
    first.signal(signal.SIGCONT)
    assert first.wait().ok
    assert_checkpoint(target / "current", versions[2])


def test_a_process_that_was_killed_holds_no_version(nursery: Nursery, scratch: Path, versions: list[Path]) -> None:
    """What a killed puller had begun to remove is gone after the next run, and a dead reader is in nobody's way."""
    place = Place(str(scratch / "store"))
    store = place.create()
    for checkpoint in versions[:3]:
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
    target = scratch / "target"
    job = {"do": "pull", "kind": "copy", "directory": str(target), "keep": 0, **place.job}
    nursery.finish(**job, version="main@0")
    assert nursery.run(**job, version="main@1", kill=["copy.version.retired", 1]).killed
    assert list((target / ".dcr" / "removed").iterdir())
    nursery.finish(**job, version="main@1")
    SideBySide(place, versions, scratch, "pull").assert_tidy({1})
    assert_checkpoint(target / "current", versions[1])
