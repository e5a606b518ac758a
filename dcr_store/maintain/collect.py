"""Collect what nothing needs any more: what expired, what was aborted, what lost a race (docs/spec/v1.md §14).

Only what the log says is dead goes, and only after a grace period by the object store's own clock, from the record that
ended it to one that is appended now. What the log does not know is never touched. Log records and layouts stay.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dcr_store import events
from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError
from dcr_store.format.documents import ObjectRef
from dcr_store.format.fields import MAX_COUNT
from dcr_store.format.names import VERSION, hint_key, record_key
from dcr_store.format.records import Abort, Begin, Commit, Expire, Gc, Intent, NewEdge
from dcr_store.log.fold import LineState
from dcr_store.log.group import group_names
from dcr_store.log.line import next_fields
from dcr_store.maintain.retention import dated, times_of
from dcr_store.objects.transfer import map_bounded
from dcr_store.payload.version import led_to, owner_refs, read_manifest
from dcr_store.ports import Dated
from dcr_store.versions.catalog import Catalog

_Use = Literal["edge", "head", "version"]
_PREFIX: Final = re.compile(r"versions/[^/]+/\d{12}-([0-9a-f]{32})/")


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection deleted, or would delete.

    Attributes
    ----------
    keys : list of str
    nbytes : int
        What they take.
    n_waiting, waiting_nbytes : int
        Objects that are dead, and for which the grace period is not over.
    unknown : list of str
        Keys under ``versions/`` of which no log says anything; they are left alone.
    """

    keys: list[str] = field(default_factory=list)
    nbytes: int = 0
    n_waiting: int = 0
    waiting_nbytes: int = 0
    unknown: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "keys": self.keys,
            "nbytes": self.nbytes,
            "n_waiting": self.n_waiting,
            "waiting_nbytes": self.waiting_nbytes,
            "unknown": self.unknown,
        }


@dataclass(slots=True)
class _Line:
    """What a line's log says of the prefixes under ``versions/``.

    Attributes
    ----------
    open : set of str
        By txid: transactions and works that may still store something.
    manifests : dict of str to ObjectRef
        By txid: what counted once.
    ended : dict of str to float
        By txid: when the record was stored that ended what the prefix was for, or committed it.
    """

    open: set[str] = field(default_factory=set)
    manifests: dict[str, ObjectRef] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)


def collect(catalog: Catalog, *, grace_s: float, dry_run: bool = False) -> Collected:
    """Delete what is dead for at least `grace_s` seconds, on all lines.

    Parameters
    ----------
    grace_s : float
        Longer than the longest time for which a reader may go on with what it has read of the log.
    dry_run : bool
        Delete nothing and append nothing: what is dead by the newest record of each line is told.

    Raises
    ------
    IntegrityError, FormatError
        If a log or a manifest that counts is damaged: then nothing is deleted.
    StorageError
        If the store cannot tell when it stored what, as a relay.
    """
    if not 0 <= grace_s <= MAX_COUNT:
        raise InvalidInputError("the grace period is wrong", key="grace_s", expected="0 or more", found=grace_s)
    # Everything is read before anything is deleted: what is damaged ends the collection.
    doomed, waiting, unknown = _judged(catalog, grace_s, is_appended=not dry_run)
    if catalog.document.is_copy and not dry_run:
        # A copying does not say first, in a log, what it is about to count on: what it has put, or told, since goes on.
        again, *_ = _judged(catalog, grace_s, is_appended=False)
        doomed = {key: found for key, found in doomed.items() if again.get(key) == found}
    sizes = {key: size for key, (size, _) in doomed.items()} | _acks(catalog, dated(catalog.objects), grace_s)
    if not dry_run:
        _delete(catalog, sizes)
    return Collected(sorted(sizes), sum(sizes.values()), len(waiting), sum(waiting.values()), sorted(unknown))


def _judged(
    catalog: Catalog, grace_s: float, *, is_appended: bool
) -> tuple[dict[str, tuple[int, float]], dict[str, int], list[str]]:
    """Return what is to go, with its size and time; the sizes of what is dead and waits; and what no log knows."""
    objects = dated(catalog.objects)
    states, needed = _read(catalog)
    doomed: dict[str, tuple[int, float]] = {}
    waiting: dict[str, int] = {}
    unknown: list[str] = []
    lately: set[str] = set()
    is_copy = catalog.document.is_copy
    for line, state in states.items():
        known = _fold(catalog, line, state.length)
        dead: list[tuple[str, int, float, float]] = []
        for key, (size, when) in objects.dated(f"versions/{line}/").items():
            match = _PREFIX.match(key)
            txid = match[1] if match else ""
            if key in needed or txid in known.open:
                continue
            if txid in known.ended:
                # What a copy is about to count on may lie under a prefix that ended long ago.
                dead.append((key, size, when, max(known.ended[txid], when) if is_copy else known.ended[txid]))
            else:
                unknown.append(key)
        clock = _clock(catalog, line, grace_s, is_appended=bool(dead) and is_appended)
        for key, size, when, ended in dead:
            if clock - ended >= grace_s:
                doomed[key] = size, when
            else:
                waiting[key] = size
        young = {txid for txid, ended in known.ended.items() if clock - ended < grace_s}
        lately |= _led_to_lately(catalog, known, young, waiting.keys())
    # Files are shared: the grace of one begins when the last version that has it is gone.
    waiting |= {key: doomed.pop(key)[0] for key in lately & doomed.keys()}
    return doomed, waiting, unknown


