"""What all targets check about a chunk before they touch anything."""

from __future__ import annotations

from dcr_store.errors import InvalidInputError
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import Layout


def check_chunk(
    layout: Layout, space: str, chunk: int, bits: Bits, chunk_elements: int, *, writable: bool = False
) -> tuple[int, int]:
    """Return the addresses ``[start, stop)`` of a chunk.

    Raises
    ------
    InvalidInputError
        If the space has no such chunk, or `bits` is not a contiguous uintN array of shape (chunk_elements,).
    """
    uint = uint_dtype(space)
    n_chunks = layout.n_chunks(space, chunk_elements)
    if not 0 <= chunk < n_chunks:
        raise InvalidInputError(f"space {space} has no chunk {chunk}", expected=f"0 to {n_chunks - 1}", found=chunk)
    flags = bits.flags
    if (
        bits.dtype != uint
        or bits.shape != (chunk_elements,)
        or not flags.c_contiguous
        or (writable and not flags.writeable)
    ):
        raise InvalidInputError(
            f"cannot hold chunk {chunk} of space {space}",
            expected=f"{'writable ' if writable else ''}contiguous {uint} of shape ({chunk_elements},)",
            found=f"{bits.dtype} of shape {bits.shape}",
        )
    return chunk * chunk_elements, (chunk + 1) * chunk_elements
