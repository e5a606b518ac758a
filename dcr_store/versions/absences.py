"""What a copy of a store does not have of its lines, as read from it (docs/spec/v1.md §15).

The document changes without the log going on, where an earlier version is copied after all. So it is read again after
each reading of the log, also one that found no new record.
"""

from __future__ import annotations

from dataclasses import replace

from dcr_store.errors import FormatError, NotFoundError
from dcr_store.format.copies import Absent, absent_key
from dcr_store.log.history import History
from dcr_store.log.line import LineLog
from dcr_store.ports import ObjectStore


class Absences:
    """What is absent from the lines of one copy. Safe to use from several threads."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._known: dict[str, tuple[tuple[int, int], Absent]] = {}
        self._histories: dict[str, tuple[History, Absent, History]] = {}

    def read(self, line: str) -> Absent | None:
        """Read what is absent from a line; None if that is not told."""
        try:
            data = self._objects.get(absent_key(line))
        except NotFoundError:
            return None
        absent = Absent.from_bytes(data, absent_key(line))
        if absent.line != line:
            raise FormatError("is of another line", key=absent_key(line), expected=line, found=absent.line)
        return absent

    def of(self, log: LineLog) -> Absent:
        """Return what is absent from a line, read after its log was read last; nothing if that is not told."""
        # Taken before the document is read: of a log that is read on meanwhile, it is read once more.
        as_of = log.n_readings, log.state.length
        known = self._known.get(log.line)
        if known is None or known[0] != as_of:
            absent = self.read(log.line) or Absent(log.line)
            if known is not None and known[1] == absent:
                absent = known[1]  # the same object: what was made of it holds
            known = self._known[log.line] = as_of, absent
        return known[1]

    def seen(self, log: LineLog, told: History) -> History:
        """Return what a line's log tells (`told`), with what is absent as if it had expired."""
        absent, kept = self.of(log), self._histories.get(log.line)
        if kept is None or kept[0] is not told or kept[1] is not absent:
            kept = self._histories[log.line] = told, absent, without(told, absent)
        return kept[2]


def without(told: History, absent: Absent) -> History:
    """Return what a log tells, with what is absent as if it had expired."""
    return replace(
        told,
        expired=told.expired | absent.versions,
        dead=told.dead | absent.deltas,
        edges=tuple(edge for edge in told.edges if edge.txid not in absent.edges),
    )
