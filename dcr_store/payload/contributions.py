"""``contributions.bin``: what each chunk that a writer touched adds to the digests (docs/spec/v1.md §8).

The 8 bytes ``dcrcont1``, then for each space in the order u8, u16, u32, u64: number of rows (u64 LE), then rows of four
u64 LE ascending by chunk: chunk, L of the mask, L of base ^ new where overwritten, L of the owned base bits. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import FormatError
from dcr_store.format.documents import SPACES

_MAGIC: Final = b"dcrcont1"
Rows = NDArray[np.uint64]


def encode(rows: Mapping[str, Rows]) -> bytes:
    """Return the object.

    Parameters
    ----------
    rows : mapping of str to ndarray of uint64, shape (n, 4)
        Per space, ascending by chunk; spaces may be left out.
    """
    parts = [_MAGIC]
    for space in SPACES:
        table = np.ascontiguousarray(rows.get(space, np.empty((0, 4), np.uint64)), "<u8")
        parts += [len(table).to_bytes(8, "little"), table.tobytes()]
    return b"".join(parts)


def decode(data: bytes, key: str) -> dict[str, Rows]:
    """Return per space the rows, uint64 of shape (n, 4); ``FormatError`` names `key` if the object is malformed."""
    problem = FormatError(
        "is no table of contributions", key=key, expected="dcrcont1, four tables", found=f"{len(data)} bytes"
    )
    if not data.startswith(_MAGIC):
        raise problem
    result, offset = {}, len(_MAGIC)
    for space in SPACES:
        n_rows = int.from_bytes(data[offset : offset + 8], "little")
        offset += 8
        if offset + 32 * n_rows > len(data):
            raise problem
        table = np.frombuffer(data, "<u8", 4 * n_rows, offset).reshape(n_rows, 4).astype(np.uint64, copy=False)
        if n_rows > 1 and not bool(np.all(table[1:, 0] > table[:-1, 0])):
            raise problem
        result[space] = table
        offset += 32 * n_rows
    if offset != len(data):
        raise problem
    return result


def by_chunk(tables: Mapping[str, Rows]) -> Iterator[tuple[str, int, int, int, int]]:
    """Iterate over (space, chunk, L mask, L overwrite, L base)."""
    for space, table in tables.items():
        for chunk, mask, overwrite, base in table.tolist():
            yield space, chunk, mask, overwrite, base
