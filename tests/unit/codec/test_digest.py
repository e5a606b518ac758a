"""Digests against their definitions, and the state root against one made by hand."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pytest

from dcr_store.codec.digest import crc32c, crc64, linear, linear_within, state_root, zeros_digest
from dcr_store.errors import InvalidInputError


def crc(data: bytes, n_bits: int, polynomial: int) -> int:
    """A reflected CRC with all ones before and after, bit by bit; the polynomial is given unreflected."""
    reflected = int(f"{polynomial:0{n_bits}b}"[::-1], 2)
    ones = (1 << n_bits) - 1
    register = ones
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (reflected if register & 1 else 0)
    return register ^ ones


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 255, 4097])
def test_definitions(n: int) -> None:
    data = np.random.default_rng(n).bytes(n)
    assert crc64(data) == crc(data, 64, 0xAD93D23594C93659)
    assert crc32c(data) == crc(data, 32, 0x1EDC6F41)


def test_check_values() -> None:
    assert crc64(b"123456789") == 0xAE8B14860A799888
    assert crc32c(b"123456789") == 0xE3069283


def test_all_kinds_of_buffers() -> None:
    bits = np.arange(1000, dtype=np.uint16)
    expected = crc64(bits.tobytes())
    locked = bits.copy()
    locked.flags.writeable = False
    unaligned = np.frombuffer(b"x" + bits.tobytes(), np.uint16, 1000, offset=1)
    for buffer in (bits, locked, unaligned, bits.reshape(10, 100), bytearray(bits.tobytes()), memoryview(bits)):
        assert crc64(buffer) == expected
    assert crc64(np.empty(0, np.uint32)) == crc64(b"")
    for strided in (bits[::2], bits.reshape(10, 100).T, memoryview(bits.tobytes())[::2]):
        with pytest.raises(InvalidInputError, match="strided"):
            crc64(strided)
        with pytest.raises(InvalidInputError, match="strided"):
            crc32c(strided)


def test_beyond_2_gib() -> None:
    n = (1 << 31) + 5
    zeros = np.zeros(n, np.uint8)  # pages that are only read take no memory
    assert crc64(zeros) == zeros_digest(n)


@pytest.mark.parametrize("nbytes", [0, 1, 8, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 17])
def test_digest_of_zeros(nbytes: int) -> None:
    assert zeros_digest(nbytes) == crc64(bytes(nbytes))
    assert linear(crc64(bytes(nbytes)), nbytes) == 0


def test_no_negative_length() -> None:
    with pytest.raises(InvalidInputError):
        zeros_digest(-1)


def test_linearity() -> None:
    rng = np.random.default_rng(1)
    for n in (1, 100, 65536):
        state, mask, other = rng.integers(0, 1 << 16, (3, n), np.uint16)
        assert crc64(state ^ mask) == crc64(state) ^ linear(crc64(mask), mask.nbytes)
        left, right = (linear(crc64(m), m.nbytes) for m in (mask, other))
        assert linear(crc64(mask ^ other), mask.nbytes) == left ^ right


LAYOUT = "ab" * 32


def tables(**changes: Any) -> list[Any]:
    u64 = np.uint64
    rows = {
        "u8": (0, 64, np.empty(0, u64)),
        "u16": (130, 64, np.array([1, 2, 3], u64)),
        "u32": (64, 64, np.array([1 << 63], u64)),
        "u64": (0, 64, np.empty(0, u64)),
    }
    return list((rows | changes).values())


def test_state_root() -> None:
    made_by_hand = b"dcr-root-1" + bytes.fromhex(LAYOUT)
    for length, digests in ((0, []), (130, [1, 2, 3]), (64, [1 << 63]), (0, [])):
        made_by_hand += struct.pack(f"<QQ{len(digests)}Q", length, 64, *digests)
    assert state_root(LAYOUT, tables()) == hashlib.sha256(made_by_hand).hexdigest()
    assert state_root(LAYOUT, tables()[::-1]) != state_root(LAYOUT, tables())
    big_endian = np.array([1, 2, 3], ">u8")
    assert state_root(LAYOUT, tables(u16=(130, 64, big_endian))) == state_root(LAYOUT, tables())


def test_state_root_refuses_what_does_not_fit() -> None:
    for bad in (
        tables()[:3],
        tables(u128=(0, 64, np.empty(0, np.uint64))),
        tables(u16=(130, 64, np.empty(2, np.uint64))),
    ):
        with pytest.raises(InvalidInputError):
            state_root(LAYOUT, bad)
    for layout in ("", "ab", "xy" * 32, "ab" * 33):
        with pytest.raises(InvalidInputError, match="SHA-256"):
            state_root(layout, tables())


@pytest.mark.parametrize("n_after", [0, 1, 7, 4096, 4097, (1 << 20) - 1, 3 << 20])
def test_the_linear_part_of_a_few_bytes_is_that_of_all_of_them(n_after: int) -> None:
    data = np.frombuffer(np.random.default_rng(n_after).bytes(37), np.uint8)
    for n_before in (0, 1000):
        whole = bytes(n_before) + data.tobytes() + bytes(n_after)
        assert linear_within(data, n_after) == linear(crc64(whole), len(whole))
