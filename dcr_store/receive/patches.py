"""What an engine's patch API takes: per tensor the indices that change between two versions, and the new values there.

New values are not in the store: masks say how bits change, not what they become. So the chunks that differ are rebuilt,
a bounded number at a time, proven by their digests, and compared. Refuses versions whose bits cannot be proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec.chunk import find_changes
from dcr_store.layout.dtypes import DTYPES, Bits, uint_dtype
from dcr_store.layout.layout import Layout, TensorEntry
from dcr_store.layout.tensors import to_array
from dcr_store.targets.state_dict import state_target
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.chunks import Place
from dcr_store.versions.pairs import ChunkPairs, batches, compared, counterpart

Framework = Literal["numpy", "torch"]


@dataclass(frozen=True, slots=True)
class TensorPatch:
    """What changes in one tensor.

    Attributes
    ----------
    name : str
        Its name; `aliases` are further names of the same storage.
    dtype : str
        As in safetensors.
    shape : tuple of int
        Of the tensor, in values.
    indices : ndarray or torch.Tensor of int32 or int64, shape (n,), or None
        Of the values that change, in row-major order, ascending; int32 where all of them fit. None if `values` is the
        whole tensor: where it is new, packed (F4, F6), or smaller so than as a list of changes.
    values : ndarray or torch.Tensor
        New values, in the tensor's dtype: of shape (n,), or of the tensor's shape where there are no indices.
    """

    name: str
    aliases: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    indices: Any | None
    values: Any


def patches(
    catalog: Catalog, base: Located, goal: Located, *, state: object = None, framework: Framework = "numpy"
) -> Iterator[TensorPatch]:
    """Yield what changes from `base` to `goal`, tensor by tensor, in the order of the spaces and addresses.

    Tensors that do not change, and those that only the base has, are left out. Memory holds some partitions, the
    chunks that are compared, and one tensor.

    Parameters
    ----------
    state : mapping of str to ndarray or torch.Tensor, or torch.nn.Module, optional
        Tensors that hold `base`, such as an engine's own: then only what lies between the versions is read, not the
        history since the anchor. Chunks of it that are not the base's, or not any more because a patch was applied
        there already, are rebuilt, as all are without it.
    framework : {"numpy", "torch"}
        Of what is yielded.

    Raises
    ------
    InvalidInputError
        If `state` has not the base's tensors.
    IntegrityError
        If the store is damaged; names the key. What was yielded before is right.
    """
    chunk_elements = catalog.document.chunk_elements
    old, new = catalog.layout(base.row.layout), catalog.layout(goal.row.layout)
    source = None if state is None else state_target(state, old, chunk_elements)
    versions = ChunkPairs(catalog, base, goal, source)
    gather = _Gather(old, new, chunk_elements, versions, framework)
    for places in batches(versions.places(), chunk_elements):
        yield from gather.compare(places)
    yield from gather.finish()


@dataclass(slots=True)
class _Growing:
    """A tensor of which chunks have been compared.

    Attributes
    ----------
    bits : ndarray of uintN, shape (n_elements,)
        New bits, where chunks were compared: memory that was never written to takes no room.
    positions : list of ndarray of int64
        Elements that change.
    seen : set of int
        Chunks that were compared.
    """

    entry: TensorEntry
    is_new: bool
    bits: Bits
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)


class _Gather:
    """Compares chunks and makes patches of tensors. Chunks come in the order of their addresses."""

    def __init__(
        self, old: Layout, new: Layout, chunk_elements: int, versions: ChunkPairs, framework: Framework
    ) -> None:
        self._old, self._new = old, new
        self._chunk_elements = chunk_elements
        self._versions = versions
        self._framework = framework
        self._space = ""
        self._open: dict[str, _Growing] = {}

    def compare(self, places: Sequence[Place]) -> Iterator[TensorPatch]:
        """Take chunks of one space; yield the tensors that end in them, or ended before."""
        space, n = places[0][0], self._chunk_elements
        yield from self._finished(None if space != self._space else places[0][1] * n)
        self._space = space
        for entry, first, last, chunk, old, bits in compared(self._versions, self._old, self._new, n, places):
            growing = self._growing(entry, is_new=old is None)
            growing.bits[first:last] = bits
            if old is not None:
                positions, _ = find_changes(old, bits)
                growing.seen.add(chunk)
                growing.positions.append(positions.astype(np.int64) + first)
        yield from self._finished((places[-1][1] + 1) * n)

    def finish(self) -> Iterator[TensorPatch]:
        """Yield the tensors that are left, and the new ones that have no values."""
        yield from self._finished(None)
        for entry in self._new.tensors:
            if entry.n_elements == 0 and counterpart(self._old, entry) is None:
                yield self._patch(self._growing(entry, is_new=True))

    def _growing(self, entry: TensorEntry, *, is_new: bool) -> _Growing:
        if entry.name not in self._open:
            bits = np.empty(entry.n_elements, uint_dtype(entry.space))
            self._open[entry.name] = _Growing(entry, is_new, bits)
        return self._open[entry.name]

    def _finished(self, before: int | None) -> Iterator[TensorPatch]:
        done = [name for name, item in self._open.items() if before is None or item.entry.stop <= before]
        for name in done:
            growing = self._open.pop(name)
            if growing.is_new or any(len(part) for part in growing.positions):
                yield self._patch(growing)

    def _patch(self, growing: _Growing) -> TensorPatch:
        entry, row = growing.entry, DTYPES[growing.entry.dtype]
        per_value = row.elements_per_value
        if not (growing.is_new or row.packed):
            positions = np.concatenate(growing.positions)
            index = positions if per_value == 1 else np.unique(positions // per_value)
            index_dtype = np.int32 if index[-1] <= np.iinfo(np.int32).max else np.int64
            nbytes = len(index) * (np.dtype(index_dtype).itemsize + row.width * per_value)
            if nbytes < growing.bits.nbytes:
                values = (
                    growing.bits[positions] if per_value == 1 else growing.bits.reshape(-1, per_value)[index].ravel()
                )
                return self._made(entry, index.astype(index_dtype), values, (len(index),))
            self._complete(growing)
        elif not growing.is_new:
            self._complete(growing)
        return self._made(entry, None, growing.bits, entry.shape)

    def _complete(self, growing: _Growing) -> None:
        """Read the chunks of a tensor that do not differ."""
        entry, n = growing.entry, self._chunk_elements
        rest = [(entry.space, chunk) for chunk in entry.chunks(n) if chunk not in growing.seen]
        for places in batches(rest, n):
            base = self._versions.of_base(places)
            for (_, chunk), bits in base.items():
                start, stop = max(entry.start, chunk * n), min(entry.stop, (chunk + 1) * n)
                growing.bits[start - entry.start : stop - entry.start] = bits[start - chunk * n : stop - chunk * n]

    def _made(
        self, entry: TensorEntry, index: NDArray[np.signedinteger] | None, bits: Bits, shape: tuple[int, ...]
    ) -> TensorPatch:
        indices: Any = index
        if index is not None and self._framework == "torch":
            import torch

            indices = torch.from_numpy(index)
        values = to_array(bits, entry.dtype, shape, self._framework)
        return TensorPatch(entry.name, entry.aliases, entry.dtype, entry.shape, indices, values)
