"""Encoded sizes: they depend on the data alone, so what was reached stays reached (docs/design/001-chunk-coding.md)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_store.codec import chunk

TOOL = Path(__file__).parents[3] / "tools" / "bench_codec.py"


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("bench_codec", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_tool()
RNG = np.random.default_rng(0)
BASE = bench.weights(RNG, 2 * bench.CHUNK)


@pytest.mark.parametrize("kind", ["step", "uniform"])
@pytest.mark.parametrize("rate", [0.01, 0.03, 0.05, 0.1])
def test_small_changes(kind: str, rate: float) -> None:
    n, per_change = bench.sizes(BASE, getattr(bench, kind)(RNG, BASE, rate))
    assert n / len(BASE) == pytest.approx(rate, rel=0.05)
    own = per_change["dcr.delta"]
    assert own <= 1.04 * per_change["bound"]
    assert own <= 0.8 * per_change["u16+u16"]
    assert own <= 0.6 * per_change["XOR+zstd"]
    assert 1.7 * own <= per_change["overwrite"]
    assert own <= 0.6 * per_change["portable"]


@pytest.mark.parametrize("rate", [0.2, 0.3, 0.5, 0.8])
def test_large_changes(rate: float) -> None:
    _, per_change = bench.sizes(BASE, bench.uniform(RNG, BASE, rate))
    assert per_change["dcr.delta"] <= 1.06 * per_change["bound"]


def test_rare_changes() -> None:
    for rate, limit in ((0.003, 1.07), (0.0005, 1.25)):
        _, per_change = bench.sizes(BASE, bench.uniform(RNG, BASE, rate))
        assert per_change["dcr.delta"] <= limit * per_change["bound"]


def test_rows_that_changed_among_rows_that_did_not() -> None:
    trained = np.repeat(RNG.random(2 * bench.CHUNK // 512) < 0.05, 512)
    mask = np.where(trained & (RNG.random(len(BASE)) < 0.8), 1, 0).astype(np.uint16)
    n = np.count_nonzero(mask)
    nbytes = sum(len(chunk.encode(part)) for part in bench.chunks(mask))
    assert 8 * nbytes / n < 1.2, "less than one-and-a-bit per change: the bitmap was chosen"


@pytest.mark.parametrize(
    "bits",
    [
        pytest.param(BASE, id="BF16"),
        pytest.param((RNG.standard_normal(bench.CHUNK, np.float32)).view(np.uint32), id="F32"),
        pytest.param((RNG.standard_normal(bench.CHUNK)).astype(np.float16).view(np.uint16), id="F16"),
        pytest.param(RNG.standard_normal(bench.CHUNK).view(np.uint64), id="F64"),
        pytest.param(RNG.integers(0, 256, bench.CHUNK, np.uint8), id="random"),
        pytest.param(np.arange(bench.CHUNK, dtype=np.uint32), id="counting"),
        pytest.param(np.where(RNG.random(2 * bench.CHUNK) < 0.4, 0, BASE), id="BF16, many zeros"),
    ],
)
def test_anchors(bits: np.ndarray[Any, Any]) -> None:
    width = bits.dtype.itemsize
    own = sum(len(chunk.encode(bits[i : i + bench.CHUNK])) for i in range(0, len(bits), bench.CHUNK))
    split = sum(len(bench.ZSTD.encode(np.ascontiguousarray(bits.view(np.uint8)[j::width]))) for j in range(width))
    assert own <= 1.01 * split
    assert own <= bits.nbytes + 64


def test_rotated_planes_are_smaller() -> None:
    zeros = np.where(RNG.random(len(BASE)) < 0.4, 0, BASE).astype(np.uint16)
    for bits, limit in ((BASE, 0.66), (zeros, 0.46)):
        assert sum(len(chunk.encode(part)) for part in bench.chunks(bits)) <= limit * bits.nbytes


def test_value_mode_follows_the_values() -> None:
    positions = np.flatnonzero(RNG.random(bench.CHUNK) < 0.05).astype(np.uint32)
    for share_coded, mode in ((0.0, 0), (0.3, 0), (0.7, 1), (1.0, 1)):
        coded = RNG.random(len(positions)) < share_coded
        masks = np.where(coded, RNG.choice([1, 3, 7], len(coded)), RNG.integers(8, 1 << 16, len(coded)))
        assert chunk.encode_sparse(positions, masks.astype(np.uint16), bench.CHUNK)[3] == mode
