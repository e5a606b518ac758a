"""Encoded chunks that lie: refused with a reason, before anything is written, within bounds of memory and time."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from numcodecs.zstd import Zstd
from unit.codec.chunk_cases import (
    BITMAP,
    CONSTANT,
    DENSE,
    DTYPES,
    RAW,
    SPARSE,
    ZERO,
    ZSTD,
    header,
    leb128,
    masks,
    stream,
)

from dcr_store.codec import chunk
from dcr_store.errors import FormatError

N = 64
SPARSE_HEADER = header(SPARSE, 2, N)
CODED_HEADER = header(SPARSE, 2, N, mode=1)
LOW, HIGH = stream(b"\x05\x06"), stream(b"\x00\x01")
NO_PLANES = stream(b"") * 2
NO_SIZE_FRAME = b"\x28\xb5\x2f\xfd\x00\x58" + (2 << 3 | 1).to_bytes(3, "little") + b"\x01\x02"
BOMB = bytes(Zstd(1).encode(bytes(1 << 26)))
LIAR = bytes(Zstd(1).encode(b"ab" * 40)).replace(b"\x20\x50", b"\x20\x40", 1)  # says 64 bytes, holds 80

HOSTILE = {
    "nothing": (b"", "length"),
    "half a header": (SPARSE_HEADER[:7], "length"),
    "unknown method": (header(5, 2, N), "method"),
    "other width": (header(RAW, 4, N) + bytes(128), "another dtype"),
    "other N": (header(RAW, 2, N + 1) + bytes(128), "another dtype"),
    "longer than raw": (header(RAW, 2, N) + bytes(129), "length"),
    "zero with k": (header(ZERO, 2, N, k=1), "field"),
    "zero with mode": (header(ZERO, 2, N, mode=1), "field"),
    "zero with body": (header(ZERO, 2, N) + b"\x00", "expected 9 bytes|does not fit"),
    "raw with k": (header(RAW, 2, N, k=1) + bytes(128), "field"),
    "raw too short": (header(RAW, 2, N) + bytes(127), "bytes"),
    "dense with mode": (header(DENSE, 2, N, mode=1) + stream(bytes(64), CONSTANT) * 2, "field"),
    "dense rotated away": (header(DENSE, 2, N, k=16) + stream(bytes(64), CONSTANT) * 2, "k of a dense"),
    "dense without a plane": (header(DENSE, 2, N) + stream(bytes(64), CONSTANT), "ends before"),
    "dense with a plane too many": (header(DENSE, 2, N) + stream(bytes(64), CONSTANT) * 3, "does not fit"),
    "dense with a short plane": (header(DENSE, 2, N) + stream(bytes(63), CONSTANT) * 2, "length"),
    "no n": (SPARSE_HEADER, "integer"),
    "n is 0": (SPARSE_HEADER + leb128(0) + stream(b"") * 3, "number of non-zero"),
    "n above N": (SPARSE_HEADER + leb128(N + 1) + stream(bytes(N + 1), CONSTANT) * 3, "number of non-zero"),
    "n without end": (SPARSE_HEADER + b"\x80\x80\x80\x80\x80\x01", "integer"),
    "n not in its shortest form": (SPARSE_HEADER + b"\x82\x00" + LOW * 3, "integer"),
    "n cut off": (SPARSE_HEADER + b"\x82", "integer"),
    "k too large": (header(SPARSE, 2, N, k=17) + leb128(2) + LOW * 4, "k of a sparse"),
    "value mode": (header(SPARSE, 2, N, mode=2) + leb128(2) + stream(b"\x01\x02") + LOW + HIGH, "value mode"),
    "gaps fewer than n": (SPARSE_HEADER + leb128(2) + stream(b"\x01") + LOW + HIGH, "length"),
    "gaps more than N": (SPARSE_HEADER + leb128(2) + stream(bytes(65)) + LOW + HIGH, "length"),
    "gaps more than n": (SPARSE_HEADER + leb128(2) + stream(b"\x01\x02\x03") + LOW + HIGH, "as many gaps"),
    "gaps are carries": (SPARSE_HEADER + leb128(2) + stream(b"\xff\xff") + LOW + HIGH, "as many gaps"),
    "carry last": (SPARSE_HEADER + leb128(2) + stream(b"\x01\x02\xff") + LOW + HIGH, "as many gaps"),
    "position out of range": (SPARSE_HEADER + leb128(2) + stream(b"\x01\x3e") + LOW + HIGH, "out of range"),
    "position far out": (
        header(SPARSE, 2, N, k=16) + leb128(2) + stream(b"\xfe\xfe") + stream(bytes(16), CONSTANT) + LOW + HIGH,
        "out of range",
    ),
    "unused low bits": (
        header(SPARSE, 2, N, k=1) + leb128(2) + stream(b"\x01\x02") + stream(b"\x04") + LOW + HIGH,
        "unused bits",
    ),
    "unused bits of the first plane": (
        header(SPARSE, 2, N, k=2) + leb128(2) + stream(b"\x01\x02") + stream(b"\x80\x00") + LOW + HIGH,
        "unused bits",
    ),
    "low bits too few": (
        header(SPARSE, 2, N, k=9) + leb128(2) + stream(b"\x00\x00") + stream(bytes(8)) + LOW + HIGH,
        "length",
    ),
    "zero value": (SPARSE_HEADER + leb128(2) + stream(b"\x01\x02") + stream(b"\x05\x00") + stream(b"\x01\x00"), "zero"),
    "zero escape": (CODED_HEADER + leb128(1) + stream(b"\x01") + stream(b"\x03") + stream(b"\x00") * 2, "zero"),
    "unused codes": (CODED_HEADER + leb128(1) + stream(b"\x01") + stream(b"\x04") + NO_PLANES, "unused bits"),
    "escapes missing": (CODED_HEADER + leb128(1) + stream(b"\x01") + stream(b"\x03") + NO_PLANES, "length"),
    "escapes left over": (CODED_HEADER + leb128(1) + stream(b"\x01") + stream(b"\x00") + stream(b"\x05") * 2, "length"),
    "codes too many": (CODED_HEADER + leb128(1) + stream(b"\x01") + stream(b"\x00\x00") + NO_PLANES, "length"),
    "trailing byte": (SPARSE_HEADER + leb128(2) + stream(b"\x01\x02") + LOW + HIGH + b"\x00", "does not fit"),
    "bitmap too short": (header(BITMAP, 2, N) + leb128(2) + stream(b"\x03" + bytes(6)) + LOW + HIGH, "length"),
    "bitmap with more bits": (header(BITMAP, 2, N) + leb128(2) + stream(b"\x07" + bytes(7)) + LOW + HIGH, "bits set"),
    "bitmap with fewer bits": (header(BITMAP, 2, N) + leb128(2) + stream(b"\x01" + bytes(7)) + LOW + HIGH, "bits set"),
    "bitmap rotated away": (
        header(BITMAP, 2, N, k=16) + leb128(2) + stream(b"\x03" + bytes(7)) + LOW + HIGH,
        "rotation",
    ),
    "unknown coding": (SPARSE_HEADER + leb128(2) + stream(b"\x01\x02", 3) + LOW + HIGH, "unknown coding"),
    "constant of no length": (
        CODED_HEADER + leb128(1) + stream(b"\x01") + stream(b"\x00") + stream(b"", 2) * 2,
        "coding",
    ),
    "frame of no length": (
        CODED_HEADER + leb128(1) + stream(b"\x01") + stream(b"\x00") + stream(b"", ZSTD) * 2,
        "coding",
    ),
    "constant of two bytes": (
        SPARSE_HEADER + leb128(2) + b"\x02\x02\x02\x01\x01" + LOW + HIGH,
        "stored length of constant",
    ),
    "stored shorter than it is": (SPARSE_HEADER + leb128(2) + b"\x00\x02\x01\x01" + LOW + HIGH, "stored length"),
    "stored past the end": (SPARSE_HEADER + leb128(2) + stream(b"\x01\x02", stored=99), "longer than its chunk"),
    "stream cut off": (SPARSE_HEADER + leb128(2) + b"\x00", "integer"),
    "no frame": (
        SPARSE_HEADER + leb128(2) + stream(b"\x01\x02", ZSTD, frame=b"not a frame") + LOW + HIGH,
        "content size",
    ),
    "frame of another size": (
        SPARSE_HEADER + leb128(2) + stream(b"\x01\x02", ZSTD, frame=bytes(Zstd(1).encode(b"abc"))) + LOW + HIGH,
        "content size",
    ),
    "frame without a size": (
        SPARSE_HEADER + leb128(2) + stream(b"\x01\x02", ZSTD, frame=NO_SIZE_FRAME) + LOW + HIGH,
        "content size",
    ),
    "frame and more": (
        SPARSE_HEADER
        + leb128(2)
        + stream(b"\x01\x02", ZSTD, frame=bytes(Zstd(1).encode(b"\x01\x02")) + b"\x50\x2a\x4d\x18\x00\x00\x00\x00")
        + LOW
        + HIGH,
        "zstd frame of gaps",
    ),
    "frame cut off": (
        SPARSE_HEADER
        + leb128(2)
        + stream(b"\x01\x02", ZSTD, frame=bytes(Zstd(1).encode(b"\x01\x02"))[:-1])
        + LOW
        + HIGH,
        "zstd frame of gaps",
    ),
    "frame that lies about its size": (
        header(DENSE, 2, N) + stream(bytes(64), ZSTD, frame=LIAR) + stream(bytes(64), CONSTANT),
        "damaged",
    ),
    "bomb": (header(DENSE, 2, N) + stream(bytes(64), ZSTD, frame=BOMB[:90]), "content size"),
}


def refuse(data: bytes, dtype: Any, n: int, reason: str) -> None:
    bits = np.arange(n).astype(dtype)
    kept = bits.copy()
    with pytest.raises(FormatError, match=reason) as caught:
        chunk.apply(data, bits)
    assert np.array_equal(bits, kept)
    assert caught.value.expected is not None
    assert caught.value.found is not None
    for decode in (chunk.decode, chunk.decode_sparse):
        with pytest.raises(FormatError):
            decode(data, dtype, n)


@pytest.mark.parametrize("what", HOSTILE)
def test_refused(what: str, engine: str) -> None:
    data, reason = HOSTILE[what]
    refuse(data, np.uint16, N, reason)


def test_bits_of_a_bitmap_past_the_end(engine: str) -> None:
    for octets in (b"\x01" + bytes(6) + b"\x10", bytes(7) + b"\x30"):
        refuse(header(BITMAP, 2, 60) + leb128(2) + stream(octets) + LOW + HIGH, np.uint16, 60, "unused bits")
    last = header(BITMAP, 2, 60) + leb128(2) + stream(bytes(7) + b"\x0c") + LOW + HIGH
    assert chunk.decode_sparse(last, np.uint16, 60)[0].tolist() == [58, 59]


def test_the_frame_that_lies_does() -> None:
    assert LIAR[5] == 64
    with pytest.raises(RuntimeError):
        Zstd(1).decode(LIAR)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_truncation_is_refused(dtype: Any, engine: str) -> None:
    for what, mask in masks(dtype):
        if len(mask) not in (9, 100):
            continue
        data = chunk.encode(mask)
        for stop in range(len(data)):
            with pytest.raises(FormatError):
                chunk.decode(data[:stop], dtype, len(mask))
        with pytest.raises(FormatError):
            chunk.decode(data + b"\x00", dtype, len(mask)), what


def test_memory_is_bounded_by_the_chunk(engine: str) -> None:
    n = 1 << 16
    huge = (1 << 34) - 1
    gap = stream(b"\x01")
    hostile = [
        header(SPARSE, 2, n) + leb128(n) + stream(b"\x01", CONSTANT, decoded=huge),
        header(SPARSE, 2, n) + leb128(n) + stream(b"", ZSTD, decoded=huge, frame=BOMB),
        header(SPARSE, 2, n) + leb128(1) + gap + stream(b"", ZSTD, decoded=1 << 26, frame=BOMB),
        header(BITMAP, 2, n) + leb128(1) + stream(b"\x01", CONSTANT, decoded=1 << 33),
        header(DENSE, 2, n) + stream(b"\x01", CONSTANT, decoded=1 << 33),
        # Allowed lengths everywhere, as large as they can be, then something wrong.
        header(SPARSE, 2, n, k=16)
        + leb128(n)
        + stream(bytes(n), 2)
        + stream(bytes(2 * n), 2)
        + stream(bytes(n), 2) * 2,
    ]
    tracemalloc.start()
    try:
        for data in hostile:
            refuse(data, np.uint16, n, ".")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2 * n
    finally:
        tracemalloc.stop()


def test_flipped_bits_are_refused_or_decoded_consistently(engine: str) -> None:
    rng = np.random.default_rng(11)
    for what, mask in masks(np.uint16):
        if len(mask) not in (65, 4096):
            continue
        good = chunk.encode(mask)
        for _ in range(10):
            data = bytearray(good)
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            try:
                decoded = chunk.decode(data, np.uint16, len(mask))
            except FormatError:
                refuse(bytes(data), np.uint16, len(mask), ".")
                continue
            positions, values = chunk.decode_sparse(data, np.uint16, len(mask))
            assert np.array_equal(positions, np.flatnonzero(decoded)), what
            assert np.array_equal(values, decoded[positions]), what
