"""The file in which a verification says how far it is and what it found, and from which a later run goes on.

::

    {"format": "dcr-verify-report", "url", "store_id", "store_sha256", "depth", "version", "heads", "trusted",
     "started_at", "updated_at", "finished", "done": [units found sound], "report": {what dcr verify --json prints}}

Written anew, atomically, every few seconds. Only what was sound is not looked at again, and only while the log still
says the same of it; the logs are always read. Refuses to go on from, or to overwrite, the report of another store or
of another verification, and what is no report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dcr_store.errors import FormatError, InvalidInputError, StorageError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields, now
from dcr_store.history.report import Problem, VerifyReport
from dcr_store.history.units import Found

DEPTHS: Final = ("log", "objects", "replay")
_FORMAT: Final = "dcr-verify-report"
_INTERVAL_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Scope:
    """What is verified: reports of other scopes say nothing about it.

    Attributes
    ----------
    url : str
        Where the store is: what is sound in one place may be damaged in a copy of it.
    store_sha256 : str
        Where its logs begin: the SHA-256 of ``dcr.json``, of a copy's its ``copy_of``.
    version : str or None
        The one version; None for all.
    heads : tuple of str
        As given.
    trusted : tuple of str, or None
        Public keys, sorted.
    """

    url: str
    store_id: str
    store_sha256: str
    depth: str
    version: str | None
    heads: tuple[str, ...]
    trusted: tuple[str, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return {
            "url": self.url,
            "store_id": self.store_id,
            "store_sha256": self.store_sha256,
            "depth": self.depth,
            "version": self.version,
            "heads": list(self.heads),
            "trusted": None if self.trusted is None else list(self.trusted),
        }

    @classmethod
    def from_json(cls, fields: Fields) -> Scope:
        """Parse; ``FormatError`` names the field."""
        return cls(
            fields.text("url", empty=False),
            fields.hex("store_id", 32),
            fields.hex("store_sha256", 64),
            fields.one_of("depth", DEPTHS),
            fields.optional_text("version"),
            tuple(fields.texts("heads")),
            None if fields.document.get("trusted", ()) is None else tuple(fields.texts("trusted")),
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """A report as it stands in a file."""

    scope: Scope
    started_at: str
    updated_at: str
    is_finished: bool
    done: tuple[str, ...]
    report: VerifyReport

    def to_bytes(self) -> bytes:
        """Return the document."""
        return canonical.encode(
            {
                "format": _FORMAT,
                **self.scope.to_json(),
                "started_at": self.started_at,
                "updated_at": self.updated_at,
                "finished": self.is_finished,
                "done": list(self.done),
                "report": self.report.to_json(),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Kept:
        """Parse; ``FormatError`` names the field."""
        fields = Fields(canonical.decode_object(data, key, _FORMAT), key)
        report = fields.object("report")
        problems = [
            Problem(item.text("key"), item.text("what"), item.optional_text("expected"), item.optional_text("found"))
            for item in report.objects("problems")
        ]
        found = VerifyReport(
            problems,
            report.count("n_objects"),
            report.count("nbytes"),
            report.texts("versions"),
            report.texts("unreferenced"),
        )
        if report.truth("ok") != found.ok:
            raise FormatError("field 'ok' is wrong", key=report.key, expected=found.ok, found=not found.ok)
        return cls(
            Scope.from_json(fields),
            fields.time("started_at"),
            fields.time("updated_at"),
            fields.truth("finished"),
            tuple(fields.texts("done")),
            found,
        )


class ReportFile:
    """The file of one verification.

    Parameters
    ----------
    path : path
        Made, or gone on from if an earlier run of the same verification was stopped.
    scope : Scope

    Raises
    ------
    InvalidInputError
        If it is the report of something else.
    FormatError
        If it is no report.
    StorageError
        If it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], scope: Scope) -> None:
        self._path, self._scope = Path(path), scope
        self._started_at, self._done = now(), dict[str, None]()
        self._before: frozenset[str] = frozenset()
        self._written_s = time.monotonic()
        kept = self._read()
        if kept is not None and not kept.is_finished:
            self._started_at, self._before = kept.started_at, frozenset(kept.done)
            self._done = dict.fromkeys(kept.done)

    def _read(self) -> Kept | None:
        name = str(self._path)
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"the report cannot be read: {error.strerror}", key=name) from error
        try:
            kept = Kept.from_bytes(data, name)
        except FormatError as error:
            raise FormatError(f"is no report of a verification; name another file: {error}", key=name) from error
        if (kept.scope.store_sha256, kept.scope.url) != (self._scope.store_sha256, self._scope.url):
            raise InvalidInputError(
                "is the report of another store, or of one in another place; name another file",
                key=name,
                expected=f"store {self._scope.store_id} at {self._scope.url}",
                found=f"store {kept.scope.store_id} at {kept.scope.url}",
            )
        if kept.scope != self._scope:
            raise InvalidInputError(
                "is the report of another verification of this store; name another file",
                key=name,
                expected=_told(self._scope),
                found=_told(kept.scope),
            )
        return kept

    def vouches_for(self, unit: str) -> bool:
        """Whether an earlier run has found a unit sound."""
        return unit in self._before

    def add(self, unit: str, found: Found, report: Callable[[], VerifyReport]) -> None:
        """Take in what came of a unit; write the file if that is due. `report` is what has been found so far."""
        if found.problems:
            self._done.pop(unit, None)
        else:
            self._done[unit] = None
        if time.monotonic() - self._written_s >= _INTERVAL_S:
            self.write(report())

    def write(self, report: VerifyReport) -> None:
        """Write the file, for a run that goes on from there."""
        self._write(Kept(self._scope, self._started_at, now(), False, tuple(self._done), report))

    def finish(self, report: VerifyReport) -> None:
        """Write the file: the next run begins anew."""
        self._write(Kept(self._scope, self._started_at, now(), True, (), report))

    def _write(self, kept: Kept) -> None:
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        try:
            # A crash before the rename leaves the file as it was.
            with new.open("wb") as file:
                file.write(kept.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise StorageError(f"the report cannot be written: {error.strerror}", key=str(self._path)) from error
        self._written_s = time.monotonic()


def scope_of(
    url: str,
    store_id: str,
    store_sha256: str,
    depth: str,
    version: str | None,
    heads: Sequence[str],
    trusted: frozenset[str] | None,
) -> Scope:
    """Return the scope of a verification."""
    keys = None if trusted is None else tuple(sorted(trusted))
    return Scope(url, store_id, store_sha256, depth, version, tuple(heads), keys)


def _told(scope: Scope) -> str:
    parts = [f"depth {scope.depth}", scope.version or "all versions", *(f"head {head}" for head in scope.heads)]
    parts.append("no trusted keys" if scope.trusted is None else f"trusted keys {', '.join(scope.trusted)}")
    return ", ".join(parts)
