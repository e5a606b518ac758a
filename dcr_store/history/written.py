"""What a checkout that makes new files tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Written:
    """What a checkout into new files wrote.

    Attributes
    ----------
    version, root : str
        What was checked out.
    n_tensors : int
        How many tensors, or parts of them, by name.
    nbytes : int
        Of the files.
    seconds : float
    """

    version: str
    root: str
    n_tensors: int
    nbytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "version": self.version,
            "root": self.root,
            "n_tensors": self.n_tensors,
            "nbytes": self.nbytes,
            "seconds": round(self.seconds, 3),
        }
