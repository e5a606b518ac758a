"""Add another edge to a version: store it whole, as an anchor, or as the fold of several deltas (docs/spec/v1.md §14).

Runs beside live publishers and readers. After a crash it is run again: what was stored by then is recognised. Nothing
counts before the log names it, and that is proven first. Refuses versions that have expired.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcr_store import events
from dcr_store.codec.digest import zeros_digest
from dcr_store.errors import ConflictError, DcrError, FencedError, IntegrityError, InvalidInputError
from dcr_store.format.documents import SPACES
from dcr_store.format.names import TransactionKeys, new_incarnation, new_txid, version_name
from dcr_store.format.ranges import Ranges
from dcr_store.format.records import Abort, Anchor, Fold, Intent, NewEdge, Resume
from dcr_store.format.rows import EdgeRow
from dcr_store.layout.dtypes import width
from dcr_store.log.fold import LineState
from dcr_store.log.history import OpenWork
from dcr_store.log.line import LineLog, next_fields
from dcr_store.maintain import ranges
from dcr_store.maintain.ranges import RangeJob
from dcr_store.publish.committing import Proposal, Sealed, propose, store_proposal
from dcr_store.publish.ending import abort_record
from dcr_store.publish.journaled import read_durable
from dcr_store.publish.opening import WRITER
from dcr_store.publish.owner import default_owner, describe, is_dead
from dcr_store.publish.partitions import PartitionWriter
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept
from dcr_store.versions.places import StorePlace, worked_on


@dataclass(frozen=True, slots=True)
class EdgeInfo:
    """An edge, for people.

    Attributes
    ----------
    version : str
        ``line@number`` of where it leads.
    base : str or None
        Where it starts; None for an anchor.
    nbytes : int
        What it takes in the store.
    """

    version: str
    base: str | None
    nbytes: int

    @classmethod
    def of(cls, goal: Located, base: Located | None, row: EdgeRow | None) -> EdgeInfo:
        """Return what ``add_edge`` found or made; None stands for the version's own commit."""
        counts = goal.row.counts if row is None else row.counts
        return cls(goal.name, None if base is None else base.name, counts.nbytes)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"version": self.version, "base": self.base, "nbytes": self.nbytes}


def add_edge(
    place: StorePlace,
    goal: Located,
    base: Located | None = None,
    *,
    executor: Executor | None = None,
    owner: str | None = None,
    takeover: bool = False,
) -> EdgeRow | None:
    """Store a version whole, or as a delta against `base`, unless it is stored so.

    Parameters
    ----------
    base : Located, optional
        An older version of the same line and layout; None for an anchor.
    executor : Executor, optional
        Where partitions are read, encoded and stored, one in each task; by default one thread, in which each uses all
        cores. What runs elsewhere opens the store itself.
    owner : str, optional
        Who does this, the same for all restarts; by default this process.
    takeover : bool
        Take over from another owner, whom you know to be dead.

    Returns
    -------
    EdgeRow or None
        As the log tells it; None if the version's own commit is that edge.

    Raises
    ------
    ConflictError
        If another owner is at it, or no path leads from `base` to the version: an expiry, perhaps just now, has ended
        what was between them.
    NotFoundError
        If a version has expired.
    IntegrityError
        If the store does not hold what the versions' digests say.
    """
    catalog = place.catalog
    for version in (goal, base):
        if version is not None:
            catalog.check_kept(version)
    line = catalog.owner(goal.line, goal.row.version)
    if line != goal.line:
        goal = Located(line, goal.row)
        base = None if base is None else Located(line, base.row)
    if base is not None:
        _check_base(catalog, goal, base)
    log = catalog.fresh(line)
    found = _existing(log, goal, base)
    if found is not None:
        return found[0]
    work = _open(catalog, log, goal, base, owner or default_owner(), takeover=takeover)
    try:
        ends = [version for version in (base, goal) if version is not None]
        return while_kept(catalog, ends, lambda: _store(place, log, work, goal, base, executor))
    except FencedError:
        raise
    except BaseException as error:
        try:
            _abandon(log, work, f"{type(error).__name__}: {error}"[:500])
        except FencedError as fenced:
            if isinstance(error, IntegrityError):  # what was stored may have been collected since
                raise fenced from error
        except DcrError:
            pass
        raise


def _check_base(catalog: Catalog, goal: Located, base: Located) -> None:
    if base.row.version >= goal.row.version or catalog.owner(goal.line, base.row.version) != goal.line:
        raise InvalidInputError(
            "a fold leads from an older version of the same line to a newer one",
            key=f"{base.name} {goal.name}",
            expected=f"a version of {goal.line}'s own before {goal.name}",
            found=base.name,
        )
    if base.row.layout != goal.row.layout:
        raise InvalidInputError(
            "a fold leads from a version to one of the same tensors in the same order; anchor the newer one instead",
            key=f"{base.name} {goal.name}",
            expected=f"layout {base.row.layout[:16]}",
            found=f"layout {goal.row.layout[:16]}",
        )


def _existing(log: LineLog, goal: Located, base: Located | None) -> tuple[EdgeRow | None] | None:
    """Return the edge that is there already, if it is."""
    history, wanted = log.state.history, None if base is None else base.base
    own = goal.row.base
    if own == wanted and goal.row.version not in history.dead:
        return (None,)
    edges = [edge for edge in history.edges if (edge.version, edge.base) == (goal.row.version, wanted)]
    return (edges[-1],) if edges else None


