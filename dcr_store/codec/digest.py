"""Digests of chunks and the state root (docs/spec/v1.md, section 7).

A chunk's digest is CRC-64/NVME of its little-endian bytes. CRC is linear over XOR, so with
``linear(m) = D(m) ^ D(zeros)`` a state's digests follow from its base's: ``D(state ^ m) = D(state) ^ linear(m)``.
CRC finds faults, not forgeries. Refuses buffers that are not C-contiguous; reads them in place, without the GIL.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from awscrt import checksums

from dcr_store.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Buffer = bytes | bytearray | memoryview | NDArray[np.generic]

_N_SPACES: Final = 4
ROOT_PREFIX: Final = b"dcr-root-1"
_ZEROS_NBYTES: Final = 1 << 20
_N_BYTES_OF_DIGEST: Final = 8


def crc64(data: Buffer, before: int = 0) -> int:
    """Return CRC-64/NVME of a buffer of any length.

    Parameters
    ----------
    data : buffer
        bytes, bytearray, memoryview or ndarray, C-contiguous; read only. An array counts as its bytes in memory.
    before : int
        The digest of what precedes the buffer, if that is one piece of something longer.

    Raises
    ------
    InvalidInputError
        `data` is not C-contiguous.
    """
    return int(checksums.crc64nvme(_contiguous(data), before))


def crc32c(data: Buffer) -> int:
    """Return CRC-32C (Castagnoli) of a buffer, as ``crc64`` does CRC-64/NVME."""
    return int(checksums.crc32c(_contiguous(data)))


@lru_cache(maxsize=256)
def zeros_digest(nbytes: int) -> int:
    """Return the digest of `nbytes` zero bytes; remembered for the lengths seen last."""
    if nbytes < 0:
        raise InvalidInputError("nbytes must not be negative", expected=">= 0", found=nbytes)
    block = bytes(min(nbytes, _ZEROS_NBYTES))
    digest = 0
    for start in range(0, nbytes, _ZEROS_NBYTES):
        digest = checksums.crc64nvme(block[: nbytes - start], digest)
    return int(digest)


def linear(digest: int, nbytes: int) -> int:
    """Return ``L``, the part of a digest of `nbytes` bytes that is linear over XOR."""
    return digest ^ zeros_digest(nbytes)


def linear_within(data: Buffer, nbytes_after: int) -> int:
    """Return ``L`` of a buffer with any number of zero bytes before it and `nbytes_after` of them after it.

    In time that hardly depends on how many there are: the digest of a few bytes in a long chunk costs few bytes.
    """
    nbytes = data.nbytes if isinstance(data, np.ndarray) else memoryview(data).nbytes
    digest = linear(crc64(data), nbytes)
    for power in range(nbytes_after.bit_length()):
        if nbytes_after >> power & 1:
            digest = _shifted(digest, _shift(power))
    return digest


def _shifted(digest: int, shift: tuple[tuple[int, ...], ...]) -> int:
    found = 0
    for place, octet in enumerate(digest.to_bytes(_N_BYTES_OF_DIGEST, "little")):
        found ^= shift[place][octet]
    return found


@lru_cache(maxsize=64)
def _shift(power: int) -> tuple[tuple[int, ...], ...]:
    """Return what ``2**power`` zero bytes make of the linear part of a digest: by its byte's place and value."""
    found = []
    for place in range(_N_BYTES_OF_DIGEST):
        row = [0]
        for bit in range(8 * place, 8 * place + 8):
            if power == 0:
                moved = checksums.crc64nvme(b"\0", 1 << bit) ^ zeros_digest(1)
            else:
                half = _shift(power - 1)
                moved = _shifted(_shifted(1 << bit, half), half)
            row += [moved ^ other for other in row]
        found.append(tuple(row))
    return tuple(found)


def state_root(layout_sha256: str, tables: Sequence[tuple[int, int, NDArray[np.uint64]]]) -> str:
    """Return the state root: SHA-256 over the layout's digest and the digest tables of all spaces.

    Parameters
    ----------
    layout_sha256 : str
        64 hex digits.
    tables : sequence of (length, chunk_elements, digests)
        Of u8, u16, u32 and u64, in this order: the space's length and the chunk length in elements, and the chunks'
        digests, uint64 of shape ``(ceil(length / chunk_elements),)``.

    Returns
    -------
    str
        64 lower-case hex digits.

    Raises
    ------
    InvalidInputError
        A space is missing, a table's shape does not fit its space, or `layout_sha256` is no SHA-256.
    """
    if len(tables) != _N_SPACES:
        raise InvalidInputError("a state root needs the tables of all spaces", expected=_N_SPACES, found=len(tables))
    try:
        layout = bytes.fromhex(layout_sha256)
    except ValueError:
        layout = b""
    if len(layout) != 32:
        raise InvalidInputError("the layout digest is no SHA-256", expected="64 hex digits", found=repr(layout_sha256))
    root = hashlib.sha256(ROOT_PREFIX + layout)
    for length, chunk_elements, digests in tables:
        shape = (-(-length // chunk_elements),)
        if digests.shape != shape:
            raise InvalidInputError("digest table of a wrong shape", expected=shape, found=digests.shape)
        root.update(length.to_bytes(8, "little") + chunk_elements.to_bytes(8, "little"))
        root.update(np.ascontiguousarray(digests, dtype="<u8").data)
    return root.hexdigest()


def _contiguous(data: Buffer) -> Buffer:
    view = data if isinstance(data, np.ndarray) else memoryview(data)
    contiguous = view.flags.c_contiguous if isinstance(view, np.ndarray) else view.c_contiguous
    if not contiguous:
        raise InvalidInputError(
            "cannot digest a strided buffer; copy it first", expected="C-contiguous", found="strided"
        )
    return data
