"""Live tensors from version to version: what is fetched and written, what is remembered, and every way to be torn."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from handmade import Dense, Part, publish, zeros
from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.errors import IntegrityError, InvalidInputError, StorageError
from dcr_store.events import Event
from dcr_store.layout.layout import LayoutBuilder
from dcr_store.receive.bringing import Bringer, bringer_of
from dcr_store.receive.memory_bringer import StateDictBringer
from dcr_store.store import Store
from dcr_store.targets import live_tensor
from dcr_store.versions.catalog import Catalog, Located

SIZE = 64
NAMES = ("a", "b", "c")
Tensors = dict[str, torch.Tensor]


def make_states(n: int, seed: int = 0) -> list[Tensors]:
    rng = np.random.default_rng(seed)
    state = {
        "a": rng.integers(-(2**15), 2**15, (40, 30), np.int16),
        "b": rng.integers(-(2**31), 2**31, 500, np.int32),
        "c": rng.integers(0, 256, 700, np.uint8),
    }
    states = []
    for _ in range(n):
        states.append({name: torch.from_numpy(array.copy()) for name, array in state.items()})
        # Some chunks of `c` never change.
        for name, last in (("a", 1200), ("b", 500), ("c", 64)):
            flat = state[name].reshape(-1)
            flat[rng.choice(last, last // 10, replace=False)] ^= 1
    return states


STATES = make_states(5)


@pytest.fixture(params=["host", "device"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Tensors of torch as they are, or as if their memory were a device's."""
    with patch.object(live_tensor, "is_on_host", lambda tensor: request.param == "host"):
        yield request.param


@pytest.fixture
def store() -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=SIZE) as store:
        for state in STATES:
            publish_state(store, state)
        yield store


def publish_state(store: Store, state: Tensors, **options: Any) -> None:
    with store.begin(**options) as transaction:
        for name, tensor in state.items():
            transaction.write(name, tensor)


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return store._catalog


def version(catalog: Catalog, number: int) -> Located:
    return catalog.resolve(f"main@{number}")


def holding(number: int) -> Tensors:
    return {name: tensor.clone() for name, tensor in STATES[number].items()}


def assert_is(tensors: Tensors, number: int) -> None:
    for name, tensor in STATES[number].items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.usefixtures("way")
def test_versions_forwards_and_back(catalog: Catalog) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in STATES[0].items()}
    bringer = StateDictBringer(tensors)
    assert isinstance(bringer, Bringer)
    assert bringer.held(catalog) is None
    for number in (1, 2, 4, 3, 0, 4, 4):
        bringer.bring(catalog, version(catalog, number), None)
        assert_is(tensors, number)
        assert bringer.held(catalog) == version(catalog, number)
    bringer.close()
    bringer.close()


@pytest.mark.usefixtures("way")
def test_only_what_changed_is_read_fetched_and_written(catalog: Catalog) -> None:
    tensors = holding(2)
    bringer = StateDictBringer(tensors)
    assert bringer.held(catalog) == version(catalog, 2), "told by digests"
    n_chunks = sum(len(rows) for rows in catalog.contents(version(catalog, 3)).touched.values())
    asked: list[str] = []

    def fetcher(item: Any) -> bytes:
        asked.append(item.key)
        return catalog.objects.get(item.key)

    outcome = bringer.bring(catalog, version(catalog, 3), fetcher)
    assert sorted(asked) == sorted(item.key for item in catalog.contents(version(catalog, 3)).partitions)
    assert (outcome.chunks_written, outcome.chunks_healed) == (n_chunks, 0)
    again = bringer.bring(catalog, version(catalog, 3), fetcher)
    assert (again.nbytes_fetched, again.chunks_written, again.chunks_healed) == (0, 0, 0)
    assert_is(tensors, 3)


