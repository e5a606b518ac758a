"""A version's tensors in memory: whole, by name, or parts of them. Refuses bits that are not the version's.

Only chunks that hold what is wanted are fetched and decoded, each with what leads to it from the nearest anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from dcr_store import events
from dcr_store.errors import FormatError, IntegrityError, InvalidInputError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import DTYPES, Bits, uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.layout.pieces import Piece, pieces
from dcr_store.layout.selection import Index, Selection, select
from dcr_store.layout.tensors import to_array
from dcr_store.ports import Target
from dcr_store.targets.memory import MemoryTarget
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept
from dcr_store.versions.path import ZERO, Path
from dcr_store.versions.replay import everywhere, only, replay
from dcr_store.versions.route import route

Framework = Literal["numpy", "torch"]


def read(
    catalog: Catalog,
    located: Located,
    tensors: Iterable[str] | Mapping[str, Index | None] | None = None,
    framework: Framework = "numpy",
) -> dict[str, Any]:
    """Return tensors of a version by name.

    Parameters
    ----------
    tensors : iterable of str, or mapping of str to index, optional
        Which; all by default, aliases included. A mapping says which part of each is wanted, by NumPy's basic indices
        (numbers, slices, ``...``, tuples of these; None for all of it).
    framework : {"numpy", "torch"}
        What to return. NumPy arrays of BF16 and FP8 have the dtypes of ml_dtypes.

    Returns
    -------
    dict of str to ndarray or torch.Tensor
        In the order of the layout; in that of the mapping, if there is one. Whole tensors share memory with their
        aliases.

    Raises
    ------
    InvalidInputError
        If there is no such tensor, or an index does not fit it.
    NotFoundError
        If the version has expired, be it while it is read.
    """
    layout = catalog.layout(located.row.layout)
    if isinstance(tensors, Mapping):
        wanted = tensors
        return while_kept(catalog, [located], lambda: _read_parts(catalog, located, layout, wanted, framework))
    chosen = None if tensors is None else list(dict.fromkeys(tensors))
    return while_kept(catalog, [located], lambda: _read_whole(catalog, located, layout, chosen, framework))


def _read_whole(
    catalog: Catalog, located: Located, layout: Layout, chosen: list[str] | None, framework: Framework
) -> dict[str, Any]:
    path = route(catalog, located).path
    target = MemoryTarget(layout, path.chunk_elements, chosen)
    needed = None if chosen is None else _chunks_of(layout, chosen, path.chunk_elements)
    _bring(catalog, path, target, needed)
    return {name: to_array(t.bits, t.dtype, t.shape, framework) for name, t in target.tensors().items()}


def _bring(catalog: Catalog, path: Path, target: Target, needed: Mapping[str, set[int]] | None) -> None:
    """Replay a target from zero, or only the chunks that are `needed`."""
    places = everywhere(path, ZERO) if needed is None else only(path, needed)
    try:
        replay(catalog.objects, path, target, places, by_chunk=needed is not None)
    except (IntegrityError, FormatError) as error:
        if needed is None:
            raise
        events.reached("read.again", str(error))
        replay(catalog.objects, path, target, places)  # whole objects, of which a damaged one is named


def _chunks_of(layout: Layout, names: Iterable[str], chunk_elements: int) -> dict[str, set[int]]:
    """Return the chunks of each space that hold elements of the named tensors."""
    needed: dict[str, set[int]] = {space: set() for space in SPACES}
    for name in names:
        entry = layout.entry(name)
        needed[entry.space].update(entry.chunks(chunk_elements))
    return needed


class PartTarget:
    """A target that keeps what is selected of some tensors.

    Parameters
    ----------
    wanted : mapping of str to index
        By tensor; None for all of it.
    """

    def __init__(self, layout: Layout, chunk_elements: int, wanted: Mapping[str, Index | None]) -> None:
        self._layout = layout
        self.selections: dict[str, Selection] = {}
        self.bits: dict[str, Bits] = {}
        self._pieces: dict[tuple[str, int], list[tuple[Bits, Piece]]] = {}
        for name, index in wanted.items():
            entry = layout.entry(name)
            selection = select(name, entry.shape, ... if index is None else index)
            mapped = selection.affine_map(name, entry.dtype, entry.shape)
            per = DTYPES[entry.dtype].elements_per_value
            bits = np.zeros(per * int(np.prod(selection.sizes, dtype=np.int64)), uint_dtype(entry.space))
            self.selections[name], self.bits[name] = selection, bits
            for piece in pieces(mapped, layout, chunk_elements):
                self._pieces.setdefault((piece.space, piece.chunk), []).append((bits, piece))

    def needed(self) -> dict[str, set[int]]:
        """Return the chunks of each space that hold what is wanted."""
        return {space: {chunk for found, chunk in self._pieces if found == space} for space in SPACES}

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Copy what is kept of a chunk, zeros elsewhere."""
        out.fill(0)
        for bits, piece in self._pieces.get((space, chunk), ()):
            piece.put(bits, out)

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Keep what is wanted of a chunk."""
        for held, piece in self._pieces.get((space, chunk), ()):
            piece.take(bits, held)

    def arrays(self, framework: Framework) -> dict[str, Any]:
        """Return what is selected, by tensor, as arrays that share its memory unless they are flipped."""
        result = {}
        for name, selection in self.selections.items():
            entry = self._layout.entry(name)
            array = to_array(self.bits[name], entry.dtype, selection.shape, framework)
            if selection.flipped:
                array = np.flip(array, selection.flipped) if framework == "numpy" else array.flip(selection.flipped)
            result[name] = array
        return result


def _read_parts(
    catalog: Catalog, located: Located, layout: Layout, wanted: Mapping[str, Index | None], framework: Framework
) -> dict[str, Any]:
    packed = [name for name in wanted if DTYPES[layout.entry(name).dtype].packed]
    for name in packed:
        if wanted[name] is not None:
            raise InvalidInputError(
                f"values of {layout.entry(name).dtype} are smaller than a byte; read the whole tensor", key=name
            )
    path = route(catalog, located).path
    target = PartTarget(layout, path.chunk_elements, {name: wanted[name] for name in wanted if name not in packed})
    _bring(catalog, path, target, target.needed())
    found = target.arrays(framework)
    if packed:
        found |= read(catalog, located, packed, framework)
    return {name: found[name] for name in wanted}
