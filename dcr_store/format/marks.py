"""Tags and pins (docs/spec/v1.md §14): names that people give to versions, and that keep them.

Frozen values; parsing refuses what the spec forbids, by key and field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dcr_store.errors import FormatError
from dcr_store.format import canonical
from dcr_store.format.documents import Base
from dcr_store.format.fields import Fields
from dcr_store.format.names import LINE, TAG, pin_key, tag_key

Kind = Literal["tag", "pin"]


@dataclass(frozen=True, slots=True)
class Named:
    """A name of a version.

    Attributes
    ----------
    kind : {"tag", "pin"}
    version, root : str
        ``line@number``, and its state root.
    until : str or None
        Of a pin: when it ends to keep the version, by the object store's clock; None: never.
    """

    kind: Kind
    name: str
    version: str
    root: str
    message: str | None
    created_at: str
    until: str | None = None

    @property
    def key(self) -> str:
        """Where it is stored."""
        line = self.version.rpartition("@")[0]
        return tag_key(line, self.name) if self.kind == "tag" else pin_key(self.name)

    def check_key(self, key: str) -> None:
        """Refuse one that lies where another one belongs."""
        if key != self.key:
            raise FormatError(
                f"holds a {self.kind} that belongs elsewhere; delete it, and name the version again",
                key=key,
                expected=f"the {self.kind} of this key",
                found=f"that of {self.key}",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        body: dict[str, Any] = {
            "format": f"dcr-{self.kind}",
            "name": self.name,
            "version": self.version,
            "root": self.root,
            "message": self.message,
            "created_at": self.created_at,
        }
        return {**body, "until": self.until} if self.kind == "pin" else body

    def to_bytes(self) -> bytes:
        """Return the stored bytes."""
        return canonical.encode(self.to_json())

    @classmethod
    def from_bytes(cls, kind: Kind, data: bytes, key: str) -> Named:
        """Parse; ``FormatError`` names the field."""
        fields = Fields(canonical.decode_object(data, key, f"dcr-{kind}"), key)
        version = Base.from_json(fields)
        assert version is not None
        return cls(
            kind,
            fields.matching("name", TAG if kind == "tag" else LINE, f"a name of a {kind}"),
            version.version,
            version.root,
            fields.optional_text("message"),
            fields.time("created_at"),
            fields.optional_time("until") if kind == "pin" else None,
        )
