"""One group's log in an object store (docs/spec/v1.md §12): create, admit, drop, propose, withdraw, promote.

Each act is decided on the prefix at whose length it is put; what is illegal there is refused with a ``ConflictError``
that says what stands instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dcr_store import events
from dcr_store.errors import ConflictError, FormatError, InvalidInputError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields, now
from dcr_store.format.groups import (
    LONGEST_REASON,
    AckRef,
    Admit,
    Create,
    Drop,
    GroupRecord,
    GroupVersion,
    Policy,
    Promote,
    Propose,
    VersionRoot,
    Withdraw,
    parse_group_record,
)
from dcr_store.format.names import (
    LINE,
    check_group,
    check_line,
    check_member,
    group_checkpoint_key,
    group_record_key,
    new_txid,
)
from dcr_store.log import group_fold
from dcr_store.log.group_fold import GroupState
from dcr_store.log.record_log import RecordLog
from dcr_store.log.signing import UNSIGNED, Signing
from dcr_store.ports import ObjectStore


def group_names(objects: ObjectStore) -> list[str]:
    """Return the names of all groups, sorted."""
    return sorted(name for name in objects.list_names("groups/") if LINE.fullmatch(name))


class GroupLog(RecordLog[GroupState, GroupRecord]):
    """The log of one group.

    Parameters
    ----------
    objects : ObjectStore
    group : str
    store_sha256 : str
        SHA-256 of ``dcr.json``, with which the hash chain starts.
    signing : Signing
        As of ``RecordLog``.
    """

    event_prefix = "group"
    decides_on_records = True

    def __init__(self, objects: ObjectStore, group: str, store_sha256: str, signing: Signing = UNSIGNED) -> None:
        self.group = check_group(group)
        self.name = f"group {group}"
        super().__init__(objects, store_sha256, signing)

    def _empty(self) -> GroupState:
        return GroupState(self.group, 0, self.store_sha256)

    def _key(self, seq: int) -> str:
        return group_record_key(self.group, seq)

    def _hint_key(self) -> str:
        return group_checkpoint_key(self.group)

    def _parse(self, data: bytes, key: str) -> GroupRecord:
        return parse_group_record(data, key)

    def _apply(self, state: GroupState, record: GroupRecord, data: bytes) -> GroupState:
        return group_fold.apply(state, record, data)

    def _open(self) -> tuple[GroupState | None, int]:
        state = read_checkpoint(self.objects, self.group, self.store_sha256)
        if state is None:
            return None, 0
        return state if not self.is_trusting and self._is_last(state) else None, state.length

    def _note(self, record: GroupRecord) -> None:
        if not isinstance(record, Promote):
            return
        events.reached("group.checkpoint.before", self.group)
        body = self.state.to_json(self.store_sha256)
        self.objects.put(group_checkpoint_key(self.group), canonical.seal_body(body))
        events.reached("group.checkpoint.after", self.group)

    def existing(self) -> GroupState:
        """Read on; ``NotFoundError`` if the group has not been created."""
        state = self.refresh()
        self._require_created(state)
        return state

    def _require_created(self, state: GroupState) -> None:
        if state.length == 0:
            others = [name for name in group_names(self.objects) if name != self.group]
            raise NotFoundError(
                f"there is no group {self.group!r}; "
                + (f"there are: {', '.join(others)}" if others else "create it with: dcr group STORE create"),
                key=self.group,
            )

    # ------------------------------------------------------------------ acts

    def _common(self, state: GroupState) -> dict[str, Any]:
        return {
            "group": self.group,
            "seq": state.length,
            "id": new_txid(),
            "prev": state.last_sha256,
            "created_at": now(),
        }

    def create(self, line: str, expected: Iterable[str], policy: Policy) -> GroupState:
        """Create the group.

        Raises
        ------
        ConflictError
            If there is one of this name.
        """
        check_line(line)
        names = tuple(sorted({check_member(name) for name in expected}))

        def decide(state: GroupState) -> Create:
            if state.length:
                raise ConflictError(
                    f"group {self.group} exists already; choose another name, or let further receivers into it: "
                    f"dcr group STORE admit {self.group} NAME",
                    key=self.group,
                )
            return Create(**self._common(state), line=line, expected=names, policy=policy)

        self.append(decide)
        return self.state

    def admit(self, name: str, incarnation: str | None = None) -> GroupState:
        """Admit an incarnation, or (None) let the name admit itself from now on. Done already is no error.

        Raises
        ------
        ConflictError
            If the name is not expected, or this incarnation was dropped or replaced.
        """
        check_member(name)

        def decide(state: GroupState) -> Admit:
            self._require_created(state)
            if incarnation is None:
                if name in state.expected:
                    raise _AlreadyError(f"{name} is expected already")
            elif state.members.get(name) == incarnation:
                raise _AlreadyError(f"{name} is admitted already")
            elif not state.may_admit_itself(name):
                raise ConflictError(
                    f"group {self.group} does not expect {name}; to let it in: dcr group STORE admit {self.group} "
                    f"{name}",
                    key=self.group,
                    expected=f"one of {', '.join(state.expected)}" if state.expected else "nobody yet",
                    found=name,
                )
            elif (last := state.dropped.get(name)) is not None and last.incarnation == incarnation:
                raise ConflictError(
                    f"group {self.group} has dropped this incarnation of {name}: {last.reason}; start it again",
                    key=self.group,
                )
            return Admit(**self._common(state), name=name, incarnation=incarnation)

        return self._append_unless_done(decide)

    def drop(self, name: str, reason: str, *, incarnation: str | None = None) -> GroupState:
        """Drop a member, or wait no more for an expected name.

        Parameters
        ----------
        incarnation : str, optional
            Drop it only as long as it is this one.

        Raises
        ------
        ConflictError
            If it is no member (any more).
        """
        check_member(name)
        _check_reason(reason)

        def decide(state: GroupState) -> Drop:
            self._require_created(state)
            found = state.members.get(name)
            present = sorted({*state.members, *state.awaited})
            if (found is None and name not in state.awaited) or (incarnation is not None and found != incarnation):
                raise ConflictError(
                    f"group {self.group} has no such member to drop",
                    key=self.group,
                    expected=f"one of {', '.join(present)}" if present else "nobody",
                    found=name if incarnation is None else f"{name}.{incarnation}",
                )
            return Drop(**self._common(state), name=name, incarnation=found, reason=reason)

        self.append(decide)
        return self.state

    def propose(self, new: VersionRoot, *, only_newer: bool = False) -> GroupState:
        """Propose a version.

        Parameters
        ----------
        new : VersionRoot
            Must be a committed version, with its root.
        only_newer : bool
            Refuse a version unless it comes after all that were ever proposed.

        Raises
        ------
        ConflictError
            If a proposal stands, the version is active already, or (`only_newer`) is not new.
        """

        def decide(state: GroupState) -> Propose:
            self._require_created(state)
            if state.proposed is not None:
                raise ConflictError(
                    f"a proposal stands in group {self.group}; wait until it is promoted, or withdraw it",
                    key=self.group,
                    expected="no proposal",
                    found=state.proposed.version,
                )
            line, _, number = new.version.rpartition("@")
            if line != state.line:
                raise ConflictError(
                    f"group {self.group} follows another line", key=self.group, expected=state.line, found=new.version
                )
            if state.active is not None and state.active.ref == new:
                raise ConflictError(f"{new.version} is active in group {self.group} already", key=self.group)
            if only_newer and state.highest is not None and int(number) <= state.highest:
                raise ConflictError(
                    f"{new.version} or a later version was proposed before",
                    key=self.group,
                    expected=f"a version after {state.line}@{state.highest}",
                    found=new.version,
                )
            return Propose(**self._common(state), new=new)

        self.append(decide)
        return self.state

    def withdraw(self, reason: str, *, version: str | None = None) -> GroupState:
        """Withdraw the proposal that stands, if it is (where given) of this version.

        Raises
        ------
        ConflictError
            If none stands, or another one.
        """
        _check_reason(reason)

        def decide(state: GroupState) -> Withdraw:
            self._require_created(state)
            standing = state.proposed
            if standing is None or version not in (None, standing.version):
                raise ConflictError(
                    f"there is no such proposal in group {self.group} to withdraw",
                    key=self.group,
                    expected="a proposal" if version is None else version,
                    found="none" if standing is None else standing.version,
                )
            return Withdraw(**self._common(state), new=standing.ref, reason=reason)

        self.append(decide)
        return self.state

    def promote(self, proposed: GroupVersion, acks: Mapping[str, AckRef]) -> GroupState:
        """Make a proposal the active version.

        Parameters
        ----------
        acks : mapping of str to AckRef
            The `prepared` acknowledgements of this proposal that were found, by name.

        Raises
        ------
        ConflictError
            If the proposal does not stand (any more), or somebody who is to prepare has not.
        """

        def decide(state: GroupState) -> Promote:
            self._require_created(state)
            if state.proposed != proposed:
                raise ConflictError(
                    f"the proposal of group {self.group} is another one by now",
                    key=self.group,
                    expected=proposed.version,
                    found=None if state.proposed is None else state.proposed.version,
                )
            ready = {name for name, ack in acks.items() if state.members.get(name) == ack.incarnation}
            if not state.members or state.lacking(ready):
                raise ConflictError(
                    f"group {self.group} cannot promote {proposed.version} yet: it waits for "
                    f"{', '.join(state.lacking(ready)) or 'a first member'}",
                    key=self.group,
                )
            return Promote(
                **self._common(state),
                old=None if state.active is None else state.active.ref,
                new=proposed.ref,
                acks=tuple(acks[name] for name in state.members),
            )

        self.append(decide)
        return self.state

    def _append_unless_done(self, decide: Callable[[GroupState], GroupRecord]) -> GroupState:
        with contextlib.suppress(_AlreadyError):
            self.append(decide)
        return self.state


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str):
        raise InvalidInputError("the reason is no text", key="reason", expected="text", found=type(reason).__name__)
    if len(reason) > LONGEST_REASON:
        raise InvalidInputError(
            "the reason is too long; say it shorter",
            key="reason",
            expected=f"up to {LONGEST_REASON:,} characters",
            found=f"{len(reason):,}",
        )


class _AlreadyError(ConflictError):
    """What was asked for is so already."""


def read_checkpoint(objects: ObjectStore, group: str, store_sha256: str) -> GroupState | None:
    """Return the state that a group's checkpoint holds, or None if it cannot be used."""
    key = group_checkpoint_key(group)
    try:
        body = canonical.open_body(objects.get(key), key)
    except NotFoundError:
        return None
    if body is None or body.get("format") != "dcr-group-checkpoint":
        return None
    try:
        fields = Fields(body, key)
        state = GroupState.from_json(fields)
        return state if (state.group, fields.text("store_sha256")) == (group, store_sha256) else None
    except FormatError:
        return None
