"""What the golden stores hold: random bits that no library changes, states and their steps, files of checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dcr_store.layout.dtypes import dtype, n_elements, uint_dtype

CHUNK_ELEMENTS = 256
Bits = np.ndarray[Any, Any]
Files = dict[str, bytes]


class Random:
    """Numbers that are the same with every library."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.n_draws = 0

    def bits(self, n: int, space: str = "u64") -> Bits:
        self.n_draws += 1
        kind = uint_dtype(space)
        data = hashlib.shake_256(f"{self.seed} {self.n_draws}".encode()).digest(n * kind.itemsize)
        return np.frombuffer(data, kind).copy()

    def uniform(self, n: int) -> Bits:
        return self.bits(n, "u32") / 2.0**32

    def weights(self, n: int) -> Bits:
        """Float32 around 0, most of them small."""
        total = self.uniform(n) + self.uniform(n) + self.uniform(n) + self.uniform(n)
        return ((total - 2.0) * 0.05).astype(np.float32)

    def mask(self, n: int, space: str, rate: float) -> Bits:
        """Masks of steps by one unit in the last place (1, 3, 7, ...) where something changes, and some of any bits."""
        kind, drawn = uint_dtype(space), self.bits(n, space)
        drawn |= kind.type(1 << 6)
        steps = drawn ^ (drawn - kind.type(1))
        values = np.where(self.uniform(n) < 0.1, self.bits(n, space), steps)
        return np.where(self.uniform(n) < rate, values, 0).astype(kind)


