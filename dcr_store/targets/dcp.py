"""A torch distributed checkpoint (DCP) on disk, to be read as a checkpoint: a folder with ``.metadata`` and its files.

However it was sharded, its tensors are read in canonical order, range by range: nothing is loaded whole, and nothing is
mapped. torch is not needed, and nothing of the checkpoint is executed. Entries that are no tensors are left out, and
said so. Refuses folders in which something is missing, cut short, overlapping or of another kind; compressed entries;
packed dtypes.
"""

from __future__ import annotations

import io
import math
import os
import threading
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dcr_store.errors import DcrError, FormatError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Box, clipped, view
from dcr_store.layout.dtypes import DTYPES, Bits, n_elements, uint_dtype
from dcr_store.layout.from_dcp import maps_of_dcp
from dcr_store.layout.pieces import in_elements
from dcr_store.layout.tensors import torch_dtypes
from dcr_store.targets.checkpoint import Checkpoint, CheckpointFile, open_checkpoint
from dcr_store.targets.checkpoint_listing import METADATA, SUFFIX, LeftOut, is_distributed
from dcr_store.targets.dcp_pickle import StoredTensor, read_metadata, read_tensor
from dcr_store.targets.file_bytes import read_exactly
from dcr_store.targets.paths import check_path, local_path
from dcr_store.targets.safetensors_file import FileTensor, Header

_N_OPEN: Final = 64
_MAX_METADATA_NBYTES: Final = 1 << 30
_ZIP_HEADER_NBYTES: Final = 30
_MOST_PER_BYTE: Final = 2  # values of the smallest dtypes

