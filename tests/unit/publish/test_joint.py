"""Several writers make one version: the same root and bits as one process that publishes the full state."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dcr_store
from dcr_store.errors import ConflictError, FencedError, IntegrityError, InvalidInputError, LagError
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.publish.joint import SliceTransaction
from dcr_store.publish.slice_baseline import SliceBits
from dcr_store.store import Store

State = dict[str, np.ndarray[Any, Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("BF16", (50, 24)),
    "q": ("BF16", (32, 24)),
    "k": ("BF16", (16, 24)),
    "v": ("BF16", (16, 24)),
    "gate": ("BF16", (40, 24)),
    "up": ("BF16", (40, 24)),
    "down": ("BF16", (24, 40)),
    "norm": ("F32", (24,)),
    "scale": ("F32", ()),
    "phase": ("C64", (6, 4)),
    "steps": ("I64", (3,)),
}
NUMPY = {"BF16": BF16, "F32": np.dtype("<f4"), "C64": np.dtype("<c8"), "C128": np.dtype("<c16"), "I64": np.dtype("<i8")}


def random_state(seed: int) -> State:
    """Any bits: NaNs and signed zeros among them."""
    rng = np.random.default_rng(seed)
    state = {}
    for name, (dtype, shape) in SHAPES.items():
        row = NUMPY[dtype]
        state[name] = np.frombuffer(rng.bytes(math.prod(shape) * row.itemsize), row).reshape(shape).copy()
    return state


def next_state(state: State, seed: int, rate: float = 0.05) -> State:
    rng = np.random.default_rng(seed)
    found = {}
    for name, array in state.items():
        new = array.copy().reshape(-1)
        octets = new.view(np.uint8)
        where = rng.random(len(octets)) < rate / array.itemsize
        octets[where] ^= rng.integers(1, 256, int(where.sum()), np.uint8)
        found[name] = new.reshape(array.shape)
    return found


def whole(name: str) -> AffineMap:
    return slices.whole(name, *SHAPES[name])


def shapes(*names: str) -> dict[str, tuple[int, ...]]:
    return {name: SHAPES[name][1] for name in names}


def maps_of(rank: int, n_ranks: int) -> list[AffineMap]:
    """What a rank of a tensor-parallel trainer holds; small tensors are owned by one rank each."""
    found = [
        slices.padded_vocabulary("embed", *SHAPES["embed"], 56, rank, n_ranks),
        slices.qkv(shapes("q", "k", "v"), "BF16", 8, rank, n_ranks),
        slices.fused(shapes("gate", "up"), "BF16", rank, n_ranks),
        slices.transposed(slices.row_parallel("down", *SHAPES["down"], rank, n_ranks)),
        slices.column_parallel("phase", *SHAPES["phase"], rank, n_ranks),
    ]
    return found + [whole(name) for index, name in enumerate(("norm", "scale", "steps")) if index % n_ranks == rank]


def slice_of(mapped: AffineMap, state: State) -> np.ndarray[Any, Any]:
    """The slice that a map is of, with something in the places that are nobody's."""
    local = np.full(math.prod(mapped.shape), 77, NUMPY[mapped.dtype])
    for name in mapped.tensors:
        there = mapped.canonical_of(name, np.arange(len(local)))
        local[there >= 0] = state[name].reshape(-1)[there[there >= 0]]
    return local.reshape(mapped.shape)


def write(transaction: SliceTransaction, maps: list[AffineMap], state: State) -> None:
    for mapped in maps:
        transaction.write_slice(slice_of(mapped, state), mapped)


def publish_alone(url: str, states: list[State], **options: Any) -> list[str]:
    with dcr_store.create(url, **options) as store:
        roots = []
        for state in states:
            with store.begin() as transaction:
                for name, array in state.items():
                    transaction.write(name, array)
            roots.append(store.show("main").info.root)
        return roots


