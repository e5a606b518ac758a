"""The replay engine on versions made by hand: masks and overwrites, several writers, any start, groups, damage."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from handmade import Dense, Part, after, publish, tensors, zeros
from hypothesis import given, settings
from hypothesis import strategies as st
from watched import Watched

import dcr_store
from dcr_store.errors import IntegrityError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.payload.version import SealedPartition, fetch
from dcr_store.store import Store
from dcr_store.versions import replay as engine
from dcr_store.versions.path import UNKNOWN, ZERO, Path
from dcr_store.versions.replay import classify, digests, everywhere, replay
from dcr_store.versions.route import route

SIZE = 64


def make_layout(*tensors: tuple[str, str, int]) -> Layout:
    builder = LayoutBuilder()
    for name, dtype, n in tensors:
        builder.add(name, dtype, (n,))
    return builder.build()


LAYOUT = make_layout(("a", "BF16", 500), ("b", "F32", 100), ("c", "U8", 1000), ("d", "I64", 40), ("e", "BF16", 70))


def owned(layout: Layout, state: Dense) -> Dense:
    """Zero what belongs to no tensor."""
    result = zeros(layout)
    for entry in layout.tensors:
        result[entry.space][entry.start : entry.stop] = state[entry.space][entry.start : entry.stop]
    return result


def noise(layout: Layout, rng: np.random.Generator, density: float = 1.0) -> Dense:
    """Return random bits at tensor positions."""
    return owned(
        layout,
        {
            space: np.where(
                rng.random(n) < density, rng.integers(0, 2 ** (8 * uint_dtype(space).itemsize), n, np.uint64), 0
            ).astype(uint_dtype(space))
            for space, n in layout.spaces.items()
        },
    )


@pytest.fixture(params=["dcr.delta", "portable"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=request.param, chunk_elements=SIZE) as store:
        yield store


def overwriting(layout: Layout, rng: np.random.Generator, density: float) -> tuple[Dense, Dense]:
    """Return values and presence; most values are there, some of them zero."""
    present = {
        space: (rng.random(len(bits)) < density).astype(np.uint8)
        for space, bits in noise(layout, rng).items()
        if len(bits)
    }
    present = {
        s: np.where(owned(layout, noise(layout, rng))[s] != 0, p, 0).astype(np.uint8) for s, p in present.items()
    }
    value = {s: np.where(p != 0, noise(layout, rng, 0.8)[s], 0).astype(uint_dtype(s)) for s, p in present.items()}
    return value, present


def off(mask: Dense, present: Dense) -> Dense:
    """Return `mask` with zeros where `present`."""
    return {s: np.where(present[s] != 0, 0, m).astype(m.dtype) if s in present else m for s, m in mask.items()}


def history(store: Store, seed: int = 0, layout: Layout = LAYOUT) -> list[Dense]:
    """Publish an anchor, masks, overwrites, both at once, two writers, an unchanged version; return all states."""
    rng = np.random.default_rng(seed)
    states = [publish(store, layout, [Part(mask=noise(layout, rng))], None)]

    def go_on(*parts: Part) -> None:
        states.append(publish(store, layout, list(parts), states[-1]))

    go_on(Part(mask=noise(layout, rng, 0.02)))
    value, present = overwriting(layout, rng, 0.05)
    go_on(Part(value=value, present=present))
    value, present = overwriting(layout, rng, 0.05)
    go_on(Part(mask=off(noise(layout, rng, 0.03), present), value=value, present=present))
    go_on(Part())
    # Two writers of disjoint halves, the second with masks and overwrites, shards of other lengths.
    value, present = overwriting(layout, rng, 0.3)
    half = {space: np.arange(n) % 2 == 0 for space, n in layout.spaces.items()}
    one = {s: np.where(half[s], m, 0).astype(m.dtype) for s, m in noise(layout, rng, 0.1).items()}
    present = {s: np.where(half[s], 0, p).astype(np.uint8) for s, p in present.items()}
    value = {s: np.where(half[s], 0, v).astype(v.dtype) for s, v in value.items()}
    two = {s: np.where(half[s], 0, m).astype(m.dtype) for s, m in noise(layout, rng, 0.1).items()}
    go_on(
        Part("rank-0", mask=one, owned=half, shards={"u16/mask": 1, "u8/mask": 100}),
        Part("rank-1", mask=off(two, present), value=value, present=present, owned={s: ~h for s, h in half.items()},
             shards={"u16/mask": 3, "u16/value": 1, "u16/present": 5}),
    )  # fmt: skip
    go_on(Part(mask=noise(layout, rng, 0.01)))
    return states


class Chunks:
    """A target that holds a dense state, and notes what is written."""

    def __init__(self, state: Dense) -> None:
        self.state = {space: np.concatenate([b, np.zeros(-len(b) % SIZE, b.dtype)]) for space, b in state.items()}
        self.written: list[tuple[str, int]] = []

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        out[:] = self.state[space][chunk * SIZE : (chunk + 1) * SIZE]

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        self.state[space][chunk * SIZE : (chunk + 1) * SIZE] = bits
        self.written.append((space, chunk))

    def assert_is(self, state: Dense) -> None:
        for space, bits in state.items():
            np.testing.assert_array_equal(self.state[space][: len(bits)], bits)
            assert not self.state[space][len(bits) :].any()


class Scattered(Chunks):
    """A target that takes changes as masks, as memory of a device does."""

    is_far = True

    def __init__(self, state: Dense) -> None:
        super().__init__(state)
        self.n_xored = 0

    def xor_chunk(self, space: str, chunk: int, positions: np.ndarray, masks: Bits) -> None:
        assert len(positions) * (4 + masks.itemsize) < SIZE * masks.itemsize, "less than the whole chunk"
        assert np.all(np.diff(positions.astype(np.int64)) > 0)
        assert masks.all()
        self.state[space][chunk * SIZE + positions.astype(np.int64)] ^= masks
        self.written.append((space, chunk))
        self.n_xored += 1


class Near(Scattered):
    """A target that takes changes as masks, but does not want them looked for, as memory of the host."""

    is_far = False


def lists(store: Store) -> bool:
    """Whether the store's masks of few changes list them."""
    return store._catalog.document.codec == "dcr.delta"


