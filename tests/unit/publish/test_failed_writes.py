"""What cannot be taken whole cannot be committed; memory that was used again is not a tie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dcr_store
from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.publish.state import StateWriter


@pytest.fixture
def store(tmp_path: Path) -> dcr_store.Store:
    return dcr_store.create(tmp_path / "store", chunk_elements=64)


def test_a_write_that_failed_half_way_cannot_be_committed(
    store: dcr_store.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = store.begin()
    tx.write("a", np.arange(10, dtype=np.float32))

    def fail(self: StateWriter, *args: object, **options: object) -> None:
        raise StorageError("the disk is full", key="b")

    with monkeypatch.context() as patch:
        patch.setattr(StateWriter, "write", fail)
        with pytest.raises(StorageError, match="the disk is full"):
            tx.write("b", np.arange(10, dtype=np.float32))
    with pytest.raises(InvalidInputError, match="part of it could not be taken"):
        tx.commit()
    tx.abort()
    assert store.log() == []
    with store.begin() as again:
        again.write("a", np.zeros(3))
    assert store.log()[0].version == "main@0"


def test_a_commit_that_lost_a_chunk_is_not_tried_again(store: dcr_store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    state = np.arange(1000, dtype=np.float32)
    with store.begin() as tx:
        tx.write("a", state)
    tx = store.begin()
    failed = []

    def fail(codec: object, space: str, chunk: int, *rest: object) -> object:
        failed.append(chunk)
        raise StorageError("the baseline cannot be read", key=str(chunk))

    with monkeypatch.context() as patch:
        patch.setattr("dcr_store.publish.state.encode_delta", fail)
        with pytest.raises(StorageError):  # noqa: PT012 - whichever of the two notices first
            tx.write("a", state + 1)
            tx.commit()
    assert failed
    with pytest.raises(InvalidInputError, match="begin again"):
        tx.commit()
    tx.abort()
    assert len(store.log()) == 1


def test_temporaries_at_one_address_are_not_tied(store: dcr_store.Store) -> None:
    with store.begin() as tx:
        for i in range(6):
            tx.write(f"n{i}", np.ones(1000, np.float32))
    assert store.show("main@0").n_tensors == 6
    kept = np.ones(1000, np.float32)
    with store.begin("other") as tx:
        tx.write("a", kept)
        tx.write("b", kept[:])
    assert store.show("other@0").n_tensors == 1
