"""NumPy and numba make the same of everything, and the rule that chooses between them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from unit.codec.chunk_cases import DTYPES, big_masks, masks

from dcr_store.codec import chunk, kernels, kernels_numpy
from dcr_store.codec.digest import crc64, linear
from dcr_store.errors import FormatError, InvalidInputError

numba = pytest.importorskip("numba")
kernels_numba = pytest.importorskip("dcr_store.codec.kernels_numba")


@pytest.fixture(autouse=True)
def automatic() -> Iterator[None]:
    yield
    kernels.use_engine("auto")


def same(what: str, function: str, *arguments: Any) -> Any:
    results = [getattr(module, function)(*arguments) for module in (kernels_numpy, kernels_numba)]
    flat = [result if isinstance(result, tuple | list) else [result] for result in results]
    for ours, theirs in zip(*flat, strict=True):
        assert np.array_equal(ours, theirs), (what, function)
        assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None), (what, function)
    return results[0]


def check_kernels(what: str, mask: np.ndarray[Any, Any], rng: np.random.Generator) -> None:
    n_elements, dtype = len(mask), mask.dtype
    base = rng.integers(0, 255, n_elements).astype(dtype)
    positions, values = same(what, "find_changes", base, base ^ mask)
    positions, values = same(what, "find_nonzero", mask)
    n = len(positions)
    if not n:
        return
    gaps, k, n_occupied = same(what, "find_gaps", positions, 128, 16)
    assert np.array_equal(gaps, np.diff(positions.astype(np.int64), prepend=-1) - 1)
    assert k == max(0, int(np.sort(gaps)[(n - 1) // 2]).bit_length() - 7)
    assert n_occupied == len(np.unique(positions // 8))
    assert same(what, "find_gaps", positions, 1, 2)[1] <= 2
    for k in (0, 1, 3, 16):
        high, low = same(what, "split_gaps", gaps, k)
        joined, last = same(what, "join_gaps", high, low, n, k)
        assert np.array_equal(joined, positions)
        assert last == positions[-1]
        nonsense = np.where(rng.random(len(high)) < 0.3, 255, rng.integers(0, 256, len(high))).astype(np.uint8)
        lasts = [module.join_gaps(nonsense, low, n, k)[1] for module in (kernels_numpy, kernels_numba)]
        assert lasts[0] == lasts[1]
    assert same(what, "digest_sparse", positions, values, n_elements) == linear(crc64(mask), mask.nbytes), what
    bitmap = same(what, "pack_flags", positions, n_elements)
    assert np.array_equal(same(what, "find_flags", bitmap, n_elements), positions)
    codes, escaped = same(what, "pack_values", values)
    assert same(what, "count_escapes", codes, n) == len(escaped)
    assert np.array_equal(same(what, "unpack_values", codes, escaped, n), values)
    for module in (kernels_numpy, kernels_numba):
        out = base.copy()
        module.spread(bitmap, values, out)
        assert np.array_equal(out, mask), what
        module.xor_at(out, positions, values)
        assert not out.any(), what
    for rotation in (0, 1, 3, 6, 8 * dtype.itemsize - 1):
        rotated = values << rotation | values >> (8 * dtype.itemsize - rotation) if rotation else values
        planes = [same(what, "split_plane", values, rotation, j) for j in range(dtype.itemsize)]
        for module in (kernels_numpy, kernels_numba):
            out = np.full(n, 0x55, dtype)
            for j, plane in enumerate(planes):
                assert np.array_equal(plane, (rotated >> (8 * j)).astype(np.uint8)), what
                module.join_plane(plane, rotation, j, out)
            assert np.array_equal(out, values), what


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_results(dtype: Any) -> None:
    rng = np.random.default_rng(4)
    for what, mask in masks(dtype):
        check_kernels(what, mask, rng)


def test_same_results_for_long_chunks() -> None:
    rng = np.random.default_rng(4)
    for what, mask in big_masks():
        check_kernels(what, mask, rng)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bytes_and_same_errors(dtype: Any) -> None:
    rng = np.random.default_rng(9)
    for what, mask in masks(dtype):
        flipped = bytearray(chunk.encode(mask))
        flipped[rng.integers(len(flipped))] ^= 1 << int(rng.integers(8))
        answers = []
        for name in ("numpy", "numba"):
            kernels.use_engine(name)
            answers.append([chunk.encode(mask), decoded_or_refused(flipped, mask)])
        assert answers[0] == answers[1], what


def decoded_or_refused(data: bytearray, mask: np.ndarray[Any, Any]) -> bytes | str:
    try:
        return chunk.decode(data, mask.dtype, len(mask)).tobytes()
    except FormatError as error:
        return str(error)


def test_numba_runs_after_enough_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "NUMBA_FROM_NBYTES", 5 * 2048)
    kernels.use_engine("auto")
    mask = np.zeros(1024, np.uint16)
    for _ in range(4):
        chunk.encode(mask)
    assert kernels.engine() is kernels_numpy
    chunk.encode(mask)
    assert kernels.engine() is kernels_numba
    kernels.use_engine("auto")
    assert kernels.engine() is kernels_numpy


def test_every_entry_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "NUMBA_FROM_NBYTES", 2048)
    mask = np.zeros(1024, np.uint16)
    mask[[5, 500]] = 1
    data = chunk.encode(mask)
    for work in (
        lambda: chunk.encode(mask),
        lambda: chunk.encode_sparse(np.array([5], np.uint32), mask[5:6], 1024),
        lambda: chunk.decode(data, np.uint16, 1024),
        lambda: chunk.decode_sparse(data, np.uint16, 1024),
        lambda: chunk.apply(data, mask.copy()),
        lambda: chunk.find_changes(mask, mask),
    ):
        kernels.use_engine("auto")
        assert kernels.engine() is kernels_numpy
        work()
        assert kernels.engine() is kernels_numba


def test_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "numba")
    kernels.use_engine("auto")
    assert kernels.engine() is kernels_numba
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "numpy")
    monkeypatch.setattr(kernels, "NUMBA_FROM_NBYTES", 0)
    kernels.use_engine("auto")
    assert kernels.engine(1 << 40) is kernels_numpy
    monkeypatch.setenv(kernels.ENVIRONMENT_VARIABLE, "fortran")
    kernels.use_engine("auto")
    with pytest.raises(InvalidInputError, match="fortran"):
        kernels.engine()
    with pytest.raises(InvalidInputError, match="fortran"):
        kernels.use_engine("fortran")


def test_the_environment_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many small chunks, to ask for each took longer than much of the coding."""
    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)
    kernels.use_engine("auto")
    assert kernels.engine() is kernels_numpy
    monkeypatch.setattr(kernels, "_decided", None)
    assert kernels.engine(1024) is kernels_numpy


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "NUMBA_FROM_NBYTES", 0)
    monkeypatch.delitem(sys.modules, "dcr_store.codec.kernels_numba")
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels.use_engine("auto")
    assert kernels.engine() is kernels_numpy
    with pytest.raises(InvalidInputError, match="not installed"):
        kernels.use_engine("numba")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def refusing(*arguments: Any, **options: Any) -> Any:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*arguments, **options)

    monkeypatch.setattr(kernels_numba.numba, "njit", refusing)
    monkeypatch.setattr(kernels_numba, "_kernels", {})
    positions, _ = kernels_numba.find_nonzero(np.array([0, 5, 0], np.uint8))
    assert positions.tolist() == [1]


def test_neither_numba_nor_zarr_is_imported_at_once() -> None:
    code = (
        "import sys, numpy; from dcr_store.codec import chunk, digest, portable;"
        "chunk.encode(numpy.ones(100, 'u2')); sys.exit('numba' in sys.modules or 'zarr' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
