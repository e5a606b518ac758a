"""Prove that what is stored gives the bits that the versions' digests say: replay, range by range, version by version.

A run of versions is replayed in ranges of chunks, each by itself in memory, so that any number of processes can do it
and none needs room for a state. Each version is brought on from the one before. Every edge is taken once: what the runs
leave out is replayed from zero for its own sake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dcr_store import events
from dcr_store.errors import DcrError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.format.names import version_name
from dcr_store.format.rows import VersionRow
from dcr_store.history.report import Problem
from dcr_store.history.units import Found
from dcr_store.layout.dtypes import width
from dcr_store.versions.catalog import Catalog, LazyStates, Located
from dcr_store.versions.chunks import Chunks
from dcr_store.versions.edges import Edge
from dcr_store.versions.path import ZERO, Path
from dcr_store.versions.places import StorePlace
from dcr_store.versions.replay import only, replay
from dcr_store.versions.route import route

RANGE_NBYTES: Final = 64 << 20
"""What a unit holds in memory, besides the partitions that it is reading."""
_LEAST_STEPS: Final = 32
"""A run is cut at an anchor only after so many versions."""


@dataclass(frozen=True, slots=True)
class Step:
    """How a version is reached.

    Attributes
    ----------
    edges : tuple of Edge
        The last one leads to the version. The first one starts from zero, or else is what led to `start`.
    start : int
        The index of the edge that led to where it starts; ``ZERO``.
    """

    row: VersionRow
    edges: tuple[Edge, ...]
    start: int

    def told(self) -> list[object]:
        """Return what decides on the outcome."""
        return [self.row.version, self.row.root, self.start, [[edge.txid, edge.manifest.sha256] for edge in self.edges]]


@dataclass(frozen=True, slots=True)
class ReplayUnit:
    """A range of chunks of one space, through a run of versions."""

    line: str
    steps: tuple[Step, ...]
    space: str
    first: int
    stop: int
    chunk_elements: int

    @property
    def id(self) -> str:
        """The run, by what is stored of it, and the range."""
        steps = hashlib.sha256(canonical.encode([step.told() for step in self.steps])).hexdigest()
        first, last = self.steps[0].row.version, self.steps[-1].row.version
        return f"replay {version_name(self.line, first)}-{last} {self.space} {self.first}-{self.stop} {steps}"

    @property
    def nbytes(self) -> int:
        """What is written."""
        return len(self.steps) * (self.stop - self.first) * self.chunk_elements * width(self.space)

    def look(self, place: StorePlace) -> Found:
        """Replay it."""
        catalog, found = place.catalog, Found()
        target: Chunks | None = None
        for step in self.steps:
            name = version_name(self.line, step.row.version)
            events.reached("verify.replay", name)
            try:
                catalog.read_to(self.line, step.row.version)
                edges, start = step.edges, step.start
                if target is None and start != ZERO:  # the version before is not to be had
                    routed = route(catalog, Located(self.line, step.row))
                    edges, start = _edges(routed.path), ZERO
                if start == ZERO:
                    target = Chunks()
                assert target is not None
                path = Path(LazyStates(catalog, self.line, edges), len(edges) - 1, self.chunk_elements)
                chunks = {self.space: range(self.first, self.stop)}
                replay(catalog.objects, path, target, only(path, chunks, start))
            except DcrError as error:
                found.problems.append(Problem.of(error, name))
                target = None
        return found


def _edges(path: Path) -> tuple[Edge, ...]:
    states = path.states
    assert isinstance(states, LazyStates)
    return states.edges


def replay_units(
    catalog: Catalog, versions: Iterable[Located], edges: Iterable[tuple[str, Edge]]
) -> Iterator[ReplayUnit | Problem]:
    """Cut the replay of versions and edges into units; what has no path, or no layout, is a problem.

    Parameters
    ----------
    versions : iterable of Located
        In order, line by line.
    edges : iterable of (str, Edge)
        Of these lines: the ones that no unit has taken yet are replayed by themselves.
    """
    taken: set[str] = set()
    run: list[Step] = []
    before: Located | None = None
    for located in versions:
        try:
            routed = route(catalog, located, () if before is None else (before,))
            all_edges = _edges(routed.path)[: routed.path.goal + 1]
            at = None if before is None else routed.places.get(before.name)
            if not run or at is None or at > routed.path.goal:
                yield from _cut(catalog, located.line if before is None else before.line, run)
                run = [Step(located.row, all_edges, ZERO)]
            else:
                run.append(Step(located.row, all_edges[at:], 0))
            taken.update(edge.txid for edge in run[-1].edges[run[-1].start + 1 :])
            before = located
            if len(run) >= _LEAST_STEPS:
                anchor = next((e for e in catalog.edges_to(located.line, located.row.version) if e.base is None), None)
                if anchor is not None:
                    yield from _cut(catalog, located.line, run)
                    run = [Step(located.row, (anchor,), ZERO)]
                    taken.add(anchor.txid)
        except DcrError as error:
            if before is not None:
                yield from _cut(catalog, before.line, run)
            run, before = [], None
            yield Problem.of(error, located.name)
    if before is not None:
        yield from _cut(catalog, before.line, run)
    for line, edge in edges:
        if edge.txid not in taken:
            yield from _alone(catalog, line, edge)


def _alone(catalog: Catalog, line: str, edge: Edge) -> Iterator[ReplayUnit | Problem]:
    """Replay an edge from zero, by way of where it starts."""
    name = version_name(line, edge.version)
    try:
        row = catalog.row(line, edge.version)
        start = None if edge.base is None else catalog.row(line, edge.start)
        before = None if start is None else catalog.path_from_zero(Located(line, start))
        if row is None or (edge.base is not None and before is None):
            return  # no path leads to where it starts any more: nobody can take it
        yield from _cut(catalog, line, [Step(row, (*(before or ()), edge), ZERO)])
    except DcrError as error:
        yield Problem.of(error, name)


def _cut(catalog: Catalog, line: str, run: list[Step]) -> Iterator[ReplayUnit]:
    """Cut a run, whose versions are of one layout, into ranges."""
    if not run:
        return
    size = catalog.document.chunk_elements
    layout = catalog.layout(run[0].row.layout)
    for space in SPACES:
        n_chunks = layout.n_chunks(space, size)
        n_range = max(1, RANGE_NBYTES // (size * width(space)))
        for first in range(0, n_chunks, n_range):
            yield ReplayUnit(line, tuple(run), space, first, min(n_chunks, first + n_range), size)
