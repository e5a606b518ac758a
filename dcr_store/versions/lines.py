"""The lines of a store as their logs tell them: versions, which line's own they are, which have expired.

Reads logs only. A fork shares the versions up to the one that it goes on from; whoever asks for one of these by the
fork's name gets it. Refuses a version that has expired, or that a copy does not have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dcr_store.errors import ConflictError, IntegrityError, NotFoundError
from dcr_store.format.documents import Base, StoreDocument
from dcr_store.format.names import LINE, check_line, record_key, version_name
from dcr_store.format.rows import VersionRow
from dcr_store.log.fold import Source
from dcr_store.log.group import GroupLog
from dcr_store.log.history import History
from dcr_store.log.line import LineLog
from dcr_store.log.signing import UNSIGNED, Signing
from dcr_store.ports import ObjectStore
from dcr_store.versions.absences import Absences

_SHORT_ROOT: Final = re.compile(r"(?=.*[a-f])[0-9a-f]{1,7}|[0-9]{4,7}")


@dataclass(frozen=True, slots=True)
class Located:
    """A committed version and the line it was found on."""

    line: str
    row: VersionRow

    @property
    def name(self) -> str:
        """``line@number``."""
        return version_name(self.line, self.row.version)

    @property
    def base(self) -> Base:
        """This version as a base."""
        return Base(self.name, self.row.root)


class Lines:
    """The lines of one store. Safe to use from several threads."""

    def __init__(
        self, objects: ObjectStore, document: StoreDocument, store_sha256: str, signing: Signing = UNSIGNED
    ) -> None:
        self.objects = objects
        self.document = document
        self.store_sha256 = store_sha256
        self.signing = signing
        self.absences = Absences(objects)
        self._lines: dict[str, LineLog] = {}

    def lines(self) -> list[str]:
        """Return the names of all lines, sorted."""
        return sorted(name for name in self.objects.list_names("log/") if LINE.fullmatch(name))

    def log(self, line: str) -> LineLog:
        """Return a line's log, not refreshed."""
        found = self._lines.get(line)
        if found is None:  # asked for at each step of a path: not made each time, to be thrown away
            check_line(line)
            found = self._lines.setdefault(line, LineLog(self.objects, line, self.store_sha256, self.signing))
        return found

    def group_log(self, group: str) -> GroupLog:
        """Return a new log of a group, not refreshed."""
        return GroupLog(self.objects, group, self.store_sha256, self.signing)

    def fresh(self, line: str) -> LineLog:
        """Return a line's log, read to its end; ``NotFoundError`` if it has no version."""
        log = self.log(line)
        if log.refresh().head is None:
            others = [name for name in self.lines() if name != line]
            raise NotFoundError(
                f"the store {self.objects.url} has no version on line {line!r}; "
                + (f"other lines: {', '.join(others)}" if others else "nothing has been published yet")
                + (f"; did you mean main@{line}?" if line.isdecimal() else "")
                + ("; a root needs at least 8 digits" if _SHORT_ROOT.fullmatch(line) else ""),
                key=line,
            )
        return log

    def owner(self, line: str, version: int) -> str:
        """Return the line whose own version this is: `line`, or one that it goes on from."""
        while (source := self.log(line).state.source) is not None and version <= source.row.version:
            self._check_parent(line, source)
            line = source.line
        return line

    def source(self, line: str) -> Source | None:
        """Return the version that a line goes on from, None if it goes on from no other line.

        Raises
        ------
        IntegrityError
            If that is no version of the other line's own. So whoever goes from line to line comes to an end.
        """
        source = self.log(line).state.source
        if source is not None:
            self._check_parent(line, source)
        return source

    def _check_parent(self, line: str, source: Source) -> None:
        """Refuse a line that says to go on from what its parent has from another line: they may lead in a circle."""
        parent = self.read_to(source.line, source.row.version).state
        if source.row.version < parent.first:
            raise IntegrityError(
                f"the line {line} says that it goes on from a version that is not {source.line}'s own, which comes "
                f"from {parent.source and parent.source.line}; the logs were damaged, or written by a broken client",
                key=record_key(line, 0),
                expected=f"{source.line}@{parent.first} or a later one",
                found=version_name(source.line, source.row.version),
            )

    def row(self, line: str, version: int) -> VersionRow | None:
        """Return one version of a line, or of those that it goes on from, or None (as of the last refresh)."""
        return self.log(self.owner(line, version)).row(version)

    def require_row(self, line: str, version: int) -> VersionRow:
        """Return one version of a line, or of those that it goes on from; ``IntegrityError`` if it is not there."""
        row = self.row(line, version)
        if row is None:
            owner = self.owner(line, version)
            raise IntegrityError(
                f"the logs of {line} and {owner} lead to a version that the latter has not; they were damaged, or "
                "written by a broken client",
                key=version_name(owner, version),
                expected="a version",
                found=f"{self.log(owner).state.next_version} versions",
            )
        return row

    def history(self, line: str, told: History | None = None) -> History:
        """Return what maintenance did to a line; what a copy lacks counts as expired there.

        `told` is what the log says, by default as of the last refresh.
        """
        told = self.log(line).state.history if told is None else told
        if not self.document.is_copy:
            return told
        return self.absences.seen(self.log(line), told)

    def read_to(self, line: str, version: int) -> LineLog:
        """Return a line's log, read at least as far as that version if it has it."""
        log = self.log(line)
        if log.state.next_version <= version:
            log.refresh()
        return log

    def complete(self, located: Located) -> Located:
        """Return a version with its message and metadata, also where they are too long for a log checkpoint."""
        log = self.log(self.owner(located.line, located.row.version))
        return Located(located.line, log.complete(located.row))

    def rows(self, line: str) -> list[VersionRow]:
        """Return all versions of a line, those that it shares with the line that it goes on from included."""
        log = self.log(line)
        if (source := self.source(line)) is None:
            return log.rows()
        return [*self.rows(source.line)[: source.row.version + 1], *log.rows()]

    def is_expired(self, located: Located) -> bool:
        """Whether a version is not to be read any more, as of the last refresh."""
        log = self.read_to(self.owner(located.line, located.row.version), located.row.version)
        return located.row.version in self.history(log.line).expired

    def check_kept(self, located: Located) -> None:
        """Refuse a version that has expired."""
        if self.is_expired(located):
            raise self.expired(located)

    def expired(self, located: Located) -> NotFoundError:
        """Return what is told to who wants a version that has expired, or that a copy does not have."""
        log = self.log(self.owner(located.line, located.row.version))
        if located.row.version not in log.state.history.expired:
            return self.not_copied(located)
        return NotFoundError(
            "the version has expired: its weights are not kept any more; dcr log says which are", key=located.name
        )

    def not_copied(self, located: Located) -> NotFoundError:
        """Return what is told to who wants a version that a copy does not have."""
        return NotFoundError(
            "the version is not in this copy of the store, or not yet; read it from the source, or copy it too: "
            "dcr copy SOURCE COPY --since VERSION",
            key=located.name,
        )

    def check_stays(self, located: Located) -> None:
        """Refuse a version that has expired, or that an expiry under way is about, by the log as read now.

        Whoever names a version calls this after the name is there: an expiry that begins later sees the name.

        Raises
        ------
        NotFoundError
            If it has expired.
        ConflictError
            If it may be about to expire.
        """
        number = located.row.version
        works = self.log(self.owner(located.line, number)).refresh().history.works
        self.check_kept(located)
        if any(work.purpose == "expire" and number in work.versions for work in works):
            raise ConflictError(
                "the version may be about to expire: an expiry is under way; try again in a moment", key=located.name
            )
