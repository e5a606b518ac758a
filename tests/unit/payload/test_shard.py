"""Shards by hand against zarr-python: byte-identical, both ways, and damaged ones refused."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from dcr_store.codec.digest import crc32c
from dcr_store.codec.portable import get_codec
from dcr_store.errors import IntegrityError
from dcr_store.payload import arrays, shard

CHUNK, PER = 64, 4
UINTS = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64}


def in_store(files: dict[str, bytes]) -> MemoryStore:
    buffers = {key: default_buffer_prototype().buffer.from_bytes(data) for key, data in files.items()}
    return MemoryStore(buffers)


def out_of(store: MemoryStore) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        found = {}
        async for key in store.list():
            buffer = await store.get(key, default_buffer_prototype())
            assert buffer is not None
            found[key] = buffer.to_bytes()
        return found

    return asyncio.run(read())


def some(space: str, n: int, density: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 256, n * UINTS[space]().itemsize, np.uint8).view(UINTS[space])
    return np.where(rng.random(n) < density, bits, 0).astype(UINTS[space])


def by_hand(array: str, dense: np.ndarray, codec_name: str) -> dict[str, bytes]:
    """Return the objects of an array as this package stores it."""
    codec = get_codec(codec_name)
    files = {"zarr.json": arrays.payload_metadata(array, len(dense), CHUNK, PER * CHUNK, codec_name)}
    whole = np.concatenate([dense, np.zeros(-len(dense) % CHUNK, dense.dtype)])
    pieces = [whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK)]
    for index in range(-(-len(pieces) // PER)):
        mine = pieces[index * PER : (index + 1) * PER]
        encoded = {place: codec.encode(piece) for place, piece in enumerate(mine) if piece.any()}
        if encoded:
            files[f"c/{index}"] = shard.assemble(encoded, PER)
    return files


CASES = [
    (space, codec, n, density)
    for space in UINTS
    for codec in ("dcr.delta", "portable")
    for n, density in (
        (CHUNK, 0.5),
        (3 * CHUNK + 1, 0.02),
        (10 * CHUNK, 0.004),
        (9 * CHUNK + 32, 1.0),
        (5, 1.0),
        (700, 0),
    )
]


@pytest.mark.parametrize(("space", "codec", "n", "density"), CASES)
def test_zarr_reads_what_is_assembled(space: str, codec: str, n: int, density: float) -> None:
    dense = some(space, n, density)
    found = zarr.open_array(in_store(by_hand(f"{space}/mask", dense, codec)), mode="r")
    assert found.dtype == dense.dtype
    assert found.shape == (n,)
    assert found.shards == (PER * CHUNK,)
    assert found.chunks == (CHUNK,)
    np.testing.assert_array_equal(found[:], dense)
    np.testing.assert_array_equal(found[n // 3 : n // 2], dense[n // 3 : n // 2])


@pytest.mark.parametrize(("space", "codec", "n", "density"), CASES)
def test_zarr_writes_the_same_bytes(space: str, codec: str, n: int, density: float) -> None:
    dense = some(space, n, density)
    expected = by_hand(f"{space}/mask", dense, codec)
    store = in_store({"zarr.json": expected["zarr.json"]})
    zarr.open_array(store, mode="r+")[:] = dense
    found = out_of(store)
    assert set(found) == set(expected)
    for key, data in found.items():
        if key != "zarr.json":
            assert data == expected[key], key


@pytest.mark.parametrize(("space", "codec", "n", "density"), CASES)
def test_what_zarr_writes_is_parsed(space: str, codec: str, n: int, density: float) -> None:
    dense = some(space, n, density)
    store = in_store({"zarr.json": arrays.payload_metadata(f"{space}/value", n, CHUNK, PER * CHUNK, codec)})
    zarr.open_array(store, mode="r+")[:] = dense
    whole = np.zeros(-(-n // CHUNK) * CHUNK, dense.dtype)
    for key, data in out_of(store).items():
        if key == "zarr.json":
            continue
        index = int(key.removeprefix("c/"))
        for place, encoded in shard.parse(data, PER, key).items():
            first = (index * PER + place) * CHUNK
            get_codec(codec).decode(encoded, dense.dtype, CHUNK, whole[first : first + CHUNK])
    np.testing.assert_array_equal(whole[:n], dense)
    assert not whole[n:].any()


@pytest.mark.parametrize("codec", ["dcr.delta", "portable"])
def test_metadata_is_what_zarr_makes_of_it(codec: str) -> None:
    """zarr-python parses the metadata and writes them back with the same meaning."""
    for array, width in (("u8/mask", 1), ("u64/value", 8), ("u32/present", 1), ("u16/mask", 2)):
        data = arrays.payload_metadata(array, 320, CHUNK, 2 * CHUNK, codec)
        document = json.loads(data)
        opened = zarr.open_array(in_store({"zarr.json": data}), mode="r")
        if width > 1:  # of single bytes zarr-python leaves the order out
            assert json.loads(json.dumps(opened.metadata.to_dict(), default=str))["codecs"] == document["codecs"]
        assert opened.dtype.itemsize == width
        assert opened.fill_value == 0
    table = zarr.open_array(
        in_store({"zarr.json": arrays.table_metadata(3), "c/0": np.arange(3, dtype="<u8").tobytes()}), mode="r"
    )
    assert table[:].tolist() == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.data())
def test_round_trip(n_chunks: int, data: st.DataObject) -> None:
    places = sorted(data.draw(st.sets(st.integers(0, n_chunks - 1))))
    chunks = {place: data.draw(st.binary(min_size=1, max_size=9)) for place in places}
    blob = shard.assemble(chunks, n_chunks)
    assert len(blob) == sum(map(len, chunks.values())) + shard.index_nbytes(n_chunks)
    parsed = shard.parse(blob, n_chunks, "k")
    assert {place: bytes(chunk) for place, chunk in parsed.items()} == chunks


class TestDamage:
    blob = shard.assemble({0: b"abc", 2: b"defgh"}, 4)

    def test_every_bit_of_the_index_counts(self) -> None:
        for i in range(8 * (len(self.blob) - shard.index_nbytes(4)), 8 * len(self.blob)):
            damaged = bytearray(self.blob)
            damaged[i // 8] ^= 1 << i % 8
            with pytest.raises(IntegrityError, match="index is damaged") as caught:
                shard.parse(bytes(damaged), 4, "some/key")
            assert caught.value.key == "some/key"

    def test_every_truncation_is_refused(self) -> None:
        for n in range(len(self.blob)):
            with pytest.raises(IntegrityError):
                shard.parse(self.blob[:n], 4, "k")

    @pytest.mark.parametrize("n_chunks", [1, 3, 5, 1 << 40])
    def test_another_number_of_chunks(self, n_chunks: int) -> None:
        with pytest.raises(IntegrityError):
            shard.parse(self.blob, n_chunks, "k")

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(0, 9), (8, 1), (2**64 - 2, 1), (1, 2**64 - 1), (2**63, 2**63), (2**64 - 1, 0), (0, 2**64 - 1)],
    )
    def test_ranges_outside_are_refused(self, offset: int, nbytes: int) -> None:
        """Also where the sum of the two wraps in 64 bits."""
        table = np.array([[offset, nbytes]], "<u8").tobytes()
        blob = b"abcdefgh" + table + crc32c(table).to_bytes(4, "little")
        with pytest.raises(IntegrityError, match="points outside, at chunk 0"):
            shard.parse(blob, 1, "k")
