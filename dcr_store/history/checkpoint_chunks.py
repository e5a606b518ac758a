"""The tensors of a checkpoint as chunks of a layout, whatever files, order and tied names it has. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dcr_store.layout.dtypes import DTYPES, Bits, width
from dcr_store.layout.entry import TensorEntry
from dcr_store.layout.layout import Layout
from dcr_store.targets.checkpoint import Checkpoint
from dcr_store.targets.chunks import spoil_if_torn

Status = Literal["differs", "missing", "altered", "extra"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor in which a checkpoint and a version are not the same.

    Attributes
    ----------
    status : str
        ``differs``; ``missing`` from the checkpoint; ``altered``: of another dtype or shape there; ``extra``: not in
        the version.
    differing, elements : int
        Elements whose bits differ, and all, as the version has them; of an extra tensor, as the checkpoint has them.
    """

    name: str
    status: Status
    differing: int
    elements: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "status": self.status,
            "differing": self.differing,
            "elements": self.elements,
        }


class CheckpointChunks:
    """A checkpoint in a layout that it need not fit; satisfies ``ports.CopiedSource``.

    Tensors that it lacks, or has of another dtype or shape, are zeros. A chunk in which copies of a tied tensor differ
    reads as one that no version has.

    Attributes
    ----------
    mismatches : dict of str to Mismatch
        The tensors that do not fit, by name, in the order of the layout; extra ones last.
    n_shared : int
        Tensors of the layout that it has.
    is_torn : bool
        Whether copies of a tied tensor differed in a chunk that was read.
    """

    def __init__(self, layout: Layout, checkpoint: Checkpoint) -> None:
        self.layout = layout
        self._checkpoint = checkpoint
        self._names: dict[str, list[str]] = {}
        self.mismatches: dict[str, Mismatch] = {}
        self.n_shared = 0
        self.is_torn = False
        for entry in layout.tensors:
            self._find(entry)
        known = set(layout.names())
        for name, (_, tensor) in checkpoint.tensors.items():
            if name not in known:
                n = (tensor.end - tensor.begin) // width(DTYPES[tensor.dtype].space)
                self.mismatches[name] = Mismatch(name, "extra", n, n)

    def _find(self, entry: TensorEntry) -> None:
        has = [name for name in (entry.name, *entry.aliases) if name in self._checkpoint.tensors]
        fitting = [name for name in has if self._fits(entry, name)]
        self._names[entry.name] = fitting
        self.n_shared += bool(fitting)
        for name in has:
            if name not in fitting:
                self.mismatches[name] = Mismatch(name, "altered", entry.n_elements, entry.n_elements)
        if not has:
            self.mismatches[entry.name] = Mismatch(entry.name, "missing", entry.n_elements, entry.n_elements)

    def _fits(self, entry: TensorEntry, name: str) -> bool:
        _, tensor = self._checkpoint.tensors[name]
        return (tensor.dtype, tensor.shape) == (entry.dtype, entry.shape)

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a chunk, uintN of shape (chunk_elements,), into `out`; zeros where no tensor is."""
        if spoil_if_torn(out, self.copies_of_chunk(space, chunk, out)):
            self.is_torn = True

    def copies_of_chunk(self, space: str, chunk: int, out: Bits) -> Iterator[Bits]:
        """Yield `out` with a chunk's bits, then arrays of its kind with those under further names of its tensors."""
        out[:] = 0
        pieces = list(self.layout.pieces(space, chunk * len(out), (chunk + 1) * len(out)))
        for number in range(max((len(self._names[piece.entry.name]) for piece in pieces), default=0)):
            copy = out if number == 0 else out.copy()
            for entry, first, last, offset in pieces:
                if number < len(self._names[entry.name]):
                    name, part = self._names[entry.name][number], copy[offset : offset + last - first]
                    self._checkpoint.read_into(name, first, last, part)
            yield copy

    def differing(self, found: dict[str, int]) -> list[Mismatch]:
        """Return all mismatches, those of tensors that fit but differ in so many elements among them."""
        result = []
        for entry in self.layout.tensors:
            result += [self.mismatches[name] for name in (entry.name, *entry.aliases) if name in self.mismatches]
            if self._names[entry.name] and found.get(entry.name, 0):
                result.append(Mismatch(entry.name, "differs", found[entry.name], entry.n_elements))
        return result + [item for item in self.mismatches.values() if item.status == "extra"]
