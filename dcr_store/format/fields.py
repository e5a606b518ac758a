"""Reading typed fields out of parsed JSON. Each problem is a ``FormatError`` that names document and field.

A field that the spec names must be there, also where it may be null. Unknown fields are left alone: a newer minor
version may add some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from dcr_store.errors import FormatError
from dcr_store.format.names import LINE, PARTICIPANT

MAX_COUNT: Final = (1 << 53) - 1
"""Past it JSON parsers disagree (docs/spec/v1.md §3)."""
MAX_VERSION: Final = 10**12 - 1
"""Twelve digits, as in keys."""

_HEX: Final = re.compile(r"[0-9a-f]+")
_TIME: Final = re.compile(
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)\.[0-9]{3}Z"
)


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

    def text(self, name: str, *, empty: bool = True, longest: int | None = None) -> str:
        """Return a string, perhaps an `empty` one, of at most `longest` characters."""
        value: str = self._get(name, str, "text")
        if not (value or empty):
            raise FormatError(f"field {name!r} is wrong", key=self.key, expected="text", found="an empty one")
        if longest is not None and len(value) > longest:
            raise FormatError(
                f"field {name!r} is wrong",
                key=self.key,
                expected=f"up to {longest:,} characters",
                found=f"{len(value):,}",
            )
        return value

    def _is_null(self, name: str) -> bool:
        """Whether a field is there and null."""
        return name in self.document and self.document[name] is None

    def matching(self, name: str, pattern: re.Pattern[str], what: str) -> str:
        """Return a string that `pattern` matches as a whole."""
        value = self.text(name)
        if not pattern.fullmatch(value):
            raise FormatError(f"field {name!r} is wrong", key=self.key, expected=what, found=repr(value)[:80])
        return value

    def line(self, name: str = "line") -> str:
        """Return a string that can name a line."""
        return self.matching(name, LINE, "a name of a line")

    def group(self, name: str = "group") -> str:
        """Return a string that can name a group."""
        return self.matching(name, LINE, "a name of a group")

    def member(self, name: str = "name") -> str:
        """Return a string that can name a member of a group."""
        return self.matching(name, PARTICIPANT, "a name of a member, without a dot")

    def members(self, name: str) -> tuple[str, ...]:
        """Return a list of names of members, each named once."""
        found = self.texts(name)
        if len(set(found)) != len(found) or not all(PARTICIPANT.fullmatch(item) for item in found):
            raise FormatError(
                f"field {name!r} is wrong", key=self.key, expected="distinct names of members", found=repr(found)[:80]
            )
        return tuple(found)

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of several texts."""
        value = self.text(name)
        if value not in choices:
            raise FormatError(
                f"field {name!r} is wrong", key=self.key, expected=" or ".join(choices), found=repr(value)[:80]
            )
        return value

    def writer(self, name: str = "writer") -> str:
        """Return a string that can name a writer."""
        return self.matching(name, PARTICIPANT, "a name of a writer, without a dot")

    def writers(self, name: str = "writers") -> tuple[str, ...]:
        """Return a list of at least one writer, each named once."""
        found = self.texts(name)
        if not found or len(set(found)) != len(found) or not all(PARTICIPANT.fullmatch(item) for item in found):
            raise FormatError(
                f"field {name!r} is wrong", key=self.key, expected="distinct names of writers", found=repr(found)[:80]
            )
        return tuple(found)

    def time(self, name: str) -> str:
        """Return a time as `now` writes it."""
        return self.matching(name, _TIME, "RFC 3339 in UTC with milliseconds and Z")

    def optional_time(self, name: str) -> str | None:
        """Return a time or None."""
        return None if self._is_null(name) else self.time(name)

    def optional_text(self, name: str) -> str | None:
        """Return a string or None."""
        return None if self._is_null(name) else self.text(name)

    def count(self, name: str, least: int = 0, most: int = MAX_COUNT) -> int:
        """Return an integer from `least` to `most`."""
        what = f"an integer from {least} to {most}"
        value: int = self._get(name, int, what)
        if not least <= value <= most:
            found = value if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
            raise FormatError(f"field {name!r} is wrong", key=self.key, expected=what, found=found)
        return value

    def truth(self, name: str) -> bool:
        """Return true or false."""
        value: bool = self._get(name, bool, "true or false")
        return value

    def optional_count(self, name: str) -> int | None:
        """Return an integer of 0 or more, or None."""
        return None if self._is_null(name) else self.count(name)

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

    def optional_hex(self, name: str, n_digits: int) -> str | None:
        """Return `n_digits` lower-case hex digits, or None."""
        return None if self._is_null(name) else self.hex(name, n_digits)

    def optional_object(self, name: str) -> Fields | None:
        """Return an object or None."""
        return None if self._is_null(name) else self.object(name)

    def array(self, name: str) -> list[Any]:
        """Return a list."""
        value: list[Any] = self._get(name, list, "a list")
        return value

    def objects(self, name: str) -> list[Fields]:
        """Return a list of objects."""
        return [Fields.of(item, f"{self.key}#{name}[{i}]") for i, item in enumerate(self.array(name))]

    def counts(self, name: str) -> list[int]:
        """Return a list of integers of 0 or more."""
        return [Fields({name: item}, self.key).count(name) for item in self.array(name)]

    def texts(self, name: str) -> list[str]:
        """Return a list of strings."""
        value = self.array(name)
        if not all(isinstance(item, str) for item in value):
            raise FormatError(f"field {name!r} is wrong", key=self.key, expected="a list of texts", found=value)
        return value
