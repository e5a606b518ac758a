"""States for tests: real training snapshots where the data is present, else made by the same law.

The law (of real RL training in BF16): the chance that a weight changes is about min(0.9, c * 2^-exponent); most changes
are one unit in the last place; some rows of embeddings do not change.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
Array = np.ndarray


def law_step(bits: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return BF16 bits after one step in which about `rate` of the weights change, by the law."""
    exponent = ((bits >> 7) & 0xFF).astype(np.int64)
    weight = np.minimum(0.9, 2.0 ** (120.0 - exponent))
    chance = np.minimum(0.9, weight * rate / max(weight.mean(), 1e-9))
    changed = rng.random(bits.shape) < chance
    step = rng.choice(np.array([1, -1, 2, -2], np.int64), bits.shape, p=[0.46, 0.46, 0.04, 0.04])
    new = bits.astype(np.int64) + step
    return np.where(changed & (new >= 0) & (new < 65536), new, bits).astype(np.uint16)


def series(n_steps: int, seed: int = 0, rate: float = 0.01) -> list[dict[str, Array]]:
    """Return states of a small model: BF16 matrices of odd sizes, a float32 norm, all by name."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embed.weight": (257, 96),
        "layers.0.q.weight": (96, 96),
        "layers.0.mlp.weight": (96, 301),
        "head": (5, 7),
    }
    bits = {n: rng.normal(0, 0.02, s).astype(ml_dtypes.bfloat16).view(np.uint16) for n, s in shapes.items()}
    norm = rng.normal(1, 0.1, 96).astype(np.float32)
    states = []
    for _ in range(n_steps):
        states.append({**{n: b.copy().view(ml_dtypes.bfloat16) for n, b in bits.items()}, "norm.weight": norm.copy()})
        bits = {n: law_step(b, rate, rng) for n, b in bits.items()}
        norm = norm + rng.normal(0, 1e-6, 96).astype(np.float32)
    return states


def raw(array: object) -> bytes:
    """Return an array's (or torch tensor's) bytes in row-major order."""
    if type(array).__module__.split(".")[0] == "torch":
        import torch

        assert isinstance(array, torch.Tensor)
        return array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(array).tobytes()


def assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """Assert that two states have the same names, dtypes, shapes and bytes."""
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == np.asarray(array).dtype, name
        assert found[name].shape == np.asarray(array).shape, name
        assert raw(found[name]) == raw(array), name


def write_hf(directory: Path, state: dict[str, Array], n_files: int = 1, step: int = 0) -> Path:
    """Write a state as an HF directory with config, tokenizer and, for several files, an index."""
    from dcr_store.layout.tensors import as_bits
    from dcr_store.targets.safetensors_file import make_header, parse_header

    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    groups = [names[i::n_files] for i in range(n_files)]
    weight_map = {}
    for i, group in enumerate(groups):
        file = "model.safetensors" if n_files == 1 else f"model-{i + 1:05d}-of-{n_files:05d}.safetensors"
        data = {name: as_bits(name, state[name]) for name in group}
        header = make_header([(n, d.dtype, d.shape) for n, d in data.items()], {"format": "pt", "step": str(step)})
        body = b""
        for tensor in parse_header(header, len(header) + sum(d.bits.nbytes for d in data.values()), file).tensors:
            body += data[tensor.name].bits.tobytes()
        (directory / file).write_bytes(header + body)
        weight_map.update(dict.fromkeys(group, file))
    if n_files > 1:
        index = {"metadata": {"total_size": sum(a.nbytes for a in state.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({"model_type": "test"}))
    (directory / "tokenizer").mkdir(exist_ok=True)
    (directory / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    return directory


def tree(directory: Path) -> dict[str, bytes]:
    """Return the files below a directory by relative path, without the target's own notes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and ".dcr" not in path.relative_to(directory).parts
    }


def real_snapshots(out: Path) -> list[Path]:
    """Unpack the real snapshots; an empty list where the data is not present."""
    paths: list[Path] = []
    for index in sorted(DATA.glob("*/series.txt")):
        from numcodecs import Zstd

        previous = None
        for name in index.read_text().split():
            data = np.frombuffer(Zstd().decode((index.parent / f"{name}.zst").read_bytes()), np.uint8)
            previous = data if previous is None else previous ^ data
            path = out / index.parent.name / f"{name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(previous.tobytes())
            paths.append(path)
    return paths
