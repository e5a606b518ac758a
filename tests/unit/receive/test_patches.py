"""Patches between any two versions: applied to the base they give the version, whatever changes between them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from handmade import Dense, Part, publish, zeros
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placed import NUMPY
from watched import Watched

import dcr_store
from dcr_store.errors import IntegrityError, InvalidInputError
from dcr_store.layout.dtypes import DTYPES, uint_dtype
from dcr_store.layout.layout import LayoutBuilder
from dcr_store.layout.tensors import as_bits, to_array
from dcr_store.receive.patches import TensorPatch
from dcr_store.store import Store
from dcr_store.versions import pairs

SIZE = 64


def new_store(**options: Any) -> Store:
    return dcr_store.create(f"memory://{secrets.token_hex(8)}", **{"chunk_elements": SIZE, **options})


def write(store: Store, state: dict[str, Any]) -> None:
    with store.begin() as transaction:
        for name, tensor in state.items():
            transaction.write(name, tensor)


def applied(base: dict[str, Any], found: list[TensorPatch]) -> dict[str, Any]:
    """Do what an engine does: assign values at indices of the flat tensor, or take the whole."""
    state = {name: array.copy() for name, array in base.items()}
    for item in found:
        for name in (item.name, *item.aliases):
            if item.indices is None:
                assert tuple(item.values.shape) == item.shape
                state[name] = np.asarray(item.values).copy()
            else:
                assert item.values.dtype == state[name].dtype
                assert item.indices.dtype == np.int32
                assert np.all(np.diff(item.indices) > 0)
                flat = state[name].reshape(-1)
                flat[item.indices] = item.values
                state[name] = flat.reshape(item.shape)
    return state


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(as_bits("", found[name]).bits, as_bits("", array).bits, name)


def random_array(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    uint = uint_dtype(DTYPES[dtype].space)
    n = int(np.prod(shape, dtype=int)) * DTYPES[dtype].elements_per_value
    bits = rng.integers(0, np.iinfo(uint).max, n, uint, endpoint=True)
    return to_array(bits & 1 if dtype == "BOOL" else bits, dtype, shape)


def changed(array: Any, rate: float, rng: np.random.Generator) -> Any:
    bits = as_bits("", array).bits.copy()
    chosen = rng.random(len(bits)) < rate
    bits[chosen] ^= bits.dtype.type(1)
    return to_array(bits, as_bits("", array).dtype, array.shape)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(0, 2**32))
def test_patches_lead_from_any_version_to_any_other(data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = st.lists(st.sampled_from([0, 1, 2, 5, 12]), max_size=3).map(tuple)
    state = {
        f"t{number}": random_array(data.draw(st.sampled_from(NUMPY)), data.draw(shapes), rng)
        for number in range(data.draw(st.integers(1, 5)))
    }
    versions = []
    for _ in range(data.draw(st.integers(2, 4))):
        versions.append(dict(state))
        rate = data.draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
        state = {name: changed(array, rate if rng.random() < 0.7 else 0.0, rng) for name, array in state.items()}
        if data.draw(st.sampled_from([False, False, True])):  # another layout
            name = data.draw(st.sampled_from(sorted(state)))
            change = data.draw(st.sampled_from(["dtype", "shape", "add", "remove"]))
            if change == "dtype":
                state[name] = random_array(data.draw(st.sampled_from(NUMPY)), state[name].shape, rng)
            if change == "shape":
                state[name] = state[name].reshape(1, *state[name].shape)
            if change == "add":
                state["a new one"] = random_array("F32", data.draw(shapes), rng)
            if change == "remove" and len(state) > 1:
                del state[name]
    with (
        new_store() as store,
        patch.object(pairs, "BATCH_NBYTES", data.draw(st.sampled_from([1, 2000, 1 << 26]))),
        patch.object(pairs, "KEPT_NBYTES", data.draw(st.sampled_from([0, 1 << 26]))),
    ):
        for version in versions:
            write(store, version)
        a, b = data.draw(st.tuples(*[st.integers(0, len(versions) - 1)] * 2))
        source = {name: array.copy() for name, array in versions[a].items()} if data.draw(st.booleans()) else None
        found = list(store.patches(f"main@{a}", f"main@{b}", state=source))
        assert len({item.name for item in found}) == len(found)
        assert_same(applied(versions[a], found), versions[b])
        differing = {
            name
            for name, array in versions[b].items()
            if name not in versions[a]
            or (array.dtype, array.shape) != (versions[a][name].dtype, versions[a][name].shape)
            or as_bits("", array).bits.tobytes() != as_bits("", versions[a][name]).bits.tobytes()
        }
        assert {item.name for item in found} == differing, "these and no others"


def make_versions() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    first = {"w": random_array("BF16", (50, 20), rng), "v": random_array("F32", (300,), rng)}
    second = {name: changed(array, 0.02, rng) for name, array in first.items()}
    return [first, second, {**second, "v": changed(second["v"], 1.0, rng)}]


VERSIONS = make_versions()


@pytest.fixture
def store() -> Iterator[Store]:
    with new_store() as store:
        for version in VERSIONS:
            write(store, version)
        yield store


def test_lists_where_little_changes_and_whole_tensors_where_much_does(store: Store) -> None:
    one = {item.name: item for item in store.patches("main@0", "main@1")}
    assert all(item.indices is not None for item in one.values())
    bits = [as_bits("", version["w"]).bits for version in VERSIONS]
    np.testing.assert_array_equal(one["w"].indices, np.flatnonzero(bits[0] != bits[1]))
    np.testing.assert_array_equal(as_bits("", one["w"].values).bits, bits[1][bits[0] != bits[1]])
    (two,) = store.patches("main@1")  # to the head
    assert (two.name, two.indices, two.dtype, two.shape) == ("v", None, "F32", (300,))


def test_a_whole_tensor_of_which_some_chunks_stay(store: Store) -> None:
    base = {"x": np.zeros(640, np.uint8)}
    new = {"x": np.concatenate([np.zeros(128, np.uint8), np.ones(512, np.uint8)])}
    write(store, base)
    write(store, new)
    (item,) = store.patches("main@3", "main@4")
    assert item.indices is None
    np.testing.assert_array_equal(item.values, new["x"])


def test_torch(store: Store) -> None:
    for item in store.patches("main@0", "main@1", framework="torch"):
        assert (item.indices.dtype, item.indices.ndim) == (torch.int32, 1)
        base, new = (torch.from_numpy(as_bits("", VERSIONS[i][item.name]).bits.view(np.uint8)) for i in (0, 1))
        kind = {"BF16": torch.bfloat16, "F32": torch.float32}[item.dtype]
        assert item.values.dtype == kind
        flat = base.clone().view(kind)
        flat[item.indices.long()] = item.values
        assert torch.equal(flat.view(torch.uint8), new)
    with pytest.raises(InvalidInputError, match="unknown framework"):
        store.patches("main@0", framework="jax")  # type: ignore[arg-type]


def test_tied_tensors_come_once_with_all_their_names() -> None:
    tied = torch.zeros(70)
    with new_store() as store:
        write(store, {"embed": tied, "head": tied})
        tied[3] = -0.0
        write(store, {"head": tied, "embed": tied})
        (item,) = store.patches("main@0")
        assert (item.name, item.aliases) == ("embed", ("head",))
        assert (item.indices.tolist(), as_bits("", item.values).bits.tolist()) == ([3], [1 << 31])


def test_packed_tensors_come_whole() -> None:
    with new_store() as store:
        for value in (1, 2):
            octets = torch.full((300,), 1, dtype=torch.uint8)
            octets[7] = value
            write(store, {"x": octets.view(torch.float4_e2m1fn_x2)})
        (item,) = store.patches("main@0", framework="torch")
        assert (item.indices, item.dtype, item.shape) == (None, "F4", (600,))
        assert torch.equal(item.values.view(torch.uint8), octets)


def test_with_the_engines_own_tensors_the_history_is_not_read(store: Store) -> None:
    watched = Watched(store._objects)
    anchor = store._catalog.contents(store._catalog.resolve("main@0")).partitions
    store._catalog.objects = watched
    octets = {name: as_bits("", array).bits.view(np.uint8) for name, array in VERSIONS[1].items()}
    live = {name: torch.from_numpy(array.copy()) for name, array in octets.items()}
    state = {"w": live["w"].view(torch.bfloat16).view(50, 20), "v": live["v"].view(torch.float32)}
    found = list(store.patches("main@1", "main@2", state=state))
    assert [item.name for item in found] == ["v"]
    assert not {key for _, key in watched.requests} & {item.key for item in anchor}
    live["v"][5] ^= 1  # of no version: this chunk is rebuilt
    again = list(store.patches("main@1", "main@2", state=state))
    assert {key for _, key in watched.requests} & {item.key for item in anchor}
    np.testing.assert_array_equal(again[0].values, found[0].values)
    with pytest.raises(InvalidInputError, match="missing here: 'v'"):
        next(store.patches("main@1", "main@2", state={"w": state["w"]}))


def test_overwrites_are_patches_too() -> None:
    builder = LayoutBuilder()
    builder.add("x", "BF16", (300,))
    layout = builder.build()
    rng = np.random.default_rng(0)
    mask: Dense = zeros(layout)
    mask["u16"][:300] = rng.integers(1, 2**16, 300)
    value, present = zeros(layout), {"u16": np.zeros(layout.spaces["u16"], np.uint8)}
    present["u16"][[3, 70, 71]] = 1
    value["u16"][[3, 70]] = [0x7FC1, 5]
    with new_store() as store:
        base = publish(store, layout, [Part(mask=mask)], None)
        value["u16"][70] = base["u16"][70]  # overwritten by what it was
        publish(store, layout, [Part(value=value, present=present)], base)
        for a, b, bits in ((0, 1, [0x7FC1, 0]), (1, 0, base["u16"][[3, 71]].tolist())):
            (item,) = store.patches(f"main@{a}", f"main@{b}")
            assert item.indices.tolist() == [3, 71]
            assert as_bits("", item.values).bits.tolist() == bits


def test_damage_is_named(store: Store) -> None:
    item = store._catalog.contents(store._catalog.resolve("main@1")).partitions[0]
    store._objects.put(item.key, store._objects.get(item.key)[:-1])
    with pytest.raises(IntegrityError) as error:
        list(store.patches("main@0", "main@1"))
    assert error.value.key == item.key
