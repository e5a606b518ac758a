"""The path over which a target reaches a version, and where on it a target is. Reads manifests and tables as needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dcr_store.format.names import version_name
from dcr_store.versions.catalog import Catalog, LazyStates, Located
from dcr_store.versions.path import Path


@dataclass(frozen=True, slots=True)
class Route:
    """A path with the names of its versions.

    Attributes
    ----------
    places : dict of str to int
        ``line@number`` → index into the path's states.
    """

    path: Path
    places: dict[str, int]

    def between(self, names: Iterable[str | None]) -> list[int]:
        """Return the states from the oldest to the newest of the versions named (those on the path) and the goal.

        In the order in which ``classify`` prefers them last: what lies nearest to the goal comes last.
        """
        known = [self.places[name] for name in names if name in self.places]
        low, high = min([*known, self.path.goal]), max([*known, self.path.goal])
        return sorted(range(low, high + 1), key=lambda index: -abs(index - self.path.goal))


def route(catalog: Catalog, goal: Located, others: Iterable[Located] = ()) -> Route:
    """Return the cheapest path from zero to `goal`, by way of other versions where that is of use.

    Parameters
    ----------
    others : iterable of Located
        Versions that a target may hold. The path leads by one that is older, if it is cheaper to go on from there than
        from zero, and on to those that are newer, from which it may be gone back.

    Raises
    ------
    NotFoundError
        If `goal` has expired.
    """
    edges, known = catalog.path(goal), [other for other in others if other.line == goal.line]
    numbers = {edge.version for edge in edges}
    least = sum(edge.nbytes for edge in edges)
    for other in known:
        if other.row.version < goal.row.version and other.row.version not in numbers:
            ahead = catalog.path_from(other, goal)
            if ahead is not None and (nbytes := sum(edge.nbytes for edge in ahead)) < least:
                # What no path leads to has no digests to be known by.
                before = catalog.path_from_zero(other)
                if before is not None:
                    edges, least = [*before, *ahead], nbytes
    end = goal
    for other in sorted(known, key=lambda item: item.row.version):
        if other.row.version > end.row.version and (beyond := catalog.path_from(end, other)) is not None:
            edges, end = [*edges, *beyond], other
    places = {version_name(goal.line, edge.version): index for index, edge in enumerate(edges)}
    path = Path(LazyStates(catalog, goal.line, edges), places[goal.name], catalog.document.chunk_elements)
    return Route(path, places)
