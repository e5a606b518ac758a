"""From which state a chunk is brought to the goal: one that is newer goes back, or is rebuilt where that costs less.

Partitions are fetched whole. Where one chunk has to be rebuilt from the anchor, those beside it are had for little or
nothing more, and the masks that would lead them back need not be fetched. Does no I/O but reading contents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dcr_store.versions.path import UNKNOWN, ZERO, Path


def cheapest(path: Path, space: str, places: Mapping[int, int], *, only_free: bool = False) -> dict[int, int]:
    """Return from which state each chunk starts: that which it is in, or ``UNKNOWN`` if it shall be rebuilt.

    Parameters
    ----------
    places : mapping of int to int
        Chunk → the state that it is in; of chunks that share partitions, and are not at the goal.
    only_free : bool
        Rebuild only what takes no partition that is not fetched anyway.
    """
    newer = [chunk for chunk, state in places.items() if state > path.goal]
    if not newer:
        return dict(places)
    needed = _partitions(path, space, {chunk: state for chunk, state in places.items() if state < path.goal})
    rebuilt = {chunk for chunk in newer if _costs_less(path, space, [chunk], needed, 1)}
    rest = [chunk for chunk in newer if chunk not in rebuilt]
    if not only_free:
        back = _partitions(path, space, {chunk: places[chunk] for chunk in rest})
        if _costs_less(path, space, rest, needed, sum(back.values())):
            rebuilt.update(rest)
    return {chunk: UNKNOWN if chunk in rebuilt else state for chunk, state in places.items()}


def _partitions(path: Path, space: str, starts: Mapping[int, int]) -> dict[str, int]:
    """Return key → nbytes of the partitions that bring chunks to the goal from the states named."""
    return {
        item.key: item.partition.nbytes
        for chunk, state in starts.items()
        for step in path.steps(state)
        for item in path.partitions(step, space, chunk)
    }


def _costs_less(path: Path, space: str, chunks: Collection[int], needed: Collection[str], limit_nbytes: int) -> bool:
    """Whether what chunks are rebuilt from, but for the partitions `needed` anyway, is less than so many bytes."""
    nbytes = 0
    for step in path.steps(ZERO):
        items = {item.key: item for chunk in chunks for item in path.partitions(step, space, chunk)}
        nbytes += sum(item.partition.nbytes for key, item in items.items() if key not in needed)
        if nbytes >= limit_nbytes:
            return False
    return True