class Tensor(NamedTuple):
    """A tensor's dtype and shape, and its bits in the space of its dtype."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits

    @property
    def space(self) -> str:
        return dtype(self.dtype).space

    def changed(self, bits: Bits) -> Tensor:
        if self.dtype == "BOOL":
            bits = bits & 1
        return Tensor(self.dtype, self.shape, bits)


State = dict[str, Tensor]

CHECKPOINT = {
    "model.embed.weight": ("BF16", (40, 24)),
    "model.layers.0.attn.weight": ("BF16", (24, 24)),
    "quant.codes": ("I8", (20, 31)),
    "model.layers.0.mlp.weight": ("F16", (20, 24)),
    "model.norm.weight": ("F32", (40,)),
    "quant.mask": ("BOOL", (7, 5)),
    "model.rotary.inv_freq": ("F64", (12,)),
    "model.größe.空": ("F32", (0, 4)),
    "quant.scale": ("F8_E4M3", (41,)),
    "quant.out": ("F8_E5M2", (9,)),
    "quant.exponent": ("F8_E8M0", (6,)),
    "quant.packed4": ("F4", (8, 3)),
    "quant.packed6": ("F6_E2M3", (4,)),
    "quant.packed6b": ("F6_E3M2", (2, 4)),
    "bytes": ("U8", (11,)),
    "steps": ("I64", ()),
    "counts": ("U64", (2,)),
    "ids": ("U16", (5,)),
    "short": ("I16", (3,)),
    "seen": ("U32", (2,)),
    "order": ("I32", (3,)),
    "phase": ("C64", (5,)),
}
OTHER_CHECKPOINT = {
    **{name: row for name, row in CHECKPOINT.items() if name.startswith("model")},
    "value_head.weight": ("BF16", (24, 1)),
}
TENSORS = {
    "embed.weight": ("BF16", (40, 24)),
    "gain": ("F32", (300,)),
    "layers.0.weight": ("F16", (33, 24)),
    "table": ("I32", (200,)),
    "codes": ("U8", (700,)),
    "flag": ("BOOL", ()),
    "nothing": ("BF16", (0, 3)),
    "odd": ("F64", (300,)),
}
TIED = {"lm_head.weight": "embed.weight"}
# Bits that arithmetic would lose: -0.0, and NaNs that are quiet, signalling, negative, with a payload.
SPECIAL = {
    "BF16": (0x8000, 0x7FC0, 0x7F81, 0xFFC1),
    "F16": (0x8000, 0x7E00, 0x7C01, 0xFE55),
    "F32": (0x80000000, 0x7FC00001, 0x7F800001, 0xFFC0BEEF),
    "F64": (0x8000000000000000, 0x7FF8000000000001, 0x7FF0000000000001, 0xFFF80000DEADBEEF),
    "F8_E4M3": (0x80, 0x7F, 0xFF),
    "F8_E5M2": (0x80, 0x7C, 0x7E, 0xFD),
}


def make_state(shapes: Mapping[str, tuple[str, tuple[int, ...]]], random: Random) -> State:
    state = {}
    for name, (kind, shape) in shapes.items():
        row = dtype(kind)
        n = n_elements(row, shape)
        if kind == "BF16":
            bits = (random.weights(n).view(np.uint32) >> 16).astype(np.uint16)
        elif kind == "F16":
            bits = random.weights(n).astype(np.float16).view(np.uint16)
        elif kind == "F32":
            bits = (random.weights(n) + np.float32(1)).view(np.uint32)
        else:
            bits = random.bits(n, row.space)
        bits = bits.astype(uint_dtype(row.space))
        special = SPECIAL.get(kind, ())[:n]
        bits[: len(special)] = special
        state[name] = Tensor(kind, shape, bits).changed(bits)
    return state


def step(state: State, random: Random, rate: float, only: Iterable[str] | None = None) -> State:
    """Return the state after a step in which about `rate` of the elements change."""
    chosen = set(state if only is None else only)
    return {
        name: tensor.changed(tensor.bits ^ random.mask(len(tensor.bits), tensor.space, rate))
        if name in chosen
        else tensor
        for name, tensor in state.items()
    }


def with_special_bits_changed(state: State) -> State:
    """Swap -0.0 and NaNs for others: a writer that compares numbers sees no difference in some of them."""
    result = dict(state)
    for name, tensor in state.items():
        bits = tensor.bits.copy()
        n_special = len(SPECIAL.get(tensor.dtype, ())[: len(bits)])
        bits[:n_special] = np.roll(bits[:n_special], 1)
        if n_special and tensor.dtype != "F8_E4M3":
            bits[n_special - 1] = 0  # where -0.0 was, or will be
        result[name] = tensor.changed(bits)
    return result


def safetensors(state: State, metadata: Mapping[str, str]) -> bytes:
    """Return a file as some writer might make it: tensors in their own order, spaces in the header, nothing aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in state.items():
        header[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.bits.nbytes],
        }  # fmt: skip
        end += tensor.bits.nbytes
    text = json.dumps(header, ensure_ascii=False).encode() + b"   "
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.bits.tobytes() for tensor in state.values())


def checkpoint(state: State, number: int, n_files: int = 2) -> Files:
    """Return the files of a checkpoint."""
    names = list(state)
    files, weight_map = {}, {}
    for i in range(n_files):
        path = "model.safetensors" if n_files == 1 else f"model-{i + 1:05d}-of-{n_files:05d}.safetensors"
        part = {name: state[name] for name in names[i::n_files]}
        files[path] = safetensors(part, {"format": "pt", **({"step": str(number)} if i == 0 else {})})
        weight_map.update(dict.fromkeys(part, path))
    if n_files > 1:
        index = {"metadata": {"total_size": sum(t.bits.nbytes for t in state.values())}, "weight_map": weight_map}
        files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    files["config.json"] = json.dumps({"model_type": "golden", "step": number}).encode()
    files["tokenizer/vocab.txt"] = "▁the\n▁größe\n".encode()
    files["tokenizer/überzählig/leer"] = b""
    return files


@contextlib.contextmanager
def on_disk(files: Files) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        for path, data in files.items():
            (Path(directory) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(directory) / path).write_bytes(data)
        yield Path(directory)
