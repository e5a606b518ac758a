"""Several writers make one version: the same root and bits as one process that publishes the full state."""

from __future__ import annotations

import gc
import itertools
import os
import re
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from ranks import (
    BF16,
    SHAPES,
    State,
    maps_of,
    next_state,
    publish_alone,
    random_state,
    require_state,
    states_of,
    whole,
    write,
)
from upkeep import through
from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.codec.portable import get_codec
from dcr_store.errors import (
    ConflictError,
    FencedError,
    IntegrityError,
    InvalidInputError,
    LagError,
    NotFoundError,
    OutcomeUnknownError,
    StorageError,
)
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Dim, box
from dcr_store.objects.open import open_objects
from dcr_store.publish.joint import SliceTransaction
from dcr_store.publish.seals import SealWatch
from dcr_store.publish.slice_changes import SliceChanges
from dcr_store.publish.slice_memory import OwnMemory
from dcr_store.store import Store


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
    take = OwnMemory.take

    def dirty(memory: OwnMemory, n_elements: int, dtype: Any) -> Any:
        bits, room = take(memory, n_elements, dtype)
        bits.fill(7)
        return bits, room

    monkeypatch.setattr(OwnMemory, "take", dirty)
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
    with pytest.raises(
        IntegrityError, match="288 elements were written by nobody, first values 480 to 767 of q in C order"
    ):
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
    with pytest.raises(
        IntegrityError, match="written more than once, first values 0 to 383 of k in C order, by a and b"
    ):
        first.commit(timeout_s=5)
    first.abort()
    assert store._catalog.log("main").refresh().head is None


def test_a_writer_cannot_write_an_element_twice(pair: Any) -> None:
    store, _ = pair
    state = random_state(0)
    transaction = store.begin(writers=["a"], tensors=SHAPES)
    transaction.write_slice(state["q"], whole("q"))
    with pytest.raises(InvalidInputError, match="wrote values 0 to 767 of q in C order before"):
        transaction.write_slice(state["q"], whole("q"))
    with pytest.raises(InvalidInputError, match="the fragment does not fit the tensor"):
        transaction.write_residual("q", state["q"].reshape(-1)[1:2], True)
    with pytest.raises(InvalidInputError, match="wrote value 8 of q in C order before"):
        transaction.write_residual("q", state["q"].reshape(-1)[8:9], np.int64(8))
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
    with pytest.raises(FencedError, match="not open: it was committed as main@0; join another one"):
        other.join(first.txid, writer="b")
    with pytest.raises(FencedError, match="not open: none of the last records of main tells of it"):
        other.join("0" * 32, writer="b")
    third = store.begin(writers=["a", "b"])
    third.abort("the learning rate was wrong")
    with pytest.raises(FencedError, match="not open: it was aborted: the learning rate was wrong"):
        other.join(third.txid, writer="b")
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
        other.join(transaction.txid, writer="c")
    with pytest.raises(LagError, match=r"for writer c in 0\.01 s") as caught:
        other.join(writer="c", timeout_s=0.01)
    assert (caught.value.key, caught.value.expected) == ("main", "writer c among the writers")
    assert re.fullmatch(rf"one of writers a, b, begun by process {os.getpid()} on .*", str(caught.value.found))
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
            dcr_store.publish.opening.LIVE.discard((lost.txid, lost.attempt))  # as if its process had ended
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


def test_a_committer_that_was_taken_over_ends_nothing_and_its_process_may_begin_again(pair: Any) -> None:
    store, other = pair
    state = random_state(0)
    lost = store.begin(writers=["a"], owner="run", tensors=SHAPES)
    taken = other.begin(writers=["a"], owner="run", tensors=SHAPES, takeover=True)
    assert (taken.txid, taken.attempt) == (lost.txid, 1)
    lost.abort()
    assert store._catalog.log("main").refresh().open is not None, "it is another's by now"
    lost = other.begin(writers=["a"], owner="run", tensors=SHAPES, takeover=True)
    taken = store.begin(writers=["a"], owner="run", tensors=SHAPES, takeover=True)
    write(lost, [whole(name) for name in SHAPES], state)
    with pytest.raises(FencedError, match="taken over"):
        lost.commit(timeout_s=1)
    with pytest.raises(InvalidInputError, match="is fenced"):
        lost.commit(timeout_s=1)
    with pytest.raises(ConflictError, match="open since"):  # the end of one attempt is not that of the other
        store.begin(writers=["a"], owner="run", tensors=SHAPES)
    del taken  # forgotten by whoever began it
    gc.collect()
    again = store.begin(writers=["a"], owner="run", tensors=SHAPES)
    assert again.attempt == 4
    write(again, [whole(name) for name in SHAPES], state)
    again.commit(timeout_s=1)
    require_state(store, "main", state)


