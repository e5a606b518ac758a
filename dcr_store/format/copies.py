"""Copies of stores (docs/spec/v1.md §15): the store document of a copy, and what a copy does not have.

A copy's ``dcr.json`` is its source's with one feature and one field more; its logs are its source's, byte for byte.
Refuses a document that is not what its own digest says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dcr_store.errors import FormatError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields, now
from dcr_store.format.names import STORE_KEY
from dcr_store.format.ranges import NONE, Ranges

FEATURE: Final = "copy"
DETACHED_KEY: Final = "detached.json"


def absent_key(line: str) -> str:
    """Return the key of what a copy does not have of a line."""
    return f"absent/{line}.json"


def copy_document(source: bytes) -> bytes:
    """Return the store document of a copy of the store whose document `source` is; of a copy's, the same."""
    document = canonical.decode_object(source, STORE_KEY, "dcr-store")
    if is_copy(document):
        chain_sha256(source)
        return source
    features = [*document.get("features", ()), FEATURE]
    made = canonical.encode({**document, "features": features, "copy_of": canonical.sha256(source)})
    chain_sha256(made)  # what cannot be undone is refused here, not by those who read the copy
    return made


def chain_sha256(data: bytes) -> str:
    """Return the SHA-256 with which the hash chains of a store begin: of ``dcr.json``, in a copy of its source's.

    Raises
    ------
    FormatError
        If a copy's document does not give its source's.
    """
    document = canonical.decode_object(data, STORE_KEY, "dcr-store")
    if not is_copy(document):
        return canonical.sha256(data)
    claimed = Fields(document, STORE_KEY).hex("copy_of", 64)
    original = {name: value for name, value in document.items() if name != "copy_of"}
    original["features"] = [name for name in document["features"] if name != FEATURE]
    found = canonical.sha256(canonical.encode(original))
    if found != claimed:
        raise FormatError(
            "is not the document of a copy: without what makes it one it is not the source's",
            key=STORE_KEY,
            expected=claimed,
            found=found,
        )
    return claimed


def identity(data: bytes) -> str:
    """Return ``chain_sha256``; the SHA-256 of what is no store document, which is that of no store."""
    try:
        return chain_sha256(data)
    except FormatError:
        return canonical.sha256(data)


def is_copy(document: dict[str, Any]) -> bool:
    """Whether a parsed store document is a copy's."""
    features = document.get("features")
    return isinstance(features, list) and FEATURE in features


@dataclass(frozen=True, slots=True)
class Absent:
    """What a copy does not have of a line, though its log says that it has not expired.

    Attributes
    ----------
    since : int or None
        The number before which versions were left out; None if none were for that.
    versions : Ranges
        Versions that cannot be read here.
    deltas : Ranges
        Versions whose commits' own deltas are not here.
    edges : tuple of str
        By txid, ascending: anchors and folds that are not here.
    """

    line: str
    since: int | None = None
    versions: Ranges = NONE
    deltas: Ranges = NONE
    edges: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the stored bytes."""
        return canonical.encode(
            {
                "format": "dcr-absent",
                "line": self.line,
                "since": self.since,
                "versions": self.versions.to_json(),
                "deltas": self.deltas.to_json(),
                "edges": list(self.edges),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Absent:
        """Parse; ``FormatError`` names the field."""
        fields = Fields(canonical.decode_object(data, key, "dcr-absent"), key)
        return cls(
            fields.line(),
            fields.optional_count("since"),
            Ranges.from_json(fields, "versions"),
            Ranges.from_json(fields, "deltas"),
            tuple(Fields({"edges": item}, key).hex("edges", 32) for item in fields.texts("edges")),
        )


@dataclass(frozen=True, slots=True)
class Detached:
    """Says that a copy has become a store of its own."""

    created_at: str

    @classmethod
    def now(cls) -> Detached:
        """Return the document, as of now."""
        return cls(now())

    def to_bytes(self) -> bytes:
        """Return the stored bytes."""
        return canonical.encode({"format": "dcr-detached", "created_at": self.created_at})

    @classmethod
    def from_bytes(cls, data: bytes, key: str = DETACHED_KEY) -> Detached:
        """Parse; ``FormatError`` names the field."""
        return cls(Fields(canonical.decode_object(data, key, "dcr-detached"), key).time("created_at"))
