"""The header of a safetensors file: what the library writes is read, what it reads is written, all else is refused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from dcr_store.errors import FormatError, InvalidInputError, NotFoundError, StorageError
from dcr_store.layout.dtypes import DTYPES, n_elements
from dcr_store.targets.safetensors_file import FILE_DTYPES, FileTensor, make_header, parse_header, read_header


def raw(document: Any, pad: int = 0) -> bytes:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    data += b" " * pad
    return len(data).to_bytes(8, "little") + data


def entry(dtype: Any = "BF16", shape: Any = (2,), offsets: Any = (0, 4)) -> dict[str, Any]:
    shape, offsets = (list(value) if isinstance(value, tuple) else value for value in (shape, offsets))
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_header_is_read() -> None:
    data = raw({"b": entry(), "a": entry("F32", (), (4, 8)), "__metadata__": {"format": "pt"}}, 3)
    header = parse_header(data, len(data) + 8, "model.st")
    start = len(data)
    assert (header.raw, header.data_start, header.nbytes) == (data, start, start + 8)
    assert header.metadata == {"format": "pt"}
    assert header.tensors == (
        FileTensor("b", "BF16", (2,), start, start + 4),
        FileTensor("a", "F32", (), start + 4, start + 8),
    )


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    data = raw({"last": entry(offsets=(4, 8)), "empty": entry(shape=(0, 9), offsets=(4, 4)), "first": entry()})
    header = parse_header(data, len(data) + 8, "model.st")
    assert [tensor.name for tensor in header.tensors] == ["first", "empty", "last"]


def test_unknown_fields_are_ignored() -> None:
    data = raw({"a": {**entry(), "later": 1}})
    assert len(parse_header(data, len(data) + 4, "model.st").tensors) == 1


def test_a_file_without_tensors() -> None:
    assert parse_header(raw({}), 10, "model.st").tensors == ()
    assert parse_header(make_header([]), 16, "model.st").tensors == ()


# Each: header, bytes of data after it, what the message must match.
HOSTILE: dict[str, tuple[bytes, int, str]] = {
    "empty file": (b"", 0, "only the beginning"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", 0, "only the beginning"),
    "huge header": ((100_000_001).to_bytes(8, "little"), 200_000_000, "at most 100000000, found 100000001"),
    "header of 2^64": (b"\xff" * 8, 10, "18446744073709551615"),
    "header past the end": (raw({})[:8], 0, "ends within its header.*expected 10, found 8"),
    "header cut": (raw({"a": entry()})[:20], 500, "incomplete"),
    "bytes in front of the JSON": (raw(b" {}"), 0, "begins with {"),
    "pickle": (raw(b"\x80\x02}q\0."), 0, "begins with {"),
    "empty JSON": (raw(b""), 0, "begins with {"),
    "bad JSON": (raw(b'{"a":'), 0, "not valid JSON"),
    "JSON and more": (raw(b"{}{}"), 0, "not valid JSON"),
    "NaN": (raw(b'{"a":NaN}'), 0, "not valid JSON: NaN"),
    "not UTF-8": (raw(b'{"\xff":1}'), 0, "not valid JSON.*utf-8"),
    "too deep": (raw(b'{"a":' + b"[" * 100_000), 0, "not valid JSON"),
    "number of 5,000 digits": (raw(b'{"a":' + b"1" * 5000 + b"}"), 0, "not valid JSON"),
    "tensor twice": (raw(b'{"a":1,"a":2}'), 0, "duplicate key 'a'"),
    "field twice": (raw(b'{"a":{"dtype":"U8","dtype":"I8"}}'), 0, "duplicate key 'dtype'"),
    "metadata is a list": (raw({"__metadata__": []}), 0, "__metadata__"),
    "metadata with a number": (raw({"__metadata__": {"a": 1}}), 0, "object of texts"),
    "tensor is a number": (raw({"a.w": 3}), 0, "st#a.w.*an object"),
    "name empty": (raw({"": entry()}), 4, "cannot name a tensor: it is empty"),
    "name NUL": (raw({"a\0b": entry()}), 4, "NUL"),
    "name surrogate": (raw({"\ud800": entry()}), 4, "surrogates not allowed"),
    "name too long": (raw({"x" * 65_537: entry()}), 4, "65537 bytes"),
    "dtype missing": (raw({"a.w": {"shape": [2], "data_offsets": [0, 4]}}), 4, "st#a.w.*unknown dtype"),
    "dtype unknown": (raw({"a.w": entry("BF17")}), 4, "st#a.w.*found BF17"),
    "dtype of the layout only": (raw({"a.w": entry("C128", (1,), (0, 16))}), 16, "found C128"),
    "dtype is a list": (raw({"a.w": entry(["BF16"])}), 4, "unknown dtype"),
    "shape missing": (raw({"a.w": {"dtype": "U8", "data_offsets": [0, 4]}}), 4, "st#a.w.*wrong shape.*a list"),
    "shape is a number": (raw({"a.w": entry(shape=2)}), 4, "wrong shape.*a list, found 2"),
    "shape negative": (raw({"a.w": entry(shape=(-1,))}), 4, "found -1"),
    "shape negative twice": (raw({"a.w": entry(shape=(-1, -2))}), 4, "found -1"),
    "shape bool": (raw({"a.w": entry("U8", (True,), (0, 1))}), 1, "found True"),
    "shape float": (raw({"a.w": entry(shape=(2.0,))}), 4, r"found 2\.0"),
    "shape text": (raw({"a.w": entry(shape=("2",))}), 4, "whole numbers"),
    "shape wraps": (raw({"a.w": entry(shape=(1 << 32, 1 << 32), offsets=(0, 0))}), 0, "at most 2"),
    "half a byte": (raw({"a.w": entry("F4", (3,), (0, 2))}), 2, "whole bytes"),
    "offsets missing": (raw({"a.w": {"dtype": "U8", "shape": [1]}}), 1, "data_offsets.*two integers"),
    "one offset": (raw({"a.w": entry(offsets=(0,))}), 4, "two integers"),
    "three offsets": (raw({"a.w": entry(offsets=(0, 4, 8))}), 4, "two integers"),
    "offset bool": (raw({"a.w": entry("U8", (1,), (False, True))}), 1, "two integers"),
    "offset float": (raw({"a.w": entry(offsets=(0.0, 4.0))}), 4, "two integers"),
    "offset negative": (raw({"a.w": entry(offsets=(-4, 0))}), 4, "outside of the file"),
    "offset huge": (raw({"a.w": entry(offsets=(1 << 70, (1 << 70) + 4))}), 4, "outside of the file"),
    "offsets swapped": (raw({"a.w": entry(shape=(0,), offsets=(4, 0))}), 4, "outside of the file"),
    "offsets past the end": (raw({"a.w": entry()}), 3, "outside of the file.*end <= 3"),
    "too few bytes": (raw({"a.w": entry(offsets=(0, 2))}), 2, "do not fit BF16.*expected 4 bytes, found 2"),
    "too many bytes": (raw({"a.w": entry(offsets=(0, 6))}), 6, "do not fit BF16.*expected 4 bytes, found 6"),
    "overlap": (raw({"a": entry(), "b.w": entry(offsets=(2, 6))}), 6, "st#b.w.*overlaps.*data from 4, found 2"),
    "same place": (raw({"a": entry(), "b.w": entry()}), 4, "st#b.w.*overlaps"),
    "hole": (raw({"a": entry(), "b.w": entry(offsets=(6, 10))}), 10, "st#b.w.*hole.*data from 4, found 6"),
    "hole in front": (raw({"a.w": entry(offsets=(1, 5))}), 5, "st#a.w.*hole.*data from 0, found 1"),
    "empty tensor in a hole": (raw({"a": entry(), "b.w": entry(shape=(0,), offsets=(2, 2))}), 4, "st#.*overlaps"),
    "bytes at the end": (raw({"a": entry()}), 5, "after its last tensor"),
    "bytes without tensors": (raw({}), 1, "after its last tensor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(case: str, tmp_path: Path) -> None:
    header, n_data, match = HOSTILE[case]
    with pytest.raises(FormatError, match=match) as caught:
        parse_header(header, len(header) + n_data, "model.st")
    assert str(caught.value).startswith("model.st")
    if case != "header of 2^64" and n_data < 1000:
        path = tmp_path / "model.st"
        path.write_bytes(header + bytes(n_data))
        with pytest.raises(FormatError) as caught:
            read_header(path)
        assert str(path) in str(caught.value)
        assert readable_by_the_library(path.read_bytes()) == (case in LENIENT)


# The library takes these; format 1 does not.
LENIENT = {"bytes in front of the JSON", "name empty", "name NUL", "name too long"}


def readable_by_the_library(data: bytes) -> bool:
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_header(tmp_path / "missing")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(NotFoundError, match="no such file"):
        read_header(tmp_path / "dangling")
    with pytest.raises(InvalidInputError, match="a regular file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInputError, match="a regular file"):
        read_header(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match="cannot be opened"):
        read_header(tmp_path / "loop")


TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F64": torch.float64,
    "U64": torch.uint64,
    "I64": torch.int64,
    "C64": torch.complex64,
}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors, shapes = {}, {}
    for name, dtype in TORCH.items():
        for shape in ((), (0,), (2, 0, 2), (3,), (2, 4), (1, 3, 2)):
            nbytes = int(np.prod(shape)) * dtype.itemsize
            data = torch.arange(nbytes, dtype=torch.uint8).view(dtype).reshape(shape)
            packed = name == "F4"
            if packed and not shape:
                continue
            tensors[f"{name}{shape}"] = data
            shapes[f"{name}{shape}"] = (name, (*shape[:-1], shape[-1] * 2) if packed else shape)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, {"format": "pt", "é": "層"})
    header = read_header(path)
    content = path.read_bytes()
    assert content.startswith(header.raw)
    assert header.metadata == {"format": "pt", "é": "層"}
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == shapes
    for tensor in header.tensors:
        assert (
            content[tensor.begin : tensor.end] == tensors[tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        )


def test_what_is_written_is_read_by_the_library(tmp_path: Path) -> None:
    rows = [(f"{name}.{i}", name, shape) for name in FILE_DTYPES for i, shape in enumerate([(8,), (0, 4), (3, 8)])]
    rows += [("scalar", "F32", ()), ("odd", "U8", (3,)), ("層.重み", "F64", (1,))]
    metadata = {"format": "pt"}
    header = make_header(rows, metadata)
    nbytes = sum(n_elements(DTYPES[name], shape) * DTYPES[name].width for _, name, shape in rows)
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(header + data)
    found = {name: info for name, info in safetensors.deserialize(path.read_bytes())}  # noqa: C416
    assert {name: (info["dtype"], tuple(info["shape"])) for name, info in found.items()} == {
        name: (dtype, shape) for name, dtype, shape in rows
    }
    for tensor in read_header(path).tensors:
        assert bytes(found[tensor.name]["data"]) == (header + data)[tensor.begin : tensor.end]
        assert tensor.begin % DTYPES[tensor.dtype].width == 0
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == metadata
    assert len(header) % 8 == 0


def test_the_same_tensors_make_the_same_bytes() -> None:
    rows = [("b", "BF16", (3,)), ("a", "F32", (2,)), ("c", "BF16", ())]
    assert make_header(rows, {"y": "1", "x": "2"}) == make_header(tuple(rows), {"x": "2", "y": "1"})
    assert make_header([("a", "BF16", (2,))]) == (
        b'8\0\0\0\0\0\0\0{"a":{"data_offsets":[0,4],"dtype":"BF16","shape":[2]}} '
    )
    header = make_header(rows)
    assert [tensor.name for tensor in parse_header(header, len(header) + 16, "model.st").tensors] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([("a.w", "C128", (1,))], "dtype that safetensors.*found C128"),
        ([("a", "X", (1,))], "found X"),
        ([("a", "F4", (3,))], "whole bytes"),
        ([("a", "U8", (-1,))], "found -1"),
        ([("a", "U8", ()), ("a", "U8", ())], "another tensor has it"),
        ([("__metadata__", "U8", ())], "reserved"),
        ([("", "U8", ())], "empty"),
        ([("a\0", "U8", ())], "NUL"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(rows: list[tuple[str, str, tuple[int, ...]]], match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        make_header(rows)


def test_metadata_are_texts() -> None:
    with pytest.raises(InvalidInputError, match="texts"):
        make_header([], {"step": 3})  # type: ignore[dict-item]


def test_a_header_too_large_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="write several"):
        make_header([], {"x": "x" * 100_000_000})


def test_fifty_thousand_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    header = make_header([(f"model.layers.{i}.weight", "BF16", (i % 5, 3)) for i in range(50_000)])
    nbytes = len(header) + sum(i % 5 * 3 * 2 for i in range(50_000))
    began = time.perf_counter()
    parsed = parse_header(header, nbytes, "model.st")
    seconds = time.perf_counter() - began
    with capsys.disabled():
        print(f"\n50,000 tensors, header of {len(header) / 1e6:.1f} MB, parsed in {seconds:.2f} s")
    assert len(parsed.tensors) == 50_000