def test_a_device_gets_masks_for_little_and_whole_ranges_for_much(catalog: Catalog) -> None:
    done = {"xor": 0, "write": 0}
    real = live_tensor.DeviceTensor

    class Counted(real):
        def xor(self, *arguments: Any) -> None:
            done["xor"] += 1
            super().xor(*arguments)

        def write(self, *arguments: Any) -> None:
            done["write"] += 1
            super().write(*arguments)

    tensors = holding(0)
    with (
        patch.object(live_tensor, "DeviceTensor", Counted),
        patch("dcr_store.targets.state_dict.DeviceTensor", Counted),
        patch.object(live_tensor, "is_on_host", lambda tensor: False),
    ):
        bringer = StateDictBringer(tensors)
        bringer.bring(catalog, version(catalog, 1), None)
        assert done["xor"] > 20
        assert done["write"] == 0
        for tensor in tensors.values():
            tensor.zero_()
        bringer.bring(catalog, version(catalog, 2), None)
        assert done["write"] > 20
    assert_is(tensors, 2)


class Stop(BaseException):
    """What an interrupted call raises: no error that anybody handles."""


@contextlib.contextmanager
def stopping_at(name: str, occurrence: int) -> Iterator[list[str]]:
    seen: list[str] = []

    def listener(event: Event) -> None:
        if event.name == name:
            seen.append(event.detail)
            if len(seen) == occurrence:
                raise Stop

    with events.listening(listener):
        yield seen


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("point", ["memory.begun", "replay.chunk.before", "replay.chunk.written", "memory.applied"])
@pytest.mark.parametrize("goal_then", [(3, 3), (3, 4), (1, 2), (0, 3), (4, 1)])
def test_interrupted_anywhere_the_next_call_heals(catalog: Catalog, point: str, goal_then: tuple[int, int]) -> None:
    goal, then = goal_then
    tensors = holding(2)
    bringer = StateDictBringer(tensors)
    with stopping_at(point, 10**9) as seen:
        bringer.bring(catalog, version(catalog, goal), None)
    occurrences = sorted({1, len(seen) // 2, len(seen)} - {0})
    for occurrence in occurrences:
        bringer.bring(catalog, version(catalog, 2), None)
        with stopping_at(point, occurrence), pytest.raises(Stop):
            bringer.bring(catalog, version(catalog, goal), None)
        old = all(torch.equal(tensors[name], STATES[2][name]) for name in NAMES)
        new = all(torch.equal(tensors[name], STATES[goal][name]) for name in NAMES)
        if point == "replay.chunk.written" and occurrence == len(seen) // 2:
            assert not old
            assert not new
        held = StateDictBringer(tensors).held(catalog)
        assert (held is None) == (not old and not new)
        outcome = bringer.bring(catalog, version(catalog, then), None)
        assert_is(tensors, then)
        assert outcome.chunks_healed == 0, "each chunk is old or new"
        assert bringer.held(catalog) == version(catalog, then)


def test_interrupted_memory_is_not_taken_for_the_old_version(catalog: Catalog) -> None:
    """Also where nobody counts changes, as torch does."""
    arrays = {name: tensor.numpy() for name, tensor in holding(2).items()}
    bringer = StateDictBringer(arrays)
    bringer.bring(catalog, version(catalog, 2), None)
    with stopping_at("replay.chunk.written", 3), pytest.raises(Stop):
        bringer.bring(catalog, version(catalog, 3), None)
    assert bringer.held(catalog) is None
    bringer.bring(catalog, version(catalog, 2), None)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, STATES[2][name].numpy())


@pytest.mark.usefixtures("way")
def test_bits_torn_within_a_chunk_are_healed(catalog: Catalog) -> None:
    tensors = holding(1)
    bringer = StateDictBringer(tensors)
    bringer.bring(catalog, version(catalog, 2), None)
    tensors["a"][3, :5] ^= 9
    tensors["c"][300] ^= 1  # in a chunk that no version changes
    # torch told that somebody changed them
    assert bringer.held(catalog) is None
    outcome = bringer.bring(catalog, version(catalog, 3), None)
    assert_is(tensors, 3)
    assert outcome.chunks_healed in (2, 3), "those, and no others"


def test_what_torch_is_not_told_of(catalog: Catalog) -> None:
    arrays = {name: tensor.numpy() for name, tensor in holding(1).items()}
    bringer = StateDictBringer(arrays)
    bringer.bring(catalog, version(catalog, 2), None)
    arrays["a"][3, :5] ^= 9
    arrays["c"][300] ^= 1  # in a chunk that no version changes
    seen: list[str] = []
    with events.listening(lambda event: seen.append(event.name)):
        outcome = bringer.bring(catalog, version(catalog, 3), None)
    assert "memory.distrusted" in seen, "chunks that change are proven on the way"
    assert outcome.chunks_healed in (2, 3)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, STATES[3][name].numpy())
    arrays["c"][300] ^= 1
    bringer.forget()
    assert bringer.held(catalog) is None
    assert bringer.bring(catalog, version(catalog, 3), None).chunks_healed == 1


