"""Checkpoints for loaders: any bits at all, NaNs of all payloads, both zeros; and engines compared byte for byte."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import dcr_store
from dcr_store.layout.dtypes import dtype, n_elements, uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.layout.tensors import to_array
from dcr_store.receive.native_bringer import NativeBringer
from dcr_store.store import Store
from dcr_store.targets.native.target import NativeLoaderTarget
from dcr_store.versions.replay import Outcome

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
Bits = dict[str, np.ndarray]
LoadWeights = Callable[[Any], object]


def first(shapes: Shapes, rng: np.random.Generator) -> Bits:
    """Return bits for each tensor, of values that training makes."""
    bits = {}
    for name, (kind, shape) in shapes.items():
        size = n_elements(dtype(kind), shape)
        uint = uint_dtype(dtype(kind).space)
        normal = rng.normal(0, 0.02, size).astype(np.float32).view(np.uint32)
        bits[name] = (normal >> 16).astype(uint) if uint.itemsize == 2 else normal.astype(uint)
    return bits


def step(bits: Bits, rng: np.random.Generator, rate: float = 0.02) -> Bits:
    """Return the next bits: some any bits at all (NaNs among them), some zeros of both signs, most as they were."""
    new = {}
    for name, old in bits.items():
        top = np.iinfo(old.dtype).max
        anything = rng.integers(0, top, len(old), old.dtype, endpoint=True)
        zero = np.where(rng.random(len(old)) < 0.5, 0, 1 << (8 * old.itemsize - 1)).astype(old.dtype)
        nan = anything | np.array({2: 0x7F80, 4: 0x7F800000}.get(old.itemsize, 0), old.dtype)
        kind = rng.random(len(old)) / rate
        changed = np.select([kind < 0.5, kind < 0.75, kind < 1], [anything, zero, nan], old)
        new[name] = changed if rng.random() < 0.9 else old
    return new


def tensors(shapes: Shapes, bits: Bits) -> dict[str, torch.Tensor]:
    return {name: to_array(bits[name].copy(), kind, shape, "torch") for name, (kind, shape) in shapes.items()}


def publish(store: Store, shapes: Shapes, bits: Bits, aliases: Mapping[str, str] | None = None) -> None:
    made = tensors(shapes, bits)
    made |= {alias: made[of] for alias, of in (aliases or {}).items()}
    with store.begin(owner="test") as transaction:
        for name, tensor in made.items():
            transaction.write(name, tensor)
        transaction.commit()


def new_store(chunk_elements: int = 4096) -> Store:
    return dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=chunk_elements)


def octets(module: nn.Module) -> dict[str, bytes]:
    """Return the bytes of all parameters and buffers, those that are not saved too."""
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {n: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in found}


def assert_same(found: nn.Module, expected: nn.Module, but: tuple[str, ...] = ()) -> None:
    have, want = octets(found), octets(expected)
    assert set(have) == set(want)
    different = [name for name in want if have[name] != want[name] and name.rpartition(".")[2] not in but]
    assert different == [], f"different: {different}"


def bringer(load_weights: LoadWeights, module: nn.Module, **options: Any) -> NativeBringer:
    return NativeBringer(NativeLoaderTarget(load_weights, module, **options))


def bring(store: Store, target: NativeBringer, version: str = "main") -> Outcome:
    return target.bring(store._catalog, store._catalog.resolve(version), None)


def layout_of(store: Store) -> Layout:
    catalog = store._catalog
    return catalog.layout(catalog.resolve("main").row.layout)
