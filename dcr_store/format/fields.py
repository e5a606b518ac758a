"""Reading typed fields out of parsed JSON. Each problem is a ``FormatError`` that names document and field.

Unknown fields are left alone: a newer minor version may add some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from dcr_store.errors import FormatError

_HEX: Final = re.compile(r"[0-9a-f]+")


def now() -> str:
    """Return the time as documents carry it: RFC 3339, UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object under a name for errors.

    Attributes
    ----------
    document : dict
        The parsed object.
    key : str
        The object key, with the place inside the document after ``#``.
    """

    document: dict[str, Any]
    key: str

    @classmethod
    def of(cls, value: object, key: str) -> Fields:
        """Wrap `value`, which must be a JSON object."""
        if not isinstance(value, dict):
            raise FormatError("is not a JSON object", key=key, expected="object", found=type(value).__name__)
        return cls(value, key)

    def _get(self, name: str, kind: type, what: str) -> Any:
        value = self.document.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = "nothing" if name not in self.document else repr(value)[:80]
            raise FormatError(f"field {name!r} is wrong", key=self.key, expected=what, found=found)
        return value

    def text(self, name: str) -> str:
        """Return a string."""
        value: str = self._get(name, str, "text")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a string or None."""
        return None if self.document.get(name) is None else self.text(name)

    def count(self, name: str) -> int:
        """Return an integer of 0 or more."""
        value: int = self._get(name, int, "an integer >= 0")
        if value < 0:
            raise FormatError(f"field {name!r} is wrong", key=self.key, expected="an integer >= 0", found=value)
        return value

    def optional_count(self, name: str) -> int | None:
        """Return an integer of 0 or more, or None."""
        return None if self.document.get(name) is None else self.count(name)

    def hex(self, name: str, n_digits: int) -> str:
        """Return `n_digits` lower-case hex digits."""
        value = self.text(name)
        if len(value) != n_digits or not _HEX.fullmatch(value):
            raise FormatError(
                f"field {name!r} is wrong", key=self.key, expected=f"{n_digits} hex digits", found=repr(value)[:80]
            )
        return value

    def object(self, name: str) -> Fields:
        """Return an object."""
        value: dict[str, Any] = self._get(name, dict, "an object")
        return Fields(value, f"{self.key}#{name}")

    def optional_object(self, name: str) -> Fields | None:
        """Return an object or None."""
        return None if self.document.get(name) is None else self.object(name)

    def array(self, name: str) -> list[Any]:
        """Return a list."""
        value: list[Any] = self._get(name, list, "a list")
        return value

    def objects(self, name: str) -> list[Fields]:
        """Return a list of objects."""
        return [Fields.of(item, f"{self.key}#{name}[{i}]") for i, item in enumerate(self.array(name))]

    def texts(self, name: str) -> list[str]:
        """Return a list of strings."""
        value = self.array(name)
        if not all(isinstance(item, str) for item in value):
            raise FormatError(f"field {name!r} is wrong", key=self.key, expected="a list of texts", found=value)
        return value
