"""Ranks of a Megatron trainer publish their slices: the same versions as one process, whatever the topology.

The larger runs: DCR_TEST_MEGATRON=1.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from megatron import Exporter, Model, Slices, State, Topology, held, next_training_state, training_state
from megatron_maps import built, shared_out
from states import law_step

import dcr_store
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.discovery import Discovery, Residual, discover
from dcr_store.store import Store

MODELS = {
    "usual": Model(),
    "copied": Model(kv="copied", experts="stacked", is_grouped=True, is_tied=False),
    "fp8": Model(experts="transposed", router_bias="F32", fp8="dequantised"),
    "kept": Model(experts="transposed", is_grouped=True, fp8="kept", is_zero_centred=False, n_groups=4),
}
CASES = [
    ("usual", Topology()),
    ("usual", Topology(tp=2, pp=2, ep=2, dp=2)),
    ("usual", Topology(tp=8, pp=2)),
    ("copied", Topology(tp=8)),
    ("copied", Topology(tp=4, pp=2, ep=2, etp=2)),
    ("fp8", Topology(tp=2, pp=4, ep=4, dp=2)),
    ("kept", Topology(tp=4, ep=4)),
]
IS_LONG = bool(os.environ.get("DCR_TEST_MEGATRON"))
if IS_LONG:
    CASES = [
        (name, Topology(tp=tp, pp=pp, ep=ep, dp=dp))
        for name in MODELS
        for tp, pp, ep, dp in (
            (1, 1, 1, 1), (1, 2, 2, 2), (1, 4, 4, 4), (2, 1, 1, 1), (2, 1, 2, 2), (2, 2, 2, 2), (2, 4, 4, 2),
            (4, 1, 1, 1), (4, 1, 4, 1), (4, 2, 2, 1), (4, 4, 4, 1),
            (8, 1, 1, 1), (8, 1, 4, 1), (8, 2, 2, 1), (8, 4, 4, 1),
        )
    ]  # fmt: skip


def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


@dataclass
class Ranks:
    """All ranks of a trainer, in one process and in turn, each with a store of its own."""

    stores: list[Store]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    are_told: bool = False
    """Whether transactions are told which slices will be written."""

    def publish(
        self,
        given: Sequence[Slices],
        maps: Sequence[Mapping[str, AffineMap]],
        residual: Sequence[Residual] = (),
        exported: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish slices by maps; what is residual in halves, by all ranks in turn."""
        names = [f"r{rank}" for rank in range(len(given))]
        cuts = [(item, start, stop) for item in residual for start, stop in _halves(item)]
        told = [list(how.values()) for how in maps]
        for number, (item, start, stop) in enumerate(cuts):
            told[number % len(given)].append(slices.flat_part(item.tensor, *self.tensors[item.tensor], start, stop))
        begun = self.stores[0].begin(writers=names, tensors=self.tensors, slices=told[0] if self.are_told else None)
        parts = [begun]
        for rank in range(1, len(given)):
            more = told[rank] if self.are_told else None
            parts.append(self.stores[rank].join(begun.txid, writer=names[rank], slices=more))
        for part, mine, how in zip(parts, given, maps, strict=True):
            for name, mapped in how.items():
                part.write_slice(mine[name], mapped)
        for number, (item, start, stop) in enumerate(cuts):
            assert exported is not None
            fragment = exported[item.tensor].reshape(-1)[start:stop]
            parts[number % len(parts)].write_residual(item.tensor, fragment, start)
        for part in parts[1:]:
            part.seal()
        for part in parts:
            part.commit(timeout_s=30)


def _halves(item: Residual) -> list[tuple[int, int]]:
    middle = (item.start + item.stop) // 2
    return [(item.start, middle), (middle, item.stop)]


def publish_alone(states: Sequence[State], chunk_elements: int) -> list[str]:
    with dcr_store.create(memory(), chunk_elements=chunk_elements) as store:
        for state in states:
            with store.begin() as transaction:
                for name, array in state.items():
                    transaction.write(name, array)
        return [info.root for info in store.log("main")]


