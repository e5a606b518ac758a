"""Where the values of a training slice lie in canonical tensors: boxes, moved bit for bit (DESIGN: direct projection).

An ``AffineMap`` belongs to one local slice: a tensor as a rank holds it, counted in C order, whatever its memory looks
like. Its boxes send values to canonical tensors, likewise counted in C order. Values that no box takes are dropped
(padding). Refuses boxes that leave a tensor, that send two values to one place, or that are no boxes; packed dtypes,
whose values are no whole bytes. Indices are Python integers or int64 and never wrap.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import FormatError, InvalidInputError
from dcr_store.format import canonical
from dcr_store.format.fields import MAX_COUNT, Fields
from dcr_store.layout.boxes import Box, Dim, box, clipped, join, merged
from dcr_store.layout.coverage import Coverage, Part, covered, doubled
from dcr_store.layout.dtypes import dtype as dtype_row
from dcr_store.layout.dtypes import n_values, shown
from dcr_store.layout.entry import name_problem
from dcr_store.wording import first_of

FORMAT: Final = "dcr-affine-map"
MAX_TOLD: Final = 3
"""How many tensors of a slice an error names."""


@dataclass(frozen=True)
class AffineMap:
    """What a local slice holds of canonical tensors.

    Attributes
    ----------
    dtype : str
        Of the slice and of all its tensors, as in safetensors.
    shape : tuple of int
        Of the slice.
    tensors : mapping of str to tuple of int
        The canonical tensors that the slice holds values of, and their shapes.
    boxes : mapping of str to tuple of Box
        For each, its boxes: ``here`` is the slice, ``there`` the tensor; in normal form, by rising place there.
    """

    dtype: str
    shape: tuple[int, ...]
    tensors: Mapping[str, tuple[int, ...]]
    boxes: Mapping[str, tuple[Box, ...]]

    @classmethod
    def of(
        cls,
        dtype: str,
        shape: Sequence[int],
        tensors: Mapping[str, Sequence[int]],
        boxes: Mapping[str, Iterable[Box]],
    ) -> Self:
        """Make a map; ``InvalidInputError`` says which tensor is wrong, and why."""
        names = first_of(list(map(shown, tensors)), MAX_TOLD) or None
        row = dtype_row(dtype, key=names)
        if row.packed:
            raise InvalidInputError(
                f"values of {dtype} are no whole bytes and cannot be moved one by one; publish them as residual",
                key=names,
            )
        n_local = n_values(row, shape, key=names)
        found: dict[str, tuple[Box, ...]] = {}
        for name, full in tensors.items():
            problem = name_problem(name)
            if problem is not None:
                raise InvalidInputError(f"{shown(name)} cannot name a tensor: {problem}")
            found[name] = tuple(merged(boxes.get(name, ())))
            _require_inside(name, found[name], n_local, n_values(row, full, key=name))
        unknown = sorted(set(boxes) - set(tensors))
        if unknown:
            raise InvalidInputError("boxes of a tensor without a shape", key=unknown[0])
        return cls(dtype, tuple(shape), {name: tuple(full) for name, full in tensors.items()}, found)

    @property
    def n_values(self) -> int:
        """How many canonical values the slice holds."""
        return sum(item.n_elements for boxes in self.boxes.values() for item in boxes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the document, in hex: equal maps have equal ones."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    # ------------------------------------------------------------------ other slices, other tensors

    def through(self, shape: Sequence[int], view: Iterable[Box]) -> AffineMap:
        """Return the map of another slice whose values are values of this one.

        Parameters
        ----------
        shape : sequence of int
            Of the other slice.
        view : iterable of Box
            Which of its values (``here``) are which of this one's (``there``).
        """
        parts = list(view)
        boxes = {
            name: [found for part in parts for item in boxes for found in join(part, item)]
            for name, boxes in self.boxes.items()
        }
        return AffineMap.of(self.dtype, shape, self.tensors, boxes)

    def then(self, others: Mapping[str, AffineMap]) -> AffineMap:
        """Return the map to where the tensors' values go on to.

        Parameters
        ----------
        others : mapping of str to AffineMap
            For some of the tensors, the map of that tensor taken as a slice. The others stay.

        Raises
        ------
        InvalidInputError
            If a shape or dtype differs, or values of two tensors come to one place.
        """
        tensors: dict[str, tuple[int, ...]] = {}
        boxes: dict[str, list[Box]] = {}
        for name, mine in self.boxes.items():
            other = others.get(name)
            if other is None:
                _note(tensors, name, self.tensors[name])
                boxes.setdefault(name, []).extend(mine)
                continue
            if (other.dtype, tuple(other.shape)) != (self.dtype, self.tensors[name]):
                raise InvalidInputError(
                    "the map that follows is of another tensor",
                    key=name,
                    expected=f"{self.dtype} {list(self.tensors[name])}",
                    found=f"{other.dtype} {list(other.shape)}",
                )
            for further, theirs in other.boxes.items():
                _note(tensors, further, other.tensors[further])
                joined = boxes.setdefault(further, [])
                joined.extend(found for item in mine for part in theirs for found in join(item, part))
        return AffineMap.of(self.dtype, self.shape, tensors, boxes)

    def inverse(self, name: str, local_name: str) -> AffineMap:
        """Return the map of the canonical tensor `name`, taken as a slice, to this slice under a name.

        Raises
        ------
        InvalidInputError
            If a value of the slice goes to two places of the tensor.
        """
        boxes = [item.inverse() for item in self._boxes(name)]
        return AffineMap.of(self.dtype, self.tensors[name], {local_name: self.shape}, {local_name: boxes})

    # ------------------------------------------------------------------ indices

    def canonical_of(self, name: str, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where values of the slice lie in a canonical tensor; -1 for those that are not in it.

        Parameters
        ----------
        positions : ndarray of int64, shape (n,)
            In the slice, in C order.

        Returns
        -------
        ndarray of int64, shape (n,)
            In the tensor, in C order. Of a value that lies there twice, one of the places.
        """
        return _found(self._boxes(name), positions)

    def local_of(self, name: str, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where values of a canonical tensor lie in the slice; -1 for those that it does not hold."""
        return _found([item.inverse() for item in self._boxes(name)], positions)

    def clipped(self, name: str, start: int, stop: int) -> list[Box]:
        """Return the boxes of what the slice holds of a tensor from value `start` to `stop`, by rising place."""
        return merged(found for item in self._boxes(name) for found in clipped(item, start, stop))

    def _boxes(self, name: str) -> tuple[Box, ...]:
        if name not in self.boxes:
            raise InvalidInputError("the slice holds nothing of this tensor", key=name, expected=sorted(self.boxes)[:8])
        return self.boxes[name]

    # ------------------------------------------------------------------ JSON

    def to_bytes(self) -> bytes:
        """Return the document (schema/affine-map.json), canonical JSON."""
        return canonical.encode(self.to_document())

    def to_document(self) -> dict[str, Any]:
        """Return the document, as parts of others have it."""
        rows = [
            {
                "boxes": [
                    {"canonical": b.there, "dims": [list(dim) for dim in b.dims], "local": b.here} for b in boxes
                ],
                "name": name,
                "shape": list(self.tensors[name]),
            }
            for name, boxes in sorted(self.boxes.items())
        ]
        return {"dtype": self.dtype, "format": FORMAT, "shape": list(self.shape), "tensors": rows}

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Self:
        """Read a document; ``FormatError`` with the tensor if it is no map."""
        return cls.from_fields(Fields.of(canonical.decode_object(data, key, FORMAT), key))

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Read a document that is parsed; ``FormatError`` with the tensor if it is no map."""
        key = fields.key
        if fields.text("format") != FORMAT:
            raise FormatError("is a foreign document", key=key, expected=FORMAT, found=fields.text("format"))
        tensors: dict[str, list[int]] = {}
        boxes: dict[str, list[Box]] = {}
        try:
            for index, row in enumerate(fields.objects("tensors")):
                name = row.text("name")
                if name in tensors:
                    raise FormatError(f"names {shown(name)} twice", key=f"{key}#tensors/{index}")
                tensors[name] = _numbers(row.document.get("shape"), row.key)
                boxes[name] = [_read_box(item) for item in row.objects("boxes")]
            shape = _numbers(fields.document.get("shape"), key)
            return cls.of(fields.text("dtype"), shape, tensors, boxes)
        except InvalidInputError as error:
            raise FormatError(f"is no affine map: {error}", key=key) from error


def _read_box(fields: Fields) -> Box:
    dims = fields.document.get("dims")
    if not isinstance(dims, list):
        raise FormatError("field 'dims' is wrong", key=fields.key, expected="a list", found=type(dims).__name__)
    read = [Dim(*row) for row in (_numbers(dim, fields.key) for dim in dims) if len(row) == 3]
    if len(read) != len(dims) or any(dim.n < 2 for dim in read):
        raise FormatError(
            "field 'dims' is wrong", key=fields.key, expected="triples, of two values or more", found=repr(dims)[:80]
        )
    return box(fields.count("local"), fields.count("canonical"), read)


def _numbers(value: object, key: str) -> list[int]:
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_COUNT for item in value):
        return value
    raise FormatError("is no list of sizes", key=key, expected="integers from 0 to 2^53 - 1", found=repr(value)[:80])


