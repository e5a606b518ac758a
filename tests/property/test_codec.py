"""Properties of the chunk coding and the digests, over arbitrary masks and arbitrary bytes, in both engines."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcr_store.codec import chunk, kernels
from dcr_store.codec.digest import crc64, linear
from dcr_store.codec.portable import get_codec
from dcr_store.errors import FormatError

ENGINES = [name for name in ("numpy", "numba") if importlib.util.find_spec(name)]
DTYPES = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


@st.composite
def bits(draw: st.DrawFn, dtype: Any = None, n: int | None = None) -> np.ndarray[Any, Any]:
    """A chunk of any density and clustering, most values small, some arbitrary."""
    dtype = draw(DTYPES) if dtype is None else dtype
    n = draw(st.integers(1, 3000)) if n is None else n
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    density = draw(st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.7, 0.97, 1.0]))
    row = draw(st.sampled_from([1, 1, 7, 64, 500]))
    where = np.repeat(rng.random(-(-n // row)) < density, row)[:n]
    small = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    top = int(np.iinfo(dtype).max) >> draw(st.integers(0, 7))
    arbitrary = rng.integers(0, top, n, dtype=np.uint64, endpoint=True)
    values = np.where(rng.random(n) < small, rng.choice([1, 1, 3, 7], n), arbitrary).astype(dtype)
    mask = np.where(where, values, 0).astype(dtype)
    for position in draw(st.lists(st.integers(0, n - 1), max_size=4)):
        mask[position] = draw(st.integers(0, int(np.iinfo(dtype).max)))
    return mask


def decoded(data: bytes, mask: np.ndarray[Any, Any]) -> bytes | str:
    """What a chunk decodes to, the same by all ways, or why it does not."""
    n, dtype = len(mask), mask.dtype
    base = np.arange(n).astype(dtype)
    target = base.copy()
    try:
        whole = chunk.decode(data, dtype, n)
    except FormatError as error:
        with pytest.raises(FormatError):
            chunk.decode_sparse(data, dtype, n)
        with pytest.raises(FormatError):
            chunk.apply(data, target)
        assert np.array_equal(target, base), "touched by a chunk that was refused"
        return str(error)
    positions, values = chunk.decode_sparse(data, dtype, n)
    assert np.array_equal(positions, np.flatnonzero(whole))
    assert np.array_equal(values, whole[positions])
    assert chunk.apply(data, target) == len(positions)
    assert np.array_equal(target, base ^ whole)
    return whole.tobytes()


@settings(max_examples=150, deadline=None)
@given(bits())
@example(np.array([1], np.uint8))
@example(np.full(64, 0x8000, np.uint16))
def test_round_trip(mask: np.ndarray[Any, Any]) -> None:
    made = set()
    where = np.flatnonzero(mask).astype(np.uint32)
    try:
        for engine in ENGINES:
            kernels.use_engine(engine)
            made |= {chunk.encode(mask), chunk.encode_sparse(where, mask[where], len(mask))}
            (data,) = made
            assert len(data) <= 8 + mask.nbytes
            assert decoded(data, mask) == mask.tobytes()
            positions, values = chunk.find_changes(mask[::-1].copy(), mask[::-1] ^ mask)
            assert np.array_equal(positions, where)
            assert np.array_equal(values, mask[where])
    finally:
        kernels.use_engine("auto")
    portable = get_codec("portable")
    assert np.array_equal(portable.decode(portable.encode(mask), mask.dtype, len(mask)), mask)


@settings(max_examples=150, deadline=None)
@given(mask=bits(), data=st.data())
def test_damaged_chunks(mask: np.ndarray[Any, Any], data: st.DataObject) -> None:
    damaged = bytearray(chunk.encode(mask))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        how = data.draw(st.sampled_from(["flip", "replace", "insert", "delete", "cut"]))
        byte = data.draw(st.integers(0, 255))
        if how == "flip":
            damaged[at] ^= 1 << byte % 8
        elif how == "replace":
            damaged[at] = byte
        elif how == "insert":
            damaged.insert(at, byte)
        elif how == "delete" and len(damaged) > 1:
            del damaged[at]
        elif at:
            del damaged[at:]
    check_engines_agree(bytes(damaged), mask)


@settings(max_examples=150, deadline=None)
@given(
    width=st.sampled_from([1, 2, 4, 8]),
    n=st.integers(1, 200),
    method=st.integers(0, 5),
    k=st.integers(0, 20),
    mode=st.integers(0, 2),
    body=st.binary(max_size=200),
)
def test_arbitrary_bodies(width: int, n: int, method: int, k: int, mode: int, body: bytes) -> None:
    data = bytes([method, width, k, mode]) + n.to_bytes(4, "little") + body
    check_engines_agree(data, np.zeros(n, f"u{width}"))


def check_engines_agree(data: bytes, mask: np.ndarray[Any, Any]) -> None:
    answers = set()
    try:
        for engine in ENGINES:
            kernels.use_engine(engine)
            answers.add(decoded(data, mask))
    finally:
        kernels.use_engine("auto")
    assert len(answers) == 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_linearity_over_a_chain(data: st.DataObject) -> None:
    dtype, n = data.draw(DTYPES), data.draw(st.integers(1, 300))
    state = data.draw(bits(dtype, n))
    digest = crc64(state)
    for _ in range(3):
        mask = data.draw(bits(dtype, n))
        chunk.apply(chunk.encode(mask), state)
        digest ^= linear(crc64(mask), mask.nbytes)
        assert digest == crc64(state)


@st.composite
def sparse_chunks(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Ascending positions and values, of a chunk of any length, which may have thousands of zeros in between."""
    dtype = draw(DTYPES)
    n_elements = draw(st.one_of(st.integers(1, 40), st.sampled_from([4095, 4096, 4097]), st.integers(1, 50_000)))
    at = st.integers(0, n_elements - 1)
    positions = np.unique(draw(st.lists(st.one_of(at, st.sampled_from([0, n_elements - 1])), max_size=60)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    values = rng.integers(1, int(np.iinfo(dtype).max) >> draw(st.integers(0, 7)), len(positions), dtype, endpoint=True)
    return positions.astype(np.uint32), values, n_elements


@pytest.mark.parametrize("engine", [*ENGINES, "numba, by values"] if "numba" in ENGINES else ENGINES)
@settings(max_examples=100, deadline=None)
@given(sparse_chunks())
def test_digest_of_a_sparse_chunk(engine: str, sparse: tuple[Any, Any, int]) -> None:
    """Whatever way it is worked out: it is that of the whole chunk, and leaves nothing behind for the next one."""
    positions, values, n_elements = sparse
    if engine == "numba, by values":
        sparsely = mock.patch("dcr_store.codec.kernels_numba._FEW_NBYTES", 0)
    else:
        sparsely = contextlib.nullcontext()
    kernels.use_engine(engine.partition(",")[0])
    whole = np.zeros(n_elements, values.dtype)
    whole[positions] = values
    try:
        with sparsely:
            found = kernels.engine().digest_sparse(positions, values, n_elements)
        assert found == linear(crc64(whole), whole.nbytes)
        assert kernels.engine().digest_sparse(positions[:0], values[:0], n_elements) == 0
    finally:
        kernels.use_engine("auto")
