"""Maps of a whole model in Megatron's slices, from builders, sharded tensors and discovery, against its own slicing."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from megatron import Exporter, Model, Topology, held, numbered, owned, training_state
from megatron_maps import Shard, built, places, shards

from dcr_store.errors import InvalidInputError
from dcr_store.layout import slices
from dcr_store.layout.affine_map import coverage
from dcr_store.layout.discovery import discover
from dcr_store.layout.from_megatron import is_main_replica

MODELS = {
    "usual": Model(),
    "copied": Model(kv="copied", experts="stacked", is_grouped=True, is_tied=False),
    "fp8": Model(experts="transposed", router_bias="F32", fp8="dequantised"),
    "kept": Model(experts="transposed", is_grouped=True, fp8="kept", is_zero_centred=False, n_groups=4),
}
TOPOLOGIES = [
    Topology(),
    Topology(tp=2, pp=2, ep=2, dp=2),
    Topology(tp=8, pp=2),
    Topology(tp=2, pp=4, ep=4, dp=2),
]
MORE = [
    Topology(tp=2),
    Topology(tp=4, ep=4),
    Topology(tp=4, pp=2, ep=2, etp=2),
    Topology(pp=4, ep=4, dp=4),
    Topology(tp=2, ep=2, etp=2, dp=2, pp=2, stages=(3, 1)),
    Topology(tp=8, pp=4, ep=4, etp=2),
]
if os.environ.get("DCR_TEST_MEGATRON"):
    TOPOLOGIES += MORE
    MODELS |= {
        f"{kv}-{experts}-{is_grouped}": Model(kv=kv, experts=experts, is_grouped=is_grouped)  # type: ignore[arg-type]
        for kv in ("cut", "copied")
        for experts in ("each", "stacked", "transposed")
        for is_grouped in (False, True)
    }

each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
each_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)


@each_model
@each_topology
def test_the_exporter_gives_the_checkpoint_of_the_slices(model: Model, topology: Topology) -> None:
    """Of the oracle itself: what it cuts, its exporter puts together."""
    state = training_state(model, 0)
    exported = dict(Exporter(model, topology)([held(model, topology, rank, state) for rank in range(topology.n_ranks)]))
    wanted = model.exported(state)
    assert set(exported) == set(wanted)
    for name, array in wanted.items():
        assert (exported[name].dtype, exported[name].shape) == (array.dtype, array.shape)
        assert exported[name].tobytes() == array.tobytes(), name


@each_model
@each_topology
def test_discovery_finds_what_each_rank_is_the_first_to_hold_and_why_the_rest_is_residual(
    model: Model, topology: Topology
) -> None:
    state = training_state(model, 0)
    given = [held(model, topology, rank, state) for rank in range(topology.n_ranks)]
    found = discover(Exporter(model, topology), given)
    _, starts = numbered(model)
    for maps, mine in zip(found.maps, owned(model, topology), strict=True):
        assert set(maps) == set(mine)
        for name, mapped in maps.items():
            assert np.array_equal(places(mapped, starts), mine[name]), name
            assert sum(len(boxes) for boxes in mapped.boxes.values()) <= 32, name
    residual = [(part.tensor, part.start, part.stop, part.reason.split(":")[0]) for part in found.residual]
    tensors = model.tensors()
    assert sorted(residual) == sorted(
        (name, 0, int(np.prod(tensors[name][1])), reason) for name, reason in model.reasons().items()
    )
    assert found.tensors == {name: (found.tensors[name][0], tensors[name][1]) for name in model.exported(state)}


@each_model
@each_topology
def test_builders_say_where_each_slice_lies(model: Model, topology: Topology) -> None:
    full, starts = numbered(model)
    is_direct = {name: name not in model.reasons() and model.is_exported(name) for name in full}
    direct = {name: numbers if is_direct[name] else np.full_like(numbers, -1) for name, numbers in full.items()}
    copied = model.kv == "copied" and topology.tp > model.n_groups
    for rank in range(topology.n_ranks):
        maps, mine = built(model, topology, rank), held(model, topology, rank, full, padding=-1)
        kept = held(model, topology, rank, direct, padding=-1)
        assert set(maps) == {name for name in mine if np.array_equal(kept[name], mine[name])}
        for name, mapped in maps.items():
            found = places(mapped, starts)
            if copied and name.endswith("linear_qkv.weight") and topology.place(rank).tp % (topology.tp // 2):
                n_rows = 2 * model.head
                assert (found[-n_rows:] == -1).all(), "k and v are the first rank's"
                found[-n_rows:] = mine[name][-n_rows:]
            assert np.array_equal(found, mine[name]), name


@each_topology
def test_sharded_tensors_say_the_same(topology: Topology) -> None:
    model = replace(MODELS["fp8"], is_tied=topology.tp > 1)
    full, starts = numbered(model)
    tensors = {name: shape for name, (_, shape) in model.tensors().items()}
    mains, ranges = [], []
    for rank in range(topology.n_ranks):
        mine = held(model, topology, rank, full, padding=-1)
        n_rows = dict.fromkeys(mine, 0)
        for shard in shards(model, topology, rank):
            mapped = shard.mapped()
            wanted = mine[shard.name][shard.start : shard.stop]
            n_rows[shard.name] += shard.stop - shard.start
            assert np.array_equal(places(mapped, starts), wanted), (shard.name, shard.sharded.key)
            if is_main_replica(shard.sharded):
                mains.append(mapped)
                ranges += [(shard, *cut) for cut in ((0, wanted.size // 3), (wanted.size // 3, wanted.size))]
        assert n_rows == {name: len(part) for name, part in mine.items()}
    assert coverage(mains, tensors).is_exact
    assert coverage([flat(*cut) for cut in ranges], tensors).is_exact


def flat(shard: Shard, start: int, stop: int) -> Any:
    """The map of a range of the slice, as a distributed optimizer holds it, made as its sharded tensor says."""
    cut = replace(shard, sharded=replace(shard.sharded, flattened_range=slice(start, stop)))
    return cut.mapped()


def test_flat_ranges_of_a_distributed_optimizer_are_ranges_of_the_slice() -> None:
    model, topology = MODELS["usual"], Topology(tp=2, pp=2, ep=2, dp=2)
    full, starts = numbered(model)
    for rank in (0, 5):
        mine = held(model, topology, rank, full, padding=-1)
        for shard in shards(model, topology, rank):
            wanted = mine[shard.name][shard.start : shard.stop].reshape(-1)
            for start, stop in ((0, len(wanted) // 3), (len(wanted) // 3, len(wanted))):
                assert np.array_equal(places(flat(shard, start, stop), starts), wanted[start:stop]), shard.name


@pytest.mark.parametrize(
    "call",
    [
        lambda: slices.sections("w", "BF16", (9, 2), [4, 4], 0, 2),
        lambda: slices.sections("w", "BF16", (8, 2), [5, 3], 0, 2),
        lambda: slices.sections("w", "BF16", (8, 2), [4, 4], 2, 2),
        lambda: slices.sections("w", "BF16", (8, 2), [4, 4], -1, 2),
        lambda: slices.sections("w", "BF16", (8, 2), [4, 4], 0, 2, dim=2),
        lambda: slices.sections("w", "BF16", (8, 2), [], 0, 2),
        lambda: slices.sections("w", "BF16", (8, 2), [12, -4], 0, 2),
        lambda: slices.qkv({"q": (8, 2), "k": (4, 2)}, "BF16", 2, 0, 3, copied=["k"]),
        lambda: slices.qkv({"q": (8, 2), "k": (4, 2)}, "BF16", 2, 4, 4, copied=["k"]),
        lambda: slices.qkv({"q": (8, 2), "k": (4, 2)}, "BF16", 2, 0, 4, copied=["v"]),
        lambda: slices.qkv({"q": (8, 2), "k": (4, 2)}, "BF16", 2, 0, 2, copied=["v"]),
    ],
)
def test_what_does_not_fit_is_refused(call: Any) -> None:
    with pytest.raises(InvalidInputError):
        call()
