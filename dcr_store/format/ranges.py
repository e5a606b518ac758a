"""Sets of version numbers as sorted ranges: what a log says about thousands of versions stays short.

Parsing refuses ranges that are not in their one form: ascending, each apart from the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dcr_store.errors import FormatError
from dcr_store.format.fields import MAX_VERSION, Fields


@dataclass(frozen=True, slots=True)
class Ranges:
    """A set of version numbers.

    Attributes
    ----------
    pairs : tuple of (int, int)
        First and last number of each range, both in it; ascending, with a gap between any two.
    """

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Ranges:
        """Return the set of these numbers, in any order."""
        pairs: list[tuple[int, int]] = []
        for number in sorted(set(numbers)):
            if pairs and pairs[-1][1] == number - 1:
                pairs[-1] = (pairs[-1][0], number)
            else:
                pairs.append((number, number))
        return cls(tuple(pairs))

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self.pairs, (number, MAX_VERSION)) - 1
        return index >= 0 and number <= self.pairs[index][1]

    def __iter__(self) -> Iterator[int]:
        for first, last in self.pairs:
            yield from range(first, last + 1)

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.pairs)

    def __or__(self, other: Ranges) -> Ranges:
        pairs: list[tuple[int, int]] = []
        for first, last in sorted((*self.pairs, *other.pairs)):
            if pairs and first <= pairs[-1][1] + 1:
                pairs[-1] = (pairs[-1][0], max(pairs[-1][1], last))
            else:
                pairs.append((first, last))
        return Ranges(tuple(pairs))

    def meets(self, other: Ranges) -> int | None:
        """Return the smallest number that is in both, or None."""
        both = (
            max(mine[0], theirs[0])
            for mine in self.pairs
            for theirs in other.pairs
            if max(mine[0], theirs[0]) <= min(mine[1], theirs[1])
        )
        return min(both, default=None)

    def lacks(self, other: Ranges) -> int | None:
        """Return the smallest number of `other` that is not in this set, or None."""
        for first, last in other.pairs:
            index = bisect_right(self.pairs, (first, MAX_VERSION)) - 1
            end = self.pairs[index][1] if index >= 0 else -1
            if end < first:
                return first
            if end < last:
                return end + 1
        return None

    def to_json(self) -> list[list[int]]:
        """Return the JSON form."""
        return [list(pair) for pair in self.pairs]

    @classmethod
    def from_json(cls, fields: Fields, name: str) -> Ranges:
        """Parse; ``FormatError`` names the field."""
        pairs: list[tuple[int, int]] = []
        for item in fields.array(name):
            pair = Fields({name: item}, fields.key).counts(name)
            is_next = len(pair) == 2 and pair[0] <= pair[1] <= MAX_VERSION and (not pairs or pair[0] > pairs[-1][1] + 1)
            if not is_next:
                raise FormatError(
                    f"field {name!r} is wrong",
                    key=fields.key,
                    expected="[first, last] of ranges, ascending, each apart from the next",
                    found=repr(item)[:80],
                )
            pairs.append((pair[0], pair[1]))
        return cls(tuple(pairs))

    def __str__(self) -> str:
        return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in self.pairs) or "none"


NONE: Final = Ranges()
