"""Units of a verification: what can be looked at by itself, in any process, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dcr_store.format.documents import ObjectRef
from dcr_store.history.report import Problem
from dcr_store.versions.places import StorePlace


@dataclass(slots=True)
class Found:
    """What a unit found.

    Attributes
    ----------
    problems : list of Problem
    read : dict of str to int
        Key → nbytes of what was read, or had been found sound before.
    referenced : set of str
        The keys of all that the log leads to here.
    elsewhere : list of ObjectRef
        Of these, what lies under the prefix of another transaction, and others may lead to as well: not read here.
    """

    problems: list[Problem] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)
    referenced: set[str] = field(default_factory=set)
    elsewhere: list[ObjectRef] = field(default_factory=list)


class Unit(Protocol):
    """What can be looked at by itself. Can be pickled."""

    @property
    def id(self) -> str:
        """What it looks at, by content: two units of one id find the same while no object changes."""

    @property
    def nbytes(self) -> int:
        """About how many bytes there are to read or write, for progress."""

    def look(self, place: StorePlace) -> Found:
        """Look; what is wrong is found, not raised."""


def look(place: StorePlace, unit: Unit) -> Found:
    """Look at a unit, wherever this is called."""
    return unit.look(place)
