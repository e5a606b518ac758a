"""Chunks to encode, and an independent writer of encoded chunks."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64)
Bits = NDArray[Any]

STORED, ZSTD, CONSTANT = 0, 1, 2
ZERO, RAW, DENSE, SPARSE, BITMAP = range(5)


def leb128(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def stream(
    content: bytes, coding: int = STORED, *, decoded: int | None = None, stored: int | None = None, frame: bytes = b""
) -> bytes:
    """A stream; `decoded`, `stored` and `frame` put something else than the truth."""
    body = content
    if coding == ZSTD:
        body = frame or bytes(Zstd(1).encode(content))
    elif coding == CONSTANT:
        body = content[:1]
    length = len(content) if decoded is None else decoded
    return bytes([coding]) + leb128(length) + leb128(len(body) if stored is None else stored) + body


def header(method: int, w: int, n_elements: int, k: int = 0, mode: int = 0) -> bytes:
    return struct.pack("<BBBBI", method, w, k, mode, n_elements)


def masks(dtype: Any) -> Iterator[tuple[str, Bits]]:
    """Masks at the edges: lengths, densities, positions, values."""
    rng = np.random.default_rng(7)
    top = np.iinfo(dtype).max
    for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 64, 65, 1000, 4099):
        yield f"N={n}, zero", np.zeros(n, dtype)
        yield f"N={n}, all ones", np.full(n, top, dtype)
        yield f"N={n}, all 1", np.ones(n, dtype)
        for where in (0, n // 2, n - 1):
            for value in (1, 7, 8, top):
                one = np.zeros(n, dtype)
                one[where] = value
                yield f"N={n}, {value} at {where}", one
    for n in (100, 4096, 20_001):
        for density in (0.001, 0.01, 0.1, 0.3, 0.6, 0.94, 0.96, 1.0):
            where = rng.random(n) < density
            for kind, values in (
                ("coded", rng.choice([1, 3, 7], n)),
                ("steps", (1 << np.minimum(rng.geometric(0.5, n), 8).astype(np.uint64)) - 1),
                ("random", rng.integers(1, top, n, dtype=np.uint64, endpoint=True)),
                ("few", rng.choice([2, 9], n)),
            ):
                yield f"N={n}, {density}, {kind}", np.where(where, values.astype(dtype), 0).astype(dtype)
    rows = np.zeros((64, 64), dtype)
    rows[5::9] = rng.choice([1, 1, 3], (len(rows[5::9]), 64))
    yield "whole rows", rows.ravel()
    for gap in (253, 254, 255, 256, 509, 510, 511, 765):
        carried = np.zeros(8000, dtype)
        carried[gap :: gap + 1] = 1
        yield f"gaps of {gap}", carried


def big_masks() -> Iterator[tuple[str, Bits]]:
    """Chunks of the default length."""
    n = 1 << 20
    for where in (0, 123_456, n - 1):
        one = np.zeros(n, np.uint16)
        one[where] = 0x8000
        yield f"one change at {where}", one
    far = np.zeros(n, np.uint16)
    far[[0, 1, 2, 3, 4, n - 1]] = 1
    yield "a gap of a million", far
    rng = np.random.default_rng(3)
    where = rng.random(n) < 0.01
    yield "1 %", np.where(where, (1 << np.minimum(rng.geometric(0.5, n), 15)) - 1, 0).astype(np.uint16)
    yield "anchor", (rng.standard_normal(n, np.float32).view(np.uint32) >> 16).astype(np.uint16)
