"""Round trips of the chunk coding, at its edges and in both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.codec.chunk_cases import BITMAP, CONSTANT, DENSE, DTYPES, RAW, SPARSE, ZERO, big_masks, header, masks, stream

from dcr_store.codec import chunk
from dcr_store.codec.digest import crc64
from dcr_store.errors import FormatError, InvalidInputError


def check_round_trip(what: str, mask: np.ndarray[Any, Any], rng: np.random.Generator) -> bytes:
    n, dtype = len(mask), mask.dtype
    where = np.flatnonzero(mask).astype(np.uint32)
    kept = mask.copy()
    data = chunk.encode(mask)
    assert isinstance(data, bytes)
    assert len(data) <= 8 + mask.nbytes, what
    assert np.array_equal(mask, kept)
    assert chunk.encode_sparse(where, mask[where], n) == data, what
    assert (len(data) == chunk.HEADER_NBYTES and data[0] == chunk.ZERO) == (len(where) == 0)
    decoded = chunk.decode(data, dtype, n)
    assert decoded.dtype == dtype
    assert np.array_equal(decoded, mask), what
    out = rng.integers(0, 255, n).astype(dtype)
    assert chunk.decode(memoryview(bytearray(data)), dtype, n, out=out) is out
    assert np.array_equal(out, mask), what
    positions, values = chunk.decode_sparse(data, dtype, n)
    assert (positions.dtype, values.dtype) == (np.uint32, dtype)
    assert np.array_equal(positions, where), what
    assert np.array_equal(values, mask[where]), what
    base = rng.integers(0, 255, n).astype(dtype)
    bits = base.copy()
    assert chunk.apply(data, bits) == len(where)
    assert np.array_equal(bits, base ^ mask), what
    found, differences = chunk.find_changes(base, bits)
    assert (found.dtype, differences.dtype) == (np.uint32, dtype)
    assert np.array_equal(found, where), what
    assert np.array_equal(differences, mask[where]), what
    assert chunk.apply(data, bits, base) == len(where)
    assert np.array_equal(bits, base), "twice is undone"
    return data


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype: Any, engine: str) -> None:
    rng = np.random.default_rng(1)
    methods = {check_round_trip(what, mask, rng)[0] for what, mask in masks(dtype)}
    assert methods == {ZERO, RAW, DENSE, SPARSE, BITMAP}


def test_round_trip_of_long_chunks(engine: str) -> None:
    rng = np.random.default_rng(1)
    data = {what: check_round_trip(what, mask, rng) for what, mask in big_masks()}
    assert max(len(d) for what, d in data.items() if what.startswith("one change")) < 64
    assert data["1 %"][0] == SPARSE
    assert data["anchor"][0] == DENSE


def test_lengths_that_fill_no_word(engine: str) -> None:
    rng = np.random.default_rng(2)
    for n in range(1, 140):
        for dtype in DTYPES:
            base = rng.integers(0, 4, n).astype(dtype)
            new = rng.integers(0, 4, n).astype(dtype)
            positions, values = chunk.find_changes(base, new)
            assert np.array_equal(positions, np.flatnonzero(base != new))
            assert np.array_equal(values, (base ^ new)[positions])


def test_empty_arrays_do_not_differ(engine: str) -> None:
    positions, values = chunk.find_changes(np.empty(0, np.uint16), np.empty(0, np.uint16))
    assert (len(positions), len(values), values.dtype) == (0, 0, np.uint16)


def test_comparison_is_of_bits() -> None:
    base = np.array([0.0, -0.0, np.nan, 1.0], np.float32)
    new = np.array([-0.0, -0.0, np.nan, 1.0], np.float32)
    new.view(np.uint32)[2] ^= 1  # another payload
    positions, values = chunk.find_changes(base.view(np.uint32), new.view(np.uint32))
    assert positions.tolist() == [0, 2]
    assert values.tolist() == [0x80000000, 1]


def test_unaligned_strided_and_read_only_arrays(engine: str) -> None:
    rng = np.random.default_rng(5)
    n = 4096 + 3
    base = rng.integers(0, 1 << 16, n, np.uint16)
    new = base.copy()
    new[::50] ^= 3
    raw = bytearray(1 + base.nbytes)
    unaligned = np.frombuffer(raw, np.uint16, n, offset=1)
    unaligned[:] = base
    assert not unaligned.flags.aligned
    strided = np.zeros((n, 2), np.uint16)[:, 0]
    strided[:] = base
    locked = base.copy()
    locked.flags.writeable = False
    expected = chunk.find_changes(base, new)
    for array in (unaligned, strided, locked):
        assert all(np.array_equal(a, b) for a, b in zip(chunk.find_changes(array, new), expected, strict=True))
        assert chunk.encode(array) == chunk.encode(base)
    half = np.where(rng.random(n) < 0.5, 3, 0).astype(np.uint16)
    for mask in (base ^ new, half, base, np.full(n, 1, np.uint16)):
        data = chunk.encode(mask)
        for array in (unaligned, strided):
            array[:] = base
            assert chunk.apply(data, array) == np.count_nonzero(mask)
            assert np.array_equal(array, base ^ mask)
        unaligned[:] = 0
        chunk.decode(data, np.uint16, n, out=unaligned)
        assert np.array_equal(unaligned, mask)
    with pytest.raises(InvalidInputError, match="read-only"):
        chunk.apply(chunk.encode(base), locked)


def test_hand_made_chunks_that_the_writer_does_not_make(engine: str) -> None:
    # An escape for a value that has a code; escapes rotated; gaps with needless low bits; constant gaps.
    escaped = header(SPARSE, 1, 64, k=0, mode=1) + b"\x01" + stream(b"\x04") + stream(b"\x03") + stream(b"\x01")
    rotated = (
        header(BITMAP, 1, 64, k=1, mode=1) + b"\x02" + stream(b"\x05" + bytes(7)) + stream(b"\x0d") + stream(b"\x10")
    )
    low = header(SPARSE, 1, 64, k=2) + b"\x02" + stream(b"\x00\x01") + stream(b"\x01\x02") + stream(b"\x05\x06")
    constant = header(SPARSE, 1, 64) + b"\x03" + stream(b"\x02" * 3, CONSTANT) + stream(b"\x09\x07\x09")
    for data, expected in (
        (escaped, {4: 1}),
        (rotated, {0: 3, 2: 8}),
        (low, {1: 5, 8: 6}),
        (constant, {2: 9, 5: 7, 8: 9}),
    ):
        decoded = chunk.decode(data, np.uint8, 64)
        assert {i: int(decoded[i]) for i in np.flatnonzero(decoded)} == expected


def test_arguments_are_checked(engine: str) -> None:
    good = np.ones(4, np.uint16)
    for bad in (good.astype(np.int16), good.astype(np.float16), good.reshape(2, 2), good.astype(">u2"), good[:0]):
        with pytest.raises(InvalidInputError):
            chunk.encode(bad)
    u32 = np.array([0, 3], np.uint32)
    two = good[:2]
    for positions, values, n in (
        (u32.astype(np.int64), two, 4),
        (u32, good, 4),
        (u32, two, 3),
        (u32[::-1], two, 4),
        (np.array([1, 1], np.uint32), two, 4),
        (u32, two * 0, 4),
        (u32[:0], two[:0], 0),
        (u32, two, 1 << 32),
    ):
        with pytest.raises(InvalidInputError):
            chunk.encode_sparse(positions, values, n)
    with pytest.raises(InvalidInputError):
        chunk.find_changes(good, good[:3])
    with pytest.raises(InvalidInputError):
        chunk.find_changes(good, good.astype(np.uint8))
    data = chunk.encode(good)
    for dtype in (np.int16, np.float32, np.dtype(">u2")):
        with pytest.raises(InvalidInputError):
            chunk.decode(data, dtype, 4)
    for out in (np.empty(3, np.uint16), np.empty(4, np.uint32), np.empty(8, np.uint16)[::2]):
        with pytest.raises(InvalidInputError):
            chunk.decode(data, np.uint16, 4, out=out)
    for bits in (np.zeros((2, 2), np.uint16), np.zeros(4, np.int16)):
        with pytest.raises(InvalidInputError):
            chunk.apply(data, bits)


def test_chunk_of_another_array_is_refused(engine: str) -> None:
    data = chunk.encode(np.arange(64, dtype=np.uint16))
    for dtype, n in ((np.uint8, 128), (np.uint16, 63), (np.uint16, 65), (np.uint32, 64)):
        with pytest.raises(FormatError, match="expected"):
            chunk.decode(data, dtype, n)


def test_encoding_is_deterministic() -> None:
    for _, mask in big_masks():
        assert chunk.encode(mask) == chunk.encode(mask.copy())


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("n_elements", [0, 1, 1 << 16, (1 << 20) + 5])
def test_compare_finds_and_digests(dtype: str, n_elements: int) -> None:
    rng = np.random.default_rng(n_elements)
    new = rng.integers(0, np.iinfo(dtype).max, n_elements, dtype)
    base = new.copy()
    base[:: n_elements // 9 + 1] ^= np.array(5, dtype)
    positions, masks, digest = chunk.compare(base, new)
    wanted = np.flatnonzero(base != new)
    assert np.array_equal(positions, wanted)
    assert np.array_equal(masks, (base ^ new)[wanted])
    assert digest == crc64(new.tobytes())


def test_compare_refuses_a_longer_base() -> None:
    with pytest.raises(InvalidInputError, match="do not fit"):
        chunk.compare(np.zeros(1 << 19, np.uint8), np.zeros(1 << 18, np.uint8))
