"""A checkpoint on disk, to be read: a directory of safetensors files as transformers writes it, or one such file.

Refuses, with what was found and what to do, a directory without safetensors, files that are incomplete, a tensor in two
files, an index that disagrees with the files, and paths that cannot be stored. Writes nothing.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from dcr_store.errors import FormatError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.layout.dtypes import DTYPES, Bits, shown, uint_dtype
from dcr_store.targets.file_bytes import read_exactly
from dcr_store.targets.paths import OWN_DIRECTORY, check_path
from dcr_store.targets.safetensors_file import FileTensor, Header, read_header

MAX_SIDE_NBYTES: Final = 64 << 20
_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_SKIPPED: Final = (".git", ".cache")


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file of weights: its path relative to the checkpoint, and its header."""

    path: str
    header: Header


@dataclass(frozen=True, slots=True)
class SideFile:
    """Any other file of the checkpoint: its path relative to the checkpoint, and its nbytes."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something in the directory that is no part of the checkpoint, and why."""

    path: str
    reason: str


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
        self._opened(file).read(tensor.begin + start * uint.itemsize, out.view(np.uint8).data)

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
    place = Path(path)
    try:
        status = place.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError("there is no such checkpoint; check the path", key=str(place)) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot be opened: {error}", key=str(place)) from error
    if stat.S_ISDIR(status.st_mode):
        return _open_directory(place.resolve())
    if not place.name.endswith(_SUFFIX):
        raise InvalidInputError(
            "is no checkpoint; give a directory with safetensors files, or one such file",
            key=str(place),
            expected=f"a name that ends in {_SUFFIX}",
            found=repr(place.name),
        )
    place = place.parent.resolve() / place.name  # not place.resolve(): a link in a cache has the name that counts
    return Checkpoint(place.parent, (CheckpointFile(check_path(place.name), read_header(place)),))


def _open_directory(root: Path) -> Checkpoint:
    weights: list[str] = []
    side: list[SideFile] = []
    left_out: list[LeftOut] = []
    for path, entry in _walk(root, "", left_out):
        nbytes = entry.stat().st_size
        if "/" not in path and path.endswith(_SUFFIX):
            weights.append(path)
        elif nbytes > MAX_SIDE_NBYTES:
            left_out.append(LeftOut(path, f"{nbytes} bytes, and side files may have {MAX_SIDE_NBYTES}"))
        else:
            side.append(SideFile(path, nbytes))
    if not weights:
        raise _no_weights(root, [file.path for file in side] + [item.path for item in left_out])
    _check_parts(root, weights)
    files = tuple(CheckpointFile(path, read_header(root / path)) for path in sorted(weights))
    for file in side:
        if "/" not in file.path and file.path.endswith(_INDEX_SUFFIX):
            _check_index(root / file.path, {item.path: item for item in files})
    side.sort(key=lambda item: item.path)
    left_out.sort(key=lambda item: item.path)
    return Checkpoint(root, files, tuple(side), tuple(left_out))


def _walk(root: Path, below: str, left_out: list[LeftOut]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the regular files of a directory, through links to files (a Hugging Face cache has nothing else)."""
    try:
        with os.scandir(root / below) as listing:
            entries = list(listing)
    except OSError as error:
        raise StorageError(f"cannot be listed: {error.strerror}", key=str(root / below)) from error
    for entry in entries:
        if entry.name in _SKIPPED or entry.name.startswith(OWN_DIRECTORY):
            continue
        path = check_path(below + entry.name)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, path + "/", left_out)
        elif entry.is_file():
            yield path, entry
        elif entry.is_symlink():
            left_out.append(LeftOut(path, "a link to a directory" if entry.is_dir() else "a link to no file"))
        else:
            left_out.append(LeftOut(path, "no regular file"))


def _no_weights(root: Path, names: list[str]) -> InvalidInputError:
    advice = "give the directory that holds the *.safetensors files"
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        advice = "it holds pickled weights: load them and save them again with save_pretrained(safe_serialization=True)"
    elif any(name.endswith(".distcp") for name in names):
        advice = "it holds a torch distributed checkpoint: export it to safetensors first"
    elif nested := sorted({name.rsplit("/", 1)[0] for name in names if "/" in name and name.endswith(_SUFFIX)}):
        advice = f"did you mean {' or '.join(str(root / item) for item in nested[:3])}?"
    found = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return InvalidInputError(
        f"has no safetensors files at its top; {advice}",
        key=str(root),
        expected=f"model{_SUFFIX} or model-00001-of-0000N{_SUFFIX}",
        found=found or "nothing",
    )


def _check_parts(root: Path, weights: list[str]) -> None:
    """Refuse a directory in which a file of a numbered set is missing, whether or not an index says so."""
    parts: dict[tuple[str, str], set[int]] = defaultdict(set)
    for path in weights:
        if match := _PART.fullmatch(path):
            parts[match[1], match[3]].add(int(match[2]))
    for (prefix, n_parts), present in parts.items():
        missing = next((i for i in range(1, int(n_parts) + 1) if i not in present), None)
        if missing is not None:
            raise InvalidInputError(
                "a file of the checkpoint is missing; finish the download or copy",
                key=str(root),
                expected=f"{prefix}-{missing:05d}-of-{n_parts}{_SUFFIX}",
                found=f"{len(present)} of {int(n_parts)} files",
            )


def _check_index(index: Path, files: dict[str, CheckpointFile]) -> None:
    key = str(index)
    try:
        document = canonical.decode(index.read_bytes(), key)
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", key=key) from error
    except FormatError as error:
        raise FormatError(f"is not valid JSON: {error.__cause__}", key=key) from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(item, str) for item in weight_map.values()):
        raise FormatError("has no weight_map from tensors to files", key=key, expected="an object of texts")
    for path in sorted(set(weight_map.values())):
        if path not in files:
            raise InvalidInputError(
                f"the index names a file that is not there: {shown(path)}; finish the download or copy",
                key=key,
                expected=path,
                found=", ".join(files),
            )
        here = {tensor.name for tensor in files[path].header.tensors}
        listed = {name for name, where in weight_map.items() if where == path}
        for name in sorted(listed ^ here)[:1]:
            raise InvalidInputError(
                f"the index and {path} disagree about tensor {shown(name)}; save the checkpoint again",
                key=key,
                expected=f"it in {weight_map[name]}" if name in weight_map else f"it not in {path}",
                found=f"it in {path}" if name in here else f"it not in {path}",
            )


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
