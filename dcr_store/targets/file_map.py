"""Where each address of the canonical spaces lies in the weight files of a directory. Pure: no I/O.

Refuses files whose tensors are not those of the layout, and layouts of which a tensor is in no file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcr_store.errors import InvalidInputError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import shown, width
from dcr_store.layout.layout import Layout
from dcr_store.targets.safetensors_file import Header


class Transfer(NamedTuple):
    """One contiguous range of a file and where its bytes belong in a chunk.

    Attributes
    ----------
    file : int
        Index of the file.
    offset : int
        Where the range begins in the file, in bytes.
    parts : list of (int, int)
        Byte ranges ``[start, stop)`` of the chunk that the file's bytes make up, one after the other.
    """

    file: int
    offset: int
    parts: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SpaceMap:
    """Address ranges of one space, ascending and disjoint, and the file and byte offset of each."""

    starts: list[int]
    stops: list[int]
    files: list[int]
    offsets: list[int]
    width: int

    def transfers(self, start: int, stop: int) -> list[Transfer]:
        """Return what to move between the files and addresses ``[start, stop)``; neighbours in a file are joined."""
        result: list[Transfer] = []
        file, end = -1, -1
        for index in range(max(bisect_right(self.starts, start) - 1, 0), len(self.starts)):
            if self.starts[index] >= stop:
                break
            first, last = max(start, self.starts[index]), min(stop, self.stops[index])
            if first >= last:
                continue
            offset = self.offsets[index] + (first - self.starts[index]) * self.width
            part = ((first - start) * self.width, (last - start) * self.width)
            if self.files[index] == file and offset == end:
                result[-1].parts.append(part)
            else:
                file = self.files[index]
                result.append(Transfer(file, offset, [part]))
            end = offset + part[1] - part[0]
        return result


@dataclass(frozen=True, slots=True)
class FileMap:
    """The map of all spaces.

    Attributes
    ----------
    first : dict of str to SpaceMap
        Per space the copy of each tensor that counts when reading.
    others : dict of str to list of SpaceMap
        Further copies: files may hold tied tensors under several names.
    """

    first: dict[str, SpaceMap]
    others: dict[str, list[SpaceMap]]

    @classmethod
    def of(cls, layout: Layout, files: Sequence[tuple[str, Header]]) -> FileMap:
        """Map a layout onto files, given as (path, header).

        Raises
        ------
        InvalidInputError
            If a file has a tensor that is not the layout's or the other way round; names it.
        """
        copies: dict[str, list[tuple[int, int]]] = {}
        for index, (path, header) in enumerate(files):
            for tensor in header.tensors:
                entry = layout.find(tensor.name)
                if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                    raise InvalidInputError(
                        "the file does not belong to the layout",
                        key=f"{path}#{shown(tensor.name)}",
                        expected=f"{entry.dtype} {list(entry.shape)}" if entry else "no such tensor",
                        found=f"{tensor.dtype} {list(tensor.shape)}",
                    )
                place = (index, tensor.begin)
                if entry.name == tensor.name:  # its own name counts, then aliases in the order of files
                    copies.setdefault(entry.name, []).insert(0, place)
                else:
                    copies.setdefault(entry.name, []).append(place)
        for entry in layout.tensors:
            if entry.name not in copies:
                raise InvalidInputError(
                    "is in no file of the directory", key=shown(entry.name), expected="each tensor", found="none"
                )
        layers = [_layer(layout, copies, depth) for depth in range(max(map(len, copies.values()), default=1))]
        others = {space: [layer[space] for layer in layers[1:] if layer[space].starts] for space in SPACES}
        return cls(layers[0], others)


def _layer(layout: Layout, copies: dict[str, list[tuple[int, int]]], depth: int) -> dict[str, SpaceMap]:
    """Return the map of the copies of index `depth`, joining ranges that go on in space and file alike."""
    layer = {}
    for space in SPACES:
        rows = [
            (entry.start, entry.stop, *copies[entry.name][depth])
            for entry in layout.tensors
            if entry.space == space and entry.n_elements and len(copies[entry.name]) > depth
        ]
        starts, stops, files, offsets = np.array(rows, np.int64).reshape(-1, 4).T
        goes_on = (
            (starts[1:] == stops[:-1])
            & (files[1:] == files[:-1])
            & (offsets[1:] == offsets[:-1] + (stops - starts)[:-1] * width(space))
        )
        begins = np.flatnonzero(np.concatenate([np.ones(min(len(rows), 1), bool), ~goes_on]))
        ends = np.concatenate([begins[1:], [len(rows)]])[: len(begins)] - 1
        layer[space] = SpaceMap(
            starts[begins].tolist(),
            stops[ends].tolist(),
            files[begins].tolist(),
            offsets[begins].tolist(),
            width(space),
        )
    return layer
