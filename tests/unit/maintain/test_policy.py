"""maintain.policy: when an anchor is due."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dcr_store
from dcr_store.errors import InvalidInputError


def test_an_anchor_is_due_by_number_or_by_cost() -> None:
    store = dcr_store.create("memory://policy", chunk_elements=64)
    bits = np.random.default_rng(0).integers(0, 1 << 16, 20_000).astype(np.uint16)
    for number in range(4):
        bits = bits.copy()
        bits[number] ^= 1
        with store.begin() as transaction:
            transaction.write("w", bits)
    assert store.anchor_if_due(every=4) is None
    sizes = [version.nbytes for version in store.log("main")]
    cost = sum(sizes) / sizes[0]
    assert store.anchor_if_due(cost=cost) is None
    made = store.anchor_if_due(every=4, cost=cost - 0.01)
    assert made is not None
    assert (made.version, made.base) == ("main@3", None)
    assert store.anchor_if_due(every=1, cost=1.0) is None, "its way begins at the head itself"
    np.testing.assert_array_equal(store.read("main@3")["w"], bits)
    made = store.anchor_if_due(every=3)
    assert made is None


@pytest.mark.parametrize(
    "keep",
    [{"older_than_s": float("nan")}, {"older_than_s": -1.0}, {"keep_last": 0}, {"keep_every": 0}, {"keep_last": 1.5}],
)
def test_numbers_by_which_nothing_can_be_kept_are_refused(tmp_path: Path, keep: dict[str, float]) -> None:
    store = dcr_store.create(tmp_path / "store", chunk_elements=64)
    with pytest.raises(InvalidInputError, match="no versions to keep"):
        store.expire(**keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("grace_s", [float("nan"), float("inf"), -1])
def test_a_grace_period_that_is_none_is_refused(tmp_path: Path, grace_s: float) -> None:
    store = dcr_store.create(tmp_path / "store", chunk_elements=64)
    with pytest.raises(InvalidInputError, match="grace"):
        store.gc(grace_s=grace_s)


@pytest.mark.parametrize("numbers", [{"every": 0}, {"cost": 0.5}, {"cost": float("nan")}])
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, numbers: dict[str, float]) -> None:
    store = dcr_store.create(tmp_path / "store", chunk_elements=64)
    with pytest.raises(InvalidInputError, match="no anchor can be made so often"):
        store.anchor_if_due(**numbers)  # type: ignore[arg-type]