def _note(tensors: dict[str, tuple[int, ...]], name: str, shape: tuple[int, ...]) -> None:
    if tensors.setdefault(name, shape) != shape:
        raise InvalidInputError("a tensor has two shapes", key=name, expected=list(tensors[name]), found=list(shape))


def _found(boxes: Iterable[Box], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.full(positions.shape, -1, np.int64)
    for item in boxes:
        np.maximum(found, item.find(positions), out=found)
    return found


def _require_inside(name: str, boxes: Sequence[Box], n_local: int, n_canonical: int) -> None:
    for item in boxes:
        _require_box(name, item)
        if item.here_stop > n_local:
            raise InvalidInputError(
                "a box leaves the slice", key=name, expected=f"{n_local} values", found=f"number {item.here_stop - 1}"
            )
        if item.there_stop > n_canonical:
            raise InvalidInputError(
                "a box leaves the tensor",
                key=name,
                expected=f"{n_canonical} values",
                found=f"number {item.there_stop - 1}",
            )
    if (part := doubled(name, boxes)) is not None:
        raise InvalidInputError(f"the slice has several values for {part}", key=name)


def _require_box(name: str, item: Box) -> None:
    """Refuse a box that ``box`` would not have made."""
    numbers = (item.here, item.there, *(number for dim in item.dims for number in dim))
    if all(type(number) is int and number >= 0 for number in numbers) and all(min(dim) > 0 for dim in item.dims):
        return
    raise InvalidInputError(
        "is no box; make it with dcr_store.layout.boxes.box",
        key=name,
        expected="offsets of 0 or more, sizes and strides of 1 or more",
        found=f"{item}"[:200],
    )


def coverage(maps: Sequence[AffineMap], tensors: Mapping[str, Sequence[int]]) -> Coverage:
    """Return what `maps` hold of `tensors` (name → shape), exactly.

    Raises
    ------
    InvalidInputError
        If a map holds a tensor that is not in `tensors`, or has another shape there.
    """
    held: dict[str, list[Box]] = {name: [] for name in tensors}
    for index, mapped in enumerate(maps):
        for name, boxes in mapped.boxes.items():
            if name not in held:
                raise InvalidInputError(f"slice {index} holds a tensor that is not expected", key=name)
            if tuple(tensors[name]) != mapped.tensors[name]:
                raise InvalidInputError(
                    f"slice {index} holds a tensor of another shape",
                    key=name,
                    expected=list(tensors[name]),
                    found=list(mapped.tensors[name]),
                )
            held[name].extend(boxes)
    return covered(held, {name: math.prod(full) for name, full in tensors.items()})


def holders(maps: Sequence[AffineMap], part: Part) -> list[int]:
    """Return the places of the maps that hold something of a part."""
    return [
        index
        for index, mapped in enumerate(maps)
        if any(clipped(item, part.start, part.stop) for item in mapped.boxes.get(part.tensor, ()))
    ]
