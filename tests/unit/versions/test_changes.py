"""The changes of a version by tensor: versions made by hand, what is fetched, and damage that is not passed on."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from handmade import Dense, Part, publish, zeros
from hypothesis import given, settings
from hypothesis import strategies as st
from watched import Watched

import dcr_store
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.payload.version import VersionContents
from dcr_store.store import Store
from dcr_store.versions.changes import TensorChanges, iter_changes

SIZE = 64


def make_layout() -> Layout:
    builder = LayoutBuilder()
    for name, dtype, shape in (
        ("a", "BF16", (50, 10)),
        ("scalar", "F16", ()),
        ("empty", "BF16", (0, 3)),
        ("b", "F32", (100,)),
        ("c", "U8", (1000,)),
        ("d", "C128", (20,)),
        ("e", "BF16", (70,)),
    ):
        builder.add(name, dtype, shape)
    builder.add_alias("tied", "a")
    return builder.build()


LAYOUT = make_layout()


@pytest.fixture(params=["dcr.delta", "portable"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=request.param, chunk_elements=SIZE) as store:
        yield store


def noise(rng: np.random.Generator, density: float) -> Dense:
    result = zeros(LAYOUT)
    for entry in LAYOUT.tensors:
        bits = result[entry.space][entry.start : entry.stop]
        chosen = rng.random(len(bits)) < density
        bits[chosen] = rng.integers(1, np.iinfo(bits.dtype).max, int(chosen.sum()), bits.dtype, endpoint=True)
    return result


def presence(rng: np.random.Generator, density: float) -> Dense:
    return {space: (bits != 0).astype(np.uint8) for space, bits in noise(rng, density).items()}


def where(flags: dict[str, np.ndarray], bits: Dense) -> Dense:
    return {space: np.where(flags[space], bits[space], 0).astype(bits[space].dtype) for space in bits}


def contents_of(store: Store, version: int) -> VersionContents:
    return store._catalog.contents(store._catalog.resolve(f"main@{version}"))


def changes_of(store: Store, version: int, tensors: list[str] | None = None) -> list[TensorChanges]:
    return list(iter_changes(store._objects, contents_of(store, version), SIZE, tensors=tensors))


def assert_leads(found: list[TensorChanges], base: Dense, new: Dense) -> None:
    """Apply the changes by the words of the format and compare whole states."""
    state = {space: bits.copy() for space, bits in base.items()}
    names = [item.entry.name for item in found]
    assert len(set(names)) == len(names)
    for item in found:
        bits = state[item.entry.space][item.entry.start : item.entry.stop]
        assert len(item.positions) + len(item.written), "only tensors that change"
        for positions, values in ((item.positions, item.masks), (item.written, item.values)):
            assert (positions.dtype, values.dtype) == (np.int64, bits.dtype)
            assert np.all(np.diff(positions) > 0)
            assert not len(positions) or (positions[0] >= 0 and positions[-1] < len(bits))
        assert np.all(item.masks != 0)
        assert not np.intersect1d(item.positions, item.written).size
        bits[item.positions] ^= item.masks
        bits[item.written] = item.values
    for space in SPACES:
        np.testing.assert_array_equal(state[space], new[space])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.002, 0.05, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.sampled_from([1, 2, 5, 100]),
    st.integers(1, 3),
)
def test_changes_lead_from_the_base_to_the_version(
    seed: int, mask_density: float, overwrite_density: float, shard: int, n_writers: int
) -> None:
    rng = np.random.default_rng(seed)
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=SIZE) as store:
        base = publish(store, LAYOUT, [Part(mask=noise(rng, 0.9), shards={"u16/mask": shard})], None)
        owner = {space: rng.integers(0, n_writers, n) for space, n in LAYOUT.spaces.items()}
        parts = []
        for number in range(n_writers):
            owned = {space: table == number for space, table in owner.items()}
            present = where(owned, presence(rng, overwrite_density))
            free = {space: owned[space] & (present[space] == 0) for space in owned}
            value = where(present, noise(rng, 0.7))  # some overwrites are zeros
            shards = {f"{space}/{kind}": shard + number for space in SPACES for kind in ("mask", "value", "present")}
            mask = where(free, noise(rng, mask_density))
            parts.append(Part(f"w{number}", mask, value, present, owned, shards=shards))
        new = publish(store, LAYOUT, parts, base)
        assert_leads(changes_of(store, 0), zeros(LAYOUT), base)
        assert_leads(changes_of(store, 1), base, new)


def test_what_nobody_asked_for_is_not_fetched(store: Store) -> None:
    rng = np.random.default_rng(0)
    publish(store, LAYOUT, [Part(mask=noise(rng, 0.9))], None)
    contents = contents_of(store, 0)
    watched = Watched(store._objects)
    found = list(iter_changes(watched, contents, SIZE, tensors={"d"}))
    assert [item.entry.name for item in found] == ["d"]
    assert {key for _, key in watched.requests} == {item.key for item in contents.partitions if "/u64/" in item.key}
    assert [item.entry.name for item in changes_of(store, 0, ["tied"])] == ["a"], "an alias is a name too"
    assert changes_of(store, 0, ["empty"]) == []
    assert changes_of(store, 0, []) == []


def test_each_partition_is_fetched_once_through_the_fetcher_given(store: Store) -> None:
    rng = np.random.default_rng(1)
    base = publish(store, LAYOUT, [Part(mask=noise(rng, 0.9))], None)
    value, present = noise(rng, 1.0), presence(rng, 0.2)
    publish(store, LAYOUT, [Part(value=where(present, value), present=present, shards={"u16/value": 1})], base)
    contents = contents_of(store, 1)
    asked: list[str] = []

    def fetcher(item: object) -> bytes:
        asked.append(item.key)  # type: ignore[attr-defined]
        return store._objects.get(item.key)  # type: ignore[attr-defined]

    found = list(iter_changes(store._objects, contents, SIZE, fetcher=fetcher))
    assert {item.entry.name for item in found} >= {"a", "b", "c", "d", "e"}
    assert sorted(asked) == sorted(item.key for item in contents.partitions)


def test_masks_other_than_the_sealed_ones_are_not_passed_on(store: Store) -> None:
    rng = np.random.default_rng(2)
    publish(store, LAYOUT, [Part(mask=noise(rng, 0.9))], None)
    contents = contents_of(store, 0)
    touched = {space: dict(rows) for space, rows in contents.touched.items()}
    touched["u16"][2] = (touched["u16"][2][0] ^ 1, 0)
    found = iter_changes(store._objects, replace(contents, touched=touched), SIZE)
    names: list[str] = []
    with pytest.raises(IntegrityError, match="defective in chunk 2 of u16"):
        names += (item.entry.name for item in found)
    assert names in ([], ["c"]), "u8 comes first"


def test_overwrites_that_were_sealed_and_are_not_there(store: Store) -> None:
    rng = np.random.default_rng(3)
    base = publish(store, LAYOUT, [Part(mask=noise(rng, 0.9))], None)
    publish(store, LAYOUT, [Part(mask=noise(rng, 0.1))], base)
    contents = contents_of(store, 1)
    touched = {space: dict(rows) for space, rows in contents.touched.items()}
    touched["u32"][0] = (touched["u32"].get(0, (0, 0))[0], 77)
    with pytest.raises(IntegrityError, match=r"defective in chunk 0 of u32.*expected overwrites, found none"):
        list(iter_changes(store._objects, replace(contents, touched=touched), SIZE))


def test_changes_between_tensors_are_refused(store: Store) -> None:
    state = zeros(LAYOUT)
    gap = LAYOUT.entry("e").stop  # the space is longer, for alignment
    assert gap < LAYOUT.spaces["u16"]
    state["u16"][gap] = 1
    publish(store, LAYOUT, [Part(mask=state)], None)
    with pytest.raises(IntegrityError, match="expected changes of tensors only"):
        changes_of(store, 0)


def test_a_damaged_partition_names_its_key(store: Store) -> None:
    publish(store, LAYOUT, [Part(mask=noise(np.random.default_rng(4), 0.9))], None)
    contents = contents_of(store, 0)
    key = contents.partitions[-1].key
    data = bytearray(store._objects.get(key))
    data[3] ^= 1
    store._objects.put(key, bytes(data))
    with pytest.raises(IntegrityError) as error:
        list(iter_changes(store._objects, contents, SIZE))
    assert error.value.key == key


def test_an_iterator_that_is_given_up_ends_its_threads(store: Store) -> None:
    import threading

    publish(store, LAYOUT, [Part(mask=noise(np.random.default_rng(5), 0.9))], None)
    before = threading.active_count()
    found = iter_changes(store._objects, contents_of(store, 0), SIZE)
    next(found)
    found.close()
    assert threading.active_count() == before
