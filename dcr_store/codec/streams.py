"""Streams: the byte strings that chunk bodies are made of (docs/spec/v1.md, section 6.2).

A stream is ``coding, decoded length, stored length, stored bytes``: stored as it is, as one zstd frame, or as one byte
that stands for all. Refuses, before it allocates anything, a stream whose lengths differ from what its place allows,
and zstd frames that do not state that very length or are followed by anything.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard

from dcr_store.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]

STORED: Final = 0
ZSTD: Final = 1
CONSTANT: Final = 2

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_WORTH_TRYING_NBYTES: Final = 24  # a frame's own headers and tables take about as much
_MAX_UINT_NBYTES: Final = 5  # no length of the format reaches 2^35


class _Contexts(threading.local):
    """A thread's own zstd contexts: to make one for each stream takes as long as to compress it."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts: Final = _Contexts()


def append_uint(out: bytearray, value: int) -> None:
    """Append an unsigned LEB128 integer."""
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def append_stream(out: bytearray, content: U8, *, compressible: bool = True) -> None:
    """Append a stream, in the smallest coding.

    Parameters
    ----------
    out : bytearray
        Grows by the stream.
    content : ndarray of uint8, shape (n,), C-contiguous
        The decoded bytes.
    compressible : bool
        False if zstd is known to be of no use.
    """
    coding, stored = _smallest(content, compressible)
    out.append(coding)
    append_uint(out, len(content))
    append_uint(out, len(stored))
    out += stored


def stored_nbytes(content: U8) -> int:
    """Return how many bytes ``append_stream`` would store for a content."""
    return len(_smallest(content, True)[1])


def _smallest(content: U8, compressible: bool) -> tuple[int, memoryview]:
    nbytes = len(content)
    # Three bytes tell nearly always that it is not constant, so that the others need not be looked at.
    if nbytes > 1 and content[0] == content[-1] == content[nbytes // 2] and not np.any(content != content[0]):
        return CONSTANT, content[:1].data
    if compressible and nbytes >= _WORTH_TRYING_NBYTES:
        frame = _contexts.compressor.compress(content.data)
        if len(frame) < nbytes:
            return ZSTD, memoryview(frame)
    return STORED, content.data


class StreamReader:
    """Reads integers and streams off an encoded chunk, front to back.

    Parameters
    ----------
    data : buffer of bytes
        An encoded chunk; never written to.
    offset : int
        Where to start.
    """

    __slots__ = ("_data", "_offset")

    def __init__(self, data: memoryview, offset: int) -> None:
        self._data = data
        self._offset = offset

    def read_uint(self, what: str) -> int:
        """Read an unsigned LEB128 integer in its shortest form, of at most 5 bytes."""
        value = 0
        for index, byte in enumerate(self._data[self._offset : self._offset + _MAX_UINT_NBYTES]):
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                if byte == 0 and index > 0:
                    break
                self._offset += index + 1
                return value
        raise FormatError(f"chunk damaged: {what} is no integer", expected="LEB128, shortest form", found="other bytes")

    def read_stream(self, what: str, shortest: int, longest: int | None = None) -> U8:
        """Read a stream of `shortest` to `longest` decoded bytes (of exactly `shortest` if there is no `longest`).

        Returns
        -------
        ndarray of uint8
            Read-only if the stream is stored as it is: then it is a view of the encoded chunk.
        """
        longest = shortest if longest is None else longest
        if self._offset >= len(self._data):
            raise FormatError(f"chunk ends before {what}", expected="a stream", found="the end")
        coding = self._data[self._offset]
        self._offset += 1
        nbytes = self.read_uint(f"length of {what}")
        if not shortest <= nbytes <= longest:
            allowed = str(shortest) if shortest == longest else f"{shortest} to {longest}"
            raise FormatError(f"{what} of a length it cannot have", expected=allowed, found=nbytes)
        stored_nbytes = self.read_uint(f"stored length of {what}")
        rest = len(self._data) - self._offset
        if stored_nbytes > rest:
            raise FormatError(f"{what} longer than its chunk", expected=f"at most {rest} bytes", found=stored_nbytes)
        stored = self._data[self._offset : self._offset + stored_nbytes]
        self._offset += stored_nbytes
        if coding == STORED:
            _expect(f"stored length of {what}", nbytes, stored_nbytes)
            return np.frombuffer(stored, np.uint8)
        if coding == CONSTANT and nbytes > 0:
            _expect(f"stored length of constant {what}", 1, stored_nbytes)
            return np.full(nbytes, stored[0], np.uint8)
        if coding == ZSTD and nbytes > 0:
            return _decompress(stored, nbytes, what)
        raise FormatError(f"{what} of unknown coding", expected="0, or 1 or 2 if not empty", found=coding)

    def read_rest(self, nbytes: int) -> memoryview:
        """Read all bytes that are left, `nbytes` of them."""
        _expect("chunk", nbytes, len(self._data) - self._offset, "{} bytes left")
        rest = self._data[self._offset :]
        self._offset = len(self._data)
        return rest

    def finish(self) -> None:
        """Refuse bytes that belong to no stream."""
        _expect("chunk", len(self._data), self._offset, "{} bytes")


def _expect(what: str, expected: int, found: int, form: str = "{}") -> None:
    if expected != found:
        raise FormatError(f"{what} does not fit", expected=form.format(expected), found=form.format(found))


def _decompress(frame: memoryview, nbytes: int, what: str) -> U8:
    content_nbytes, frame_nbytes = _frame_extent(frame)
    _expect(f"content size in the zstd frame of {what}", nbytes, content_nbytes)
    _expect(f"zstd frame of {what}", len(frame), frame_nbytes, "{} bytes")
    try:
        content = _contexts.decompressor.decompress(frame)
    except zstandard.ZstdError as error:
        raise FormatError(
            f"zstd frame of {what} is damaged: {error}", expected=f"{nbytes} bytes", found="none"
        ) from error
    return np.frombuffer(content, np.uint8)


def _frame_extent(frame: memoryview) -> tuple[int, int]:
    """Return the content length that a zstd frame states (RFC 8878, 3.1.1), and the frame's own length; -1: none."""
    if len(frame) < 6 or bytes(frame[:4]) != _ZSTD_MAGIC:
        return -1, -1
    descriptor = frame[4]
    single_segment = descriptor >> 5 & 1
    size_nbytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    offset = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    content_nbytes = int.from_bytes(frame[offset : offset + size_nbytes], "little") + (256 if size_nbytes == 2 else 0)
    offset += size_nbytes
    last = 0
    while not last:
        header = int.from_bytes(frame[offset : offset + 3], "little")
        if offset + 3 > len(frame):
            return content_nbytes, -1
        last = header & 1
        # A block of type 1 is one byte, repeated.
        offset += 3 + (1 if header >> 1 & 3 == 1 else header >> 3)
    return (content_nbytes if size_nbytes else -1), offset + (4 if descriptor & 4 else 0)
