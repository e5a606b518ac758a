"""What one writer stores of a version, planned by the store's own code, and how long that takes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from bench_codec import step, weights
from scale_models import CHUNK_ELEMENTS, Share

from dcr_store.codec.chunk import find_changes
from dcr_store.codec.portable import get_codec
from dcr_store.format.documents import (
    SPACES,
    Array,
    Base,
    Counts,
    Digests,
    JournalEntry,
    Manifest,
    ObjectRef,
    Partition,
    Seal,
    SealRef,
)
from dcr_store.format.fields import now
from dcr_store.format.names import TransactionKeys
from dcr_store.layout.layout import Layout
from dcr_store.objects.memory import MemoryObjects
from dcr_store.objects.transfer import N_PARALLEL
from dcr_store.payload import contributions, shard
from dcr_store.publish import partitions as publishing
from dcr_store.publish.ownership import Ownership
from dcr_store.publish.partitions import PartitionWriter
from dcr_store.publish.uploads import N_UPLOADS


@dataclass(frozen=True)
class Coding:
    """Bytes that the codec makes of an element, of a change and of a whole state, on one chunk like in training."""

    rate: float
    delta: float
    anchor: float

    @classmethod
    def at(cls, rate: float) -> Coding:
        """Encode."""
        rng, codec = np.random.default_rng(0), get_codec("dcr.delta")
        base = weights(rng, CHUNK_ELEMENTS)
        data = codec.encode_sparse(*find_changes(base, step(rng, base, rate)), CHUNK_ELEMENTS)
        return cls(rate, len(data) / CHUNK_ELEMENTS, len(codec.encode(base)) / CHUNK_ELEMENTS)


@dataclass(frozen=True)
class Written:
    """What one writer stores of a version, and what it takes: bytes, objects, seconds after it began."""

    partitions: list[int]
    n_journal: int
    journal_nbytes: int
    seal_nbytes: int
    ownership_nbytes: int
    contributions_nbytes: int
    n_rows: int
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(self.partitions) + self.journal_nbytes + self.contributions_nbytes

    @property
    def n_puts(self) -> int:
        return len(self.partitions) + self.n_journal + 2  # contributions, zarr.json


@dataclass(frozen=True)
class Clock:
    """An object store and machines, in seconds."""

    first_byte_s: float
    connection: float
    node: float
    writers_per_node: int
    list_s: float
    encode: float
    json: float

    def request_s(self, nbytes: float, n_side_by_side: int) -> float:
        """Return how long a request of `nbytes` takes where so many share a node."""
        return self.first_byte_s + nbytes / min(self.connection, self.node / max(1, n_side_by_side))

    def many_s(self, n: float, nbytes: float, n_parallel: int = N_PARALLEL) -> float:
        """Return how long `n` requests of `nbytes` each take, so many at a time on a node."""
        return math.ceil(n / n_parallel) * self.request_s(nbytes, min(n_parallel, max(1, int(n)))) if n else 0.0


KEYS = TransactionKeys("main", 500, "0" * 32)
DIGEST = "0" * 64


def ref(key: str, nbytes: int) -> ObjectRef:
    return ObjectRef(key, DIGEST, nbytes)


def partitions_of(share: Share, coding: Coding, *, is_anchor: bool) -> list[Partition]:
    """Return the partitions of a writer, by the code's own cut."""
    writer = PartitionWriter(
        MemoryObjects(""), KEYS, "w0", "0" * 16, 0, "dcr.delta", CHUNK_ELEMENTS, {}, None
    )  # its pool starts no thread
    found: dict[tuple[str, int], list[float]] = {}
    for (space, chunk), n in share.chunks.items():
        if is_anchor or n * coding.rate >= 0.5:
            nbytes = n * (coding.anchor if is_anchor else coding.delta)
            found.setdefault((space, chunk // writer.chunks_per_partition(space)), []).append(nbytes)
    result = []
    for (space, index), sizes in sorted(found.items()):
        nbytes = math.ceil(sum(sizes)) + shard.index_nbytes(writer.chunks_per_partition(space))
        result.append(Partition(f"{space}/mask", index, "0" * 16, nbytes, DIGEST, len(sizes)))
    writer.close()
    return result


def written(share: Share, layout: Layout, coding: Coding, clock: Clock, name: str, *, is_anchor: bool) -> Written:
    """Simulate one writer: encode, upload, journal, seal."""
    stored = partitions_of(share, coding, is_anchor=is_anchor)
    side_by_side = N_UPLOADS * clock.writers_per_node
    encode_s = 2 * share.n_elements / clock.encode
    free = [0.0] * N_UPLOADS
    entries: list[int] = []
    waiting: list[Partition] = []
    journaled_s, journal_nbytes, journal = 0.0, 0, []
    for index, partition in enumerate(stored):
        ready_s = encode_s * (index + 1) / len(stored)
        end_s = max(heapq.heappop(free), ready_s) + clock.request_s(partition.nbytes, side_by_side)
        waiting.append(partition)
        n_wanted = publishing.JOURNAL_PARTITIONS if journal else publishing.JOURNAL_FIRST_PARTITIONS
        if len(waiting) >= n_wanted or end_s - journaled_s >= publishing.JOURNAL_INTERVAL_S:
            nbytes = len(entry_of(name, len(journal), waiting, None))
            journal.append(ref(KEYS.journal(name, "0" * 16, len(journal)), nbytes))
            entries.append(nbytes)
            journal_nbytes += nbytes
            waiting, journaled_s = [], end_s
            end_s += clock.request_s(nbytes, side_by_side)
        heapq.heappush(free, end_s)
    touched = {space: [chunk for its, chunk in sorted(share.chunks) if its == space] for space in SPACES}
    rows = {space: np.zeros((len(found), 4), np.uint64) for space, found in touched.items()}
    contributed = len(contributions.encode(rows))
    owned = ownership_nbytes(share, layout, name)
    described = [
        Array(
            f"{space}/mask", layout.spaces[space], CHUNK_ELEMENTS, 32 * CHUNK_ELEMENTS, "dcr.delta",
            ref(f"{KEYS.data(name, '0' * 16)}{space}/mask/zarr.json", 600),
        )
        for space, found in touched.items() if found
    ]  # fmt: skip
    data = KEYS.data(name, "0" * 16)
    seal = Seal(
        tuple(described), tuple(stored), ref(f"{data}contributions.bin", contributed), tuple(journal), (), 10**9,
        ref(f"{data}ownership.json", owned),
    )  # fmt: skip
    seal_nbytes = len(entry_of(name, len(journal), waiting, seal))
    end_s = max(free) + clock.request_s(contributed, side_by_side) + clock.request_s(seal_nbytes, side_by_side)
    return Written(
        [partition.nbytes for partition in stored],
        len(journal) + 1,
        journal_nbytes + seal_nbytes,
        seal_nbytes,
        owned,
        contributed,
        sum(map(len, touched.values())),
        end_s,
    )


def entry_of(name: str, seq: int, partitions: Sequence[Partition], seal: Seal | None) -> bytes:
    previous = DIGEST if seq else None
    entry = JournalEntry("main", KEYS.txid, 0, name, "0" * 16, seq, previous, tuple(partitions), seal)
    return entry.to_bytes()


def ownership_nbytes(share: Share, layout: Layout, name: str) -> int:
    """Return the bytes of the document that says what a writer owns, in which any digests take the same."""
    ones = {
        space: np.array([[chunk, 2**64 - 1] for its, chunk in sorted(share.chunks) if its == space], np.uint64).reshape(
            -1, 2
        )
        for space in SPACES
    }
    return len(Ownership(layout.sha256, name, share.boxes, ones).to_bytes())


def manifest_nbytes(layout: Layout, writers: Sequence[str], seal_nbytes: int) -> int:
    prefix, digests = f"{KEYS.attempt(0)}digests", {}
    for space in SPACES:
        if layout.spaces[space]:
            digests[space] = Digests(ref(f"{prefix}/{space}/zarr.json", 500), ref(f"{prefix}/{space}/c/0", 10**7))
    seals = [SealRef(name, "0" * 16, ref(KEYS.journal(name, "0" * 16, 9), seal_nbytes)) for name in writers]
    counts = Counts(10**10, 10**12, 10**10, 10**4, len(layout.tensors))
    base = Base("main@499", DIGEST)
    manifest = Manifest(
        "main", 500, KEYS.txid, 0, layout.sha256, base, DIGEST, now(), tuple(seals), digests, (), counts
    )
    return len(manifest.to_bytes())
