"""maintain.ranges: a fold over masks and overwrites is the change that they are one after the other."""

from __future__ import annotations

import secrets

import numpy as np

import dcr_store
from dcr_store.layout import slices

N = 150
SHAPES = {"w": ("F32", (N,))}


def test_masks_before_and_after_overwrites_are_composed() -> None:
    """Elements 0 to 59 are overwritten and then get a mask, 60 to 99 are overwritten with what they were, or zero."""
    store = dcr_store.create(f"memory://folds-{secrets.token_hex(8)}", chunk_elements=64)
    other = dcr_store.open(store.url)
    rng = np.random.default_rng(5)
    bits = [rng.integers(0, 2**32, N, dtype=np.uint32) for _ in range(5)]
    for new, old in zip(bits[1:], bits, strict=False):
        new[100:] = old[100:]
    bits[3][60:80], bits[3][80:100] = bits[2][60:80], 0
    bits[4][60:100] = bits[3][60:100]
    for number, state in enumerate(bits):
        values = state.view(np.float32)
        first = store.begin(owner="run", writers=("w0", "w1"), tensors=SHAPES)
        second = other.join(first.txid, writer="w1", timeout_s=5)
        if number in (2, 3):
            first.write_residual("w", values[:100], 0)
        else:
            first.write_slice(values[:100], slices.flat_part("w", "F32", (N,), 0, 100))
        second.write_slice(values[100:], slices.flat_part("w", "F32", (N,), 100, N))
        second.seal()
        first.commit(timeout_s=5)
        second.commit(timeout_s=5)
    assert store.fold("main@1", "main@4").base == "main@1"
    for number in (1, 4):
        store.pin(f"main@{number}", f"p{number}")
    assert store.expire().versions == ("main@0", "main@2", "main@3")
    store.gc(grace_s=0)
    fresh = dcr_store.open(store.url)
    assert fresh._catalog.path(fresh._catalog.resolve("main@4"))[-1].start == 1, "by the fold"
    assert fresh.read("main@1")["w"].tobytes() == bits[1].tobytes()
    assert fresh.read("main@4")["w"].tobytes() == bits[4].tobytes()
    assert fresh.verify(deep=True).ok
