"""When the head of a line ought to be stored whole: after so many versions, or when the path to it costs too much.

Decides from the log alone. Refuses numbers that make no sense.
"""

from __future__ import annotations

from dcr_store.errors import InvalidInputError
from dcr_store.versions.catalog import Catalog, Located


def due(catalog: Catalog, line: str, *, every: int | None = None, cost: float | None = None) -> Located | None:
    """Return the head of a line if it ought to be anchored, else None.

    Parameters
    ----------
    every : int, optional
        If at least so many versions lie between it and the anchor from which its cheapest path begins.
    cost : float, optional
        If that path takes more than so many times the bytes of the anchor.
    """
    if (every is not None and every < 1) or (cost is not None and not cost >= 1):
        raise InvalidInputError(
            "no anchor can be made so often", key=line, expected="every and cost of 1 or more", found=(every, cost)
        )
    head = catalog.fresh(line).state.head
    assert head is not None
    located = Located(line, head)
    path = catalog.path(located)
    anchor, whole = path[0], sum(edge.nbytes for edge in path)
    is_old = every is not None and head.version - anchor.version >= every
    return located if is_old or (cost is not None and whole > cost * anchor.nbytes) else None
