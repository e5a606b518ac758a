"""Let versions expire: which are kept, which edges to them, and what has to be stored first so that the rest can go.

Nothing is deleted here: ``collect`` does that, later. Refuses to let go of what something needs: the head, tags, pins,
groups, lines that go on from a version, works of maintenance.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dcr_store import events
from dcr_store.errors import ConflictError, DcrError, FencedError, InvalidInputError, StorageError
from dcr_store.format.names import LINE, new_txid, record_key, version_name, version_number
from dcr_store.format.ranges import Ranges
from dcr_store.format.records import Abort, Expire, Intent
from dcr_store.log.fold import LineState
from dcr_store.log.group import group_names
from dcr_store.log.line import LineLog, next_fields
from dcr_store.maintain import marks
from dcr_store.maintain.edges import add_edge
from dcr_store.ports import Dated, ObjectStore
from dcr_store.publish.ending import abort_record
from dcr_store.publish.owner import default_owner, describe, is_dead
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.edges import Edge, cheapest
from dcr_store.versions.places import StorePlace


@dataclass(frozen=True, slots=True)
class Keep:
    """Which versions of a line are kept.

    Attributes
    ----------
    last : int
        So many of the newest, at least 1: the head is always kept.
    every : int or None
        Those whose number is a multiple of it.
    younger_than_s : float or None
        Those that were committed less than so many seconds ago, by the object store's clock.
    tagged : bool
        Those that have a tag.
    """

    last: int = 1
    every: int | None = None
    younger_than_s: float | None = None
    tagged: bool = True

    def check(self) -> None:
        """Refuse numbers that make no sense."""
        counts = [self.last] if self.every is None else [self.last, self.every]
        # Written so that what is no number at all is refused, too: compared with it, everything would be old.
        is_age = self.younger_than_s is None or self.younger_than_s >= 0
        if not all(isinstance(count, int) and count >= 1 for count in counts) or not is_age:
            raise InvalidInputError(
                "these are no versions to keep",
                key="keep",
                expected="last and every of 1 or more, younger_than_s of 0 or more",
                found=f"last {self.last}, every {self.every}, younger_than_s {self.younger_than_s}",
            )


@dataclass(frozen=True, slots=True)
class Expiry:
    """What an expiry does, or would do.

    Attributes
    ----------
    versions : tuple of str
        That are not to be read any more.
    anchors, folds : tuple
        What is stored first: versions; base and version.
    freed_nbytes : int
        What the collection may delete for it.
    kept_for : dict of str to str
        Versions that are kept although the numbers would let them go, and why.
    """

    line: str
    versions: tuple[str, ...]
    anchors: tuple[str, ...]
    folds: tuple[tuple[str, str], ...]
    freed_nbytes: int
    kept_for: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "line": self.line,
            "versions": list(self.versions),
            "anchors": list(self.anchors),
            "folds": [list(pair) for pair in self.folds],
            "freed_nbytes": self.freed_nbytes,
            "kept_for": self.kept_for,
        }


@dataclass(slots=True)
class _Plan:
    """Which versions go, and which edges with them."""

    gone: Ranges
    deltas: Ranges
    edges: tuple[str, ...]
    freed_nbytes: int
    anchors: list[int] = field(default_factory=list)
    folds: list[tuple[int, int]] = field(default_factory=list)


def expire(
    place: StorePlace,
    line: str,
    keep: Keep,
    *,
    dry_run: bool = False,
    executor: Executor | None = None,
    owner: str | None = None,
    takeover: bool = False,
) -> Expiry:
    """Let the versions of a line expire that `keep` does not keep, and that nothing needs.

    What is kept stays readable all the while, and afterwards at about the price of what lies between: where versions
    before one that is kept go, it is stored whole, or as a fold, first.

    Raises
    ------
    ConflictError
        If another expiry of the line is under way, or (``FencedError``) has ended this one.
    """
    keep.check()
    catalog = place.catalog
    log = catalog.fresh(line)
    wanted = _wanted(catalog, log, keep)
    kept_for = {number: why for number, why in _needed(catalog, line, keep).items() if number in wanted}
    plan = _plan(catalog, log.state, line, _without(wanted, kept_for), is_final=False)
    result = _told(line, plan, kept_for)
    if dry_run or not plan.gone:
        return result
    for goal in plan.anchors:
        add_edge(place, _at(catalog, line, goal), executor=executor, owner=owner, takeover=takeover)
    for start, goal in plan.folds:
        base = _at(catalog, line, start)
        add_edge(place, _at(catalog, line, goal), base, executor=executor, owner=owner, takeover=takeover)
    txid, who = new_txid(), owner or default_owner()
    gone = _begin(log, plan.gone, txid, who, takeover=takeover)
    if not gone:  # another expiry has done all of it meanwhile
        return Expiry(line, (), result.anchors, result.folds, 0, result.kept_for)
    events.reached("expire.begun", line)
    try:
        # From here on who names one of these versions sees the intent; who named one before is seen now.
        late = _needed(catalog, line, keep)
        final: list[_Plan] = []

        def decide(state: LineState) -> Expire:
            if state.history.work(txid) is None:
                raise FencedError("another expiry of the line has ended this one; look at the log", key=line)
            wanted_now = _without(gone, {**late, **_needed_by_log(state)})
            final[:] = [_plan(catalog, state, line, wanted_now, is_final=True)]
            return Expire(
                **next_fields(state), txid=txid, versions=final[0].gone, deltas=final[0].deltas, edges=final[0].edges
            )

        events.reached("expire.decided", line)
        log.append(decide)
    except BaseException as error:
        _give_up(log, txid, f"{type(error).__name__}: {error}"[:500])
        raise
    kept_for |= {number: why for number, why in late.items() if number in gone}
    done = _told(line, final[0], kept_for)
    return Expiry(line, done.versions, result.anchors, result.folds, done.freed_nbytes, done.kept_for)


def _at(catalog: Catalog, line: str, number: int) -> Located:
    return Located(line, catalog.require_row(line, number))


def _without(numbers: Ranges, others: Iterable[int]) -> Ranges:
    left_out = set(others)
    return Ranges.of(number for number in numbers if number not in left_out)


def _told(line: str, plan: _Plan, kept_for: Mapping[int, str]) -> Expiry:
    return Expiry(
        line,
        tuple(version_name(line, number) for number in plan.gone),
        tuple(version_name(line, number) for number in plan.anchors),
        tuple((version_name(line, start), version_name(line, goal)) for start, goal in plan.folds),
        plan.freed_nbytes,
        {version_name(line, number): why for number, why in sorted(kept_for.items())},
    )


# ---------------------------------------------------------------------- what is kept


def _wanted(catalog: Catalog, log: LineLog, keep: Keep) -> Ranges:
    """Return the versions that the numbers let go: of the line's own, not the head."""
    state, expired = log.state, catalog.history(log.line).expired
    own = range(state.first, state.next_version)
    young: set[int] = set()
    if keep.younger_than_s is not None:
        times = times_of(catalog, log.line)
        until = max(times.values(), default=0.0) - keep.younger_than_s
        young = {row.version for row in log.rows() if times.get(record_key(log.line, row.seq), float("inf")) > until}
    return Ranges.of(
        number
        for number in own[: -keep.last]
        if number not in expired and (keep.every is None or number % keep.every) and number not in young
    )


