"""What changed between two versions, tensor by tensor: counts, rates, the largest step, bytes. Bits decide.

Both states are laid out in a temporary directory, so memory stays bounded whatever their size. A change is measured in
units of last place: how many values of the dtype lie between old and new, -0.0 and NaNs counted in their order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dcr_store import events
from dcr_store.codec.chunk import find_changes
from dcr_store.codec.portable import get_codec
from dcr_store.layout.dtypes import DTYPES, Bits, uint_dtype, width
from dcr_store.layout.layout import TensorEntry
from dcr_store.targets.space_file import SpaceFiles
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import everywhere, replay
from dcr_store.versions.route import route

Status = Literal["changed", "same", "added", "removed", "altered"]
_SIGNED: Final = ("I8", "I16", "I32", "I64")
_UNSIGNED: Final = ("BOOL", "U8", "U16", "U32", "U64", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor.

    Attributes
    ----------
    status : str
        ``changed``, ``same``, ``added``, ``removed`` or ``altered`` (another dtype or shape).
    changed, elements : int
        Elements whose bits differ, and all.
    rate : float
        changed / elements.
    largest_ulp : int or None
        The largest change in units of last place; None for packed dtypes, and where nothing can be compared.
    nbytes : int
        What the change of this tensor takes, encoded.
    """

    name: str
    status: Status
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    rate: float
    largest_ulp: int | None
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "status": self.status,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "elements": self.elements,
            "changed": self.changed,
            "rate": self.rate,
            "largest_ulp": self.largest_ulp,
            "nbytes": self.nbytes,
        }


@dataclass(frozen=True, slots=True)
class Diff:
    """All tensors of two versions, in the order of the second; removed ones last."""

    a: str
    b: str
    tensors: list[TensorDiff]

    @property
    def changed(self) -> int:
        """Elements that differ."""
        return sum(item.changed for item in self.tensors)

    @property
    def elements(self) -> int:
        """All elements."""
        return sum(item.elements for item in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "a": self.a,
            "b": self.b,
            "changed": self.changed,
            "elements": self.elements,
            "tensors": [item.to_json() for item in self.tensors],
        }


def diff(catalog: Catalog, a: Located, b: Located) -> Diff:
    """Compare version `a` with version `b`."""
    old, new = catalog.layout(a.row.layout), catalog.layout(b.row.layout)
    with tempfile.TemporaryDirectory(prefix="dcr-diff-") as directory:
        bits_a = _laid_out(catalog, a, f"{directory}/a")
        bits_b = bits_a if a.row.root == b.row.root else _laid_out(catalog, b, f"{directory}/b")
        tensors = []
        total, done = sum(entry.n_elements * width(entry.space) for entry in new.tensors), 0
        for entry in new.tensors:
            other = old.find(entry.name)
            done += entry.n_elements * width(entry.space)
            events.progress(f"diff {a.name} {b.name}", done, total)
            if other is None:
                tensors.append(_whole(entry, "added"))
            elif (other.dtype, other.shape) != (entry.dtype, entry.shape):
                tensors.append(_whole(entry, "altered"))
            else:
                tensors.append(_compare(catalog, entry, bits_a, other.start, bits_b))
        tensors += [_whole(entry, "removed") for entry in old.tensors if new.find(entry.name) is None]
        bits_a.close()
        bits_b.close()
    return Diff(a.name, b.name, tensors)


def _laid_out(catalog: Catalog, located: Located, directory: str) -> SpaceFiles:
    """Return the state of a version in flat files."""
    path = route(catalog, located).path
    files = SpaceFiles(directory, catalog.layout(located.row.layout), path.chunk_elements, create=True)
    replay(catalog.objects, path, files, everywhere(path, ZERO))
    return files


def _whole(entry: TensorEntry, status: Status) -> TensorDiff:
    n = entry.n_elements
    return TensorDiff(entry.name, status, entry.dtype, entry.shape, n, n, 1.0 if n else 0.0, None, 0)


def _compare(catalog: Catalog, entry: TensorEntry, a: SpaceFiles, start_a: int, b: SpaceFiles) -> TensorDiff:
    changed, nbytes = 0, 0
    largest: int | None = None
    codec = get_codec(catalog.document.codec)
    for first, last in _blocks(entry.n_elements, catalog.document.chunk_elements):
        old = a.elements(entry.space, start_a + first, start_a + last)
        new = b.elements(entry.space, entry.start + first, entry.start + last)
        positions, masks = find_changes(old, new)
        if len(positions):
            changed += len(positions)
            nbytes += len(codec.encode_sparse(positions, masks, last - first))
            step = largest_step(entry.dtype, old[positions], new[positions])
            largest = step if largest is None or step is None else max(largest, step)
    status: Status = "changed" if changed else "same"
    if (
        not changed
        and DTYPES[entry.dtype].space
        and _ordered(entry.dtype, np.empty(0, uint_dtype(entry.space))) is not None
    ):
        largest = 0
    rate = changed / entry.n_elements if entry.n_elements else 0.0
    return TensorDiff(entry.name, status, entry.dtype, entry.shape, entry.n_elements, changed, rate, largest, nbytes)


def _blocks(n_elements: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n_elements, step):
        yield start, min(start + step, n_elements)


def largest_step(dtype: str, old: Bits, new: Bits) -> int | None:
    """Return the largest distance between `old` and `new` in units of last place.

    Parameters
    ----------
    dtype : str
        As in the layout.
    old, new : ndarray of uintN, shape (n,)
        Bits of elements.

    Returns
    -------
    int or None
        None for packed dtypes, whose elements hold several values.
    """
    a, b = _ordered(dtype, old), _ordered(dtype, new)
    if a is None or b is None:
        return None
    return int((np.maximum(a, b) - np.minimum(a, b)).max(initial=0))


def _ordered(dtype: str, bits: Bits) -> NDArray[np.unsignedinteger] | None:
    """Return unsigned integers in the order of the values that `bits` are; neighbouring values differ by 1."""
    if dtype in _UNSIGNED:
        return bits
    if dtype in ("F4", "F6_E2M3", "F6_E3M2"):
        return None
    lanes = bits.view(np.uint32) if dtype == "C64" else bits
    sign = lanes.dtype.type(1 << (8 * lanes.dtype.itemsize - 1))
    if dtype in _SIGNED:
        return lanes ^ sign
    return np.where(lanes & sign, ~lanes, lanes | sign)
