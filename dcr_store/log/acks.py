"""Acknowledgements of a group's members (docs/spec/v1.md §12): objects beside the log that count or do not.

What is not exactly the acknowledgement that its key says is as good as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dcr_store.errors import FormatError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.groups import Ack, AckRef, GroupVersion
from dcr_store.format.names import ack_prefix
from dcr_store.objects.threads import Threads
from dcr_store.ports import ObjectStore

_N_READERS: Final = 16


class AckReader:
    """The acknowledgements of one group. Reads each object once: they never change."""

    def __init__(self, objects: ObjectStore, group: str) -> None:
        self._objects = objects
        self._group = group
        self._known: dict[str, tuple[GroupVersion, dict[str, AckRef]]] = {}

    def read(self, kind: str, subject: GroupVersion, members: Mapping[str, str]) -> dict[str, AckRef]:
        """Return the acknowledgements that count, by name: of this proposal, by these incarnations, with its root.

        One listing, and one request for each acknowledgement not seen before. Foreign, late and damaged ones are
        as good as missing.
        """
        before, known = self._known.get(kind, (subject, {}))
        if before != subject:
            known = {}
        wanted = {
            ack.key: ack for ack in (Ack(kind, self._group, name, found, subject) for name, found in members.items())
        }
        prefix = ack_prefix(self._group, subject.version, kind)
        there = {prefix + name for name in self._objects.list_names(prefix)}
        new = [ack for key, ack in wanted.items() if key in there and key not in known]
        if len(new) < 2:
            found = [self._look(ack) for ack in new]
        else:
            with Threads(min(len(new), _N_READERS)) as pool:
                found = list(pool.map(self._look, new))
        known.update({ack.key: ref for ack, ref in zip(new, found, strict=True) if ref is not None})
        self._known[kind] = subject, known
        return {ack.name: known[key] for key, ack in wanted.items() if key in known}

    def _look(self, expected: Ack) -> AckRef | None:
        try:
            data = self._objects.get(expected.key)
            found = Ack.from_bytes(data, expected.key)
        except (NotFoundError, FormatError):
            return None
        if not found.says_same(expected):
            return None
        return AckRef(found.name, found.incarnation, canonical.sha256(data))
