"""Any state, published and brought into live tensors of any form, from whatever they hold, over any versions."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placed import NUMPY, TORCH, Framework, Placed, place

import dcr_store
from dcr_store.layout.dtypes import DTYPES, n_elements, uint_dtype
from dcr_store.layout.tensors import to_array
from dcr_store.receive.memory_bringer import StateDictBringer
from dcr_store.targets import live_tensor

# Zeros of both signs, infinities, quiet and signalling NaNs with payloads, the smallest subnormals.
EDGES = {
    1: [0x00, 0x80, 0x01, 0x7F, 0xFF, 0x7C, 0xFE],
    2: [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7C01, 0xFE02],
    4: [0x00000000, 0x80000000, 0x00000001, 0x7F800000, 0x7F800001, 0xFFC00001, 0xFFFFFFFF],
    8: [0, 1 << 63, 1, 0x7FF0000000000000, 0x7FF0000000000001, 0xFFF8000000000001, 2**64 - 1],
}
MOST_ELEMENTS = 1000  # some 16 chunks: more would only take longer
Spec = tuple[str, tuple[int, ...]]


def random_bits(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    uint = uint_dtype(DTYPES[dtype].space)
    n = n_elements(DTYPES[dtype], shape)
    if dtype == "BOOL":
        return rng.integers(0, 2, n, np.uint8)
    bits = rng.integers(0, np.iinfo(uint).max, n, uint, endpoint=True)
    edges = rng.random(n) < 0.4
    bits[edges] = rng.choice(np.array(EDGES[uint.itemsize], uint), int(edges.sum()))
    return bits


@dataclass
class Live:
    """What a caller owns: tensors by name, of which some are the same."""

    framework: Framework
    state: dict[str, Any] = field(default_factory=dict)
    placed: dict[str, Placed] = field(default_factory=dict)

    def assert_is(self, version: dict[str, np.ndarray]) -> None:
        for name, placed in self.placed.items():
            np.testing.assert_array_equal(placed.bits, version[name.partition("|")[0]], name)
            placed.assert_outside_untouched()


@st.composite
def specs(draw: st.DrawFn, framework: Framework) -> dict[str, Spec]:
    found = {}
    for number in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(NUMPY if framework == "numpy" else TORCH))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 9, 21]), max_size=3)))
        while math.prod(shape) > MOST_ELEMENTS:
            shape = shape[1:]
        if dtype == "F4":
            shape = (*shape, 2 * draw(st.integers(1, 7)))
        found[f"t{number}"] = (dtype, shape)
    return found


def versions_of(wanted: dict[str, Spec], n_versions: int, rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    versions = [{name: random_bits(*spec, rng) for name, spec in wanted.items()}]
    for _ in range(n_versions - 1):
        rate = rng.choice([0.0, 0.05, 0.5, 1.0])
        after = {}
        for name, spec in wanted.items():
            before, other = versions[-1][name], random_bits(*spec, rng)
            after[name] = np.where(rng.random(len(before)) < rate, other, before)
        versions.append(after)
    return versions


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([("numpy", False), ("torch", False), ("torch", True)]))
def test_any_tensors_reach_any_version(data: st.DataObject, way: tuple[Framework, bool]) -> None:
    framework, by_device = way
    wanted = data.draw(specs(framework))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    versions = versions_of(wanted, data.draw(st.integers(1, 4)), rng)
    tied = {
        name for name, spec in wanted.items() if 0 not in spec[1] and data.draw(st.booleans())
    }  # in the version, under a further name
    live = Live(framework)
    for name, (dtype, shape) in wanted.items():
        form = data.draw(
            st.sampled_from(["one", "same", "separate", "only the alias"] if name in tied else ["one", "extra"])
        )
        for copy in [name] if form != "separate" else [name, f"{name}|copy"]:
            order = data.draw(st.permutations(range(len(shape))))
            steps = [data.draw(st.sampled_from([1, 1, 2] if framework == "torch" else [1, 1, 2, -1])) for _ in shape]
            placed = live.placed[copy] = place(dtype, shape, framework, order, steps)
            start = data.draw(st.sampled_from(["a version", "anything", "zeros"]))
            bits = (
                versions[int(rng.integers(len(versions)))][name]
                if start == "a version"
                else random_bits(dtype, shape, rng)
            )
            placed.fill(np.zeros_like(bits) if start == "zeros" else bits, dtype, shape)
        tensors = [placed.tensor for key, placed in live.placed.items() if key.partition("|")[0] == name]
        if form != "only the alias":
            live.state[name] = tensors[0]
        if form in ("same", "separate", "only the alias"):
            live.state[f"alias.{name}"] = tensors[-1]
        if form == "extra" and n_elements(DTYPES[dtype], shape):
            live.state[f"not stored.{name}"] = tensors[0]  # but tied to what is

    patched = patch.object(live_tensor, "is_on_host", lambda tensor: False) if by_device else patch("sys.path")
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as store, patched:
        for version in versions:
            with store.begin() as transaction:
                for name, (dtype, shape) in wanted.items():
                    tensor = to_array(version[name].copy(), dtype, shape, framework)
                    transaction.write(name, tensor)
                    if name in tied:
                        transaction.write(f"alias.{name}", tensor)
        bringer = StateDictBringer(live.state)
        for _ in range(data.draw(st.integers(1, 4))):
            number = data.draw(st.integers(0, len(versions) - 1))
            if data.draw(st.booleans()):
                goal = store._catalog.resolve(f"main@{number}")
                bringer.bring(store._catalog, goal, None)
                held = bringer.held(store._catalog)
                assert held is not None
                assert held.row.root == goal.row.root
            else:
                store.load_into(live.state, f"main@{number}")
                bringer.forget()
            live.assert_is(versions[number])
        identified = StateDictBringer(live.state).held(store._catalog)
        assert identified is not None
        assert identified.row.root == store._catalog.resolve(f"main@{number}").row.root
