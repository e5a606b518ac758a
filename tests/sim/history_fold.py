"""One line's log with the records of maintenance, folded anew as the spec says (docs/spec/v1.md §14)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sim.judge import LineFold, _require
from sim.scheduler import ViolationError

Document = dict[str, Any]
Version = tuple[str, int]
"""A line and the number of one of its own versions."""


@dataclass
class HistoryFold(LineFold):
    """One line's log with the records of maintenance.

    Attributes
    ----------
    first : int
        The line's first own version; `versions` begins with those of its parent.
    expired, dead : set of int
        Versions that are gone; those to which what their commits stored leads no more.
    edges : dict of str to dict
        The records of anchors and folds, by txid.
    works : dict of str to dict
        The intents of what is under way, with the last attempt.
    ended : dict of str to float
        By txid: when the store stored the record that committed or ended it.
    stored : list of str
        Those below whose prefix something may lie.
    collections : list of (float, int)
        Of each ``gc``: when, and with how many seconds of grace.
    """

    line: str = "main"
    first: int = 0
    source: Version | None = None
    expired: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    edges: dict[str, Document] = field(default_factory=dict)
    works: dict[str, Document] = field(default_factory=dict)
    forks: dict[str, int] = field(default_factory=dict)
    fork_shas: dict[int, str] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    collections: list[tuple[float, int]] = field(default_factory=list)
    last_time: float = 0.0

    def follow(self, data: bytes, when: float) -> Document:
        """Fold one record that was stored at a time; ``ViolationError`` if it is illegal."""
        record: Document = json.loads(data)
        kind, txid = record["kind"], record.get("txid")
        is_of_transaction = kind in ("begin", "commit") or (self.open is not None and self.open["txid"] == txid)
        if is_of_transaction:
            self.advance(data)
        else:
            self._check_place(record)
            where = f"{self.line}: record {self.length} ({kind})"
            getattr(self, f"_{kind}", self._unknown)(where, record)
            self._went_on(data)
        if kind == "fork":
            self.fork_shas[record["seq"]] = self.last_sha256
        if kind in ("commit", "abort", "anchor", "fold", "expire"):
            self.ended[record["txid"]] = when
            if kind != "expire":
                self.stored.append(record["txid"])
        elif kind == "gc":
            self.collections.append((when, record["grace_s"]))
        self.last_time = max(self.last_time, when)
        return record

    @property
    def head(self) -> int:
        return len(self.versions) - 1

    def own(self) -> range:
        return range(self.first, len(self.versions))

    def kept(self) -> list[int]:
        return [number for number in self.own() if number not in self.expired]

    def is_open(self, txid: str) -> bool:
        return txid in self.works or (self.open is not None and self.open["txid"] == txid)

    # ------------------------------------------------------------------ records of maintenance

    def _unknown(self, where: str, record: Document) -> None:
        raise ViolationError(f"{where}: no kind that is known, or of nothing that is open")

    def _intent(self, where: str, record: Document) -> None:
        numbers, purpose = numbers_of(record["versions"]), record["purpose"]
        _require(bool(numbers), f"{where} names no version")
        self._require_kept(where, numbers)
        _require((record["base"] is not None) == (purpose == "fold"), f"{where}: its base is {record['base']}")
        if purpose == "expire":
            _require(self.head not in numbers, f"{where} names the head")
        else:
            _require(len(numbers) == 1, f"{where} names {numbers}")
        if record["base"] is not None:
            start = self._named(where, record["base"])
            _require(start < min(numbers), f"{where} leads backwards")
        self.works[record["txid"]] = {**record, "numbers": numbers, "attempt": 0}

    def _resume(self, where: str, record: Document) -> None:
        work = self._work(where, record)
        _require(record["attempt"] == work["attempt"] + 1, f"{where} has attempt {record['attempt']}")
        work["attempt"] += 1

    def _abort(self, where: str, record: Document) -> None:
        self._work(where, record)
        del self.works[record["txid"]]

    def _anchor(self, where: str, record: Document) -> None:
        work = self._work(where, record)
        _require(work["purpose"] == record["kind"], f"{where}: its intent is another one")
        _require(record["attempt"] == work["attempt"], f"{where}: a fenced attempt counts: {record['attempt']}")
        _require({record["version"]} == work["numbers"], f"{where}: of another version than its intent")
        _require(record["base"] == work["base"], f"{where}: of another base than its intent")
        _require(record["root"] == self.versions[record["version"]]["root"], f"{where}: it has another root")
        self._require_kept(where, work["numbers"])
        del self.works[record["txid"]]
        self.edges[record["txid"]] = record

    _fold = _anchor

    def _expire(self, where: str, record: Document) -> None:
        work = self._work(where, record)
        numbers, dead = numbers_of(record["versions"]), numbers_of(record["deltas"])
        _require(work["purpose"] == "expire", f"{where}: its intent is another one")
        _require(numbers <= work["numbers"], f"{where}: {numbers - work['numbers']} are not in its intent")
        self._require_kept(where, numbers)
        del self.works[record["txid"]]
        _require(self.head not in numbers, f"{where} expires the head")
        for child, number in self.forks.items():
            _require(number not in numbers, f"{where}: {child} goes on from {number}")
        for other in self.works.values():
            if other["purpose"] != "expire":
                base = set() if other["base"] is None else {number_of(other["base"])}
                _require(
                    not numbers & (other["numbers"] | base), f"{where}: an open {other['purpose']} needs a version"
                )
        _require(dead <= set(self.own()) and not dead & self.dead, f"{where} ends deltas {dead}")
        self.expired |= numbers
        self.dead |= dead
        for txid in record["edges"]:
            _require(txid in self.edges, f"{where} ends an edge that is not there")
            del self.edges[txid]

    def _gc(self, where: str, record: Document) -> None:
        pass

    def _fork(self, where: str, record: Document) -> None:
        number = self._named(where, record["version"])
        _require(record["child"] not in (self.line, *self.forks), f"{where}: {record['child']} is there")
        self.forks[record["child"]] = number

    def _work(self, where: str, record: Document) -> Document:
        _require(record["txid"] in self.works, f"{where}: it is not open")
        return self.works[record["txid"]]

    def _named(self, where: str, version: Document) -> int:
        """Return the number of an own version that is kept, by name and root."""
        number = number_of(version)
        _require(version["version"] == f"{self.line}@{number}", f"{where}: of another line")
        self._require_kept(where, {number})
        _require(version["root"] == self.versions[number]["root"], f"{where}: {number} has another root")
        return number

    def _require_kept(self, where: str, numbers: set[int]) -> None:
        _require(numbers <= set(self.own()), f"{where}: {numbers - set(self.own())} are not of the line's own")
        _require(not numbers & self.expired, f"{where}: {numbers & self.expired} have expired")

    # ------------------------------------------------------------------ ways

    def ways(self) -> Iterator[tuple[int, int | None, Document]]:
        """Yield the edges that lead on: to which version, from which (None: zero), by which record."""
        for number in self.own():
            if number not in self.dead:
                record = self.versions[number]
                yield number, record["base"] and number_of(record["base"]), record
        for record in self.edges.values():
            yield record["version"], record["base"] and number_of(record["base"]), record


def number_of(version: Document) -> int:
    return int(version["version"].rpartition("@")[2])


def numbers_of(ranges: list[list[int]]) -> set[int]:
    return {number for first, last in ranges for number in range(first, last + 1)}
