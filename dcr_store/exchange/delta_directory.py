"""The delta directories of slime, miles and SGLang, as files: one ``weight_v000001`` for each version of a series.

::

    weight_v000007/
        model.safetensors.index.json     metadata: version, base_version (decimal text, six digits), delta_encoding,
                                         compression_format, checksum_format; weight_map: tensor -> file
        model-00001-of-00002.safetensors of each tensor that changed one U8 tensor of its name: a zstd frame;
                                         __metadata__: tensor -> checksum of its new bytes, lower-case hex

A directory whose index has no ``delta_encoding`` is a whole checkpoint. The frame of an ``xor`` holds the tensor's new
bytes XOR the old ones. That of an ``overwrite`` holds the number of changed bytes (u32 LE), their positions (u32 LE
each, ascending) and the new bytes. Refuses everything else, also what their receivers would apply without a look:
files that the index does not name, names with a path, blobs of another length.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from dcr_store.errors import FormatError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.targets.safetensors_file import FileTensor, Header, read_header

INDEX: Final = "model.safetensors.index.json"
ENCODINGS: Final = ("xor", "overwrite")
CHECKSUMS: Final = ("adler32", "xxh3-128", "blake3")
MAX_VERSION: Final = 999_999
BLOCK_NBYTES: Final = 4 << 20
_FED_NBYTES: Final = 1 << 12
"""What a few bytes can grow to is bounded by feeding few of them at a time."""
_DIRECTORY: Final = re.compile(r"weight_v([0-9]{6})")
_NUMBER: Final = re.compile(r"[0-9]{1,6}")
_FILE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,250}\.safetensors")
_MAX_OVERWRITE_NBYTES: Final = 1 << 32
"""Positions have 32 bits."""
Octets = NDArray[np.uint8]


class Hasher(Protocol):
    """What computes a checksum."""

    def update(self, data: Any, /) -> None:
        """Take bytes in."""

    def hexdigest(self) -> str:
        """Return what came of them."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hasher(name: str, key: str) -> Hasher:
    """Return a new hasher; ``StorageError`` if its package is not here, ``FormatError`` if there is no such kind."""
    if name not in CHECKSUMS:
        raise FormatError("has checksums of an unknown kind", key=key, expected=" or ".join(CHECKSUMS), found=name)
    if name == "adler32":
        return _Adler32()
    package = "xxhash" if name == "xxh3-128" else "blake3"
    try:
        module = __import__(package)
    except ImportError as error:
        raise StorageError(
            f"checksums of the kind {name} need a package that is not here: pip install {package}", key=key
        ) from error
    made: Hasher = module.xxh3_128() if package == "xxhash" else module.blake3()
    return made


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta directory.

    Attributes
    ----------
    version, base_version : int
    encoding, checksum : str
    blobs : tuple of (Path, FileTensor, str)
        Of each tensor that changed: the file, where its frame is there, and the checksum of its new bytes.
    """

    place: Path
    version: int
    base_version: int
    encoding: str
    checksum: str
    blobs: tuple[tuple[Path, FileTensor, str], ...]


def directory_name(version: int) -> str:
    """Return the name of a version's directory; ``InvalidInputError`` if the number has more than six digits."""
    if not 0 <= version <= MAX_VERSION:
        raise InvalidInputError(
            "a series of delta directories has no such version", expected=f"0 to {MAX_VERSION}", found=version
        )
    return f"weight_v{version:06d}"


def list_series(root: Path) -> dict[int, Path]:
    """Return the directories of a series by version, ascending.

    Raises
    ------
    NotFoundError, StorageError
        If it cannot be listed.
    """
    try:
        found = {path.name: path for path in root.iterdir()}
    except FileNotFoundError as error:
        raise NotFoundError("there is no such directory", key=str(root)) from error
    except OSError as error:
        raise StorageError(f"cannot be listed: {error.strerror}", key=str(root)) from error
    named = {int(match[1]): path for name, path in found.items() if (match := _DIRECTORY.fullmatch(name))}
    return {version: named[version] for version in sorted(named) if named[version].is_dir()}