def publish_jointly(
    stores: list[Store], state: State, all_maps: list[list[AffineMap]], *, announced: bool = False, **options: Any
) -> list[SliceTransaction]:
    """Each rank in a thread of its own, with a store of its own, as processes would."""
    names = [f"r{rank}" for rank in range(len(all_maps))]

    def act(rank: int) -> SliceTransaction:
        told = all_maps[rank] if announced else None
        if rank == 0:
            transaction = stores[0].begin(writers=names, tensors=SHAPES, slices=told, **options)
        else:
            transaction = stores[rank].join(writer=names[rank], slices=told, timeout_s=20)
        write(transaction, all_maps[rank], state)
        transaction.commit(timeout_s=20)
        return transaction

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(act, range(len(names))))


def require_state(store: Store, version: str, state: State) -> None:
    found = store.read(version)
    assert set(found) == set(state)
    for name, array in state.items():
        assert found[name].tobytes() == array.tobytes(), name


def states_of(n: int) -> list[State]:
    states = [random_state(0)]
    while len(states) < n:
        states.append(next_state(states[-1], len(states)))
    return states


@pytest.mark.parametrize("codec", ["dcr.delta", "portable"])
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_roots_are_those_of_one_publisher(tmp_path: Any, n_ranks: int, announced: bool, codec: str) -> None:
    states = states_of(4)
    options = {"chunk_elements": 256, "codec": codec}
    roots = publish_alone(str(tmp_path / "alone"), states, **options)
    url = str(tmp_path / "joint")
    dcr_store.create(url, **options).close()
    stores = [dcr_store.open(url) for _ in range(n_ranks)]
    maps = [maps_of(rank, n_ranks) for rank in range(n_ranks)]
    for state in states:
        publish_jointly(stores, state, maps, announced=announced)
    with dcr_store.open(url) as store:
        assert [info.root for info in store.log("main")] == roots
        for number, state in enumerate(states):
            require_state(store, f"main@{number}", state)
        assert store.verify(deep=True).ok
        store.pull(tmp_path / "weights", version="main@1")
        store.pull(tmp_path / "weights")
        assert store.compare_directory("main", tmp_path / "weights").ok


def test_topology_may_change_and_one_publisher_may_go_on(tmp_path: Any) -> None:
    states = states_of(8)
    url = str(tmp_path / "joint")
    roots = publish_alone(str(tmp_path / "alone"), states, chunk_elements=256)
    dcr_store.create(url, chunk_elements=256).close()
    stores = [dcr_store.open(url) for _ in range(8)]
    for state, n_ranks in zip(states[:6], (2, 2, 4, 8, 1, 2), strict=True):
        publish_jointly(stores[:n_ranks], state, [maps_of(rank, n_ranks) for rank in range(n_ranks)])
    with dcr_store.open(url) as store:
        with store.begin() as transaction:
            for name, array in states[6].items():
                transaction.write(name, array)
        publish_jointly(stores[:4], states[7], [maps_of(rank, 4) for rank in range(4)])
        log = store.log("main")
        assert [info.root for info in log] == roots
        assert [info.base for info in log] == [None, *(f"main@{n}" for n in range(7))]  # deltas, all but the first
        require_state(store, "main", states[7])
        assert store.verify(deep=True).ok


def test_residual_fragments_are_overwrites(tmp_path: Any) -> None:
    states = states_of(3)
    url = str(tmp_path / "joint")
    roots = publish_alone(str(tmp_path / "alone"), states, chunk_elements=256)
    names = list(SHAPES)
    with dcr_store.create(url, chunk_elements=256) as store, dcr_store.open(url) as other:
        for state in states:
            first = store.begin(writers=["a", "b"], tensors=SHAPES)
            second = other.join(writer="b", timeout_s=5)
            for name in names[:4]:
                first.write_slice(state[name], whole(name))
            for name in names[4:]:
                flat = state[name].reshape(-1)
                half = len(flat) // 2
                first.write_residual(name, flat[:half])
                second.write_residual(name, flat[half:], half)
            second.seal()
            first.commit(timeout_s=5)
            second.commit(timeout_s=5)
        assert [info.root for info in store.log("main")] == roots
        for number, state in enumerate(states):
            require_state(store, f"main@{number}", state)
        assert store.verify(deep=True).ok
        kinds = {item.array.array.partition("/")[2] for item in _contents(store, "main").partitions}
        assert kinds == {"mask", "present", "value"}


def _contents(store: Store, version: str) -> Any:
    return store._catalog.contents(store._catalog.resolve(version))