@cache
def training(name: str) -> list[State]:
    states = [training_state(MODELS[name], 1)]
    for seed in (2, 3):
        states.append(next_training_state(MODELS[name], states[-1], seed))
    return states


@cache
def alone(name: str) -> list[str]:
    return publish_alone([MODELS[name].exported(state) for state in training(name)], 256)


def tensors_of(model: Model) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of the checkpoint."""
    rows = {name: row for name, row in model.tensors().items() if model.is_exported(name)}
    return {name: ("BF16" if name in model.reasons() else dtype, shape) for name, (dtype, shape) in rows.items()}


def found_by(model: Model, topology: Topology, state: State) -> Discovery:
    return discover(Exporter(model, topology), [held(model, topology, r, state) for r in range(topology.n_ranks)])


@pytest.mark.parametrize(("name", "topology"), CASES, ids=[f"{name}-{topology}" for name, topology in CASES])
def test_roots_and_bits_are_those_of_one_publisher(name: str, topology: Topology) -> None:
    model, url = MODELS[name], memory()
    dcr_store.create(url, chunk_elements=256).close()
    ranks = Ranks([dcr_store.open(url) for _ in range(topology.n_ranks)], tensors_of(model))
    found = found_by(model, topology, training(name)[0])
    assert dict(found.tensors) == ranks.tensors
    by_hand = shared_out([built(model, topology, rank) for rank in range(topology.n_ranks)])
    for state, maps in zip(training(name), (found.maps, by_hand, found.maps), strict=True):
        given = [held(model, topology, rank, state) for rank in range(topology.n_ranks)]
        ranks.publish(given, maps, found.residual, dict(Exporter(model, topology)(given)))
    with dcr_store.open(url) as store:
        assert [info.root for info in store.log("main")] == alone(name)
        assert [info.base for info in store.log("main")] == [None, "main@0", "main@1"]
        for number, state in enumerate(training(name)):
            read = store.read(f"main@{number}")
            wanted = model.exported(state)
            assert set(read) == set(wanted)
            assert all(read[tensor].tobytes() == array.tobytes() for tensor, array in wanted.items())
        assert store.verify(deep=True).ok


# ---------------------------------------------------------------------- elasticity

N_EACH = 5 if IS_LONG else 1
SCALE = 2 if IS_LONG else 1
LARGE = Model(
    hidden=256 * SCALE,
    head=32 * SCALE,
    ffn=1024 * SCALE,
    expert_ffn=256 * SCALE,
    mamba_inner=512 * SCALE,
    mamba_state=8,
    vocabulary=4001 * SCALE,
)
Plan = Callable[[State], tuple[list[Slices], Sequence[Mapping[str, AffineMap]], Sequence[Residual], State]]


def megatron(**sizes: Any) -> Plan:
    topology = Topology(**sizes)
    maps = shared_out([built(LARGE, topology, rank) for rank in range(topology.n_ranks)])
    residual = [
        Residual(name, 0, math.prod(LARGE.tensors()[name][1]), reason) for name, reason in LARGE.reasons().items()
    ]

    def plan(state: State) -> Any:
        given = [held(LARGE, topology, rank, state) for rank in range(topology.n_ranks)]
        return given, maps, residual, LARGE.exported(state)

    return plan


def sharded(n_ranks: int) -> Plan:
    """Fully sharded: rows of each tensor, as torch.chunk has them, of the checkpoint's own bits."""
    tensors = tensors_of(LARGE)
    maps = [
        {name: slices.sharded(name, *row, 0, rank, n_ranks) for name, row in tensors.items()} for rank in range(n_ranks)
    ]

    def plan(state: State) -> Any:
        exported = LARGE.exported(state)
        given: list[Slices] = [{} for _ in range(n_ranks)]
        for name, array in exported.items():
            n_each = -(-len(array) // n_ranks)
            for rank in range(n_ranks):
                given[rank][name] = array[rank * n_each : (rank + 1) * n_each]
        return given, maps, (), exported

    return plan


PLANS: dict[str, Callable[[], Plan]] = {
    "tp2": lambda: megatron(tp=2),
    "tp4": lambda: megatron(tp=4),
    "fsdp4": lambda: sharded(4),
    "fsdp3": lambda: sharded(3),
    "pp2 (3, 1), ep2 over dp": lambda: megatron(pp=2, ep=2, dp=2, stages=(3, 1)),
    "pp2 (2, 2), ep2 over tp": lambda: megatron(tp=2, pp=2, ep=2),
    "tp2, ep2": lambda: megatron(tp=2, ep=2),
    "pp4, ep4": lambda: megatron(pp=4, ep=4, dp=4),
}
SWITCHES = [("tp2", "tp4"), ("tp4", "tp2"), ("fsdp4", "fsdp3"), ("fsdp3", "fsdp4")]
SWITCHES += [tuple(PLANS)[4:6], tuple(PLANS)[5:3:-1]]  # type: ignore[list-item]
if IS_LONG:
    SWITCHES += [("tp2, ep2", "pp4, ep4"), ("pp4, ep4", "tp2, ep2"), ("tp4", "fsdp3"), ("fsdp3", "tp4")]


@cache
def trained() -> list[State]:
    """Steps of training by the law of real ones: about one weight in a hundred changes."""
    rng = np.random.default_rng(0)
    states = [{name: (rng.normal(size=a.shape) * 0.02).astype(a.dtype) for name, a in training_state(LARGE, 0).items()}]
    while len(states) < 1 + 2 * N_EACH:
        states.append({name: _stepped(array, rng) for name, array in states[-1].items()})
    return states


def _stepped(array: Any, rng: np.random.Generator) -> Any:
    if array.dtype != np.dtype(ml_dtypes.bfloat16):
        return array + rng.normal(size=array.shape).astype(array.dtype) * array.dtype.type(1e-6)
    return law_step(array.view(np.uint16), 0.01, rng).view(array.dtype)


@cache
def trained_alone() -> list[str]:
    return publish_alone([LARGE.exported(state) for state in trained()], 1 << 20)


@cache
def nbytes_of(first: str, second: str) -> list[int]:
    """Publish states by one plan, then by another, after one of a single process; return what each version stores."""
    url, plans = memory(), [PLANS[first]()] * N_EACH + [PLANS[second]()] * N_EACH
    with dcr_store.create(url) as store:
        with store.begin() as transaction:
            for name, array in LARGE.exported(trained()[0]).items():
                transaction.write(name, array)
        stores: list[Store] = []
        for plan, state in zip(plans, trained()[1:], strict=True):
            given, maps, residual, exported = plan(state)
            stores += [dcr_store.open(url) for _ in range(len(given) - len(stores))]
            Ranks(stores, tensors_of(LARGE), are_told=True).publish(given, maps, residual, exported)
        assert [info.root for info in store.log("main")] == trained_alone()
        assert [info.base for info in store.log("main")] == [None, *(f"main@{n}" for n in range(2 * N_EACH))]
        contents = [store._catalog.contents(store._catalog.resolve(f"main@{n}")) for n in range(1, 1 + 2 * N_EACH)]
        return [sum(item.partition.nbytes for item in found.partitions) for found in contents]


@pytest.mark.parametrize(("first", "second"), SWITCHES)
def test_deltas_are_as_small_after_the_topology_changed(first: str, second: str) -> None:
    changed, unchanged = nbytes_of(first, second), nbytes_of(first, first)
    ratios = [a / b for a, b in zip(changed, unchanged, strict=True)]
    if IS_LONG:
        print(f"{first} to {second}: {unchanged[-1]} to {changed[-1]} bytes; {max(ratios):.3f}")
    assert ratios[:N_EACH] == [1] * N_EACH
    assert max(ratios) <= 1.1
