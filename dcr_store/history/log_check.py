"""Check a line's log from its first record: form, chain, signatures, holes, hint and checkpoints. Names what is wrong.

A record whose bytes are not those that its successor (or the hint) attests is the damaged one; where only its own link
backwards is wrong, it is itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dcr_store.errors import DcrError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.documents import Base
from dcr_store.format.names import checkpoint_key, hint_key, numbered, record_key, version_name, version_number
from dcr_store.format.records import Fork, Origin, Record, parse_record
from dcr_store.format.rows import VersionRow
from dcr_store.history.report import Problem
from dcr_store.log import checkpoints, fold
from dcr_store.log.fold import LineState
from dcr_store.log.history import UNTOUCHED, History
from dcr_store.objects.threads import Threads
from dcr_store.versions.catalog import Catalog

_MAX_HOLE: Final = 1000
_N_READERS: Final = 16


@dataclass(slots=True)
class LogCheck:
    """What is in a log and what is wrong with it. ``sizes`` holds the nbytes of the log's objects.

    ``origin`` is its first record, where the line goes on from another one.
    """

    rows: list[VersionRow] = field(default_factory=list)
    history: History = UNTOUCHED
    origin: Origin | None = None
    problems: list[Problem] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)


def check_log(catalog: Catalog, line: str) -> LogCheck:
    """Read and check everything below ``log/<line>/``."""
    result = LogCheck()
    listed = catalog.objects.list(f"log/{line}/")
    hint = checkpoints.read_hint(catalog.objects, line)
    blobs = _read(catalog, line, listed, hint, result)
    attested = hint.last_sha256 if hint is not None and hint.length == len(blobs) else None
    records = _parse(catalog, line, blobs, result)
    if records and isinstance(records[0], Origin):
        result.origin = records[0]
    states = _check_chain(catalog, line, blobs, records, attested, listed, result)
    wrong = {problem.key for problem in result.problems}
    sound = [None if record_key(line, seq) in wrong else data for seq, data in enumerate(blobs)]
    _check_derived(catalog, line, listed, hint, sound, states, result)
    return result


def _read(
    catalog: Catalog, line: str, listed: dict[str, int], hint: checkpoints.Hint | None, result: LogCheck
) -> list[bytes | None]:
    """Return the records by number, None where one is missing; name those, and what lies far beyond the end."""
    seqs = sorted(seq for key in listed if (seq := numbered(key, f"log/{line}/")) is not None)
    length = 0
    for seq in seqs:
        if seq - length > _MAX_HOLE:
            key = record_key(line, seq)
            result.sizes[key] = listed[key]
            message = "the log record lies beyond the end of the log, where nothing reads it; move it away"
            result.problems.append(Problem(key, message, f"at most number {length}", f"number {seq}"))
        else:
            length = seq + 1
    if hint is not None and hint.length > length + _MAX_HOLE:
        message = "the log records from here on are missing; restore them from a copy of the store"
        result.problems.append(Problem(record_key(line, length), message, f"{hint.length} records", f"{length}"))
    elif hint is not None:
        length = max(length, hint.length)

    def get(seq: int) -> bytes | DcrError:
        try:
            return catalog.objects.get(record_key(line, seq))
        except DcrError as error:
            return error

    with Threads(_N_READERS) as pool:
        blobs = list(pool.map(get, range(length)))
    while isinstance(data := get(len(blobs)), bytes):  # a listing may lag
        blobs.append(data)
    for seq, blob in enumerate(blobs):
        key = record_key(line, seq)
        if isinstance(blob, bytes):
            result.sizes[key] = len(blob)
        elif isinstance(blob, NotFoundError):
            message = "the log record is missing; restore it from a copy of the store"
            result.problems.append(Problem(key, message, f"{len(blobs)} records", "nothing"))
        else:
            result.problems.append(Problem.of(blob, key))
    return [blob if isinstance(blob, bytes) else None for blob in blobs]


def _parse(catalog: Catalog, line: str, blobs: list[bytes | None], result: LogCheck) -> list[Record | None]:
    """Parse records and check their signatures; one that is badly signed still has its place in the chain."""
    records: list[Record | None] = []
    for seq, data in enumerate(blobs):
        record = None
        if data is not None:
            try:
                record = parse_record(data, record_key(line, seq))
                catalog.signing.check(data, record_key(line, seq), catalog.store_sha256)
            except DcrError as error:
                result.problems.append(Problem.of(error, record_key(line, seq)))
        records.append(record)
    return records


def _check_chain(
    catalog: Catalog,
    line: str,
    blobs: list[bytes | None],
    records: list[Record | None],
    attested: str | None,
    listed: dict[str, int],
    result: LogCheck,
) -> dict[int, LineState]:
    """Fold what can be folded, blame breaks, and collect the versions; return the states at checkpoints."""
    states: dict[int, LineState] = {}
    found = [None if data is None else canonical.sha256(data) for data in blobs]
    claims = [record.prev if record is not None else None for record in records[1:]] + [attested]
    state = LineState(line, 0, catalog.store_sha256)
    whole = True
    for seq, record in enumerate(records):
        data = blobs[seq]
        if record is None or data is None:
            whole = False
            continue
        contradicted = claims[seq] is not None and claims[seq] != found[seq]
        successor_is_sound = seq + 1 >= len(records) or claims[seq + 1] is None or claims[seq + 1] == found[seq + 1]
        if contradicted and successor_is_sound:
            message = "the log record is not the one that its successor follows; restore it from a copy of the store"
            result.problems.append(
                Problem(record_key(line, seq), message, f"sha256 {claims[seq]}", f"sha256 {found[seq]}")
            )
        try:
            if whole:
                state = fold.apply(state, record, data)
                if checkpoint_key(line, state.length) in listed and not result.problems:
                    states[state.length] = state
        except DcrError as error:
            previous = record_key(line, seq - 1)
            if not any(problem.key in (previous, record_key(line, seq)) for problem in result.problems):
                result.problems.append(Problem.of(error, record_key(line, seq)))
            whole = False
    result.rows.extend(state.rows)
    result.history = state.history
    if not whole:
        result.rows.extend(_rows_beyond(catalog, line, len(state.rows)))
    return states


def _rows_beyond(catalog: Catalog, line: str, n_known: int) -> list[VersionRow]:
    """Return the versions after a break, if the checkpoints still tell them."""
    log = catalog.log(line)
    try:
        log.refresh()
        return log.rows()[n_known:]
    except DcrError:
        return []


def _check_derived(
    catalog: Catalog,
    line: str,
    listed: dict[str, int],
    hint: checkpoints.Hint | None,
    sound: list[bytes | None],
    states: dict[int, LineState],
    result: LogCheck,
) -> None:
    """Check hint and checkpoints: they are derived, but a damaged one costs time, and readers believe a whole one."""
    key = hint_key(line)
    if hint is not None:
        result.sizes[key] = listed.get(key, 0)
        if hint.checkpoint is not None and checkpoint_key(line, hint.checkpoint) not in listed:
            message = "the newest log checkpoint is missing; the next publisher writes another"
            result.problems.append(Problem(checkpoint_key(line, hint.checkpoint), message, "a checkpoint", "nothing"))
        if (sides := checkpoints.misfit(hint, sound)) is not None:
            message = "the log's hint is not of this log; delete it, it is derived"
            result.problems.append(Problem(key, message, *sides))
    elif result.rows:
        found = "nothing" if key not in listed else "a damaged document"
        result.problems.append(
            Problem(key, "the log's hint cannot be used; the next publish renews it", "a hint", found)
        )
        if key in listed:
            result.sizes[key] = listed[key]
    prefix = f"log/{line}/checkpoints/"
    for key, nbytes in listed.items():
        if key.startswith(prefix):
            result.sizes[key] = nbytes
            seq = numbered(key, prefix)
            is_one = seq is not None and checkpoints.is_fold(
                catalog.objects, line, seq, catalog.store_sha256, states.get(seq)
            )
            if not is_one:
                message = "the log checkpoint cannot be used; delete it, it is derived"
                result.problems.append(Problem(key, message, "a checkpoint of this log", "something else"))


def unreached(line: str, rows: list[VersionRow], history: History) -> list[Problem]:
    """Name the versions that have not expired and to which no path leads any more, whatever the objects hold.

    Edges from the version that the line goes on from count: whether a path leads there, its own line tells.
    """
    starts: dict[int, list[Base | None]] = {
        row.version: [] if row.version in history.dead else [row.base] for row in rows
    }
    for edge in history.edges:
        starts.setdefault(edge.version, []).append(edge.base)
    reached: set[int] = set()
    for number in sorted(starts):
        before = [None if base is None else version_number(base.version) for base in starts[number]]
        if any(start is None or start in reached or start not in starts for start in before):
            reached.add(number)
    message = "no path leads to the version, which has not expired; publish its weights again, or let it expire"
    return [
        Problem(version_name(line, row.version), message, "a delta, a fold or an anchor that leads on", "none")
        for row in rows
        if row.version not in reached and row.version not in history.expired
    ]


def check_origin(catalog: Catalog, line: str, origin: Origin) -> Problem | None:
    """Check that the line's parent has the record from which the line follows; return what is wrong."""
    key = record_key(origin.parent, origin.fork_seq)
    try:
        data = catalog.objects.get(key)
        canonical.check_sha256(data, origin.fork_sha256, key)
        record = parse_record(data, key)
    except DcrError as error:
        return Problem.of(error, key)
    if isinstance(record, Fork) and (record.child, record.version.root) == (line, origin.row.root):
        return None
    return Problem(record_key(line, 0), "the line does not follow from what its parent says", "a fork", record.kind)
