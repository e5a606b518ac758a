"""The log of a history, with its anchors, its longest path and an expiry, for simulate_scale.py."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scale_models import CHUNK_ELEMENTS
from scale_writer import DIGEST, ref

from dcr_store.format.canonical import sha256
from dcr_store.format.documents import (
    Counts,
    StoreDocument,
)
from dcr_store.format.fields import now
from dcr_store.format.names import STORE_KEY, new_txid
from dcr_store.format.ranges import Ranges
from dcr_store.format.records import Anchor, Begin, Commit, Intent
from dcr_store.log.line import next_fields
from dcr_store.maintain.policy import due
from dcr_store.maintain.retention import Keep, expire
from dcr_store.objects.memory import MemoryObjects
from dcr_store.versions.catalog import Catalog
from dcr_store.versions.places import StorePlace

if TYPE_CHECKING:
    from dcr_store.log.fold import LineState


@dataclass(frozen=True)
class History:
    """A line of many versions: what it holds, and what reading and expiring it cost, by the log alone."""

    n_versions: int
    n_anchors: int
    nbytes: int
    longest_path: int
    longest_path_nbytes: int
    kept_nbytes: int

    def scaled(self, version_nbytes: int, anchor_nbytes: int) -> History:
        """Return the history of a model of another size, whose deltas and anchors are to each other as these."""
        nbytes = (self.n_versions - self.n_anchors) * version_nbytes + self.n_anchors * anchor_nbytes
        nbytes += (self.n_anchors - 1) * version_nbytes  # an anchor that was added stands beside its delta
        times = nbytes / self.nbytes
        path, kept = round(times * self.longest_path_nbytes), round(times * self.kept_nbytes)
        return replace(self, nbytes=nbytes, longest_path_nbytes=path, kept_nbytes=kept)


def history_of(version_nbytes: int, anchor_nbytes: int, n_versions: int, every: int, keep: Keep) -> History:
    """Write the log of a history, anchored when the code says that it is due; ask it for paths and an expiry."""
    objects = MemoryObjects(secrets.token_hex(8))
    document = StoreDocument(new_txid(), "dcr.delta", CHUNK_ELEMENTS, now())
    objects.put(STORE_KEY, document.to_bytes())
    catalog = Catalog(objects, document, sha256(document.to_bytes()))
    log = catalog.log("main")
    counts = Counts(10**9, 10**11, version_nbytes, 1, 1)
    whole = Counts(10**11, 10**11, anchor_nbytes, 1, 1)
    n_anchors, longest, longest_nbytes = 0, 0, 0

    def root(number: int) -> str:
        return sha256(b"%d" % number)

    def begin(state: LineState) -> Begin:
        return Begin(
            **next_fields(state), txid=new_txid(), owner="trainer", version=state.next_version, base=state.head_base,
            layout=DIGEST, writers=("w0",),
        )  # fmt: skip

    def commit(state: LineState) -> Commit:
        assert state.open is not None
        number = state.open.version
        return Commit(
            **next_fields(state), txid=state.open.txid, attempt=0, version=number, base=state.open.base, layout=DIGEST,
            root=root(number), manifest=ref(f"m/{number}", 1), counts=counts if number else whole,
        )  # fmt: skip

    def intent(state: LineState, txid: str, number: int) -> Intent:
        versions = Ranges.of([number])
        return Intent(**next_fields(state), txid=txid, purpose="anchor", owner="keeper", versions=versions)

    def anchor(state: LineState, txid: str, number: int) -> Anchor:
        return Anchor(
            **next_fields(state), txid=txid, attempt=0, version=number, root=root(number), base=None,
            manifest=ref(f"a/{number}", 1), counts=whole,
        )  # fmt: skip

    for number in range(n_versions):
        log.append(begin)
        log.append(commit)
        if (located := due(catalog, "main", every=every)) is not None:  # where paths are longest
            path = catalog.path(located)
            longest, longest_nbytes = max(longest, len(path)), max(longest_nbytes, sum(edge.nbytes for edge in path))
            txid = new_txid()
            log.append(lambda state, txid=txid, number=number: intent(state, txid, number))
            log.append(lambda state, txid=txid, number=number: anchor(state, txid, number))
            n_anchors += 1
    nbytes = (n_versions - 1) * version_nbytes + (1 + n_anchors) * anchor_nbytes
    expiry = expire(StorePlace(objects.url, None, catalog), "main", keep, dry_run=True)
    stored = len(expiry.anchors) * anchor_nbytes + len(expiry.folds) * version_nbytes
    kept = nbytes - expiry.freed_nbytes + stored
    return History(n_versions, 1 + n_anchors, nbytes, longest, longest_nbytes, kept)
