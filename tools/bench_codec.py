#!/usr/bin/env python3
"""Measure the chunk coding: bytes per changed weight beside the bound and beside other codings, and speed per engine.

    python tools/bench_codec.py [--quick] [--real DIR_OR_FILES ...]

``--real`` takes safetensors files in the order of their versions, or a directory of them, sorted by name; what they
hold is taken as BF16. Synthetic data is made like a training step: the chance that a weight changes halves with each
step of its exponent, most changes are one unit in the last place, and some rows of an embedding do not change. Sizes
depend on the data alone (and on the version of zstd) and are checked against targets; speeds depend on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numcodecs.zstd import Zstd

from dcr_store.codec import chunk, kernels, sparse, values
from dcr_store.codec.digest import crc64
from dcr_store.codec.portable import get_codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    U16 = NDArray[np.uint16]

CHUNK = 1 << 20
RATES = (0.003, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5)
ZSTD = Zstd(level=1)
COLUMNS = ("bound", "dcr.delta", "portable", "XOR+zstd", "u16+u16", "idx+bf16", "overwrite")


def weights(rng: np.random.Generator, n: int) -> U16:
    """BF16 bits of normal weights of several scales."""
    scale = np.repeat(np.array([0.01, 0.02, 0.05, 0.02], np.float32), n // 4)
    return ((rng.standard_normal(n, np.float32) * scale).view(np.uint32) >> 16).astype(np.uint16)


def step(rng: np.random.Generator, base: U16, rate: float) -> U16:
    """The bits after a step that changes a share of `rate` of the weights."""
    n = len(base)
    exponent = (base >> 7 & 255).astype(np.uint8)
    trained = np.ones(n, np.bool)
    trained[: n // 8].reshape(-1, 256)[rng.random(n // 8 // 256) < 0.5] = False  # rows of no sample
    counts = np.bincount(exponent[trained], minlength=256)
    low, high = 1e-12, 1e3
    for _ in range(60):
        factor = (low * high) ** 0.5
        chances = np.minimum(0.9, factor * np.exp2(127.0 - np.arange(256)))
        low, high = (factor, high) if chances @ counts < rate * n else (low, factor)
    chance = chances.astype(np.float32)[exponent] * trained
    hit = np.flatnonzero(rng.random(n, np.float32) < chance)
    units = np.minimum(rng.geometric(0.9, len(hit)), 40).astype(np.int32)
    old = base[hit].astype(np.int32)
    moved = old + units * rng.choice(np.array([-1, 1], np.int32), len(hit))
    crossed = (moved ^ old) & 0x8000 != 0  # through zero: the sign flips, the magnitude starts again
    stepped = base.copy()
    stepped[hit] = np.where(crossed, old ^ 0x8000, moved)
    return stepped


def uniform(rng: np.random.Generator, base: U16, rate: float) -> U16:
    """The bits after changes at uniformly random positions."""
    units = np.minimum(rng.geometric(0.9, len(base)), 40).astype(np.uint16)
    return base + units * (rng.random(len(base)) < rate)


def real_pairs(paths: list[Path]) -> Iterator[tuple[str, U16, U16]]:
    files = [file for path in paths for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]
    contents = (np.frombuffer(file.read_bytes(), np.uint8) for file in files)
    bits = (data[8 + int(data[:8].view("<u8")[0]) :].view(np.uint16) for data in contents)
    before = None
    for file, after in zip(files, bits, strict=True):
        if before is not None:
            yield file.stem, before, after
        before = after


def chunks(bits: U16) -> list[U16]:
    padded = np.concatenate([bits, np.zeros(-len(bits) % CHUNK, np.uint16)])
    return list(padded.reshape(-1, CHUNK))


def entropy(counts: NDArray[np.intp]) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def bound_nbytes(mask: U16) -> float:
    n = int(np.count_nonzero(mask))
    return (entropy(np.array([n, len(mask) - n])) * len(mask) + entropy(np.bincount(mask[mask != 0])) * n) / 8


def overwrite_nbytes(base: U16, new: U16) -> int:
    """This coding with new values in place of masks."""
    positions, _ = chunk.find_changes(base, new)
    if not len(positions):
        return 0
    gaps, k, _ = sparse.find_gaps(positions)
    _, with_planes = sparse.encode_gaps(gaps, k, np.full(len(positions), 1, np.uint16))
    out = bytearray()
    values.append_planes(out, new[positions], values.choose_rotation(new[positions]))
    codes = bytearray()
    values.append_values(codes, np.full(len(positions), 1, np.uint16), rotate=False)
    return chunk.HEADER_NBYTES + len(with_planes) - len(codes) + len(out)


def u16_pairs_nbytes(mask: U16) -> int:
    positions = np.flatnonzero(mask)
    gaps = np.minimum(np.diff(positions, prepend=-1) - 1, 0xFFFF).astype(np.uint16)
    return len(ZSTD.encode(np.concatenate([gaps, mask[positions]])))


def sizes(base: U16, new: U16) -> tuple[int, dict[str, float]]:
    mask = base ^ new
    n = int(np.count_nonzero(mask))
    pairs = list(zip(chunks(base), chunks(new), strict=True))
    portable = get_codec("portable")
    total = {
        "bound": bound_nbytes(mask),
        "dcr.delta": sum(len(chunk.encode(a ^ b)) for a, b in pairs),
        "portable": sum(len(portable.encode(a ^ b)) for a, b in pairs if np.any(a != b)),
        "XOR+zstd": len(ZSTD.encode(mask)),
        "u16+u16": u16_pairs_nbytes(mask),
        "idx+bf16": 6 * n,
        "overwrite": sum(overwrite_nbytes(a, b) for a, b in pairs),
    }
    return n, {name: nbytes / n for name, nbytes in total.items()}


class Targets:
    """Collects what passed and what did not."""

    def __init__(self) -> None:
        self.failed = 0

    def check(self, what: str, found: float, limit: float) -> None:
        passed = found <= limit
        self.failed += not passed
        print(f"    {'PASS' if passed else 'FAIL'}  {what}: {found:.3f}, at most {limit}")


def print_sizes(name: str, base: U16, new: U16, targets: Targets, *, checked: bool) -> None:
    n, per_change = sizes(base, new)
    cells = "".join(f"{per_change[column]:>11.3f}" for column in COLUMNS)
    print(f"{name:<22}{n / len(base):>8.2%}{cells}{per_change['dcr.delta'] / per_change['bound']:>9.3f}")
    if checked:
        own = per_change["dcr.delta"]
        targets.check("of the bound", own / per_change["bound"], 1.06)
        targets.check("of u16 gaps + u16 XOR, zstd-1", own / per_change["u16+u16"], 0.8)
        targets.check("of dense XOR, zstd-1", own / per_change["XOR+zstd"], 0.6)
        targets.check("of overwrite, in this coding", own / per_change["overwrite"], round(1 / 1.7, 3))


def zipnn_nbytes(bits: U16) -> int | None:
    if importlib.util.find_spec("zipnn") is None:
        return None
    zipnn = importlib.import_module("zipnn").ZipNN(method="huffman", input_format="byte", bytearray_dtype="bfloat16")
    return len(zipnn.compress(bytearray(bits.tobytes())))


def print_anchors(name: str, bits: NDArray[Any], targets: Targets) -> None:
    width = bits.dtype.itemsize
    padded = np.concatenate([bits, np.zeros(-len(bits) % CHUNK, bits.dtype)]).reshape(-1, CHUNK)
    own = sum(len(chunk.encode(part)) for part in padded)
    split = sum(len(ZSTD.encode(np.ascontiguousarray(bits.view(np.uint8)[j::width]))) for j in range(width))
    zipnn = zipnn_nbytes(bits) if bits.dtype == np.uint16 else None
    print(
        f"{name:<22}{'100%':>8}  of raw: dcr.delta {own / bits.nbytes:.4f}, "
        f"byte-split + zstd-1 {split / bits.nbytes:.4f}, "
        f"zstd-1 {len(ZSTD.encode(bits.view(np.uint8))) / bits.nbytes:.4f}, "
        f"ZipNN {'not installed' if zipnn is None else f'{zipnn / bits.nbytes:.4f}'}"
    )
    targets.check("of byte-split whole, zstd-1", own / split, 1.01)
    targets.check("bytes above raw in the worst chunk", max(len(chunk.encode(p)) - p.nbytes for p in padded), 64)


def gb_per_s(work: Callable[[int], object], n_chunks: int, nbytes: int, n_threads: int, n_rounds: int) -> float:
    """GB/s of dense weights: the best time of each chunk in one thread, the best round in several."""
    best = np.full(n_chunks, np.inf)
    if n_threads == 1:
        for _ in range(n_rounds):
            for i in range(n_chunks):
                start_s = time.perf_counter()
                work(i)
                best[i] = min(best[i], time.perf_counter() - start_s)
        return float(n_chunks * nbytes / best.sum() / 1e9)
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(n_rounds):
            start_s = time.perf_counter()
            list(pool.map(work, range(n_chunks)))
            best[0] = min(best[0], time.perf_counter() - start_s)
    return float(n_chunks * nbytes / best[0] / 1e9)


def print_speeds(name: str, base: U16, new: U16, n_rounds: int) -> None:
    pairs = list(zip(chunks(base), chunks(new), strict=True))
    encoded = [chunk.encode(a ^ b) for a, b in pairs]
    bits = [a.copy() for a, _ in pairs]

    def publish(i: int) -> None:
        a, b = pairs[i]
        crc64(a)
        crc64(b)
        chunk.encode_sparse(*chunk.find_changes(a, b), CHUNK)

    def anchor(i: int) -> None:
        chunk.encode(pairs[i][1])

    def apply(i: int) -> None:
        chunk.apply(encoded[i], bits[i])

    def apply_verified(i: int) -> None:
        chunk.apply(encoded[i], bits[i])
        crc64(bits[i])

    work = anchor if name.endswith("100%") else publish
    columns = [work, apply, apply_verified]
    cells = [gb_per_s(do, len(pairs), 2 * CHUNK, t, n_rounds) for do in columns for t in (1, 2)]
    print(f"{name:<30}" + "".join(f"{cell:>9.2f}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", nargs="+", type=Path, default=[], metavar="DIR_OR_FILES")
    parser.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    targets = Targets()
    base = weights(rng, (2 if arguments.quick else 16) * CHUNK)

    print("Bytes per changed weight; last column: dcr.delta / bound")
    print(f"{'':<22}{'changed':>8}" + "".join(f"{column:>11}" for column in COLUMNS) + f"{'ratio':>9}")
    real = list(real_pairs(arguments.real))
    for name, before, after in real:
        print_sizes(f"real {name}", before, after, targets, checked=True)
    for rate in RATES:
        for kind, change in (("like training", step), ("uniform", uniform)):
            print_sizes(kind, base, change(rng, base, rate), targets, checked=0.01 <= rate <= 0.1)
    wide = rng.standard_normal(2 * CHUNK, np.float32) * np.float32(0.02)
    for name, bits in [
        *((f"real {name}", after) for name, _, after in real[-1:]),
        ("BF16 normal", base),
        ("F32 normal", wide.view(np.uint32)),
        ("F16 normal", wide.astype(np.float16).view(np.uint16)),
        ("random bits", rng.integers(0, 1 << 16, 2 * CHUNK, np.uint16)),
    ]:
        print_anchors(name, bits, targets)

    print("\nGB/s of dense BF16, one and two threads")
    print(f"{'':<30}{'compare, digest, encode':>18}{'decode, apply':>18}{'and digest':>18}")
    n_rounds = 3 if arguments.quick else 10
    for engine in ("numpy", "numba"):
        if importlib.util.find_spec(engine) is None:
            print(f"{engine}: not installed")
            continue
        kernels.use_engine(engine)
        for name, before, after in real[:1]:
            print_speeds(f"{engine}, real {name}", before, after, n_rounds)
        for rate in (0.003, 0.01, 0.05, 0.3):
            print_speeds(f"{engine}, like training, {rate:.1%}", base, step(rng, base, rate), n_rounds)
        print_speeds(f"{engine}, anchor, 100%", np.zeros_like(base), base, n_rounds)
    print(f"\n{targets.failed} of the size targets missed")
    return 1 if targets.failed else 0


if __name__ == "__main__":
    sys.exit(main())
