"""What earlier incarnations of a writer journaled in a transaction: found, so that it is not stored again.

Entries that cannot be read, or are of somebody else, are left out: what they name is stored again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from dcr_store.errors import FormatError, NotFoundError
from dcr_store.format.documents import JournalEntry, Partition
from dcr_store.format.names import TransactionKeys
from dcr_store.ports import ObjectStore

Durable = Mapping[tuple[str, int, str], Partition]


@dataclass(frozen=True, slots=True)
class Journaled:
    """What earlier incarnations of a writer journaled in a transaction.

    Attributes
    ----------
    durable : mapping of (str, int, str) to Partition
        By array, index and SHA-256: the partitions that are there.
    named : mapping of (str, int) to set of str
        By array and index: the SHA-256 of each that was journaled, there or not; several if they disagree.
    is_sealed : bool
        Whether these are all, and sealed.
    """

    durable: Durable
    named: Mapping[tuple[str, int], Set[str]]
    is_sealed: bool


def read_durable(objects: ObjectStore, keys: TransactionKeys, writer: str) -> Durable:
    """Return the partitions that earlier incarnations of `writer` in this transaction journaled and that are there."""
    return read_earlier(objects, keys, writer).durable


def read_earlier(objects: ObjectStore, keys: TransactionKeys, writer: str) -> Journaled:
    """Return what earlier incarnations of `writer` in this transaction journaled.

    Journal entries that cannot be read are left out: their partitions are stored again.
    """
    durable: dict[tuple[str, int, str], Partition] = {}
    named: dict[tuple[str, int], set[str]] = {}
    is_sealed = False
    sizes = objects.list(keys.prefix)
    for key in sizes:
        if not key.startswith(f"{keys.prefix}journal/{writer}."):
            continue
        try:
            entry = JournalEntry.from_bytes(objects.get(key), key)
        except (FormatError, NotFoundError):
            continue
        if (entry.txid, entry.writer) != (keys.txid, writer):
            continue
        is_sealed |= entry.seal is not None
        for item in (*entry.partitions, *(entry.seal.partitions if entry.seal else ())):
            named.setdefault((item.array, item.index), set()).add(item.sha256)
            if sizes.get(item.ref(keys, writer).key) == item.nbytes:
                durable[item.array, item.index, item.sha256] = item
    return Journaled(durable, named, is_sealed)