_Place = tuple[str, int, int, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of a tensor, and where in which file it was saved."""

    name: str
    boxes: tuple[Box, ...]
    shape: tuple[int, ...]
    dtype: str
    path: str
    offset: int
    nbytes: int

    @property
    def key(self) -> str:
        return f"{self.path} at {self.offset}"

    @property
    def place(self) -> _Place:
        """Where it is and what it has to be: what is there was compared with that, and not with another's."""
        return self.path, self.offset, self.nbytes, self.dtype, self.shape


class DcpCheckpoint(Checkpoint):
    """An open distributed checkpoint; see ``Checkpoint``. It has no files of weights, only tensors."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, ())
        place = root / METADATA
        self._identities: dict[str, tuple[int, int, int, int]] = {}
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()
        self._found: dict[_Place, tuple[StoredTensor, int, int]] = {}
        self._copied: tuple[_Place, Bits] | None = None
        self._closed = False
        try:
            if place.stat().st_size > _MAX_METADATA_NBYTES:
                raise FormatError(
                    "is too long", key=METADATA, expected=f"up to {_MAX_METADATA_NBYTES} bytes", found="more"
                )
            data = place.read_bytes()
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", key=str(place)) from error
        self._digest = canonical.sha256(data)
        metadata = read_metadata(data, str(place))
        try:
            _require_room(metadata, root)
            found = maps_of_dcp(metadata)
            infos = {(index.fqn, _offset(index)): info for index, info in metadata.storage_data.items()}
            self._chunks = {
                name: tuple(
                    self._chunk(name, mapped, infos.get((name, tuple(chunk.offsets))))
                    for mapped, chunk in zip(maps, metadata.state_dict_metadata[name].chunks, strict=True)
                    if mapped.n_values
                )
                for name, maps in found.maps.items()
            }
        except DcrError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            raise FormatError(
                f"cannot be understood: {error}; save the checkpoint again",
                key=str(place),
                expected="the metadata of DCP's FileSystemWriter",
            ) from error
        self.left_out = (
            *(LeftOut(name, "no tensor") for name in sorted(found.others)),
            *_others(root, {chunk.path for chunks in self._chunks.values() for chunk in chunks}, infos.values()),
        )
        file = CheckpointFile(METADATA, Header(b"", (), {}, 0, 0))
        for name, (dtype, shape) in found.tensors.items():
            row = DTYPES[dtype]
            nbytes = n_elements(row, shape) * row.width
            self.tensors[name] = file, FileTensor(name, dtype, shape, 0, nbytes)

    def _chunk(self, name: str, mapped: AffineMap, info: Any) -> _Chunk:
        if info is None:
            raise FormatError(
                "the metadata does not say where a chunk is; save the checkpoint again",
                key=name,
                expected="an entry in storage_data",
                found="none",
            )
        if getattr(info, "transform_descriptors", None):
            raise FormatError(
                "is compressed or otherwise transformed; save the checkpoint without extensions",
                key=name,
                expected="no transform_descriptors",
                found=repr(info.transform_descriptors)[:80],
            )
        path, offset, nbytes = check_path(info.relative_path), int(info.offset), int(info.length)
        place = self.root / path
        if path not in self._identities:
            try:
                self._identities[path] = _identity(place.stat())
            except FileNotFoundError as error:
                raise InvalidInputError(
                    "a file of the checkpoint is missing; finish the copy",
                    key=str(place),
                    expected=f"{path}, for {name}",
                    found="no file",
                ) from error
            except OSError as error:
                raise StorageError(f"cannot be read: {error.strerror}", key=str(place)) from error
        size = self._identities[path][2]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise InvalidInputError(
                "a file of the checkpoint is cut short; copy it again",
                key=str(place),
                expected=f"{offset + nbytes} bytes or more, for {name}",
                found=f"{size} bytes",
            )
        boxes = in_elements(mapped.boxes[name], mapped.dtype)
        return _Chunk(name, boxes, mapped.shape, mapped.dtype, path, offset, nbytes)

    # ------------------------------------------------------------------ reading

    def bits(self, name: str) -> Bits:
        """Return a tensor's bits, a copy: little-endian uintN, shape (n_elements,), read-only."""
        tensor = self._find(name)[1]
        uint = uint_dtype(DTYPES[tensor.dtype].space)
        out: Bits = np.empty((tensor.end - tensor.begin) // uint.itemsize, uint)
        self.read_into(name, 0, len(out), out)
        out.flags.writeable = False
        return out

    def read_into(self, name: str, start: int, stop: int, out: Bits) -> None:
        """Copy elements ``[start, stop)`` of a tensor into `out`; as of ``Checkpoint``."""
        self._require_range(name, start, stop, out)
        for chunk in self._chunks[name]:
            parts = [part for item in chunk.boxes for part in clipped(item, start, stop)]
            if not parts:
                continue
            first = min(part.here for part in parts)
            local = self._local(chunk, first, max(part.here_stop for part in parts))
            for part in parts:
                np.copyto(view(out, part.there - start, part, "there"), view(local, part.here - first, part, "here"))

    def _local(self, chunk: _Chunk, start: int, stop: int) -> Bits:
        """Return elements ``[start, stop)`` of a chunk, in C order."""
        key = chunk.place
        with self._lock:
            copied = self._copied
            found = self._found.get(key)
        if copied is not None and copied[0] == key:
            return copied[1][start:stop]
        part = _Part(self._file(chunk.path), chunk.offset, chunk.nbytes)
        if found is None:
            found = _parsed(chunk, part)
            with self._lock:
                self._found[key] = found
        stored, first, n_octets = found
        row = DTYPES[chunk.dtype]
        uint, per = uint_dtype(row.space), row.elements_per_value
        first += stored.offset * per * uint.itemsize
        if _is_contiguous(stored):
            return part.elements(first + start * uint.itemsize, stop - start, uint)
        # They lie otherwise in the file: all of them are read, and kept until another chunk's are.
        flat = part.elements(first, n_octets // uint.itemsize - stored.offset * per, uint)
        sizes = (*stored.shape, per)
        strides = [stride * per * uint.itemsize for stride in stored.strides] + [uint.itemsize]
        bits = np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, sizes, strides)).reshape(-1)
        with self._lock:
            self._copied = key, bits
        return bits[start:stop]

    def _file(self, path: str) -> _File:
        with self._lock:
            if self._closed:
                raise InvalidInputError("the checkpoint is closed; open it again", key=str(self.root))
            found = self._files.pop(path, None) or _File(self.root / path, self._identities[path])
            self._files[path] = found
            while len(self._files) > _N_OPEN:
                self._files.popitem(last=False)  # closed when its last reader is done
            return found

    def read_side_file(self, path: str) -> bytes:
        """Raise ``NotFoundError``: there are none."""
        raise NotFoundError("is no side file of the checkpoint", key=path)

    def check_unchanged(self) -> None:
        """Raise ``IntegrityError`` if a file was written or replaced since the checkpoint was opened."""
        for path, identity in self._identities.items():
            try:
                now = _identity((self.root / path).stat())
            except OSError as error:
                raise _changed(self.root / path) from error
            if now != identity:
                raise _changed(self.root / path)
        try:
            digest = canonical.sha256((self.root / METADATA).read_bytes())
        except OSError as error:
            raise _changed(self.root / METADATA) from error
        if digest != self._digest:
            raise _changed(self.root / METADATA)

    def close(self) -> None:
        """Let go of all files."""
        self._closed = True
        self._copied = None
        self._files.clear()


def is_dcp(directory: Path) -> bool:
    """Return whether a directory is a distributed checkpoint, and no directory of safetensors."""
    try:
        return (directory / METADATA).is_file() and not any(path.suffix == SUFFIX for path in directory.iterdir())
    except OSError:
        return False


def open_source(path: str | os.PathLike[str]) -> Checkpoint:
    """Open what can be published: an HF directory, a safetensors file, or a distributed checkpoint.

    Raises
    ------
    As ``open_checkpoint``, and ``InvalidInputError`` if a directory is both, or ``FormatError`` if a distributed
    checkpoint is not whole, or is not what DCP writes.
    """
    place = local_path(path, "directory")
    if is_dcp(place):
        return DcpCheckpoint(place.resolve())
    opened = open_checkpoint(path)
    # Only one of the two is what is to be published, and the other would go along as side files.
    theirs = [] if place.is_file() else [name for name in os.listdir(place) if is_distributed(name)]  # noqa: PTH208
    theirs = sorted(name for name in theirs if (place / name).is_file())
    if theirs:
        opened.close()
        ours = ", ".join(file.path for file in opened.files[:3])
        raise InvalidInputError(
            "holds safetensors weights and a torch distributed checkpoint, and which of the two is meant cannot be "
            "told; give each a directory of its own",
            key=str(place),
            expected="one checkpoint",
            found=f"{ours} and {', '.join(theirs[:3])}",
        )
    return opened


def _require_room(metadata: Any, root: Path) -> None:
    """Refuse tensors of which the folder cannot hold a value each, before their values are counted."""
    nbytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    for name, entry in metadata.state_dict_metadata.items():
        for item in (entry, *getattr(entry, "chunks", ())):
            sizes = getattr(item, "size", None) or getattr(item, "sizes", None) or ()
            n = math.prod(max(int(size), 0) for size in sizes)
            if n > _MOST_PER_BYTE * nbytes:
                raise FormatError(
                    "the metadata tells of more values than the files hold; copy the checkpoint again",
                    key=name,
                    expected=f"up to {nbytes} bytes",
                    found=f"{n} values",
                )


def _offset(index: Any) -> tuple[int, ...]:
    """Return a chunk's offset; entries that are no tensors have none."""
    return tuple(getattr(index, "offset", None) or ())


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: Path) -> IntegrityError:
    return IntegrityError(
        "was changed while it was being read; wait until the checkpoint is complete, then try again",
        key=str(path),
        expected="no change",
        found="another time of modification, size or file",
    )


