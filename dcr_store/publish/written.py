"""What one call writes: a slice, or a residual fragment. Checked against the layout, with its place in it. Pure.

Refuses tensors that are not what their map is of, and fragments that do not fit.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Box, Dim, box
from dcr_store.layout.dtypes import DTYPES, Bits
from dcr_store.layout.entry import TensorEntry
from dcr_store.layout.layout import Layout
from dcr_store.layout.pieces import Piece, in_elements, pieces, require_entry
from dcr_store.layout.slices import flat_part
from dcr_store.layout.tensors import as_bits


@dataclass(frozen=True, slots=True)
class Written:
    """What one call writes.

    Attributes
    ----------
    key : str
        Under which the baseline has it.
    held : mapping of str to sequence of Box
        By canonical tensor, what it holds of it, in elements.
    local : ndarray of uintN, shape (n,)
        Its bits, flat in C order; the caller's memory where that is possible.
    cut : callable
        Cuts it into pieces.
    is_residual : bool
        Whether it becomes overwrites.
    """

    key: str
    held: Mapping[str, Sequence[Box]]
    local: Bits
    cut: Callable[[], tuple[Piece, ...]]
    is_residual: bool


def of_slice(tensor: object, mapped: AffineMap, layout: Layout, chunk_elements: int) -> Written:
    """Return what a slice is, of the map's dtype and shape; ``InvalidInputError`` if tensor, map, layout do not fit."""
    names = ", ".join(mapped.tensors)
    data = as_bits(names or "the slice", tensor)
    if (data.dtype, tuple(data.shape)) != (mapped.dtype, mapped.shape):
        raise InvalidInputError(
            "the slice is not what its map is of",
            key=names or None,
            expected=f"{mapped.dtype} {list(mapped.shape)}",
            found=f"{data.dtype} {list(data.shape)}",
        )
    held = {
        require_entry(layout, name, mapped).name: in_elements(boxes, mapped.dtype)
        for name, boxes in mapped.boxes.items()
    }
    cut = partial(cut_slice, mapped, layout, chunk_elements)
    return Written(mapped.digest, held, data.bits, cut, is_residual=False)


def of_fragment(name: str, fragment: object, offset: int, layout: Layout, chunk_elements: int) -> Written:
    """Return what adjacent values of a tensor, from `offset` on, are; ``InvalidInputError`` if they do not fit it."""
    entry = layout.entry(name)
    data = as_bits(name, fragment)
    row, n = DTYPES[entry.dtype], len(data.bits)
    with contextlib.suppress(TypeError):
        offset = -1 if isinstance(offset, bool) else operator.index(offset)
    start, rest = divmod(offset * row.bits, 8 * row.width) if isinstance(offset, int) else (-1, 0)
    if data.dtype != entry.dtype or rest or not 0 <= start <= start + n <= entry.n_elements:
        raise InvalidInputError(
            "the fragment does not fit the tensor",
            key=name,
            expected=f"{entry.dtype}, within {list(entry.shape)}",
            found=f"{data.dtype} {list(data.shape)} at {offset}",
        )
    held = {entry.name: (box(0, start, [Dim(n, 1, 1)]),) if n else ()}
    # Where a map can say it, under the name that the map has if it was announced.
    key = (
        f"residual {entry.name} {start} {n}"
        if row.packed
        else flat_part(name, entry.dtype, entry.shape, offset, offset + n // row.elements_per_value).digest
    )
    cut = partial(_cut_fragment, entry, start, n, chunk_elements)
    return Written(key, held, data.bits, cut, is_residual=True)


def cut_slice(mapped: AffineMap, layout: Layout, chunk_elements: int) -> tuple[Piece, ...]:
    """Return the pieces of a slice; ``InvalidInputError`` if map and layout do not fit."""
    return tuple(pieces(mapped, layout, chunk_elements))


def _cut_fragment(entry: TensorEntry, start: int, n: int, chunk_elements: int) -> tuple[Piece, ...]:
    low, high = entry.start + start, entry.start + start + n
    found = []
    for chunk in range(low // chunk_elements, -(-high // chunk_elements)) if n else ():
        a, b = max(low, chunk * chunk_elements), min(high, (chunk + 1) * chunk_elements)
        inside = box(a - low, a - chunk * chunk_elements, [Dim(b - a, 1, 1)])
        found.append(Piece(entry.space, chunk, (inside,)))
    return tuple(found)
