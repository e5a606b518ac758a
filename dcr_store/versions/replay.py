"""Replay: bring the chunks of a target to one version, from whatever states they are in (DESIGN: base, target, torn).

Each chunk is digested; a digest of a version on the path says where to go on, any other means rebuilding from the
anchor. So is one of a newer version rebuilt where that costs less than its way back (``starts``). A chunk is written
only after its new bits have the digest recorded for them. Nothing depends on how far an earlier run got. Refuses to
write bits that miss the table: then the stored version is defective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from dcr_store import events
from dcr_store.codec import kernels
from dcr_store.codec.chunk import find_changes
from dcr_store.codec.digest import crc64
from dcr_store.codec.portable import get_codec
from dcr_store.errors import FormatError, IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, width
from dcr_store.objects.threads import Threads
from dcr_store.payload.version import SealedPartition, Table, fetch, fetch_chunks
from dcr_store.ports import ObjectStore, ScatterTarget, Source, Target
from dcr_store.versions.changes import overwrites
from dcr_store.versions.path import UNKNOWN, ZERO, Path
from dcr_store.versions.prefetch import Fetch, Prefetch
from dcr_store.versions.starts import cheapest
from dcr_store.versions.workers import scratch, worker_pool

GROUP_NBYTES: Final = 96 << 20
_N_FETCHERS: Final = 8
_N_TOGETHER: Final = 16
_SMALL_NBYTES: Final = 256 << 10

Places = Mapping[str, NDArray[np.int64]]
Parsed = Mapping[str, Mapping[int, memoryview]]
Encoded = list[tuple[SealedPartition, memoryview]]
Changes = tuple[NDArray[np.uint32], Bits]


@dataclass(slots=True)
class Outcome:
    """What a replay did."""

    nbytes_fetched: int = 0
    chunks_written: int = 0
    chunks_healed: int = 0


def digests(target: Source, n_chunks: Mapping[str, int], chunk_elements: int) -> dict[str, Table]:
    """Digest all chunks of a state, in parallel.

    Parameters
    ----------
    n_chunks : mapping of str to int
        The number of chunks of each space.

    Returns
    -------
    dict of str to ndarray of uint64, shape (n_chunks,)
    """
    result = {space: np.zeros(n_chunks[space], np.uint64) for space in SPACES}
    total = sum(n_chunks[space] * chunk_elements * width(space) for space in SPACES)
    done = 0

    def some(space: str, first: int) -> int:
        last = min(first + _N_TOGETHER, n_chunks[space])
        bits = scratch(space, chunk_elements)
        for chunk in range(first, last):
            target.read_chunk(space, chunk, bits)
            result[space][chunk] = crc64(bits)
        return (last - first) * bits.nbytes

    with worker_pool() as pool:
        tasks = [
            pool.submit(some, space, first) for space in SPACES for first in range(0, n_chunks[space], _N_TOGETHER)
        ]
        for task in tasks:
            done += task.result()
            events.progress("compare", done, total)
    return result


def classify(path: Path, found: Mapping[str, Table], candidates: Iterable[int]) -> dict[str, NDArray[np.int64]]:
    """Return for each chunk the state that its digest says it is in; ``UNKNOWN`` if it is none of those asked for.

    Parameters
    ----------
    found : mapping of str to ndarray of uint64, shape (n_chunks,)
        The digests of a target.
    candidates : iterable of int
        States to look for besides ``ZERO`` and the goal. Where several fit, the goal wins, then the last of these. A
        state newer than the goal counts only where the way back is masks alone.
    """
    result = {space: np.full(path.n_chunks(space), UNKNOWN, np.int64) for space in SPACES}
    for space, places in result.items():
        places[found[space] == np.uint64(path.digest(space, 0, ZERO))] = ZERO
    for state, contents in path.each([*candidates, path.goal]):
        for space, places in result.items():
            places[found[space] == contents.tables[space]] = state
    for space, places in result.items():
        for chunk in np.flatnonzero(places > path.goal).tolist():
            if not path.reversible(space, chunk, int(places[chunk])):
                places[chunk] = UNKNOWN
    return result


def everywhere(path: Path, state: int) -> dict[str, NDArray[np.int64]]:
    """Return the places of a target that is wholly in one state."""
    return {space: np.full(path.n_chunks(space), state, np.int64) for space in SPACES}


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Encoded chunks of a partition by their index in the space, and how many bytes that took."""

    chunks: Mapping[int, memoryview]
    nbytes: int


