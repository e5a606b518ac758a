"""A directory of safetensors files as a target: weights are read and overwritten in place, by canonical chunks.

Only the bytes of tensors are written; headers and sizes are checked apart. Refuses files that do not belong to the
layout, paths that leave the directory, and to write through a link or into a file that has a second name: a Hugging
Face cache shares its files. Every write may be repeated; `sync` makes all of them durable.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Self

import numpy as np

from dcr_store.errors import InvalidInputError, NotFoundError, StorageError
from dcr_store.targets.chunks import check_chunk, spoil_if_torn
from dcr_store.targets.file_bytes import read_exactly, write_exactly
from dcr_store.targets.file_map import FileMap, Transfer
from dcr_store.targets.paths import existing_directory, fsync_directory, path_inside
from dcr_store.targets.safetensors_file import parse_header

if TYPE_CHECKING:
    from dcr_store.layout.dtypes import Bits
    from dcr_store.layout.layout import Layout


class WeightFile(NamedTuple):
    """What a file of weights must be: its relative path, its header (8-byte length and JSON), its nbytes."""

    path: str
    header: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileProblem:
    """What is wrong with a file of weights apart from its weights.

    Attributes
    ----------
    path : str
        Relative to the directory.
    message : str
        What is wrong.
    expected, found : str
        The two sides.
    """

    path: str
    message: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message} (expected {self.expected}, found {self.found})"


class DirectoryTarget:
    """The weight files of one directory; satisfies ``ports.Target``.

    Parameters
    ----------
    directory : path
        An existing directory. A link to it is resolved once.
    layout : Layout
        Of the version that the files hold.
    files : iterable of (path, header, nbytes)
        All files of weights, as in a version's manifest.
    chunk_elements : int
        Elements of a chunk.
    kept : collection of str
        Paths of files that are as they shall be: never written, whatever chunk is, and allowed to be links.

    Raises
    ------
    InvalidInputError
        If files and layout do not belong together.
    FormatError
        If a header is malformed.

    Notes
    -----
    A file may hold tied tensors under several names. All copies are written, the one that counts last. Where copies
    differ, `read_chunk` returns bits that are neither's, so that no chunk passes for whole while one copy is stale.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        layout: Layout,
        files: Iterable[tuple[str, bytes, int]],
        chunk_elements: int,
        kept: Collection[str] = (),
    ) -> None:
        self.root = existing_directory(directory)
        self.layout = layout
        self.files = tuple(WeightFile(*file) for file in files)
        self.chunk_elements = chunk_elements
        self._kept = frozenset(index for index, file in enumerate(self.files) if file.path in kept)
        self._places = [path_inside(self.root, file.path) for file in self.files]
        if len(set(self._places)) != len(self._places):
            raise InvalidInputError("two files of weights have the same path", key=str(self.root))
        headers = [(file.path, parse_header(file.header, file.nbytes, file.path)) for file in self.files]
        self._map = FileMap.of(layout, headers)
        self._lock = threading.Lock()
        self._readers: dict[int, BinaryIO] = {}
        self._writers: dict[int, BinaryIO] = {}

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        layout: Layout,
        files: Iterable[tuple[str, bytes, int]],
        chunk_elements: int,
        kept: Collection[str] = (),
    ) -> Self:
        """Open a directory after making it and the files that are missing: headers, and zeros that take no space.

        Files that exist are left as they are; `check` tells whether they fit.
        """
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot be made: {error.strerror}", key=str(directory)) from error
        target = cls(directory, layout, files, chunk_elements, kept)
        for index, place in enumerate(target._places):
            if not os.path.lexists(place):
                target._make(index)
        return target

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a chunk's current bits into `out`; zeros where no tensor is.

        Where copies of a tied tensor differ, the chunk reads as one that no version has.

        Raises
        ------
        NotFoundError, IntegrityError
            If a file is missing or shorter than its header says: see `check` and `restore_headers`.
        """
        spoil_if_torn(out, self.copies_of_chunk(space, chunk, out))

    def copies_of_chunk(self, space: str, chunk: int, out: Bits) -> Iterator[Bits]:
        """Yield `out` with a chunk's bits, then arrays of its kind with those of the further copies of tied tensors."""
        start, stop = check_chunk(self.layout, space, chunk, out, self.chunk_elements, writable=True)
        transfers = self._map.first[space].transfers(start, stop)
        if sum(last - first for transfer in transfers for first, last in transfer.parts) < out.nbytes:
            out[:] = 0
        self._read(transfers, out)
        yield out
        for other_map in self._map.others[space]:
            copy = out.copy()
            self._read(other_map.transfers(start, stop), copy)
            yield copy

    def _read(self, transfers: Iterable[Transfer], out: Bits) -> None:
        data = out.view(np.uint8).data
        for file, offset, parts in transfers:
            fd = self._reader(file).fileno()
            read_exactly(fd, offset, [data[first:last] for first, last in parts], str(self._places[file]))

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Overwrite a chunk; elements of no tensor are dropped. Durable after `sync`.

        Raises
        ------
        InvalidInputError
            If a file may not be written here (a link, a second name).
        StorageError
            If it cannot be (permissions, full disk); part of the chunk may have been written.
        """
        start, stop = check_chunk(self.layout, space, chunk, bits, self.chunk_elements)
        data = bits.view(np.uint8).data
        # The copy that counts comes last: killed between two copies, the chunk still reads as not yet written.
        for space_map in (*self._map.others[space], self._map.first[space]):
            for file, offset, parts in space_map.transfers(start, stop):
                if file in self._kept:
                    continue
                fd = self._writer(file).fileno()
                write_exactly(fd, offset, [data[first:last] for first, last in parts], str(self._places[file]))

    def check(self) -> list[FileProblem]:
        """Return what is wrong with the files apart from the weights in them. Writes nothing."""
        return [problem for index in range(len(self.files)) if (problem := self._problem(index)) is not None]

    def restore_headers(self) -> list[str]:
        """Give each file its header and size again and make those that are missing; return the paths of these files.

        Weights are left as they are, where they are; what was cut off comes back as zeros.
        """
        restored = []
        for problem in self.check():
            index = next(i for i, file in enumerate(self.files) if file.path == problem.path)
            if os.path.lexists(self._places[index]):
                self._restore(index)
            else:
                self._make(index)
            restored.append(problem.path)
        return restored

    def sync(self) -> None:
        """Make everything that was written durable, by this process or by one that was killed."""
        # Also files that this object never wrote: a process killed before it may have, and what then passes for right
        # and is not written again is in the page cache only.
        for index, place in enumerate(self._places):
            try:
                os.fsync(self._reader(index).fileno())
            except OSError as error:
                raise StorageError(f"cannot be made durable: {error.strerror}", key=str(place)) from error
        parents = {parent for place in self._places for parent in place.parents}
        for directory in sorted({self.root, *(parent for parent in parents if self.root in parent.parents)}):
            fsync_directory(directory)

    def close(self) -> None:
        """Close all files, without making anything durable."""
        with self._lock:
            for file in (*self._readers.values(), *self._writers.values()):
                file.close()
            self._readers.clear()
            self._writers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _reader(self, index: int) -> BinaryIO:
        file = self._readers.get(index)
        if file is None:
            with self._lock:
                if index not in self._readers:
                    self._readers[index] = _open(self._places[index], os.O_RDONLY)
                file = self._readers[index]
        return file

    def _writer(self, index: int) -> BinaryIO:
        file = self._writers.get(index)
        if file is None:
            with self._lock:
                if index not in self._writers:
                    self._writers[index] = _open_for_writing(self._places[index])
                file = self._writers[index]
        return file

    def _make(self, index: int) -> None:
        place = self._places[index]
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW).close()
        except OSError as error:
            raise StorageError(f"cannot be made: {error.strerror}", key=str(place)) from error
        self._restore(index)

    def _restore(self, index: int) -> None:
        file = self._writer(index)
        try:
            if os.fstat(file.fileno()).st_size != self.files[index].nbytes:
                os.ftruncate(file.fileno(), self.files[index].nbytes)
        except OSError as error:
            raise StorageError(f"cannot get its size: {error.strerror}", key=str(self._places[index])) from error
        write_exactly(file.fileno(), 0, [memoryview(self.files[index].header)], str(self._places[index]))

    def _problem(self, index: int) -> FileProblem | None:
        path, header, nbytes = self.files[index]
        place = self._places[index]
        try:
            status = place.lstat()
        except FileNotFoundError:
            return FileProblem(path, "is missing", f"{nbytes} bytes", "no file")
        except OSError as error:
            raise StorageError(f"cannot be looked at: {error.strerror}", key=str(place)) from error
        unfit = None if index in self._kept and stat.S_ISREG(status.st_mode) else _unfit(status)
        if unfit is not None:
            return FileProblem(path, unfit, "a file of its own", stat.filemode(status.st_mode))
        if status.st_size != nbytes:
            return FileProblem(path, "has another size", f"{nbytes} bytes", f"{status.st_size} bytes")
        found = bytearray(len(header))
        with _open(place, os.O_RDONLY) as file:
            read_exactly(file.fileno(), 0, [memoryview(found)], str(place))
        if found != header:
            return FileProblem(path, "has another header", f"{len(header)} bytes as published", "other bytes")
        return None


def _open(place: Path, flags: int) -> BinaryIO:
    try:
        fd = os.open(place, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)  # a pipe must not make us wait
    except FileNotFoundError as error:
        raise NotFoundError(
            "a file of weights is missing; restore the headers of the target", key=str(place)
        ) from error
    except OSError as error:
        raise StorageError(f"cannot be opened: {error.strerror}", key=str(place)) from error
    return os.fdopen(fd, "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "r+b", buffering=0)


def _open_for_writing(place: Path) -> BinaryIO:
    try:
        file = _open(place, os.O_RDWR | os.O_NOFOLLOW)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ELOOP:
            raise _refused(place, "is a link") from error
        raise
    unfit = _unfit(os.fstat(file.fileno()))
    if unfit is not None:
        file.close()
        raise _refused(place, unfit)
    return file


def _unfit(status: os.stat_result) -> str | None:
    """Return why a file may not be written in place, or None."""
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    return "has a second name (hard link)" if status.st_nlink > 1 else None


def _refused(place: Path, what: str) -> InvalidInputError:
    return InvalidInputError(
        f"{what}, and writing it would change somebody else's file; copy the directory (cp -rL) and use the copy",
        key=str(place),
        expected="a file of its own",
        found=what,
    )
