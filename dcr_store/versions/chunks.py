"""Chunks of a version in memory, proven by its digests. Refuses what a replay refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.versions.catalog import Catalog, LazyStates
from dcr_store.versions.edges import Edge
from dcr_store.versions.path import Path
from dcr_store.versions.replay import only, replay

Place = tuple[str, int]


class Chunks:
    """Some chunks in memory, zeros until they are written; satisfies ``ports.Target``."""

    def __init__(self, bits: dict[Place, Bits] | None = None) -> None:
        self.bits = {} if bits is None else dict(bits)

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a chunk."""
        held = self.bits.get((space, chunk))
        out[:] = 0 if held is None else held

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Keep a chunk."""
        self.bits[space, chunk] = bits.copy()


def chunks_at(
    catalog: Catalog, line: str, edges: Sequence[Edge], space: str, chunks: Iterable[int], *, by_chunk: bool = False
) -> dict[int, Bits]:
    """Return chunks as they are where a path of edges leads from zero.

    Parameters
    ----------
    edges : sequence of Edge
        Of the line, from zero; not empty.
    by_chunk : bool
        Fetch single chunks of partitions, as of ``replay``.

    Returns
    -------
    dict of int to ndarray of uintN, shape (chunk_elements,)
        To be read only: those of zeros may be one array.
    """
    wanted, n = list(chunks), catalog.document.chunk_elements
    target, path = Chunks(), Path(LazyStates(catalog, line, edges), len(edges) - 1, n)
    replay(catalog.objects, path, target, only(path, {space: wanted}), by_chunk=by_chunk)
    zeros: Bits = np.zeros(n, uint_dtype(space))
    return {chunk: target.bits.get((space, chunk), zeros) for chunk in wanted}
