"""Bring objects from a store into its copy, each proven by its SHA-256 before it is put; many side by side.

Refuses what is missing or damaged in the source, and keys outside of ``versions/``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final

from dcr_store import events
from dcr_store.errors import FormatError
from dcr_store.exchange.copy_checks import get_past
from dcr_store.exchange.copy_jobs import Job
from dcr_store.format import canonical
from dcr_store.format.documents import ObjectRef
from dcr_store.format.names import TransactionKeys, layout_key
from dcr_store.objects.transfer import N_PARALLEL, Room, map_bounded
from dcr_store.payload.version import fetch, led_to, read_layout
from dcr_store.ports import ObjectStore

IN_FLIGHT_NBYTES: Final = 256 << 20
_N_AHEAD: Final = 4


@dataclass(frozen=True, slots=True)
class Planned:
    """A job, the objects that it takes, and which of them are in the copy by now, with their nbytes."""

    job: Job
    refs: Sequence[ObjectRef] = ()
    present: dict[str, int] | None = None


class Transfers:
    """What goes from a store into its copy.

    Parameters
    ----------
    source, target : ObjectStore
    is_repair : bool
        Whether nothing is taken to be sound because an object of its size is there.

    Attributes
    ----------
    n_objects, nbytes : int
        Objects of versions that were put, and what they take.
    n_compared, nbytes_compared : int
        Objects of the copy that were read and compared.
    repaired : list of str
        The keys of those that were put again.
    """

    def __init__(self, source: ObjectStore, target: ObjectStore, *, is_repair: bool = False) -> None:
        self.n_objects = self.nbytes = self.n_compared = self.nbytes_compared = 0
        self.repaired: list[str] = []
        self._source, self._target = source, target
        self._is_repair = is_repair
        self._room = Room(IN_FLIGHT_NBYTES)
        self._compared: set[str] = set()  # of what several jobs lead to

    def bring(
        self, todo: Iterator[Job], task: str, total: int, known: set[str] | None = None
    ) -> Generator[Planned, None, None]:
        """Transfer what jobs take, a few ahead and side by side, and yield each job once all of it is in the copy.

        `known` holds keys of other transactions that are in the copy and stay there; what else is shared is put again,
        because what has ended there may be collected at any moment.
        """
        known = set() if known is None else known
        layouts: set[str] = set()
        done_nbytes = 0

        def steps(plans: Iterator[Planned]) -> Iterator[Callable[[], Planned | int]]:
            for planned in plans:
                job, prefix = planned.job, _prefix(planned.job)
                if job.layout and job.layout not in layouts:
                    layouts.add(job.layout)
                    yield partial(self._bring_layout, job.layout)
                present = planned.present or {}
                for ref in {ref.key: ref for ref in planned.refs}.values():
                    is_there = present.get(ref.key) == ref.nbytes if ref.key.startswith(prefix) else ref.key in known
                    if not is_there:
                        yield partial(self._bring, ref)
                if planned.refs and job.is_edge:
                    known.clear()
                    known.update(ref.key for ref in planned.refs)
                yield partial(_itself, planned)

        with (
            closing(map_bounded(self._plan, todo, n_parallel=_N_AHEAD)) as plans,
            closing(map_bounded(lambda step: step(), steps(plans), n_parallel=N_PARALLEL)) as results,
        ):
            for found in results:
                if isinstance(found, int):
                    done_nbytes += found
                    self.nbytes += found
                    self.n_objects += found > 0
                    events.progress(task, done_nbytes, total)
                else:
                    yield found

    def compare(self, todo: Iterator[Job], task: str, total: int) -> None:
        """Read what jobs take in the copy, and bring again what is missing or damaged there."""
        compared, done_nbytes = self._compared, 0

        def steps(plans: Iterator[Planned]) -> Iterator[Callable[[], tuple[str, int, int | None]]]:
            for planned in plans:
                job, prefix = planned.job, _prefix(planned.job)
                if job.layout and job.layout not in compared:
                    compared.add(job.layout)
                    yield partial(self._repair_layout, job.layout)
                for ref in {ref.key: ref for ref in planned.refs}.values():
                    if not ref.key.startswith(prefix):
                        if ref.key in compared:
                            continue
                        compared.add(ref.key)
                    yield partial(self._repair, ref)

        with (
            closing(map_bounded(lambda job: Planned(job, self._refs(job)), todo, n_parallel=_N_AHEAD)) as plans,
            closing(map_bounded(lambda step: step(), steps(plans), n_parallel=N_PARALLEL)) as results,
        ):
            for key, nbytes, nbytes_brought in results:
                self.n_compared += 1
                self.nbytes_compared += nbytes
                if nbytes_brought is not None:
                    self.repaired.append(key)
                    self.n_objects += 1
                    self.nbytes += nbytes_brought
                done_nbytes += nbytes
                events.progress(task, done_nbytes, total)

    def _plan(self, job: Job) -> Planned:
        """Find what a job takes, and what of it is there."""
        refs = self._refs(job)
        return Planned(job, refs, self._target.list(_prefix(job)) if refs and not self._is_repair else {})

    def _refs(self, job: Job) -> list[ObjectRef]:
        if job.manifest is None:
            return []
        refs = led_to(self._source, job.manifest, is_edge=job.is_edge)
        for ref in refs:
            if not ref.key.startswith("versions/"):
                raise FormatError(
                    "a document refers to what is no object of a version",
                    key=job.manifest.key,
                    expected="a key below versions/",
                    found=ref.key,
                )
        return refs

    def _bring(self, ref: ObjectRef) -> int:
        with self._room.taken(ref.nbytes):
            data = fetch(self._source, ref)
            events.reached("copy.object.before", ref.key)
            self._target.put(ref.key, data)
            events.reached("copy.object.after", ref.key)
        return ref.nbytes

    def _bring_layout(self, sha256: str) -> int:
        key = layout_key(sha256)
        if self._target.size(key) is None:
            self._target.put(key, self._layout(sha256))
            events.reached("copy.layout", key)
        return 0

    def _layout(self, sha256: str) -> bytes:
        data = self._source.get(layout_key(sha256), sha256=sha256)
        read_layout(self._source, sha256)
        canonical.check_sha256(data, sha256, layout_key(sha256))
        return data

    def _repair(self, ref: ObjectRef) -> tuple[str, int, int | None]:
        """Bring an object again if it is not there as it has to be; return its key, its nbytes, and those brought."""
        with self._room.taken(ref.nbytes):
            if self._has(ref.key, ref.sha256) == ref.nbytes:
                return ref.key, ref.nbytes, None
            data = fetch(self._source, ref)
            self._target.put(ref.key, data)
            events.reached("copy.repaired", ref.key)
        return ref.key, ref.nbytes, ref.nbytes

    def _repair_layout(self, sha256: str) -> tuple[str, int, int | None]:
        key = layout_key(sha256)
        if (nbytes := self._has(key, sha256)) is not None:
            return key, nbytes, None
        data = self._layout(sha256)
        self._target.put(key, data)
        events.reached("copy.repaired", key)
        return key, len(data), len(data)

    def _has(self, key: str, sha256: str) -> int | None:
        """Return the nbytes of an object of the copy that has this SHA-256; None if it is another one, or missing."""
        data = get_past(self._target, key)
        return len(data) if data is not None and canonical.sha256(data) == sha256 else None


def _prefix(job: Job) -> str:
    """Return the prefix of what a job's own transaction or work stored."""
    return "" if job.manifest is None else TransactionKeys(job.line, job.version, job.txid).prefix


def _itself(planned: Planned) -> Planned:
    return planned