def path_to(store: Store, version: int, last: int | None = None) -> Path:
    located = store._catalog.resolve(f"main@{version}")
    others = [] if last is None else [store._catalog.resolve(f"main@{last}")]
    return route(store._catalog, located, others).path


@pytest.mark.parametrize("group_nbytes", [engine.GROUP_NBYTES, 1])
def test_every_version_reads_as_the_spec_says(store: Store, group_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # By name, a target holds parts of chunks: what several groups make of a chunk must not go through it.
    monkeypatch.setattr("dcr_store.versions.replay.GROUP_NBYTES", group_nbytes)
    for number, state in enumerate(history(store)):
        found = store.read(f"main@{number}")
        for name, bits in tensors(LAYOUT, state).items():
            np.testing.assert_array_equal(np.frombuffer(found[name].tobytes(), bits.dtype), bits)
        for name in found:
            part = store.read(f"main@{number}", [name])
            assert part[name].tobytes() == found[name].tobytes()


def test_pull_through_all_versions(store: Store, tmp_path: Any) -> None:
    states = history(store)
    for number in (0, 3, 5, 6, 5, 2, 4, 0, 6):
        store.pull(tmp_path / "target", f"main@{number}")
        assert store.compare_directory(f"main@{number}", tmp_path / "target").ok
        found = store.read(f"main@{number}")
        for name, bits in tensors(LAYOUT, states[number]).items():
            assert found[name].tobytes() == bits.tobytes()
    assert store.verify(deep=True).problems == []


def test_values_and_presence_of_two_incarnations(store: Store) -> None:
    """A writer that was started again seals what its earlier incarnation stored: still one overwrite."""
    rng = np.random.default_rng(5)
    base = publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng))], None)
    value, present = overwriting(LAYOUT, rng, 0.2)
    part = Part(value=value, present=present, earlier={f"{space}/value": "e" * 16 for space in SPACES})
    state = publish(store, LAYOUT, [part], base)
    assert state["u16"].any()
    found = store.read("main@1")
    for name, bits in tensors(LAYOUT, state).items():
        assert found[name].tobytes() == bits.tobytes()