def _open(
    catalog: Catalog, log: LineLog, goal: Located, base: Located | None, owner: str, *, takeover: bool
) -> OpenWork:
    """Append the intent, or take up the one that this owner, or a dead one, left."""
    purpose = "anchor" if base is None else "fold"
    versions, start = Ranges.of([goal.row.version]), None if base is None else base.base
    txid = new_txid()

    def decide(state: LineState) -> Intent | Resume:
        for work in state.history.works:
            if (work.purpose, work.versions, work.base) == (purpose, versions, start):
                if work.owner != owner and not takeover and not is_dead(work.owner):
                    raise ConflictError(
                        f"another process makes the same {purpose}; wait, or take over if it is dead",
                        key=goal.name,
                        found=describe(work.owner),
                    )
                return Resume(**next_fields(state), txid=work.txid, attempt=work.attempt + 1, owner=owner)
        for version in (goal, base):
            if version is not None and version.row.version in state.history.expired:
                raise catalog.expired(version)  # since it was looked at
        return Intent(**next_fields(state), txid=txid, purpose=purpose, owner=owner, versions=versions, base=start)

    record = log.append(decide)
    assert isinstance(record, Intent | Resume)
    work = log.state.history.work(record.txid)
    if work is None:
        raise FencedError("somebody else has taken over at the same time", key=goal.name)
    return work


def _abandon(log: LineLog, work: OpenWork, reason: str) -> None:
    def decide(state: LineState) -> Abort:
        _require_ours(state, work)
        return abort_record(state, work.txid, reason)

    log.append(decide)


def _require_ours(state: LineState, work: OpenWork) -> None:
    found = state.history.work(work.txid)
    if found is None or found.attempt != work.attempt:
        raise FencedError(
            f"the {work.purpose} was taken over or ended by somebody else; look at the log",
            key=version_name(state.line, next(iter(work.versions))),
            expected=f"attempt {work.attempt} of {work.txid}",
            found="nothing" if found is None else f"attempt {found.attempt}",
        )


def _store(
    place: StorePlace, log: LineLog, work: OpenWork, goal: Located, base: Located | None, executor: Executor | None
) -> EdgeRow:
    catalog = place.catalog
    document, layout = catalog.document, catalog.layout(goal.row.layout)
    keys = TransactionKeys(log.line, goal.row.version, work.txid)
    durable = read_durable(catalog.objects, keys, WRITER) if work.attempt else {}
    writer = PartitionWriter(
        catalog.objects,
        keys,
        WRITER,
        new_incarnation(),
        work.attempt,
        document.codec,
        document.chunk_elements,
        durable,
        None,
    )
    rows: dict[str, list[tuple[int, int, int, int]]] = {space: [] for space in SPACES}
    n_changed = 0
    try:
        jobs = list(_jobs(catalog, writer, goal, base))
        for n_done, (_, done) in enumerate(worked_on(place, ranges.do, jobs, executor), 1):
            writer.take([done.partition])
            rows[done.space] += done.rows
            n_changed += done.n_changed
            events.progress(f"{work.purpose} {goal.name}", n_done, len(jobs))
        table = {space: np.array(sorted(found), np.uint64).reshape(len(found), 4) for space, found in rows.items()}
        seal = writer.seal(layout.spaces, table, [], n_changed)
        sealed = Sealed(seal, writer.sealed_objects(), table, n_changed, writer.n_sealed)
    finally:
        writer.close()
    contents = catalog.contents(goal)
    against = None if base is None else (base.base, catalog.tables(base))
    proposal = propose(keys, work.attempt, layout, against, [sealed], contents.manifest.files, document.chunk_elements)
    if proposal.manifest.root != goal.row.root:
        raise IntegrityError(
            "what was stored is not the version; nothing was added to the log",
            key=goal.name,
            expected=goal.row.root,
            found=proposal.manifest.root,
        )
    store_proposal(catalog.objects, keys, [sealed], proposal)
    record = _append(log, work, proposal)
    return next(edge for edge in log.state.history.edges if edge.txid == record.txid)


def _append(log: LineLog, work: OpenWork, proposal: Proposal) -> NewEdge:
    manifest = proposal.manifest

    def decide(state: LineState) -> NewEdge:
        _require_ours(state, work)
        edge = Anchor if manifest.base is None else Fold
        return edge(
            **next_fields(state),
            txid=work.txid,
            attempt=work.attempt,
            version=manifest.version,
            root=manifest.root,
            base=manifest.base,
            manifest=proposal.ref,
            counts=manifest.counts,
        )

    record = log.append(decide)
    assert isinstance(record, NewEdge)
    return record


def _jobs(catalog: Catalog, writer: PartitionWriter, goal: Located, base: Located | None) -> Iterator[RangeJob]:
    """Cut the work into partitions."""
    size, base_path = catalog.document.chunk_elements, None
    tables = catalog.tables(goal)
    if base is None:
        edges = catalog.path(goal)
        zeros = {space: np.uint64(zeros_digest(size * width(space))) for space in SPACES}
        differs = {space: tables[space] != zeros[space] for space in SPACES}
    else:
        found = catalog.path_from(base, goal)
        before = catalog.tables(base)
        differs = {space: tables[space] != before[space] for space in SPACES}
        if found is None:
            raise ConflictError(
                "no path leads from one version to the other any more; anchor the newer one instead",
                key=f"{base.name} {goal.name}",
            )
        edges, base_path = found, tuple(catalog.path(base))
    for space in SPACES:
        per = writer.chunks_per_partition(space)
        chunks = np.flatnonzero(differs[space])
        for index in np.unique(chunks // per).tolist():
            mine = chunks[(chunks >= index * per) & (chunks < (index + 1) * per)]
            durable = {
                key: item for key, item in writer.durable.items() if key[0].startswith(f"{space}/") and key[1] == index
            }
            yield RangeJob(
                goal.line,
                writer.keys,
                writer.incarnation,
                tuple(edges),
                base_path,
                space,
                index,
                tuple(mine.tolist()),
                per,
                durable,
            )