def _whole(item: SealedPartition, data: bytes) -> _Fetched:
    return _Fetched(item.parse(data), len(data))


def _some(objects: ObjectStore, item: SealedPartition, wanted: NDArray[np.bool_]) -> _Fetched:
    """Fetch what is wanted of a partition: single chunks where these are few, else all of it."""
    mine = np.flatnonzero(wanted[item.first_chunk : item.first_chunk + item.n_chunks]) + item.first_chunk
    if 2 * len(mine) > item.partition.chunks or item.partition.nbytes <= _SMALL_NBYTES:
        return _whole(item, fetch(objects, item.ref))
    chunks = fetch_chunks(objects, item, mine.tolist())
    return _Fetched(chunks, sum(len(data) for data in chunks.values()))


def only(path: Path, chunks: Mapping[str, Iterable[int]], state: int = ZERO) -> dict[str, NDArray[np.int64]]:
    """Return the places of a target of which only some chunks are wanted, by space, and are all in one state."""
    result = everywhere(path, path.goal)
    for space, wanted in chunks.items():
        result[space][list(wanted)] = state
    return result


def replay(
    objects: ObjectStore,
    path: Path,
    target: Target,
    places: Places,
    *,
    fetcher: Fetch | None = None,
    by_chunk: bool = False,
) -> Outcome:
    """Bring `target` to the path's goal.

    Parameters
    ----------
    places : mapping of str to ndarray of int64, shape (n_chunks,)
        The state of each chunk (``classify``, ``everywhere``). Chunks at the goal are neither fetched nor written.
        Newer ones may be rebuilt from the anchor instead of going back.
    fetcher : callable, optional
        Returns a partition's verified bytes; by default from `objects`.
    by_chunk : bool
        Fetch single chunks of partitions where few are needed. Then a damaged object is told by the chunk that it
        spoils, not by its SHA-256.

    Raises
    ------
    IntegrityError
        If an object is missing or damaged, or verified objects do not give the recorded bits; the target's chunks
        are then each in some state of the path, or as they were.
    """
    outcome = Outcome()
    # The history since the anchor is read for prices only where it is read anyway. What a fetcher has at hand, and what
    # not, nobody knows here.
    choice = _Choice(any(bool((table < 0).any()) for table in places.values()), only_free=fetcher is not None)
    jobs = [job for space in SPACES for job in _jobs(path, space, places[space], choice)]
    wanted = {space: places[space] != path.goal for space in SPACES}

    def read(item: SealedPartition) -> _Fetched:
        if fetcher is not None:
            return _whole(item, fetcher(item))
        if by_chunk:
            return _some(objects, item, wanted[item.array.array.partition("/")[0]])
        return _whole(item, fetch(objects, item.ref))

    total, done = sum(len(job.chunks) * width(job.space) for job in jobs) * path.chunk_elements, 0
    moved: set[tuple[str, int]] = set()
    with Threads(_N_FETCHERS) as fetchers, worker_pool() as workers:
        queue = Prefetch(fetchers, read, [item for job in jobs for group in job.groups for item in group.items])
        try:
            for job in jobs:
                carried: dict[int, NDArray[np.unsignedinteger]] = {}
                for group in job.groups:
                    data = queue.take(group.items)
                    outcome.nbytes_fetched += sum(found.nbytes for found in data)
                    parsed = {item.key: found.chunks for item, found in zip(group.items, data, strict=True)}
                    tasks = [
                        workers.submit(_advance, path, target, job, group, chunk, parsed, carried, moved)
                        for chunk in job.chunks
                    ]
                    for task in tasks:
                        outcome.chunks_written += task.result()
                    events.reached("replay.group.applied", f"{job.space} {job.chunks[0]}")
                outcome.chunks_healed += int((places[job.space][list(job.chunks)] == UNKNOWN).sum())
                done += len(job.chunks) * path.chunk_elements * width(job.space)
                events.progress(f"apply {path.target.name}", done, total)
        finally:
            queue.cancel()
    if moved:
        # Rebuilt from the anchor, whatever they hold: that cannot be in vain for the same reason.
        rest = everywhere(path, path.goal)
        for space, chunk in moved:
            rest[space][chunk] = UNKNOWN
        rebuilt = replay(objects, path, target, rest, fetcher=fetcher)
        outcome.nbytes_fetched += rebuilt.nbytes_fetched
        outcome.chunks_written += rebuilt.chunks_written
        outcome.chunks_healed += rebuilt.chunks_healed
    return outcome


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive steps whose partitions fit into memory together."""

    steps: tuple[int, ...]
    items: tuple[SealedPartition, ...]
    is_first: bool


@dataclass(frozen=True, slots=True)
class _Job:
    """Chunks of one range of a space that start from the same side; `places` are the states that they start from."""

    space: str
    chunks: tuple[int, ...]
    places: Mapping[int, int]
    groups: tuple[_Group, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Whether chunks newer than the goal may be rebuilt instead of going back, and at which price."""

    is_open: bool
    only_free: bool


