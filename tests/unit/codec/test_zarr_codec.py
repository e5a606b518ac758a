"""`dcr.delta` inside zarr-python: alone, in shards, of any shape."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.registry import get_codec_class
from zarr.storage import MemoryStore

from dcr_store.codec import chunk
from dcr_store.codec.zarr_codec import DcrDelta
from dcr_store.errors import FormatError, InvalidInputError


def make(store: MemoryStore, mask: np.ndarray[Any, Any], **options: Any) -> zarr.Array[Any]:
    return zarr.create_array(
        store,
        shape=mask.shape,
        dtype=mask.dtype,
        fill_value=0,
        filters=None,
        compressors=None,
        serializer=DcrDelta(),
        **options,
    )


def sparse_mask(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(2)
    return np.where(rng.random(shape) < 0.02, rng.choice([1, 3, 200], shape), 0).astype(dtype)


def stored(store: MemoryStore, key: str) -> bytes:
    return store._store_dict[key].to_bytes()


def test_found_through_its_entry_point() -> None:
    assert get_codec_class("dcr.delta") is DcrDelta


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", ">u2"])
def test_alone(dtype: str) -> None:
    mask = sparse_mask((10_000,), dtype)
    store = MemoryStore()
    make(store, mask, chunks=(4096,))[:] = mask
    native = mask.astype(mask.dtype.newbyteorder("="))
    assert stored(store, "c/1") == chunk.encode(native[4096:8192])
    last = np.zeros(4096, native.dtype)
    last[: 10_000 - 8192] = native[8192:]
    assert stored(store, "c/2") == chunk.encode(last)
    opened = zarr.open_array(store, mode="r")
    assert np.array_equal(opened[:], mask)
    assert np.array_equal(opened[4000:9000:7], mask[4000:9000:7])
    metadata = json.loads(stored(store, "zarr.json"))
    assert metadata["codecs"] == [{"name": "dcr.delta", "configuration": {}}]


def test_in_shards() -> None:
    mask = sparse_mask((1 << 14,), np.uint16)
    mask[4096:8192] = 0
    store = MemoryStore()
    make(store, mask, chunks=(1024,), shards=(8192,))[:] = mask
    shard = stored(store, "c/0")
    assert shard.startswith(chunk.encode(mask[:1024]) + chunk.encode(mask[1024:2048]))
    opened = zarr.open_array(store, mode="r")
    assert np.array_equal(opened[:], mask)
    assert np.array_equal(opened[1000:2100], mask[1000:2100])
    inner = json.loads(stored(store, "zarr.json"))["codecs"][0]["configuration"]["codecs"]
    assert inner == [{"name": "dcr.delta", "configuration": {}}]


def test_written_in_part_and_again() -> None:
    mask = sparse_mask((4096,), np.uint32)
    store = MemoryStore()
    array = make(store, mask, chunks=(1024,), shards=(2048,))
    array[100:3000] = mask[100:3000]
    array[3000:3001] = mask[3000:3001]
    expected = np.zeros_like(mask)
    expected[100:3001] = mask[100:3001]
    assert np.array_equal(zarr.open_array(store, mode="r")[:], expected)


def test_several_dimensions_are_taken_row_by_row() -> None:
    mask = sparse_mask((6, 7, 50), np.uint16)
    store = MemoryStore()
    make(store, mask, chunks=(3, 7, 50))[:] = mask
    assert stored(store, "c/0/0/0") == chunk.encode(mask[:3].ravel())
    assert np.array_equal(zarr.open_array(store, mode="r")[:], mask)
    store = MemoryStore()
    fortran = np.asfortranarray(mask)
    make(store, fortran, chunks=(3, 7, 50), config={"order": "F"})[:] = fortran
    assert stored(store, "c/1/0/0") == chunk.encode(np.ascontiguousarray(mask[3:]).ravel())
    assert np.array_equal(zarr.open_array(store, mode="r")[:], mask)


@pytest.mark.parametrize("dtype", ["int16", "float32", "bool", "complex64", "S4", "datetime64[s]"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidInputError, match="store the bits"):
        make(MemoryStore(), np.zeros(8, dtype), chunks=(8,))


def test_unknown_configuration_is_refused() -> None:
    assert DcrDelta.from_dict({"name": "dcr.delta"}) == DcrDelta()
    assert DcrDelta.from_dict(DcrDelta().to_dict()) == DcrDelta()
    for bad in ({"name": "dcr.delta", "configuration": {"level": 3}}, {"name": "bytes", "configuration": {}}):
        with pytest.raises(FormatError, match="newer"):
            DcrDelta.from_dict(bad)


def test_damage_is_an_error_not_zeros() -> None:
    mask = sparse_mask((4096,), np.uint16)
    store = MemoryStore()
    array = make(store, mask, chunks=(4096,))
    array[:] = mask
    data = stored(store, "c/0")
    for bad in (data[:-1], data[:1] + b"\x04" + data[2:], b""):
        store._store_dict["c/0"] = type(store._store_dict["c/0"]).from_bytes(bad)
        with pytest.raises(FormatError):
            array[:]


def test_encoded_length_is_not_fixed() -> None:
    assert not DcrDelta().is_fixed_size
    with pytest.raises(NotImplementedError, match="content"):
        DcrDelta().compute_encoded_size(8, None)  # type: ignore[arg-type]