def times_of(catalog: Catalog, line: str) -> dict[str, float]:
    """Return when the object store stored each record of a line, by key, in seconds since 1970 by its clock."""
    return {key: when for key, (_, when) in dated(catalog.objects).dated(f"log/{line}/").items()}


def dated(objects: ObjectStore) -> Dated:
    """Return `objects` if it tells when it stored what; ``StorageError`` if not, as of a relay."""
    if not isinstance(objects, Dated):
        raise StorageError("does not tell when it stored what; open the store itself, not a relay", key=objects.url)
    return objects


def _needed(catalog: Catalog, line: str, keep: Keep) -> dict[int, str]:
    """Return the numbers of versions that something outside of the line's log needs, and what."""
    found: dict[int, str] = {}
    refreshed: set[str] = set()

    def add(version: str, why: str) -> None:
        owner, number = version.rpartition("@")[0], version_number(version)
        if owner not in refreshed:
            catalog.log(owner).refresh()
            refreshed.add(owner)
        if catalog.owner(owner, number) == line:
            found.setdefault(number, why)

    for name in group_names(catalog.objects):
        state = catalog.group_log(name).refresh()
        for version, what in ((state.active, "active in"), (state.proposed, "proposed to")):
            if version is not None:
                add(version.version, f"{what} group {name}")
    clock = max(times_of(catalog, line).values(), default=0.0)
    for pin in marks.pins(catalog):
        if pin.until is None or datetime.fromisoformat(pin.until).timestamp() > clock:
            add(pin.version, f"pinned by {pin.name}")
    if keep.tagged:
        for tagged in filter(LINE.fullmatch, catalog.objects.list_names("tags/")):  # what else is there is foreign
            for tag in marks.tags(catalog, tagged):
                add(tag.version, f"tagged {tagged}@{tag.name}")
    return found | _needed_by_log(catalog.log(line).refresh())


