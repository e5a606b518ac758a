"""A log of many versions, made quickly: for benches that open it, and plan by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcr_store.format.canonical import sha256
from dcr_store.format.documents import Counts, ObjectRef
from dcr_store.format.names import STORE_KEY, new_txid, record_key
from dcr_store.format.records import Begin, Commit
from dcr_store.log import checkpoints, fold
from dcr_store.log.fold import LineState
from dcr_store.log.line import LineLog, next_fields

if TYPE_CHECKING:
    from dcr_store.ports import ObjectStore

OWN_RECORDS = 20
"""Versions at the end that the store's own writer appends."""


def long_log(objects: ObjectStore, n_versions: int) -> None:
    """Put a log of so many versions into a store without any: records first, the last ones by the store's writer."""
    store_sha256 = sha256(objects.get(STORE_KEY))
    state, newest, records = LineState("main", 0, store_sha256), None, {}
    n_direct = max(0, n_versions - OWN_RECORDS)
    for number in range(n_direct):
        for record in (a_begin(state), None):
            made = record or a_commit(state)
            data = records[state.length] = made.to_bytes()
            objects.put(record_key("main", state.length), data)
            state = fold.apply(state, made, data)
        # As a writer would leave it in the end: all checkpoints that hold rows, and the newest.
        is_newest = number + 1 == n_direct // 8 * 8
        if len(state.rows) >= checkpoints.SEGMENT_VERSIONS or is_newest:
            newest = state.length
            state = checkpoints.write_checkpoint(objects, state, store_sha256)
    if n_direct:
        tail = [records[seq] for seq in range(newest or 0, state.length)]
        checkpoints.write_hint(objects, state, newest, tail)
    log = LineLog(objects, "main", store_sha256)
    for _ in range(n_versions - n_direct):
        log.append(a_begin)
        log.append(a_commit)


def a_begin(state: LineState) -> Begin:
    metadata = {"step": 10 * state.next_version, "reward": 0.25, "code": "0123456789abcdef"}
    return Begin(
        **next_fields(state),
        txid=new_txid(),
        owner="trainer",
        version=state.next_version,
        base=state.head_base,
        layout=None,
        writers=("w0",),
        metadata=metadata,
    )


def a_commit(state: LineState) -> Commit:
    assert state.open is not None
    root = sha256(str(state.length).encode())
    key = f"versions/main/{state.open.version:012d}-{state.open.txid}/attempts/0/manifest.json"
    return Commit(
        **next_fields(state),
        txid=state.open.txid,
        attempt=0,
        version=state.open.version,
        base=state.open.base,
        layout=root,
        root=root,
        manifest=ObjectRef(key, root, 2000),
        counts=Counts(10**8, 10**10, 10**8, 300, 500),
    )
