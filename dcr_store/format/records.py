"""Log records (docs/spec/v1.md §9) as frozen values.

Parsing checks form only; whether a record is legal at its place is ``log.fold``'s question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from dcr_store.errors import FormatError
from dcr_store.format import canonical
from dcr_store.format.documents import Base, Counts, ObjectRef
from dcr_store.format.fields import MAX_VERSION, Fields


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
    txid: str

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
                "txid": self.txid,
                **self.body(),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Record):
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
            "owner": self.owner,
            "version": self.version,
            "base": None if self.base is None else self.base.to_json(),
            "layout": self.layout,
            "writers": list(self.writers),
            "message": self.message,
            "metadata": self.metadata,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Record):
    """The open transaction is taken up again; earlier attempts are fenced."""

    kind: ClassVar[str] = "resume"
    attempt: int
    owner: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"attempt": self.attempt, "owner": self.owner}


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Record):
    """The version exists. ``base`` is that of the delta: None for an anchor."""

    kind: ClassVar[str] = "commit"
    attempt: int
    version: int
    base: Base | None
    layout: str
    root: str
    manifest: ObjectRef
    counts: Counts

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {
            "attempt": self.attempt,
            "version": self.version,
            "base": None if self.base is None else self.base.to_json(),
            "layout": self.layout,
            "root": self.root,
            "manifest": self.manifest.to_json(),
            "counts": self.counts.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Record):
    """The open transaction is over and produced nothing."""

    kind: ClassVar[str] = "abort"
    reason: str

    def body(self) -> dict[str, Any]:
        """Return the fields of this kind."""
        return {"reason": self.reason}


def parse_record(data: bytes, key: str) -> Record:
    """Parse the bytes stored at `key`.

    Raises
    ------
    FormatError
        If they are no record, or of a kind that this release does not know.
    """
    fields = Fields(canonical.decode_object(data, key, "dcr-log"), key)
    kind = fields.text("kind")
    common: dict[str, Any] = {
        "line": fields.line(),
        "seq": fields.count("seq"),
        "id": fields.hex("id", 32),
        "prev": fields.hex("prev", 64),
        "created_at": fields.time("created_at"),
        "txid": fields.hex("txid", 32) if kind in ("begin", "resume", "commit", "abort") else "",
    }
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
    if kind == "commit":
        return Commit(
            **common,
            attempt=fields.count("attempt"),
            version=fields.count("version", 0, MAX_VERSION),
            base=Base.from_json(fields.optional_object("base")),
            layout=fields.hex("layout", 64),
            root=fields.hex("root", 64),
            manifest=ObjectRef.from_json(fields.object("manifest")),
            counts=Counts.from_json(fields.object("counts")),
        )
    if kind == "abort":
        return Abort(**common, reason=fields.text("reason"))
    raise FormatError(
        "unknown kind of log record; upgrade dcr_store", key=key, expected="begin, resume, commit, abort", found=kind
    )
