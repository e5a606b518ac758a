"""One version of a model by many writers: objects, bytes, requests, seconds, for simulate_scale.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from scale_models import CHUNK_ELEMENTS, Model, Share
from scale_writer import DIGEST, Clock, Coding, manifest_nbytes, written

from dcr_store.format.documents import (
    SPACES,
    Base,
)
from dcr_store.format.fields import now
from dcr_store.format.names import new_txid
from dcr_store.format.records import Begin
from dcr_store.layout.layout import Layout
from dcr_store.payload import arrays
from dcr_store.versions.catalog import _contents_nbytes

if TYPE_CHECKING:
    from dcr_store.payload.version import VersionContents

LIST_PAGE = 1000


@dataclass(frozen=True)
class Version:
    """One version of a model by so many writers: objects, bytes, requests, seconds.

    Attributes
    ----------
    nbytes, metadata_nbytes : int
        What is stored, and how much of it besides the masks.
    stages_s : dict of str to float
        What a commit waits for, one after the other.
    receive_stages_s : dict of str to float
        What a receiver waits for that begins when the version is committed.
    committer_nbytes, contents_nbytes : int
        Memory: of all that is sealed; of what a reader keeps of one version.
    """

    model: str
    rate: float
    n_writers: int
    topology: str
    n_objects: int
    nbytes: int
    metadata_nbytes: int
    seal_nbytes: int
    ownership_nbytes: int
    manifest_nbytes: int
    begin_nbytes: int
    puts: int
    gets: int
    lists: int
    receiver_gets: int
    receiver_nbytes: int
    stages_s: dict[str, float]
    receive_stages_s: dict[str, float]
    committer_nbytes: int
    contents_nbytes: int
    slice_nbytes_per_edge: int

    @property
    def seconds(self) -> float:
        return sum(self.stages_s.values())

    @property
    def bound(self) -> str:
        """Which stage of the commit takes the most."""
        return max(self.stages_s, key=lambda stage: self.stages_s[stage])


def version_of(
    model: Model, layout: Layout, shares: Sequence[Share], n_writers: int, topology: str, coding: Coding, clock: Clock
) -> Version:
    """Plan a version of alike writers, of which `shares` are some, and let the clock run."""
    names = [f"rank{index:04d}" for index in range(n_writers)]
    found = [written(share, layout, coding, clock, names[index], is_anchor=False) for index, share in enumerate(shares)]
    times = n_writers / len(found)
    n_elements = sum(entry.n_elements for entry in layout.tensors)
    # The masks of all of the model, whatever of it the sample has.
    payload = round(n_elements / sum(share.n_elements for share in shares) * sum(sum(it.partitions) for it in found))

    def total(value: Any) -> int:
        return round(times * sum(value(item) for item in found))

    n_partitions, n_journal = total(lambda it: len(it.partitions)), total(lambda it: it.n_journal)
    journal = total(lambda it: it.journal_nbytes)
    contributed, owned = total(lambda it: it.contributions_nbytes), total(lambda it: it.ownership_nbytes)
    seals, rows = total(lambda it: it.seal_nbytes), total(lambda it: it.n_rows)
    n_chunks = {space: layout.n_chunks(space, CHUNK_ELEMENTS) for space in SPACES}
    tables = 8 * sum(n_chunks.values())
    spaces = sum(1 for n in n_chunks.values() if n)
    manifest = manifest_nbytes(layout, names, seals // n_writers)
    begin = len(begin_of(names, layout))
    shard_elements = 32 * CHUNK_ELEMENTS
    zarr = len(arrays.payload_metadata("u16/mask", layout.spaces["u16"], CHUNK_ELEMENTS, shard_elements, "dcr.delta"))
    metadata = journal + contributed + tables + manifest + zarr * n_writers + len(arrays.table_metadata(1)) * spaces
    puts = total(lambda it: it.n_puts) + 2 * spaces + 1
    n_pages = math.ceil(puts / LIST_PAGE)
    stages = {
        "encode and upload": max(item.seconds for item in found),
        "find seals": math.ceil(n_journal / LIST_PAGE) * clock.list_s + clock.many_s(n_writers, seals / n_writers),
        "parse seals": seals / clock.json,
        "read contributions": clock.many_s(n_writers, contributed / n_writers),
        # The listing, and what each owns, which stands with an earlier version.
        "look for what was sealed": n_pages * clock.list_s + clock.many_s(n_writers, 0),
        "tables, manifest": clock.many_s(2 * spaces + 1, max(tables, manifest)),
        "append to the log": 4 * clock.first_byte_s + begin / clock.connection,
    }
    receiver_gets = 2 + 2 * n_writers + spaces + n_partitions
    receive = {
        "log, manifest": 3 * clock.first_byte_s + clock.request_s(manifest, 1),
        "seals": clock.many_s(n_writers, seals / n_writers),
        "contributions, tables": clock.many_s(n_writers + spaces, (contributed + tables) / (n_writers + spaces)),
        "parse seals": seals / clock.json,
        "partitions": max(clock.many_s(n_partitions, payload / max(1, n_partitions), 8), payload / clock.node),
    }
    contents = SimpleNamespace(
        touched={"u16": range(min(rows, sum(n_chunks.values())))},
        tables={"u16": np.empty(0)},
        partitions=range(n_partitions),
        manifest=SimpleNamespace(files=()),
    )
    return Version(
        model=model.name,
        rate=coding.rate,
        n_writers=n_writers,
        topology=topology,
        n_objects=puts,
        nbytes=payload + metadata,
        metadata_nbytes=metadata,
        seal_nbytes=seals,
        ownership_nbytes=owned,
        manifest_nbytes=manifest,
        begin_nbytes=begin,
        puts=puts + 3,
        gets=n_journal + 3 * n_writers + 6,  # and of each writer: contributions, where it owns what, the manifest
        lists=n_writers + math.ceil(n_journal / LIST_PAGE) + n_pages,  # each writer looks for what it stored before
        receiver_gets=receiver_gets,
        receiver_nbytes=payload + seals + contributed + tables + manifest + begin,
        stages_s=stages,
        receive_stages_s=receive,
        committer_nbytes=80 * rows + 400 * puts + 2 * tables + 2 * (seals + owned),
        contents_nbytes=_contents_nbytes(cast("VersionContents", contents)) + tables,
        slice_nbytes_per_edge=tables + contributed + seals + manifest + begin,
    )


def begin_of(names: Sequence[str], layout: Layout) -> bytes:
    record = Begin(
        line="main", seq=1000, id=new_txid(), prev=DIGEST, created_at=now(), txid=new_txid(), owner="trainer",
        version=500, base=Base("main@499", DIGEST), layout=layout.sha256, writers=tuple(names),
    )  # fmt: skip
    return record.to_bytes()
