"""Read versions while others expire and what they leave is collected: by the path that is left, or with a clear end.

An object that is missing is damage only if the log still leads there. Where the log has gone on, what was read of it is
old: the reader takes the path that it names now, or says that the version has expired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dcr_store import events
from dcr_store.errors import IntegrityError
from dcr_store.format.ranges import Ranges
from dcr_store.format.rows import EdgeRow
from dcr_store.versions.catalog import Catalog, Located

Told = list[tuple[str, Ranges, Ranges, tuple[EdgeRow, ...]]]
T = TypeVar("T")


def told_of(catalog: Catalog, versions: Sequence[Located]) -> Told:
    """Return what the logs tell of edges to versions, as of the last refresh; it compares equal while that stands."""
    found: Told = []
    for located in versions:
        line = located.line
        while True:
            history, source = catalog.history(line), catalog.source(line)
            found.append((line, history.expired, history.dead, history.edges))
            if source is None:
                break
            line = source.line
    return found


def have_moved(catalog: Catalog, versions: Sequence[Located], before: Told, error: IntegrityError) -> bool:
    """Read the logs on; return whether other edges lead to versions than before `error`.

    Raises
    ------
    NotFoundError
        If one of the versions has expired.
    """
    for line, *_ in before:
        catalog.log(line).refresh()
    for located in versions:
        if catalog.is_expired(located):
            events.reached("read.expired", located.name)
            raise catalog.expired(located) from error
    return told_of(catalog, versions) != before


def while_kept(catalog: Catalog, versions: Sequence[Located], act: Callable[[], T]) -> T:
    """Return what `act` returns; it is done again where the paths to versions that it reads have changed under it.

    Parameters
    ----------
    act : callable
        Asks the catalog for the path each time; may be done again.

    Raises
    ------
    NotFoundError
        If one of the versions has expired meanwhile.
    IntegrityError
        If `act` raises it, and the log still leads where it looked.
    """
    while True:
        before = told_of(catalog, versions)
        try:
            return act()
        except IntegrityError as error:
            if not have_moved(catalog, versions, before, error):
                raise
            events.reached("read.moved", str(error))
