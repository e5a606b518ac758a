"""One state on its way into a transaction: compare with the base, encode, digest, chunk by chunk, in parallel.

``DeltaWriter`` encodes masks against a baseline; ``AnchorWriter`` encodes whole states and stages them as the next
baseline. What is published is a private copy of each chunk: its mask, its digest and the check of the encoded bytes
come from the same bits, whatever happens to the caller's memory meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec.digest import zeros_digest
from dcr_store.codec.portable import get_codec
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, uint_dtype, width
from dcr_store.layout.layout import Layout, TensorEntry
from dcr_store.publish.chunk_encoding import EncodedChunk, encode_anchor, encode_delta
from dcr_store.publish.chunks import ChunkAssembler, ReadInto
from dcr_store.publish.encoders import N_TOGETHER, Encoders
from dcr_store.publish.partitions import PartitionWriter
from dcr_store.publish.spool import ChunkSpool
from dcr_store.versions.workers import scratch

Fill = Callable[[Bits], None]
_Item = tuple[str, int, Fill]
_N_TRIES: Final = 3


class BaseBits(Protocol):
    """Where a delta finds the bits of its base."""

    def base_chunk(self, space: str, chunk: int) -> tuple[Bits, int]:
        """Return a chunk of the base, proven by its digest, and the digest."""

    def unproven_chunk(self, space: str, chunk: int) -> tuple[Bits, int]:
        """Return the bits that there are for a chunk, right or wrong, and the digest of the right ones."""


class Staging(Protocol):
    """Where an anchor leaves the bits of the next baseline."""

    def stage(self, space: str, chunk: int, bits: Bits) -> None:
        """Keep a chunk; called from several threads."""

    def staged(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a chunk that was kept to `out`."""