@pytest.mark.usefixtures("way")
def test_a_failing_store_leaves_old_or_new_and_another_call_ends_right(store: Store) -> None:
    watched = Watched(store._objects)
    catalog = Catalog(watched, store._document, store._catalog.store_sha256)
    tensors = holding(0)
    bringer = StateDictBringer(tensors)
    bringer.bring(catalog, version(catalog, 1), None)
    n_before = watched.count("get", "/data/")

    def refuse(method: str, key: str) -> None:
        if "/data/" in key and watched.count("get", "/data/") > n_before + 1:
            raise StorageError("does not answer", key=key)

    watched.before = refuse
    with pytest.raises(StorageError):
        bringer.bring(catalog, version(catalog, 3), None)
    watched.before = None
    bringer.bring(catalog, version(catalog, 3), None)
    assert_is(tensors, 3)


@pytest.mark.usefixtures("way")
def test_a_damaged_store_is_named_and_a_healed_one_goes_on(store: Store, catalog: Catalog) -> None:
    tensors = holding(1)
    bringer = StateDictBringer(tensors)
    key = catalog.contents(version(catalog, 2)).partitions[0].key
    data = store._objects.get(key)
    store._objects.put(key, data[:-1])
    with pytest.raises(IntegrityError) as error:
        bringer.bring(catalog, version(catalog, 2), None)
    assert error.value.key == key
    store._objects.put(key, data)
    bringer.bring(catalog, version(catalog, 2), None)
    assert_is(tensors, 2)


def test_a_hole_in_the_history_behind_does_not_matter(store: Store) -> None:
    tensors = holding(3)
    catalog = store._catalog
    manifest = version(catalog, 1).row.manifest.key
    catalog._cache.clear()
    store._objects.delete(manifest)
    bringer = StateDictBringer(tensors)
    bringer.bring(catalog, version(catalog, 4), None)  # knows nothing: asks for all versions that can be read
    assert_is(tensors, 4)
    bringer.bring(catalog, version(catalog, 2), None)
    assert_is(tensors, 2)
    bringer.forget()
    assert bringer.held(catalog) == version(catalog, 2)
    bringer.bring(catalog, version(catalog, 3), None)
    assert_is(tensors, 3)


def test_other_tensors_in_the_same_mapping_are_looked_at(catalog: Catalog) -> None:
    tensors = holding(1)
    bringer = StateDictBringer(tensors)
    bringer.bring(catalog, version(catalog, 2), None)
    tensors.update(holding(4))
    assert bringer.held(catalog) == version(catalog, 4)
    outcome = bringer.bring(catalog, version(catalog, 4), None)
    assert (outcome.nbytes_fetched, outcome.chunks_written) == (0, 0)


def test_another_store_is_told_apart(catalog: Catalog) -> None:
    tensors = holding(1)
    bringer = StateDictBringer(tensors)
    bringer.bring(catalog, version(catalog, 1), None)
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=SIZE) as other:
        publish_state(other, STATES[3])
        publish_state(other, STATES[4])
        assert bringer.held(other._catalog) is None
        bringer.bring(other._catalog, version(other._catalog, 1), None)
        assert_is(tensors, 4)
    assert bringer.held(catalog) == version(catalog, 4), "the same bits are a version of this store too"