def _jobs(path: Path, space: str, places: NDArray[np.int64], choice: _Choice) -> Iterator[_Job]:
    """Cut the work into ranges of partitions, and each range into groups of steps that fit into memory."""
    work = np.flatnonzero(places != path.goal)
    if len(work) == 0:
        return
    low, high = int(places[work].min()), int(places[work].max())
    is_choice = choice.is_open and high > path.goal
    ahead = sorted({*path.steps(ZERO if is_choice else low), *path.steps(high)})
    lengths = [
        item.n_chunks
        for _, edge in path.each(ahead)
        for item in edge.partitions
        if item.array.array.startswith(f"{space}/")
    ]
    n_range = max(lengths, default=1)
    for first in sorted({int(chunk) // n_range for chunk in work}):
        chunks = work[(work >= first * n_range) & (work < (first + 1) * n_range)]
        starts = {int(chunk): int(places[chunk]) for chunk in chunks}
        if is_choice:
            starts = cheapest(path, space, starts, only_free=choice.only_free)
        for backwards in (False, True):
            chosen = {chunk: state for chunk, state in starts.items() if (state > path.goal) == backwards}
            if chosen:
                yield _Job(space, tuple(chosen), chosen, tuple(_groups(path, space, chosen)))


def _farthest(path: Path, states: Iterable[int]) -> int:
    """Return the state that is farthest from the goal, on the newer side if any is there."""
    low, high = min(states), max(states)
    return high if high > path.goal else low


def _groups(path: Path, space: str, starts: Mapping[int, int]) -> Iterator[_Group]:
    ahead = {chunk: path.steps(state) for chunk, state in starts.items()}
    steps: list[int] = []
    items: dict[str, SealedPartition] = {}
    nbytes, first = 0, True
    for step in path.steps(_farthest(path, starts.values())):
        found = {
            item.key: item
            for chunk, its in ahead.items()
            if step in its
            for item in path.partitions(step, space, chunk)
        }
        added = sum(item.partition.nbytes for item in found.values())
        if steps and nbytes + added > GROUP_NBYTES:
            yield _Group(tuple(steps), tuple(items.values()), first)
            steps, items, nbytes, first = [], {}, 0, False
        steps.append(step)
        items.update(found)
        nbytes += added
    yield _Group(tuple(steps), tuple(items.values()), first)


def _advance(
    path: Path,
    target: Target,
    job: _Job,
    group: _Group,
    chunk: int,
    parsed: Parsed,
    carried: dict[int, NDArray[np.unsignedinteger]],
    moved: set[tuple[str, int]],
) -> int:
    """Apply one group's steps to one chunk; return how many chunks were written (0 or 1).

    `carried` holds the job's chunks between its groups: a target may keep a part of a chunk only. `moved` gets the
    chunk if the target does not hold any more what it held when it was classified.
    """
    state = job.places[chunk]
    ahead = path.steps(state)
    steps = [step for step in group.steps if step in ahead]
    if not steps or (job.space, chunk) in moved:
        return 0
    encoded = [_encoded(path, step, job.space, chunk, parsed) for step in steps]
    bits = scratch(job.space, path.chunk_elements)
    known: Bits | None = None  # what the target holds, where that is no guess
    changes: Changes | None = None  # from there to `bits`
    if state < 0 and group.is_first:
        bits.fill(0)
    elif chunk in carried:
        known = carried[chunk]
        np.copyto(bits, known)
    else:
        target.read_chunk(job.space, chunk, bits)
        if _takes_changes(target):
            changes = _listed(encoded, chunk, bits)
            if changes is None and target.is_far:
                known = scratch(job.space, path.chunk_elements, "known")
                np.copyto(known, bits)
    if changes is not None:
        kernels.engine().xor_at(bits, *changes)
    else:
        for parts in encoded:
            _apply_step(parts, job.space, chunk, bits)
    is_same = not any(encoded) and state != UNKNOWN
    before = steps[0] if state > path.goal else steps[0] - 1
    after = path.after(state, steps[-1])
    expected = path.digest(job.space, chunk, after)
    found = path.digest(job.space, chunk, before) if is_same else crc64(bits)
    if expected != found:
        if state >= 0 and chunk not in carried:
            target.read_chunk(job.space, chunk, bits)
            if crc64(bits) != path.digest(job.space, chunk, before):
                events.reached("replay.chunk.moved", f"{job.space} {chunk}")
                moved.add((job.space, chunk))
                return 0
        raise IntegrityError(
            f"the stored version is defective in chunk {chunk} of {job.space}: verified objects do not give the "
            "recorded bits; publish the state again as a new version",
            key=path.states[after].name,
            expected=f"{expected:016x}",
            found=f"{found:016x}",
        )
    if is_same:
        return 0
    events.reached("replay.chunk.before", f"{job.space} {chunk}")
    _write(target, job.space, chunk, bits, known, changes)
    events.reached("replay.chunk.written", f"{job.space} {chunk}")
    if group is not job.groups[-1]:
        carried[chunk] = bits.copy()
    return 1


def _write(target: Target, space: str, chunk: int, bits: Bits, known: Bits | None, changes: Changes | None) -> None:
    """Give a chunk its proven bits: as changes of its old ones, if the target takes those and they are less.

    `known` are these old bits, where they are at hand and the changes are not.
    """
    if _takes_changes(target):
        if changes is None and known is not None and target.is_far:
            changes = find_changes(known, bits)
        if changes is not None and changes[0].nbytes + changes[1].nbytes < bits.nbytes:
            target.xor_chunk(space, chunk, *changes)
            return
    target.write_chunk(space, chunk, bits)


def _takes_changes(target: Target) -> TypeGuard[ScatterTarget]:
    """Return whether a target takes single elements. Asked of every chunk, which ``isinstance`` is too slow for."""
    return hasattr(target, "xor_chunk")


def _encoded(path: Path, step: int, space: str, chunk: int, parsed: Parsed) -> Encoded:
    """Return one version's encoded chunk, of all writers, with the partition that each is of."""
    mine = path.partitions(step, space, chunk)
    return [(item, parsed[item.key][chunk]) for item in mine if chunk in parsed[item.key]]


def _listed(steps: list[Encoded], chunk: int, bits: Bits) -> Changes | None:
    """Return the changes of all steps as positions and masks, if they are one mask that lists them."""
    if len(steps) != 1 or len(steps[0]) != 1:
        return None
    item, data = steps[0][0]
    codec = get_codec(item.array.codec)
    if not item.array.array.endswith("/mask") or not codec.lists(data):
        return None
    with _naming(item, chunk):
        return codec.decode_sparse(data, bits.dtype, len(bits))


def _apply_step(found: Encoded, space: str, chunk: int, bits: Bits) -> None:
    """Apply one version's chunk, of all writers, to `bits` in place: masks first, then overwrites."""
    for item, data in found:
        if item.array.array.endswith("/mask"):
            with _naming(item, chunk):
                get_codec(item.array.codec).apply(data, bits)
    positions, values = overwrites(found, space, chunk, len(bits))
    bits[positions] = values


@contextlib.contextmanager
def _naming(item: SealedPartition, chunk: int) -> Iterator[None]:
    """Say of a chunk that cannot be decoded where it is."""
    try:
        yield
    except FormatError as error:
        raise IntegrityError(f"chunk {chunk} cannot be decoded: {error}", key=item.key) from error
