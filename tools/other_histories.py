"""States like in training, and other ways to keep a history of them than this store, for bench_history.py."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import zstandard
from bench_codec import step, weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    U16 = NDArray[np.uint16]
    State = dict[str, NDArray[Any]]

COLUMNS = 256
CHUNK_ELEMENTS = 1 << 16
"""Small, as the states are: so many chunks as a larger one would have with the default."""
CDC_NBYTES = (2 << 10, 8 << 10, 64 << 10)
REFERENCE_NBYTES = 40
"""Of a chunk in the list of a version's chunks: its SHA-256 and length."""


def states(n_elements: int, rate: float, n_versions: int) -> Iterator[U16]:
    """Yield the bits of consecutive states."""
    rng = np.random.default_rng(0)
    bits = weights(rng, n_elements)
    yield bits
    for _ in range(n_versions - 1):
        bits = step(rng, bits, rate)
        yield bits


def tensors_of(bits: U16) -> State:
    """Cut a state into an embedding (the first eighth, of which rows stay as they are) and layers, as views."""
    rows = bits.view(ml_dtypes.bfloat16).reshape(-1, COLUMNS)
    n_embedded, n_layers = len(rows) // 8, max(1, len(bits) >> 19)
    found = {"model.embed_tokens.weight": rows[:n_embedded]}
    cuts = np.linspace(n_embedded, len(rows), n_layers + 1).astype(int).tolist()
    for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
        shares = {"self_attn.qkv_proj": 0.2, "self_attn.o_proj": 0.3, "mlp.gate_up_proj": 0.7, "mlp.down_proj": 1.0}
        before = start
        for name, share in shares.items():
            end = start + round(share * (stop - start))
            found[f"model.layers.{index}.{name}.weight"] = rows[before:end]
            before = end
    return found


class Zstd:
    """Each version whole, through zstd; or its XOR with the one before."""

    def __init__(self, *, is_chain: bool) -> None:
        self._is_chain = is_chain
        self._before: U16 | None = None
        self.sizes: list[int] = []

    def add(self, bits: U16) -> None:
        data = bits if not self._is_chain or self._before is None else bits ^ self._before
        self.sizes.append(len(zstandard.ZstdCompressor(level=1).compress(data.data)))
        self._before = bits

    def nbytes(self) -> int:
        return sum(self.sizes)


class ContentChunks:
    """Chunks that content cuts, each stored once, through zstd, and a list of them for each version."""

    def __init__(self) -> None:
        from fastcdc import fastcdc

        self._cut = fastcdc
        self._stored: dict[str, int] = {}
        self._n_references = 0

    def add(self, bits: U16) -> None:
        low, average, high = CDC_NBYTES
        for part in self._cut(bits.tobytes(), low, average, high, fat=True, hf=hashlib.sha256):
            self._n_references += 1
            if part.hash not in self._stored:
                self._stored[part.hash] = len(zstandard.ZstdCompressor(level=1).compress(part.data))

    def nbytes(self) -> int:
        return sum(self._stored.values()) + REFERENCE_NBYTES * self._n_references


class Icechunk:
    """An icechunk repository in a directory: blocks of rows that differ are written, one commit a version."""

    def __init__(self, directory: Path) -> None:
        import icechunk

        self._directory = directory
        self._repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(directory)))
        self._before: State | None = None

    def add(self, bits: U16) -> None:
        import zarr

        session = self._repository.writable_session("main")
        group = zarr.open_group(session.store, mode="a")
        n_rows = CHUNK_ELEMENTS // COLUMNS
        plain = {name: tensor.view(np.uint16) for name, tensor in tensors_of(bits).items()}
        for name, tensor in plain.items():
            if self._before is None:
                chunks = (min(n_rows, len(tensor)), COLUMNS)
                array = group.create_array(name, shape=tensor.shape, chunks=chunks, dtype="uint16")
            else:
                array = group[name]
            for start in range(0, len(tensor), n_rows):
                block = tensor[start : start + n_rows]
                if self._before is None or not np.array_equal(block, self._before[name][start : start + n_rows]):
                    array[start : start + n_rows] = block
        session.commit("a version")
        self._before = plain

    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file())
