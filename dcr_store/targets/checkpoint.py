"""A checkpoint on disk, to be read: a directory of safetensors files as transformers writes it, or one such file.

Refuses, with what was found and what to do, a directory without safetensors, files that are incomplete, a tensor in two
files, an index that disagrees with the files, and paths that cannot be stored. Writes nothing.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.layout.dtypes import DTYPES, Bits, shown, uint_dtype
from dcr_store.targets.checkpoint_listing import (
    SUFFIX,
    LeftOut,
    SideFile,
    check_index,
    is_distributed,
    is_index,
    list_checkpoint,
)
from dcr_store.targets.file_bytes import read_exactly
from dcr_store.targets.paths import check_path, local_path
from dcr_store.targets.safetensors_file import FileTensor, Header, read_header


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file of weights: its path relative to the checkpoint, and its header."""

    path: str
    header: Header


class Checkpoint:
    """An open checkpoint. Safe to read from several threads; close it, or use it as a context manager.

    Attributes
    ----------
    root : Path
        Its directory.
    files : tuple of CheckpointFile
        Files of weights, by path.
    side_files : tuple of SideFile
        Configuration, tokenizer, index and so on, by path.
    left_out : tuple of LeftOut
        What is not taken along.
    tensors : dict of str to (CheckpointFile, FileTensor)
        In the order of files, and within each in the order of bytes.
    """

    def __init__(
        self,
        root: Path,
        files: tuple[CheckpointFile, ...],
        side_files: tuple[SideFile, ...] = (),
        left_out: tuple[LeftOut, ...] = (),
    ) -> None:
        self.root = root
        self.files = files
        self.side_files = side_files
        self.left_out = left_out
        self.tensors = _tensors_by_name(files)
        self._open: dict[str, _OpenFile] = {}
        try:
            for file in files:
                self._open[file.path] = _OpenFile(root / file.path, file.header)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.end - tensor.begin for _, tensor in self.tensors.values())

    def bits(self, name: str) -> Bits:
        """Return a tensor's bits: little-endian uintN, shape (n_elements,), read-only.

        A view on the mapped file, or a copy if the tensor is not aligned in it. The view stays valid after `close`.
        """
        file, tensor = self._find(name)
        uint = uint_dtype(DTYPES[tensor.dtype].space)
        if tensor.begin == tensor.end:
            return np.zeros(0, uint)
        octets = self._opened(file).mapped()[tensor.begin : tensor.end]
        if tensor.begin % uint.itemsize:
            octets = octets.copy()
            octets.flags.writeable = False
        return octets.view(uint)

    def read_into(self, name: str, start: int, stop: int, out: Bits) -> None:
        """Copy elements ``[start, stop)`` of a tensor into `out`.

        Parameters
        ----------
        name : str
            The tensor.
        start, stop : int
            In elements of its space, counted from its first.
        out : ndarray of little-endian uintN, shape (stop - start,)
            C-contiguous; overwritten.

        Raises
        ------
        NotFoundError
            If there is no such tensor.
        IntegrityError
            If the file was changed since the checkpoint was opened.
        """
        file, tensor = self._require_range(name, start, stop, out)
        self._opened(file).read(tensor.begin + start * out.itemsize, out.view(np.uint8).data)

    def _require_range(self, name: str, start: int, stop: int, out: Bits) -> tuple[CheckpointFile, FileTensor]:
        """Return a tensor, if elements of it can be read into `out`."""
        file, tensor = self._find(name)
        uint = uint_dtype(DTYPES[tensor.dtype].space)
        if not 0 <= start <= stop <= (tensor.end - tensor.begin) // uint.itemsize:
            raise InvalidInputError(f"elements {start} to {stop} are outside of the tensor", key=name)
        if out.dtype != uint or out.shape != (stop - start,) or not out.flags.c_contiguous or not out.flags.writeable:
            raise InvalidInputError(
                "cannot be read into this array",
                key=name,
                expected=f"writable contiguous {uint} of shape ({stop - start},)",
                found=f"{out.dtype} of shape {out.shape}",
            )
        return file, tensor

    def read_side_file(self, path: str) -> bytes:
        """Return the content of a side file; ``IntegrityError`` if it has another length than when it was listed."""
        for side in self.side_files:
            if side.path == path:
                break
        else:
            raise NotFoundError("is no side file of the checkpoint", key=path)
        try:
            with (self.root / path).open("rb") as file:
                data = file.read(side.nbytes + 1)
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", key=path) from error
        if len(data) != side.nbytes:
            raise _changed(self.root / path, f"{side.nbytes} bytes", f"{len(data)} bytes or more")
        return data

    def check_unchanged(self) -> None:
        """Raise ``IntegrityError`` if a file of weights was written or replaced since the checkpoint was opened.

        To be called after the last read: what was read before is then of one state.
        """
        for file in self._open.values():
            file.check_unchanged()

    def close(self) -> None:
        """Close all files. Views that were given out stay valid."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, file: CheckpointFile) -> _OpenFile:
        try:
            return self._open[file.path]
        except KeyError:
            raise InvalidInputError("the checkpoint is closed; open it again", key=str(self.root)) from None

    def _find(self, name: str) -> tuple[CheckpointFile, FileTensor]:
        try:
            return self.tensors[name]
        except KeyError:
            raise NotFoundError(f"there is no tensor {shown(name)} in the checkpoint", key=str(self.root)) from None


class _OpenFile:
    """One file of weights, open for reading; it is the file that was there when its header was read."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise StorageError(f"cannot be opened: {error.strerror}", key=str(path)) from error
        self._map: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._status = self._identity(os.fstat(self._file.fileno()))
        found = bytearray(header.data_start)
        try:
            if self._status[2] != header.nbytes:
                raise _changed(path, f"{header.nbytes} bytes", f"{self._status[2]} bytes")
            self.read(0, memoryview(found))
            if found != header.raw:
                raise _changed(path, "the header as it was read", "another header")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        try:
            now = self._path.stat()
        except OSError as error:
            raise _changed(self._path, "the file", error.strerror or "no file") from error
        if self._identity(now) != self._status or self._identity(os.fstat(self._file.fileno())) != self._status:
            raise _changed(self._path, "no change", "a new time of modification, size or file")

    def read(self, offset: int, out: memoryview) -> None:
        read_exactly(self._file.fileno(), offset, [out], str(self._path))

    def mapped(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._map is None:
            # The array holds the mapping: it goes when the last view goes.
            self._map = np.frombuffer(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return self._map

    def close(self) -> None:
        self._map = None
        self._file.close()


def _changed(path: Path, expected: str, found: str) -> IntegrityError:
    return IntegrityError(
        "was changed while it was being read; wait until the checkpoint is complete, then try again",
        key=str(path),
        expected=expected,
        found=found,
    )


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: a directory with safetensors files at its top, or one such file.

    Raises
    ------
    NotFoundError
        If there is nothing at `path`.
    InvalidInputError
        If it is no checkpoint, or not a complete one; says what was found and what to do.
    FormatError
        If a file is no safetensors file or the index is malformed.
    """
    place = local_path(path, "directory")
    try:
        status = place.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError("there is no such checkpoint; check the path", key=str(place)) from error
    except OSError as error:
        raise StorageError(f"cannot be opened: {error.strerror}", key=str(place)) from error
    if stat.S_ISDIR(status.st_mode):
        return _open_directory(place.resolve())
    if is_distributed(place.name):
        raise InvalidInputError(
            "is a file of a torch distributed checkpoint; give its folder", key=str(place), expected=str(place.parent)
        )
    if not place.name.endswith(SUFFIX):
        raise InvalidInputError(
            "is no checkpoint; give a directory with safetensors files, or one such file",
            key=str(place),
            expected=f"a name that ends in {SUFFIX}",
            found=repr(place.name),
        )
    place = place.parent.resolve() / place.name  # not place.resolve(): a link in a cache has the name that counts
    return Checkpoint(place.parent, (CheckpointFile(check_path(place.name), read_header(place)),))


def _open_directory(root: Path) -> Checkpoint:
    listing = list_checkpoint(root)
    files = tuple(CheckpointFile(path, read_header(root / path)) for path in listing.weights)
    tensors = {file.path: frozenset(tensor.name for tensor in file.header.tensors) for file in files}
    for side in listing.side_files:
        if is_index(side.path):
            check_index(root / side.path, tensors)
    return Checkpoint(root, files, listing.side_files, listing.left_out)


def _tensors_by_name(files: tuple[CheckpointFile, ...]) -> dict[str, tuple[CheckpointFile, FileTensor]]:
    tensors: dict[str, tuple[CheckpointFile, FileTensor]] = {}
    for file in files:
        for tensor in file.header.tensors:
            if tensor.name in tensors:
                raise InvalidInputError(
                    f"tensor {shown(tensor.name)} is in two files; remove the file that does not belong here",
                    expected="each tensor once",
                    found=f"{tensors[tensor.name][0].path} and {file.path}",
                )
            tensors[tensor.name] = (file, tensor)
    return tensors
