"""Encoding against a base: proven to decode, digests by linearity, tables that refuse a baseline that drifted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_store.codec.digest import crc64, zeros_digest
from dcr_store.codec.portable import Codec, get_codec
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import uint_dtype
from dcr_store.publish.chunk_encoding import encode_anchor, encode_delta
from dcr_store.publish.committing import new_tables

SIZE = 64


def bits(space: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2 ** (8 * uint_dtype(space).itemsize) - 1, SIZE, np.uint64).astype(uint_dtype(space))


@pytest.mark.parametrize("name", ["dcr.delta", "portable"])
@pytest.mark.parametrize("space", SPACES)
def test_delta(name: str, space: str) -> None:
    codec, base = get_codec(name), bits(space, 0)
    new = base.copy()
    new[[3, 40]] ^= 1
    found = encode_delta(codec, space, 7, base, crc64(base), new.copy())
    assert found is not None
    assert (found.space, found.chunk, found.n_changed) == (space, 7, 2)
    assert (found.base, found.new) == (crc64(base), crc64(new))
    assert found.data is not None
    applied = base.copy()
    codec.apply(found.data, applied)
    np.testing.assert_array_equal(applied, new)


@pytest.mark.parametrize("space", SPACES)
def test_nothing_changed(space: str) -> None:
    base = bits(space, 0)
    digest = crc64(base)
    found = encode_delta(get_codec("dcr.delta"), space, 0, base, digest, base.copy())
    assert found is not None
    assert (found.data, found.n_changed, found.base, found.new) == (None, 0, digest, digest)


@pytest.mark.parametrize("n_changes", [0, 5])
@pytest.mark.parametrize("name", ["dcr.delta", "portable"])
def test_a_base_that_is_not_the_base(name: str, n_changes: int) -> None:
    """Nothing is encoded against it, and the new bits are still there."""
    base = bits("u16", 0)
    new = base.copy()
    new[:n_changes] ^= 3
    kept = new.copy()
    assert encode_delta(get_codec(name), "u16", 0, base, crc64(base) ^ 1, new) is None
    np.testing.assert_array_equal(new, kept)


@pytest.mark.parametrize("name", ["dcr.delta", "portable"])
@pytest.mark.parametrize("space", SPACES)
def test_anchor(name: str, space: str) -> None:
    codec, new = get_codec(name), bits(space, 1)
    found = encode_anchor(codec, space, 0, new)
    assert (found.base, found.new) == (zeros_digest(new.nbytes), crc64(new))
    assert found.data is not None
    np.testing.assert_array_equal(codec.decode(found.data, new.dtype, SIZE), new)
    nothing = encode_anchor(codec, space, 0, np.zeros_like(new))
    assert (nothing.data, nothing.new) == (None, zeros_digest(new.nbytes))


class Unfaithful:
    """Decodes to something else than was encoded: broken memory."""

    def __init__(self, codec: Codec, where: str) -> None:
        self._codec, self._where = codec, where

    def __getattr__(self, name: str) -> object:
        return getattr(self._codec, name)

    def decode(self, *arguments: object) -> object:
        found = self._codec.decode(*arguments).copy()  # type: ignore[arg-type]
        found[0] ^= 1
        return found

    def apply(self, data: bytes, bits: np.ndarray) -> int:
        bits[0] ^= 1
        return self._codec.apply(data, bits)

    def decode_sparse(self, *arguments: object) -> object:
        positions, values = self._codec.decode_sparse(*arguments)  # type: ignore[arg-type]
        if self._where == "positions":
            return positions + 1, values
        return positions, values + 1


@pytest.mark.parametrize("where", ["positions", "values"])
def test_what_does_not_decode_to_itself_is_not_published(where: str) -> None:
    codec = Unfaithful(get_codec("dcr.delta"), where)
    base = bits("u16", 0)
    with pytest.raises(IntegrityError, match="chunk 5 of u16 does not decode to what was encoded"):
        encode_delta(codec, "u16", 5, base, crc64(base), base ^ np.uint16(1))  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match="does not decode"):
        encode_anchor(codec, "u16", 5, base)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_tables_follow_from_contributions(seed: int, n_writers: int) -> None:
    """Several writers' masks, XORed into the base's table, give the digests of the state."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 2**16, 4 * SIZE).astype(np.uint16)
    zero = zeros_digest(2 * SIZE)
    owner = rng.integers(0, n_writers, base.size)
    mask = np.where(rng.random(base.size) < 0.1, rng.integers(1, 2**16, base.size), 0).astype(np.uint16)
    table = np.array([crc64(base[i : i + SIZE]) for i in range(0, base.size, SIZE)], np.uint64)
    whole = {s: np.empty((0, 4), np.uint64) for s in SPACES}
    # One writer's rows carry the base bits of all: the sole writer's case that this release writes.
    rows = []
    for i in range(4):
        part = mask[i * SIZE : (i + 1) * SIZE]
        linear = 0
        for writer in range(n_writers):
            mine = np.where(owner[i * SIZE : (i + 1) * SIZE] == writer, part, 0).astype(np.uint16)
            linear ^= crc64(mine) ^ zero
        if part.any():
            rows.append((i, linear, 0, int(table[i]) ^ zero))
    whole["u16"] = np.array(rows, np.uint64).reshape(len(rows), 4)
    lengths = {"u8": 0, "u16": base.size, "u32": 0, "u64": 0}
    found = new_tables(lengths, {s: table if s == "u16" else np.empty(0, np.uint64) for s in SPACES}, whole, SIZE)
    new = base ^ mask
    assert found["u16"].tolist() == [crc64(new[i : i + SIZE]) for i in range(0, new.size, SIZE)]


def test_a_baseline_that_drifted_is_refused() -> None:
    base = bits("u16", 0)
    zero = zeros_digest(base.nbytes)
    table = {s: np.array([crc64(base)], np.uint64) if s == "u16" else np.empty(0, np.uint64) for s in SPACES}
    rows = {s: np.empty((0, 4), np.uint64) for s in SPACES}
    other = base.copy()
    other[9] ^= 4
    rows["u16"] = np.array([(0, 5, 0, crc64(other) ^ zero)], np.uint64)
    with pytest.raises(IntegrityError, match="the baseline is not the base in chunk 0 of u16") as caught:
        new_tables({"u8": 0, "u16": SIZE, "u32": 0, "u64": 0}, table, rows, SIZE)
    assert (caught.value.expected, caught.value.found) == (f"{crc64(base):016x}", f"{crc64(other):016x}")


def test_an_anchor_starts_from_zeros() -> None:
    new = bits("u64", 3)
    zero = zeros_digest(new.nbytes)
    rows = {s: np.empty((0, 4), np.uint64) for s in SPACES}
    rows["u64"] = np.array([(1, crc64(new) ^ zero, 0, 0)], np.uint64)
    found = new_tables({"u8": 0, "u16": 0, "u32": 0, "u64": 3 * SIZE}, None, rows, SIZE)
    assert found["u64"].tolist() == [zero, crc64(new), zero]
