"""The documents of a group (docs/spec/v1.md §12): records of its log, its policy, acknowledgements.

Parsing checks form only; whether a record is legal at its place is ``log.group_fold``'s question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from dcr_store.errors import FormatError
from dcr_store.format import canonical, signatures
from dcr_store.format.fields import Fields
from dcr_store.format.names import VERSION, ack_prefix, version_number

ADMISSIONS: Final = ("expected", "anyone")
PROPOSING: Final = ("newest", "manual")
ACK_KINDS: Final = ("prepared", "applied")
LONGEST_REASON: Final = 1024
"""Characters of a reason."""


def reason(fields: Fields) -> str:
    """Return why somebody was dropped or something withdrawn; ``FormatError`` names the field."""
    return fields.text("reason", longest=LONGEST_REASON)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a group's members do by themselves; fixed when the group is created.

    Attributes
    ----------
    admission : {"expected", "anyone"}
        Who may admit itself: expected names, or every name.
    proposing : {"newest", "manual"}
        Whether members propose the newest version of the line when none stands.
    drop_after_s : int or None
        For how long members that have prepared wait for one that has not, before they drop it; None: for ever.
    """

    admission: str = "expected"
    proposing: str = "newest"
    drop_after_s: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"admission": self.admission, "proposing": self.proposing, "drop_after_s": self.drop_after_s}

    @classmethod
    def from_json(cls, fields: Fields) -> Policy:
        """Parse; ``FormatError`` names the field."""
        drop_after_s = fields.optional_count("drop_after_s")
        if drop_after_s == 0:
            raise FormatError("field 'drop_after_s' is wrong", key=fields.key, expected="1 or more, or null", found=0)
        return cls(fields.one_of("admission", ADMISSIONS), fields.one_of("proposing", PROPOSING), drop_after_s)


@dataclass(frozen=True, slots=True)
class GroupVersion:
    """A version that a group was proposed.

    Attributes
    ----------
    version : str
        ``line@number``.
    root : str
        Its state root.
    proposal : int
        The number of the record that proposed it: the same version may be proposed again, after another one.
    """

    version: str
    root: str
    proposal: int

    @property
    def line(self) -> str:
        """The line's name."""
        return self.version.rpartition("@")[0]

    @property
    def number(self) -> int:
        """The number on the line."""
        return version_number(self.version)

    @property
    def ref(self) -> VersionRoot:
        """Version and root alone."""
        return VersionRoot(self.version, self.root)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"version": self.version, "root": self.root, "proposal": self.proposal}

    @classmethod
    def from_json(cls, fields: Fields | None) -> GroupVersion | None:
        """Parse; None stays None."""
        if fields is None:
            return None
        ref = VersionRoot.from_json(fields)
        return cls(ref.version, ref.root, fields.count("proposal", 1))


@dataclass(frozen=True, slots=True)
class VersionRoot:
    """A version by name and content."""

    version: str
    root: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"version": self.version, "root": self.root}

    @classmethod
    def from_json(cls, fields: Fields) -> VersionRoot:
        """Parse; ``FormatError`` names the field."""
        return cls(fields.matching("version", VERSION, "line@number"), fields.hex("root", 64))


# ---------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What all records of a group's log carry; see ``format.records.Record``."""

    kind: ClassVar[str] = ""
    group: str
    seq: int
    id: str
    prev: str
    created_at: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {}

    def to_bytes(self) -> bytes:
        """Return the stored bytes."""
        return canonical.encode(
            {
                "format": "dcr-group",
                "kind": self.kind,
                "group": self.group,
                "seq": self.seq,
                "id": self.id,
                "prev": self.prev,
                "created_at": self.created_at,
                **self.body(),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Create(GroupRecord):
    """The group begins to follow a line."""

    kind: ClassVar[str] = "create"
    line: str
    expected: tuple[str, ...]
    policy: Policy

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"line": self.line, "expected": list(self.expected), "policy": self.policy.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(GroupRecord):
    """An incarnation is a member from now on; without one, the name may admit itself from now on."""

    kind: ClassVar[str] = "admit"
    name: str
    incarnation: str | None

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"name": self.name, "incarnation": self.incarnation}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(GroupRecord):
    """A member is none any more, or an expected one is not waited for any more (then ``incarnation`` is None)."""

    kind: ClassVar[str] = "drop"
    name: str
    incarnation: str | None
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"name": self.name, "incarnation": self.incarnation, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose(GroupRecord):
    """The group's next version is fixed until it is promoted or withdrawn."""

    kind: ClassVar[str] = "propose"
    new: VersionRoot

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"new": self.new.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw(GroupRecord):
    """The proposal stands no more."""

    kind: ClassVar[str] = "withdraw"
    new: VersionRoot
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"new": self.new.to_json(), "reason": self.reason}