def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(store: Store, catalog: Catalog) -> None:
    tensors = holding(2)
    bringer = StateDictBringer(tensors)
    bringer.bring(catalog, version(catalog, 2), None)
    publish_state(store, {**STATES[4], "more": torch.ones(3)})
    with pytest.raises(InvalidInputError, match="missing here: 'more'"):
        bringer.bring(catalog, version(catalog, 5), None)
    assert_is(tensors, 2)
    assert bringer.held(catalog) == version(catalog, 2)
    tensors["more"] = torch.zeros(3)
    bringer.bring(catalog, version(catalog, 5), None)
    assert_is(tensors, 4)
    assert tensors["more"].tolist() == [1, 1, 1]
    del tensors["more"]
    bringer.bring(catalog, version(catalog, 3), None)
    assert_is(tensors, 3)


def test_load_into_tells_what_it_did(store: Store) -> None:
    tensors = holding(1)
    result = store.load_into(tensors, "main@3")
    assert_is(tensors, 3)
    assert (result.version, result.previous, result.chunks_healed) == ("main@3", "main@1", 0)
    module = torch.nn.Module()
    for name, tensor in STATES[0].items():
        module.register_buffer(name, torch.full_like(tensor, 3))
    result = store.load_into(module)
    assert_is(dict(module.named_buffers()), 4)
    assert (result.version, result.previous) == ("main@4", None)
    with pytest.raises(InvalidInputError, match="holds no tensors by name"):
        store.load_into("a/directory")


@pytest.mark.usefixtures("way")
def test_a_receiver_keeps_a_module_at_the_newest_version(store: Store) -> None:
    module = torch.nn.Module()
    for name, tensor in STATES[0].items():
        module.register_buffer(name, tensor.clone())
    buffers = dict(module.named_buffers())
    with store.receiver(module) as receiver:
        for number in (2, 4):
            receiver.follow(until=f"main@{number}")
            assert_is(buffers, number)
            active = receiver.active()
            assert active is not None
            assert active.version == f"main@{number}"
        publish_state(store, STATES[1])
        receiver.follow(until="main@5")
        assert_is(buffers, 1)


def test_which_targets_are_tensors() -> None:
    assert isinstance(bringer_of({}), StateDictBringer)
    assert isinstance(bringer_of(torch.nn.Linear(2, 2)), StateDictBringer)
    bringer = StateDictBringer({})
    assert bringer_of(bringer) is bringer


@pytest.mark.usefixtures("way")
def test_overwrites_and_the_way_back_over_them() -> None:
    rng = np.random.default_rng(0)
    builder = LayoutBuilder()
    builder.add("x", "BF16", (300,))
    layout = builder.build()

    def noise(density: float) -> Dense:
        found = zeros(layout)
        chosen = rng.random(300) < density
        found["u16"][:300][chosen] = rng.integers(1, 2**16, int(chosen.sum()))
        return found

    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=SIZE) as store:
        states = [publish(store, layout, [Part(mask=noise(1.0))], None)]
        present = {space: (bits != 0).astype(np.uint8) for space, bits in noise(0.1).items()}
        value = {space: np.where(present[space], bits, 0).astype(bits.dtype) for space, bits in noise(0.8).items()}
        states.append(publish(store, layout, [Part(value=value, present=present)], states[-1]))
        states.append(publish(store, layout, [Part(mask=noise(0.05))], states[-1]))
        live = torch.zeros(300, dtype=torch.bfloat16)
        bringer = StateDictBringer({"x": live})
        for number in (1, 2, 0, 2, 1):
            bringer.bring(store._catalog, version(store._catalog, number), None)
            np.testing.assert_array_equal(live.view(torch.int16).numpy().view(np.uint16), states[number]["u16"][:300])


@pytest.mark.parametrize("held", [(99, 0), (0, 99), (99, 1), (2, 0)])
def test_copies_that_differ_are_not_taken_for_another_version(held: tuple[int, int]) -> None:
    """Of one byte, every value that could stand for copies that differ is that of some version."""
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as store:
        for value in range(4):
            tensor = np.array(value, np.uint8)
            with store.begin() as transaction:
                transaction.write("w", tensor)
                transaction.write("tied", tensor)
        live = {name: np.array(value, np.uint8) for name, value in zip(("w", "tied"), held, strict=True)}
        assert StateDictBringer(live).held(store._catalog) is None
        for value in range(4):
            live["w"][...], live["tied"][...] = held
            store.load_into(live, f"main@{value}")
            assert (live["w"], live["tied"]) == (value, value)
