"""The masks of a transaction, kept until it has ended and the baseline has them, too.

Refuses nothing but a full disk.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec import kernels
from dcr_store.codec.portable import Codec
from dcr_store.layout.dtypes import Bits
from dcr_store.publish.spool import ChunkSpool

Changes = tuple[NDArray[np.uint32], Bits]
CHANGES_NBYTES: Final = 96 << 20


class Masks:
    """All masks, encoded, in a spool; and as they were found, as long as those fit into ``CHANGES_NBYTES``.

    To decode a mask again takes a tenth of the time of a publish.
    """

    def __init__(self, spool: ChunkSpool, codec: Codec, chunk_elements: int) -> None:
        self.spool = spool
        self._codec, self._chunk_elements = codec, chunk_elements
        self._changes: dict[tuple[str, int], Changes] = {}
        self._changes_nbytes = 0

    def note(self, space: str, chunk: int, changes: Changes) -> None:
        """Keep the positions and values of a mask, if there is room for them.

        Parameters
        ----------
        changes : tuple of (ndarray of uint32, ndarray of uintN)
        """
        nbytes = sum(array.nbytes for array in changes)
        if self._changes_nbytes + nbytes <= CHANGES_NBYTES:
            self._changes[space, chunk] = changes
            self._changes_nbytes += nbytes

    def apply(self, space: str, chunk: int, bits: Bits) -> None:
        """XOR the mask of a chunk, if it has one, onto `bits`: uintN, a whole chunk, or the elements of the last."""
        changes = self._changes.get((space, chunk))
        if changes is None:
            data = self.spool.get(space, chunk)
            if data is None:
                return
            if bits.size == self._chunk_elements:
                self._codec.apply(data, bits)
                return
            changes = self._codec.decode_sparse(data, bits.dtype, self._chunk_elements)
        kernels.engine().xor_at(bits, *changes)

    def close(self) -> None:
        """Drop all."""
        self.spool.close()
        self._changes.clear()
