"""Whether a place is a copy of a source, how far a line of it goes with its source's, and what it really holds."""

from __future__ import annotations

from typing import Final

from dcr_store.errors import ConflictError, InvalidInputError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.copies import DETACHED_KEY
from dcr_store.log.line import LineLog
from dcr_store.ports import Doubtable, ObjectStore
from dcr_store.versions.catalog import Catalog

_DOUBT_S: Final = 10.0


def check_copy(source: Catalog, target: Catalog) -> None:
    """Refuse a target that is no copy of the source, or one that goes its own way."""
    if not target.document.is_copy:
        is_same = target.store_sha256 == source.store_sha256
        raise InvalidInputError(
            "is the source, or a store that was copied by other means" if is_same else "is a store, and no copy",
            key=target.objects.url,
            advice="copy to an empty place, or into a copy made so before; were the arguments swapped?",
        )
    if target.store_sha256 != source.store_sha256:
        raise InvalidInputError(
            "is a copy of another store",
            key=target.objects.url,
            expected=source.store_sha256,
            found=target.store_sha256,
            advice="copy to an empty place",
        )
    if target.objects.size(DETACHED_KEY) is not None:
        raise ConflictError(
            "the copy was detached: it is a store of its own, and nothing is copied into it any more",
            key=target.objects.url,
            advice="copy to an empty place",
        )


def check_prefix(log: LineLog, mine: LineLog) -> None:
    """Refuse a copy's log that is not how its source's begins."""
    n_mine, n_source = mine.state.length, log.state.length
    n_common = min(n_mine, n_source)
    if n_common == 0 or _sha256(log, n_common) == _sha256(mine, n_common):
        if n_mine > n_source:
            raise ConflictError(
                "the copy's log is longer: the source was set back, or this is an older copy of it",
                key=log.line,
                expected=f"at most {n_source} records",
                found=f"{n_mine}",
            )
        return
    low, high = 0, n_common  # the first `low` records are alike; chained by their hashes, all after a difference differ
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _sha256(log, middle) == _sha256(mine, middle) else (low, middle)
    raise ConflictError(
        f"the line {log.line} has gone on in the copy by itself, or the source was set back: from this record on the "
        "two differ; nothing was copied: copy to an empty place, or look which of them is right",
        key=f"log/{log.line}/{low:020d}.json",
        expected=f"sha256 {canonical.sha256(log.raw(low))}",
        found=f"sha256 {canonical.sha256(mine.raw(low))}",
    )


def _sha256(log: LineLog, length: int) -> str:
    """Return the SHA-256 of the last of the first `length` records."""
    return log.state.last_sha256 if length == log.state.length else canonical.sha256(log.raw(length - 1))


def get_past(objects: ObjectStore, key: str) -> bytes | None:
    """Return an object as it is stored, past caches on the way; None if it is missing."""
    if isinstance(objects, Doubtable):
        objects.doubt(_DOUBT_S)
    try:
        return objects.get(key)
    except NotFoundError:
        return None
