"""Whole canonical spaces in flat files, mapped into memory: the publisher's baseline, and a target.

::

    u8.bin u16.bin u32.bin u64.bin     the elements of the space, little-endian, zeros where no tensor is;
                                       no file for a space without tensors

Room on disk is taken when the files are made: writing to a mapping of a full disk would end the process with a signal.
Refuses files of another size, unless they are to be made anew.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, uint_dtype, width
from dcr_store.layout.layout import Layout
from dcr_store.targets.chunks import check_chunk
from dcr_store.targets.file_bytes import write_exactly
from dcr_store.targets.paths import existing_directory, fsync_directory


class SpaceFiles:
    """The spaces of one state in files; satisfies ``ports.Target``.

    Parameters
    ----------
    directory : path
        Where the files are; made if `create`.
    layout : Layout
        Of the state.
    chunk_elements : int
        Elements of a chunk.
    create : bool
        Make files that are missing or of another size, as zeros.

    Raises
    ------
    NotFoundError, IntegrityError
        If a file is missing or of another size, and not `create`.
    StorageError
        If a file cannot be made: a full disk is found out here.
    """

    def __init__(
        self, directory: str | os.PathLike[str], layout: Layout, chunk_elements: int, *, create: bool = False
    ) -> None:
        if create:
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot be made: {error.strerror}", key=str(directory)) from error
        self.root = existing_directory(directory)
        self.layout = layout
        self.chunk_elements = chunk_elements
        self._fds: dict[str, int] = {}
        self._close = weakref.finalize(self, _close_all, self._fds)  # also when nobody closes, or the next lines raise
        self._spaces: dict[str, Bits] = {}
        self._gaps: dict[str, set[int]] = {}
        for space in SPACES:
            n = layout.spaces[space]
            if n:
                path = self.root / f"{space}.bin"
                self._fds[space] = _open(path, create=create)
                mapped = _map(self._fds[space], path, n * width(space), create=create)
                self._spaces[space] = np.frombuffer(mapped, uint_dtype(space))
                occupied = layout.occupied(space, chunk_elements)
                occupied[-1] += -n % chunk_elements  # what is past the end is no gap: it is not written at all
                self._gaps[space] = set(np.flatnonzero(occupied < chunk_elements).tolist())
        if create:
            fsync_directory(self.root)

    def view(self, space: str, chunk: int) -> Bits:
        """Return a chunk: uintN, shape (chunk_elements,), read-only.

        The mapped memory itself; of a last chunk that goes past the end of the space a copy, with zeros there.
        """
        view = self.writable_view(space, chunk)
        if view.size < self.chunk_elements:
            view = np.concatenate([view, np.zeros(self.chunk_elements - view.size, view.dtype)])
        view.flags.writeable = False
        return view

    def writable_view(self, space: str, chunk: int) -> Bits:
        """Return the mapped memory of a chunk: uintN, shape (chunk_elements,), less at the end of the space.

        What is written there is in the file, durable after `sync`. The caller leaves elements of no tensor zero.
        """
        start = chunk * self.chunk_elements
        if space not in self._spaces or not 0 <= start < self._spaces[space].size:
            raise InvalidInputError(f"there is no chunk {chunk} of space {space} here", key=str(self.root))
        return self._spaces[space][start : start + self.chunk_elements]

    def elements(self, space: str, start: int, stop: int) -> Bits:
        """Return the elements at addresses ``[start, stop)``: uintN, read-only, the mapped memory itself."""
        if start == stop:
            return np.empty(0, uint_dtype(space))
        view = self._spaces[space][start:stop]
        view.flags.writeable = False
        return view

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a chunk's current bits into `out`; zeros past the end of the space."""
        check_chunk(self.layout, space, chunk, out, self.chunk_elements, writable=True)
        view = self.writable_view(space, chunk)
        out[: view.size] = view
        out[view.size :] = 0

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Overwrite a chunk; elements of no tensor are dropped. Durable after `sync`."""
        start, stop = check_chunk(self.layout, space, chunk, bits, self.chunk_elements)
        if chunk in self._gaps[space]:
            kept = np.zeros_like(bits)
            for _, first, last, offset in self.layout.pieces(space, start, stop):
                kept[offset : offset + last - first] = bits[offset : offset + last - first]
            bits = kept
        bits = bits[: self._spaces[space].size - start]
        # Not through the mapping: there each new page costs a fault, and a full disk ends the process.
        path = str(self.root / f"{space}.bin")
        write_exactly(self._fds[space], start * width(space), [bits.view(np.uint8).data], path)

    def sync(self) -> None:
        """Make everything that was written durable."""
        for space, fd in self._fds.items():
            try:
                os.fsync(fd)  # also what was written through the mapping
            except OSError as error:
                raise StorageError(
                    f"cannot be made durable: {error.strerror}", key=str(self.root / f"{space}.bin")
                ) from error

    def close(self) -> None:
        """Let go of the files, without making anything durable. The mapping goes when the last view of it goes."""
        self._spaces.clear()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _close_all(fds: dict[str, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def _open(path: Path, *, create: bool) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o666)
    except FileNotFoundError as error:
        raise NotFoundError("a file of the baseline is missing; make it anew", key=str(path)) from error
    except OSError as error:
        raise StorageError(f"cannot be opened: {error.strerror}", key=str(path)) from error


def _map(fd: int, path: Path, nbytes: int, *, create: bool) -> mmap.mmap:
    try:
        found = os.fstat(fd).st_size
        if found != nbytes:
            if not create:
                raise IntegrityError(
                    "has another size than the layout says; make it anew", key=str(path), expected=nbytes, found=found
                )
            os.ftruncate(fd, 0)  # first to nothing: nothing of what was there may remain
            _reserve(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        raise StorageError(f"cannot get {nbytes} bytes: {error.strerror}", key=str(path)) from error


def _reserve(fd: int, nbytes: int) -> None:
    """Make a file of zeros whose room on disk is taken, where the file system can do that."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            os.ftruncate(fd, 0)
            raise
        os.ftruncate(fd, nbytes)
