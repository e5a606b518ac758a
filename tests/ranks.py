"""A model in slices of a tensor-parallel trainer's ranks, for tests of transactions of several writers."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

import dcr_store
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.publish.joint import SliceTransaction
from dcr_store.store import Store

State = dict[str, np.ndarray[Any, Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("BF16", (50, 24)),
    "q": ("BF16", (32, 24)),
    "k": ("BF16", (16, 24)),
    "v": ("BF16", (16, 24)),
    "gate": ("BF16", (40, 24)),
    "up": ("BF16", (40, 24)),
    "down": ("BF16", (24, 40)),
    "norm": ("F32", (24,)),
    "scale": ("F32", ()),
    "phase": ("C64", (6, 4)),
    "steps": ("I64", (3,)),
}
NUMPY = {"BF16": BF16, "F32": np.dtype("<f4"), "C64": np.dtype("<c8"), "C128": np.dtype("<c16"), "I64": np.dtype("<i8")}


def random_state(seed: int) -> State:
    """Any bits: NaNs and signed zeros among them."""
    rng = np.random.default_rng(seed)
    state = {}
    for name, (dtype, shape) in SHAPES.items():
        row = NUMPY[dtype]
        state[name] = np.frombuffer(rng.bytes(math.prod(shape) * row.itemsize), row).reshape(shape).copy()
    return state


def next_state(state: State, seed: int, rate: float = 0.05) -> State:
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in state.items():
        new = array.copy().reshape(-1)
        octets = new.view(np.uint8)
        where = rng.random(len(octets)) < rate / array.itemsize
        octets[where] ^= rng.integers(1, 256, int(where.sum()), np.uint8)
        found[name] = new.reshape(array.shape)
    return found


def whole(name: str) -> AffineMap:
    return slices.whole(name, *SHAPES[name])


def shapes(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: SHAPES[name][1] for name in names}


def maps_of(rank: int, n_ranks: int) -> list[AffineMap]:
    """What a rank of a tensor-parallel trainer holds; small tensors are owned by one rank each."""
    found = [
        slices.padded_vocabulary("embed", *SHAPES["embed"], 56, rank, n_ranks),
        slices.qkv(shapes("q", "k", "v"), "BF16", 8, rank, n_ranks),
        slices.fused(shapes("gate", "up"), "BF16", rank, n_ranks),
        slices.transposed(slices.row_parallel("down", *SHAPES["down"], rank, n_ranks)),
        slices.column_parallel("phase", *SHAPES["phase"], rank, n_ranks),
    ]
    return found + [whole(name) for index, name in enumerate(("norm", "scale", "steps")) if index % n_ranks == rank]


def slice_of(mapped: AffineMap, state: State) -> np.ndarray[Any, Any]:
    """The slice that a map is of, with something in the places that are nobody's."""
    local = np.full(math.prod(mapped.shape), 77, NUMPY[mapped.dtype])
    for name in mapped.tensors:
        there = mapped.canonical_of(name, np.arange(len(local)))
        local[there >= 0] = state[name].reshape(-1)[there[there >= 0]]
    return local.reshape(mapped.shape)


def write(transaction: SliceTransaction, maps: list[AffineMap], state: State) -> None:
    for mapped in maps:
        transaction.write_slice(slice_of(mapped, state), mapped)


def publish_alone(url: str, states: list[State], **options: Any) -> list[str]:
    with dcr_store.create(url, **options) as store:
        roots = []
        for state in states:
            with store.begin() as transaction:
                for name, array in state.items():
                    transaction.write(name, array)
            roots.append(store.show("main").info.root)
        return roots


def require_state(store: Store, version: str, state: State) -> None:
    found = store.read(version)
    assert set(found) == set(state)
    for name, array in state.items():
        assert found[name].tobytes() == array.tobytes(), name


def states_of(n: int) -> list[State]:
    states = [random_state(0)]
    while len(states) < n:
        states.append(next_state(states[-1], len(states)))
    return states