@pytest.mark.parametrize("group_nbytes", [engine.GROUP_NBYTES, 4000, 1])
@pytest.mark.parametrize(("ahead_nbytes", "kind"), [(1 << 20, Chunks), (0, Chunks), (0, Scattered), (0, Near)])
def test_from_any_mixture_to_any_version(
    store: Store, monkeypatch: pytest.MonkeyPatch, group_nbytes: int, ahead_nbytes: int, kind: type[Chunks]
) -> None:
    """Chunks of all versions, zeros and noise mixed in one target: it ends right, forwards and back, in any groups."""
    monkeypatch.setattr("dcr_store.versions.replay.GROUP_NBYTES", group_nbytes)
    monkeypatch.setattr("dcr_store.versions.prefetch.AHEAD_NBYTES", ahead_nbytes)
    states = history(store)
    rng = np.random.default_rng(1)
    n_xored = 0
    for goal in range(len(states)):
        path = path_to(store, goal, len(states) - 1)
        target = kind(states[goal])
        sources = [Chunks(state) for state in [*states, zeros(LAYOUT), noise(LAYOUT, rng)]]
        for space in SPACES:
            for chunk in range(path.n_chunks(space)):
                scratch = np.empty(SIZE, uint_dtype(space))
                sources[rng.integers(len(sources))].read_chunk(space, chunk, scratch)
                target.write_chunk(space, chunk, scratch)
        target.written.clear()
        found = digests(target, path.all_chunks(), SIZE)
        places = classify(path, found, range(len(states)))
        outcome = replay(store._objects, path, target, places)
        target.assert_is(states[goal])
        # Not counted as written: chunks that the goal has alike, and those written in several groups count each time.
        assert outcome.chunks_healed == sum(int((table == UNKNOWN).sum()) for table in places.values())
        right = {(s, int(c)) for s in SPACES for c in np.flatnonzero(places[s] == goal)}
        assert not right & set(target.written), "what is right is not written again"
        n_xored += target.n_xored if isinstance(target, Scattered) else 0
    assert (n_xored > 0) == (kind is Scattered or (kind is Near and lists(store)))


@pytest.mark.parametrize(("kind", "steps"), [(Near, 1), (Near, 2), (Scattered, 1), (Scattered, 2)])
def test_changes_are_scattered_where_one_mask_lists_them_or_they_are_worth_finding(
    store: Store, kind: type[Scattered], steps: int
) -> None:
    states = masks_only(store, FLAT, *[{"u16/mask": 4}] * 3)
    target = kind(states[2 - steps])
    path = path_to(store, 2)
    places = classify(path, digests(target, path.all_chunks(), SIZE), range(3))
    replay(store._objects, path, target, places)
    target.assert_is(states[2])
    assert len(target.written) == 8
    n_one_step = int((places["u16"] == 1).sum())
    assert (n_one_step == 8) == (steps == 1)
    assert target.n_xored == (8 if kind is Scattered else n_one_step if lists(store) else 0)


def test_bits_that_changed_unseen_are_not_scattered_to(store: Store) -> None:
    """A mask on top of other bits than the base's would make bits that are nobody's."""
    states = masks_only(store, FLAT, *[{"u16/mask": 4}] * 2)
    target = Near(states[0])
    path = path_to(store, 1)
    places = classify(path, digests(target, path.all_chunks(), SIZE), range(2))
    target.state["u16"][SIZE + 5] ^= 1
    replay(store._objects, path, target, places)
    target.assert_is(states[1])
    assert target.n_xored == (len(target.written) - 1 if lists(store) else 0)


def test_backwards_over_masks_takes_them_off_again(store: Store) -> None:
    rng = np.random.default_rng(3)
    states = [publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng))], None)]
    for _ in range(3):
        states.append(publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng, 0.02))], states[-1]))
    path = path_to(store, 1, 3)
    target = Chunks(states[3])
    places = classify(path, digests(target, path.all_chunks(), SIZE), [2, 3])
    outcome = replay(store._objects, path, target, places)
    target.assert_is(states[1])
    back = [item.partition.nbytes for step in (2, 3) for item in path.states[step].partitions]
    assert outcome.nbytes_fetched == sum(back)
    assert outcome.chunks_healed == 0


