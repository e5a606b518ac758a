"""Delta directories as slime writes and SGLang applies them, by hand; shares no code with the package."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

State = dict[str, np.ndarray[Any, Any]]
DTYPES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8", "int64": "I64"}


def octets(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy()


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def write_checkpoint(place: Path, state: State, n_files: int = 1) -> Path:
    """Write a checkpoint of one file, or of several with an index."""
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"model_type": "toy"}')
    names, weight_map = list(state), {}
    for nth in range(n_files):
        file = "model.safetensors" if n_files == 1 else f"model-{nth + 1:05d}-of-{n_files:05d}.safetensors"
        mine = names[nth::n_files]
        tensors = {n: (DTYPES[str(state[n].dtype)], list(state[n].shape), state[n].tobytes()) for n in mine}
        (place / file).write_bytes(safetensors(tensors, {"format": "pt"}))
        weight_map |= dict.fromkeys(mine, file)
    if n_files > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


def blob(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], encoding: str) -> bytes:
    a, b = octets(old), octets(new)
    if encoding == "xor":
        return zstandard.ZstdCompressor(level=1).compress((a ^ b).tobytes())
    at = [i for i in range(len(a)) if a[i] != b[i]]
    body = struct.pack("<I", len(at)) + b"".join(struct.pack("<I", i) for i in at) + bytes(b[i] for i in at)
    return zstandard.ZstdCompressor(level=1).compress(body)


def write_delta(root: Path, number: int, old: State, new: State, encoding: str = "xor", n_files: int = 1) -> Path:
    """Write the directory of one version against the one before."""
    changed = [name for name in new if octets(old[name]).tobytes() != octets(new[name]).tobytes()]
    blobs = {name: blob(old[name], new[name], encoding) for name in changed}
    sums = {name: f"{zlib.adler32(octets(new[name]).tobytes()):08x}" for name in changed}
    return write_blobs(root, number, blobs, sums, encoding, n_files)


def write_blobs(
    root: Path,
    number: int,
    blobs: dict[str, bytes],
    sums: dict[str, str],
    encoding: str = "xor",
    n_files: int = 1,
    **metadata: Any,
) -> Path:
    place = root / f"weight_v{number:06d}"
    place.mkdir(parents=True)
    names = list(blobs)
    weight_map = {}
    for nth in range(n_files if names else 0):
        mine = names[nth::n_files]
        file = f"model-{nth:05d}-of-{n_files:05d}.safetensors"
        tensors = {name: ("U8", [len(blobs[name])], blobs[name]) for name in mine}
        (place / file).write_bytes(safetensors(tensors, {name: sums[name] for name in mine if name in sums}))
        weight_map |= dict.fromkeys(mine, file)
    told = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "adler32",
        **metadata,
    }
    index = {"metadata": told, "weight_map": weight_map}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    bodies = {n: data[8 + length + r["data_offsets"][0] : 8 + length + r["data_offsets"][1]] for n, r in header.items()}
    return metadata, bodies


def read_checkpoint(place: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in sorted(place.glob("*.safetensors")):
        found |= read_safetensors(path)[1]
    return found


def receive(root: Path, target: int, base: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """Return the tensors at a version, as a receiver makes them: from the newest whole one, or the base, by deltas."""
    start, state = target, base
    while True:
        place = root / f"weight_v{start:06d}"
        index = place / "model.safetensors.index.json"
        is_delta = index.exists() and "delta_encoding" in json.loads(index.read_text())["metadata"]
        if place.is_dir() and not is_delta:
            state = read_checkpoint(place)
            break
        if not place.is_dir():
            break
        start -= 1
    assert state is not None
    state = dict(state)
    for number in range(start + 1, target + 1):
        place = root / f"weight_v{number:06d}"
        told = json.loads((place / "model.safetensors.index.json").read_text())
        metadata = told["metadata"]
        assert (metadata["version"], metadata["base_version"]) == (f"{number:06d}", f"{number - 1:06d}")
        assert metadata["compression_format"] == "zstd"
        files = sorted(place.glob("*.safetensors"))
        assert {path.name for path in files} == set(told["weight_map"].values())
        for path in files:
            sums, bodies = read_safetensors(path)
            for name, frame in bodies.items():
                assert told["weight_map"][name] == path.name
                old = bytearray(state[name])
                raw = zstandard.ZstdDecompressor().decompress(frame)
                if metadata["delta_encoding"] == "xor":
                    assert len(raw) == len(old)
                    old = bytearray(x ^ y for x, y in zip(old, raw, strict=True))
                else:
                    (count,) = struct.unpack_from("<I", raw)
                    assert len(raw) == 4 + 5 * count
                    for i in range(count):
                        (at,) = struct.unpack_from("<I", raw, 4 + 4 * i)
                        old[at] = raw[4 + 4 * count + i]
                state[name] = bytes(old)
                assert f"{zlib.adler32(state[name]):08x}" == sums[name], name
    return state
