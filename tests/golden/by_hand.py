"""Versions written by hand for the golden stores: what no publisher of this release writes yet.

Overwrites (values where present), several writers, shards of other lengths, partitions of an earlier incarnation; all
as docs/spec/v1.md §6 to §9 say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from golden.contents import CHUNK_ELEMENTS, Bits, Random, State

from dcr_store.codec.digest import crc64, zeros_digest
from dcr_store.codec.portable import get_codec
from dcr_store.format.documents import (
    SPACES,
    Array,
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
from dcr_store.format.names import TransactionKeys, new_incarnation, new_txid
from dcr_store.format.records import Begin, Commit
from dcr_store.layout.dtypes import uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.payload import arrays, contributions, shard
from dcr_store.payload.version import root_of
from dcr_store.store import Store

Dense = dict[str, Bits]


@dataclass
class Part:
    """What one writer contributes: per space, dense arrays of the space's length.

    ``split`` has the first partition of each array stored by an incarnation before the one that seals.
    """

    writer: str
    owned: Dense
    shard_chunks: int
    split: bool = False
    mask: Dense = field(default_factory=dict)
    value: Dense = field(default_factory=dict)
    present: Dense = field(default_factory=dict)


def overwriting(
    writer: str,
    layout: Layout,
    base: Dense,
    random: Random,
    rank: int,
    n_ranks: int,
    *,
    shard_chunks: int,
    split: bool = False,
) -> Part:
    """Make a writer that owns every `n_ranks`-th run of 8 elements of each tensor: masks here, overwrites there."""
    owned = {space: np.zeros(n, bool) for space, n in layout.spaces.items()}
    for entry in layout.tensors:
        owned[entry.space][entry.start : entry.stop] = np.arange(entry.n_elements) // 8 % n_ranks == rank
    part = Part(writer, owned, shard_chunks, split)
    for space, mine in owned.items():
        n = len(mine)
        there = mine & (random.uniform(n) < 0.3)
        if space == "u16":
            there &= random.uniform(n) < 0.1
        values = np.where(random.uniform(n) < 0.2, 0, base[space] ^ random.mask(n, space, 0.8))
        if space == "u8":
            values[:] = 0  # all overwritten with zeros: the array of values holds no partition
        part.present[space] = there.astype(np.uint8) * np.uint8(1 + rank)
        part.value[space] = np.where(there, values, 0).astype(base[space].dtype)
        if space in ("u16", "u32"):
            part.mask[space] = np.where(mine & ~there, random.mask(n, space, 0.1), 0).astype(base[space].dtype)
    return part


def to_dense(layout: Layout, state: State) -> Dense:
    dense = {space: np.zeros(n, uint_dtype(space)) for space, n in layout.spaces.items()}
    for entry in layout.tensors:
        dense[entry.space][entry.start : entry.stop] = state[entry.name].bits
    return dense


def from_dense(layout: Layout, dense: Dense, like: State) -> State:
    places = {name: layout.entry(name) for name in like}
    return {n: like[n].changed(dense[e.space][e.start : e.stop].copy()) for n, e in places.items()}


def chunked(array: Bits) -> list[Bits]:
    whole = np.concatenate([array, np.zeros(-len(array) % CHUNK_ELEMENTS, array.dtype)])
    return [whole[i : i + CHUNK_ELEMENTS] for i in range(0, len(whole), CHUNK_ELEMENTS)]


def linear(chunk: Bits) -> int:
    return crc64(chunk) ^ zeros_digest(chunk.nbytes)


class HandWriter:
    """Stores what a part holds, as docs/spec/v1.md §6.1 and §8 say."""

    def __init__(self, store: Store, keys: TransactionKeys, layout: Layout, part: Part) -> None:
        self.store, self.keys, self.layout, self.part = store, keys, layout, part
        self.earlier = new_incarnation() if part.split else None
        self.incarnation = new_incarnation()
        self.arrays: list[Array] = []
        self.partitions: list[Partition] = []
        self.nbytes = 0

    def put(self, key: str, data: bytes) -> ObjectRef:
        self.store._objects.put(key, data)
        self.nbytes += len(data)
        return ObjectRef.of(key, data)

    def array(self, name: str, dense: Bits) -> None:
        document, per = self.store._document, self.part.shard_chunks
        data, size = self.keys.data(self.part.writer, self.incarnation), document.chunk_elements
        metadata = arrays.payload_metadata(name, len(dense), size, per * size, document.codec)
        reference = self.put(f"{data}{name}/zarr.json", metadata)
        self.arrays.append(Array(name, len(dense), size, per * size, document.codec, reference))
        chunks = chunked(dense)
        for index in range(-(-len(chunks) // per)):
            mine = enumerate(chunks[index * per : (index + 1) * per])
            encoded = {place: get_codec(document.codec).encode(chunk) for place, chunk in mine if chunk.any()}
            if encoded:
                incarnation = self.earlier if self.earlier is not None and index == 0 else self.incarnation
                key = self.keys.partition(self.part.writer, incarnation, name, index)
                ref = self.put(key, shard.assemble(encoded, per))
                self.partitions.append(Partition(name, index, incarnation, ref.nbytes, ref.sha256, len(encoded)))

    def rows(self, base: Dense) -> dict[str, Bits]:
        result = {}
        for space, owned in self.part.owned.items():
            there, nothing = self.part.present[space] != 0, np.zeros_like(base[space])
            mask = self.part.mask.get(space, nothing)
            changes = np.where(there, base[space] ^ self.part.value[space], nothing)
            columns = [chunked(a) for a in (mask, changes, np.where(owned, base[space], nothing))]
            touched = [bool(chunk.any()) for chunk in chunked(mask | there)]
            rows = [
                (i, *(linear(column[i]) for column in columns)) for i, is_touched in enumerate(touched) if is_touched
            ]
            result[space] = np.array(rows, np.uint64).reshape(len(rows), 4)
        return result

    def seal(self, base: Dense, n_changed: int) -> SealRef:
        for space in SPACES:
            for kind, table in (("mask", self.part.mask), ("value", self.part.value), ("present", self.part.present)):
                if space in table:
                    self.array(f"{space}/{kind}", table[space])
        if self.earlier is not None:
            found = tuple(item for item in self.partitions if item.incarnation == self.earlier)
            earlier = self._journal(self.earlier, found, None)
            self.nbytes -= earlier.nbytes  # no part of the version
        stored = self.put(
            f"{self.keys.data(self.part.writer, self.incarnation)}contributions.bin",
            contributions.encode(self.rows(base)),
        )
        sealed = Seal(tuple(self.arrays), tuple(self.partitions), stored, (), (), n_changed)
        return SealRef(
            self.part.writer, self.incarnation, self._journal(self.incarnation, tuple(self.partitions), sealed)
        )

    def _journal(self, incarnation: str, named: tuple[Partition, ...], seal: Seal | None) -> ObjectRef:
        keys, writer = self.keys, self.part.writer
        entry = JournalEntry(keys.line, keys.txid, 0, writer, incarnation, 0, None, named, seal)
        return self.put(keys.journal(writer, incarnation, 0), entry.to_bytes())


def after(base: Dense, parts: Iterable[Part]) -> Dense:
    """Return the state that the writers make of the base, in the words of docs/spec/v1.md §6."""
    state = {space: bits.copy() for space, bits in base.items()}
    for part in parts:
        for space, mask in part.mask.items():
            state[space] ^= mask
    for part in parts:
        for space, present in part.present.items():
            state[space] = np.where(present != 0, part.value[space], state[space])
    return state


def publish_by_hand(store: Store, layout: Layout, parts: list[Part], base: Dense) -> Dense:
    """Commit a version as several writers and a committer would; return its state."""
    log = store._catalog.log("main")
    state, txid = log.refresh(), new_txid()
    keys = TransactionKeys("main", state.next_version, txid)
    log.append(
        lambda s: Begin(
            line="main", seq=s.length, id=new_txid(), prev=s.last_sha256, created_at=now(), txid=txid,
            owner="by hand", version=s.next_version, base=s.head_base, layout=layout.sha256,
            writers=tuple(part.writer for part in parts), message="by hand",
        )
    )  # fmt: skip
    new = after(base, parts)
    writers = [HandWriter(store, keys, layout, part) for part in parts]
    counts = [sum(int(np.count_nonzero(p.owned[s] & (new[s] != base[s]))) for s in SPACES) for p in parts]
    seals = tuple(writer.seal(base, n_changed) for writer, n_changed in zip(writers, counts, strict=True))
    tables = {space: np.array([crc64(c) for c in chunked(bits)], np.uint64) for space, bits in new.items()}
    committer = writers[0]
    digests = {
        space: Digests(
            committer.put(f"{keys.attempt(0)}digests/{space}/zarr.json", arrays.table_metadata(len(table))),
            committer.put(f"{keys.attempt(0)}digests/{space}/c/0", table.astype("<u8").tobytes()),
        )
        for space, table in tables.items()
        if len(table)
    }
    n_all = sum(entry.n_elements for entry in layout.tensors)
    nbytes, n_partitions = sum(w.nbytes for w in writers), sum(len(w.partitions) for w in writers)
    manifest = Manifest(
        "main", keys.version, txid, 0, layout.sha256, state.head_base,
        root_of(layout, tables, CHUNK_ELEMENTS), now(), seals, digests, (),
        Counts(sum(counts), n_all, nbytes, n_partitions, len(layout.tensors)),
    )  # fmt: skip
    ref = committer.put(keys.manifest(0), manifest.to_bytes())
    log.append(
        lambda s: Commit(
            line="main", seq=s.length, id=new_txid(), prev=s.last_sha256, created_at=now(), txid=txid, attempt=0,
            version=manifest.version, base=manifest.base, layout=manifest.layout, root=manifest.root, manifest=ref,
            counts=manifest.counts,
        )
    )  # fmt: skip
    return new
