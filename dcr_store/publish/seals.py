"""The seals of a transaction's writers, as they come: found in the journal, read, and checked to be of this attempt.

Refuses seals that do not fit their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from dcr_store.errors import ConflictError, FormatError, NotFoundError
from dcr_store.format.documents import JournalEntry, ObjectRef, SealRef
from dcr_store.format.names import TransactionKeys
from dcr_store.objects.transfer import map_bounded
from dcr_store.payload import contributions
from dcr_store.payload.contributions import Rows
from dcr_store.payload.version import fetch, sealed_refs
from dcr_store.ports import ObjectStore
from dcr_store.publish.committing import Sealed
from dcr_store.publish.ownership import Ownership

_N_LOOKS: Final = 3


@dataclass
class SealWatch:
    """What writers have sealed of one transaction, as far as it was looked at.

    Attributes
    ----------
    writers : sequence of str
        Who has to seal.
    """

    objects: ObjectStore
    keys: TransactionKeys
    writers: Sequence[str]
    _seen: set[str] = field(default_factory=set)
    _damaged: dict[str, int] = field(default_factory=dict)
    _seals: dict[tuple[str, int], list[tuple[str, bytes, JournalEntry]]] = field(default_factory=dict)

    def look(self) -> None:
        """Read the journal entries that are new, side by side; ``FormatError`` if one stays damaged."""
        keys = sorted(set(self.objects.list(f"{self.keys.prefix}journal/")) - self._seen)
        found = map(self._get, keys) if self.objects.is_local or len(keys) < 2 else map_bounded(self._get, keys)
        for key, data in zip(keys, found, strict=True):
            if data is None:
                continue  # a listing that runs ahead
            try:
                entry = JournalEntry.from_bytes(data, key)
            except FormatError:
                self._damaged[key] = self._damaged.get(key, 0) + 1
                if self._damaged[key] > _N_LOOKS:  # nobody puts half an entry
                    raise
                continue
            self._seen.add(key)
            place = self.keys.journal(entry.writer, entry.incarnation, entry.seq)
            if entry.seal is None or (entry.line, entry.txid, place) != (self.keys.line, self.keys.txid, key):
                continue
            self._seals.setdefault((entry.writer, entry.attempt), []).append((key, data, entry))

    def _get(self, key: str) -> bytes | None:
        try:
            return self.objects.get(key)
        except NotFoundError:
            return None

    def missing(self, attempt: int) -> list[str]:
        """Return the writers that have not sealed an attempt."""
        return [writer for writer in self.writers if (writer, attempt) not in self._seals]

    def sealed(self, attempt: int) -> list[tuple[Sealed, ObjectRef]]:
        """Return what all writers have sealed of an attempt, in their order, with where it stands what they own.

        Raises
        ------
        ConflictError
            If two processes sealed as one writer, and not the same bits.
        IntegrityError, FormatError
            If something that a seal names is missing or damaged.
        """
        only = partial(self._only, attempt=attempt)
        return list(map(only, self.writers) if self.objects.is_local else map_bounded(only, self.writers))

    def ownership(self, found: Sequence[tuple[Sealed, ObjectRef]]) -> list[Ownership]:
        """Read what writers own, as ``sealed`` returned where it stands.

        Raises
        ------
        IntegrityError, FormatError
            If a document is missing, damaged or of another writer.
        """
        return list(map(self._owned, found) if self.objects.is_local else map_bounded(self._owned, found))

    def _owned(self, item: tuple[Sealed, ObjectRef]) -> Ownership:
        sealed, ref = item
        owned = Ownership.from_bytes(fetch(self.objects, ref), ref.key)
        if owned.writer != sealed.seal.writer:
            raise FormatError(
                "is the ownership of another writer", key=ref.key, expected=sealed.seal.writer, found=owned.writer
            )
        return owned

    def _only(self, writer: str, attempt: int) -> tuple[Sealed, ObjectRef]:
        found, *others = [self._sealed(*item) for item in self._seals[writer, attempt]]
        for other, _ in others:
            if not same_bits(found[0].rows, other.rows):
                raise ConflictError(
                    f"two processes sealed as writer {writer}, and not the same bits; abort, end one of them, and "
                    "begin again",
                    key=other.seal.ref.key,
                    expected=f"as incarnation {found[0].seal.incarnation}",
                    found=f"incarnation {other.seal.incarnation}",
                )
        return found

    def _sealed(self, key: str, data: bytes, entry: JournalEntry) -> tuple[Sealed, ObjectRef]:
        seal = entry.seal
        assert seal is not None
        if seal.ownership is None:
            raise FormatError("the seal of one of several writers does not say what it owns", key=key)
        stored = [item.ref(self.keys, entry.writer) for item in seal.partitions]
        ref = ObjectRef.of(key, data)
        objects = [*stored, *sealed_refs(seal), ref]
        rows = contributions.decode(fetch(self.objects, seal.contributions), seal.contributions.key)
        found = Sealed(SealRef(entry.writer, entry.incarnation, ref), objects, rows, seal.changed, len(stored))
        return found, seal.ownership


def read_seal(objects: ObjectStore, seal: SealRef) -> dict[str, Rows]:
    """Return the contributions of a seal."""
    entry = JournalEntry.from_bytes(fetch(objects, seal.ref), seal.ref.key)
    if entry.seal is None:
        raise FormatError("is not the entry of a seal", key=seal.ref.key)
    ref = entry.seal.contributions
    return contributions.decode(fetch(objects, ref), ref.key)


def same_bits(one: Mapping[str, Rows], two: Mapping[str, Rows]) -> bool:
    """Whether contributions are of the same bits over the same base, be they masks or overwrites."""
    return all(
        np.array_equal(one[space][:, [0, 3]], two[space][:, [0, 3]])
        and np.array_equal(one[space][:, 1] ^ one[space][:, 2], two[space][:, 1] ^ two[space][:, 2])
        for space in one
    )
