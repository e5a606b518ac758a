"""The header of a safetensors file: read strictly, written deterministically, without the safetensors library.

::

    8 bytes                      n, u64 LE, at most 100,000,000
    n bytes                      JSON object, UTF-8, begins with "{", may end in spaces:
                                 name -> {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__" -> texts
    to the end of the file       the tensors' bytes; offsets count from here, without holes or overlaps

Refuses everything else with ``FormatError`` that names file and tensor. Reads no tensor data.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcr_store.errors import FormatError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.layout.dtypes import DTYPES, DType, dtype, n_elements, shown
from dcr_store.layout.entry import name_problem
from dcr_store.targets.file_bytes import read_exactly

MAX_HEADER_NBYTES: Final = 100_000_000
METADATA: Final = "__metadata__"
FILE_DTYPES: Final[dict[str, DType]] = {name: row for name, row in DTYPES.items() if name != "C128"}
"""The dtypes that a safetensors file can hold."""
_ALIGNMENT_NBYTES: Final = 8


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file.

    Attributes
    ----------
    name, dtype : str
        Its name and its dtype in safetensors' words.
    shape : tuple of int
        In values.
    begin, end : int
        Where its bytes are, counted from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    Attributes
    ----------
    raw : bytes
        The 8-byte length and the JSON, exactly as in the file.
    tensors : tuple of FileTensor
        In the order of their bytes.
    metadata : dict of str to str
        The header's ``__metadata__``; empty if there is none.
    data_start : int
        Offset of the first byte of data: the length of `raw`.
    nbytes : int
        Of the whole file.
    """

    raw: bytes
    tensors: tuple[FileTensor, ...]
    metadata: dict[str, str]
    data_start: int
    nbytes: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a file.

    Raises
    ------
    NotFoundError
        If there is no such file.
    InvalidInputError
        If it is no regular file.
    FormatError
        If it is no complete safetensors file.
    StorageError
        If it cannot be read.
    """
    name = os.fspath(path)
    try:
        # Opening must not wait for a writer if the path is a pipe.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise NotFoundError("there is no such file", key=name) from error
    except OSError as error:
        raise StorageError(f"cannot be opened: {error.strerror}", key=name) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInputError(
                "is no file", key=name, expected="a regular file", found=stat.filemode(status.st_mode)
            )
        prefix = os.pread(fd, 8, 0)
        length = _header_length(prefix, status.st_size, name)
        raw = bytearray(8 + length)
        read_exactly(fd, 0, [memoryview(raw)], name)
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", key=name) from error
    finally:
        os.close(fd)
    return parse_header(bytes(raw), status.st_size, name)


def _header_length(prefix: bytes, nbytes: int, name: str) -> int:
    if len(prefix) < 8:
        raise FormatError(
            "is no safetensors file, or only the beginning of one", key=name, expected="8 bytes at least", found=nbytes
        )
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_NBYTES:
        raise FormatError(
            "is no safetensors file: the length of its header is impossible",
            key=name,
            expected=f"at most {MAX_HEADER_NBYTES}",
            found=length,
        )
    if 8 + length > nbytes:
        raise FormatError("ends within its header; copy it again", key=name, expected=8 + length, found=nbytes)
    return length


def parse_header(raw: bytes, nbytes: int, name: str) -> Header:
    """Check a header that was read before.

    Parameters
    ----------
    raw : bytes
        The 8-byte length and the JSON.
    nbytes : int
        Of the whole file.
    name : str
        The file, for errors.

    Raises
    ------
    FormatError
        If it is no header of a file of that size; names file and tensor.
    """
    length = _header_length(raw[:8], nbytes, name)
    if len(raw) != 8 + length:
        raise FormatError("the header is incomplete", key=name, expected=8 + length, found=len(raw))
    document = _parse_json(raw[8:], name)
    metadata = _read_metadata(document.pop(METADATA, {}), name)
    n_data = nbytes - len(raw)
    tensors = [_read_tensor(key, value, len(raw), n_data, name) for key, value in document.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    end = len(raw)
    for tensor in tensors:
        if tensor.begin != end:
            what = "leaves a hole before it" if tensor.begin > end else "overlaps the tensor before it"
            raise _wrong(name, tensor.name, what, f"data from {end - len(raw)}", tensor.begin - len(raw))
        end = tensor.end
    if end != nbytes:
        raise FormatError("has bytes after its last tensor", key=name, expected=f"{end} bytes", found=nbytes)
    return Header(raw, tuple(tensors), metadata, len(raw), nbytes)


def _parse_json(data: bytes, name: str) -> dict[str, Any]:
    if not data.startswith(b"{"):
        raise FormatError("is no safetensors file", key=name, expected="a header that begins with {", found=data[:1])
    try:
        document = canonical.decode(data, name)
    except FormatError as error:
        raise FormatError(f"the safetensors header is not valid JSON: {error.__cause__}", key=name) from error
    result: dict[str, Any] = document
    return result


def _read_metadata(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise _wrong(name, METADATA, "is wrong", "an object of texts", value)
    return value


def _read_tensor(key: str, value: Any, data_start: int, n_data: int, name: str) -> FileTensor:
    problem = name_problem(key)
    if problem is not None:
        raise FormatError(f"{shown(key)} cannot name a tensor: {problem}", key=name)
    if not isinstance(value, dict):
        raise _wrong(name, key, "is wrong", "an object", value)
    dtype_name, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    row = FILE_DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if row is None:
        raise _wrong(name, key, "has an unknown dtype", f"one of {', '.join(FILE_DTYPES)}", dtype_name)
    if not isinstance(shape, list):
        raise _wrong(name, key, "has a wrong shape", "a list", shape)
    try:
        nbytes = _n_bytes(row, shape)
    except InvalidInputError as error:
        raise _wrong(name, key, "has a wrong shape", error.expected, error.found) from error
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        raise _wrong(name, key, "has wrong data_offsets", "two integers", offsets)
    begin, end = offsets
    if not 0 <= begin <= end <= n_data:
        raise _wrong(name, key, "has data_offsets outside of the file", f"0 <= begin <= end <= {n_data}", offsets)
    if end - begin != nbytes:
        raise _wrong(name, key, f"has data_offsets that do not fit {row.name} {shape}", f"{nbytes} bytes", end - begin)
    return FileTensor(key, row.name, tuple(shape), data_start + begin, data_start + end)


def _n_bytes(row: DType, shape: Sequence[int]) -> int:
    nbytes = n_elements(row, shape) * row.width
    if row.packed and math.prod(shape) * row.bits % 8:
        raise InvalidInputError(
            "a safetensors file holds whole bytes", expected="values that fill whole bytes", found=list(shape)
        )
    return nbytes


def make_header(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file that holds `tensors`: the 8-byte length and the JSON.

    The same tensors make the same bytes. Wider elements come first, otherwise the order is kept, and the JSON is padded
    with spaces, so that every element is aligned in the file.

    Parameters
    ----------
    tensors : iterable of (name, dtype, shape)
        Names, dtypes in safetensors' words, shapes in values.
    metadata : mapping of str to str, optional
        What to write as ``__metadata__``; loaders of transformers want ``{"format": "pt"}``.

    Raises
    ------
    InvalidInputError
        If a safetensors file cannot hold them.
    """
    rows = [(name, dtype(dtype_name, key=str(name)), list(shape)) for name, dtype_name, shape in tensors]
    document: dict[str, Any] = {}
    end = 0
    for name, row, shape in sorted(rows, key=lambda item: -item[1].width):
        problem = name_problem(name)
        if problem is not None or name == METADATA or name in document:
            problem = problem or ("it is reserved" if name == METADATA else "another tensor has it")
            raise InvalidInputError(f"{shown(name)} cannot name a tensor: {problem}")
        if row.name not in FILE_DTYPES:
            raise InvalidInputError(
                "has a dtype that safetensors files cannot hold; convert it",
                key=name,
                expected="another",
                found=row.name,
            )
        begin, end = end, end + _n_bytes(row, shape)
        document[name] = {"data_offsets": [begin, end], "dtype": row.name, "shape": shape}
    if metadata is not None:
        if not all(isinstance(text, str) for text in metadata.values()):
            raise InvalidInputError(
                "metadata of a safetensors file are wrong", expected="texts under names", found=shown(dict(metadata))
            )
        document[METADATA] = dict(metadata)
    data = canonical.encode(document)
    data += b" " * (-len(data) % _ALIGNMENT_NBYTES)
    if len(data) > MAX_HEADER_NBYTES:
        raise InvalidInputError(
            "too many tensors for one safetensors file; write several",
            expected=f"a header of at most {MAX_HEADER_NBYTES} bytes",
            found=len(data),
        )
    return len(data).to_bytes(8, "little") + data


def _wrong(name: str, tensor: str, message: str, expected: object, found: object) -> FormatError:
    return FormatError(message, key=f"{name}#{shown(tensor)}", expected=expected, found=shown(found))
