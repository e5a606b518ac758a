"""Whole canonical spaces in flat files, mapped into memory: the publisher's baseline, and a target.

::

    u8.bin u16.bin u32.bin u64.bin     elements of the space, little-endian, up to the end of its last chunk; zeros
                                       where no tensor is; no file for a space without tensors

Room on disk is taken when the files are made: writing a mapped file on a full disk would end the process with a signal.
Refuses files of another size, unless they are to be made anew.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.layout.dtypes import SPACES, Bits, uint_dtype, width
from dcr_store.layout.layout import Layout
from dcr_store.targets.chunks import check_chunk
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
        self._maps: dict[str, mmap.mmap] = {}
        self._spaces: dict[str, Bits] = {}
        self._gaps: dict[str, set[int]] = {}
        for space in SPACES:
            n = layout.n_chunks(space, chunk_elements) * chunk_elements
            if n:
                mapped = _map(self.root / f"{space}.bin", n * width(space), create=create)
                self._maps[space] = mapped
                self._spaces[space] = np.frombuffer(mapped, uint_dtype(space))
                occupied = layout.occupied(space, chunk_elements)
                self._gaps[space] = set(np.flatnonzero(occupied < chunk_elements).tolist())
        if create:
            fsync_directory(self.root)

    def view(self, space: str, chunk: int) -> Bits:
        """Return a chunk: uintN, shape (chunk_elements,), read-only, the mapped memory itself."""
        view = self.writable_view(space, chunk)
        view.flags.writeable = False
        return view

    def writable_view(self, space: str, chunk: int) -> Bits:
        """Return a chunk: uintN, shape (chunk_elements,), the mapped memory itself: what is written is in the file.

        The caller leaves elements of no tensor zero. Views must not be used after `close`d files were removed or cut.
        """
        if space not in self._spaces:
            raise InvalidInputError(f"there is no chunk {chunk} of space {space} here", key=str(self.root))
        start, stop = chunk * self.chunk_elements, (chunk + 1) * self.chunk_elements
        if not 0 <= start < self._spaces[space].size:
            raise InvalidInputError(f"there is no chunk {chunk} of space {space} here", key=str(self.root))
        return self._spaces[space][start:stop]

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a chunk's current bits into `out`."""
        check_chunk(self.layout, space, chunk, out, self.chunk_elements, writable=True)
        out[:] = self.writable_view(space, chunk)

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Overwrite a chunk; elements of no tensor are dropped. Durable after `sync`."""
        start, stop = check_chunk(self.layout, space, chunk, bits, self.chunk_elements)
        view = self.writable_view(space, chunk)
        if chunk not in self._gaps[space]:
            view[:] = bits
            return
        for _, first, last, offset in self.layout.pieces(space, start, stop):
            view[offset : offset + last - first] = bits[offset : offset + last - first]

    def sync(self) -> None:
        """Make everything that was written durable."""
        for space, mapped in self._maps.items():
            try:
                mapped.flush()
            except OSError as error:
                raise StorageError(
                    f"cannot be made durable: {error.strerror}", key=str(self.root / f"{space}.bin")
                ) from error

    def close(self) -> None:
        """Let go of the files, without making anything durable. The mapping goes when the last view of it goes."""
        self._spaces.clear()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _map(path: Path, nbytes: int, *, create: bool) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o666)
    except FileNotFoundError as error:
        raise NotFoundError("a file of the baseline is missing; make it anew", key=str(path)) from error
    except OSError as error:
        raise StorageError(f"cannot be opened: {error.strerror}", key=str(path)) from error
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
    finally:
        os.close(fd)


def _reserve(fd: int, nbytes: int) -> None:
    """Make a file of zeros whose room on disk is taken, where the file system can do that."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            os.ftruncate(fd, 0)
            raise
        os.ftruncate(fd, nbytes)
