"""Repair the log of a copy's line from its source: records, hint and log checkpoints (docs/spec/v1.md §15).

A record is put again only where what else the copy has proves that the source's record stood there. Refuses a log that
may have gone on by itself, and names the record from which on that cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dcr_store import events
from dcr_store.errors import ConflictError
from dcr_store.exchange.copy_checks import get_past
from dcr_store.format import canonical
from dcr_store.format.names import checkpoint_key, hint_key, numbered, record_key
from dcr_store.format.records import Record
from dcr_store.log import checkpoints, fold
from dcr_store.log.fold import LineState
from dcr_store.log.line import LineLog
from dcr_store.objects.transfer import map_bounded


def repair_log(log: LineLog, mine: LineLog) -> list[str]:
    """Repair a copy's log of a line, and read all of it; return the keys of what was put again.

    Parameters
    ----------
    log, mine : LineLog
        The source's, which has been read, and the copy's.

    Raises
    ------
    ConflictError
        If the copy has another record than the source, and nothing proves that it had the source's once.
    IntegrityError, FormatError
        If the copy's log is damaged beyond the end of the source's, or the source's own records are damaged.
    """
    done = list(_restored(mine, [data for _, data in log.since(0)]))
    prefix = f"log/{mine.line}/checkpoints/"
    listed = [numbered(key, prefix) for key in mine.objects.list(prefix)]
    mine.reread()
    return [*done, *_renewed(mine, {seq for seq in listed if seq is not None})]


def _restored(mine: LineLog, source: Sequence[bytes]) -> Iterator[str]:
    """Put again the records that are missing or damaged; yield their keys."""
    line, objects = mine.line, mine.objects
    prefix = f"log/{line}/"
    seqs = [numbered(key, prefix) for key in objects.list(prefix)]
    hint = checkpoints.read_hint(objects, line)
    attested = 0  # how many records the copy had that are the source's, as its hint says
    if (
        hint is not None
        and hint.length <= len(source)
        and canonical.sha256(source[hint.length - 1]) == hint.last_sha256
    ):
        attested = hint.length
    n_common = max(attested, min(len(source), 1 + max((seq for seq in seqs if seq is not None), default=-1)))

    found = list(map_bounded(lambda seq: get_past(objects, record_key(line, seq)), range(n_common)))
    wrong = [seq for seq in range(n_common) if found[seq] != source[seq]]
    # A record that is the source's leads back by its hashes: what stood before it was the source's, too.
    n_proven = max(attested, 1 + max((seq for seq in range(n_common) if found[seq] == source[seq]), default=-1))
    for seq in wrong:
        if seq >= n_proven and (data := found[seq]) is not None:
            raise ConflictError(
                "the copy has another record than the source, and nothing after it shows whether it is damaged or the "
                f"line {line} has gone on by itself; nothing was put for this line: copy to an empty place, or, if you "
                "know that nobody wrote into the copy, delete it there and copy again",
                key=record_key(line, seq),
                expected=f"sha256 {canonical.sha256(source[seq])}",
                found=f"sha256 {canonical.sha256(data)}",
            )
    for seq in wrong:
        key = record_key(line, seq)
        if found[seq] is None:
            objects.put_if_absent(key, source[seq])
        else:
            objects.put(key, source[seq])
        events.reached("copy.repaired", key)
        yield key


def _renewed(mine: LineLog, seqs: set[int]) -> Iterator[str]:
    """Put again the hint, and the log checkpoints with these numbers, where they are not of the log; yield their keys.

    The log has been read from its first record.
    """
    line, objects, records = mine.line, mine.objects, mine.since(0)
    seqs = {seq for seq in seqs if seq <= len(records)}
    hint = checkpoints.read_hint(objects, line)
    is_noted = hint is not None and checkpoints.misfit(hint, [data for _, data in records]) is None
    if hint is not None and hint.checkpoint is not None and hint.checkpoint not in seqs:
        is_noted = False
    states: dict[int, LineState] = {}
    state = LineState(line, 0, mine.store_sha256)
    for record, data in records:
        state = fold.apply(state, record, data)
        if state.length in seqs:
            states[state.length] = state
    if not all(checkpoints.is_fold(objects, line, seq, mine.store_sha256, states[seq]) for seq in seqs):
        yield from _rewritten(mine, records, seqs)
    if not is_noted and records:
        mine.note()
        events.reached("copy.repaired", hint_key(line))
        yield hint_key(line)


def _rewritten(mine: LineLog, records: Sequence[tuple[Record, bytes]], seqs: set[int]) -> Iterator[str]:
    """Write log checkpoints anew, all of a line: which rows one holds depends on those before it."""
    line, objects = mine.line, mine.objects
    for seq in sorted(seqs):
        found = checkpoints.read_checkpoint(objects, line, seq, mine.store_sha256)
        seqs = seqs | set(() if found is None else (s for s in found.segments if s <= mine.state.length))
    state = LineState(line, 0, mine.store_sha256)
    for record, data in records:
        state = fold.apply(state, record, data)
        if state.length not in seqs:
            continue
        key, stored = checkpoint_key(line, state.length), checkpoints.checkpoint_bytes(state, mine.store_sha256)
        if get_past(objects, key) != stored:
            objects.put(key, stored)
            events.reached("copy.repaired", key)
            yield key
        state = checkpoints.after_checkpoint(state)