def read_delta(place: Path) -> Delta | None:
    """Read what a directory of a series says of itself; None if it is a whole checkpoint.

    Raises
    ------
    FormatError
        If it is neither; names the file, and the tensor.
    """
    index = place / INDEX
    try:
        data = index.read_bytes()
    except FileNotFoundError:
        _refuse_begun(place)
        return None  # a checkpoint in one file has none
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", key=str(index)) from error
    document = canonical.decode(data, str(index))
    metadata = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(metadata, dict):
        raise FormatError("has no metadata", key=str(index), expected="an object", found=type(metadata).__name__)
    if "delta_encoding" not in metadata:
        return None
    encoding = _one_of(metadata, "delta_encoding", ENCODINGS, index)
    _one_of(metadata, "compression_format", ("zstd",), index)
    checksum = _one_of(metadata, "checksum_format", CHECKSUMS, index)
    version, base = _number(metadata, "version", index), _number(metadata, "base_version", index)
    if directory_name(version) != place.name or base >= version:
        raise FormatError(
            "is of another version than its directory says, or builds on a later one",
            key=str(index),
            expected=place.name,
            found=f"version {version} on {base}",
        )
    return Delta(place, version, base, encoding, checksum, tuple(_blobs(place, index, document.get("weight_map"))))


def _refuse_begun(place: Path) -> None:
    """Refuse a delta directory whose index, which is written last, is not there: its blobs are no weights."""
    for path in sorted(place.glob("*.safetensors")):
        header = read_header(path)
        if header.tensors and all(
            tensor.dtype == "U8" and len(tensor.shape) == 1 and tensor.name in header.metadata
            for tensor in header.tensors
        ):
            raise FormatError(
                "holds the blobs of a delta without their index: it is still being written, or was not copied whole",
                key=str(place),
                expected=INDEX,
                found=path.name,
            )


def _one_of(metadata: dict[str, Any], name: str, choices: tuple[str, ...], index: Path) -> str:
    value = metadata.get(name)
    if value not in choices:
        raise FormatError(
            f"{name} is not one that is known here",
            key=str(index),
            expected=" or ".join(choices),
            found=repr(value)[:80],
        )
    found: str = value
    return found


def _number(metadata: dict[str, Any], name: str, index: Path) -> int:
    value = metadata.get(name)
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not _NUMBER.fullmatch(text):
        raise FormatError(
            f"{name} is no version", key=str(index), expected="a number of six digits", found=repr(value)[:80]
        )
    return int(text)


def _blobs(place: Path, index: Path, weight_map: object) -> Iterator[tuple[Path, FileTensor, str]]:
    """Yield the blobs of all files, which hold just what the index says."""
    if not isinstance(weight_map, dict):
        raise FormatError("has no weight_map", key=str(index), expected="an object", found=type(weight_map).__name__)
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise FormatError(
                f"weight_map names no file for {tensor!r:.80}",
                key=str(index),
                expected="the name of a safetensors file beside the index",
                found=repr(file)[:80],
            )
        files.setdefault(file, set()).add(tensor)
    there = sorted(path.name for path in place.glob("*.safetensors"))
    if there != sorted(files):
        raise FormatError(
            "does not name the files beside it: the copy is not complete, or somebody else's files lie there",
            key=str(index),
            expected=", ".join(sorted(files)) or "none",
            found=", ".join(there) or "none",
        )
    for file in sorted(files):
        path = place / file
        header = read_header(path)
        if {tensor.name for tensor in header.tensors} != files[file]:
            raise FormatError(
                "does not hold the tensors that the index says",
                key=str(path),
                expected=f"{len(files[file])} tensors",
                found=f"{len(header.tensors)}, {len(files[file] & {t.name for t in header.tensors})} of them",
            )
        yield from ((path, tensor, _checksum_of(path, header, tensor)) for tensor in header.tensors)


def _checksum_of(path: Path, header: Header, tensor: FileTensor) -> str:
    if tensor.dtype != "U8" or len(tensor.shape) != 1:
        raise FormatError(
            "is no blob",
            key=f"{path}#{tensor.name}",
            expected="U8 of one dimension",
            found=f"{tensor.dtype} {tensor.shape}",
        )
    if tensor.name not in header.metadata:
        raise FormatError("has no checksum", key=f"{path}#{tensor.name}", expected="one in __metadata__", found="none")
    return header.metadata[tensor.name]


# ---------------------------------------------------------------------- blobs


