"""What the simulations start from, made once: states of a tiny model, and stores with some versions of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from sim import cuts
from sim.objects import PlainObjects
from states import tree, write_hf

from dcr_store.format import canonical
from dcr_store.format.documents import StoreDocument
from dcr_store.format.names import STORE_KEY
from dcr_store.layout import slices
from dcr_store.store import Store
from dcr_store.versions.catalog import Catalog

State = dict[str, np.ndarray[Any, Any]]
CHUNK_ELEMENTS: Final = 64
N_STEPS: Final = 6
N_VARIANTS: Final = 3
N_KEPT: Final = 4


def _states(n_steps: int = N_STEPS, another_layout: int = 4) -> dict[tuple[int, int], State]:
    """Return the state of each step as each start of the trainer computes it: they differ in a few elements."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 1 << 16, 110, np.uint16), rng.integers(0, 1 << 8, 40, np.uint8)
    states: dict[tuple[int, int], State] = {}
    for step in range(n_steps):
        a, b = a.copy(), b.copy()
        a[rng.integers(0, 110, 6)] ^= 1
        b[rng.integers(0, 40, 1)] ^= 0 if step == 3 else 3
        for variant in range(N_VARIANTS):
            own = a.copy()
            own[:3] ^= variant
            states[step, variant] = {"a": own, "b": b}
            if step == another_layout:
                states[step, variant]["c"] = np.arange(9, dtype=np.uint8)
    return states


STATES: Final = _states()
LONGER: Final = _states(9, 6)  # of a run whose history is kept


@dataclass(frozen=True, eq=False)
class Library:
    """A store that is there when a simulation begins.

    Attributes
    ----------
    objects : dict of str to bytes
        What is stored.
    states : list of State
        What each version of ``main`` holds.
    trees : list of dict or None
        The files of each version, for those published as checkpoints.
    cache : mapping
        What a catalog keeps of them, for judges: they begin with it.
    """

    objects: dict[str, bytes]
    states: list[State]
    trees: list[dict[str, bytes] | None]
    cache: Mapping[tuple[str, str], tuple[object, int]]


def _new_store() -> tuple[Store, PlainObjects]:
    objects = PlainObjects({})
    document = StoreDocument(
        "5f0b61d7c9a84e3f92d01c7e6a4b8835", "dcr.delta", CHUNK_ELEMENTS, "2026-01-01T00:00:00.000Z"
    )
    objects.put(STORE_KEY, document.to_bytes())
    return Store(objects, document, canonical.sha256(document.to_bytes())), objects


def _library(store: Store, objects: PlainObjects, states: list[State], trees: list[dict[str, bytes] | None]) -> Library:
    catalog = Catalog(objects, store._document, canonical.sha256(objects.get(STORE_KEY)))
    for number in range(len(states)):
        catalog.contents(catalog.resolve(f"main@{number}"))
    return Library(objects.objects, states, trees, catalog._cache)


def short() -> Library:
    """One version, of single tensors."""
    store, objects = _new_store()
    with store, store.begin(metadata={"step": 0}, owner="library") as transaction:
        for name, array in STATES[0, 0].items():
            transaction.write(name, array)
    return _library(store, objects, [STATES[0, 0]], [None])


def sliced() -> Library:
    """One version of the model that several writers publish."""
    store, objects = _new_store()
    with store, store.begin(metadata={"step": 0}, owner="library") as transaction:
        for name, array in cuts.STATES[0, 0].items():
            transaction.write(name, array)
    return _library(store, objects, [cuts.STATES[0, 0]], [None])


def kept() -> Library:
    """Four versions: two checkpoints that share a file's header, one of two writers that overwrite, tensors."""
    store, objects = _new_store()
    root = Path(tempfile.mkdtemp(prefix="dcr-sim-library-"))
    states = [LONGER[step, 0] for step in range(N_KEPT)]
    trees: list[dict[str, bytes] | None] = [None] * N_KEPT
    with store, Store(objects, store._document, store._catalog.store_sha256) as other:
        for step, state in enumerate(states):
            if step == 2:
                _write_together(store, other, state, step)
                continue
            with store.begin(metadata={"step": step}, owner="library") as transaction:
                if step < 2:
                    directory = write_hf(root / str(step), state, 1, 0)
                    transaction.write_checkpoint(directory)
                    trees[step] = tree(directory)
                else:
                    for name, array in state.items():
                        transaction.write(name, array)
    shutil.rmtree(root)
    return _library(store, objects, states, trees)


def _write_together(store: Store, other: Store, state: State, step: int) -> None:
    """Publish a version by two writers, of which the one overwrites what it does not know the base of."""
    tensors = {name: (f"U{8 * array.itemsize}", array.shape) for name, array in state.items()}
    first = store.begin(metadata={"step": step}, owner="library", writers=("w0", "w1"), tensors=tensors)
    second = other.join(first.txid, writer="w1", timeout_s=5)
    first.write_slice(state["a"], slices.whole("a", *tensors["a"]))
    second.write_residual("b", state["b"], 0)
    second.seal()
    first.commit(timeout_s=5)


def long() -> Library:
    """Six versions, published as checkpoints: in one file, in two, with another tensor, and back."""
    store, objects = _new_store()
    root = Path(tempfile.mkdtemp(prefix="dcr-sim-library-"))
    states, trees = [], []
    with store:
        for step in range(N_STEPS):
            # 0 and 1, and 2 and 3, have headers alike; of the two files of 3 one is that of 2.
            directory = write_hf(root / str(step), STATES[step, 0], 2 if step in (2, 3) else 1, step - step % 2)
            with store.begin(metadata={"step": step}, owner="library") as transaction:
                transaction.write_checkpoint(directory)
            states.append(STATES[step, 0])
            trees.append(tree(directory))
    shutil.rmtree(root)
    return _library(store, objects, states, list(trees))
