"""The partitions of deltas that take most, and those that were stored last after their version was begun.

No document says how long anything took. What stands for it is the object store's own times: from that of the record
that began the version to that of the partition. A version that was interrupted and resumed took that long, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Final

from dcr_store.format.names import TransactionKeys, record_key
from dcr_store.payload.version import SealedPartition, VersionContents
from dcr_store.ports import Dated
from dcr_store.report.figures import StoredPartition
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.edges import Edge

N_LISTED: Final = 10


class PartitionTally:
    """Keeps the largest and the slowest of many partitions."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._times: dict[str, dict[str, float]] = {}
        self.largest: tuple[StoredPartition, ...] = ()
        self.slowest: tuple[StoredPartition, ...] = ()

    def add(self, located: Located, edge: Edge, contents: VersionContents) -> None:
        """Take the partitions of the edge that leads to a version."""
        times = self._seconds(located, edge)
        found = [_told(located, item, contents, times.get(item.key)) for item in contents.partitions]
        # Of equal ones the newest first, and then in the order of the seals.
        self.largest = _most([*found, *self.largest], lambda item: item.nbytes)
        timed = [item for item in found if item.seconds is not None]
        self.slowest = _most([*timed, *self.slowest], lambda item: item.seconds or 0.0)

    def _seconds(self, located: Located, edge: Edge) -> dict[str, float]:
        """Return by key how long after the version's begin what it consists of was stored; {} if nothing tells."""
        objects = self._catalog.objects
        if not isinstance(objects, Dated) or edge.txid != located.row.txid:
            return {}
        if edge.line not in self._times:
            self._times[edge.line] = {key: at for key, (_, at) in objects.dated(f"log/{edge.line}/").items()}
        begun = self._times[edge.line].get(record_key(edge.line, located.row.begin_seq))
        if begun is None:
            return {}
        prefix = TransactionKeys(edge.line, edge.version, edge.txid).prefix
        return {key: max(0.0, at - begun) for key, (_, at) in objects.dated(f"{prefix}data/").items()}


def _told(located: Located, item: SealedPartition, contents: VersionContents, seconds: float | None) -> StoredPartition:
    start = item.partition.index * item.array.shard
    space = item.array.array.partition("/")[0]
    pieces = contents.layout.pieces(space, start, start + item.array.shard)
    names = [piece.entry.name for piece in pieces] or [""]
    return StoredPartition(
        located.row.version,
        item.writer,
        item.array.array,
        item.partition.index,
        item.partition.nbytes,
        seconds,
        len(pieces),
        names[0],
        names[-1],
    )


def _most(found: Iterable[StoredPartition], key: Callable[[StoredPartition], float]) -> tuple[StoredPartition, ...]:
    return tuple(heapq.nlargest(N_LISTED, found, key=key))
