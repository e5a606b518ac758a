"""The history of ``v1-writers``: ranks of a trainer publish together, two at first and then three.

Slices and residual fragments, ownership documents that the next version names again, a topology that changes, a
writer that was started again. In the words of ``history``, whose ids, times and random bits it uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from golden.contents import Files, Random, State, make_state, step
from golden.history import Expected, make_store, probes

from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.dtypes import DTYPES
from dcr_store.layout.tensors import to_array
from dcr_store.publish.joint import SliceTransaction
from dcr_store.store import Store

STORE = "v1-writers"
CHUNK_ELEMENTS = 64
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed.weight": ("BF16", (28, 8)),
    "layers.0.q": ("BF16", (12, 8)),
    "layers.0.k": ("BF16", (6, 8)),
    "layers.0.v": ("BF16", (6, 8)),
    "layers.0.gate": ("BF16", (12, 8)),
    "layers.0.up": ("BF16", (12, 8)),
    "layers.0.down": ("BF16", (8, 12)),
    "layers.0.norm": ("F32", (100,)),
    "layers.0.A_log": ("F32", (6,)),
    "codes": ("U8", (150,)),
    "phase": ("C128", (6, 3)),
    "steps": ("I64", ()),
    "nothing": ("F32", (0, 4)),
}
TIED = {"lm_head.weight": "embed.weight"}
RESIDUAL = ("layers.0.norm", "codes")


def maps_of(rank: int, n_ranks: int) -> list[AffineMap]:
    """Return the maps of a tensor-parallel rank's slices."""

    def shapes(*names: str) -> dict[str, tuple[int, ...]]:
        return {f"layers.0.{name}": TENSORS[f"layers.0.{name}"][1] for name in names}

    found = [
        slices.padded_vocabulary("embed.weight", *TENSORS["embed.weight"], 30, rank, n_ranks),
        slices.qkv(shapes("q", "k", "v"), "BF16", 6, rank, n_ranks),
        slices.fused(shapes("gate", "up"), "BF16", rank, n_ranks),
        slices.transposed(slices.row_parallel("layers.0.down", *TENSORS["layers.0.down"], rank, n_ranks)),
        slices.column_parallel("layers.0.A_log", *TENSORS["layers.0.A_log"], rank, n_ranks),
        slices.row_parallel("phase", *TENSORS["phase"], rank, n_ranks),
    ]
    return [*found, slices.whole("steps", *TENSORS["steps"])] if rank == 0 else found


def fragments_of(rank: int, n_ranks: int) -> list[tuple[str, int, int]]:
    """Return a rank's parts of what is residual: names, and values from where to where."""
    found = []
    for name in RESIDUAL:
        (n,) = TENSORS[name][1]
        found.append((name, n * rank // n_ranks, n * (rank + 1) // n_ranks))
    return found


def announced(rank: int, n_ranks: int) -> list[AffineMap]:
    """Return the maps of all that a rank writes."""
    parts = fragments_of(rank, n_ranks)
    return [*maps_of(rank, n_ranks), *(slices.flat_part(name, *TENSORS[name], *ends) for name, *ends in parts)]


def slice_of(mapped: AffineMap, state: State) -> np.ndarray[Any, Any]:
    """Return the slice that a map is of, with ones in the bits of its padding."""
    per = DTYPES[mapped.dtype].elements_per_value
    local = np.full((int(np.prod(mapped.shape)), per), -1).astype(state[next(iter(mapped.tensors))].bits.dtype)
    for name in mapped.tensors:
        there = mapped.canonical_of(name, np.arange(len(local)))
        local[there >= 0] = state[name].bits.reshape(-1, per)[there[there >= 0]]
    return to_array(local.reshape(-1), mapped.dtype, mapped.shape)


def write(transaction: SliceTransaction, state: State, rank: int, n_ranks: int, *, is_all: bool = True) -> None:
    for mapped in maps_of(rank, n_ranks):
        transaction.write_slice(slice_of(mapped, state), mapped)
    for name, start, stop in fragments_of(rank, n_ranks) if is_all else ():
        kind, shape, bits = state[name]
        transaction.write_residual(name, to_array(bits, kind, shape)[start:stop], start)


def crash(transaction: SliceTransaction) -> None:
    """Leave a writer as a killed process does, with everything stored that was whole."""
    transaction._writer._encoders.drain()
    for future in transaction._writer.partitions._uploads.futures:
        future.result()
    transaction._close()


def publish(store: Store, state: State, n_ranks: int, *, restarted: Sequence[int] = (), **told: Any) -> None:
    """Publish a version by so many ranks, one after the other; some crash half-way and start again."""
    names = [f"tp{rank}" for rank in range(n_ranks)]
    first = store.begin(
        writers=names, tensors=TENSORS, aliases=TIED, slices=announced(0, n_ranks), owner="trainer-1", **told
    )
    write(first, state, 0, n_ranks)
    first.seal()
    ranks = [first]
    for rank in range(1, n_ranks):
        is_again = rank in restarted
        if is_again:
            lost = store.join(first.txid, writer=names[rank], slices=announced(rank, n_ranks))
            write(lost, state, rank, n_ranks, is_all=False)
            crash(lost)
        # Who starts again does not know what it will write: what was whole before is recognised all the same.
        joined = store.join(first.txid, writer=names[rank], slices=announced(rank, n_ranks) if is_again else None)
        write(joined, state, rank, n_ranks)
        joined.seal()
        ranks.append(joined)
    for transaction in ranks:
        transaction.commit()


def publish_all(store: Store) -> dict[str, Any]:
    """Publish the history; return what it holds."""
    random, expected = Random("golden writers"), Expected({"main": []})
    state = make_state(TENSORS, random)
    for n_ranks, restarted, told in (
        (2, (), {"message": "two ranks", "metadata": {"tp": 2}}),
        (2, (), {"metadata": {"tp": 2, "step": 1}}),
        (3, (2,), {"message": "three ranks", "metadata": {"tp": 3, "step": 2}}),
    ):
        publish(store, state, n_ranks, restarted=restarted, **told)
        expected.add("main", state, aliases=TIED, **told)
        state = step(state, random, 0.1)
    return expected.of_store(store)


def make() -> tuple[Files, dict[str, Any]]:
    """Return the objects of the store by key, and what it holds."""
    files, expected = make_store("dcr.delta", CHUNK_ELEMENTS, publish_all)
    probed = {codec: probe for codec, probe in probes().items() if codec == "dcr.delta"}
    return files, {"chunk_elements": CHUNK_ELEMENTS, "probes": probed, **expected}
