"""Which elements each writer of a version owns (docs/spec/v1.md §8): the document, and the check of all of them.

Refuses what is owned twice, or by nobody, naming tensors, ranges and writers; and a writer whose digests do not say the
same as its boxes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec.digest import linear_within
from dcr_store.errors import FormatError, IntegrityError, InvalidInputError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.format.fields import MAX_COUNT, Fields
from dcr_store.layout.boxes import Box, Dim, box, clipped, view
from dcr_store.layout.coverage import Part, covered
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.entry import TensorEntry
from dcr_store.layout.layout import Layout
from dcr_store.wording import first_of

FORMAT: Final = "dcr-ownership"
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Ownership:
    """What one writer owns.

    Attributes
    ----------
    boxes : mapping of str to tuple of Box
        By tensor, in elements of it (``there``); ``here`` says nothing.
    ones : mapping of str to ndarray of uint64, shape (n, 2)
        By space: chunk, and L of all-ones at the owned positions; ascending by chunk.
    """

    layout: str
    writer: str
    boxes: Mapping[str, tuple[Box, ...]]
    ones: Mapping[str, NDArray[np.uint64]]

    def to_bytes(self) -> bytes:
        """Return the document, canonical JSON."""
        tensors = [
            {
                "boxes": [{"dims": [[dim.n, dim.there] for dim in item.dims], "start": item.there} for item in boxes],
                "name": name,
            }
            for name, boxes in sorted(self.boxes.items())
            if boxes
        ]
        ones = {space: [[chunk, f"{digest:016x}"] for chunk, digest in self.ones[space].tolist()] for space in SPACES}
        return canonical.encode(
            {"format": FORMAT, "layout": self.layout, "ones": ones, "tensors": tensors, "writer": self.writer}
        )

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Ownership:
        """Read a document; ``FormatError`` names the field."""
        fields = Fields.of(canonical.decode_object(data, key, FORMAT), key)
        boxes: dict[str, tuple[Box, ...]] = {}
        for row in fields.objects("tensors"):
            items = row.objects("boxes")
            if not items:
                raise FormatError("names a tensor and nothing of it", key=row.key, expected="boxes", found="none")
            boxes[row.text("name")] = tuple(_read_box(item) for item in items)
        found = fields.object("ones")
        ones = {space: _read_ones(found.document.get(space), found.key) for space in SPACES}
        return cls(fields.hex("layout", 64), fields.writer(), boxes, ones)


def owned_box(item: Box) -> Box:
    """Return a box without its side here: counted as the elements are met."""
    stride, dims = 1, []
    for dim in reversed(item.dims):
        dims.append(Dim(dim.n, stride, dim.there))
        stride *= dim.n
    return box(0, item.there, dims)


def _read_box(fields: Fields) -> Box:
    dims = fields.document.get("dims")
    if not isinstance(dims, list) or not all(
        isinstance(dim, list)
        and len(dim) == 2
        and all(type(item) is int and 1 <= item <= MAX_COUNT for item in dim)
        and dim[0] > 1
        for dim in dims
    ):
        raise FormatError("field 'dims' is wrong", key=fields.key, expected="pairs of sizes", found=repr(dims)[:80])
    try:
        return owned_box(box(0, fields.count("start"), [Dim(n, stride, stride) for n, stride in dims]))
    except InvalidInputError as error:
        raise FormatError(f"is no box: {error}", key=fields.key) from error


def _read_ones(rows: Any, key: str) -> NDArray[np.uint64]:
    pairs = rows if isinstance(rows, list) else []
    if not isinstance(rows, list) or not all(
        isinstance(pair, list)
        and len(pair) == 2
        and type(pair[0]) is int
        and 0 <= pair[0] <= MAX_COUNT
        and isinstance(pair[1], str)
        and _DIGEST.fullmatch(pair[1])
        for pair in pairs
    ):
        raise FormatError(
            "field 'ones' is wrong", key=key, expected="pairs of chunk and 16 hex digits", found=repr(rows)[:80]
        )
    found = np.array([[chunk, int(digest, 16)] for chunk, digest in pairs], np.uint64).reshape(-1, 2)
    if len(found) > 1 and not bool(np.all(found[1:, 0] > found[:-1, 0])):
        raise FormatError("field 'ones' is wrong", key=key, expected="ascending chunks")
    return found


def ones_of(layout: Layout, boxes: Mapping[str, Sequence[Box]], chunk_elements: int) -> dict[str, NDArray[np.uint64]]:
    """Return L of all-ones at the positions of boxes, per space and chunk that they meet: uint64, shape (n, 2)."""
    found: dict[str, dict[int, int]] = {space: {} for space in SPACES}
    buffers: dict[str, Bits] = {}
    for name, items in boxes.items():
        entry = layout.entry(name)
        if entry.space not in buffers:
            buffers[entry.space] = np.zeros(chunk_elements, uint_dtype(entry.space))
        buffer = buffers[entry.space]
        for chunk in entry.chunks(chunk_elements):
            start = chunk * chunk_elements - entry.start
            parts = [
                part.moved(there=-start)
                for item in items
                for part in clipped(item, max(start, 0), min(start + chunk_elements, entry.n_elements))
            ]
            if not parts:
                continue
            first, stop = min(part.there for part in parts), max(part.there_stop for part in parts)
            for part in parts:
                view(buffer, part.there, part, "there")[...] = np.iinfo(buffer.dtype).max
            ones = linear_within(buffer[first:stop], buffer[stop:].nbytes)
            found[entry.space][chunk] = found[entry.space].get(chunk, 0) ^ ones
            buffer[first:stop] = 0
    return {space: np.array(sorted(rows.items()), np.uint64).reshape(len(rows), 2) for space, rows in found.items()}


def whole(entry: TensorEntry) -> Box:
    """Return the box of all elements of a tensor that has any."""
    return box(0, 0, [Dim(entry.n_elements, 1, 1)])


def check_ownership(layout: Layout, found: Sequence[Ownership], chunk_elements: int) -> None:
    """Check that each element of each tensor is owned by exactly one writer, and the digests with the boxes.

    Raises
    ------
    IntegrityError
        If not; names tensors, ranges and writers.
    """
    held: dict[str, list[Box]] = {}
    for item in found:
        if item.layout != layout.sha256:
            raise IntegrityError(
                f"writer {item.writer} wrote another layout", expected=layout.sha256, found=item.layout
            )
        for name, boxes in item.boxes.items():
            entry = layout.find(name)
            if entry is None or entry.name != name or max(b.there_stop for b in boxes) > entry.n_elements:
                raise IntegrityError(f"writer {item.writer} owns what the layout does not have", key=name)
            held.setdefault(name, []).extend(boxes)
    result = covered(held, {entry.name: entry.n_elements for entry in layout.tensors})
    if result.doubled:
        part = result.doubled[0]
        raise IntegrityError(
            f"{result.n_doubled:,} elements were written more than once, first {part}, by {_holders(found, part)}; "
            "abort, and let one writer own each",
            key=part.tensor,
        )
    if result.missing:
        tensors = list(dict.fromkeys(part.tensor for part in result.missing))
        raise IntegrityError(
            f"{result.n_missing:,} elements were written by nobody, first {result.missing[0]}, of tensors "
            f"{first_of(tensors, 5)}; abort, and write all of them",
            key=tensors[0],
        )
    _check_ones(layout, found, chunk_elements)


def _holders(found: Sequence[Ownership], part: Part) -> str:
    names = [
        item.writer
        for item in found
        if any(clipped(held, part.start, part.stop) for held in item.boxes.get(part.tensor, ()))
    ]
    return names[0] + ", twice" if len(names) == 1 else " and ".join(names[:4])


def _check_ones(layout: Layout, found: Sequence[Ownership], chunk_elements: int) -> None:
    everything = {entry.name: [whole(entry)] for entry in layout.tensors if entry.n_elements}
    expected = ones_of(layout, everything, chunk_elements)
    for space in SPACES:
        total: dict[int, int] = {}
        for item in found:
            for chunk, digest in item.ones[space].tolist():
                total[chunk] = total.get(chunk, 0) ^ digest
        wanted = dict(expected[space].tolist())
        wrong = sorted(chunk for chunk in {*total, *wanted} if total.get(chunk, 0) != wanted.get(chunk, 0))
        if wrong:
            raise IntegrityError(
                f"the writers' digests of what they own do not make up chunk {wrong[0]} of {space}; a writer does not "
                "own what its boxes say",
                expected=f"{wanted.get(wrong[0], 0):016x}",
                found=f"{total.get(wrong[0], 0):016x}",
            )