def test_backwards_over_overwrites_starts_again_from_the_anchor(store: Store) -> None:
    rng = np.random.default_rng(4)
    base = publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng))], None)
    value, present = overwriting(LAYOUT, rng, 0.005)
    state = publish(store, LAYOUT, [Part(value=value, present=present)], base)
    path = path_to(store, 0, 1)
    target = Chunks(state)
    places = classify(path, digests(target, path.all_chunks(), SIZE), [1])
    assert {int(place) for table in places.values() for place in table} == {0, UNKNOWN}
    replay(store._objects, path, target, places)
    target.assert_is(base)


FLAT = make_layout(("a", "BF16", 8 * SIZE))


def masks_only(store: Store, layout: Layout, *shards: dict[str, int]) -> list[Dense]:
    """Publish an anchor and versions of few masks, one for each of `shards`; return all states."""
    rng = np.random.default_rng(6)
    states = [publish(store, layout, [Part(mask=noise(layout, rng), shards=shards[0])], None)]
    for each in shards[1:]:
        states.append(publish(store, layout, [Part(mask=noise(layout, rng, 0.05), shards=each)], states[-1]))
    return states


def fetched_by(store: Store, path: Path, target: Chunks, *, hand_over: bool) -> list[tuple[str, str, int]]:
    """Bring a target to the goal of a path; return version, array and index of what was fetched."""
    items = [item for contents in path.states for item in contents.partitions]
    places = classify(path, digests(target, path.all_chunks(), SIZE), range(len(path.states)))
    watched, handed = Watched(store._objects), []

    def fetcher(item: SealedPartition) -> bytes:
        handed.append(item.key)
        return fetch(store._objects, item.ref)

    outcome = replay(watched, path, target, places, fetcher=fetcher if hand_over else None)
    keys = handed if hand_over else [key for name, key in watched.requests if name == "get" and "/data/" in key]
    found = [next(item for item in items if item.key == key) for key in keys]
    assert outcome.nbytes_fetched == sum(item.partition.nbytes for item in found)
    assert outcome.chunks_healed == sum(int((table == UNKNOWN).sum()) for table in places.values())
    by_key = {item.key: contents.name for contents in path.states for item in contents.partitions}
    return sorted((by_key[item.key], item.array.array, item.partition.index) for item in found)


@pytest.mark.parametrize("hand_over", [False, True])
def test_beside_a_chunk_that_is_rebuilt_none_goes_back(store: Store, hand_over: bool) -> None:
    """The partitions from the anchor hold what the others need, too, so the masks of newer versions are not fetched."""
    states = masks_only(store, FLAT, *[{"u16/mask": 4}] * 4)
    target = Chunks(states[3])
    target.state["u16"][SIZE + 5] ^= 1
    found = fetched_by(store, path_to(store, 1, 3), target, hand_over=hand_over)
    target.assert_is(states[1])
    rebuilt, back = [("main@0", 0), ("main@1", 0)], [("main@2", 1), ("main@3", 1)]
    assert found == [(name, "u16/mask", index) for name, index in rebuilt + back]


@pytest.mark.parametrize(("hand_over", "is_torn"), [(False, False), (False, True), (True, True)])
def test_the_dearer_way_back_is_gone_where_the_other_is_not_read_or_may_not_be_at_hand(
    store: Store, hand_over: bool, is_torn: bool
) -> None:
    layout = make_layout(("a", "U8", SIZE), ("d", "I64", SIZE))
    rng = np.random.default_rng(7)
    mask = noise(layout, rng)
    mask["u64"][:] = 1  # takes next to nothing
    states = [publish(store, layout, [Part(mask=mask)], None)]
    for _ in range(2):
        states.append(publish(store, layout, [Part(mask=noise(layout, rng))], states[-1]))
    target = Chunks(states[2])
    target.state["u8"][5] ^= is_torn
    found = fetched_by(store, path_to(store, 0, 2), target, hand_over=hand_over)
    target.assert_is(states[0])
    is_rebuilt = is_torn and not hand_over
    names = ["main@0"] if is_rebuilt else ["main@1", "main@2"]
    assert [name for name, array, _ in found if array == "u64/mask"] == names


