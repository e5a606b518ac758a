"""The path over which a target reaches a version, and where on it a target is. Reads manifests and tables as needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    """Return the path to `goal` from the nearest anchor, going on to newer versions named that share this anchor."""
    chain, end = catalog.chain(goal), goal.row.version
    for other in others:
        if other.line == goal.line and other.row.version > end:
            longer = catalog.chain(other)
            if longer[0].row.version == chain[0].row.version:
                chain, end = longer, other.row.version
    places = {item.name: index for index, item in enumerate(chain)}
    path = Path(LazyStates(catalog, chain), places[goal.name], catalog.document.chunk_elements)
    return Route(path, places)
