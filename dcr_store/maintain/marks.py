"""Names of versions: tags and pins, put and taken away. They keep what they name from expiring.

Who names a version and who lets it expire do not wait for each other: the name is put, then the log is read; an expiry
says what it is about in the log, then reads the names. So one of them always sees the other (docs/spec/v1.md §14).
Refuses names that are taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime

from dcr_store import events
from dcr_store.errors import ConflictError, InvalidInputError, NotFoundError
from dcr_store.format.fields import now
from dcr_store.format.marks import Kind, Named
from dcr_store.format.names import LINE, TAG, check_line, check_pin, check_tag, pin_key, tag_key
from dcr_store.format.records import Abort
from dcr_store.log.fold import LineState
from dcr_store.log.line import LineLog
from dcr_store.ports import ObjectStore
from dcr_store.publish.ending import abort_record
from dcr_store.publish.owner import is_dead
from dcr_store.versions.catalog import Catalog, Located


def put_tag(catalog: Catalog, located: Located, name: str, message: str | None) -> Named:
    """Give a version a name on its line: ``line@name``.

    Raises
    ------
    ConflictError
        If the name is taken, or the version is about to expire.
    NotFoundError
        If it has expired.
    """
    key = tag_key(located.line, check_tag(name))
    return _put(catalog, located, Named("tag", name, located.name, located.row.root, message, now()), key)


def put_pin(catalog: Catalog, located: Located, name: str, message: str | None, until: datetime | None) -> Named:
    """Keep a version, until a time by the object store's clock if one is given; errors are those of ``put_tag``."""
    if until is not None and until.tzinfo is None:
        raise InvalidInputError(
            "the time has no zone", key="until", expected="one with a zone, such as UTC", found=until
        )
    try:
        ends = None if until is None else until.astimezone(UTC)
    except OverflowError as error:
        raise InvalidInputError(
            "the time is none in UTC", key="until", expected="one before the year 10000", found=until
        ) from error
    text = None if ends is None else ends.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    named = Named("pin", name, located.name, located.row.root, message, now(), text)
    return _put(catalog, located, named, pin_key(check_pin(name)))


def _put(catalog: Catalog, located: Located, named: Named, key: str) -> Named:
    # Nothing is put where that can be known before; what happens from here on is seen afterwards.
    _require_stays(catalog, located)
    is_ours = catalog.objects.put_if_absent(key, named.to_bytes())
    if not is_ours:
        held = Named.from_bytes(named.kind, catalog.objects.get(key), key)
        if (held.version, held.root, held.until) != (named.version, named.root, named.until):
            raise ConflictError(
                f"there is a {named.kind} of this name; delete it first, or take another name",
                key=key,
                expected="none",
                found=f"of {held.version}",
            )
        named = held
    # A crash just here leaves a name that may be of a version that expires at this moment; reading it says so, and so
    # does who puts the same name again.
    events.reached("mark.put", key)
    # Where this refuses, the name stays: whoever has put the same one, before the expiry began, counts on it.
    _require_stays(catalog, located)
    return named


def _require_stays(catalog: Catalog, located: Located) -> None:
    """Refuse a version that has expired, or may be about to; end the expiries that dead processes left."""
    _end_dead(catalog.log(catalog.owner(located.line, located.row.version)))
    catalog.check_stays(located)


def _end_dead(log: LineLog) -> None:
    """End the expiries that dead processes left: they would stand in the way of names for ever."""

    def decide(state: LineState) -> Abort:
        for work in state.history.works:
            if work.purpose == "expire" and is_dead(work.owner):
                return abort_record(state, work.txid, "its process ended")
        raise ConflictError("no expiry of a dead process is under way", key=log.line)

    log.refresh()
    while any(work.purpose == "expire" and is_dead(work.owner) for work in log.state.history.works):
        with contextlib.suppress(ConflictError):  # another process has ended it
            log.append(decide)


def delete_tag(catalog: Catalog, line: str, name: str) -> None:
    """Take a tag away; ``NotFoundError`` if there is none."""
    _delete(catalog.objects, tag_key(check_line(line), check_tag(name)), f"the line {line} has no tag {name}")


def delete_pin(catalog: Catalog, name: str) -> None:
    """Take a pin away; ``NotFoundError`` if there is none."""
    _delete(catalog.objects, pin_key(check_pin(name)), f"there is no pin {name}")


def _delete(objects: ObjectStore, key: str, problem: str) -> None:
    if objects.size(key) is None:
        raise NotFoundError(problem, key=key)
    objects.delete(key)


def tags(catalog: Catalog, line: str) -> list[Named]:
    """Return the tags of a line, by name."""
    return _read(catalog.objects, "tag", f"tags/{check_line(line)}/", TAG.fullmatch)


def pins(catalog: Catalog) -> list[Named]:
    """Return all pins, by name."""
    return _read(catalog.objects, "pin", "pins/", LINE.fullmatch)


def _read(objects: ObjectStore, kind: Kind, prefix: str, is_name: Callable[[str], object]) -> list[Named]:
    found = []
    for key in objects.list(prefix):
        name = key.removeprefix(prefix).removesuffix(".json")
        if not is_name(name) or not key.endswith(".json"):
            continue  # foreign
        try:
            found.append(Named.from_bytes(kind, objects.get(key), key))
        except NotFoundError:
            continue  # deleted since it was listed
    return found
