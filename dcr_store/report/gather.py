"""Gathers a report: the log of every version, the deltas of some, the bits of few. Reads only; memory is bounded.

Refuses versions that are not one after the other on one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from dcr_store import events
from dcr_store.errors import InvalidInputError, NotFoundError
from dcr_store.format.fields import now
from dcr_store.format.rows import VersionRow
from dcr_store.history.diff import diff
from dcr_store.layout.dtypes import width
from dcr_store.layout.layout import Layout
from dcr_store.log.group import group_names
from dcr_store.objects.transfer import map_bounded
from dcr_store.receive.status import GroupStatus, group_status
from dcr_store.report.counting import count_changes, own_delta
from dcr_store.report.figures import Column, Moved, Report
from dcr_store.report.layers import LayerTally
from dcr_store.report.metrics import Metrics
from dcr_store.report.stored import PartitionTally
from dcr_store.versions.catalog import Catalog, Located

N_COLUMNS: Final = 120
"""The most columns of a report: neighbouring versions share one where there are more."""
T = TypeVar("T")


def report(
    catalog: Catalog, start: str | None = None, stop: str = "main", *, n_looked_into: int = 120, n_measured: int = 8
) -> Report:
    """Gather what a line shows from one version to another, both included.

    Parameters
    ----------
    start : str, optional
        By default the first version of the line, be it one of a line that it goes on from.
    stop : str
        Says which line.
    n_looked_into : int
        The most deltas to read, evenly spread. What only these tell is of their versions.
    n_measured : int
        The most versions among these whose values to compare with those before, which needs their bits, from an anchor
        on. Of as many runs of versions each the one whose base takes the fewest bytes to rebuild.

    Raises
    ------
    InvalidInputError
        If `start` is not a version of the line up to `stop`, or a number is none.
    NotFoundError
        If there is no such version.
    IntegrityError
        If an object is missing or damaged.
    """
    for key, value in (("n_looked_into", n_looked_into), ("n_measured", n_measured)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidInputError("is no number of versions", key=key, expected="0 or more", found=value)
    end = catalog.resolve(stop)
    rows = catalog.rows(end.line)[_first(catalog, start, end) : end.row.version + 1]
    versions = [Located(end.line, row) for row in rows]
    columns = cut(versions, N_COLUMNS)
    chosen = _choose(catalog, columns, n_looked_into)
    measured = _cheapest(catalog, [located for its in chosen for located in its], n_measured)
    bar = _Bar(f"report {versions[0].name} .. {end.name}")
    for located in (located for its in chosen for located in its):
        edge = own_delta(catalog, located)
        bar.total += 0 if edge is None else edge.nbytes
    bar.total += sum(nbytes for _, nbytes in measured)

    metrics = _metrics(catalog, columns)
    state_nbytes = {sha256: _nbytes_of(catalog.layout(sha256)) for sha256 in {row.layout for row in rows}}
    layers, partitions = LayerTally(catalog.layout(end.row.layout), len(columns)), PartitionTally(catalog)
    looked_into = _look(catalog, chosen, layers, partitions, bar)
    return Report(
        store=catalog.objects.url,
        line=end.line,
        first=rows[0].version,
        last=end.row.version,
        made_at=now(),
        begun_at=rows[0].created_at,
        ended_at=end.row.created_at,
        state_nbytes=state_nbytes[end.row.layout],
        columns=tuple(_column(catalog, its, state_nbytes) for its in columns),
        metrics=metrics.result(),
        n_metrics=metrics.n_names,
        looked_into=tuple(looked_into),
        layers=layers.result(),
        moved=tuple(_moved(catalog, measured, bar)),
        largest=partitions.largest,
        slowest=partitions.slowest,
        groups=_groups(catalog, end.line),
    )


class _Bar:
    """How far we are, in bytes of deltas."""

    def __init__(self, task: str) -> None:
        self._task, self._done = task, 0
        self.total = 0

    def step(self, nbytes: int) -> None:
        self._done += nbytes
        events.progress(self._task, min(self._done, self.total), self.total)


def cut(items: Sequence[T], n_most: int) -> list[Sequence[T]]:
    """Cut items into at most so many runs, none empty, whose lengths differ by at most one."""
    n = min(len(items), n_most)
    return [items[i * len(items) // n : (i + 1) * len(items) // n] for i in range(n)]


def spread(items: Sequence[T], n_most: int) -> list[T]:
    """Return at most so many of some items, evenly spread, the last one among them."""
    return [run[-1] for run in cut(items, n_most)]


def _first(catalog: Catalog, start: str | None, end: Located) -> int:
    if start is None:
        return 0
    located = catalog.resolve(start)
    number = located.row.version
    if number > end.row.version or catalog.row(end.line, number) != located.row:
        raise InvalidInputError(
            "a report goes from an older version of a line to a newer one",
            key="from",
            expected=f"a version of {end.line} up to {end.name}",
            found=located.name,
        )
    return number


def _column(catalog: Catalog, versions: Sequence[Located], state_nbytes: Mapping[str, int]) -> Column:
    """Return what the log says of neighbouring versions; `state_nbytes` is by layout."""
    rows = [located.row for located in versions]
    deltas = [row for row in rows if row.base is not None]
    rates = [row.counts.changed / row.counts.elements if row.counts.elements else 0.0 for row in deltas]
    return Column(
        first=rows[0].version,
        last=rows[-1].version,
        n_whole=len(rows) - len(deltas),
        n_expired=sum(catalog.is_expired(located) for located in versions),
        changed=sum(row.counts.changed for row in deltas),
        elements=sum(row.counts.elements for row in deltas),
        lowest_rate=min(rates, default=None),
        highest_rate=max(rates, default=None),
        nbytes=sum(row.counts.nbytes for row in deltas),
        state_nbytes=sum(state_nbytes[row.layout] for row in deltas),
        whole_nbytes=sum(row.counts.nbytes for row in rows if row.base is None),
        dense_nbytes=sum(state_nbytes[row.layout] for row in rows),
    )


def _nbytes_of(layout: Layout) -> int:
    return sum(entry.n_elements * width(entry.space) for entry in layout.tensors)


def _metrics(catalog: Catalog, columns: Sequence[Sequence[Located]]) -> Metrics:
    found = Metrics(len(columns))
    versions = [(number, located) for number, its in enumerate(columns) for located in its]

    def complete(item: tuple[int, Located]) -> tuple[int, VersionRow]:
        return item[0], catalog.complete(item[1]).row

    # Metadata that is too long for a log checkpoint is a request for each version.
    rows = map(complete, versions) if catalog.objects.is_local else map_bounded(complete, versions)
    for number, row in rows:
        found.add(number, row.metadata or {})
    return found


def _choose(catalog: Catalog, columns: Sequence[Sequence[Located]], n_most: int) -> list[list[Located]]:
    """Return for each column the versions to look into: about as many of each, of those whose delta is there."""
    there = [[located for located in its if own_delta(catalog, located) is not None] for its in columns]
    filled = [number for number, its in enumerate(there) if its]
    if not filled or not n_most:
        return [[] for _ in columns]
    n_each = max(1, n_most // len(filled))
    picked = set(spread(filled, n_most))
    return [spread(its, n_each) if number in picked else [] for number, its in enumerate(there)]


def _cheapest(catalog: Catalog, versions: Sequence[Located], n_most: int) -> list[tuple[Located, int]]:
    """Return the versions to measure, each with about what that reads in bytes."""
    priced = []
    for located in versions if n_most else ():
        row = catalog.row(located.line, located.row.version - 1)
        base = None if row is None else Located(located.line, row)
        if base is not None and not catalog.is_expired(base) and not catalog.is_expired(located):
            priced.append((located, sum(edge.nbytes for edge in catalog.path(base)) + located.row.counts.nbytes))
    return [min(run, key=lambda item: item[1]) for run in cut(priced, n_most)] if priced else []


def _look(
    catalog: Catalog, chosen: Sequence[Sequence[Located]], layers: LayerTally, partitions: PartitionTally, bar: _Bar
) -> list[int]:
    """Count what the versions chosen of each column change; return the numbers of those of which it is known."""
    found = []
    for column, versions in enumerate(chosen):
        for located in versions:
            counted = count_changes(catalog, located)
            if counted is not None:
                layers.add(column, counted.contents.layout, counted.changed)
                partitions.add(located, counted.edge, counted.contents)
                found.append(located.row.version)
                bar.step(counted.edge.nbytes)
    return found


def _moved(catalog: Catalog, versions: Sequence[tuple[Located, int]], bar: _Bar) -> list[Moved]:
    found = []
    for located, nbytes in versions:
        before = Located(located.line, catalog.require_row(located.line, located.row.version - 1))
        try:
            measured = diff(catalog, before, located, n_rows=0).measured
        except NotFoundError:  # one of the two has expired meanwhile
            measured = None
        bar.step(nbytes)
        if measured is not None:
            found.append(Moved(located.row.version, measured))
    return found


def _groups(catalog: Catalog, line: str) -> tuple[GroupStatus, ...]:
    found = (group_status(catalog, name) for name in group_names(catalog.objects))
    return tuple(item for item in found if item.line == line)
