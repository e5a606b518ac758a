"""One receiver as a member of a group (docs/spec/v1.md §12): join, acknowledge, promote. Bits are not moved here.

``plan`` says what a member should do and does no I/O; ``Member`` reads the log, and says in it what its receiver did.
Refuses to go on once the log dropped this incarnation or admitted another one: the receiver then stops serving.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcr_store import events
from dcr_store.errors import ConflictError, FencedError, IntegrityError
from dcr_store.format.groups import Ack, GroupVersion, VersionRoot
from dcr_store.format.names import check_member, new_incarnation
from dcr_store.log.acks import AckReader
from dcr_store.log.group_fold import GroupState
from dcr_store.versions.catalog import Catalog, Located

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a member should do, by the log as read.

    Attributes
    ----------
    prepare : GroupVersion or None
        The proposal that stands, until the member has acknowledged that it prepared it.
    apply : GroupVersion or None
        The active version, until the member has acknowledged that it applied it. It is decided, so it is applied
        whether the member prepared it or not.
    """

    prepare: GroupVersion | None
    apply: GroupVersion | None


def plan(state: GroupState, prepared: GroupVersion | None, applied: GroupVersion | None) -> Wanted:
    """Return what is to do, given what this incarnation acknowledged last."""
    return Wanted(
        state.proposed if state.proposed != prepared else None,
        state.active if state.active != applied else None,
    )


