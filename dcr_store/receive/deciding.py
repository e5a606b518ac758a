"""Which version a receiver goes to next, alone or as the member of a group. Moves no bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dcr_store.errors import ConflictError, InvalidInputError
from dcr_store.format.groups import GroupVersion
from dcr_store.receive.keeper import Keeper
from dcr_store.receive.member import Member
from dcr_store.receive.results import Prepared
from dcr_store.versions.catalog import Located


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done.

    Attributes
    ----------
    goal : Located or None
        The version to prepare, or to hold; None if there is none yet.
    may_apply : bool
        Whether the target may be brought there, and not only prepared.
    is_last : bool
        Whether there is nothing else to do, by what the store says now.
    may_be_late : bool
        Whether an earlier goal that is still being prepared may be reached first.
    """

    goal: Located | None
    may_apply: bool = True
    is_last: bool = True
    may_be_late: bool = False


class Decider(Protocol):
    """Decides. Used by one thread, after each look of the keeper."""

    @property
    def serves(self) -> bool:
        """Whether a target may serve what it is found to hold."""

    def next(self, keeper: Keeper, at_most: int | None) -> Step:
        """Return what is to be done, by what the store says now."""

    def prepared(self, goal: Located, prepared: Prepared) -> None:
        """Say that `goal` is prepared."""

    def decided(self, goal: Located | None) -> Located:
        """Return the version that the target may be brought to, where the user has prepared `goal`."""

    def applied(self, goal: Located) -> None:
        """Say that the target holds `goal`. Said again, it changes nothing."""

    def all_applied(self) -> bool:
        """Whether everybody concerned holds the version that this target was told to hold last."""


class Alone:
    """A receiver without a group: every version of the line is wanted, the newest first of all."""

    serves = True

    def next(self, keeper: Keeper, at_most: int | None) -> Step:
        """Return the newest version, but none after number `at_most`; what the target holds if it is past that."""
        held = keeper.held
        if at_most is not None and held is not None and held.line == keeper.line and held.row.version >= at_most:
            return Step(held)
        return Step(keeper.head(at_most), may_be_late=True)

    def prepared(self, goal: Located, prepared: Prepared) -> None:
        """Do nothing: nobody waits for it."""

    def decided(self, goal: Located | None) -> Located:
        """Return what was prepared."""
        if goal is None:
            raise InvalidInputError("nothing is prepared; call prepare(version) first")
        return goal

    def applied(self, goal: Located) -> None:
        """Do nothing: nobody waits for it."""

    def all_applied(self) -> bool:
        """Return True: there is nobody else."""
        return True


class InGroup:
    """A receiver in a group: what the group decided is applied, what it proposes is prepared, in this order."""

    serves = False

    def __init__(self, member: Member) -> None:
        self._member = member
        self._is_member = False
        self._applied: GroupVersion | None = None

    def next(self, keeper: Keeper, at_most: int | None) -> Step:
        """Return what the group's log says, as read now; promote what all have prepared.

        Raises
        ------
        FencedError
            If the group has dropped this receiver. The target may not be served any more.
        """
        member = self._member
        self._join()
        wanted = member.step(knows_head=True)
        if wanted.apply is None and wanted.prepare is None and member.try_promote():
            wanted = member.step(knows_head=True)
        if wanted.apply is not None:
            return Step(self._located(keeper, wanted.apply), is_last=False)
        if wanted.prepare is not None:
            return Step(self._located(keeper, wanted.prepare), may_apply=False, is_last=False)
        return Step(None if member.active is None else self._located(keeper, member.active))

    def _join(self) -> bool:
        """Become a member, unless this is one; return whether it has become one, by the log as read now."""
        if self._is_member:
            return False
        self._member.join()
        self._is_member = True
        return True

    def _refresh(self) -> None:
        if not self._join():
            self._member.refresh()

    def _located(self, keeper: Keeper, version: GroupVersion) -> Located:
        found = keeper.catalog.known(version.version)
        return found if found is not None and _names(version, found) else self._member.located(version)

    def prepared(self, goal: Located, prepared: Prepared) -> None:
        """Acknowledge it, if the group proposes it now, and promote if this was the last one to prepare it."""
        self._refresh()
        proposed = self._member.state.proposed
        if proposed is not None and _names(proposed, goal):
            self._member.prepared(proposed, prepared.base_root, prepared.root)
            self._member.try_promote()

    def decided(self, goal: Located | None) -> Located:
        """Return the group's active version, as read now."""
        self._refresh()
        active = self._member.active
        if active is None:
            raise ConflictError(
                "the group has not promoted any version yet; poll() until it has", key=self._member.group
            )
        return self._member.located(active)

    def applied(self, goal: Located) -> None:
        """Acknowledge it, once."""
        active = self._member.active
        if active is not None and active != self._applied and _names(active, goal):
            self._member.applied(active, goal.row.root)
            self._applied = active

    def all_applied(self) -> bool:
        """Whether all members have applied the active version."""
        return self._member.all_applied()


def _names(version: GroupVersion, located: Located) -> bool:
    return (version.version, version.root) == (located.name, located.row.root)
