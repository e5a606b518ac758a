"""What maintenance did to a line (docs/spec/v1.md §14), folded from its records. Pure; no I/O.

Which versions are not to be read any more, which edges lead to the others besides what their commits stored, which
lines go on from here, and which works are under way. Refuses a record that is illegal at its place by ``Illegal``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from dcr_store.format.documents import Base
from dcr_store.format.fields import MAX_VERSION, Fields
from dcr_store.format.names import version_name, version_number
from dcr_store.format.ranges import NONE, Ranges
from dcr_store.format.records import Abort, Expire, Fork, Gc, Intent, NewEdge, Record, Resume
from dcr_store.format.rows import EdgeRow


class Illegal(Exception):  # noqa: N818 - is told to nobody: the fold makes an IntegrityError of it
    """A record is illegal at its place: the rule, what was expected and what was found."""

    def __init__(self, rule: str, expected: object, found: object) -> None:
        super().__init__(rule)
        self.rule, self.expected, self.found = rule, expected, found


@dataclass(frozen=True, slots=True)
class OpenWork:
    """A work of maintenance that is under way."""

    txid: str
    purpose: str
    owner: str
    versions: Ranges
    base: Base | None
    seq: int
    attempt: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "txid": self.txid,
            "purpose": self.purpose,
            "owner": self.owner,
            "versions": self.versions.to_json(),
            "base": None if self.base is None else self.base.to_json(),
            "seq": self.seq,
            "attempt": self.attempt,
        }

    @classmethod
    def from_json(cls, fields: Fields) -> OpenWork:
        """Parse; ``FormatError`` names the field."""
        return cls(
            fields.hex("txid", 32),
            fields.text("purpose"),
            fields.text("owner", empty=False),
            Ranges.from_json(fields, "versions"),
            Base.from_json(fields.optional_object("base")),
            fields.count("seq"),
            fields.count("attempt"),
        )

    def needs(self, version: int) -> bool:
        """Whether this work is an anchor or a fold of a version, or a fold that starts from it."""
        starts = self.base is not None and version_number(self.base.version) == version
        return self.purpose != "expire" and (version in self.versions or starts)


@dataclass(frozen=True, slots=True)
class Forked:
    """A line that goes on from a version of this one; `seq` is the number of the record that says so."""

    child: str
    version: int
    seq: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"child": self.child, "version": self.version, "seq": self.seq}

    @classmethod
    def from_json(cls, fields: Fields) -> Forked:
        """Parse; ``FormatError`` names the field."""
        return cls(fields.line("child"), fields.count("version", 0, MAX_VERSION), fields.count("seq"))


@dataclass(frozen=True, slots=True)
class History:
    """What maintenance did to a line.

    Attributes
    ----------
    expired : Ranges
        Versions that are not to be read any more.
    dead : Ranges
        Versions to which what their commits stored leads no more.
    edges : tuple of EdgeRow
        Anchors and folds that lead to versions besides, by when they came.
    forks : tuple of Forked
    works : tuple of OpenWork
    """

    expired: Ranges = NONE
    dead: Ranges = NONE
    edges: tuple[EdgeRow, ...] = ()
    forks: tuple[Forked, ...] = ()
    works: tuple[OpenWork, ...] = ()

    def work(self, txid: str) -> OpenWork | None:
        """Return the work of that txid, if it is under way."""
        return next((work for work in self.works if work.txid == txid), None)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "expired": self.expired.to_json(),
            "dead": self.dead.to_json(),
            "edges": [edge.to_json() for edge in self.edges],
            "forks": [fork.to_json() for fork in self.forks],
            "works": [work.to_json() for work in self.works],
        }

    @classmethod
    def from_json(cls, fields: Fields) -> History:
        """Parse; ``FormatError`` names the field."""
        return cls(
            Ranges.from_json(fields, "expired"),
            Ranges.from_json(fields, "dead"),
            tuple(EdgeRow.from_json(item) for item in fields.objects("edges")),
            tuple(Forked.from_json(item) for item in fields.objects("forks")),
            tuple(OpenWork.from_json(item) for item in fields.objects("works")),
        )


UNTOUCHED: Final = History()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands: on which line, whose own versions are which.

    Attributes
    ----------
    first : int
        The line's first own version: 0, or that after the one it goes on from.
    head : int
        The last version; -1 if there is none.
    """

    line: str
    first: int
    head: int


def apply(history: History, record: Record, place: Place) -> History:
    """Return `history` advanced by a record of maintenance, or by the abort of a work.

    Raises
    ------
    Illegal
        If the record is illegal at its place.
    """
    if isinstance(record, Intent):
        return _begun(history, record, place)
    if isinstance(record, NewEdge):
        return _with_edge(history, record)
    if isinstance(record, Expire):
        return _expired(history, record, place)
    if isinstance(record, Fork):
        number = _own(history, record.version, place, "the version that a line goes on from")
        _require(record.child != place.line, "a line cannot go on from itself", "another line", record.child)
        return replace(history, forks=(*history.forks, Forked(record.child, number, record.seq)))
    if isinstance(record, Abort):
        return _without(history, record.txid)
    if isinstance(record, Resume):
        return _resumed(history, record)
    _require(isinstance(record, Gc), "its kind has no rule", "a kind that the spec names", record.kind)
    return history


