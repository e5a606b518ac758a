"""Copy committed versions from one store into a copy of it: the same records, the same objects (docs/spec/v1.md §15).

Everything is proven before it is put: objects by their SHA-256, records by the fold of the copy's own log. A version's
objects come before the record that counts on them, records in their order, so that the copy is a store at every moment;
run again it goes on. Refuses a place that is no copy of the source, and a line that has gone on by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace

from dcr_store import events
from dcr_store.errors import FormatError, IntegrityError, InvalidInputError
from dcr_store.exchange.copied import Copied, CopiedLine, Repaired
from dcr_store.exchange.copy_checks import check_prefix
from dcr_store.exchange.copy_jobs import held, jobs, late
from dcr_store.exchange.copy_tags import copy_tags
from dcr_store.exchange.repairing import repair_log
from dcr_store.exchange.selection import Selection, select
from dcr_store.exchange.transfers import Transfers
from dcr_store.format.copies import Absent, absent_key
from dcr_store.format.names import version_name
from dcr_store.format.records import NewEdge
from dcr_store.log.fold import Source
from dcr_store.log.line import LineLog
from dcr_store.payload.version import own_refs, read_manifest
from dcr_store.versions.catalog import Catalog, Located


def asked(source: Catalog, lines: Collection[str] | None, since: Located | None) -> list[str]:
    """Return the lines to copy: those that are asked for, or all; each must have a version."""
    if since is not None and lines is not None and list(lines) != [since.line]:
        raise InvalidInputError("the version is of another line", key=since.name, expected=list(lines))
    if lines is None:
        return source.lines() if since is None else [since.line]
    return [source.fresh(name).line for name in lines]


def copy(
    source: Catalog,
    target: Catalog,
    lines: Collection[str],
    since: Located | None = None,
    *,
    repair: bool = False,
) -> Copied:
    """Copy what `target` lacks of lines, and of those that they go on from.

    Parameters
    ----------
    target : Catalog
        Of a copy of the source (``check_copy``).
    since : Located, optional
        A version of one of the lines: what comes before is left out where a line is new in the copy. Older than what
        an earlier call left out, it is brought after all.
    repair : bool
        Also read all that the copy has of the lines, and put again what is missing or damaged there.

    Raises
    ------
    ConflictError
        If a line has other records in the copy than in the source.
    IntegrityError, FormatError
        If something is damaged in the source; what counts on it was not put.
    InvalidInputError
        If no version from `since` on can be read without those before.
    """
    order = _parents_first(source, lines)
    run = _Run(source, target, None if since is None else since.row.version, frozenset(lines), repair)
    done, moved = tuple([run.line(name) for name in order]), run.transfers
    n_tags = sum(copy_tags(source, target, name) for name in order)
    repaired = Repaired(moved.n_compared, moved.nbytes_compared, tuple(sorted(moved.repaired))) if repair else None
    return Copied(done, moved.n_objects, moved.nbytes, n_tags, repaired)


def _parents_first(source: Catalog, lines: Collection[str]) -> list[str]:
    """Return lines and those that they go on from, and read the logs, a child's before its parent's.

    So the parent's log has the record by which the child began.
    """
    chains: list[list[str]] = []
    for name in lines:
        chain = [name]
        while (begun := _refreshed_source(source, chain[-1])) is not None:
            chain.append(begun.line)
        chains.append(chain[::-1])
    return list(dict.fromkeys(name for chain in sorted(chains, key=len) for name in chain))


def _refreshed_source(catalog: Catalog, line: str) -> Source | None:
    catalog.log(line).refresh()
    return catalog.source(line)


def _read(mine: LineLog) -> None:
    """Read a line's log in the copy."""
    try:
        mine.refresh()
    except (IntegrityError, FormatError) as error:
        raise type(error)(
            f"in the copy, {error.args[0]}",
            key=error.key,
            expected=error.expected,
            found=error.found,
            advice="what the source still has is put again: dcr copy SOURCE COPY --repair",
        ) from error


