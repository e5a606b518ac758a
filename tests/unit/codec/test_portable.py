"""The codecs by name; portable chunks are byte for byte what Zarr's own codecs make."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from unit.codec.chunk_cases import DTYPES, big_masks, masks
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.core.dtype import parse_dtype
from zarr.registry import get_codec_class

from dcr_store.codec import chunk
from dcr_store.codec.portable import get_codec
from dcr_store.errors import FormatError, InvalidInputError

PORTABLE = get_codec("portable")


def test_names() -> None:
    assert get_codec("dcr.delta").name == "dcr.delta"
    assert PORTABLE.name == "portable"
    with pytest.raises(FormatError, match=r"expected dcr\.delta or portable, found 'zip'"):
        get_codec("zip")


def test_delta_is_the_chunk_coding() -> None:
    codec = get_codec("dcr.delta")
    mask = np.array([0, 1, 0, 9], np.uint16)
    assert codec.encode(mask) == codec.encode_sparse(np.array([1, 3], np.uint32), mask[[1, 3]], 4) == chunk.encode(mask)
    assert codec.decode(codec.encode(mask), np.uint16, 4).tolist() == mask.tolist()
    assert codec.decode_sparse(codec.encode(mask), np.uint16, 4)[0].tolist() == [1, 3]
    assert codec.apply(codec.encode(mask), mask) == 2
    assert not mask.any()
    assert codec.zarr_inner_codecs(8) == [{"name": "dcr.delta", "configuration": {}}]


def test_portable_metadata_is_that_of_the_spec() -> None:
    settings = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": 4, "blocksize": 524288}
    assert PORTABLE.zarr_inner_codecs(4) == [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "blosc", "configuration": settings},
    ]


def zarr_pipeline(codec: Any, mask: np.ndarray[Any, Any]) -> tuple[BatchedCodecPipeline, ArraySpec]:
    """The codecs that the metadata names, as Zarr runs them."""
    dtype = parse_dtype(mask.dtype, zarr_format=3)
    spec = ArraySpec(
        mask.shape, dtype, dtype.to_native_dtype().type(0), ArrayConfig("C", True), default_buffer_prototype()
    )
    codecs = [get_codec_class(entry["name"]).from_dict(entry) for entry in codec.zarr_inner_codecs(mask.itemsize)]
    return BatchedCodecPipeline.from_codecs([c.evolve_from_array_spec(spec) for c in codecs]), spec


def zarr_encode(codec: Any, mask: np.ndarray[Any, Any]) -> bytes:
    pipeline, spec = zarr_pipeline(codec, mask)
    buffer = spec.prototype.nd_buffer.from_numpy_array(mask)
    (encoded,) = asyncio.run(pipeline.encode([(buffer, spec)]))
    assert encoded is not None
    return encoded.to_bytes()


def zarr_decode(codec: Any, data: bytes, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    pipeline, spec = zarr_pipeline(codec, mask)
    (decoded,) = asyncio.run(pipeline.decode([(spec.prototype.buffer.from_bytes(data), spec)]))
    assert decoded is not None
    return decoded.as_numpy_array()


@pytest.mark.parametrize("name", ["dcr.delta", "portable"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zarr_makes_and_reads_the_same_bytes(name: str, dtype: Any) -> None:
    codec = get_codec(name)
    cases = [case for case in masks(dtype) if len(case[1]) in (5, 1000, 20_001)]
    for what, mask in cases + (list(big_masks()) if dtype == np.uint16 else []):
        data = codec.encode(mask)
        assert data == zarr_encode(codec, mask), what
        assert np.array_equal(zarr_decode(codec, data, mask), mask), what


@pytest.mark.parametrize("dtype", DTYPES)
def test_portable_round_trip(dtype: Any, engine: str) -> None:
    for what, mask in masks(dtype):
        n = len(mask)
        where = np.flatnonzero(mask).astype(np.uint32)
        data = PORTABLE.encode(mask)
        assert PORTABLE.encode_sparse(where, mask[where], n) == data, what
        assert np.array_equal(PORTABLE.decode(data, dtype, n), mask), what
        out = np.empty(n, dtype)
        assert PORTABLE.decode(memoryview(data), dtype, n, out=out) is out
        assert np.array_equal(out, mask), what
        positions, values = PORTABLE.decode_sparse(data, dtype, n)
        assert np.array_equal(positions, where), what
        assert np.array_equal(values, mask[where]), what
        bits = np.arange(n).astype(dtype)
        assert PORTABLE.apply(data, bits) == len(where)
        assert np.array_equal(bits, np.arange(n).astype(dtype) ^ mask), what


def test_portable_refuses_chunks_that_lie() -> None:
    mask = np.zeros(4096, np.uint16)
    mask[::7] = 5
    data = PORTABLE.encode(mask)
    longer = data[:4] + (1 << 30).to_bytes(4, "little") + data[8:]
    cases = {
        b"": "not a blosc chunk",
        data[:15]: "not a blosc chunk",
        b"\x03" + data[1:]: "not a blosc chunk",
        data[:-1]: "another length",
        data + b"\x00": "another length",
        longer: "another length",
        data[:16] + b"\xff" * (len(data) - 16): "damaged",
    }
    for bad, reason in cases.items():
        bits = np.ones(4096, np.uint16)
        with pytest.raises(FormatError, match=reason) as caught:
            PORTABLE.apply(bad, bits)
        assert (bits == 1).all()
        assert caught.value.expected is not None
        with pytest.raises(FormatError):
            PORTABLE.decode_sparse(bad, np.uint16, 4096)
    for dtype, n in ((np.uint16, 4095), (np.uint8, 4096), (np.uint32, 4096)):
        with pytest.raises(FormatError, match="another length"):
            PORTABLE.decode(data, dtype, n)


def test_portable_checks_arguments() -> None:
    good = np.ones(4, np.uint16)
    data = PORTABLE.encode(good)
    with pytest.raises(InvalidInputError):
        PORTABLE.encode(good.astype(np.float16))
    with pytest.raises(InvalidInputError):
        PORTABLE.encode_sparse(np.array([4], np.uint32), good[:1], 4)
    with pytest.raises(InvalidInputError):
        PORTABLE.decode(data, np.int16, 4)
    with pytest.raises(InvalidInputError):
        PORTABLE.decode(data, np.uint16, 4, out=np.empty(5, np.uint16))
    locked = good.copy()
    locked.flags.writeable = False
    with pytest.raises(InvalidInputError):
        PORTABLE.apply(data, locked)
    strided = np.zeros((4, 2), np.uint16)[:, 0]
    assert PORTABLE.apply(data, strided) == 4
    assert strided.tolist() == [1] * 4
