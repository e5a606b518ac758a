"""The committer: prove what was sealed, make digest tables and manifest, append the record that is the commit.

Refuses to commit what is not whole in the store, or does not fit the base (docs/spec/v1.md §8).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dcr_store import events
from dcr_store.codec.digest import zeros_digest
from dcr_store.errors import FencedError, IntegrityError
from dcr_store.format.documents import SPACES, Base, CheckpointFile, Counts, Digests, Manifest, ObjectRef, SealRef
from dcr_store.format.fields import now
from dcr_store.format.names import TransactionKeys, layout_key
from dcr_store.format.records import Commit
from dcr_store.format.rows import VersionRow
from dcr_store.layout.dtypes import width
from dcr_store.layout.layout import Layout
from dcr_store.log.fold import LineState
from dcr_store.log.line import LineLog, next_fields
from dcr_store.objects.transfer import map_bounded
from dcr_store.payload import arrays
from dcr_store.payload.contributions import Rows
from dcr_store.payload.version import Table, root_of
from dcr_store.ports import ObjectStore
from dcr_store.wording import first_of

_MOST_TOLD: Final = 8


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


@dataclass(frozen=True, slots=True)
class Proposal:
    """A version that is ready to be stored and committed.

    Attributes
    ----------
    ref : ObjectRef
        The manifest's.
    objects : tuple of (str, bytes)
        Key and content of what goes to the store before the commit.
    """

    manifest: Manifest
    ref: ObjectRef
    objects: tuple[tuple[str, bytes], ...]


def propose(
    keys: TransactionKeys,
    attempt: int,
    layout: Layout,
    base: tuple[Base, Mapping[str, Table]] | None,
    sealed: Sequence[Sealed],
    files: Iterable[CheckpointFile],
    chunk_elements: int,
) -> Proposal:
    """Make layout, digest tables and manifest of this attempt. No I/O, and once per attempt: keys have one content.

    Parameters
    ----------
    base : tuple of (Base, tables) or None
        What the delta is against; None for an anchor.
    sealed : sequence of Sealed
        One for each writer.

    Raises
    ------
    IntegrityError
        If the writers saw other base bits than the base's.
    """
    rows = merged([item.rows for item in sealed])

    def told(space: str, chunk: int) -> str:
        return _told(layout, sealed, space, chunk, chunk_elements)

    tables = new_tables(dict(layout.spaces), None if base is None else dict(base[1]), rows, chunk_elements, told)
    objects = [] if base is not None else [(layout_key(layout.sha256), layout.to_json_bytes())]
    prefix = keys.attempt(attempt)
    digests, nbytes = {}, sum(ref.nbytes for item in sealed for ref in item.objects if ref.key.startswith(keys.prefix))
    for space in SPACES:
        if layout.spaces[space]:
            zarr, table = arrays.table_metadata(len(tables[space])), tables[space].astype("<u8").tobytes()
            digests[space] = Digests(
                ObjectRef.of(f"{prefix}digests/{space}/zarr.json", zarr),
                ObjectRef.of(f"{prefix}digests/{space}/c/0", table),
            )
            objects += [(digests[space].zarr.key, zarr), (digests[space].table.key, table)]
            nbytes += len(zarr) + len(table)
    elements = sum(entry.n_elements for entry in layout.tensors)
    changed = elements if base is None else sum(item.changed for item in sealed)
    n_partitions = sum(item.n_partitions for item in sealed)
    manifest = Manifest(
        keys.line,
        keys.version,
        keys.txid,
        attempt,
        layout.sha256,
        None if base is None else base[0],
        root_of(layout, tables, chunk_elements),
        now(),
        tuple(item.seal for item in sealed),
        digests,
        tuple(files),
        Counts(changed, elements, nbytes, n_partitions, len(layout.tensors)),
    )
    data = manifest.to_bytes()
    ref = ObjectRef.of(keys.manifest(attempt), data)
    return Proposal(manifest, ref, (*objects, (ref.key, data)))


def new_tables(
    lengths: dict[str, int],
    base: dict[str, Table] | None,
    rows: dict[str, Rows],
    chunk_elements: int,
    told: Callable[[str, int], str] = "chunk {1} of {0}".format,
) -> dict[str, Table]:
    """Return the digest tables after a transaction.

    Parameters
    ----------
    lengths : dict of str to int
        Elements of each space.
    base : dict of str to ndarray of uint64, or None
        Tables of the base; None for an anchor: all zeros.
    rows : dict of str to ndarray of uint64, shape (n, 4)
        Contributions of all writers.
    told : callable
        Says of a space and a chunk what is there, and who wrote it.

    Raises
    ------
    IntegrityError
        If the base bits that the writers saw are not those of the base: a baseline drifted.
    """
    tables: dict[str, Table] = {}
    for space in SPACES:
        zero = np.uint64(zeros_digest(chunk_elements * width(space)))
        n_chunks = -(-lengths[space] // chunk_elements)
        table = np.full(n_chunks, zero, np.uint64) if base is None else base[space].copy()
        chunks = rows[space][:, 0].astype(np.int64)
        drifted = (table[chunks] ^ zero) != rows[space][:, 3]
        if drifted.any():
            raise IntegrityError(
                f"the baseline is not the base in {told(space, int(chunks[drifted][0]))}; abort and publish again; "
                "if that does not help, delete the baseline directory, if there is one: it is rebuilt from the store",
                expected=f"{int(table[chunks[drifted][0]]):016x}",
                found=f"{int(rows[space][drifted][0, 3] ^ zero):016x}",
            )
        np.bitwise_xor.at(table, chunks, rows[space][:, 1] ^ rows[space][:, 2])
        tables[space] = table
    return tables


def _told(layout: Layout, sealed: Sequence[Sealed], space: str, chunk: int, chunk_elements: int) -> str:
    """Name the tensors that a chunk holds, and, where there are several, the writers that have a row for it."""
    pieces = layout.pieces(space, chunk * chunk_elements, (chunk + 1) * chunk_elements)
    names = [piece.entry.name for piece in pieces]
    found = f"{first_of(names, _MOST_TOLD)} (chunk {chunk} of {space})"
    if len(sealed) == 1:
        return found
    writers = [item.seal.writer for item in sealed if chunk in item.rows[space][:, 0]]
    return f"{found}, of {'writer' if len(writers) == 1 else 'one of writers'} {first_of(writers, _MOST_TOLD)}"


def merged(rows: Sequence[Mapping[str, Rows]]) -> dict[str, Rows]:
    """Return the contributions of several writers as one: XORed per chunk, uint64 of shape (n, 4) per space."""
    if len(rows) == 1:
        return dict(rows[0])
    found: dict[str, Rows] = {}
    for space in SPACES:
        every = np.concatenate([item[space] for item in rows])
        chunks, places = np.unique(every[:, 0], return_inverse=True)
        found[space] = np.zeros((len(chunks), 4), np.uint64)
        found[space][:, 0] = chunks
        np.bitwise_xor.at(found[space][:, 1:], places, every[:, 1:])
    return found


def store_proposal(store: ObjectStore, keys: TransactionKeys, sealed: Sequence[Sealed], proposal: Proposal) -> None:
    """Check what is sealed and store what the proposal adds. May be repeated.

    Raises
    ------
    IntegrityError
        If a sealed object is not there.
    """
    _check_stored(store, keys, [ref for item in sealed for ref in item.objects])

    def put(item: tuple[str, bytes]) -> None:
        key, data = item
        events.reached("publish.proposal.before", key)
        store.put(key, data)
        events.reached("publish.proposal.stored", key)

    # In any order: none of them means anything before the commit.
    for _ in map_bounded(put, proposal.objects):
        pass


def append_commit(log: LineLog, proposal: Proposal, require_ours: Callable[[LineState], None]) -> VersionRow:
    """Append the commit record, unless an earlier try did; return the version.

    Parameters
    ----------
    require_ours : callable
        Raises ``FencedError`` where the attempt is not the last any more.
    """
    manifest, ref = proposal.manifest, proposal.ref

    def decide(state: LineState) -> Commit:
        require_ours(state)
        return Commit(
            **next_fields(state),
            txid=manifest.txid,
            attempt=manifest.attempt,
            version=manifest.version,
            base=manifest.base,
            layout=manifest.layout,
            root=manifest.root,
            manifest=ref,
            counts=manifest.counts,
        )

    try:
        log.append(decide)
    except FencedError:
        # The answer of an earlier try was lost and the record is there: then nobody else ended the transaction.
        row = log.row(manifest.version)
        if row is None or row.manifest != ref:
            raise
        return row
    row = log.row(manifest.version)
    assert row is not None
    return row


@contextlib.contextmanager
def missing_if_ended(log: LineLog, require_ours: Callable[[LineState], None]) -> Iterator[None]:
    """Raise what `require_ours` does where an object is missing because the transaction was ended, and collected."""
    try:
        yield
    except IntegrityError:
        require_ours(log.refresh())
        raise


def _check_stored(store: ObjectStore, keys: TransactionKeys, sealed: Iterable[ObjectRef]) -> None:
    """Check that every sealed object is there with its nbytes; ask singly for what the listing lacks."""
    refs, sizes = list(sealed), store.list(keys.prefix)
    # What each of many writers owns stands with an earlier version: asked for side by side.
    others = [ref.key for ref in refs if ref.key not in sizes]
    single = map(store.size, others) if store.is_local or len(others) < 2 else map_bounded(store.size, others)
    found_singly = dict(zip(others, single, strict=True))
    for ref in refs:
        found = sizes.get(ref.key, found_singly.get(ref.key))
        if found != ref.nbytes:
            raise IntegrityError(
                "a sealed object is not in the store; something deletes or rewrites objects there",
                key=ref.key,
                expected=f"{ref.nbytes} bytes",
                found="nothing" if found is None else f"{found} bytes",
            )
