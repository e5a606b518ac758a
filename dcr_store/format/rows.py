"""The rows that a log folds to (docs/spec/v1.md §10, §14): one for each version and each edge that maintenance added.

Frozen values with ``to_json`` and ``from_json``; parsing refuses what the spec forbids, by key and field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcr_store.format.documents import Base, Counts, ObjectRef
from dcr_store.format.fields import MAX_VERSION, Fields


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One committed version, as the log tells it.

    ``message`` and ``metadata`` are None where they are too long for a checkpoint; then they stand in record
    ``begin_seq``.
    """

    version: int
    seq: int
    begin_seq: int
    txid: str
    attempt: int
    base: Base | None
    layout: str
    root: str
    manifest: ObjectRef
    counts: Counts
    message: str | None
    metadata: dict[str, Any] | None
    created_at: str
    record_sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "version": self.version,
            "seq": self.seq,
            "begin_seq": self.begin_seq,
            "txid": self.txid,
            "attempt": self.attempt,
            "base": None if self.base is None else self.base.to_json(),
            "layout": self.layout,
            "root": self.root,
            "manifest": self.manifest.to_json(),
            "counts": self.counts.to_json(),
            "message": self.message,
            "metadata": self.metadata,
            "created_at": self.created_at,
            "record_sha256": self.record_sha256,
        }

    @classmethod
    def from_json(cls, fields: Fields) -> VersionRow:
        """Parse; ``FormatError`` names the field."""
        metadata = fields.optional_object("metadata")
        return cls(
            fields.count("version", 0, MAX_VERSION),
            fields.count("seq"),
            fields.count("begin_seq"),
            fields.hex("txid", 32),
            fields.count("attempt"),
            Base.from_json(fields.optional_object("base")),
            fields.hex("layout", 64),
            fields.hex("root", 64),
            ObjectRef.from_json(fields.object("manifest")),
            Counts.from_json(fields.object("counts")),
            fields.optional_text("message"),
            None if metadata is None else metadata.document,
            fields.time("created_at"),
            fields.hex("record_sha256", 64),
        )


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """An edge to a version besides what its commit stored: an anchor (``base`` is None) or a fold (§14)."""

    version: int
    seq: int
    txid: str
    base: Base | None
    manifest: ObjectRef
    counts: Counts

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "version": self.version,
            "seq": self.seq,
            "txid": self.txid,
            "base": None if self.base is None else self.base.to_json(),
            "manifest": self.manifest.to_json(),
            "counts": self.counts.to_json(),
        }

    @classmethod
    def from_json(cls, fields: Fields) -> EdgeRow:
        """Parse; ``FormatError`` names the field."""
        return cls(
            fields.count("version", 0, MAX_VERSION),
            fields.count("seq"),
            fields.hex("txid", 32),
            Base.from_json(fields.optional_object("base")),
            ObjectRef.from_json(fields.object("manifest")),
            Counts.from_json(fields.object("counts")),
        )