def patch(frame: memoryview, encoding: str, region: Octets, key: str) -> None:
    """Apply a blob to a tensor's bytes, in place.

    Parameters
    ----------
    frame : memoryview
        The zstd frame.
    region : ndarray of uint8, shape (nbytes,)
        The tensor's old bytes; anything where an error is raised.

    Raises
    ------
    FormatError
        If the frame is no delta of so many bytes.
    """
    if encoding == "xor":
        position = 0
        for block in _decompressed(frame, len(region), key):
            region[position : position + len(block)] ^= np.frombuffer(block, np.uint8)
            position += len(block)
        if position != len(region):
            raise FormatError("the blob is too short", key=key, expected=f"{len(region)} bytes", found=position)
        return
    raw = np.frombuffer(b"".join(_decompressed(frame, 4 + 5 * len(region), key)), np.uint8)
    count = int.from_bytes(raw[:4].tobytes(), "little")
    if len(raw) < 4 or len(raw) != 4 + 5 * count:
        raise FormatError(
            "the blob has another length than it says", key=key, expected=f"{4 + 5 * count} bytes", found=len(raw)
        )
    positions = np.frombuffer(raw[4 : 4 + 4 * count].tobytes(), "<u4").astype(np.int64)
    if count and (positions[-1] >= len(region) or (np.diff(positions) <= 0).any()):
        raise FormatError(
            "the blob's positions are outside of the tensor, or not ascending",
            key=key,
            expected=f"below {len(region)}",
            found=int(positions.max()),
        )
    region[positions] = raw[4 + 4 * count :]


def _decompressed(frame: memoryview, most: int, key: str) -> Iterator[bytes]:
    """Yield what one zstd frame holds, block by block; refuse more than `most` bytes, and anything after it."""
    try:
        engine = zstandard.ZstdDecompressor().decompressobj()
        found = 0
        for first in range(0, len(frame), _FED_NBYTES):
            if engine.eof:
                raise FormatError("has bytes after the blob's frame", key=key, expected="one zstd frame")
            block = engine.decompress(frame[first : first + _FED_NBYTES])
            found += len(block)
            if found > most:
                raise FormatError("the blob is too long", key=key, expected=f"at most {most} bytes", found="more")
            if block:
                yield block
        if not engine.eof or engine.unused_data:
            raise FormatError(
                "the blob is no whole zstd frame",
                key=key,
                expected="one",
                found="more" if engine.eof else "a part of one",
            )
    except zstandard.ZstdError as error:
        raise FormatError(f"the blob is no zstd frame: {error}", key=key) from error


def make_blob(old: Octets, new: Octets, encoding: str, key: str) -> bytes | None:
    """Return the zstd frame that leads from old bytes to new ones; None if nothing changes.

    Raises
    ------
    InvalidInputError
        If an overwrite cannot say it: positions have 32 bits.
    """
    if encoding == "overwrite":
        if len(new) > _MAX_OVERWRITE_NBYTES:
            raise InvalidInputError(
                "is too large for an overwrite, whose positions have 32 bits; use xor",
                key=key,
                expected=f"at most {_MAX_OVERWRITE_NBYTES} bytes",
                found=len(new),
            )
        starts = range(0, len(new), BLOCK_NBYTES)
        parts = [np.flatnonzero(old[a : a + BLOCK_NBYTES] != new[a : a + BLOCK_NBYTES]) + a for a in starts]
        positions = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if not len(positions):
            return None
        raw = b"".join(
            (len(positions).to_bytes(4, "little"), positions.astype("<u4").tobytes(), new[positions].tobytes())
        )
        return zstandard.ZstdCompressor(level=1).compress(raw)
    engine = zstandard.ZstdCompressor(level=1).compressobj(size=len(new))
    frame, is_changed = [], False
    for start in range(0, len(new), BLOCK_NBYTES):
        mask = old[start : start + BLOCK_NBYTES] ^ new[start : start + BLOCK_NBYTES]
        is_changed = is_changed or bool(mask.any())
        frame.append(engine.compress(mask.data))
    return b"".join((*frame, engine.flush())) if is_changed else None


def checksum(name: str, data: Octets, key: str) -> str:
    """Return the checksum of a tensor's bytes, lower-case hex."""
    made = hasher(name, key)
    for start in range(0, len(data), BLOCK_NBYTES):
        made.update(data[start : start + BLOCK_NBYTES].data)
    return made.hexdigest()


def check(name: str, data: Octets, expected: str, key: str) -> None:
    """Compare a tensor's new bytes with their checksum; ``IntegrityError`` if they are others."""
    found = checksum(name, data, key)
    if found != expected.lower():
        raise IntegrityError(
            "is not what its checksum says: the delta builds on another base, or is damaged; nothing of it was taken",
            key=key,
            expected=f"{name} {expected}",
            found=f"{name} {found}",
        )


def index_document(version: int, base: int, encoding: str, checksum_format: str, weight_map: dict[str, str]) -> bytes:
    """Return the index of a delta directory."""
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{base:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum_format,
    }
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, ensure_ascii=False).encode()