class Member:
    """One incarnation of a receiver in a group. Not thread-safe.

    Parameters
    ----------
    catalog : Catalog
    group, name : str
    incarnation : str, optional
        16 hex digits, new for each start; drawn by default.
    clock : callable
        Seconds that only grow; measures how long this member waits for others.

    Attributes
    ----------
    log : GroupLog
    """

    def __init__(
        self,
        catalog: Catalog,
        group: str,
        name: str,
        *,
        incarnation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = check_member(name)
        self.incarnation = incarnation or new_incarnation()
        self.group = group
        self.log = catalog.group_log(group)
        self._catalog = catalog
        self._acks = AckReader(catalog.objects, group)
        self._clock = clock
        self._was_admitted = False
        self._prepared: GroupVersion | None = None
        self._applied: GroupVersion | None = None
        self._late_since: dict[str, dict[tuple[int, str, str], float]] = {}

    @property
    def state(self) -> GroupState:
        """The group, as last read."""
        return self.log.state

    @property
    def active(self) -> GroupVersion | None:
        """The group's active version, as last read."""
        return self.log.state.active

    def join(self) -> GroupState:
        """Admit this incarnation. An earlier incarnation of the name is none any more.

        Raises
        ------
        NotFoundError
            If there is no such group.
        ConflictError
            If the group does not expect the name.
        FencedError
            If this incarnation was a member and is none any more: it never comes back by itself.
        """
        state = self.log.refresh()
        last = state.dropped.get(self.name)
        if self._was_admitted or (last is not None and last.incarnation == self.incarnation):
            self._require_member(state)
        state = self.log.admit(self.name, self.incarnation)
        self._was_admitted = True
        self._require_member(state)
        return state

    def refresh(self) -> GroupState:
        """Read on in the group's log; ``FencedError`` if this incarnation is no member any more."""
        state = self.log.refresh()
        self._require_member(state)
        return state

    def step(self, *, knows_head: bool = False) -> Wanted:
        """Read on, propose the newest version where none stands, and return what to do now.

        A proposal of a version that has expired, as far as the line's log has been read, is withdrawn: nobody can
        prepare it.

        Parameters
        ----------
        knows_head : bool
            Whether the catalog has just read the line's log to its end, so that it is not read again.

        Raises
        ------
        FencedError
            If this incarnation is no member any more: stop serving, and start again to come back.
        """
        state = self._without_expired(self.refresh())
        if state.proposed is None and state.policy.proposing == "newest" and not state.awaited:
            state = self._propose_newest(state, knows_head)
        return plan(state, self._prepared, self._applied)

    def _without_expired(self, state: GroupState) -> GroupState:
        if state.proposed is None:
            return state
        located = self._catalog.known(state.proposed.version)
        if located is None or not self._catalog.is_expired(located):
            return state
        with contextlib.suppress(ConflictError):  # another member was first
            self.log.withdraw("the version has expired", version=located.name)
        self._require_member(self.log.state)
        return self.log.state

    def _propose_newest(self, state: GroupState, knows_head: bool) -> GroupState:
        log = self._catalog.log(state.line)
        head = (log.state if knows_head else log.refresh()).head
        if head is None or (state.highest is not None and head.version <= state.highest):
            return state
        new = Located(state.line, head)
        try:
            return self.log.propose(VersionRoot(new.name, head.root), only_newer=True)
        except ConflictError:  # another member was first
            self._require_member(self.log.state)
            return self.log.state

    def located(self, version: GroupVersion) -> Located:
        """Return the committed version that a proposal names.

        Raises
        ------
        NotFoundError
            If the line has no such version.
        IntegrityError
            If it has another root there.
        """
        located = self._catalog.resolve(version.version)
        if located.row.root != version.root:
            raise IntegrityError(
                f"group {self.group} was proposed a version that the line does not have; withdraw the proposal",
                key=version.version,
                expected=f"root {located.row.root}",
                found=f"root {version.root}",
            )
        return located

    def prepared(self, version: GroupVersion, base_root: str | None, root: str) -> None:
        """Acknowledge that the target can be brought to `version` at once, from what is here and verified.

        Parameters
        ----------
        base_root : str or None
            The root that the target holds; None where it holds nothing known.
        root : str
            The root that it will hold.

        Raises
        ------
        NotFoundError, ConflictError
            If the version has expired, or may be about to: the expiry may not have seen the proposal.
        """
        self._catalog.check_stays(self.located(version))
        self._acknowledge("prepared", version, base_root, root)
        self._prepared = version

    def applied(self, version: GroupVersion, root: str) -> None:
        """Acknowledge that the target holds `version`, durably where it is durable."""
        self._acknowledge("applied", version, None, root)
        self._applied = version

    def _acknowledge(self, kind: str, version: GroupVersion, base_root: str | None, root: str) -> None:
        if root != version.root:
            raise IntegrityError(
                f"{kind} something else than group {self.group} wants",
                key=version.version,
                expected=f"root {version.root}",
                found=f"root {root}",
            )
        ack = Ack(kind, self.group, self.name, self.incarnation, version, base_root)
        events.reached(f"member.{kind}.before", ack.key)
        # Said twice it is the same object; a crash just before leaves it unsaid, just after, it counts for ever.
        if not self._catalog.objects.put_if_absent(ack.key, ack.to_bytes()):
            found = Ack.from_bytes(self._catalog.objects.get(ack.key), ack.key)
            if not found.says_same(ack):
                raise IntegrityError(
                    "another acknowledgement is stored in this place; delete it", key=ack.key, expected=ack, found=found
                )
        events.reached(f"member.{kind}.after", ack.key)

    def try_promote(self) -> bool:
        """Promote the proposal that stands if all have prepared it, on the prefix read last; one conditional put.

        Drops members that are later than the group's policy allows, if this member has prepared.

        Returns
        -------
        bool
            Whether the log, as read by now, has a new active version.
        """
        state, proposed = self.log.state, self.log.state.proposed
        if proposed is None or proposed != self._prepared:
            return False
        self._require_member(state)
        acks = self._acks.read("prepared", proposed, state.members)
        if state.lacking(acks):
            state = self._drop_late(state, "prepared", proposed, acks)
        if state.lacking(acks) or state.proposed != proposed:
            return state.active == proposed
        try:
            state = self.log.promote(proposed, acks)
        except ConflictError:
            # Another member was first, or somebody came or went: the state read on says so.
            state = self.log.state
        return state.active == proposed

    def _drop_late(self, state: GroupState, kind: str, subject: GroupVersion, acks: Iterable[str]) -> GroupState:
        """Drop those who have been missing among `acks`, which are of this kind, for longer than the policy allows."""
        limit_s, here = state.policy.drop_after_s, set(acks)
        if limit_s is None:
            return state
        late = [(subject.proposal, name, found) for name, found in state.members.items() if name not in here]
        now_s, before = self._clock(), self._late_since.get(kind, {})
        since = self._late_since[kind] = {key: before.get(key, now_s) for key in late}
        for key, since_s in since.items():
            if now_s - since_s >= limit_s:
                reason = f"had not {kind} {subject.version} {limit_s} s after {self.name}"
                try:
                    state = self.log.drop(key[1], reason, incarnation=key[2])
                except ConflictError:
                    state = self.log.state
        return state

    def all_applied(self) -> bool:
        """Whether every member admitted has applied the active version: then the group may serve it.

        Drops members that are later than the group's policy allows, if this member has applied it.
        """
        state, active = self.log.state, self.log.state.active
        if active is None or not state.members:
            return False
        acks = self._acks.read("applied", active, state.members)
        if active == self._applied:
            state = self._drop_late(state, "applied", active, acks)
        found = {name: ack.incarnation for name, ack in acks.items()}
        return state.active == active and all(found.get(name) == this for name, this in state.members.items())

    def _require_member(self, state: GroupState) -> None:
        found = state.members.get(self.name)
        if found == self.incarnation:
            return
        last = state.dropped.get(self.name)
        if found is not None:
            why = "another start of the same name was admitted since; are two receivers given one name?"
        elif last is not None and last.incarnation == self.incarnation:
            why = last.reason
        else:
            why = "it was never admitted"
        raise FencedError(
            f"{self.name} is no member of group {self.group} (any more): {why}; stop serving, start again to come back",
            key=self.group,
            expected=self.incarnation,
            found=found,
        )
