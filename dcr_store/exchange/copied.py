"""What a copying of a store did, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CopiedLine:
    """What was done for a line.

    Attributes
    ----------
    head : str or None
        The newest version in the copy.
    first : str or None
        The oldest one of its own that can be read there.
    n_records, n_versions : int
        Records that came, and commits among them.
    """

    line: str
    head: str | None
    first: str | None
    n_records: int
    n_versions: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "line": self.line,
            "head": self.head,
            "first": self.first,
            "n_records": self.n_records,
            "n_versions": self.n_versions,
        }


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair of a copy looked at, and what it put again.

    Attributes
    ----------
    n_compared, nbytes_compared : int
        Objects of versions and layouts that were read in the copy, and what they take.
    keys : tuple of str
        Of the objects that were missing or damaged, records, hints and log checkpoints among them; sorted.
    """

    n_compared: int
    nbytes_compared: int
    keys: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"n_compared": self.n_compared, "nbytes_compared": self.nbytes_compared, "keys": list(self.keys)}


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copying did.

    Attributes
    ----------
    lines : tuple of CopiedLine
    n_objects, nbytes : int
        Objects of versions that were transferred, and what they take.
    n_tags : int
        Tags that were put or taken away.
    repaired : Repaired or None
        Where a repair was asked for.
    """

    lines: tuple[CopiedLine, ...]
    n_objects: int
    nbytes: int
    n_tags: int
    repaired: Repaired | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "lines": [line.to_json() for line in self.lines],
            "n_objects": self.n_objects,
            "nbytes": self.nbytes,
            "n_tags": self.n_tags,
            "repaired": None if self.repaired is None else self.repaired.to_json(),
        }
