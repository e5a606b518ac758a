"""Versions made by hand, from dense arrays and through the payload floor: what no publisher writes yet.

Several writers, overwrites (values where present), shards of other lengths, partitions of earlier incarnations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
from dcr_store.format.names import TransactionKeys, layout_key, new_incarnation, new_txid
from dcr_store.format.records import Begin, Commit
from dcr_store.layout.dtypes import uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.payload import arrays, contributions, shard
from dcr_store.payload.version import root_of
from dcr_store.store import Store

Dense = dict[str, np.ndarray]


@dataclass
class Part:
    """What one writer contributes to a version: per space, dense arrays of the space's length.

    ``shards`` is the number of chunks of a shard by array (``u16/mask``), ``earlier`` the incarnation of partitions
    that an earlier start of the writer stored, by array.
    """

    writer: str = "w0"
    mask: Dense = field(default_factory=dict)
    value: Dense = field(default_factory=dict)
    present: Dense = field(default_factory=dict)
    owned: Dense = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    earlier: dict[str, str] = field(default_factory=dict)
    incarnation: str = field(default_factory=new_incarnation)


def zeros(layout: Layout) -> Dense:
    return {space: np.zeros(layout.spaces[space], uint_dtype(space)) for space in SPACES}


def after(base: Dense, parts: list[Part]) -> Dense:
    """Return the state after `parts`, by the words of the spec: ``(base ^ M)``, then V where P."""
    state = {space: bits.copy() for space, bits in base.items()}
    for part in parts:
        for space, mask in part.mask.items():
            state[space] ^= mask
    for part in parts:
        for space, present in part.present.items():
            where = present != 0
            values = part.value.get(space, np.zeros_like(state[space]))
            state[space][where] = values[where]
    return state


def padded(array: np.ndarray, n_elements: int) -> np.ndarray:
    return np.concatenate([array, np.zeros(-len(array) % n_elements, array.dtype)])


def chunks(array: np.ndarray, n_elements: int) -> list[np.ndarray]:
    whole = padded(array, n_elements)
    return [whole[i : i + n_elements] for i in range(0, len(whole), n_elements)]


def tables(state: Dense, n_elements: int) -> dict[str, np.ndarray]:
    return {
        space: np.array([crc64(chunk) for chunk in chunks(bits, n_elements)], np.uint64)
        for space, bits in state.items()
    }


def linear(chunk: np.ndarray) -> int:
    return crc64(chunk) ^ zeros_digest(chunk.nbytes)


def publish(
    store: Store,
    layout: Layout,
    parts: list[Part],
    base: Dense | None,
    *,
    line: str = "main",
    edit_seal: Callable[[Seal], Seal] = lambda seal: seal,
    edit_manifest: Callable[[bytes], bytes] = lambda data: data,
    writers: tuple[str, ...] | None = None,
    **changed: Any,
) -> Dense:
    """Commit a version and return its state; `base` is the state before, None for an anchor.

    `changed` replaces fields of the manifest, `edit_seal` seals, `edit_manifest` the manifest's bytes,
    `writers` those that the begin record names.
    """
    objects, document = store._objects, store._document
    size, codec = document.chunk_elements, get_codec(document.codec)
    log = store._catalog.log(line)
    state = log.refresh()
    txid = new_txid()
    keys = TransactionKeys(line, state.next_version, txid)

    def put(key: str, data: bytes) -> ObjectRef:
        objects.put(key, data)
        return ObjectRef.of(key, data)

    log.append(
        lambda s: Begin(
            line=line, seq=s.length, id=new_txid(), prev=s.last_sha256, created_at=now(), txid=txid, owner="by hand",
            version=s.next_version, base=s.head_base, layout=None,
            writers=writers or tuple(part.writer for part in parts),
        )
    )  # fmt: skip
    old = zeros(layout) if base is None else base
    seals = []
    for part in parts:
        described, partitions = [], []
        rows: dict[str, list[tuple[int, int, int, int]]] = {space: [] for space in SPACES}
        for space in SPACES:
            length = layout.spaces[space]
            tables_by_kind = {"mask": part.mask, "value": part.value, "present": part.present}
            given = {kind: table[space] for kind, table in tables_by_kind.items() if length and space in table}
            for kind, dense in given.items():
                array = f"{space}/{kind}"
                incarnation = part.earlier.get(array, part.incarnation)
                per = part.shards.get(array, 2)
                pieces = chunks(dense, size)
                metadata = arrays.payload_metadata(array, length, size, per * size, document.codec)
                zarr = put(keys.data(part.writer, part.incarnation) + f"{array}/zarr.json", metadata)
                described.append(Array(array, length, size, per * size, document.codec, zarr))
                for index in range(-(-len(pieces) // per)):
                    mine = pieces[index * per : (index + 1) * per]
                    encoded = {place: codec.encode(piece) for place, piece in enumerate(mine) if piece.any()}
                    if encoded:
                        blob = shard.assemble(encoded, per)
                        ref = put(keys.partition(part.writer, incarnation, array, index), blob)
                        entry = Partition(array, index, incarnation, ref.nbytes, ref.sha256, len(encoded))
                        partitions.append(entry)
            if given:
                present = part.present.get(space, np.zeros(length, np.uint8)) != 0
                value = part.value.get(space, np.zeros_like(old[space]))
                changes = np.where(present, old[space] ^ value, 0).astype(old[space].dtype)
                owned = np.where(part.owned.get(space, np.ones(length, bool)), old[space], 0).astype(old[space].dtype)
                tables_of = [chunks(a, size) for a in (part.mask.get(space, np.zeros_like(value)), changes, owned)]
                flags = chunks(present, size)
                for i, (mask_chunk, change_chunk, owned_chunk) in enumerate(zip(*tables_of, strict=True)):
                    if mask_chunk.any() or flags[i].any():
                        rows[space].append((i, linear(mask_chunk), linear(change_chunk), linear(owned_chunk)))
        contributed = put(
            keys.data(part.writer, part.incarnation) + "contributions.bin",
            contributions.encode({s: np.array(r, np.uint64).reshape(len(r), 4) for s, r in rows.items()}),
        )
        seal = edit_seal(Seal(tuple(described), tuple(partitions), contributed, (), (), 0))
        entry = JournalEntry(line, txid, 0, part.writer, part.incarnation, 0, None, tuple(partitions), seal)
        seals.append(SealRef(part.writer, part.incarnation,
                             put(keys.journal(part.writer, part.incarnation, 0), entry.to_bytes())))  # fmt: skip
    new = after(old, parts)
    found = tables(new, size)
    prefix = keys.attempt(0)
    digests = {
        space: Digests(
            put(f"{prefix}digests/{space}/zarr.json", arrays.table_metadata(len(table))),
            put(f"{prefix}digests/{space}/c/0", table.astype("<u8").tobytes()),
        )
        for space, table in found.items()
        if len(table)
    }
    objects.put(layout_key(layout.sha256), layout.to_json_bytes())
    counts = Counts(0, sum(layout.spaces.values()), 0, 0, len(layout.tensors))
    fields: dict[str, Any] = {
        "line": line, "version": keys.version, "txid": txid, "attempt": 0, "layout": layout.sha256,
        "base": None if base is None else state.head_base, "root": root_of(layout, found, size), "created_at": now(),
        "seals": tuple(seals), "digests": digests, "files": (), "counts": counts,
    }  # fmt: skip
    manifest = Manifest(**{**fields, **changed})
    ref = put(keys.manifest(0), edit_manifest(manifest.to_bytes()))
    log.append(
        lambda s: Commit(
            line=line, seq=s.length, id=new_txid(), prev=s.last_sha256, created_at=now(), txid=txid, attempt=0,
            version=manifest.version, base=manifest.base, layout=manifest.layout, root=manifest.root, manifest=ref,
            counts=counts,
        )
    )  # fmt: skip
    return new


def tensors(layout: Layout, state: Dense) -> dict[str, np.ndarray]:
    """Return the bits of each tensor by name."""
    return {name: state[(e := layout.entry(name)).space][e.start : e.stop] for name in layout.names()}
