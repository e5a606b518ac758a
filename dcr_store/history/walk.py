"""Walk along a line: one version after another, each brought on from the one before. Refuses nothing that read takes.

N versions cost what lies between them, once; memory holds the chunks of what is wanted, and that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dcr_store.errors import InvalidInputError, NotFoundError
from dcr_store.history.read import Framework, PartTarget
from dcr_store.layout.layout import Layout
from dcr_store.layout.selection import Index
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.chunks import Chunks
from dcr_store.versions.info import VersionInfo, info_of
from dcr_store.versions.moving import while_kept
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import only, replay
from dcr_store.versions.route import route


class State(NamedTuple):
    """One version on the way.

    Attributes
    ----------
    tensors : dict of str to ndarray or torch.Tensor
        Memory of its own.
    """

    info: VersionInfo
    tensors: dict[str, Any]


def iter_states(
    catalog: Catalog,
    line: str,
    start: int,
    stop: int | None,
    step: int,
    tensors: Mapping[str, Index | None] | None,
    framework: Framework,
) -> Iterator[State]:
    """Yield versions ``start, start + step, …`` of a line before `stop`; those that have expired are left out.

    Parameters
    ----------
    stop : int or None
        None: as far as the line goes now.
    step : int
        1 or more.
    tensors : mapping of str to index, optional
        Which tensors, and which parts of them, as of ``history.read``; all by default. A version that lacks one is an
        error.

    Raises
    ------
    InvalidInputError
        If `start`, `stop` or `step` are no such numbers, or `tensors` does not fit a version.
    IntegrityError
        If the store does not hold what a version's digests say.
    """
    log = catalog.fresh(line)
    if step < 1 or start < 0 or (stop is not None and stop < 0):
        raise InvalidInputError(
            "these are no versions to walk over",
            key=line,
            expected="start and stop of 0 or more, step of 1 or more",
            found=f"start {start}, stop {stop}, step {step}",
        )
    end = log.state.next_version if stop is None else min(stop, log.state.next_version)
    walker = _Walker(catalog, tensors, framework)
    for number in range(start, end, step):
        located = Located(line, catalog.require_row(line, number))
        if not catalog.is_expired(located):
            try:
                yield while_kept(catalog, [located], lambda located=located: walker.go_on(located))  # type: ignore[misc]
            except NotFoundError:
                if not catalog.is_expired(located):
                    raise  # a tensor that it has not; a version that has expired meanwhile is left out, too


class _Walker:
    """Chunks that are brought from version to version.

    Attributes
    ----------
    at : Located or None
        The version that they hold.
    """

    def __init__(self, catalog: Catalog, tensors: Mapping[str, Index | None] | None, framework: Framework) -> None:
        self._catalog, self._tensors, self._framework = catalog, tensors, framework
        self._chunks = Chunks()
        self.at: Located | None = None

    def go_on(self, located: Located) -> State:
        """Bring them to a version; return what is wanted of it."""
        catalog, at = self._catalog, self.at
        self.at = None  # where it fails they hold anything
        layout = catalog.layout(located.row.layout)
        routed = route(catalog, located, [] if at is None else [at])
        parts = PartTarget(layout, routed.path.chunk_elements, _wanted(layout, self._tensors))
        begin = ZERO
        if at is not None and at.row.layout == located.row.layout and at.name in routed.places:
            begin = routed.places[at.name]
        else:
            self._chunks = Chunks()
        places = only(routed.path, parts.needed(), begin)
        replay(catalog.objects, routed.path, self._chunks, places, by_chunk=self._tensors is not None)
        for (space, chunk), bits in self._chunks.bits.items():
            parts.write_chunk(space, chunk, bits)
        self.at = located
        return State(info_of(catalog.complete(located)), parts.arrays(self._framework))


def _wanted(layout: Layout, tensors: Mapping[str, Index | None] | None) -> Mapping[str, Index | None]:
    return dict.fromkeys(layout.names()) if tensors is None else tensors
