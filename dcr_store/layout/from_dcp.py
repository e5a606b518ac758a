"""Affine maps of the chunks of a torch distributed checkpoint (DCP), from its ``Metadata``.

The metadata names each tensor, its dtype and size, and the rectangular chunks in which it is stored. Refuses chunks
that leave their tensor, overlap, or leave holes. torch is not imported: the caller has read the metadata with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap, coverage, holders
from dcr_store.layout.slices import part
from dcr_store.layout.tensors import name_of_torch_dtype

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Chunks:
    """What a distributed checkpoint stores.

    Attributes
    ----------
    tensors : mapping of str to (str, tuple of int)
        Dtype and shape of each tensor, by its fully qualified name, in the order of the metadata.
    maps : mapping of str to tuple of AffineMap
        For each, the maps of its chunks, in the order of ``TensorStorageMetadata.chunks``: they hold each value once.
    others : tuple of str
        The names of entries that are no tensors (pickled objects); they have no map.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    maps: Mapping[str, tuple[AffineMap, ...]]
    others: tuple[str, ...]


def maps_of_dcp(metadata: Metadata) -> Chunks:
    """Return the maps of all chunks of a distributed checkpoint.

    Parameters
    ----------
    metadata : torch.distributed.checkpoint.Metadata
        As ``FileSystemReader(path).read_metadata()`` returns it.

    Raises
    ------
    InvalidInputError
        If it is no metadata, or a tensor's dtype has no map, or its chunks leave it, overlap, or leave holes; names the
        tensor.
    """
    if not hasattr(metadata, "state_dict_metadata"):
        raise InvalidInputError(
            "is no metadata of a distributed checkpoint; read it first, with FileSystemReader(path).read_metadata()",
            key="metadata",
            expected="a Metadata",
            found=type(metadata).__name__,
        )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    maps: dict[str, tuple[AffineMap, ...]] = {}
    others: list[str] = []
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks") and hasattr(entry, "properties"):
            tensors[name], maps[name] = _read(name, entry)
        else:
            others.append(name)
    return Chunks(tensors, maps, tuple(others))


def _read(name: str, entry: Any) -> tuple[tuple[str, tuple[int, ...]], tuple[AffineMap, ...]]:
    dtype = name_of_torch_dtype(name, entry.properties.dtype)
    shape = _ints(entry.size)
    maps = tuple(part(name, dtype, shape, _ints(chunk.offsets), _ints(chunk.sizes)) for chunk in entry.chunks)
    covered = coverage(maps, {name: shape})
    for what, n, parts in (
        ("overlap", covered.n_doubled, covered.doubled),
        ("leave holes", covered.n_missing, covered.missing),
    ):
        if n:
            at = [f"{_ints(c.sizes)} at {_ints(c.offsets)}" for c in (entry.chunks[i] for i in holders(maps, parts[0]))]
            raise InvalidInputError(
                f"chunks of the checkpoint {what}; save it again",
                key=name,
                expected=f"each value of {list(shape)} once",
                found=f"{n} otherwise, first {parts[0]}" + (f" in {' and '.join(at[:2])}" if at else ""),
            )
    return (dtype, shape), maps


def _ints(sizes: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)