def _read(catalog: Catalog) -> tuple[dict[str, LineState], set[str]]:
    """Return all lines as read now, and what they need; what is committed after that counts as open.

    It is read again where an object is missing that the logs, read on, do not lead to any more.
    """
    while True:
        states = {line: catalog.log(line).refresh() for line in catalog.lines()}
        histories = {line: catalog.history(line, state.history) for line, state in states.items()}
        try:
            return states, _needed(catalog, states)
        except IntegrityError:
            for line in states:
                catalog.log(line).refresh()
            if all(catalog.history(line) == history for line, history in histories.items()):
                raise


def _led_to_lately(catalog: Catalog, known: _Line, young: Collection[str], there: Collection[str]) -> set[str]:
    """Return what those manifests lead to that have ended lately, by txid, and that are still there."""
    found: set[str] = set()
    for txid, ref in known.manifests.items():
        if txid in young and ref.key in there:
            with contextlib.suppress(IntegrityError):  # another collection, of a shorter grace, was first
                found.update(item.key for item in led_to(catalog.objects, ref, is_edge=False))
    return found


def _delete(catalog: Catalog, doomed: Mapping[str, int]) -> None:
    def delete(key: str) -> None:
        events.reached("gc.delete.before", key)
        catalog.objects.delete(key)
        events.reached("gc.delete.after", key)

    for n_done, _ in enumerate(map_bounded(delete, sorted(doomed)), 1):
        events.progress("gc", n_done, len(doomed))


def _clock(catalog: Catalog, line: str, grace_s: float, *, is_appended: bool) -> float:
    """Return the time by the object store's clock: that of a record appended now, or of the newest one.

    A copy's logs are its source's, so there it is of the line's hint, put again as it is: that may be an old one.
    """
    log = catalog.log(line)
    if not is_appended:
        return max(times_of(catalog, line).values(), default=0.0)
    if catalog.document.is_copy:
        key = hint_key(line)
        with contextlib.suppress(NotFoundError):
            catalog.objects.put(key, catalog.objects.get(key))
        return times_of(catalog, line).get(key, 0.0)

    def decide(state: LineState) -> Gc:
        return Gc(
            **next_fields(state),
            grace_s=int(grace_s),
        )

    record = log.append(decide)
    return times_of(catalog, line).get(record_key(line, record.seq), 0.0)


def _fold(catalog: Catalog, line: str, length: int) -> _Line:
    """Return what the first `length` records of a line say of each prefix."""
    times, result = times_of(catalog, line), _Line()
    txids: dict[int, str] = {}
    for record, _ in itertools.islice(catalog.log(line).records(), length):
        when = times.get(record_key(line, record.seq), float("inf"))  # a listing that lags says nothing is over
        if isinstance(record, Begin | Intent):
            result.open.add(record.txid)
        elif isinstance(record, Commit | NewEdge | Abort):
            result.open.discard(record.txid)
            result.ended[record.txid] = when
            if isinstance(record, Commit | NewEdge):
                result.manifests[record.txid] = record.manifest
            if isinstance(record, Commit):
                txids[record.version] = record.txid
        elif isinstance(record, Expire):
            result.open.discard(record.txid)
            for txid in (*(txids[number] for number in (*record.deltas, *record.versions)), *record.edges):
                result.ended[txid] = when
    if catalog.document.is_copy:
        # What the log calls kept, and another copying may be about to bring.
        absent, told = catalog.absences.of(catalog.log(line)), catalog.log(line).state.history
        result.open |= {edge.txid for edge in told.edges if edge.txid in absent.edges}
        for row in catalog.log(line).rows():
            is_absent = row.version in absent.versions and row.version not in told.expired
            if is_absent or (row.version in absent.deltas and row.version not in told.dead):
                result.open.add(row.txid)
    return result


def _needed(catalog: Catalog, states: Mapping[str, LineState]) -> set[str]:
    """Return the keys that something which is kept leads to."""
    manifests: list[tuple[ObjectRef, _Use]] = []
    for line, state in states.items():
        history = catalog.history(line, state.history)  # the log may be read on by another thread
        head = -1 if state.head is None else state.head.version
        for row in catalog.log(line).rows():
            if row.version not in history.dead:
                manifests.append((row.manifest, "edge"))
            elif row.version not in history.expired:
                manifests.append((row.manifest, "head" if row.version >= head else "version"))
        manifests += [(edge.manifest, "edge") for edge in history.edges]
    found = map_bounded(lambda item: _led_to(catalog, *item), manifests)
    return {ref.key for refs in found for ref in refs}


def _led_to(catalog: Catalog, ref: ObjectRef, use: _Use) -> list[ObjectRef]:
    """Return what a manifest leads to; of a head with another edge to it, also what its next version may refer to."""
    found = led_to(catalog.objects, ref, is_edge=use == "edge")
    if use == "head":
        try:
            found += owner_refs(catalog.objects, read_manifest(catalog.objects, ref))
        except IntegrityError:
            if not catalog.document.is_copy:  # which need not have the seals of an edge that it lacks
                raise
    return found


def _acks(catalog: Catalog, objects: Dated, grace_s: float) -> dict[str, int]:
    """Return the acknowledgements of versions that are neither active in their group nor proposed to it, and old."""
    doomed: dict[str, int] = {}
    for name in group_names(catalog.objects):
        prefix = f"groups/{name}/acks/"
        # Before the log is read: who acknowledges what is proposed after that names another proposal.
        there = objects.dated(prefix)
        state = catalog.group_log(name).refresh()
        standing = {version.version for version in (state.active, state.proposed) if version is not None}
        clock = max((when for _, when in objects.dated(f"groups/{name}/log/").values()), default=0.0)
        for key, (size, when) in there.items():
            version = key.removeprefix(prefix).partition("/")[0]
            if VERSION.fullmatch(version) and version not in standing and clock - when >= grace_s:
                doomed[key] = size
    return doomed