def test_a_transaction_that_was_forgotten_may_be_resumed_by_its_owner(pair: Any) -> None:
    store, _ = pair
    lost = store.begin(writers=["a"], owner="run", tensors=SHAPES)
    with pytest.raises(ConflictError, match="open since"):
        store.begin(writers=["a"], owner="run", tensors=SHAPES)
    del lost
    gc.collect()
    again = store.begin(writers=["a"], owner="run", tensors=SHAPES)
    assert again.attempt == 1
    again.abort()


def test_a_joined_writer_that_ends_does_not_make_the_committer_look_dead(pair: Any) -> None:
    store, other = pair
    first = store.begin(writers=["a", "b"], owner="run", tensors=SHAPES)
    for _ in range(2):
        second = other.join(first.txid, writer="b")
        second._close()
        del second
        gc.collect()
    with pytest.raises(ConflictError, match="open since"):
        other.begin(writers=["a", "b"], owner="run", tensors=SHAPES)
    first.abort()


def test_ownership_is_referred_to_only_where_a_version_keeps_it(tmp_path: Any) -> None:
    states = states_of(3)
    maps = [maps_of(0, 1)]
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:

        def owned(version: str) -> str:
            (seal,) = [seal for _, seal in _contents(store, version).seals]
            return str(seal.ownership.key)

        publish_jointly([store], states[0], maps)
        publish_jointly([store], states[1], maps)
        assert owned("main@1") == owned("main@0")
        store._slice_baselines.clear()
        given_up = store.begin(writers=["r0"])
        write(given_up, maps[0], states[2])
        given_up.seal()
        given_up.abort()  # and what it stored may be deleted
        publish_jointly([store], states[2], maps)
        assert given_up.txid not in owned("main@2")
        with store.begin() as transaction:
            for name, array in states[2].items():
                transaction.write(name, array)
        publish_jointly([store], states[2], maps)
        assert owned("main@4").startswith("versions/main/000000000004-"), "older versions may go before the head"
        assert store.verify(deep=True).ok


