"""Make a copy a store of its own, which can be published into: for when its source is gone, or the region moves.

What was under way in the source when it was copied last is ended. Nothing is copied into a detached store any more.
"""

from __future__ import annotations

from typing import Final

from dcr_store import events
from dcr_store.errors import ConflictError, InvalidInputError
from dcr_store.format.copies import DETACHED_KEY, Detached
from dcr_store.format.records import Abort
from dcr_store.log.fold import LineState
from dcr_store.publish.ending import abort_record
from dcr_store.versions.catalog import Catalog

_REASON: Final = "the copy was detached from the store in which this was under way"


def detach(catalog: Catalog) -> list[str]:
    """Detach a copy; again after a crash. Nobody may be copying into it.

    Returns
    -------
    list of str
        The names of its lines.

    Raises
    ------
    InvalidInputError
        If the store is no copy.
    """
    if not catalog.document.is_copy:
        raise InvalidInputError("is no copy, and needs no detaching", key=catalog.objects.url)
    catalog.objects.put_if_absent(DETACHED_KEY, Detached.now().to_bytes())
    events.reached("detach.said", catalog.objects.url)
    lines = catalog.lines()
    for line in lines:
        log = catalog.log(line)

        def decide(state: LineState) -> Abort:
            under_way = [work.txid for work in state.history.works]
            under_way += [] if state.open is None else [state.open.txid]
            if not under_way:
                raise ConflictError("nothing is under way", key=state.line)
            return abort_record(state, under_way[0], _REASON)

        try:
            while True:
                log.append(decide)
        except ConflictError:
            continue
    return lines
