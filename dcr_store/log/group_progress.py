"""How far a group is: who has prepared and applied what, and what a promotion waits for. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_store.format.names import version_name
from dcr_store.log.acks import AckReader
from dcr_store.log.group import GroupLog
from dcr_store.log.group_fold import GroupState


@dataclass(frozen=True, slots=True)
class Progress:
    """A group's state with the acknowledgements that count.

    Attributes
    ----------
    prepared, applied : frozenset of str
        Members that have prepared the proposal that stands, and that have applied the active version.
    """

    state: GroupState
    prepared: frozenset[str]
    applied: frozenset[str]

    def has_promoted(self, number: int) -> bool:
        """Whether the active version is this one of the line, or one after it."""
        return self.state.active is not None and self.state.active.number >= number

    def waits_for(self, newest: int | None) -> str:
        """Return what has to happen before the next promotion; `newest` is the number of the line's head."""
        state, proposed = self.state, self.state.proposed
        waits = [f"{name} to come" for name in state.awaited]
        if not waits and not state.members:
            waits = ["a first member to come"]
        if proposed is not None:
            late = [name for name in state.members if name not in self.prepared]
            waits += [f"{name} to prepare {proposed.version}" for name in late]
            return ", ".join(waits) or f"a member to promote {proposed.version}, which all have prepared"
        if waits:
            return ", ".join(waits)
        if newest is None or (state.active is not None and state.active.number == newest):
            return f"the next version of {state.line}"
        if state.policy.proposing == "manual":
            return "an operator to propose a version"
        if state.highest is not None and newest <= state.highest:
            return f"the next version of {state.line}, or an operator to propose one"
        return f"a member to propose {version_name(state.line, newest)}"


def read_progress(log: GroupLog, acks: AckReader) -> Progress:
    """Read a group's log on, and its acknowledgements; ``NotFoundError`` if there is no such group."""
    state = log.existing()

    def names(kind: str) -> frozenset[str]:
        subject = state.proposed if kind == "prepared" else state.active
        return frozenset() if subject is None else frozenset(acks.read(kind, subject, state.members))

    return Progress(state, names("prepared"), names("applied"))