class StateWriter:
    """What delta and anchor share: a pool that encodes, and takes what it has encoded to the partition writer."""

    def __init__(self, partitions: PartitionWriter, layout: Layout | None) -> None:
        self.partitions = partitions
        self.codec = get_codec(partitions.codec)
        self.chunk_elements = partitions.chunk_elements
        self.n_changed = 0
        self._kept: dict[str, tuple[int, Bits]] = {}
        self.contributions: dict[str, list[tuple[int, int, int, int]]] = {space: [] for space in SPACES}
        self._encoders = Encoders()
        self._taking = threading.Lock()  # n_changed, contributions, partitions
        self._batch: list[_Item] = []
        self._n_together = N_TOGETHER
        required = None if layout is None else {s: layout.occupied(s, self.chunk_elements) for s in SPACES}
        self._n_chunks = None if required is None else {space: len(table) for space, table in required.items()}
        self._assembler = ChunkAssembler(self.chunk_elements, required, self._emit)

    def write(self, entry: TensorEntry, read_into: ReadInto, *, settles: bool = False) -> None:
        """Take one tensor; its source must hold still until the next ``settle`` or ``drain``.

        Parameters
        ----------
        settles : bool
            Whether that comes at once. Then no worker takes so much of this tensor that others have none of it.
        """
        n_parts = 2 * self._encoders.n_workers
        share = entry.n_elements // (self.chunk_elements * n_parts) if settles else N_TOGETHER
        self._n_together = max(1, min(share, N_TOGETHER))
        self._assembler.feed(entry.space, entry.start, entry.n_elements, read_into)

    def _emit(self, space: str, chunk: int, fill: Fill) -> None:
        self._batch.append((space, chunk, fill))
        if len(self._batch) >= self._n_together:
            self._submit()

    def _submit(self) -> None:
        batch, self._batch = self._batch, []
        if batch:
            self._encoders.give(batch, self._copied, self._encode_and_take)

    def _copied(self, item: _Item) -> Bits:
        space, _, fill = item
        new = scratch(space, self.chunk_elements)
        fill(new)
        return new

    def _encode_and_take(self, item: _Item, new: Bits) -> None:
        encoded = self._encode(item[0], item[1], new)
        with self._taking:
            self._take(encoded)

    def _encode(self, space: str, chunk: int, new: Bits) -> EncodedChunk:
        raise NotImplementedError

    def _take(self, encoded: EncodedChunk) -> None:
        """Note what it adds, and pass it on; the caller holds `_taking`. Waits while too much is in flight."""
        if encoded.data is not None:
            zero = zeros_digest(self.chunk_elements * width(encoded.space))
            row = (encoded.chunk, encoded.base ^ encoded.new, 0, encoded.base ^ zero)
            self.contributions[encoded.space].append(row)
        self.n_changed += encoded.n_changed
        n_chunks = None if self._n_chunks is None else self._n_chunks[encoded.space]
        self.partitions.add(encoded.space, encoded.chunk, encoded.data, n_chunks)

    def settle(self) -> None:
        """Wait until all sources are read and may change, if not yet encoded."""
        self._submit()
        self._encoders.settle()

    def drain(self) -> None:
        """Wait until all complete chunks are encoded."""
        self._submit()
        self._encoders.drain()

    def finish(self) -> dict[str, NDArray[np.uint64]]:
        """Encode what is left; return the contributions, uint64 of shape (n, 4) per space, ascending by chunk."""
        self._assembler.finish()
        self.drain()
        return {
            space: np.array(sorted(rows), np.uint64).reshape(len(rows), 4) for space, rows in self.contributions.items()
        }

    def close(self) -> None:
        """Stop the pools."""
        self._batch.clear()
        self._encoders.close()
        self.partitions.close()

    def current(self, entry: TensorEntry, start: int, stop: int, out: Bits) -> None:
        """Copy elements of a tensor that was written in this transaction, as it was written, to `out`."""
        self.drain()
        size = self.chunk_elements
        low, high = entry.start + start, entry.start + stop
        for chunk in range(low // size, -(-high // size)):
            a, b = max(low, chunk * size), min(high, (chunk + 1) * size)
            bits = self._assembler.partial(entry.space, chunk)
            if bits is None:
                bits = self._completed(entry.space, chunk)
            out[a - low : b - low] = bits[a - chunk * size : b - chunk * size]

    def _completed(self, space: str, chunk: int) -> Bits:
        """Return a complete chunk of the new state; the last one is kept, for many small tensors may be in it."""
        kept = self._kept.get(space)
        if kept is None or kept[0] != chunk:
            bits: Bits = np.empty(self.chunk_elements, uint_dtype(space))
            self._complete(space, chunk, bits)
            kept = self._kept[space] = (chunk, bits)
        return kept[1]

    def _complete(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a complete chunk of the new state to `out`."""
        raise NotImplementedError


class DeltaWriter(StateWriter):
    """Encodes masks against the base. They stay in the partition writer's spool until ``close``, or are handed over."""

    def __init__(self, partitions: PartitionWriter, layout: Layout, base: BaseBits) -> None:
        super().__init__(partitions, layout)
        assert partitions.spool is not None
        self._spool: ChunkSpool = partitions.spool
        self._has_spool = True
        self._base = base

    def _encode(self, space: str, chunk: int, new: Bits) -> EncodedChunk:
        for _ in range(_N_TRIES):
            encoded = encode_delta(self.codec, space, chunk, *self._base.unproven_chunk(space, chunk), new)
            if encoded is not None:
                return encoded
            self._base.base_chunk(space, chunk)  # heals it, or says that it cannot be healed
        raise IntegrityError(
            f"the baseline's chunk {chunk} of {space} changes while it is used; something else writes to its files",
            expected="bits that stay",
            found="other bits each time",
        )

    def _complete(self, space: str, chunk: int, out: Bits) -> None:
        np.copyto(out, self._base.base_chunk(space, chunk)[0])
        data = self._spool.get(space, chunk)
        if data is not None:
            self.codec.apply(data, out)

    def hand_over(self) -> ChunkSpool:
        """Return the masks, encoded; they are the caller's to close from now on."""
        self._has_spool = False
        return self._spool

    def close(self) -> None:
        """Stop the pools, and drop the masks unless they were handed over."""
        super().close()
        if self._has_spool:
            self._spool.close()


class AnchorWriter(StateWriter):
    """Encodes whole chunks; tensors come in the order of their addresses."""

    def __init__(self, partitions: PartitionWriter, staging: Staging) -> None:
        super().__init__(partitions, None)
        self._staging = staging

    def _encode(self, space: str, chunk: int, new: Bits) -> EncodedChunk:
        encoded = encode_anchor(self.codec, space, chunk, new)
        self._staging.stage(space, chunk, new)
        return encoded

    def _complete(self, space: str, chunk: int, out: Bits) -> None:
        self._staging.staged(space, chunk, out)
