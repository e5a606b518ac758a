"""Fork a line: another one goes on from one of its versions, and shares all up to it (docs/spec/v1.md §14).

First the parent's log says so, which keeps the version; then the new line's log begins. After a crash between the two
it is done again and finished. Refuses a name that another line has.
"""

from __future__ import annotations

import contextlib
from typing import Final

from dcr_store import events
from dcr_store.errors import ConflictError
from dcr_store.format import canonical
from dcr_store.format.names import check_line, record_key
from dcr_store.format.records import Fork, Origin
from dcr_store.log.fold import LineState
from dcr_store.log.line import next_fields
from dcr_store.versions.catalog import Catalog, Located

_ADVICE: Final = "take another name"


def fork(catalog: Catalog, located: Located, name: str) -> Located:
    """Begin the line `name`, whose versions up to the one given are those of its parent; return it by its new name.

    Raises
    ------
    ConflictError
        If there is another line of that name.
    NotFoundError
        If the version has expired.
    """
    check_line(name)
    parent = catalog.owner(located.line, located.row.version)
    number, row = located.row.version, located.row
    log, child = catalog.fresh(parent), catalog.log(name)
    catalog.check_kept(located)

    def decide(state: LineState) -> Fork:
        begun = next((item for item in state.history.forks if item.child == name), None)
        if begun is not None:
            raise _Begun(begun.version, begun.seq)
        if number in state.history.expired:
            raise catalog.expired(located)  # since it was looked at
        if child.refresh().length:
            raise ConflictError("there is a line of this name", key=name, advice=_ADVICE)
        return Fork(
            **next_fields(state),
            child=name,
            version=Located(parent, row).base,
        )

    try:
        record = log.append(decide)
        assert isinstance(record, Fork)
        seq = record.seq
    except _Begun as begun:
        if begun.version != number:
            raise ConflictError(
                "a line of this name goes on from another version",
                key=name,
                expected=f"{parent}@{number}",
                found=f"{parent}@{begun.version}",
                advice=_ADVICE,
            ) from None
        seq = begun.seq
    sha256 = canonical.sha256(catalog.objects.get(record_key(parent, seq)))

    def begin(state: LineState) -> Origin:
        if state.length:
            if state.source is not None and (state.source.line, state.source.row.record_sha256) == (
                parent,
                row.record_sha256,
            ):
                raise _Begun(number, 0)
            raise ConflictError("there is a line of this name", key=name, advice=_ADVICE)
        return Origin(
            **next_fields(state),
            parent=parent,
            fork_seq=seq,
            fork_sha256=sha256,
            row=row,
        )

    events.reached("fork.said", name)
    with contextlib.suppress(_Begun):
        child.append(begin)
    return Located(name, row)


class _Begun(Exception):  # noqa: N818 - says what is there already
    """The fork is in the log."""

    def __init__(self, version: int, seq: int) -> None:
        super().__init__(version)
        self.version, self.seq = version, seq
