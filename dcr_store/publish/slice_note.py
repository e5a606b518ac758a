"""What is noted beside the mapped bits of a writer's slices: which version they are of, or on their way to.

::

    note-0, note-1     written in turn, so that one is whole whatever happens to the other:

    dcr-slices 1 <CRC-64/NVME of all that follows, 16 hex digits>\\n
    <one line of canonical JSON>\\n
    <uint64, little-endian: the digests of the pieces of all slices, in their order>

A note proves nothing but that it was written as it is. Refuses one that is not whole, or contradicts itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec.digest import crc64
from dcr_store.errors import FormatError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.format.fields import MAX_COUNT, Fields
from dcr_store.layout.dtypes import ALIGNMENT_NBYTES, width
from dcr_store.publish.slice_rooms import Room

_FORMAT: Final = "dcr-slices"
_BEGINNING: Final = b"dcr-slices 1 "
_DIGESTS: Final = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class NotedSlice:
    """Where a slice's bits are, and what they ought to be.

    Attributes
    ----------
    space : str
        Of its elements.
    digests : ndarray of uint64, shape (n_pieces,)
    """

    room: Room
    space: str
    n_elements: int
    digests: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Note:
    """One note.

    Attributes
    ----------
    generation : int
        How many were written before it.
    version, txid, root, layout : int, str, str, str
        The version that the digests are of; no other line or store has one of this transaction.
    slices : dict of str to NotedSlice
    """

    generation: int
    version: int
    txid: str
    root: str
    layout: str
    slices: dict[str, NotedSlice]

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        document = {
            "format": _FORMAT,
            "generation": self.generation,
            "version": self.version,
            "txid": self.txid,
            "root": self.root,
            "layout": self.layout,
            "slices": [
                {
                    "key": key,
                    "space": item.space,
                    "elements": item.n_elements,
                    "pieces": len(item.digests),
                    "room": list(item.room),
                }
                for key, item in self.slices.items()
            ],
        }
        digests = [item.digests.astype(_DIGESTS).tobytes() for item in self.slices.values()]
        data = b"".join([canonical.encode(document), b"\n", *digests])
        return b"%s%016x\n%s" % (_BEGINNING, crc64(data), data)

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Note:
        """Parse; ``FormatError`` unless all of it is there and fits together."""
        first, _, rest = data.partition(b"\n")
        if first != b"%s%016x" % (_BEGINNING, crc64(rest)):
            raise FormatError("is no note of a baseline, or not whole", key=key)
        head, _, tail = rest.partition(b"\n")
        fields = Fields.of(canonical.decode_object(head, key, _FORMAT), key)
        rows = fields.objects("slices")
        ends = list(itertools.accumulate([row.count("pieces") for row in rows], initial=0))
        if len(tail) != ends[-1] * _DIGESTS.itemsize:
            raise FormatError("has not the digests of its slices", key=key, expected=ends[-1], found=len(tail))
        digests = np.frombuffer(tail, _DIGESTS).astype(np.uint64)
        slices = {
            row.text("key"): _slice(row, digests[start:stop])
            for row, (start, stop) in zip(rows, itertools.pairwise(ends), strict=True)
        }
        rooms = sorted(item.room for item in slices.values())
        if len(slices) < len(rows) or any(a.file == b.file and a.stop > b.start for a, b in itertools.pairwise(rooms)):
            raise FormatError("has two slices of one name or place", key=key)
        return cls(
            fields.count("generation"),
            fields.count("version"),
            fields.text("txid"),
            fields.text("root"),
            fields.text("layout"),
            slices,
        )


def _slice(row: Fields, digests: NDArray[np.uint64]) -> NotedSlice:
    numbers, space = row.counts("room"), row.one_of("space", SPACES)
    n_elements = row.count("elements", most=MAX_COUNT // 8)
    if len(numbers) != 3 or numbers[0] >= 10**9 or numbers[1] % ALIGNMENT_NBYTES:
        raise FormatError("is no place of a slice", key=row.key, found=numbers)
    room = Room(*numbers)
    if room.stop % ALIGNMENT_NBYTES or room.stop - room.start < max(1, n_elements * width(space)):
        raise FormatError("is no place of that many elements", key=row.key, expected=n_elements, found=numbers)
    return NotedSlice(room, space, n_elements, digests)