class _Run:
    """One copying: what is common to its lines."""

    def __init__(
        self, source: Catalog, target: Catalog, since: int | None, wanted: frozenset[str], is_repair: bool
    ) -> None:
        self.source, self.target = source, target
        self.transfers = Transfers(source.objects, target.objects, is_repair=is_repair)
        self._since, self._wanted, self._is_repair = since, wanted, is_repair
        self._reached: dict[str, frozenset[int]] = {}

    def line(self, line: str) -> CopiedLine:
        """Copy a line. Where versions expire and are collected under it, it is done again by the log as it is then."""
        log, mine = self.source.log(line), self.target.log(line)
        if self._is_repair:
            self.transfers.repaired += repair_log(log, mine)
        else:
            _read(mine)
        before = mine.state.length, mine.state.next_version
        while True:
            history = replace(self.source.history(line), works=())
            try:
                selection = self._copy(log, mine)
                break
            except IntegrityError:
                log.refresh()
                if replace(self.source.history(line), works=()) == history:
                    raise
                events.reached("copy.moved", line)
        self._reached[line] = selection.reached
        state = mine.state
        first = min(selection.versions, default=None)
        return CopiedLine(
            line,
            None if state.head is None else version_name(line, state.head.version),
            None if first is None else version_name(line, first),
            state.length - before[0],
            state.next_version - max(before[1], state.first),
        )

    def _copy(self, log: LineLog, mine: LineLog) -> Selection:
        line = log.line
        check_prefix(log, mine)
        stored, is_absence_told = self._absent(line)
        since = self._since
        if stored is not None:
            since = stored.since if since is None or stored.since is None else min(stored.since, since)
        rows, n_known = {row.version: row for row in log.rows()}, mine.state.length
        records = log.since(n_known)
        ever = {edge.txid for history in (log.state.history, mine.state.history) for edge in history.edges}
        ever |= {record.txid for record, _ in records if isinstance(record, NewEdge)}
        selection = self._select(log, since, ever)
        told = rows, log.state.history.edges, selection
        left = [] if stored is None else list(late(line, *told, stored, n_known))
        total = sum(job.nbytes for job in left)
        with closing(self.transfers.bring(iter(left), f"copy {line}, what was left out before", total)) as done:
            deque(done, 0)  # nothing of it is told by a record
        if self._is_repair:
            there = list(held(line, *told, n_known))
            self.transfers.compare(iter(there), f"compare {line}", sum(job.nbytes for job in there))
        if stored != selection.absent:
            # Before the records: whoever reads them finds what they tell, or that it is not here.
            key, data = absent_key(line), selection.absent.to_bytes()
            if is_absence_told:
                self.target.objects.put(key, data)
            elif not self.target.objects.put_if_absent(key, data):
                return self._copy(log, mine)  # another copying has begun the line, perhaps with less
            events.reached("copy.absent", line)
        is_right_after = False
        if records:
            todo = jobs(line, records, selection, rows)
            edges = [(row.seq, row.txid, row.counts) for row in rows.values()]
            edges += [(edge.seq, edge.txid, edge.counts) for edge in log.state.history.edges]
            total = sum(counts.nbytes for seq, txid, counts in edges if seq >= n_known and txid in selection.edges)
            with closing(self.transfers.bring(todo, f"copy {line}", total, self._known(mine))) as brought:
                for planned in brought:
                    assert planned.job.data is not None
                    mine.adopt(planned.job.data, is_right_after=is_right_after and not planned.refs)
                    mine.note(is_last=False)
                    is_right_after = True
        if is_right_after or not mine.is_noted():
            mine.note()
        return selection

    def _absent(self, line: str) -> tuple[Absent | None, bool]:
        """Return what the copy says that it does not have, and whether it says anything, be it damaged."""
        try:
            stored = self.target.absences.read(line)
        except FormatError:
            if not self._is_repair:
                raise
            self.transfers.repaired.append(absent_key(line))
            return None, True
        return stored, stored is not None

    def _select(self, log: LineLog, since: int | None, ever: Collection[str]) -> Selection:
        line, source = log.line, log.state.source
        before: Collection[int] = ()
        if source is not None:
            before = [number for number in self._reached[source.line] if number <= source.row.version]
        selection = select(line, log.rows(), self.source.history(line), ever, since, before)
        head = log.state.head
        if since is not None and line in self._wanted and head is not None and head.version not in selection.reached:
            raise InvalidInputError(
                f"no path leads to {line}'s newest version from one that is stored whole, from {line}@{since} on",
                key=version_name(line, since),
                advice=f"store one whole first: dcr anchor SOURCE {line}@{head.version}",
            )
        return selection

    def _known(self, mine: LineLog) -> set[str]:
        """Return the keys that the copy's newest version shares with others, as the next one may."""
        head = mine.state.head
        if head is None or self.target.is_expired(Located(mine.line, head)):
            return set()
        try:
            return {ref.key for ref in own_refs(read_manifest(self.target.objects, head.manifest))}
        except IntegrityError:
            return set()  # for a verify to tell
