"""What ``show`` tells of a version, also of one that has expired, and of one that a fork shares."""

from __future__ import annotations

import secrets

import numpy as np

import dcr_store
from dcr_store.cli import render
from dcr_store.store import Store


def store_of(*values: int) -> Store:
    store = dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64)
    for value in values:
        with store.begin(message=f"of {value}") as transaction:
            transaction.write("a", np.full(10, value, np.int32))
    return store


def test_of_a_version_that_has_expired_the_log_and_the_layout_tell() -> None:
    with store_of(1, 2, 3) as store:
        before = store.show("main@0")
        store.expire()
        for _ in range(2):  # whether its objects are there or not
            found = store.show("main@0")
            assert not found.info.is_kept
            assert (found.info.root, found.tensors, found.files) == (before.info.root, before.tensors, [])
            assert found.to_json()["kept"] is False
            assert render.detail(found).startswith("version      main@0 (expired)")
            store.gc(grace_s=0)
    assert "expired" not in render.detail(before)


def test_of_a_fork_what_its_parent_says_at_length_is_read_there() -> None:
    with store_of(1) as store:
        with store.begin(metadata={"note": "x" * 5000}, message="at length") as transaction:
            transaction.write("a", np.full(10, 2, np.int32))
        for value in range(8):  # until a log checkpoint leaves it out
            with store.begin() as transaction:
                transaction.write("a", np.full(10, value, np.int32))
        store.fork("main", "exp")
        with dcr_store.open(store.url) as other:
            assert other.show("exp@1").info.message == "at length"
