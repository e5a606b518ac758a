"""One partition of an anchor or a fold: read what it is made of, encode, prove, store. Runs wherever it is sent.

A range is the chunks of one partition. An anchor's chunks are replayed from zero; those of a fold are the masks of
several versions, joined by XOR, where overwrites become masks against the base, of which only their chunks are read.
Each chunk is proven by the digests of both versions before it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcr_store import events
from dcr_store.codec.portable import get_codec
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import ObjectRef, Partition
from dcr_store.format.names import TransactionKeys
from dcr_store.payload import shard
from dcr_store.payload.version import SealedPartition, VersionContents, fetch_all
from dcr_store.publish.chunk_encoding import encode_anchor
from dcr_store.publish.journaled import Durable
from dcr_store.publish.opening import WRITER
from dcr_store.versions.changes import decode_chunk
from dcr_store.versions.chunks import chunks_at
from dcr_store.versions.edges import Edge
from dcr_store.versions.places import StorePlace
from dcr_store.versions.workers import scratch, worker_pool


@dataclass(frozen=True, slots=True)
class RangeJob:
    """What one partition is made of.

    Attributes
    ----------
    edges : tuple of Edge
        From zero to the version, for an anchor; from the base to it, for a fold.
    base_path : tuple of Edge, or None
        Of a fold: from zero to the base.
    chunks : tuple of int
        Of the space; those that are not zero, or that differ between base and version.
    n_per_partition : int
    durable : mapping
        What earlier incarnations stored of this partition, as of ``publish.partitions``.
    """

    line: str
    keys: TransactionKeys
    incarnation: str
    edges: tuple[Edge, ...]
    base_path: tuple[Edge, ...] | None
    space: str
    index: int
    chunks: tuple[int, ...]
    n_per_partition: int
    durable: Durable


@dataclass(frozen=True, slots=True)
class RangeDone:
    """What was stored.

    Attributes
    ----------
    rows : tuple of (int, int, int, int)
        Contributions, as of ``payload.contributions``.
    n_changed : int
        Elements that differ from the base; none is counted of an anchor.
    """

    space: str
    partition: Partition
    rows: tuple[tuple[int, int, int, int], ...]
    n_changed: int


@dataclass(frozen=True, slots=True)
class _Encoded:
    """One chunk: its mask, encoded; the contributions; how many elements change."""

    chunk: int
    data: bytes
    row: tuple[int, int, int, int]
    n_changed: int


def do(place: StorePlace, job: RangeJob) -> RangeDone:
    """Store the partitions of one range; those that are there already are left as they are.

    Raises
    ------
    IntegrityError
        If the store does not hold what the versions' digests say.
    """
    catalog = place.catalog
    catalog.fresh(job.line)
    if job.base_path is None:
        encoded = _anchor(place, job)
    else:
        base = catalog.contents_of_edge(job.line, job.base_path[-1])
        encoded = _fold(place, job, base, catalog.contents_of_path(job.line, job.edges))
    rows = tuple(item.row for item in encoded)
    return RangeDone(job.space, _store(place, job, encoded), rows, sum(item.n_changed for item in encoded))


def _store(place: StorePlace, job: RangeJob, encoded: Sequence[_Encoded]) -> Partition:
    first = job.index * job.n_per_partition
    chunks = {item.chunk - first: item.data for item in encoded}
    blob = shard.assemble(chunks, job.n_per_partition)
    array = f"{job.space}/mask"
    ref = ObjectRef.of(job.keys.partition(WRITER, job.incarnation, array, job.index), blob)
    known = job.durable.get((array, job.index, ref.sha256))
    if known is not None:
        return known
    events.reached("edge.partition.before", ref.key)
    place.catalog.objects.put(ref.key, blob)
    events.reached("edge.partition.stored", ref.key)
    return Partition(array, job.index, job.incarnation, ref.nbytes, ref.sha256, len(chunks))


def _anchor(place: StorePlace, job: RangeJob) -> list[_Encoded]:
    document = place.catalog.document
    found = chunks_at(place.catalog, job.line, job.edges, job.space, job.chunks)
    goal = place.catalog.contents_of_edge(job.line, job.edges[-1])

    def encode(chunk: int) -> _Encoded:
        encoded = encode_anchor(get_codec(document.codec), job.space, chunk, found[chunk])
        _check(goal, job.space, chunk, int(goal.tables[job.space][chunk]), encoded.new)
        assert encoded.data is not None  # its digest is not that of zeros
        return _Encoded(chunk, encoded.data, (chunk, encoded.new ^ encoded.base, 0, 0), 0)

    with worker_pool() as pool:
        return list(pool.map(encode, job.chunks))


def _fold(place: StorePlace, job: RangeJob, base: VersionContents, steps: Sequence[VersionContents]) -> list[_Encoded]:
    document, wanted = place.catalog.document, set(job.chunks)
    items: list[list[SealedPartition]] = [
        [
            item
            for item in contents.partitions
            if item.array.array.startswith(f"{job.space}/")
            and not wanted.isdisjoint(range(item.first_chunk, item.first_chunk + item.n_chunks))
        ]
        for contents in steps
    ]
    flat = [item for of_step in items for item in of_step]
    blobs = fetch_all(place.catalog.objects, [item.ref for item in flat])
    parsed = {item.key: item.parse(blob) for item, blob in zip(flat, blobs, strict=True)}
    overwritten = {
        chunk
        for of_step in items
        for item in of_step
        if item.array.array.endswith("/present")
        for chunk in parsed[item.key]
        if chunk in wanted
    }
    # What an overwrite changes is known by the base alone.
    to_base = job.base_path or ()
    base_bits = chunks_at(place.catalog, job.line, to_base, job.space, overwritten) if overwritten else {}

    def compose(chunk: int) -> _Encoded:
        mask = scratch(job.space, document.chunk_elements, "fold")
        mask.fill(0)
        for contents, of_step in zip(steps, items, strict=True):
            if chunk not in contents.touched[job.space]:
                continue
            found = [(item, parsed[item.key][chunk]) for item in of_step if chunk in parsed[item.key]]
            changes = decode_chunk(contents, job.space, chunk, found, document.chunk_elements)
            mask[changes.positions] ^= changes.masks
            if len(changes.written):
                mask[changes.written] = changes.values ^ base_bits[chunk][changes.written]
        before, after = int(base.tables[job.space][chunk]), int(steps[-1].tables[job.space][chunk])
        encoded = encode_anchor(get_codec(document.codec), job.space, chunk, mask)
        change = encoded.new ^ encoded.base
        _check(steps[-1], job.space, chunk, before ^ after, change)
        assert encoded.data is not None  # the digests differ
        row = chunk, change, 0, before ^ encoded.base
        return _Encoded(chunk, encoded.data, row, int(np.count_nonzero(mask)))

    with worker_pool() as pool:
        return list(pool.map(compose, job.chunks))


def _check(contents: VersionContents, space: str, chunk: int, expected: int, found: int) -> None:
    if expected != found:
        raise IntegrityError(
            f"what the store holds of chunk {chunk} of {space} does not give the recorded bits; nothing was added to "
            "the log: publish the state again as a new version",
            key=contents.name,
            expected=f"{expected:016x}",
            found=f"{found:016x}",
        )
