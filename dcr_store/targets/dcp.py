"""A torch distributed checkpoint (DCP) on disk, to be read as a checkpoint: a folder with ``.metadata`` and its files.

However it was sharded, its tensors are read in canonical order, by mapped files: nothing is loaded whole. torch is not
needed, and nothing of the checkpoint is executed. Entries that are no tensors are left out, and said so. Refuses
folders in which something is missing, cut short, overlapping or of another kind; compressed entries; packed dtypes.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
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
from dcr_store.layout.boxes import Box, clipped
from dcr_store.layout.dtypes import DTYPES, Bits, n_elements, uint_dtype
from dcr_store.layout.from_dcp import maps_of_dcp
from dcr_store.layout.pieces import in_elements
from dcr_store.layout.tensors import torch_dtypes
from dcr_store.targets.checkpoint import Checkpoint, CheckpointFile, open_checkpoint
from dcr_store.targets.checkpoint_listing import SUFFIX, LeftOut
from dcr_store.targets.dcp_pickle import StoredTensor, read_metadata, read_tensor
from dcr_store.targets.paths import check_path, local_path
from dcr_store.targets.safetensors_file import FileTensor, Header

METADATA: Final = ".metadata"
_N_MAPPED: Final = 64
_MAX_METADATA_NBYTES: Final = 1 << 30


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


class DcpCheckpoint(Checkpoint):
    """An open distributed checkpoint; see ``Checkpoint``. It has no files of weights, only tensors."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, ())
        place = root / METADATA
        self._identities: dict[str, tuple[int, int, int, int]] = {}
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()
        self._views: dict[tuple[str, int], tuple[StoredTensor, int, int]] = {}
        self._copied: tuple[tuple[str, int], Bits] | None = None
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
            local = self._local(chunk)
            for part in parts:
                sizes = [dim.n for dim in part.dims]
                to = [dim.there * out.itemsize for dim in part.dims]
                source = [dim.here * local.itemsize for dim in part.dims]
                np.copyto(
                    np.lib.stride_tricks.as_strided(out[part.there - start :], sizes, to),
                    np.lib.stride_tricks.as_strided(local[part.here :], sizes, source),
                )

    def _local(self, chunk: _Chunk) -> Bits:
        """Return a chunk's elements, flat in C order: the mapped file's, or a copy where they lie otherwise there."""
        key = chunk.path, chunk.offset
        with self._lock:
            copied = self._copied
            found = self._views.get(key)
            if copied is not None and copied[0] == key:
                return copied[1]
        octets = memoryview(self._mapped(chunk.path))[chunk.offset : chunk.offset + chunk.nbytes]
        if found is None:
            found = _parsed(chunk, octets)
            with self._lock:
                self._views[key] = found
        stored, first, n_octets = found
        row = DTYPES[chunk.dtype]
        uint, per = uint_dtype(row.space), row.elements_per_value
        flat: Bits = np.frombuffer(octets[first : first + n_octets], uint)[stored.offset * per :]
        if _is_contiguous(stored):
            return flat[: n_elements(row, stored.shape)]
        sizes = (*stored.shape, per)
        strides = [stride * per * uint.itemsize for stride in stored.strides] + [uint.itemsize]
        bits = np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, sizes, strides)).reshape(-1)
        with self._lock:
            self._copied = key, bits
        return bits

    def _mapped(self, path: str) -> mmap.mmap:
        with self._lock:
            if self._closed:
                raise InvalidInputError("the checkpoint is closed; open it again", key=str(self.root))
            found = self._maps.pop(path, None)
            if found is None:
                try:
                    with (self.root / path).open("rb") as file:
                        if _identity(os.fstat(file.fileno())) != self._identities[path]:
                            raise _changed(self.root / path)
                        found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except OSError as error:
                    raise StorageError(f"cannot be read: {error.strerror}", key=str(self.root / path)) from error
            self._maps[path] = found
            while len(self._maps) > _N_MAPPED:
                self._maps.popitem(last=False)  # unmapped when its last view goes
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
        self._maps.clear()


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
    As ``open_checkpoint``, and ``InvalidInputError`` or ``FormatError`` if a distributed checkpoint is not whole, or is
    not what DCP writes.
    """
    place = local_path(path, "directory")
    return DcpCheckpoint(place.resolve()) if is_dcp(place) else open_checkpoint(path)


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


def _parsed(chunk: _Chunk, octets: memoryview) -> tuple[StoredTensor, int, int]:
    """Return what was saved of a chunk, and where the bytes of its storage are in `octets`."""
    key = f"{chunk.name} ({chunk.key})"
    try:
        with zipfile.ZipFile(_Window(octets)) as archive:
            by_name = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            stored = read_tensor(archive.read(by_name["data.pkl"]), key)
            if "byteorder" in by_name and archive.read(by_name["byteorder"]) != b"little":
                raise FormatError("is big-endian; save it on a little-endian machine", key=key)
            info = by_name[f"data/{stored.storage}"]
    except (zipfile.BadZipFile, KeyError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError(
            "is not what torch.save writes; save the checkpoint again, with DCP's FileSystemWriter",
            key=key,
            expected="a zip archive with data.pkl and its storage",
            found=f"{type(error).__name__}: {error}"[:120],
        ) from error
    if info.compress_type != zipfile.ZIP_STORED:
        raise FormatError("is compressed; save the checkpoint again without", key=key)
    header = info.header_offset
    names = int.from_bytes(octets[header + 26 : header + 28], "little")
    extra = int.from_bytes(octets[header + 28 : header + 30], "little")
    first = header + 30 + names + extra
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
    if n_octets > info.file_size or first + n_octets > len(octets):
        raise FormatError(
            "is cut short; copy the checkpoint again",
            key=key,
            expected=f"{n_octets} bytes or more",
            found=f"{min(info.file_size, max(len(octets) - first, 0))}",
        )
    return stored, first, n_octets


class _Window(io.RawIOBase):
    """Bytes as a file."""

    def __init__(self, octets: memoryview) -> None:
        self._octets, self._at = octets, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._octets)}[whence]
        if base + offset < 0:
            raise OSError("before the first byte")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._octets[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
