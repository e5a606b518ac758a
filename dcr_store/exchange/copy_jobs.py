"""What there is to do for a copy of a line, record by record (docs/spec/v1.md §15). Pure; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dcr_store.exchange.selection import Selection
from dcr_store.format.copies import Absent
from dcr_store.format.documents import ObjectRef
from dcr_store.format.records import Commit, NewEdge, Record
from dcr_store.format.rows import EdgeRow, VersionRow


@dataclass(frozen=True, slots=True)
class Job:
    """A record to put, or None, and before it what a manifest leads to.

    Attributes
    ----------
    is_edge : bool
        Whether the edge itself comes along, or only what the version's other edges share.
    layout : str
        The SHA-256 of what a version's tensors are; a copy has it also of the versions that are left out.
    """

    data: bytes | None
    line: str
    version: int = -1
    txid: str = ""
    manifest: ObjectRef | None = None
    is_edge: bool = False
    layout: str = ""
    nbytes: int = 0


def jobs(
    line: str, records: Sequence[tuple[Record, bytes]], selection: Selection, rows: Mapping[int, VersionRow]
) -> Iterator[Job]:
    """Return what to do for records that the copy lacks, in their order."""
    for record, data in records:
        if isinstance(record, Commit | NewEdge):
            is_edge = record.txid in selection.edges
            if is_edge or (isinstance(record, Commit) and record.version in selection.versions):
                layout = rows[record.version].layout
                yield Job(
                    data, line, record.version, record.txid, record.manifest, is_edge, layout, record.counts.nbytes
                )
                continue
        yield Job(data, line, layout=record.layout if isinstance(record, Commit) else "")


def late(
    line: str,
    rows: Mapping[int, VersionRow],
    edges: Sequence[EdgeRow],
    selection: Selection,
    stored: Absent,
    n_known: int,
) -> Iterator[Job]:
    """Return what the copy has the records of, and not the objects, and is to have now."""
    own = {row.txid for row in rows.values()}
    for job in held(line, rows, edges, selection, n_known):
        if job.txid not in own:
            is_new = job.txid in stored.edges
        else:
            is_new = job.is_edge and job.version in stored.deltas
            is_new |= job.version in selection.versions and job.version in stored.versions
        if job.manifest is not None and is_new:
            yield job


def held(
    line: str, rows: Mapping[int, VersionRow], edges: Sequence[EdgeRow], selection: Selection, n_known: int
) -> Iterator[Job]:
    """Return what the first `n_known` records, which the copy has, tell and the copy is to have the objects of."""
    for row in rows.values():
        if row.seq < n_known:
            is_edge = row.txid in selection.edges
            if is_edge or row.version in selection.versions:
                yield Job(None, line, row.version, row.txid, row.manifest, is_edge, row.layout, row.counts.nbytes)
            else:
                yield Job(None, line, layout=row.layout)
    for edge in edges:
        if edge.seq < n_known and edge.txid in selection.edges:
            layout = rows[edge.version].layout
            yield Job(None, line, edge.version, edge.txid, edge.manifest, True, layout, edge.counts.nbytes)
