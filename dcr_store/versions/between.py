"""What lies between two versions as masks: where deltas lead from one to the other, no anchor is read.

Masks of several deltas are joined, chunk by chunk, and each chunk's are proven by the digests of both versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from dcr_store.codec.digest import crc64, linear
from dcr_store.errors import IntegrityError
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.changes import iter_chunk_changes
from dcr_store.versions.chunks import Place
from dcr_store.versions.edges import Edge
from dcr_store.versions.prefetch import Fetch

Deltas: TypeAlias = "list[tuple[str, Edge]]"


def deltas_between(catalog: Catalog, a: Located, b: Located) -> Deltas | None:
    """Return deltas whose masks together lead from one version to another, each with the line that it is read on.

    Versions of two lines are joined by way of the last version that both lines have.

    Returns
    -------
    list of (str, Edge), or None
        None if there is none, or if it takes more bytes than to rebuild both versions from their anchors.
    """
    places = dict(_lineage(catalog, a))
    common = [(line, min(number, places[line])) for line, number in _lineage(catalog, b) if line in places]
    row = catalog.row(*common[0]) if common else None
    if row is None:
        return None
    found: Deltas = []
    for end in (a, b):
        edges = catalog.path_from(Located(end.line, row), end)
        if edges is None:
            return None
        found += [(end.line, edge) for edge in edges]
    rebuilt = [*catalog.path(a), *catalog.path(b)]
    if sum(edge.nbytes for _, edge in found) > sum(edge.nbytes for edge in rebuilt):
        return None
    return found


def _lineage(catalog: Catalog, located: Located) -> Iterator[tuple[str, int]]:
    """Yield the lines that have a version's past, each with its last version of that past."""
    line, number = located.line, located.row.version
    yield line, number
    while (source := catalog.source(line)) is not None:
        line, number = source.line, min(number, source.row.version)
        yield line, number


class MasksBetween:
    """The masks that lead from version `a` to version `b`, of one layout, or back."""

    def __init__(self, catalog: Catalog, a: Located, b: Located, deltas: Deltas, fetcher: Fetch) -> None:
        self._catalog = catalog
        self._a, self._b = a, b
        self._deltas = deltas
        self._fetcher = fetcher

    def of(self, places: Sequence[Place]) -> dict[Place, Bits | None]:
        """Return masks, uintN of shape (chunk_elements,); None where a delta overwrites, so that bits are needed.

        Raises
        ------
        IntegrityError
            If an object is missing or damaged, or the masks do not lead from one version to the other.
        """
        n = self._catalog.document.chunk_elements
        masks: dict[Place, Bits] = {place: np.zeros(n, uint_dtype(place[0])) for place in places}
        written: set[Place] = set()
        chunks: dict[str, set[int]] = {}
        for space, chunk in places:
            chunks.setdefault(space, set()).add(chunk)
        for line, edge in self._deltas:
            contents = self._catalog.contents_of_edge(line, edge)
            for change in iter_chunk_changes(self._catalog.objects, contents, n, fetcher=self._fetcher, chunks=chunks):
                place = change.space, change.chunk
                masks[place][change.positions] ^= change.masks
                if len(change.written):
                    written.add(place)
        old, new = self._catalog.tables(self._a), self._catalog.tables(self._b)
        for (space, chunk), mask in masks.items():
            expected, found = int(old[space][chunk] ^ new[space][chunk]), linear(crc64(mask), mask.nbytes)
            if expected != found and (space, chunk) not in written:
                raise IntegrityError(
                    f"the stored version is defective in chunk {chunk} of {space}: its deltas do not lead from "
                    f"{self._a.name} to it; publish the state again as a new version",
                    key=self._b.name,
                    expected=f"{expected:016x}",
                    found=f"{found:016x}",
                )
        return {place: None if place in written else mask for place, mask in masks.items()}