def test_a_chunk_that_only_newer_versions_touch_is_zeros_again_for_nothing(store: Store) -> None:
    layout = make_layout(("a", "U8", 4 * SIZE))
    mask, later = zeros(layout)["u8"], zeros(layout)["u8"]
    mask[:SIZE], later[2 * SIZE :] = 7, 9
    states = [publish(store, layout, [Part(mask={"u8": mask})], None)]
    states.append(publish(store, layout, [Part(mask={"u8": later})], states[0]))
    target = Chunks(states[1])
    target.state["u8"][5] ^= 1
    found = fetched_by(store, path_to(store, 0, 1), target, hand_over=False)
    target.assert_is(states[0])
    assert found == [("main@0", "u8/mask", 0)]


def test_long_partitions_of_the_anchor_are_fetched_once_whatever_newer_ones_are(store: Store) -> None:
    states = masks_only(store, FLAT, {"u16/mask": 8}, *[{"u16/mask": 2}] * 2)
    target = Chunks(states[2])
    for chunk in (0, 6):
        target.state["u16"][chunk * SIZE] ^= 1
    found = fetched_by(store, path_to(store, 0, 2), target, hand_over=True)
    target.assert_is(states[0])
    assert found == [("main@0", "u16/mask", 0)]


def test_what_is_at_the_goal_costs_nothing(store: Store) -> None:
    states = history(store)
    watched = Watched(store._objects)
    path = path_to(store, 6)
    path.states[0], path.states[6]
    target = Chunks(states[6])
    outcome = replay(watched, path, target, everywhere(path, 6))
    assert (watched.requests, target.written, outcome.nbytes_fetched) == ([], [], 0)


def test_a_chunk_that_nothing_touches_but_whose_digest_changes_is_refused(store: Store) -> None:
    states = history(store)
    path = path_to(store, 1)
    quiet = replace(path.states[1], touched={space: {} for space in SPACES})
    target = Chunks(states[0])
    with pytest.raises(IntegrityError, match="defective"):
        replay(store._objects, Path([path.states[0], quiet], 1, SIZE), target, everywhere(path, 0))
    target.assert_is(states[0])


def test_an_unknown_chunk_of_zeros_is_written(store: Store) -> None:
    """No partition names the chunk, and yet it has to be put right."""
    layout = make_layout(("a", "U8", 640))
    state = zeros(layout)
    state["u8"][:64] = 7
    publish(store, layout, [Part(mask={"u8": state["u8"]})], None)
    path = path_to(store, 0)
    target = Chunks({**zeros(layout), "u8": np.full(640, 9, np.uint8)})
    places = classify(path, digests(target, path.all_chunks(), SIZE), [])
    outcome = replay(store._objects, path, target, places)
    target.assert_is(state)
    assert outcome.chunks_healed == outcome.chunks_written == 10


@pytest.mark.parametrize("group_nbytes", [engine.GROUP_NBYTES, 1])
def test_unknown_chunks_that_only_late_versions_touch(
    store: Store, monkeypatch: pytest.MonkeyPatch, group_nbytes: int
) -> None:
    monkeypatch.setattr("dcr_store.versions.replay.GROUP_NBYTES", group_nbytes)
    layout = make_layout(("a", "U8", 640))
    states = [zeros(layout)]
    for i in range(10):
        mask = zeros(layout)
        mask["u8"][i * 64 : (i + 1) * 64] = i + 1
        states.append(publish(store, layout, [Part(mask={"u8": mask["u8"]})], None if i == 0 else states[-1]))
    path = path_to(store, 9)
    target = Chunks({**zeros(layout), "u8": np.full(640, 99, np.uint8)})
    replay(store._objects, path, target, everywhere(path, UNKNOWN))
    target.assert_is(states[10])


@pytest.mark.parametrize("group_nbytes", [engine.GROUP_NBYTES, 1])
@pytest.mark.parametrize("goal", [2, 3])
def test_a_target_that_changes_after_it_was_looked_at_is_no_defective_version(
    store: Store, monkeypatch: pytest.MonkeyPatch, goal: int, group_nbytes: int
) -> None:
    monkeypatch.setattr("dcr_store.versions.replay.GROUP_NBYTES", group_nbytes)
    states = history(store)
    path = path_to(store, goal)
    target = Chunks(states[1])
    places = classify(path, digests(target, path.all_chunks(), SIZE), [1])
    target.state["u16"][5] ^= 1
    outcome = replay(store._objects, path, target, places)
    target.assert_is(states[goal])
    assert outcome.chunks_healed == 1