def _needed_by_log(state: LineState) -> dict[int, str]:
    """Return the numbers of versions that the line's log says are needed, and for what."""
    found = {fork.version: f"{fork.child} goes on from it" for fork in state.history.forks}
    for work in state.history.works:
        if work.purpose != "expire":
            why = f"{describe(work.owner)} makes a {work.purpose}"
            found |= dict.fromkeys(work.versions, why)
            if work.base is not None:
                found[version_number(work.base.version)] = why
    if state.head is not None and state.head.version >= state.first:
        found[state.head.version] = "the head"
    return found


# ---------------------------------------------------------------------- which edges lead on


def _plan(catalog: Catalog, state: LineState, line: str, gone: Ranges, *, is_final: bool) -> _Plan:
    """Return which edges go with versions, so that a path leads to each that is kept.

    `is_final` says that nothing can be stored first any more: what is kept keeps the path that it has.
    """
    expired = state.history.expired | catalog.history(line).expired | gone
    kept = [n for n in range(state.first, state.next_version) if n not in expired]
    before: Sequence[int] = [] if state.source is None else [state.source.row.version]
    is_kept = {*kept, *before}
    every = {n: catalog.edges_to(line, n) for n in range(state.first, state.next_version)}

    def edges_to(number: int) -> list[Edge]:
        # A line that goes on from another one shares its edges, which are not this line's to end.
        return every[number] if number in every else catalog.edges_to(line, number)

    plan = _Plan(gone, Ranges(), (), 0)
    live: set[str] = set()
    previous = before[0] if before else -1
    for number in kept:
        clean = [edge for edge in every[number] if edge.start == -1 or edge.start in is_kept]
        if clean:
            live |= {edge.txid for edge in clean}
        elif is_final:
            only = cheapest(number, edges_to) or []
            live |= {edge.txid for edge in only}
        else:
            found = cheapest(number, edges_to, previous) if previous >= 0 else None
            from_zero = cheapest(number, edges_to)
            whole = from_zero[0].nbytes if from_zero else 0  # about what the version takes as an anchor
            row, start = catalog.row(line, number), catalog.row(line, previous) if previous >= 0 else None
            is_same = row is not None and start is not None and row.layout == start.layout
            if found is not None and is_same and previous >= state.first and _nbytes(found) < whole:
                plan.folds.append((previous, number))
            else:
                plan.anchors.append(number)
        previous = number
    ended = [edge for edges in every.values() for edge in edges if edge.txid not in live]
    own = {row.version: row.txid for row in catalog.log(line).rows()}
    plan.deltas = Ranges.of(edge.version for edge in ended if own[edge.version] == edge.txid)
    plan.edges = tuple(sorted(edge.txid for edge in ended if own[edge.version] != edge.txid))
    plan.freed_nbytes = _nbytes(ended)
    return plan


def _nbytes(edges: Iterable[Edge]) -> int:
    return sum(edge.nbytes for edge in edges)


# ---------------------------------------------------------------------- the log


def _begin(log: LineLog, versions: Ranges, txid: str, owner: str, *, takeover: bool) -> Ranges:
    """Say what is about to expire, and return it: none if all has expired meanwhile.

    An expiry that a dead owner left is ended first.
    """

    def decide(state: LineState) -> Intent | Abort:
        for work in state.history.works:
            if work.purpose == "expire":
                if work.owner != owner and not takeover and not is_dead(work.owner):
                    raise ConflictError(
                        "another expiry of the line is under way; wait, or take over if its process is dead",
                        key=log.line,
                        found=describe(work.owner),
                    )
                return abort_record(state, work.txid, "its process ended")
        left = _without(versions, state.history.expired)
        if not left:
            raise _NothingLeftError
        return Intent(**next_fields(state), txid=txid, purpose="expire", owner=owner, versions=left)

    while True:
        try:
            record = log.append(decide)
        except _NothingLeftError:
            return Ranges()
        if isinstance(record, Intent):
            return record.versions
        time.sleep(0)


class _NothingLeftError(Exception):
    """All that was about to expire has expired."""


def _give_up(log: LineLog, txid: str, reason: str) -> None:
    def decide(state: LineState) -> Abort:
        if state.history.work(txid) is None:
            raise ConflictError("the expiry has ended", key=log.line)
        return abort_record(state, txid, reason)

    with contextlib.suppress(DcrError):
        log.append(decide)