def test_a_failed_join_may_be_tried_again(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = pair
    first = store.begin(writers=["a", "b"], tensors=SHAPES)
    with monkeypatch.context() as patched:
        patched.setattr(dcr_store.publish.joint, "read_earlier", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            other.join(writer="b", timeout_s=1)
    assert other.join(writer="b", timeout_s=1).txid == first.txid
    first.abort()


@pytest.mark.parametrize("writers", [None, ["a", "b"]])
@pytest.mark.parametrize("where", ["begin", "start"])
def test_a_begin_that_was_interrupted_may_be_called_again(
    pair: Any, monkeypatch: pytest.MonkeyPatch, writers: list[str] | None, where: str
) -> None:
    store, _ = pair
    options: dict[str, Any] = {} if writers is None else {"writers": writers, "tensors": SHAPES}
    append = dcr_store.log.line.LineLog.append

    def interrupted(*arguments: Any) -> Any:
        if where == "begin":
            monkeypatch.undo()  # the record is there; nobody is told
            append(*arguments)
        raise KeyboardInterrupt

    for _ in range(2):
        if where == "begin":
            monkeypatch.setattr(dcr_store.log.line.LineLog, "append", interrupted)
        else:
            monkeypatch.setattr(dcr_store.publish.joint, "read_earlier", interrupted)
            monkeypatch.setattr(dcr_store.publish.transaction.Transaction, "_anchor_writer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.begin(**options)
        monkeypatch.undo()
        is_open = store._catalog.log("main").refresh().open is not None
        assert is_open == (where == "begin"), "what could not start is ended for all who would join it"
    store.begin(**options).abort()


@pytest.mark.parametrize("is_committer", [True, False])
def test_a_commit_that_is_not_told_to_its_end_is_told_by_the_next(
    pair: Any, monkeypatch: pytest.MonkeyPatch, is_committer: bool
) -> None:
    store, other = pair
    states = states_of(2)
    maps = [maps_of(rank, 2) for rank in range(2)]
    for state in states:
        first = store.begin(writers=["r0", "r1"], tensors=SHAPES)
        second = other.join(writer="r1", timeout_s=5)
        write(first, maps[0], state)
        write(second, maps[1], state)
        second.seal()
        fails, goes = (first, second) if is_committer else (second, first)
        if not is_committer:
            first.commit()
        with monkeypatch.context() as patched:
            patched.setattr(fails._log, "complete", lambda row: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                fails.commit(timeout_s=5)
        assert fails.commit(timeout_s=5) == goes.commit(timeout_s=5)
        require_state(store, "main", state)
    assert store._slice_baselines["main", "r0"].at == other._slice_baselines["main", "r1"].at


@pytest.mark.parametrize("point", ["slices.noted", "slices.piece.advanced", "publish.baseline.advanced"])
@pytest.mark.parametrize("is_committer", [True, False])
def test_a_commit_that_was_interrupted_while_the_baseline_advances_may_be_called_again(
    tmp_path: Any, point: str, is_committer: bool
) -> None:
    states = states_of(3)
    maps = [maps_of(rank, 2) for rank in range(2)]
    armed: list[bool] = []

    def interrupt(event: events.Event) -> None:
        if event.name == point and armed:
            armed.clear()
            raise KeyboardInterrupt

    with dcr_store.create(tmp_path / "s", chunk_elements=256) as store, events.listening(interrupt):
        for number, state in enumerate(states):
            first = store.begin(writers=["r0", "r1"], tensors=SHAPES, baseline=tmp_path / "b")
            second = store.join(first.txid, writer="r1", baseline=tmp_path / "b")
            write(first, maps[0], state)
            write(second, maps[1], state)
            second.seal()
            if not is_committer:
                first.commit(timeout_s=5)
            fails = first if is_committer else second
            if number == 1:
                armed.append(True)
                with pytest.raises(KeyboardInterrupt):
                    fails.commit(timeout_s=5)
                assert not armed
            assert [found.commit(timeout_s=5).version for found in (first, second)] == [f"main@{number}"] * 2
            require_state(store, "main", state)


def test_a_seal_whose_answer_was_lost_is_not_overwritten(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has read it reads it no more: the seal for a later attempt is another entry."""
    store, other = pair
    state = random_state(0)
    begin = {"writers": ["a", "b"], "owner": "run", "tensors": SHAPES, "takeover": True}
    store.begin(**begin)
    second = other.join(writer="b")
    write(second, [whole(name) for name in SHAPES], state)
    second.seal()
    store.begin(**begin)
    put = type(other._objects).put

    def lost(objects: Any, key: str, data: bytes) -> None:
        put(objects, key, data)
        raise StorageError("no answer", key=key)

    with monkeypatch.context() as patched:
        patched.setattr(type(other._objects), "put", lost)
        with pytest.raises(StorageError):
            second.commit(timeout_s=0)
    first = store.begin(**begin)
    watch = SealWatch(store._objects, first._keys, ["b"])
    watch.look()
    assert [watch.missing(attempt) for attempt in range(3)] == [[], [], ["b"]]
    with pytest.raises(LagError):
        second.commit(timeout_s=0)
    watch.look()
    assert watch.missing(2) == []
    first.seal()
    first.commit(timeout_s=5)
    second.commit(timeout_s=5)
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("more", [slice(0, 256), slice(256, 512)])
def test_what_was_not_announced_is_refused(pair: Any, more: slice) -> None:
    """Be it in a chunk that was announced, or in another one of its partition, which would be stored twice."""
    store, _ = pair
    bits = np.arange(1024, dtype=np.float32)
    half = more.start + 100
    announced = [slices.flat_part("w", "F32", (1024,), start, start + 100) for start in (0, 512, 768)]
    transaction = store.begin(writers=["a"], tensors={"w": ("F32", (1024,))}, slices=announced)
    for mapped in announced:
        start = mapped.boxes["w"][0].there
        transaction.write_slice(bits[start : start + 100], mapped)
    with pytest.raises(InvalidInputError, match=r"more to chunk \d of u32 than it announced"):  # noqa: PT012
        transaction.write_residual("w", bits[half : half + 20], half)
        transaction.seal()  # at the latest
    with pytest.raises(InvalidInputError, match="cannot go on"):
        transaction.commit()
    transaction.abort()


def test_fragments_of_packed_values_are_counted_in_values(pair: Any) -> None:
    torch = pytest.importorskip("torch")
    store, _ = pair
    octets = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
    tensor = octets.view(torch.float4_e2m1fn_x2)
    for _ in range(2):
        transaction = store.begin(writers=["a"], tensors={"w": ("F4", (8, 16))})
        with pytest.raises(InvalidInputError, match="does not fit"):
            transaction.write_residual("w", tensor[4:], 63)
        transaction.write_residual("w", tensor[4:], 64)
        transaction.write_residual("w", tensor[:4])
        transaction.commit()
        assert store.read("main")["w"].tobytes() == octets.numpy().tobytes()
        octets ^= 7


def test_a_seal_in_the_wrong_place_does_not_count(pair: Any) -> None:
    store, other = pair
    state = random_state(0)
    first = store.begin(writers=["a", "b"], tensors=SHAPES)
    write(first, [whole(name) for name in SHAPES], state)
    first.seal()
    second = other.join(writer="b")
    second.seal()
    journal = f"{first._keys.prefix}journal/"
    (key,) = [key for key in store._objects.list(journal) if "/b." in key]
    data = store._objects.get(key)
    store._objects.delete(key)
    store._objects.put(key.replace("/b.", "/a."), data)
    store._objects.put(key.replace("0.json", "1.json"), data)
    with pytest.raises(LagError, match=r"1 of 2 .*: b;"):
        first.commit(timeout_s=0)
    store._objects.put(key, data)
    first.commit(timeout_s=5)
    require_state(store, "main", state)


# ---------------------------------------------------------------------- two processes of one name


def test_who_joins_again_must_not_change_its_mind_in_any_place(tmp_path: Any) -> None:
    """Neither where only one of the two changed something, sealed or not."""
    rate = 0.0005  # few chunks
    base = random_state(0)
    one, two = next_state(base, 1, rate), next_state(base, 2, rate)
    maps = maps_of(0, 1)
    for first, second in [(one, base), (base, one), (one, two)]:
        with dcr_store.create(str(tmp_path / f"s{id(first)}{id(second)}"), chunk_elements=256) as store:
            publish_jointly([store], base, [maps])
            begun = store.begin(writers=["r0", "r1"])
            lost = dcr_store.open(store.url).join(writer="r1")
            write(lost, maps, first)
            lost.seal()
            changed = dcr_store.open(store.url).join(writer="r1")
            write(changed, maps, second)
            with pytest.raises(ConflictError, match="other bits than it stored before"):
                changed.seal()
            begun.seal()
            begun.commit(timeout_s=5)
            lost.commit(timeout_s=5)
            require_state(store, "main", first)


def test_who_joins_again_repeats_neither_of_two_that_disagree(tmp_path: Any) -> None:
    """Two that knew nothing of each other have journaled different bits: no third can be bound by both."""
    states = states_of(3)
    maps = [maps_of(rank, 2) for rank in range(2)]
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        publish_jointly([store, dcr_store.open(store.url)], states[0], maps)
        begun = store.begin(writers=["r0", "r1"])
        twins = [dcr_store.open(store.url).join(writer="r1") for _ in range(2)]
        for twin, state in zip(twins, states[1:], strict=True):
            write(twin, maps[1], state)
            twin.seal()
        for state in states[1:]:
            third = dcr_store.open(store.url).join(writer="r1")
            write(third, maps[1], state)
            with pytest.raises(ConflictError, match="other bits than it stored before") as raised:
                third.seal()
            assert " and " in str(raised.value.expected)
        begun.abort()


def test_a_lost_partition_is_stored_again(tmp_path: Any) -> None:
    states = states_of(2)
    maps = maps_of(0, 1)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        publish_jointly([store], states[0], [maps])
        begun = store.begin(writers=["r0", "r1"])
        lost = dcr_store.open(store.url).join(writer="r1")
        write(lost, maps, states[1])
        lost.seal()
        key = next(key for key in store._objects.list(f"versions/main/000000000001-{begun.txid}/") if "/c/" in key)
        store._objects.delete(key)
        again = dcr_store.open(store.url).join(writer="r1")
        write(again, maps, states[1])
        again.seal()
        array = key.partition("/data/r1.")[2].partition("/")[2]
        stored = store._objects.list(f"versions/main/000000000001-{begun.txid}/")
        assert [other.endswith(array) for other in stored].count(True) == 1
        begun.abort()


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


def test_zeros_of_the_base_are_read_as_zeros(tmp_path: Any) -> None:
    """They are stored nowhere: whatever the memory holds that they are read to, or what drifted."""
    zeros = {name: np.zeros_like(array) for name, array in random_state(0).items()}
    states = [zeros, random_state(1), zeros, zeros, random_state(2)]
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        maps = [maps_of(0, 1)]
        for number, state in enumerate(states):
            take = OwnMemory.take

            def dirty(memory: OwnMemory, n_elements: int, dtype: Any, take: Any = take) -> Any:
                bits, room = take(memory, n_elements, dtype)
                bits.view(np.uint8)[...] = 0xA5
                return bits, room

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(OwnMemory, "take", dirty)
                if number % 2:
                    store._slice_baselines.clear()
                else:
                    for held in (b for kept in store._slice_baselines.values() for b in kept.slices.values()):
                        held.bits.view(np.uint8)[...] = 0x5A
                publish_jointly([store], state, maps)
            require_state(store, "main", state)
        assert store.verify(deep=True).ok


@pytest.mark.parametrize("what", ["owned", "digests"])
def test_digests_that_drifted_are_taken_anew(tmp_path: Any, what: str) -> None:
    """At once where they are compared; otherwise the committer refuses, and the next transaction has them right."""
    states = states_of(2)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        maps = [maps_of(0, 1)]
        publish_jointly([store], states[0], maps)
        for held in store._slice_baselines["main", "r0"].slices.values():
            if held.bits.size:
                getattr(held, what)[-1] ^= np.uint64(4)
        if what == "owned":
            transaction = store.begin(writers=["r0"])
            write(transaction, maps[0], states[1])
            with pytest.raises(IntegrityError, match="baseline is not the base"):
                transaction.commit(timeout_s=1)
            transaction.abort()
        publish_jointly([store], states[1], maps)
        publish_jointly([store], states[0], maps)
        require_state(store, "main", states[0])
        assert store.verify(deep=True).ok


def test_an_outcome_that_is_found_out_late_does_not_touch_the_next_transaction(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = pair
    states = states_of(3)
    maps = maps_of(0, 1)
    publish_jointly([store], states[0], [maps])
    lost = store.begin(writers=["r0"])
    append = lost._log.append

    def unknown(decide: Any) -> Any:
        append(decide)
        raise OutcomeUnknownError("no answer", key="k")

    with pytest.raises(OutcomeUnknownError), lost:  # noqa: PT012
        write(lost, maps, states[1])
        monkeypatch.setattr(lost._log, "append", unknown)
    monkeypatch.undo()
    publish_jointly([store], states[2], [maps])
    following = store.begin(writers=["r0"])
    write(following, maps[:3], states[0])
    assert lost.commit().version == "main@1"
    assert lost.commit().version == "main@1"
    for name in ("down", "phase", "norm", "scale", "steps"):  # slices that it has to read
        following.write_residual(name, states[0][name])
    following.commit(timeout_s=1)
    require_state(store, "main@1", states[1])
    require_state(store, "main", states[0])


def test_tensors_are_those_of_the_head_when_it_begins(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = pair
    publish_jointly([store], random_state(0), [maps_of(0, 1)])
    begin = dcr_store.publish.opening.begin

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        with other.begin() as transaction:
            transaction.write("w", np.zeros(3, np.float32))
        return begin(*arguments)

    monkeypatch.setattr(dcr_store.publish.opening, "begin", late)
    with pytest.raises(ConflictError, match="other tensors"):
        store.begin(writers=["a"])
    with store.begin(writers=["a"]) as transaction:
        transaction.write_slice(np.ones(3, np.float32), slices.whole("w", "F32", (3,)))
    assert store.read("main")["w"].tolist() == [1, 1, 1]


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
        for writers in (["a", "b"], None):
            with pytest.raises(LagError, match="nobody has begun") as caught:
                other.join(writer="b", writers=writers, timeout_s=0.1)
            assert re.fullmatch(
                rf"one of writers a, b, begun by process {child} on .*, which is gone", caught.value.found
            )
        with store.begin() as alone:  # which takes the place of that of the dead
            with pytest.raises(LagError, match="nobody has begun") as caught:
                other.join(writer="w0", timeout_s=0.1)
            assert str(caught.value.found).startswith("one of a sole writer, begun by ")
            alone.abort()
        store.begin(writers=["a", "b"], tensors=tensors)
        with pytest.raises(LagError, match="nobody has begun"):
            other.join(writer="b", writers=["b", "a"], timeout_s=0.1)
        joined = other.join(writer="b", timeout_s=5)
        assert joined.version == "main@0"
        joined._close()
        with pytest.raises(LagError, match="nobody has begun") as caught:
            other.join(writer="b", timeout_s=0.1)
        assert "writers a, b, which this process has been in, begun by" in str(caught.value.found)


# ---------------------------------------------------------------------- what waits, and what is remembered


@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_what_the_baseline_will_change_by_is_never_longer_than_the_slice(tmp_path: Any, rate: float) -> None:
    shape = (64, 64)
    bits = np.random.default_rng(0).integers(0, 1 << 16, shape).astype(np.uint16)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=1024) as store:
        for turn in range(3):
            transaction = store.begin(writers=["a"], tensors={"w": ("U16", shape)})
            transaction.write_slice(bits, slices.whole("w", "U16", shape))
            transaction.seal()
            writer = transaction._writer
            pieces = [(key, index) for key, index, *_ in writer.changes.marks()]
            noted = sum(len(writer._spool.get(f"change {key}", index) or b"") for key, index in pieces)
            assert noted <= bits.nbytes
            assert (noted > 0) == (turn > 0)
            transaction.commit()
            assert list(writer.changes.marks()) == []
            assert writer._spool.places() == []
            assert store.read("main")["w"].tobytes() == bits.tobytes()
            where = np.random.default_rng(turn).random(shape) < rate
            bits = np.where(where, bits ^ np.uint16(1 + turn), bits)
        assert store.verify(deep=True).ok


def test_fragments_that_move_are_not_remembered_for_ever(pair: Any) -> None:
    store, _ = pair
    values = np.arange(100, dtype=np.float32)
    for cut in (10, 20, 30, 40):
        transaction = store.begin(writers=["a"], tensors={"w": ("F32", (100,))})
        transaction.write_residual("w", values[:cut])
        transaction.write_residual("w", values[cut:], cut)
        transaction.commit()
    held = store._slice_baselines["main", "a"]
    assert len(held.slices) == 2
    assert set(held._pieces) <= set(held.slices)


def test_digests_of_what_it_owns_that_drifted_are_taken_anew(tmp_path: Any) -> None:
    """The committer refuses them, and the next transaction has them right."""
    states = states_of(3)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        maps = [maps_of(0, 1)]
        publish_jointly([store], states[0], maps)
        owned = store._slice_baselines["main", "r0"].owned
        assert owned is not None
        owned.ones["u16"][3, 1] ^= np.uint64(4)
        transaction = store.begin(writers=["r0"])
        write(transaction, maps[0], states[1])
        with pytest.raises(IntegrityError, match="digests of what they own do not make up chunk 3 of u16"):
            transaction.commit(timeout_s=1)
        transaction.abort()
        publish_jointly([store], states[1], maps)
        publish_jointly([store], states[2], maps)
        require_state(store, "main", states[2])


@pytest.mark.parametrize("n_before", [0, 3])
@pytest.mark.parametrize("method", ["marks", "changed"])
def test_an_advance_that_was_interrupted_is_not_gone_through_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, method: str, n_before: int
) -> None:
    """Masks that are applied twice are none: the commit that is called again leaves the baseline to be read."""
    states = states_of(4)
    maps = [maps_of(0, 1)]
    real = getattr(SliceChanges, method)

    def interrupted(changes: SliceChanges) -> Any:
        yield from itertools.islice(real(changes), n_before)
        raise KeyboardInterrupt

    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        publish_jointly([store], states[0], maps)
        transaction = store.begin(writers=["r0"])
        write(transaction, maps[0], states[1])
        with monkeypatch.context() as patched:
            patched.setattr(SliceChanges, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                transaction.commit()
        assert transaction.commit().version == "main@1"
        for state in states[2:]:
            publish_jointly([store], state, maps)
        assert len(store.log()) == 4
        require_state(store, "main", states[3])
        assert store.verify(deep=True).ok


def test_ownership_that_no_version_names_is_not_named_again(tmp_path: Any) -> None:
    state = random_state(0)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        first = store.begin(writers=["a", "b"], tensors=SHAPES)
        twins = [dcr_store.open(store.url).join(writer="b") for _ in range(2)]
        names = list(SHAPES)
        for name in names[:5]:
            first.write_slice(state[name], slices.whole(name, *SHAPES[name]))
        for twin in twins:
            for name in names[5:]:
                twin.write_slice(state[name], slices.whole(name, *SHAPES[name]))
            twin.seal()
        first.commit(timeout_s=5)
        for twin in twins:
            twin.commit(timeout_s=5)
        manifest = store._catalog.manifest(store._catalog.resolve("main@0"))
        counted = next(seal.incarnation for seal in manifest.seals if seal.writer == "b")
        for twin in twins:
            known = twin._baseline.ownership
            assert (known is not None) == (twin._writer.partitions.incarnation == counted)


def test_who_owns_what_is_proven_again_only_where_it_changes(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = pair
    committing = dcr_store.publish.joint_commit
    proven: list[int] = []
    real = committing.check_ownership
    monkeypatch.setattr(committing, "check_ownership", lambda *given: (proven.append(1), real(*given)))
    state = random_state(0)
    read: list[str] = []
    ownership = SealWatch.ownership
    monkeypatch.setattr(SealWatch, "ownership", lambda *given: (read.append(given[0].keys.txid), ownership(*given))[1])
    for n_ranks in (1, 1, 1):
        publish_jointly([store], state, [maps_of(0, n_ranks)])
    assert len(proven) == len(read) == 1
    transaction = store.begin(writers=["r0"])
    transaction.write_slice(state["q"], slices.whole("q", *SHAPES["q"]))
    with pytest.raises(IntegrityError, match="written by nobody"):
        transaction.commit()
    transaction.abort()


def test_options_that_would_do_nothing_are_refused(pair: Any) -> None:
    store, _ = pair
    for option in ({"writer": "a"}, {"tensors": SHAPES}, {"slices": []}, {"aliases": {}}):
        with pytest.raises(InvalidInputError, match="several writers alone"):
            store.begin(**option)


def test_a_wrong_name_takes_up_nothing(pair: Any) -> None:
    """It would resume the open transaction, and then end it."""
    store, other = pair
    lost = store.begin(writers=["a", "b"], tensors=SHAPES, owner="run")
    dcr_store.publish.opening.LIVE.discard((lost.txid, lost.attempt))
    for name in ("c", ""):
        with pytest.raises(InvalidInputError, match="none of the writers"):
            other.begin(writers=["a", "b"], tensors=SHAPES, owner="run", writer=name)
    assert store._catalog.log("main").refresh().open.txid == lost.txid
    assert store._catalog.log("main").state.open.attempt == 0
    lost.abort()


def test_a_damaged_entry_of_the_journal_is_named(pair: Any) -> None:
    store, _ = pair
    transaction = store.begin(writers=["a", "b"], tensors=SHAPES)
    key = transaction._keys.journal("b", "0" * 16, 0)
    store._objects.put(key, b'{"format":"dcr-jour')
    transaction.write_slice(random_state(0)["q"], slices.whole("q", *SHAPES["q"]))
    with pytest.raises(dcr_store.errors.FormatError, match=key):
        transaction.commit(timeout_s=20)
    transaction.abort()


def test_journals_are_read_side_by_side_and_each_entry_once(pair: Any) -> None:
    store, other = pair
    state = random_state(0)
    names = ["a", "b", "c", "d"]
    first = store.begin(writers=names, tensors=SHAPES)
    write(first, [whole(name) for name in SHAPES], state)
    for name in names[1:]:
        other.join(first.txid, writer=name).seal()
    first.seal()
    together = threading.Barrier(len(names))
    far = type("Far", (Watched,), {"is_local": False})(store._objects)

    def before(method: str, key: str) -> None:
        if method == "get":
            together.wait(10)  # broken unless all are asked for at the same time

    far.before = before
    watch = SealWatch(far, first._keys, names)
    watch.look()
    assert watch.missing(0) == []
    watch.look()
    assert (far.count("list"), far.count("get")) == (2, len(names))
    near = SealWatch(store._objects, first._keys, names)
    near.look()
    assert [sealed.seal for sealed, _ in near.sealed(0)] == [sealed.seal for sealed, _ in _far_sealed(far, watch)]
    first.commit(timeout_s=5)


def test_what_stands_with_earlier_versions_is_asked_for_side_by_side() -> None:
    from dcr_store.format.documents import ObjectRef
    from dcr_store.format.names import TransactionKeys
    from dcr_store.publish.committing import _check_stored

    objects = Watched(open_objects(f"memory://{secrets.token_hex(8)}"))
    far = type("Far", (Watched,), {"is_local": False})(objects)
    together = threading.Barrier(4)

    def before(method: str, key: str) -> None:
        if method == "size":
            together.wait(10)  # broken unless all are asked for at the same time

    far.before = before
    keys = TransactionKeys("main", 1, "1" * 32)
    refs = [ObjectRef.of(f"versions/main/earlier/{n}", b"x" * n) for n in range(1, 5)]
    refs += [ObjectRef.of(f"{keys.prefix}own/{n}", b"y" * n) for n in range(1, 3)]
    for ref in refs:
        objects.put(ref.key, bytes(ref.nbytes))
    _check_stored(far, keys, refs)
    assert (far.count("size"), far.count("list")) == (4, 1)
    for ref in (refs[2], refs[5]):
        data = objects.get(ref.key)
        for wrong in (None, data + b"z"):
            objects.delete(ref.key) if wrong is None else objects.put(ref.key, wrong)
            far.before = None
            with pytest.raises(IntegrityError, match="a sealed object is not in the store") as caught:
                _check_stored(far, keys, refs)
            assert caught.value.key == ref.key
        objects.put(ref.key, data)


def _far_sealed(far: Watched, watch: SealWatch) -> Any:
    far.before = None
    return watch.sealed(0)


@pytest.mark.parametrize("codec", ["dcr.delta", "portable"])
def test_many_small_slices_are_encoded_and_read_by_the_chunk(
    tmp_path: Any, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither encoded one by one, nor read from the store one by one."""
    n = 200
    tensors = {f"layers.{number}.norm": ("BF16", (16,)) for number in range(n)}
    maps = [slices.whole(name, *row) for name, row in tensors.items()]
    bits = np.random.default_rng(0).integers(1, 1 << 16, (n, 16)).astype(np.uint16)
    bits[7] = 0
    n_encoded, reads = 0, []

    def counted(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal n_encoded
            n_encoded += 1
            return real(*arguments)

        return call

    for name in ("encode", "encode_sparse"):
        monkeypatch.setattr(get_codec(codec), name, counted(getattr(get_codec(codec), name)), raising=False)
    with dcr_store.create(str(tmp_path / "s"), chunk_elements=8192, codec=codec) as store:
        for turn in range(4):
            with events.listening(lambda event: reads.append(event.detail) if event.name == "slices.read" else None):
                transaction = store.begin(writers=["a"], tensors=tensors, slices=maps)
                for mapped, row in zip(maps, bits, strict=True):
                    transaction.write_slice(row.view(BF16), mapped)
                transaction.commit()
            found = store.read("main")
            assert b"".join(found[name].tobytes() for name in tensors) == bits.tobytes()
            bits[turn::5, turn] ^= 3
            if turn == 1:
                store._slice_baselines.clear()
        assert store.verify(deep=True).ok
    assert n_encoded == 4
    assert reads == [f"main@1 {n}"]


# ---------------------------------------------------------------------- what is no tensor, map or dtype


@pytest.mark.parametrize(
    ("tensors", "key", "message"),
    [
        (["w"], "tensors", "is no mapping by name .expected a mapping, found list"),
        ({"w": np.zeros(3)}, "w", "by its dtype and shape, not by its values .*BF16.* found ndarray"),
        ({"w": ("F32", 3)}, "w", "by its dtype and shape"),
        ({"w": "F32"}, "w", "by its dtype and shape.*found F32"),
        ({"w": ("bf16", (3,))}, "w", "by a name that safetensors has .expected one of BOOL, .*BF16.*found bf16"),
        ({"w": (np.dtype("f4"), (3,))}, "w", "by a name that safetensors has .*found dtype"),
    ],
)
def test_tensors_are_told_by_dtype_and_shape(pair: Any, tensors: Any, key: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        pair[0].begin(writers=["a"], tensors=tensors)
    assert caught.value.key == key
    with pytest.raises(InvalidInputError, match="aliases: is no mapping"):
        pair[0].begin(writers=["a"], tensors=SHAPES, aliases=["q"])


def test_what_is_no_map_is_refused(pair: Any) -> None:
    tensor = np.zeros((4, 6), np.float32)
    mapped = slices.whole("w", "F32", (4, 6))
    begin = {"writers": ["a"], "tensors": {"w": ("F32", (4, 6))}}
    with pytest.raises(InvalidInputError, match=r"slices: is no affine map .*in a list, found str"):
        pair[0].begin(**begin, slices={"w": mapped})
    with pair[0].begin(**begin) as transaction:
        with pytest.raises(InvalidInputError, match=r"mapped: is no affine map .*after the tensor, found ndarray"):
            transaction.write_slice(mapped, tensor)
        with pytest.raises(InvalidInputError, match=r"mapped: is no affine map .*found NoneType"):
            transaction.write_slice(tensor, None)
        with pytest.raises(NotFoundError, match="no tensor 'other'; the layout has 1 tensors, such as w"):
            transaction.write_slice(tensor, slices.whole("other", "F32", (4, 6)))
        transaction.write_slice(tensor, mapped)


def test_a_baseline_is_a_directory(pair: Any, tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    for options in ({}, {"writers": ["a"], "tensors": SHAPES}):
        with pytest.raises(InvalidInputError, match=r"file: is a file; give a directory$"):
            pair[0].begin(**options, baseline=tmp_path / "file")


@pytest.mark.parametrize("is_residual", [True, False])
def test_announced_fragments_are_read_once_and_together(tmp_path: Any, is_residual: bool) -> None:
    """A writer that was started again has no baseline: it reads what it announced, and that is what it then writes."""
    states = states_of(2)
    parts = [("embed", 0, 400), ("embed", 400, 1200), ("norm", 0, 24), ("scale", 0, 1), ("phase", 5, 24)]
    rest = [whole(name) for name in SHAPES if name not in ("embed", "norm", "scale", "phase")]
    rest.append(slices.flat_part("phase", *SHAPES["phase"], 0, 5))
    told = [*rest, *(slices.flat_part(name, *SHAPES[name], *ends) for name, *ends in parts)]
    dcr_store.create(str(tmp_path / "store"), chunk_elements=256).close()
    seen: list[str] = []
    for state in states:
        with (
            dcr_store.open(str(tmp_path / "store")) as store,
            events.listening(lambda event: seen.append(event.detail) if event.name == "slices.read" else None),
        ):
            with store.begin(writers=["a"], tensors=SHAPES, slices=told) as transaction:
                for mapped in rest:
                    flat = state[next(iter(mapped.tensors))].reshape(-1)
                    transaction.write_slice(flat[: int(np.prod(mapped.shape))].reshape(mapped.shape), mapped)
                for mapped, (name, start, stop) in zip(told[len(rest) :], parts, strict=True):
                    fragment = state[name].reshape(-1)[start:stop]
                    if is_residual:
                        transaction.write_residual(name, fragment, start)
                    else:
                        transaction.write_slice(fragment, mapped)
            require_state(store, "main", state)
    assert len(seen) == 1


def test_a_slice_with_something_before_its_values_is_no_fragment(pair: Any) -> None:
    """Announced as such, and written as a fragment: the pieces of the one are in other places than the other's."""
    store = pair[0]
    told = [whole(name) for name in SHAPES if name != "norm"]
    padded = AffineMap.of("F32", [27], {"norm": [24]}, {"norm": [box(3, 0, [Dim(24, 1, 1)])]})
    for state in states_of(2):
        with store.begin(writers=["a"], tensors=SHAPES, slices=[*told, padded]) as transaction:
            write(transaction, told, state)
            transaction.write_residual("norm", state["norm"])
        require_state(store, "main", state)


def test_who_gives_up_does_not_wait_for_the_base(tmp_path: Any) -> None:
    """The committer reads it while it waits for the seals; storage that hangs holds up nobody who goes."""
    let_go = threading.Event()

    def hang(method: str, key: str) -> None:
        if threading.current_thread().name.startswith("dcr-base"):
            let_go.wait(60)

    with dcr_store.create(str(tmp_path / "s"), chunk_elements=256) as store:
        state = random_state(0)
        with store.begin() as transaction:
            for name, array in state.items():
                transaction.write(name, array)
        far = type("Far", (Watched,), {"is_local": False})(store._objects)
        with through(store, far) as slow:
            transaction = slow.begin(writers=["a", "b"])
            transaction.seal()
            far.before = hang
            start = time.monotonic()
            with pytest.raises(LagError, match="have not sealed main@1"):
                transaction.commit(timeout_s=0.1)
            assert not let_go.is_set()
            assert time.monotonic() - start < 30
            let_go.set()
            transaction.abort()
