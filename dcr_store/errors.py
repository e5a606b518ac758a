"""The errors of dcr_store, grouped by what a caller does about them.

::

    DcrError
    ├── InvalidInputError     the call is wrong: fix the argument
    ├── NotFoundError         no such store, line, version, tensor or object
    ├── ConflictError         somebody else was first: read again, decide again
    │   └── FencedError       this attempt was taken over or aborted: never retake by yourself
    ├── LagError              groups are behind: wait and ask again, or look at who lags
    ├── OutcomeUnknownError   a write may or may not have happened: read back before anything else
    ├── IntegrityError        bits are not what the record says: heal or restore
    ├── FormatError           foreign, malformed or too new: use the right file or a newer dcr_store
    └── StorageError          the backend failed: permissions, network, disk

Imports nothing.
"""

from __future__ import annotations

from typing import ClassVar


class DcrError(Exception):
    """Root of all errors that dcr_store raises on purpose.

    Parameters
    ----------
    message : str
        One sentence: what is wrong with what, and what to do.
    key : str, optional
        The object key, file, tensor or version concerned.
    expected, found : object, optional
        The two sides of a comparison that failed; of None nothing is said.
    advice : str, optional
        What to do, where that depends on how one calls: a command line may replace the words of the API.
    """

    kind: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        expected: object = None,
        found: object = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.expected = expected
        self.found = found
        self.advice = advice

    def __str__(self) -> str:
        text = str(self.args[0])
        if self.key and not text.startswith(self.key):
            text = f"{self.key}: {text}"
        if self.advice is not None:
            text += f"; {self.advice}"
        sides = [
            f"{word} {side}" for word, side in (("expected", self.expected), ("found", self.found)) if side is not None
        ]
        return f"{text} ({', '.join(sides)})" if sides else text


class InvalidInputError(DcrError):
    """An argument cannot be used; nothing was read or written on its behalf."""

    kind = "invalid-input"


class NotFoundError(DcrError):
    """A store, line, version, tensor or object does not exist."""

    kind = "not-found"


class ConflictError(DcrError):
    """Another process was first. Nothing of ours took effect."""

    kind = "conflict"


class FencedError(ConflictError):
    """The transaction was resumed by another process, or aborted."""

    kind = "fenced"


class LagError(DcrError):
    """A group has not promoted a version in time. Nothing is lost: what was committed before is committed."""

    kind = "lag"


class OutcomeUnknownError(DcrError):
    """A conditional put got no answer and could not be read back."""

    kind = "outcome-unknown"


class IntegrityError(DcrError):
    """Stored or local bits differ from what a record says they are."""

    kind = "integrity"


class FormatError(DcrError):
    """A file is not of the format expected at its place, or of a newer one."""

    kind = "format"


class StorageError(DcrError):
    """The storage backend refused or failed."""

    kind = "storage"