def _others(root: Path, paths: set[str], infos: Any) -> Iterator[LeftOut]:
    """Yield files of the folder that hold none of its tensors."""
    known = paths | {METADATA} | {str(getattr(info, "relative_path", "")) for info in infos}
    for name in sorted(path.name for path in root.iterdir()):
        if name not in known and not any(path.startswith(name + "/") for path in known):
            yield LeftOut(name, "no tensors of the distributed checkpoint")


def _is_contiguous(stored: StoredTensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(stored.shape), reversed(stored.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _as_it_is(info: zipfile.ZipInfo, key: str) -> zipfile.ZipInfo:
    """Return a member of an archive that is stored as it is; a compressed one may be thousands of times as long."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise FormatError("is compressed; save the checkpoint again without", key=key, found=info.filename[:120])
    return info


def _parsed(chunk: _Chunk, part: _Part) -> tuple[StoredTensor, int, int]:
    """Return what was saved of a chunk, and where the bytes of its storage are in `part`."""
    key = f"{chunk.name} ({chunk.key})"
    try:
        with zipfile.ZipFile(_Window(part)) as archive:
            by_name = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            stored = read_tensor(archive.read(_as_it_is(by_name["data.pkl"], key)), key)
            if "byteorder" in by_name and archive.read(_as_it_is(by_name["byteorder"], key)) != b"little":
                raise FormatError("is big-endian; save it on a little-endian machine", key=key)
            info = _as_it_is(by_name[f"data/{stored.storage}"], key)
        header = part.read(info.header_offset, _ZIP_HEADER_NBYTES)
    except DcrError:
        raise
    except Exception as error:  # a damaged archive can fail in any way, and each way of compressing in its own
        raise FormatError(
            "is not what torch.save writes; save the checkpoint again, with DCP's FileSystemWriter",
            key=key,
            expected="a zip archive with data.pkl and its storage",
            found=f"{type(error).__name__}: {error}"[:120],
        ) from error
    n_name, n_extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    first = info.header_offset + _ZIP_HEADER_NBYTES + n_name + n_extra
    dtype = torch_dtypes().get(stored.dtype, stored.dtype)
    row = DTYPES[chunk.dtype]
    if (dtype, stored.shape) != (chunk.dtype, chunk.shape):
        raise FormatError(
            "is another tensor than the metadata says; save the checkpoint again",
            key=key,
            expected=f"{chunk.dtype} {list(chunk.shape)}",
            found=f"{dtype} {list(stored.shape)}",
        )
    last = stored.offset + sum((n - 1) * stride for n, stride in zip(stored.shape, stored.strides, strict=True)) + 1
    n_octets = last * row.elements_per_value * row.width
    if n_octets > info.file_size or first + n_octets > part.nbytes:
        raise FormatError(
            "is cut short; copy the checkpoint again",
            key=key,
            expected=f"{n_octets} bytes or more",
            found=f"{min(info.file_size, max(part.nbytes - first, 0))}",
        )
    return stored, first, n_octets


class _File:
    """A file of the checkpoint, open until nobody holds it: the one that was there when the checkpoint was opened."""

    def __init__(self, path: Path, identity: tuple[int, int, int, int]) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", key=str(path)) from error
        weakref.finalize(self, os.close, self._fd)
        if _identity(os.fstat(self._fd)) != identity:
            raise _changed(path)

    def read(self, offset: int, out: memoryview) -> None:
        try:
            read_exactly(self._fd, offset, [out], str(self._path))
        except IntegrityError as error:  # it was as long as that when the checkpoint was opened
            raise _changed(self._path) from error


@dataclass(frozen=True, slots=True)
class _Part:
    """What a file holds of one chunk."""

    file: _File
    offset: int
    nbytes: int

    def read_into(self, start: int, out: memoryview) -> None:
        """Read bytes from `start` on; ``OSError`` if the part has not as many."""
        if not 0 <= start <= self.nbytes - len(out):
            raise OSError(f"bytes {start} to {start + len(out)} are outside")
        self.file.read(self.offset + start, out)

    def read(self, start: int, nbytes: int) -> bytes:
        out = bytearray(nbytes)
        self.read_into(start, memoryview(out))
        return bytes(out)

    def elements(self, start: int, n: int, uint: np.dtype[Any]) -> Bits:
        out: Bits = np.empty(n, uint)
        self.read_into(start, out.view(np.uint8).data)
        return out


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, part: _Part) -> None:
        self._part, self._at = part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._part.nbytes}[whence]
        if base + offset < 0:
            raise OSError("before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        n = max(min(len(buffer), self._part.nbytes - self._at), 0)
        self._part.read_into(min(self._at, self._part.nbytes), memoryview(buffer)[:n])
        self._at += n
        return n