def test_unchanged_slices_store_nothing_and_ownership_once(tmp_path: Any) -> None:
    state = random_state(0)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        maps = [maps_of(rank, 2) for rank in range(2)]
        others = [store, dcr_store.open(str(tmp_path / "s"))]
        for _ in range(3):
            publish_jointly(others, state, maps)
        assert len({info.root for info in store.log("main")}) == 1
        assert _contents(store, "main").partitions == ()
        owned = {seal.ownership.key for _, seal in _contents(store, "main@2").seals}
        assert owned == {seal.ownership.key for _, seal in _contents(store, "main@1").seals}


def test_slices_of_zeros_are_read_as_zeros_whatever_was_in_memory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of zeros are stored nowhere: reading a baseline, and healing it, has to make them."""
    blank = SliceBits.blank

    def dirty(pieces: Any) -> SliceBits:
        found = blank(pieces)
        found.bits.fill(7)
        return found

    monkeypatch.setattr(SliceBits, "blank", dirty)
    states = [{name: np.zeros_like(array) for name, array in random_state(0).items()}]
    states += [next_state(states[0], 1), states[0]]
    roots = publish_alone(str(tmp_path / "alone"), states, chunk_elements=256)
    maps = [maps_of(rank, 2) for rank in range(2)]
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        with store.begin() as transaction:
            for name, array in states[0].items():
                transaction.write(name, array)
        stores = [dcr_store.open(store.url) for _ in range(2)]
        publish_jointly(stores, states[1], maps)
        publish_jointly(stores, states[2], maps)
        for held in stores[0]._slice_baselines.values():
            for bits in held.slices.values():
                bits.bits.fill(9)
        publish_jointly(stores, states[1], maps)
        assert [info.root for info in store.log()] == [*roots, roots[1]]
        assert store.verify(deep=True).ok


def test_names_may_be_tied_and_the_head_keeps_its_order_and_what_it_stores_apart(tmp_path: Any) -> None:
    state = random_state(0)
    state["head"] = state["embed"]
    tied = {name: SHAPES[name] for name in ("k", "q", "embed")}
    apart = {**tied, "head": SHAPES["embed"]}

    def publish(tensors: Any, aliases: Any) -> None:
        with store.begin(writers=["a"], tensors=tensors, aliases=aliases) as joint:
            for entry in joint.layout.tensors:
                joint.write_slice(state[entry.name], slices.whole(entry.name, entry.dtype, entry.shape))

    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        with store.begin() as transaction:
            for name in ("q", "embed", "k", "head"):
                transaction.write(name, state[name])
        publish(tied, {"head": "embed"})
        publish(apart, None)  # what is tied in the head cannot hold it
        publish(tied, {"head": "embed"})  # what is apart there can
        with store.begin() as transaction:
            for name in ("q", "embed", "k", "head"):
                transaction.write(name, state[name])
        log = store.log()
        assert [(info.base, info.changed) for info in log[1::2]] == [("main@0", 0), ("main@2", 0)]
        assert log[2].base is None
        assert [log[number].root for number in (1, 3, 4)] == [log[0].root, log[2].root, log[2].root]
        require_state(store, "main@3", {name: state[name] for name in apart})
        with pytest.raises(InvalidInputError, match="aliases are of tensors"):
            store.begin(writers=["a"], aliases={"x": "q"})


# ---------------------------------------------------------------------- what is refused


@pytest.fixture
def pair(tmp_path: Any) -> Any:
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store, dcr_store.open(store.url) as other:
        yield store, other


def test_what_nobody_wrote_or_two_wrote_is_named(pair: Any) -> None:
    store, other = pair
    state = random_state(0)
    first = store.begin(writers=["a", "b"], tensors=SHAPES)
    second = other.join(writer="b")
    for name in SHAPES:
        if name != "q":
            first.write_slice(state[name], whole(name))
    second.write_slice(state["q"][:20], slices.part("q", "BF16", (32, 24), (0, 0), (20, 24)))
    second.seal()
    with pytest.raises(IntegrityError, match=r"288 elements were written by nobody, first q\[480:768\]"):
        first.commit(timeout_s=5)
    first.abort()
    with pytest.raises(FencedError, match="aborted"):
        second.commit(timeout_s=5)

    first = store.begin(writers=["a", "b"], tensors=SHAPES)
    second = other.join(writer="b")
    for name in SHAPES:
        first.write_slice(state[name], whole(name))
    second.write_slice(state["k"], whole("k"))
    second.seal()
    with pytest.raises(IntegrityError, match=r"written more than once, first k\[0:384\], by a and b"):
        first.commit(timeout_s=5)
    first.abort()
    assert store._catalog.log("main").refresh().head is None


def test_a_writer_cannot_write_an_element_twice(pair: Any) -> None:
    store, _ = pair
    state = random_state(0)
    transaction = store.begin(writers=["a"], tensors=SHAPES)
    transaction.write_slice(state["q"], whole("q"))
    with pytest.raises(InvalidInputError, match=r"wrote q\[0:768\] before"):
        transaction.write_slice(state["q"], whole("q"))
    with pytest.raises(InvalidInputError, match=r"wrote q\[8:9\] before"):
        transaction.write_residual("q", state["q"].reshape(-1)[8:9], 8)
    transaction.abort()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, s: t.write_slice(s["q"], slices.whole("nothing", "BF16", (32, 24))), "no tensor"),
        (lambda t, s: t.write_slice(s["q"], slices.whole("k", "BF16", (32, 24))), "another tensor"),
        (lambda t, s: t.write_slice(s["q"][:3], whole("q")), "not what its map"),
        (lambda t, s: t.write_slice(s["q"].astype(np.float32), whole("q")), "not what its map"),
        (lambda t, s: t.write_residual("q", s["q"], 1), "does not fit"),
        (lambda t, s: t.write_residual("q", s["q"], -1), "does not fit"),
        (lambda t, s: t.write_residual("q", s["q"].astype(np.float32)), "does not fit"),
        (lambda t, s: t.write_residual("q", [1]), "no tensor"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(pair: Any, call: Any, message: str) -> None:
    store, _ = pair
    state = random_state(0)
    transaction = store.begin(writers=["a"], tensors=SHAPES)
    with pytest.raises(dcr_store.errors.DcrError, match=message):
        call(transaction, state)
    for name in SHAPES:
        transaction.write_slice(state[name], whole(name))
    transaction.commit()
    require_state(store, "main", state)


def test_missing_writers_are_named_and_waited_for(pair: Any) -> None:
    store, other = pair
    state = random_state(0)
    first = store.begin(writers=["a", "b"], tensors=SHAPES)
    for name in list(SHAPES)[:5]:
        first.write_slice(state[name], whole(name))
    with pytest.raises(LagError, match=r"1 of 2 writers have not sealed main@0 after 0\.1 s: b"):
        first.commit(timeout_s=0.1)
    second = other.join(first.txid, writer="b")
    for name in list(SHAPES)[5:]:
        second.write_slice(state[name], whole(name))
    with pytest.raises(LagError, match="not committed"):
        second.commit(timeout_s=0.1)
    first.commit(timeout_s=5)
    second.commit(timeout_s=5)
    require_state(store, "main", state)
    with pytest.raises(FencedError, match="not open"):
        other.join(first.txid, writer="b")
    with pytest.raises(LagError, match="nobody has begun"):
        other.join(writer="b", timeout_s=0.1)


def test_names_of_writers_are_checked(pair: Any) -> None:
    store, other = pair
    for writers in ([], ["a", "a"], ["a.b"], "a", [1]):
        with pytest.raises(InvalidInputError, match="writers"):
            store.begin(writers=writers, tensors=SHAPES)
    with pytest.raises(InvalidInputError, match="which"):
        store.begin(writers=["a"])
    transaction = store.begin(writers=["a", "b"], tensors=SHAPES)
    with pytest.raises(InvalidInputError, match="other writers"):
        other.join(writer="c")
    transaction.abort()


# ---------------------------------------------------------------------- crashes


def test_a_writer_that_joins_again_stores_nothing_twice_and_must_not_change_its_mind(tmp_path: Any) -> None:
    states = states_of(3)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        maps = [maps_of(rank, 2) for rank in range(2)]
        publish_jointly([store, dcr_store.open(store.url)], states[0], maps)
        first = store.begin(writers=["r0", "r1"])
        lost = dcr_store.open(store.url).join(writer="r1")
        write(lost, maps[1], states[1])
        lost.seal()  # and never heard of again
        before = set(store._objects.list("versions/"))
        changed = dcr_store.open(store.url).join(writer="r1")
        write(changed, maps[1], states[2])
        with pytest.raises(ConflictError, match="other bits than it stored before"):
            changed.seal()
        again = dcr_store.open(store.url).join(writer="r1")
        write(again, maps[1], states[1])
        again.seal()
        added = set(store._objects.list("versions/")) - before
        assert not [key for key in added if "/c/" in key], "partitions are recognised"
        write(first, maps[0], states[1])
        first.commit(timeout_s=5)
        again.commit(timeout_s=5)
        require_state(store, "main", states[1])
        assert store.verify(deep=True).ok


def test_a_committer_that_begins_again_finds_the_others_sealed_again(tmp_path: Any) -> None:
    states = states_of(3)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        maps = [maps_of(rank, 2) for rank in range(2)]
        others = [store, dcr_store.open(store.url)]
        publish_jointly(others, states[0], maps, owner="run")
        lost = store.begin(writers=["r0", "r1"], owner="run")
        write(lost, maps[0], states[1])
        second = others[1].join(writer="r1")
        write(second, maps[1], states[1])
        second.seal()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(second.commit, timeout_s=20)
            dcr_store.publish.opening.LIVE.discard(lost.txid)  # as if its process had ended
            again = dcr_store.open(store.url).begin(writers=["r0", "r1"], owner="run", tensors=SHAPES)
            assert (again.txid, again.attempt) == (lost.txid, 1)
            write(again, maps[0], states[1])
            again.commit(timeout_s=20)
            assert waiting.result().version == "main@1"
        with pytest.raises(FencedError):
            lost.commit(timeout_s=1)
        require_state(store, "main", states[1])
        publish_jointly([dcr_store.open(store.url), others[1]], states[2], maps, owner="run")
        require_state(store, "main", states[2])
        assert store.verify(deep=True).ok


def test_a_baseline_that_drifted_is_healed(tmp_path: Any) -> None:
    states = states_of(3)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        maps = [maps_of(0, 1)]
        publish_jointly([store], states[0], maps)
        publish_jointly([store], states[1], maps)
        for held in store._slice_baselines["main", "r0"].slices.values():
            if held.bits.size:
                held.bits[held.bits.size // 2] ^= held.bits.dtype.type(4)
        publish_jointly([store], states[2], maps)
        require_state(store, "main", states[2])
        assert store.verify(deep=True).ok


def test_values_of_two_elements(tmp_path: Any) -> None:
    shape = (30, 8)
    array = np.frombuffer(np.random.default_rng(0).bytes(16 * 240), "<c16").reshape(shape)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=64) as store:
        for _ in range(2):
            transaction = store.begin(writers=["a"], tensors={"phase": ("C128", shape)})
            for rank in range(2):
                mapped = slices.transposed(slices.row_parallel("phase", "C128", shape, rank, 2))
                transaction.write_slice(np.split(array, 2, 1)[rank].T, mapped)
            transaction.commit()
            assert store.read("main")["phase"].tobytes() == array.tobytes()
            array = array * np.complex128(2)
        assert store.verify(deep=True).ok


def test_who_joins_one_of_these_writers_waits_for_a_live_owner(tmp_path: Any) -> None:
    import os

    from dcr_store.publish.owner import default_owner

    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    parts = default_owner().split(":")
    parts[4] = str(child)
    tensors = {"q": SHAPES["q"]}
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store, dcr_store.open(store.url) as other:
        store.begin(writers=["a", "b"], tensors=tensors, owner=":".join(parts))._close()
        with pytest.raises(LagError, match="nobody has begun"):
            other.join(writer="b", writers=["a", "b"], timeout_s=0.1)
        store.begin(writers=["a", "b"], tensors=tensors)
        with pytest.raises(LagError, match="nobody has begun"):
            other.join(writer="b", writers=["b", "a"], timeout_s=0.1)
        assert other.join(writer="b", writers=["a", "b"], timeout_s=5).version == "main@0"
