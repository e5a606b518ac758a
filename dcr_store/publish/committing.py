"""The committer: prove what was sealed, make digest tables and manifest, append the record that is the commit.

Refuses to commit what is not whole in the store, or does not fit the base (docs/spec/v1.md §8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dcr_store import events
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import SPACES, Base, CheckpointFile, Counts, Digests, Manifest, ObjectRef, SealRef
from dcr_store.format.fields import now
from dcr_store.format.names import TransactionKeys, layout_key, new_txid
from dcr_store.format.records import Commit
from dcr_store.layout.layout import Layout
from dcr_store.log.fold import LineState
from dcr_store.log.line import LineLog
from dcr_store.payload import arrays
from dcr_store.payload.contributions import Rows
from dcr_store.payload.version import Table, root_of
from dcr_store.ports import ObjectStore
from dcr_store.publish.state import new_tables


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a writer has sealed.

    Attributes
    ----------
    objects : list of ObjectRef
        All that the seal leads to, itself included.
    rows : mapping of str to ndarray of uint64, shape (n, 4)
        The contributions.
    """

    seal: SealRef
    objects: list[ObjectRef]
    rows: Mapping[str, Rows]
    changed: int
    n_partitions: int


def make_manifest(
    store: ObjectStore,
    keys: TransactionKeys,
    attempt: int,
    layout: Layout,
    base: tuple[Base, Mapping[str, Table]] | None,
    sealed: Sealed,
    files: Iterable[CheckpointFile],
    chunk_elements: int,
) -> tuple[Manifest, ObjectRef]:
    """Check what is sealed and store layout, digest tables and manifest under this attempt.

    Parameters
    ----------
    base : tuple of (Base, tables) or None
        What the delta is against; None for an anchor.

    Raises
    ------
    IntegrityError
        If a sealed object is not there, or the writers saw other base bits than the base's.
    """
    _check_stored(store, keys, sealed.objects)
    tables = new_tables(dict(layout.spaces), None if base is None else dict(base[1]), dict(sealed.rows), chunk_elements)
    if base is None:
        store.put(layout_key(layout.sha256), layout.to_json_bytes())
    prefix = keys.attempt(attempt)
    digests, nbytes = {}, sum(item.nbytes for item in sealed.objects)
    for space in SPACES:
        if layout.spaces[space]:
            zarr, table = arrays.table_metadata(len(tables[space])), tables[space].astype("<u8").tobytes()
            digests[space] = Digests(
                ObjectRef.of(f"{prefix}digests/{space}/zarr.json", zarr),
                ObjectRef.of(f"{prefix}digests/{space}/c/0", table),
            )
            store.put(digests[space].zarr.key, zarr)
            store.put(digests[space].table.key, table)
            nbytes += len(zarr) + len(table)
    elements = sum(entry.n_elements for entry in layout.tensors)
    changed = elements if base is None else sealed.changed
    manifest = Manifest(
        keys.line,
        keys.version,
        keys.txid,
        attempt,
        layout.sha256,
        None if base is None else base[0],
        root_of(layout, tables, chunk_elements),
        now(),
        (sealed.seal,),
        digests,
        tuple(files),
        Counts(changed, elements, nbytes, sealed.n_partitions, len(layout.tensors)),
    )
    data = manifest.to_bytes()
    ref = ObjectRef.of(keys.manifest(attempt), data)
    events.reached("publish.manifest.before", ref.key)
    store.put(ref.key, data)
    events.reached("publish.manifest.stored", ref.key)
    return manifest, ref


def append_commit(
    log: LineLog, manifest: Manifest, ref: ObjectRef, require_ours: Callable[[LineState], None]
) -> Commit:
    """Append the commit record; `require_ours` raises ``FencedError`` where the attempt is not the last any more."""

    def decide(state: LineState) -> Commit:
        require_ours(state)
        return Commit(
            line=manifest.line,
            seq=state.length,
            id=new_txid(),
            prev=state.last_sha256,
            created_at=now(),
            txid=manifest.txid,
            attempt=manifest.attempt,
            version=manifest.version,
            base=manifest.base,
            layout=manifest.layout,
            root=manifest.root,
            manifest=ref,
            counts=manifest.counts,
        )

    record = log.append(decide)
    assert isinstance(record, Commit)
    return record


def _check_stored(store: ObjectStore, keys: TransactionKeys, sealed: Iterable[ObjectRef]) -> None:
    """Check that every sealed object is there with its nbytes; ask singly for what the listing lacks."""
    sizes = store.list(keys.prefix)
    for ref in sealed:
        found = sizes.get(ref.key)
        if found is None:
            found = store.size(ref.key)
        if found != ref.nbytes:
            raise IntegrityError(
                "a sealed object is not in the store; something deletes or rewrites objects there",
                key=ref.key,
                expected=f"{ref.nbytes} bytes",
                found="nothing" if found is None else f"{found} bytes",
            )
