"""A path of versions: the states that a target may be in, the one it shall reach, the edges between. Does no I/O.

An edge ``i`` leads from state i-1 to state i (edge 0 from zero); where it is masks alone it also leads back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from dcr_store.codec.digest import zeros_digest
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import width
from dcr_store.payload.version import SealedPartition, VersionContents

ZERO: Final = -1
UNKNOWN: Final = -2
_N_TOGETHER: Final = 16


@dataclass(frozen=True)
class Path:
    """The states that a target may be in, and the one it shall reach.

    Attributes
    ----------
    states : sequence of VersionContents
        Consecutive versions of one layout, the first an anchor; may load each when it is asked for.
    goal : int
        Index into `states`.
    """

    states: Sequence[VersionContents]
    goal: int
    chunk_elements: int
    _partitions: dict[int, dict[tuple[str, int], list[SealedPartition]]] = field(default_factory=dict, compare=False)

    @property
    def target(self) -> VersionContents:
        """The version to reach."""
        return self.states[self.goal]

    def n_chunks(self, space: str) -> int:
        """Return the number of chunks of a space."""
        return len(self.target.tables[space])

    def all_chunks(self) -> dict[str, int]:
        """Return the number of chunks of each space."""
        return {space: self.n_chunks(space) for space in SPACES}

    def each(self, states: Sequence[int]) -> Iterator[tuple[int, VersionContents]]:
        """Iterate over states by index and contents, asking for some at once where they are consecutive."""
        for first in range(0, len(states), _N_TOGETHER):
            part = states[first : first + _N_TOGETHER]
            low, high = min(part), max(part)
            if high - low < len(set(part)):
                together = self.states[low : high + 1]
                yield from ((index, together[index - low]) for index in part)
            else:
                yield from ((index, self.states[index]) for index in part)

    def digest(self, space: str, chunk: int, state: int) -> int:
        """Return a chunk's digest in a state (``ZERO`` or an index)."""
        if state < 0:
            return zeros_digest(self.chunk_elements * width(space))
        return int(self.states[state].tables[space][chunk])

    def steps(self, state: int) -> range:
        """Return the edges from `state` to the goal: forwards ``i`` leads from i-1 to i, backwards from i to i-1."""
        if state > self.goal:
            return range(state, self.goal, -1)
        return range(max(state, ZERO) + 1, self.goal + 1)

    def after(self, state: int, step: int) -> int:
        """Return the state reached by `step` on the way from `state`."""
        return step - 1 if state > self.goal else step

    def reversible(self, space: str, chunk: int, state: int) -> bool:
        """Whether the edges from a newer `state` back to the goal are masks alone in this chunk."""
        return all(
            not self.states[step].is_anchor and self.states[step].touched[space].get(chunk, (0, 0))[1] == 0
            for step in self.steps(state)
        )

    def partitions(self, step: int, space: str, chunk: int) -> list[SealedPartition]:
        """Return the partitions of an edge that may hold `chunk`."""
        if step not in self._partitions:
            table: dict[tuple[str, int], list[SealedPartition]] = {}
            contents = self.states[step]
            for item in contents.partitions:
                item_space = item.array.array.partition("/")[0]
                end = min(item.first_chunk + item.n_chunks, len(contents.tables[item_space]))
                for place in range(item.first_chunk, end):
                    if place in contents.touched[item_space]:
                        table.setdefault((item_space, place), []).append(item)
            self._partitions[step] = table
        return self._partitions[step].get((space, chunk), [])
