"""A tensor-parallel engine after each of 20 versions against a full load of the checkpoint: every byte of each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dcr_store.receive.native_bringer import NativeBringer
from native.checkpoints import assert_same, bring, bringer, first, new_store, publish, step, tensors
from native.parallel_engine import Config, Engine, Rank, checkpoint_shapes


def plan_of(target: NativeBringer) -> Any:
    plan = target._target.plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("n_ranks", "n_threads", "transposed", "tied"),
    [(1, 0, False, True), (2, 3, True, True), (4, 2, True, False)],
)
def test_twenty_versions(n_ranks: int, n_threads: int, transposed: bool, tied: bool) -> None:
    config = Config(transposed=transposed, tied=tied)
    shapes, rng = checkpoint_shapes(config), np.random.default_rng(n_ranks)
    ranks = [Engine(config, Rank(i, n_ranks), n_threads=n_threads) for i in range(n_ranks)]
    full = [Engine(config, Rank(i, n_ranks)) for i in range(n_ranks)]
    targets = [bringer(rank.load_weights, rank) for rank in ranks]
    bits = first(shapes, rng)
    with new_store() as store:
        for version in range(20):
            publish(store, shapes, bits)
            for rank, other, target in zip(ranks, full, targets, strict=True):
                outcome = bring(store, target)
                other.load_weights(tensors(shapes, bits).items())
                assert_same(rank, other, but=("inv_freq",))
                assert outcome.chunks_healed == 0
                plan = plan_of(target)
                assert plan.fallbacks == {}
                assert plan.skipped == {name for name in shapes if "rotary" in name}
                assert target.held(store._catalog) == store._catalog.resolve(f"main@{version}")
            bits = step(bits, rng)
    for target in targets:
        target.close()
