"""Tensors in, whole chunks out: pieces of the canonical spaces are collected until a chunk is complete.

Tensors may come in any order. A piece that covers a whole chunk is passed on without a copy of its own; other pieces
are copied into the chunk's buffer. Refuses nothing but a full disk: which tensors may come is the caller's question.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from tempfile import TemporaryFile, gettempdir
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import StorageError
from dcr_store.layout.dtypes import Bits, uint_dtype

ReadInto = Callable[[int, int, Bits], None]
Emit = Callable[[str, int, Callable[[Bits], None]], None]
MAX_BUFFERS: Final = 32


class ChunkAssembler:
    """Collects pieces.

    Parameters
    ----------
    required : mapping of str to ndarray of int64, or None
        Elements of tensors in each chunk of each space. None: tensors come in the order of ascending addresses without
        end in sight, and a chunk is complete when a later one begins.
    emit : callable
        Called once per chunk, with space, chunk and a function that fills a buffer with the chunk's bits, once.
    """

    def __init__(self, chunk_elements: int, required: Mapping[str, NDArray[np.int64]] | None, emit: Emit) -> None:
        self.chunk_elements = chunk_elements
        self._required = required
        self._emit = emit
        self._partial: dict[tuple[str, int], tuple[Bits, int]] = {}
        self._spare: dict[str, list[Bits]] = {}

    def feed(self, space: str, start: int, n_elements: int, read_into: ReadInto) -> None:
        """Take one tensor: `n_elements` from address `start`; ``read_into(a, b, out)`` copies elements a to b of it."""
        if n_elements == 0:
            return  # it takes no address, and the chunk that its start is in may be gone already
        size = self.chunk_elements
        if self._required is None:
            self._flush_before(space, start // size)
        for chunk in range(start // size, -(-(start + n_elements) // size)):
            low, high = max(start, chunk * size), min(start + n_elements, (chunk + 1) * size)
            if high - low == size:
                self._emit(space, chunk, _filler(read_into, low - start, high - start))
                continue
            buffer, n_covered = self._partial.get((space, chunk)) or (self._buffer(space, chunk), 0)
            read_into(low - start, high - start, buffer[low - chunk * size : high - chunk * size])
            self._partial[space, chunk] = (buffer, n_covered + high - low)
            if self._required is not None and n_covered + high - low == self._required[space][chunk]:
                self._pass_on(space, chunk)

    def _buffer(self, space: str, chunk: int) -> Bits:
        """Return memory for a chunk, at first, and a mapped temporary file when many chunks are open.

        It holds zeros where no tensor will be.
        """
        if len(self._partial) < MAX_BUFFERS:
            spare = self._spare.get(space)
            if spare:
                buffer = spare.pop()
                if self._required is None or self._required[space][chunk] < self.chunk_elements:
                    buffer.fill(0)
                return buffer
            return np.zeros(self.chunk_elements, uint_dtype(space))
        try:
            with TemporaryFile() as file:
                # Allocated, not sparse: a full disk is an error here, not a SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, self.chunk_elements * uint_dtype(space).itemsize)
                return np.memmap(file, uint_dtype(space), "r+")
        except OSError as error:
            raise StorageError(
                f"chunks that wait for more tensors cannot be kept: {error.strerror}; free space there, or set TMPDIR",
                key=gettempdir(),
            ) from error

    def _pass_on(self, space: str, chunk: int) -> None:
        buffer, _ = self._partial.pop((space, chunk))

        def fill(out: Bits) -> None:
            np.copyto(out, buffer)
            if not isinstance(buffer, np.memmap):
                self._spare.setdefault(space, []).append(buffer)

        self._emit(space, chunk, fill)

    def _flush_before(self, space: str, chunk: int) -> None:
        for key in sorted(key for key in self._partial if key[0] == space and key[1] < chunk):
            self._pass_on(*key)

    def finish(self) -> None:
        """Pass on the chunks that are still open."""
        for key in sorted(self._partial):
            self._pass_on(*key)

    def partial(self, space: str, chunk: int) -> Bits | None:
        """Return the buffer of a chunk that is not complete, None if there is none.

        Where a tensor is still to come it holds anything.
        """
        found = self._partial.get((space, chunk))
        return None if found is None else found[0]

    def open_chunks(self) -> Iterator[tuple[str, int]]:
        """Iterate over the chunks that are not complete."""
        return iter(list(self._partial))


def _filler(read_into: ReadInto, low: int, high: int) -> Callable[[Bits], None]:
    return lambda out: read_into(low, high, out)
