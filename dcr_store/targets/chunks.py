"""What targets have in common: checks of a chunk before anything is touched, and copies that must be the same."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

import numpy as np

from dcr_store.errors import InvalidInputError
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import Layout

_NOISE: Final = secrets.token_bytes(64)  # of this process: what nobody can know is in no version


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


def spoil_if_torn(out: Bits, copies: Iterable[Bits]) -> bool:
    """Read the copies of a chunk, of which `out` is the first; ``spoil`` it if one differs; return whether it does."""
    is_torn = any(copy is not out and bool((copy != out).any()) for copy in copies)
    if is_torn:
        spoil(out)
    return is_torn


def spoil(out: Bits) -> None:
    """Make a chunk in which copies differ one that no version has: its first elements become noise.

    So no chunk passes for whole while one copy of a tied tensor is stale. A value of its own for the elements that
    differ would not do: of a byte, some version may well have it.
    """
    start = out.view(np.uint8)[: len(_NOISE)]
    start[:] = np.frombuffer(_NOISE, np.uint8)[: len(start)]