def _require(condition: bool, rule: str, expected: object, found: object) -> None:
    if not condition:
        raise Illegal(rule, expected, found)


def _own(history: History, version: Base, place: Place, what: str) -> int:
    """Return the number of a version of the line's own that is there and not expired."""
    number = version_number(version.version)
    name = version_name(place.line, number)
    _require(version.version == name, f"{what} is of another line", name, version.version)
    _check_live(history, number, place, what)
    return number


def _check_live(history: History, number: int, place: Place, what: str) -> None:
    among = f"{place.first} to {place.head}"
    _require(place.first <= number <= place.head, f"{what} is not among the line's own", among, number)
    _require(number not in history.expired, f"{what} expired before", "a version that is kept", number)


def _begun(history: History, record: Intent, place: Place) -> History:
    numbers, what = list(record.versions), "the version of a work"
    _require(bool(numbers), "it names no version", "at least one", "none")
    for number in (record.versions.pairs[0][0], record.versions.pairs[-1][1]):
        _require(place.first <= number <= place.head, f"{what} is not among the line's own", place, number)
    met = history.expired.meets(record.versions)
    _require(met is None, f"{what} expired before", "versions that are kept", met)
    _require((record.base is not None) == (record.purpose == "fold"), "a fold alone has a base", "", record.base)
    if record.purpose == "expire":
        _require(place.head not in record.versions, "it would expire the head", "older versions", place.head)
    else:
        _require(len(numbers) == 1, f"{what} has to be one", "one", str(record.versions))
    if record.base is not None:
        start = _own(history, record.base, place, "the base of a fold")
        _require(start < numbers[0], "a fold leads backwards", f"a base before {numbers[0]}", start)
    _require(history.work(record.txid) is None, "its txid is taken", "a new one", record.txid)
    work = OpenWork(record.txid, record.purpose, record.owner, record.versions, record.base, record.seq)
    return replace(history, works=(*history.works, work))


def _without(history: History, txid: str) -> History:
    _require(
        history.work(txid) is not None, "its transaction is not open", "one that is, or a work of maintenance", txid
    )
    return replace(history, works=tuple(work for work in history.works if work.txid != txid))


def _resumed(history: History, record: Resume) -> History:
    work = history.work(record.txid)
    left = _without(history, record.txid)
    assert work is not None
    _require(record.attempt == work.attempt + 1, "its attempt is not the next", work.attempt + 1, record.attempt)
    return replace(left, works=(*left.works, replace(work, attempt=record.attempt, owner=record.owner)))


def _with_edge(history: History, record: NewEdge) -> History:
    work = history.work(record.txid)
    left = _without(history, record.txid)
    assert work is not None
    found = (record.kind, Ranges.of([record.version]), record.base)
    expected = (work.purpose, work.versions, work.base)
    _require(found == expected, "it is not what the intent says", expected, found)
    _require(record.attempt == work.attempt, "its attempt is fenced", work.attempt, record.attempt)
    # What an open work needs is not expired, so that both ends of the edge are there.
    edge = EdgeRow(record.version, record.seq, record.txid, record.base, record.manifest, record.counts)
    return replace(left, edges=(*left.edges, edge))


def _expired(history: History, record: Expire, place: Place) -> History:
    work = history.work(record.txid)
    left = _without(history, record.txid)
    assert work is not None
    _require(work.purpose == "expire", "its work is another one", "expire", work.purpose)
    beyond = work.versions.lacks(record.versions)
    _require(beyond is None, "it expires a version that the intent does not name", str(work.versions), beyond)
    met = history.expired.meets(record.versions)
    _require(met is None, "it expires a version that expired before", "versions that are kept", met)
    for fork in history.forks:
        _require(fork.version not in record.versions, f"{fork.child} goes on from the version", "kept", fork.version)
    for other in left.works:
        needed = next(filter(other.needs, record.versions), None) if other.purpose != "expire" else None
        _require(needed is None, f"the {other.purpose} {other.txid} needs the version", "kept", needed)
    own = Ranges(((place.first, place.head),))
    beyond = own.lacks(record.deltas)
    _require(beyond is None, "it ends the delta of a version that is not the line's own", own, beyond)
    met = history.dead.meets(record.deltas)
    _require(met is None, "it ends a delta that ended before", "deltas that lead on", met)
    known = {edge.txid for edge in history.edges}
    unknown = next((txid for txid in record.edges if txid not in known), None)
    _require(unknown is None, "it ends an edge that is not there", sorted(known), unknown)
    return replace(
        left,
        expired=left.expired | record.versions,
        dead=left.dead | record.deltas,
        edges=tuple(edge for edge in left.edges if edge.txid not in record.edges),
    )
