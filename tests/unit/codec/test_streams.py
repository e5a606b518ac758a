"""Streams: the coding that each content gets, and what a zstd frame says of its length."""

from __future__ import annotations

import numpy as np
import pytest
from numcodecs.zstd import Zstd
from unit.codec.chunk_cases import CONSTANT, STORED, ZSTD

from dcr_store.codec.streams import StreamReader, append_stream, append_uint, stored_nbytes
from dcr_store.errors import FormatError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("content", "coding"),
    [
        (b"", STORED),
        (b"a", STORED),
        (b"aa", CONSTANT),
        (b"a" * 70_000, CONSTANT),
        (b"ab" * 9, STORED),
        (b"ab" * 500, ZSTD),
        (b"a" * 999 + b"b", ZSTD),
        (b"ab" * 40_000 + b"a", ZSTD),
        (RNG.bytes(100), STORED),
        (RNG.bytes(300_000), STORED),
        (RNG.integers(0, 9, 300_000, np.uint8).tobytes(), ZSTD),
    ],
)
def test_smallest_coding(content: bytes, coding: int) -> None:
    array = np.frombuffer(content, np.uint8)
    out = bytearray(b"before")
    append_stream(out, array)
    assert out[6] == coding
    assert len(out) <= 6 + 1 + 3 + 3 + len(content)
    reader = StreamReader(memoryview(out), 6)
    assert reader.read_stream("it", len(content)).tobytes() == content
    reader.finish()
    assert stored_nbytes(array) == {STORED: len(content), CONSTANT: 1}.get(coding, stored_nbytes(array))
    assert stored_nbytes(array) <= len(content)


def test_incompressible_by_order() -> None:
    out = bytearray()
    append_stream(out, np.frombuffer(b"ab" * 500, np.uint8), compressible=False)
    assert out[0] == STORED


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16383, 16384, (1 << 32) - 1, (1 << 35) - 1])
def test_integers(value: int) -> None:
    out = bytearray()
    append_uint(out, value)
    assert len(out) == max(1, -(-value.bit_length() // 7))
    reader = StreamReader(memoryview(out), 0)
    assert reader.read_uint("it") == value
    reader.finish()


@pytest.mark.parametrize("nbytes", [2, 200, 255, 256, 257, 65_791, 65_792, 131_072, 400_000])
@pytest.mark.parametrize("level", [1, 19])
@pytest.mark.parametrize("checksum", [False, True])
def test_frames_of_all_header_forms(nbytes: int, level: int, checksum: bool) -> None:
    for content in (RNG.bytes(nbytes), b"a" * nbytes, b"abc" * (nbytes // 3) + b"d" * (nbytes % 3)):
        frame = bytes(Zstd(level, checksum).encode(content))
        for change in (0, -1, 1):
            data = bytearray([ZSTD])
            append_uint(data, nbytes)
            append_uint(data, len(frame) + change)
            data += frame[: len(frame) + change] + b"x" * change
            reader = StreamReader(memoryview(data), 0)
            if change:
                with pytest.raises(FormatError, match="frame"):
                    reader.read_stream("it", nbytes)
            else:
                assert reader.read_stream("it", nbytes).tobytes() == content
