"""What has to be at hand before a target leaves the version that it holds: planned from the log, fetched, verified."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from dcr_store.format.documents import ObjectRef
from dcr_store.receive.results import Prepared
from dcr_store.receive.transfers import Transfers
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.path import ZERO, Path
from dcr_store.versions.route import route


@dataclass(frozen=True, slots=True)
class Preparation:
    """Objects on their way into the spool, so that a target that holds `base` can be brought to `goal`."""

    goal: Located
    base: Located
    objects: tuple[tuple[ObjectRef, Future[bool]], ...]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is there, or one thing cannot be had; return whether that is so."""
        futures = [future for _, future in self.objects]
        running = wait(futures, timeout_s, return_when="FIRST_EXCEPTION").not_done
        return not running or any(future.done() and future.exception() for future in futures)

    def result(self) -> Prepared:
        """Return what was prepared; waits for it, and raises what kept an object from being fetched."""
        kept = [future.result() for _, future in self.objects]
        return Prepared(
            self.goal.name,
            self.goal.row.root,
            self.base.name,
            self.base.row.root,
            len(kept),
            sum(ref.nbytes for ref, _ in self.objects),
            sum(ref.nbytes for (ref, _), is_kept in zip(self.objects, kept, strict=True) if is_kept),
        )

    def cancel(self) -> None:
        """Drop what has not begun."""
        for _, future in self.objects:
            future.cancel()


def prepare(catalog: Catalog, transfers: Transfers, base: Located, goal: Located) -> Preparation:
    """Begin to fetch what leads from `base` to `goal`, but for what the spool has."""
    refs = {ref.sha256: ref for ref in needed(catalog, base, goal)}
    transfers.spool.need(refs.values())
    return Preparation(goal, base, tuple((ref, transfers.want(ref)) for ref in refs.values()))


def needed(catalog: Catalog, base: Located, goal: Located) -> Iterable[ObjectRef]:
    """Return the partitions on the way from `base` to `goal`; side files that differ, headers of both.

    Raises
    ------
    IntegrityError, FormatError
        If the store does not tell the way.
    """
    way = route(catalog, goal, [base])
    path = way.path
    start = way.places.get(base.name, ZERO)
    refs = [item.ref for _, contents in path.each(_steps(path, start)) for item in contents.partitions]
    # Which files a version had that has expired nobody knows any more: all are brought.
    held = () if catalog.is_expired(base) else catalog.contents(base).manifest.files
    wanted = path.target.manifest.files
    there = {(file.path, file.ref.sha256) for file in held}
    sides = [f.ref for f in wanted if f.kind == "side" and (f.path, f.ref.sha256) not in there]
    return [*refs, *sides, *(file.ref for file in (*held, *wanted) if file.kind == "weights")]


def _steps(path: Path, start: int) -> list[int]:
    """Return the edges that may be taken: where one cannot be gone backwards, also those from the anchor."""
    steps = list(path.steps(start))
    if start > path.goal:
        for _, contents in path.each(steps):
            if any(overwrite for chunks in contents.touched.values() for _, overwrite in chunks.values()):
                return [*path.steps(ZERO), *steps]
    return steps
