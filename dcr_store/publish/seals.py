"""The seals of a transaction's writers, as they come: found in the journal, read, and checked to be of this attempt.

Refuses seals that do not fit their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcr_store.errors import FormatError, NotFoundError
from dcr_store.format.documents import JournalEntry, ObjectRef, SealRef
from dcr_store.format.names import TransactionKeys
from dcr_store.payload import contributions
from dcr_store.payload.version import fetch
from dcr_store.ports import ObjectStore
from dcr_store.publish.committing import Sealed
from dcr_store.publish.ownership import Ownership


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
    _seals: dict[tuple[str, int], tuple[str, bytes, JournalEntry]] = field(default_factory=dict)

    def look(self) -> None:
        """Read the journal entries that are new."""
        for key in sorted(set(self.objects.list(f"{self.keys.prefix}journal/")) - self._seen):
            try:
                data = self.objects.get(key)
                entry = JournalEntry.from_bytes(data, key)
            except (FormatError, NotFoundError):
                continue  # half of it may be there; whoever wrote it writes it whole, or another one
            self._seen.add(key)
            if entry.seal is not None and (entry.line, entry.txid) == (self.keys.line, self.keys.txid):
                self._seals[entry.writer, entry.attempt] = key, data, entry

    def missing(self, attempt: int) -> list[str]:
        """Return the writers that have not sealed an attempt."""
        return [writer for writer in self.writers if (writer, attempt) not in self._seals]

    def sealed(self, attempt: int) -> list[tuple[Sealed, Ownership]]:
        """Return what all writers have sealed of an attempt, in their order, with what they own.

        Raises
        ------
        IntegrityError, FormatError
            If something that a seal names is missing or damaged.
        """
        return [self._sealed(*self._seals[writer, attempt]) for writer in self.writers]

    def _sealed(self, key: str, data: bytes, entry: JournalEntry) -> tuple[Sealed, Ownership]:
        seal = entry.seal
        assert seal is not None
        if seal.ownership is None:
            raise FormatError("the seal of one of several writers does not say what it owns", key=key)
        stored = [
            ObjectRef(
                self.keys.partition(entry.writer, item.incarnation, item.array, item.index), item.sha256, item.nbytes
            )
            for item in seal.partitions
        ]
        described = [array.zarr for array in seal.arrays]
        ref = ObjectRef.of(key, data)
        objects = [*stored, *described, seal.contributions, *seal.journal, *seal.files, seal.ownership, ref]
        rows = contributions.decode(fetch(self.objects, seal.contributions), seal.contributions.key)
        owned = Ownership.from_bytes(fetch(self.objects, seal.ownership), seal.ownership.key)
        found = Sealed(SealRef(entry.writer, entry.incarnation, ref), objects, rows, seal.changed, len(stored))
        return found, owned
