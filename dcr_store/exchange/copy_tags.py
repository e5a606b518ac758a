"""Give a line in a copy the tags that it has in the source: put what is missing, take away what is gone."""

from __future__ import annotations

from dcr_store import events
from dcr_store.errors import NotFoundError
from dcr_store.format.marks import Named
from dcr_store.format.names import tag_key, version_number
from dcr_store.objects.transfer import map_bounded
from dcr_store.versions.catalog import Catalog


def copy_tags(source: Catalog, target: Catalog, line: str) -> int:
    """Give a line the tags that it has in the source; return how many were put or taken away."""
    prefix = tag_key(line, "x").rpartition("/")[0] + "/"
    theirs, mine = source.objects.list(prefix), target.objects.list(prefix)

    def look(key: str) -> bool:
        try:
            data = source.objects.get(key)
        except NotFoundError:
            return False  # taken away since it was listed
        tag = Named.from_bytes("tag", data, key)
        tag.check_key(key)
        row = target.row(line, version_number(tag.version))
        if row is None or row.root != tag.root or (key in mine and target.objects.get(key) == data):
            return False  # the version comes with the next copying, and its tag with it
        target.objects.put(key, data)
        events.reached("copy.tag", key)
        return True

    n_done = sum(map_bounded(look, sorted(theirs)))
    for key in sorted(set(mine) - set(theirs)):
        target.objects.delete(key)
        events.reached("copy.tag", key)
        n_done += 1
    return n_done
