"""Which version a receiver goes to next. Moves no bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dcr_store.receive.keeper import Keeper
from dcr_store.receive.results import Prepared
from dcr_store.versions.catalog import Located


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done.

    Attributes
    ----------
    goal : Located or None
        The version to prepare, or to apply; None if there is nothing to do.
    may_apply : bool
        Whether the target may be brought there.
    """

    goal: Located | None
    may_apply: bool = True


class Decider(Protocol):
    """Decides. Used by one thread, after each look of the keeper."""

    @property
    def serves(self) -> bool:
        """Whether a target may serve what it is found to hold."""

    def next(self, keeper: Keeper, at_most: int | None) -> Step:
        """Return what is to be done, by what the store says now."""

    def prepared(self, step: Step, prepared: Prepared) -> None:
        """Say that `step.goal` is prepared."""

    def applied(self, step: Step) -> None:
        """Say that the target holds `step.goal`, which was to be applied. Said again, it changes nothing."""


class Alone:
    """A receiver without a group: every version of the line is wanted, the newest first of all."""

    serves = True

    def next(self, keeper: Keeper, at_most: int | None) -> Step:
        """Return the newest version, but none after number `at_most`; what the target holds if it is past that."""
        held = keeper.held
        if at_most is not None and held is not None and held.line == keeper.line and held.row.version >= at_most:
            return Step(held)
        return Step(keeper.head(at_most))

    def prepared(self, step: Step, prepared: Prepared) -> None:
        """Do nothing: nobody waits for it."""

    def applied(self, step: Step) -> None:
        """Do nothing: nobody waits for it."""
