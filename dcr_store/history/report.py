"""Problems found by looking, as values. Frozen, with ``to_json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcr_store.errors import DcrError


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as recorded.

    Attributes
    ----------
    key : str
        The object's key, or a file or tensor of a directory.
    what : str
        What is wrong and what to do.
    expected, found : str or None
    """

    key: str
    what: str
    expected: str | None = None
    found: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"key": self.key, "what": self.what, "expected": self.expected, "found": self.found}

    @classmethod
    def of(cls, error: DcrError, key: str = "") -> Problem:
        """Return an error as a problem of the object `key`, unless the error names another one."""
        expected, found = (None if side is None else str(side) for side in (error.expected, error.found))
        named, what = error.key or key, str(error.args[0])
        if key and named.startswith(f"{key}#"):  # a field of that object
            named, what = key, f"{named.removeprefix(key)}: {what}"
        return cls(named, what, expected, found)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification looked at and found.

    Attributes
    ----------
    n_objects, nbytes : int
        Objects read and their bytes.
    versions : list of str
        Versions checked.
    unreferenced : list of str
        Objects that no committed version needs: of open or dead transactions, or foreign. No problem by themselves.
    """

    problems: list[Problem]
    n_objects: int
    nbytes: int
    versions: list[str]
    unreferenced: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def joined(self, other: VerifyReport) -> VerifyReport:
        """Return this report with what another one found."""
        return VerifyReport(
            [*self.problems, *other.problems],
            self.n_objects + other.n_objects,
            self.nbytes + other.nbytes,
            list(dict.fromkeys([*self.versions, *other.versions])),
            [*self.unreferenced, *other.unreferenced],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "ok": self.ok,
            "problems": [problem.to_json() for problem in self.problems],
            "n_objects": self.n_objects,
            "nbytes": self.nbytes,
            "versions": self.versions,
            "unreferenced": self.unreferenced,
        }
