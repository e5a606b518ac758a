"""Verify looks at groups too: damage, holes, versions that are not there, acknowledgements that are gone."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
import pytest

import dcr_store
from dcr_store.format.groups import VersionRoot
from dcr_store.format.names import group_checkpoint_key, group_record_key
from dcr_store.receive.member import Member
from dcr_store.store import Store


@pytest.fixture
def store() -> Store:
    """A store of two versions, of which a group of one has promoted the first, and then the second."""
    store = dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64)
    store.create_group("eu", ["a"])
    member = Member(store._catalog, "eu", "a", incarnation="a" * 16)
    member.join()
    for number in range(2):
        with store.begin() as transaction:
            transaction.write("w", np.full(100, number, np.int32))
        wanted = member.step().prepare
        assert wanted is not None
        member.prepared(wanted, None, wanted.root)
        assert member.try_promote()
    return store


def test_a_sound_group(store: Store) -> None:
    report = store.verify()
    assert (report.problems, report.unreferenced) == ([], [])
    assert report.n_objects == len(store._objects.list(""))


ACK = f"groups/eu/acks/main@1/prepared/a.{'a' * 16}.{4:020d}.json"


@pytest.mark.parametrize(
    ("key", "damage", "says"),
    [
        (group_record_key("eu", 2), lambda data: data[:-1], "is not a JSON document"),
        (group_record_key("eu", 2), lambda data: data.replace(b'_at":"2', b'_at":"1'), "hash chain is broken"),
        (group_record_key("eu", 2), None, "the group record is missing"),
        (group_record_key("eu", 5), None, "the group record is missing"),
        (group_checkpoint_key("eu"), lambda data: data[:-3], "checkpoint cannot be used; delete it"),
        (ACK, None, "no such object"),
        (ACK, lambda data: data.replace(b"null", b"nul "), "the stored object is damaged"),
    ],
)
def test_damage_is_named(store: Store, key: str, damage: Callable[[bytes], bytes] | None, says: str) -> None:
    if damage is None:
        store._objects.delete(key)
    else:
        store._objects.put(key, damage(store._objects.get(key)))
    (problem,) = dcr_store.open(store.url).verify().problems
    assert says in problem.what
    where = group_record_key("eu", 3) if "chain" in says else key
    assert problem.key == where


def test_a_version_that_the_line_does_not_have(store: Store) -> None:
    store.group("eu")._log.propose(VersionRoot("main@1", "0" * 64))
    (problem,) = store.verify().problems
    assert problem.key == group_record_key("eu", 6)
    assert "which its line does not have" in problem.what
