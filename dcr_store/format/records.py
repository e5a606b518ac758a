"""Log records (docs/spec/v1.md §9) as frozen values.

Parsing checks form only; whether a record is legal at its place is ``log.fold``'s question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from dcr_store.errors import FormatError
from dcr_store.format import canonical, signatures
from dcr_store.format.documents import Base, Counts, ObjectRef
from dcr_store.format.fields import MAX_VERSION, Fields
from dcr_store.format.ranges import Ranges
from dcr_store.format.rows import VersionRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What all records carry.

    Attributes
    ----------
    seq : int
        The record's number, which is the length of the prefix on which it was decided.
    id : str
        32 random hex digits.
    prev : str
        SHA-256 of the record before; of record 0, of ``dcr.json``.
    """

    kind: ClassVar[str] = ""
    line: str
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
                "format": "dcr-log",
                "kind": self.kind,
                "line": self.line,
                "seq": self.seq,
                "id": self.id,
                "prev": self.prev,
                "created_at": self.created_at,
                **self.body(),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfTransaction(Record):
    """A record of a transaction, or of a work of maintenance; `txid` says of which."""

    txid: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"txid": self.txid}


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(OfTransaction):
    """A transaction opens (attempt 0)."""

    kind: ClassVar[str] = "begin"
    owner: str
    version: int
    base: Base | None
    layout: str | None
    writers: tuple[str, ...]
    message: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {
            "txid": self.txid,
            "owner": self.owner,
            "version": self.version,
            "base": None if self.base is None else self.base.to_json(),
            "layout": self.layout,
            "writers": list(self.writers),
            "message": self.message,
            "metadata": self.metadata,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(OfTransaction):
    """The open transaction, or a work of maintenance, is taken up again; earlier attempts are fenced."""

    kind: ClassVar[str] = "resume"
    attempt: int
    owner: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"txid": self.txid, "attempt": self.attempt, "owner": self.owner}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(OfTransaction):
    """What leads to a version is stored: ``base`` is where it starts, None for zero."""

    attempt: int
    version: int
    base: Base | None
    root: str
    manifest: ObjectRef
    counts: Counts

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {
            "txid": self.txid,
            "attempt": self.attempt,
            "version": self.version,
            "base": None if self.base is None else self.base.to_json(),
            "root": self.root,
            "manifest": self.manifest.to_json(),
            "counts": self.counts.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Stored):
    """The version exists. ``base`` is that of the delta: None for an anchor."""

    kind: ClassVar[str] = "commit"
    layout: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {**Stored.body(self), "layout": self.layout}


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(OfTransaction):
    """The open transaction, or a work of maintenance, is over and produced nothing."""

    kind: ClassVar[str] = "abort"
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"txid": self.txid, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent(OfTransaction):
    """A work of maintenance begins: an anchor or a fold of one version, or the expiry of some.

    Attributes
    ----------
    base : Base or None
        Of a fold: the older version from which it leads to that of `versions`.
    """

    kind: ClassVar[str] = "intent"
    purpose: str
    owner: str
    versions: Ranges
    base: Base | None = None

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {
            "txid": self.txid,
            "purpose": self.purpose,
            "owner": self.owner,
            "versions": self.versions.to_json(),
            "base": None if self.base is None else self.base.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEdge(Stored):
    """Another edge to a version is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor(NewEdge):
    """A version is there as a delta against the all-zero state, too; ``base`` is None."""

    kind: ClassVar[str] = "anchor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(NewEdge):
    """A version is there as a delta against one that is older than the one before, too; ``base`` names it."""

    kind: ClassVar[str] = "fold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire(OfTransaction):
    """Versions are not to be read any more; what edges lead over may be deleted.

    Attributes
    ----------
    versions : Ranges
    deltas : Ranges
        Versions to which what their commits stored leads no more.
    edges : tuple of str
        By txid: anchors and folds that lead nowhere any more.
    """

    kind: ClassVar[str] = "expire"
    versions: Ranges
    deltas: Ranges
    edges: tuple[str, ...]

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {
            "txid": self.txid,
            "versions": self.versions.to_json(),
            "deltas": self.deltas.to_json(),
            "edges": list(self.edges),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gc(Record):
    """A mark of time: what expired or was aborted a grace period before it may be deleted.

    The time is that at which the object store says it has stored the record.
    """

    kind: ClassVar[str] = "gc"
    grace_s: int

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"grace_s": self.grace_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Record):
    """Another line goes on from a version of this one, which is kept for it."""

    kind: ClassVar[str] = "fork"
    child: str
    version: Base

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"child": self.child, "version": self.version.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin(Record):
    """Record 0 of a line that goes on from a version of another one.

    Attributes
    ----------
    fork_seq, fork_sha256
        The `fork` record of the parent that it follows from.
    row : VersionRow
        The parent's version.
    """

    kind: ClassVar[str] = "origin"
    parent: str
    fork_seq: int
    fork_sha256: str
    row: VersionRow

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {
            "parent": self.parent,
            "fork_seq": self.fork_seq,
            "fork_sha256": self.fork_sha256,
            "row": self.row.to_json(),
        }


PURPOSES: Final = ("anchor", "fold", "expire")
_KINDS: Final = ("begin", "resume", "commit", "abort", "intent", "anchor", "fold", "expire", "gc", "fork", "origin")


def parse_record(data: bytes, key: str) -> Record:
    """Parse the bytes stored at `key`.

    Raises
    ------
    FormatError
        If they are no record, or of a kind that this release does not know.
    """
    fields = Fields(canonical.decode_object(data, key, "dcr-log"), key)
    signatures.check_form(fields)
    kind = fields.text("kind")
    common: dict[str, Any] = {
        "line": fields.line(),
        "seq": fields.count("seq"),
        "id": fields.hex("id", 32),
        "prev": fields.hex("prev", 64),
        "created_at": fields.time("created_at"),
    }
    if kind == "gc":
        return Gc(**common, grace_s=fields.count("grace_s"))
    if kind == "fork":
        return Fork(**common, child=fields.line("child"), version=_version(fields, "version"))
    if kind == "origin":
        return Origin(
            **common,
            parent=fields.line("parent"),
            fork_seq=fields.count("fork_seq"),
            fork_sha256=fields.hex("fork_sha256", 64),
            row=VersionRow.from_json(fields.object("row")),
        )
    if kind not in _KINDS:
        raise FormatError(
            "unknown kind of log record; upgrade dcr_store", key=key, expected=", ".join(_KINDS), found=kind
        )
    common["txid"] = fields.hex("txid", 32)
    if kind == "begin":
        return Begin(
            **common,
            owner=fields.text("owner", empty=False),
            version=fields.count("version", 0, MAX_VERSION),
            base=Base.from_json(fields.optional_object("base")),
            layout=fields.optional_hex("layout", 64),
            writers=fields.writers(),
            message=fields.optional_text("message"),
            metadata=fields.object("metadata").document,
        )
    if kind == "resume":
        return Resume(**common, attempt=fields.count("attempt", 1), owner=fields.text("owner", empty=False))
    if kind == "abort":
        return Abort(**common, reason=fields.text("reason"))
    if kind == "intent":
        return Intent(
            **common,
            purpose=fields.one_of("purpose", PURPOSES),
            owner=fields.text("owner", empty=False),
            versions=Ranges.from_json(fields, "versions"),
            base=Base.from_json(fields.optional_object("base")),
        )
    if kind == "expire":
        return Expire(
            **common,
            versions=Ranges.from_json(fields, "versions"),
            deltas=Ranges.from_json(fields, "deltas"),
            edges=tuple(Fields({"edge": item}, key).hex("edge", 32) for item in fields.texts("edges")),
        )
    common |= {
        "attempt": fields.count("attempt"),
        "version": fields.count("version", 0, MAX_VERSION),
        "base": Base.from_json(fields.optional_object("base")),
        "root": fields.hex("root", 64),
        "manifest": ObjectRef.from_json(fields.object("manifest")),
        "counts": Counts.from_json(fields.object("counts")),
    }
    if kind == "commit":
        return Commit(**common, layout=fields.hex("layout", 64))
    _check_base(kind, common["base"], fields)
    return Anchor(**common) if kind == "anchor" else Fold(**common)


def _check_base(kind: str, base: Base | None, fields: Fields) -> None:
    """Refuse an anchor that has a base, and a fold that has none."""
    if (base is None) != (kind == "anchor"):
        expected, found = ("null", base) if kind == "anchor" else ("a version and root", "null")
        raise FormatError("field 'base' is wrong", key=fields.key, expected=expected, found=found)


def _version(fields: Fields, name: str) -> Base:
    """Return a version and root."""
    found = Base.from_json(fields.object(name))
    assert found is not None
    return found
