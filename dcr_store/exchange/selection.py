"""What a copy of a line holds: which edges and versions, and what is absent (docs/spec/v1.md §15). Pure; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dcr_store.format.copies import Absent
from dcr_store.format.ranges import Ranges
from dcr_store.format.rows import VersionRow
from dcr_store.log.history import History
from dcr_store.versions.catalog import edge_of
from dcr_store.versions.edges import Edge


@dataclass(frozen=True, slots=True)
class Selection:
    """What a copy holds of a line.

    Attributes
    ----------
    edges : frozenset of str
        By txid: the edges.
    versions : frozenset of int
        The line's own versions that can be read in the copy.
    reached : frozenset of int
        All numbers to which edges lead in the copy, those of lines that this one goes on from included.
    absent : Absent
        What the copy does not have, also of what expired since: it is told before the copy's log says so.
    """

    edges: frozenset[str]
    versions: frozenset[int]
    reached: frozenset[int]
    absent: Absent


def select(
    line: str,
    rows: Sequence[VersionRow],
    found: History,
    ever: Collection[str],
    since: int | None,
    before: Collection[int] = (),
) -> Selection:
    """Choose what a copy of a line holds.

    Parameters
    ----------
    rows : sequence of VersionRow
        The line's own versions.
    found : History
        What maintenance did to it in the source, as of the end of the log that is copied.
    ever : collection of str
        By txid: all anchors and folds that a beginning of the log may tell, whatever has become of them since.
    since : int, optional
        Leave out what leads to versions before this number, and what can be reached by them alone.
    before : collection of int
        The numbers that can be reached in the copy up to the version that the line goes on from.
    """
    edges: dict[int, list[Edge]] = defaultdict(list)
    for row in rows:
        if row.version not in found.dead:
            edges[row.version].append(Edge(line, row.version, row.base, row.manifest, row.txid, row.counts.nbytes))
    for added in found.edges:
        edges[added.version].append(edge_of(line, added))
    reached, chosen = set(before), set()
    for version in sorted(edges):  # each edge leads upwards
        for edge in edges[version] if version >= (since or 0) else ():
            if edge.start == -1 or edge.start in reached:
                chosen.add(edge.txid)
                reached.add(version)
    versions = frozenset(row.version for row in rows if row.version not in found.expired and row.version in reached)
    absent = Absent(
        line,
        since,
        Ranges.of(row.version for row in rows if row.version not in versions),
        Ranges.of(row.version for row in rows if row.txid not in chosen),
        tuple(sorted(set(ever) - chosen)),
    )
    return Selection(frozenset(chosen), versions, frozenset(reached), absent)
