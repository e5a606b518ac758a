"""Partitions: Zarr shards assembled and parsed by hand (docs/spec/v1.md §6.1, Zarr v3 ``sharding_indexed``).

A shard is the encoded inner chunks, then the index: offset and nbytes of each inner chunk (u64 LE; both 2^64-1 where
absent), then the CRC-32C of the index (u32 LE). Refuses an index whose checksum or ranges are wrong. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from dcr_store.codec.digest import crc32c
from dcr_store.errors import IntegrityError

_ABSENT: Final = 2**64 - 1


def index_nbytes(n_chunks: int) -> int:
    """Return the nbytes of the index of a shard of `n_chunks` inner chunks."""
    return 16 * n_chunks + 4


def assemble(chunks: Mapping[int, bytes | memoryview], n_chunks: int) -> bytes:
    """Return the shard that holds `chunks`, keyed by their place in the shard, ascending."""
    index = np.full((n_chunks, 2), _ABSENT, "<u8")
    offset = 0
    for place, data in chunks.items():
        index[place] = offset, len(data)
        offset += len(data)
    table = index.tobytes()
    return b"".join((*chunks.values(), table, crc32c(table).to_bytes(4, "little")))


def parse(data: bytes, n_chunks: int, key: str) -> dict[int, memoryview]:
    """Return the encoded chunks of a whole shard by their place in it, as views on `data`.

    Raises
    ------
    IntegrityError
        If the index is damaged; names `key`.
    """
    view = memoryview(data)
    if len(view) < index_nbytes(n_chunks):
        raise IntegrityError(
            "the partition is cut off", key=key, expected=f">= {index_nbytes(n_chunks)} bytes", found=len(view)
        )
    ranges = parse_index(view[len(view) - index_nbytes(n_chunks) :], n_chunks, len(view), key)
    return {place: view[start:stop] for place, (start, stop) in ranges.items()}


def parse_index(tail: memoryview | bytes, n_chunks: int, shard_nbytes: int, key: str) -> dict[int, tuple[int, int]]:
    """Return the byte range of each chunk present, from the last ``index_nbytes(n_chunks)`` bytes of a shard."""
    table, stored = bytes(tail[:-4]), int.from_bytes(tail[-4:], "little")
    found = crc32c(table)
    if found != stored:
        raise IntegrityError(
            "the partition's index is damaged", key=key, expected=f"crc32c {stored:08x}", found=f"{found:08x}"
        )
    end = shard_nbytes - index_nbytes(n_chunks)
    result: dict[int, tuple[int, int]] = {}
    for place, (offset, nbytes) in enumerate(np.frombuffer(table, "<u8").reshape(n_chunks, 2).tolist()):
        if (offset, nbytes) == (_ABSENT, _ABSENT):
            continue
        if offset + nbytes > end:
            raise IntegrityError(
                f"the partition's index points outside, at chunk {place}",
                key=key,
                expected=f"<= {end}",
                found=offset + nbytes,
            )
        result[place] = (offset, offset + nbytes)
    return result
