"""Versions as nodes, what leads to them as edges with a cost in bytes: the cheapest path to a version. Does no I/O.

Edges are the delta or anchor that a commit stored, and the anchors and folds that maintenance added.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dcr_store.format.documents import Base, ObjectRef


@dataclass(frozen=True, slots=True)
class Edge:
    """What leads to a version: what its commit stored, an anchor, or a fold.

    Attributes
    ----------
    line, version
        Where it leads; the line is the one whose log names the edge.
    base : Base or None
        Where it starts: an older version, or zero.
    manifest : ObjectRef
        What it consists of.
    txid : str
        Of the transaction, or the work of maintenance, that stored it.
    nbytes : int
        What it takes in the store.
    """

    line: str
    version: int
    base: Base | None
    manifest: ObjectRef
    txid: str
    nbytes: int

    @property
    def start(self) -> int:
        """The number of the version where it starts; -1 for zero."""
        return -1 if self.base is None else int(self.base.version.rpartition("@")[2])


def cheapest(goal: int, edges_to: Callable[[int], Iterable[Edge]], start: int = -1) -> list[Edge] | None:
    """Return the path from `start` (-1: zero) to `goal` that takes the fewest bytes, then the fewest edges.

    Parameters
    ----------
    edges_to : callable
        Returns the edges that lead to a version. Asked only about versions from which the goal is reached for less
        than the price of the path returned.

    Returns
    -------
    list of Edge, or None
        In the order in which they are taken; None if there is no path, empty if `start` is `goal`.
    """
    # From the goal backwards, the nearest first: what lies beyond the anchor that is taken is never looked at.
    queue: list[tuple[int, int, int]] = [(0, 0, goal)]
    best: dict[int, tuple[int, int]] = {goal: (0, 0)}
    ahead: dict[int, Edge] = {}
    done: set[int] = set()
    while queue:
        nbytes, n_edges, version = heapq.heappop(queue)
        if version == start:
            path = []
            while version != goal:
                path.append(ahead[version])
                version = path[-1].version
            return path
        if version in done or version < start:
            continue
        done.add(version)
        for edge in edges_to(version):
            price = nbytes + edge.nbytes, n_edges + 1
            if edge.start not in best or price < best[edge.start]:
                best[edge.start] = price
                ahead[edge.start] = edge
                heapq.heappush(queue, (*price, edge.start))
    return None