class TestDamage:
    def test_a_missing_partition_is_an_error_and_never_zeros(self, store: Store) -> None:
        states = history(store)
        for number in (0, 5):
            for item in store._catalog.contents(store._catalog.resolve(f"main@{number}")).partitions:
                data = store._objects.get(item.key)
                store._objects.delete(item.key)
                with pytest.raises(IntegrityError, match="missing") as caught:
                    store.read(f"main@{len(states) - 1}")
                assert caught.value.key == item.key
                store._objects.put(item.key, data)

    def test_a_version_whose_bits_miss_its_table_is_defective(self, store: Store) -> None:
        """All objects are as recorded, but what they say is not what the table says."""
        rng = np.random.default_rng(0)
        base = publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng))], None)
        lying = {space: bits.copy() for space, bits in base.items()}
        lying["u16"][5] ^= 1
        publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng, 0.5))], lying)
        with pytest.raises(IntegrityError, match="stored version is defective in chunk 0 of u16") as caught:
            store.read("main@1")
        assert caught.value.key == "main@1"
        report = store.verify(deep=True)
        assert [problem.key for problem in report.problems] == ["main@1"]

    def test_nothing_wrong_is_ever_written(self, store: Store) -> None:
        rng = np.random.default_rng(0)
        base = publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng))], None)
        lying = {space: bits ^ 1 for space, bits in base.items()}
        publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng, 0.5))], owned(LAYOUT, lying))
        path = path_to(store, 1)
        target = Chunks(base)
        with pytest.raises(IntegrityError, match="defective"):
            replay(store._objects, path, target, everywhere(path, 0))
        assert target.written == []
        target.assert_is(base)

    def test_a_chunk_that_no_decoder_takes(self, store: Store) -> None:
        """The object has its SHA-256 and the seal names it, but a chunk in it is of an unknown method."""
        from dcr_store.codec import portable

        rng = np.random.default_rng(0)
        encode = portable.get_codec(store.codec).encode

        class Other:
            def encode(self, mask: Bits) -> bytes:
                return b"\x63" + encode(mask)[1:]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("handmade.get_codec", lambda name: Other())
            publish(store, LAYOUT, [Part(mask=noise(LAYOUT, rng))], None)
        with pytest.raises(IntegrityError, match="cannot be decoded") as caught:
            store.read("main@0")
        assert caught.value.key is not None
        assert "/data/w0." in caught.value.key


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_fold_of_random_deltas(data: st.DataObject) -> None:
    """Random masks and overwrites on a few elements: reads give what applying the words of the spec gives."""
    layout = make_layout(("a", "U8", 130), ("b", "U16", 3))
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=SIZE) as store:
        state: Dense | None = None
        expected = []
        for _ in range(data.draw(st.integers(1, 4))):
            present = zeros(layout)
            value, mask = zeros(layout), zeros(layout)
            for entry in layout.tensors:
                for i in data.draw(st.sets(st.integers(0, entry.n_elements - 1), max_size=6)):
                    if data.draw(st.booleans()):
                        mask[entry.space][entry.start + i] = data.draw(st.integers(1, 255))
                    else:
                        present[entry.space][entry.start + i] = data.draw(st.sampled_from([1, 255]))
                        value[entry.space][entry.start + i] = data.draw(st.integers(0, 255))
            part = Part(mask=mask, value=value, present={s: p.astype(np.uint8) for s, p in present.items()})
            state = publish(store, layout, [part], state)
            expected.append(state)
        for number, bits in enumerate(expected):
            found = store.read(f"main@{number}")
            for name, wanted in tensors(layout, bits).items():
                assert found[name].tobytes() == wanted.tobytes()


def test_the_helper_itself() -> None:
    """What the tests compare with: masks first, then values where present."""
    layout = make_layout(("a", "U8", 4))
    base = zeros(layout)
    base["u8"][:4] = [1, 2, 3, 4]
    mask, value, present = zeros(layout)["u8"], zeros(layout)["u8"], zeros(layout)["u8"]
    mask[0], value[1], present[1], present[2] = 1, 9, 1, 5
    new = after(base, [Part(mask={"u8": mask}, value={"u8": value}, present={"u8": present})])
    assert new["u8"][:4].tolist() == [0, 9, 0, 4]
    assert list(itertools.chain(new["u16"], new["u32"], new["u64"])) == []
    assert ZERO != UNKNOWN