@dataclass(frozen=True, slots=True)
class AckRef:
    """The acknowledgement of one member, by content."""

    name: str
    incarnation: str
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "incarnation": self.incarnation, "sha256": self.sha256}

    @classmethod
    def from_json(cls, fields: Fields) -> AckRef:
        """Parse; ``FormatError`` names the field."""
        return cls(fields.member(), fields.hex("incarnation", 16), fields.hex("sha256", 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote(GroupRecord):
    """The proposed version is active. ``acks`` are those of the members, who all have prepared it."""

    kind: ClassVar[str] = "promote"
    old: VersionRoot | None
    new: VersionRoot
    acks: tuple[AckRef, ...]

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {
            "old": None if self.old is None else self.old.to_json(),
            "new": self.new.to_json(),
            "acks": [ack.to_json() for ack in self.acks],
        }


def parse_group_record(data: bytes, key: str) -> GroupRecord:
    """Parse the bytes stored at `key`.

    Raises
    ------
    FormatError
        If they are no record of a group's log, or of a kind that this release does not know.
    """
    fields = Fields(canonical.decode_object(data, key, "dcr-group"), key)
    signatures.check_form(fields)
    kind = fields.text("kind")
    common: dict[str, Any] = {
        "group": fields.group(),
        "seq": fields.count("seq"),
        "id": fields.hex("id", 32),
        "prev": fields.hex("prev", 64),
        "created_at": fields.time("created_at"),
    }
    if kind == "create":
        policy = Policy.from_json(fields.object("policy"))
        return Create(**common, line=fields.line(), expected=fields.members("expected"), policy=policy)
    if kind == "admit":
        return Admit(**common, name=fields.member(), incarnation=fields.optional_hex("incarnation", 16))
    if kind == "drop":
        incarnation = fields.optional_hex("incarnation", 16)
        return Drop(**common, name=fields.member(), incarnation=incarnation, reason=reason(fields))
    if kind == "propose":
        return Propose(**common, new=VersionRoot.from_json(fields.object("new")))
    if kind == "withdraw":
        return Withdraw(**common, new=VersionRoot.from_json(fields.object("new")), reason=reason(fields))
    if kind == "promote":
        old = fields.optional_object("old")
        if not fields.array("acks"):
            raise FormatError("names no acknowledgement", key=key, expected="at least one", found=0)
        return Promote(
            **common,
            old=None if old is None else VersionRoot.from_json(old),
            new=VersionRoot.from_json(fields.object("new")),
            acks=tuple(AckRef.from_json(item) for item in fields.objects("acks")),
        )
    raise FormatError(
        "unknown kind of group record; upgrade dcr_store",
        key=key,
        expected="create, admit, drop, propose, withdraw, promote",
        found=kind,
    )


# ---------------------------------------------------------------------- acknowledgements


@dataclass(frozen=True, slots=True)
class Ack:
    """What a member says of a proposal: it could apply it at once, or it has applied it.

    Attributes
    ----------
    kind : {"prepared", "applied"}
    subject : GroupVersion
        The proposal, with the root that the member found or will reach.
    base_root : str or None
        What its target held when it prepared; None where it held nothing known, and once applied.
    """

    kind: str
    group: str
    name: str
    incarnation: str
    subject: GroupVersion
    base_root: str | None = None

    @property
    def key(self) -> str:
        """Where it is stored."""
        return f"{ack_prefix(self.group, self.subject.version, self.kind)}{self.file_name}"

    @property
    def file_name(self) -> str:
        """The last component of its key."""
        return f"{self.name}.{self.incarnation}.{self.subject.proposal:020d}.json"

    def says_same(self, other: Ack) -> bool:
        """Return whether `other` says the same of the same proposal by the same incarnation, from whatever base."""
        return replace(self, base_root=None) == replace(other, base_root=None)

    def to_bytes(self) -> bytes:
        """Return the stored bytes: the same whenever the same is said, so that saying it twice changes nothing."""
        return canonical.encode(
            {
                "format": "dcr-group-ack",
                "kind": self.kind,
                "group": self.group,
                "name": self.name,
                "incarnation": self.incarnation,
                **self.subject.to_json(),
                "base_root": self.base_root,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Ack:
        """Parse; ``FormatError`` names the field."""
        fields = Fields(canonical.decode_object(data, key, "dcr-group-ack"), key)
        subject = GroupVersion.from_json(fields)
        assert subject is not None
        return cls(
            fields.one_of("kind", ACK_KINDS),
            fields.group(),
            fields.member(),
            fields.hex("incarnation", 16),
            subject,
            fields.optional_hex("base_root", 64),
        )
