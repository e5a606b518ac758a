"""What broke for users of other systems, at ranks that publish slices: what one writer does, and what several do.

The docstrings say what happened there. ``test_field_regressions`` has the same for publishers of whole tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from faults.failing import FailingObjects, over
from ranks import SHAPES, State, maps_of, publish_alone, require_state, slice_of, states_of, whole, write
from states import raw

import dcr_store
from dcr_store import events
from dcr_store.codec.digest import crc64, linear
from dcr_store.errors import (
    DcrError,
    FencedError,
    IntegrityError,
    InvalidInputError,
    LagError,
    NotFoundError,
)
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.layout import LayoutBuilder
from dcr_store.layout.pieces import Piece, pieces
from dcr_store.objects.open import open_objects
from dcr_store.publish.joint import SliceTransaction
from dcr_store.publish.ownership import Ownership
from dcr_store.publish.slice_changes import SliceChanges
from dcr_store.store import Store

CHUNK_ELEMENTS = 256
N_RANKS = pytest.mark.parametrize("n_ranks", [1, 2])
Array = np.ndarray[Any, Any]


class Trainer:
    """Ranks that publish together, each with a store of its own, one after the other in this process."""

    def __init__(self, stores: Sequence[Store], tensors: Any = SHAPES, **begin: Any) -> None:
        self.stores, self.tensors, self.options = list(stores), tensors, begin
        self.names = [f"r{rank}" for rank in range(len(stores))]

    def begin(self) -> list[SliceTransaction]:
        first = self.stores[0].begin(writers=self.names, tensors=self.tensors, **self.options)
        rest = zip(self.stores[1:], self.names[1:], strict=True)
        return [first, *(store.join(first.txid, writer=name) for store, name in rest)]

    def maps(self) -> list[list[AffineMap]]:
        return [maps_of(rank, len(self.stores)) for rank in range(len(self.stores))]

    def written(self, state: State) -> list[SliceTransaction]:
        """What each rank has written and sealed, before anybody commits."""
        transactions = self.begin()
        for transaction, maps in zip(transactions, self.maps(), strict=True):
            write(transaction, maps, state)
            transaction.seal()
        return transactions

    def publish(self, state: State) -> str:
        return commit(self.written(state))

    def baselines(self) -> list[Any]:
        return [store._slice_baselines["main", name] for store, name in zip(self.stores, self.names, strict=True)]


def commit(transactions: list[SliceTransaction]) -> str:
    for transaction in transactions[1:]:
        transaction.seal()
    told = [transaction.commit(timeout_s=10) for transaction in transactions]
    assert len({info.root for info in told}) == 1
    return told[0].version


def bits_of(baseline: Any) -> dict[str, bytes]:
    return {key: held.bits.tobytes() for key, held in baseline.slices.items()}


@pytest.fixture
def url(scratch: Path) -> str:
    url = str(scratch / "store")
    dcr_store.create(url, chunk_elements=CHUNK_ELEMENTS).close()
    return url


@contextlib.contextmanager
def opened(url: str, n: int) -> Iterator[list[Store]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(dcr_store.open(url)) for _ in range(n)]


@pytest.fixture
def four(url: str) -> Iterator[list[Store]]:
    with opened(url, 4) as stores:
        yield stores


@N_RANKS
@pytest.mark.parametrize("ending", ["refused", "lost", "aborted"])
def test_04_no_slice_advances_before_the_commit_is_known(url: str, n_ranks: int, ending: str) -> None:
    """The sender's snapshot advanced before the publish was durable; the next delta had no base anywhere."""
    states = states_of(3)
    with opened(url, n_ranks) as stores:
        objects = FailingObjects(open_objects(url), late=ending == "lost")
        stores[0] = over(objects)
        trainer = Trainer(stores)
        trainer.publish(states[0])
        before = [(bits_of(held), held.at) for held in trainer.baselines()]
        transactions = trainer.written(states[1])

        def fail(event: events.Event) -> None:
            if event.name == ("log.commit.before" if ending == "lost" else "publish.proposal.before"):
                objects.at, objects.lasting = objects.n_calls, True

        if ending != "aborted":
            with events.listening(fail), pytest.raises(DcrError):
                transactions[0].commit(timeout_s=1)
            objects.at = None
        if ending == "lost":
            stores[0]._slice_baselines["main", "r0"] = transactions[0]._baseline
            transactions[0]._close()
        else:
            for transaction in transactions[1:]:
                with pytest.raises(LagError, match="not committed after"):
                    transaction.commit(timeout_s=0)
            transactions[0].abort()
            for transaction in transactions[1:]:
                with pytest.raises(FencedError, match="nothing was committed: aborted by a writer"):
                    transaction.commit(timeout_s=1)
        for held, (bits, at) in zip([t._baseline for t in transactions], before, strict=True):
            assert (bits_of(held), held.at) == (bits, at), "the commit is not known to it"
        if ending == "lost":  # it is there, as all but the committer find
            for transaction in transactions[1:]:
                assert transaction.commit(timeout_s=1).version == "main@1"
        trainer.publish(states[2])
        with dcr_store.open(url) as store:
            wanted = states if ending == "lost" else [states[0], states[2]]
            assert len(store.log()) == len(wanted)
            for number, state in enumerate(wanted):
                require_state(store, f"main@{number}", state)
            assert store.verify(deep=True).ok


@pytest.mark.parametrize("died", ["writing", "sealed"])
def test_06_a_dead_writer_comes_back_without_a_restart_of_the_others(
    url: str, scratch: Path, four: list[Store], died: str
) -> None:
    """A partial refit needed operators: recover without a restart, never XOR twice."""
    states = states_of(4)
    roots = publish_alone(str(scratch / "alone"), states, chunk_elements=CHUNK_ELEMENTS)
    trainer = Trainer(four)
    trainer.publish(states[0])
    transactions = trainer.begin()
    for rank in (0, 2, 3):
        write(transactions[rank], trainer.maps()[rank], states[1])
    write(transactions[1], trainer.maps()[1][: None if died == "sealed" else 2], states[1])
    if died == "sealed":
        transactions[1].seal()
    transactions[1]._close()  # what a process that is gone holds no more
    trainer.stores[1].close()
    trainer.stores[1] = dcr_store.open(url)
    again = trainer.stores[1].join(writer="r1", timeout_s=1)
    assert again.txid == transactions[0].txid
    write(again, trainer.maps()[1], states[1])
    assert commit([transactions[0], again, *transactions[2:]]) == "main@1"
    # It never comes back: one of the others ends it, and the same processes go on.
    transactions = trainer.begin()
    for rank in (0, 2, 3):
        write(transactions[rank], trainer.maps()[rank], states[2])
    transactions[1]._close()
    for transaction in transactions[2:]:
        transaction.seal()
    with pytest.raises(LagError, match=r"1 of 4 writers have not sealed main@2 after 0 s: r1;"):
        transactions[0].commit(timeout_s=0)
    with pytest.raises(LagError, match="not sealed by r1;"):
        transactions[2].commit(timeout_s=0)
    transactions[2].abort("r1 is gone")
    with pytest.raises(FencedError, match="taken over or aborted; nothing was committed: r1 is gone; look at the log"):
        transactions[0].commit(timeout_s=1)
    with pytest.raises(FencedError, match="was aborted; nothing was committed: r1 is gone"):
        transactions[3].commit(timeout_s=1)
    for state in states[2:]:
        trainer.publish(state)
    with dcr_store.open(url) as store:
        assert [info.root for info in store.log()] == roots
        require_state(store, "main@1", states[1])
        require_state(store, "main@3", states[3])
        assert store.verify(deep=True).ok


@N_RANKS
def test_09_zeros_of_both_signs_and_nans_are_bits(url: str, n_ranks: int) -> None:
    """-0.0 against +0.0 compared equal; a weight that became NaN was skipped."""
    kinds = {
        "BF16": (ml_dtypes.bfloat16, [0x8000, 0x7FC0, 0x7F81, 0xFFC1]),
        "F16": (np.float16, [0x8000, 0x7E00, 0x7C01, 0xFE55]),
        "F32": (np.float32, [0x80000000, 0x7FC00001, 0x7F800001, 0xFFC0BEEF]),
        "F64": (np.float64, [1 << 63, (0x7FF8 << 48) + 1, (0x7FF0 << 48) + 1, (0xFFF8 << 48) + 77]),
        "F8_E5M2": (ml_dtypes.float8_e5m2, [0x80, 0x7D, 0x7E, 0xFD]),
    }
    shape, tail = (6, 60), 12
    tensors = {name: (kind, shape) for kind in kinds for name in (kind, f"{kind} residual")}
    state = {name: np.zeros(shape, kinds[kind][0]) for name, (kind, _) in tensors.items()}
    with opened(url, n_ranks) as stores:
        trainer = Trainer(stores, tensors)

        def publish() -> None:
            transactions = trainer.begin()
            n_each = 6 // n_ranks
            for rank, transaction in enumerate(transactions):
                for name, (kind, _) in tensors.items():
                    rows = state[name][rank * n_each : (rank + 1) * n_each]
                    if name == kind:
                        transaction.write_slice(rows, slices.column_parallel(name, kind, shape, rank, n_ranks))
                    else:
                        transaction.write_residual(name, rows, rank * rows.size)
            commit(transactions)

        publish()
        for turn in range(4):
            for name, (kind, _) in tensors.items():
                dtype, patterns = kinds[kind]
                flat = state[name].reshape(-1)
                flat[tail :: flat.size - tail - 1] = np.array(patterns[turn : turn + 1], f"u{flat.itemsize}").view(
                    dtype
                )
            publish()
            found = stores[0].read("main")
            assert {name: raw(array) for name, array in found.items()} == {n: raw(a) for n, a in state.items()}
        assert [info.changed for info in stores[0].log()[1:]] == [2 * len(tensors)] * 4
        assert stores[0].verify(deep=True).ok


def test_10_positions_beyond_32_bits(scratch: Path) -> None:
    """32-bit positions wrapped for tensors over 4 GiB, or 2^31 elements."""
    # Columns of 2^34 values, of which nothing is in memory.
    n = 1 << 17
    builder = LayoutBuilder()
    builder.add("before", "U8", (64,))
    entry = builder.add("w", "U8", (n, n))
    half = slices.row_parallel("w", "U8", (n, n), 1, 2)
    chunk_elements = 1 << 27
    found = list(pieces(half, builder.build(), chunk_elements))
    assert sum(piece.n_elements for piece in found) == n * n // 2
    local = np.zeros(n * n // 2, np.uint8)  # never touched, but for a page or two
    for number in (0, 40, 128):
        piece = found[number]
        first = piece.boxes[0]
        place = piece.chunk * chunk_elements + first.there - entry.start
        assert half.canonical_of("w", np.array([first.here], np.int64)).tolist() == [place]
        local[first.here] = 100 + number
        part = Piece(piece.space, piece.chunk, (first,))
        bits = np.zeros(part.n_elements, np.uint8)
        part.gather(local, bits)
        assert (bits[0], np.count_nonzero(bits)) == (100 + number, 1)
        local[first.here] = 0
    # Slices and residual fragments far out in one tensor: what is stored says where.
    far, size = (1 << 32) + 70_000, 200
    tensors = {"w": ("U8", (far + 4 * size,))}
    octets = np.arange(1, 2 * size + 1).astype(np.uint8)
    size_of_chunk = 1 << 22
    dcr_store.create(str(scratch / "large"), chunk_elements=size_of_chunk).close()
    with opened(str(scratch / "large"), 2) as stores:
        writers = Trainer(stores, tensors).begin()
        writers[0].write_slice(octets, slices.flat_part("w", *tensors["w"], far, far + 2 * size))
        writers[1].write_residual("w", octets[:size], far + 2 * size)
        with pytest.raises(
            InvalidInputError, match=f"wrote values {far + 2 * size + 7} to {far + 2 * size + 8} of w in C"
        ):
            writers[1].write_residual("w", octets[:2], far + 2 * size + 7)
        for transaction, start in zip(writers, (far, far + 2 * size), strict=True):
            transaction.seal()
            seal = transaction._writer.partitions.sealed
            assert seal is not None
            assert seal.ownership is not None
            owned = Ownership.from_bytes(stores[0]._objects.get(seal.ownership.key), "owned")
            assert [box.there for box in owned.boxes["w"]] == [start]
            (row,) = transaction._rows["u8"].tolist()
            assert row[0] == start // size_of_chunk
            chunk = np.zeros(size_of_chunk, np.uint8)
            n_written = 2 * size if start == far else size
            chunk[start % size_of_chunk :][:n_written] = octets[:n_written]
            assert row[1] == linear(crc64(chunk), chunk.nbytes)
        writers[0].abort()


@pytest.mark.parametrize("way", ["slices", "residual", "tied"])
def test_11_a_tensor_of_two_pipeline_stages_is_refused(four: list[Store], way: str) -> None:
    """A tensor exported by two pipeline stages was XORed twice."""
    state = states_of(1)[0]
    first, second = four[:2]
    names = ["stage0", "stage1"]
    for is_wrong in (True, False):
        one = first.begin(writers=names, tensors=SHAPES, aliases={"head": "embed"})
        two = second.join(writer="stage1", timeout_s=1)
        for name in SHAPES:
            (two if name in ("down", "norm") else one).write_slice(state[name], whole(name))
        if is_wrong:
            if way == "slices":
                two.write_slice(state["embed"][7:20], slices.part("embed", *SHAPES["embed"], (7, 0), (13, 24)))
            elif way == "residual":
                two.write_residual("embed", state["embed"][7:20], 7 * 24)
            else:  # the last stage exports it under the other of its names
                rows = slices.part("head", *SHAPES["embed"], (7, 0), (13, 24))
                two.write_slice(state["embed"][7:20], rows)
            two.seal()
            with pytest.raises(
                IntegrityError, match=r"embed.* 312 .*values 168 to 479 of embed in C order, by stage0 and stage1"
            ):
                one.commit(timeout_s=1)
            one.abort()
            assert first.log() == []
            one = first.begin(writers=names[:1], tensors=SHAPES)
            one.write_slice(state["q"], whole("q"))
            with pytest.raises(InvalidInputError, match="writer stage0 wrote values 0 to 767 of q in C order before"):
                one.write_slice(state["q"], whole("q"))
            one.abort()
        else:
            commit([one, two])
    require_state(first, "main", {**state, "head": state["embed"]})


@N_RANKS
@pytest.mark.parametrize("fails", ["commit", "advance"])
def test_12_what_a_rank_says_it_is_at_does_not_move_when_that_failed(
    url: str, n_ranks: int, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version moved although apply had failed."""
    states = states_of(3)
    with opened(url, n_ranks) as stores:
        trainer = Trainer(stores)
        trainer.publish(states[0])
        transactions = trainer.written(states[1])
        last = transactions[-1]

        def fail(*_: Any) -> Any:
            raise MemoryError

        def fail_after_three(changes: SliceChanges) -> Iterator[Any]:
            yield from itertools.islice(changed(changes), 3)
            raise MemoryError

        changed = SliceChanges.changed
        for transaction in transactions[:-1]:
            if fails == "advance":
                transaction.commit(timeout_s=1)
        with monkeypatch.context() as patched:
            if fails == "commit":
                patched.setattr(last._log, "append" if n_ranks == 1 else "refresh", fail)
            else:
                patched.setattr(SliceChanges, "changed", fail_after_three)
            with pytest.raises(MemoryError):
                last.commit(timeout_s=1)
        assert last._committed is None
        assert last._baseline.at is not None
        assert last._baseline.at.name == "main@0"
        assert len(stores[0].log()) == (1 if fails == "commit" else 2)
        if fails == "commit":
            last.abort()
        else:
            last._close()
        trainer.publish(states[2])
        assert [held.at.name for held in trainer.baselines()] == [stores[0].log()[-1].version] * n_ranks
        require_state(stores[0], "main", states[2])
        assert stores[0].verify(deep=True).ok


@N_RANKS
def test_13_an_anchor_has_every_parameter(url: str, n_ranks: int) -> None:
    """Anchors left out parameters that had not changed."""
    state = states_of(1)[0]
    state |= {name: np.zeros_like(state[name]) for name in ("q", "k", "v", "norm", "steps")}
    with opened(url, n_ranks) as stores:
        Trainer(stores).publish(state)
        # Another tensor, so that it is an anchor; all others are as they were, or zero.
        more = {**SHAPES, "extra": ("BF16", (3, 4))}
        trainer = Trainer(stores, more)
        extra = np.zeros((3, 4), ml_dtypes.bfloat16)

        def publish(left_out: str | None) -> list[SliceTransaction]:
            transactions = trainer.begin()
            for transaction, maps in zip(transactions, trainer.maps(), strict=True):
                for mapped in maps:
                    if left_out not in mapped.tensors:
                        transaction.write_slice(slice_of(mapped, state), mapped)
            if left_out != "extra":
                transactions[0].write_residual("extra", extra)
            for transaction in transactions[1:]:
                transaction.seal()
            return transactions

        for name in ("extra", "norm"):
            transactions = publish(name)
            with pytest.raises(
                IntegrityError, match=f"{name}: .*written by nobody, first values? 0( to [0-9]+)? of {name} in C order"
            ) as caught:
                transactions[0].commit(timeout_s=1)
            assert caught.value.key == name
            transactions[0].abort()
        commit(publish(None))
        assert [info.base for info in stores[0].log()] == [None, None]
        require_state(stores[0], "main", {**state, "extra": extra})


def test_14_slices_of_another_run_are_no_base(url: str, scratch: Path, four: list[Store]) -> None:
    """A base from another training checkpoint corrupted silently."""
    states = states_of(6)
    trainer = Trainer(four[:2])
    trainer.publish(states[0])
    copy = shutil.copytree(url, scratch / "copy")
    trainer.publish(states[1])
    # The store was restored from a copy, and another run has published number 1; rank 1 never noticed.
    shutil.rmtree(url)
    shutil.copytree(copy, url)
    with opened(url, 1) as fresh:
        with fresh[0].begin() as transaction:
            for name, array in states[2].items():
                transaction.write(name, array)
        with contextlib.suppress(DcrError):  # what it knows of the log is no longer there; or it sees that
            Trainer([*fresh, four[1]]).publish(states[3])
        with opened(url, 1) as again:
            log = again[0].log()
            for number, state in enumerate([states[0], states[2], states[3]][: len(log)]):
                require_state(again[0], f"main@{number}", state)
            pending = again[0]._catalog.log("main").refresh().open
            if pending is not None:
                again[0].join(pending.txid, writer="r1").abort()
            Trainer([*fresh, again[0]]).publish(states[4])
            require_state(again[0], "main", states[4])
            assert again[0].verify(deep=True).ok


@N_RANKS
def test_14_a_stale_baseline_is_named_and_then_read_anew(url: str, n_ranks: int) -> None:
    """Bits of an older version, whole and with the digests of their own: the process need not be started again."""
    states = states_of(4)
    with opened(url, n_ranks) as stores:
        trainer = Trainer(stores)
        trainer.publish(states[0])
        held = trainer.baselines()[-1]
        old = {key: (s.bits.copy(), s.digests.copy(), s.owned.copy()) for key, s in held.slices.items()}
        trainer.publish(states[1])
        for key, (bits, digests, owned) in old.items():
            found = held.slices[key]
            found.bits[...], found.digests[...], found.owned[...] = bits, digests, owned
        names = []
        for _ in range(3):
            transactions = trainer.written(states[2])
            try:
                commit(transactions)
                break
            except IntegrityError as error:
                names.append(str(error))
            for transaction in transactions:
                transaction.abort()
        assert 1 <= len(names) <= 2
        tells = r"the baseline is not the base in .*embed.* \(chunk \d+ of u\d+\)"
        writers = "" if n_ranks == 1 else ", of (writer r1|one of writers r0, r1)"
        for told in names:
            assert re.search(tells + writers, told), told
        trainer.publish(states[3])
        require_state(stores[0], "main", states[3])
        require_state(stores[0], "main@2", states[2])
        assert stores[0].verify(deep=True).ok


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_18_slices_that_are_not_contiguous(url: str, framework: str) -> None:
    """Non-contiguous tensors written as if contiguous."""
    base = np.arange(1, 6001, dtype=np.float32).reshape(60, 100)
    views: dict[str, Array] = {
        "transposed": base.T,
        "strided": base[::3, 1::7],
        "column": base[:, 5:6],
        "part": base[7:19, 3:80],
        "expanded": np.broadcast_to(base[0], (8, 100)),
    }
    if framework == "numpy":
        views |= {"reversed": base[::-1, ::-2], "fortran": np.asfortranarray(base), "swapped": base.astype(">f4")}
    else:
        torch = pytest.importorskip("torch")
        whole_tensor = torch.from_numpy(base.copy())
        given = {
            "transposed": whole_tensor.T,
            "strided": whole_tensor[::3, 1::7],
            "column": whole_tensor[:, 5:6],
            "part": whole_tensor[7:19, 3:80],
            "expanded": whole_tensor[:1].expand(8, 100),
        }
    tensors = {name: ("F32", view.shape) for name, view in views.items()}
    with opened(url, 2) as stores:
        trainer = Trainer(stores, tensors)
        for factor in (1, 2):
            transactions = trainer.begin()
            for rank, transaction in enumerate(transactions):
                for name, view in views.items():
                    source = view if framework == "numpy" else given[name]
                    cut = source[: len(view) // 2] if rank == 0 else source[len(view) // 2 :]
                    offset, sizes = (rank * (len(view) // 2), 0), tuple(cut.shape)
                    if name == "part" and rank:
                        transaction.write_residual(name, cut, offset[0] * view.shape[1])
                    else:
                        transaction.write_slice(cut, slices.part(name, "F32", view.shape, offset, sizes))
            commit(transactions)
            found = stores[0].read("main")
            for name, view in views.items():
                assert raw(found[name]) == np.ascontiguousarray(view).astype("<f4").tobytes(), (name, factor)
            base *= 2
            views |= {"expanded": np.broadcast_to(base[0], (8, 100))}
            if framework == "numpy":
                views |= {"fortran": np.asfortranarray(base), "swapped": base.astype(">f4")}
            else:
                whole_tensor *= 2


def test_20_tied_copies_on_two_ranks_and_tensors_that_are_gone(four: list[Store]) -> None:
    """Tied weights: one copy stale; absent tensors skipped in silence."""
    first, second = four[:2]
    embed, stale = np.arange(240, dtype=np.float32).reshape(24, 10), np.ones((24, 10), np.float32)
    tensors = {"embed": ("F32", (24, 10)), "norm": ("F32", (10,))}
    norm = np.ones(10, np.float32)

    def maps(name: str) -> AffineMap:
        return slices.whole(name, "F32", (10,) if name == "norm" else (24, 10))

    def begun(tensors: Any, aliases: Any) -> tuple[SliceTransaction, SliceTransaction]:
        one = first.begin(writers=["r0", "r1"], tensors=tensors, aliases=aliases)
        one.write_slice(norm, maps("norm"))
        return one, second.join(writer="r1", timeout_s=1)

    # Tied in the version: two copies are two writers of one tensor, whatever bits they have.
    for copy in (embed, stale):
        one, two = begun(tensors, {"head": "embed"})
        one.write_slice(embed, maps("embed"))
        two.write_slice(copy, maps("head"))
        two.seal()
        with pytest.raises(
            IntegrityError,
            match="values 0 to 239 of embed in C order, by r0 and r1; abort, and let one writer own each",
        ):
            one.commit(timeout_s=1)
        one.abort()
    # A slice that has values of its own for both names.
    one, two = begun(tensors, {"head": "embed"})
    both = slices.concatenated([maps("embed"), maps("head")])
    with pytest.raises(InvalidInputError, match="head: is tied to embed, but the slice has other values for it"):
        two.write_slice(np.concatenate([embed, stale]), both)
    two.abort()
    # One copy, by one writer, under either name.
    one, two = begun(tensors, {"head": "embed"})
    two.write_slice(stale, maps("head"))
    with pytest.raises(NotFoundError, match="no tensor 'bias'"):
        two.write_slice(norm, slices.whole("bias", "F32", (10,)))
    commit([one, two])
    found = first.read("main")
    assert raw(found["embed"]) == raw(found["head"]) == raw(stale)
    # What is absent is refused, not taken from the base.
    one, two = begun(tensors, {"head": "embed"})
    two.seal()
    with pytest.raises(
        IntegrityError, match="240 elements were written by nobody, first values 0 to 239 of embed in C order"
    ):
        one.commit(timeout_s=1)
    one.abort()
    # Not tied in the version: each is what its rank has.
    one, two = begun({**tensors, "head": ("F32", (24, 10))}, None)
    one.write_slice(embed, maps("embed"))
    two.write_slice(stale, maps("head"))
    commit([one, two])
    found = first.read("main")
    assert (raw(found["embed"]), raw(found["head"])) == (raw(embed), raw(stale))
    assert len(first.log()) == 2


def test_21_experts_of_three_dimensions_and_renamed_ones(scratch: Path, url: str) -> None:
    """3-D expert tensors and renamed experts."""
    rng = np.random.default_rng(3)
    n, rows, columns = 4, 10, 14
    single = {f"experts.{i}.w": ("BF16", (rows, columns)) for i in range(n)}
    renamed = {f"moe.{i}.up": row for i, row in enumerate(single.values())}
    stacked = {"moe.up": ("BF16", (n, rows, columns))}
    experts = rng.integers(1, 1 << 16, (n, rows, columns)).astype(np.uint16)
    transposed = [np.s_[:2], np.s_[2:]]
    by_columns = [np.s_[:, :, :9], np.s_[:, :, 9:]]

    def of_names(tensors: Any, placed: Sequence[Sequence[int]]) -> list[tuple[Any, AffineMap]]:
        """Each rank's experts in one parameter, transposed, in the order that it has them in."""
        names = list(tensors)
        return [
            (lambda e, mine=mine: e[list(mine)].transpose(0, 2, 1),
             slices.stacked_experts({names[i]: (rows, columns) for i in mine}, "BF16", is_transposed=True))
            for mine in placed
        ]  # fmt: skip

    def of_stack(parts: Sequence[Any]) -> list[tuple[Any, AffineMap]]:
        found = []
        for part in parts:
            index = np.arange(n * rows * columns).reshape(n, rows, columns)[part]
            offsets = np.unravel_index(int(index.reshape(-1)[0]), (n, rows, columns))
            mapped = slices.part("moe.up", *stacked["moe.up"], tuple(map(int, offsets)), index.shape)
            found.append((lambda e, part=part: e[part], mapped))
        return found

    steps = [
        (single, of_names(single, [(0, 1), (2, 3)]), None),
        (single, of_names(single, [(3, 0), (1, 2)]), "main@0"),  # experts move between the ranks
        (renamed, of_names(renamed, [(3, 0), (1, 2)]), None),
        (stacked, of_stack(transposed), None),
        (stacked, of_stack(by_columns), "main@3"),
    ]
    alone = dcr_store.create(str(scratch / "alone"), chunk_elements=CHUNK_ELEMENTS)
    with opened(url, 2) as stores, alone:
        for tensors, parts, base in steps:
            values = experts.view(ml_dtypes.bfloat16)
            transactions = Trainer(stores, tensors).begin()
            for transaction, (cut, mapped) in zip(transactions, parts, strict=True):
                transaction.write_slice(cut(values), mapped)
            commit(transactions)
            state = {"moe.up": values} if tensors is stacked else dict(zip(tensors, values, strict=True))
            with alone.begin() as sole:
                for name, array in state.items():
                    sole.write(name, array)
            require_state(stores[0], "main", state)
            info = stores[0].log()[-1]
            assert (info.base, info.root) == (base, alone.log()[-1].root)
            experts = experts.copy()
            experts[:, 3, ::5] ^= 3
        require_state(stores[0], "main@0", {name: stores[0].read("main@0")[name] for name in single})
        assert stores[0].verify(deep=True).ok


def test_22_weight_and_scale_are_of_one_version_at_every_instant(url: str, four: list[Store]) -> None:
    """FP8: weight and scale from different versions."""
    tensors = {"w": ("F8_E4M3", (16, 32)), "w.scale_inv": ("F32", (4, 4))}
    maps = {name: slices.whole(name, *row) for name, row in tensors.items()}
    names = ["weights", "scales"]
    seen: list[int] = []
    with opened(url, 1) as (reader,):

        def look(event: events.Event) -> None:
            if event.name.startswith(("publish.", "log.commit.")) and reader.log():
                found = reader.read("main")
                w, scale = found["w"].view(np.uint8), found["w.scale_inv"]
                assert np.all(w == w[0, 0])
                assert np.all(scale == scale[0, 0])
                assert int(w[0, 0]) == int(scale[0, 0]), event
                seen.append(int(w[0, 0]))

        for number in range(1, 4):
            with events.listening(look):
                one = four[0].begin(writers=names, tensors=tensors)
                two = four[1].join(writer="scales", timeout_s=1)
                two.write_slice(np.full((4, 4), number, np.float32), maps["w.scale_inv"])
                two.seal()
                if number > 1:
                    with pytest.raises(LagError):
                        two.commit(timeout_s=0)
                one.write_slice(np.full((16, 32), number, np.uint8).view(ml_dtypes.float8_e4m3fn), maps["w"])
                commit([one, two])
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 3}
    assert min(seen.count(number) for number in (1, 2)) > 5


@N_RANKS
def test_24_slices_that_the_optimizer_changes_while_they_are_read(
    url: str, n_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live buffer changed while it was being read: what is published is what the baseline has."""
    states = states_of(2)
    gather = Piece.gather

    def step(piece: Piece, local: Array, out: Array) -> None:
        gather(piece, local, out)
        if local.flags.writeable:
            local ^= local.dtype.type(5)  # the optimizer's next step, as soon as a piece was read

    with opened(url, n_ranks) as stores:
        trainer = Trainer(stores)
        for turn in range(3):
            transactions = trainer.begin()
            with monkeypatch.context() as patched:
                patched.setattr(Piece, "gather", step)
                for transaction, maps in zip(transactions, trainer.maps(), strict=True):
                    write(transaction, maps, states[turn % 2])
            commit(transactions)
            found = stores[0].read("main")
            for held, maps in zip(trainer.baselines(), trainer.maps(), strict=True):
                for mapped in maps:
                    kept, local = held.slices[mapped.digest], slice_of(mapped, found).reshape(-1)
                    local = local.view(kept.bits.dtype)
                    for index, piece in enumerate(kept.pieces):
                        out = np.empty(piece.n_elements, kept.bits.dtype)
                        piece.gather(local, out)
                        assert out.tobytes() == kept.packed(index).tobytes(), "the baseline has what was published"
        assert trainer.publish(states[1]) == "main@3"
        require_state(stores[0], "main", states[1])
        report = stores[0].verify(deep=True)
        assert report.ok, report.problems


def _masks(n: int) -> Iterator[tuple[Array, Array]]:
    """Yield positions and masks for each way of encoding a chunk, and for what only a carry or low bits can say."""
    rng = np.random.default_rng(7)
    everything = np.arange(n)
    for positions in (
        np.arange(0, n, 3),
        np.arange(0, n, 300),  # gaps of two bytes, or low bits
        np.array([0, 66_000, n - 1]),  # beyond 16 bits
        np.flatnonzero(rng.random(n) < 0.004),
        everything,
    ):
        yield positions, np.ones(len(positions), np.uint16)
        yield positions, rng.choice(np.array([1, 3, 7, 15], np.uint16), len(positions))
        yield positions, rng.integers(1, 1 << 16, len(positions)).astype(np.uint16)
    few = np.arange(0, n, 30)
    yield few, rng.choice(np.array([1, 3, 7], np.uint16), len(few))  # gaps without low bits
    third = np.arange(0, n, 3)  # values that look like weights
    yield third, rng.normal(0, 0.02, len(third)).astype(ml_dtypes.bfloat16).view(np.uint16)


def test_25_every_branch_of_the_codec_is_reached_by_slices(scratch: Path) -> None:
    """A codec's middle branch (uint32 gaps) that no test reached."""
    n = 1 << 17
    shape = (n // 256, 256)
    url = str(scratch / "wide")
    dcr_store.create(url, chunk_elements=n).close()
    bits = np.random.default_rng(1).normal(0, 0.02, n).astype(ml_dtypes.bfloat16).view(np.uint16)
    tensors = {"w": ("U16", shape), "tiny": ("U16", (9,)), "other": ("U16", (300,))}
    small = {name: np.full(tensors[name][1], 3, np.uint16) for name in ("tiny", "other")}
    methods: set[int] = set()
    modes: set[tuple[int, int, bool]] = set()
    with opened(url, 2) as stores:
        trainer = Trainer(stores, tensors)

        def publish(*, is_whole: bool) -> None:
            one, two = trainer.begin()
            values = bits.reshape(shape)
            if is_whole:
                one.write_slice(values, slices.whole("w", "U16", shape))
            else:
                for rank, transaction in enumerate((one, two)):
                    mapped = slices.row_parallel("w", "U16", shape, rank, 2)
                    transaction.write_slice(np.split(values, 2, 1)[rank], mapped)
            one.write_slice(small["tiny"], slices.whole("tiny", "U16", (9,)))
            two.write_residual("other", small["other"])
            commit([one, two])
            found = stores[0].read("main")
            assert (raw(found["w"]), raw(found["tiny"])) == (raw(values), raw(small["tiny"]))
            assert raw(found["other"]) == raw(small["other"])

        publish(is_whole=True)
        for number, (positions, masks) in enumerate(_masks(n)):
            bits[positions] ^= masks
            small["tiny"][number % 9] += 1
            small["other"][number::7] += 1
            publish(is_whole=number % 2 == 0)
        objects = open_objects(url)
        for key in objects.list("versions/"):
            if "/u16/mask/c/0" in key:
                head = objects.get(key)[:8]
                methods.add(head[0])
                modes.add((head[0], head[3], head[2] > 0))
        assert methods == {1, 2, 3, 4}, methods  # raw, dense, sparse, bitmap
        assert {(3, 0, True), (3, 1, True), (3, 1, False), (4, 0, True), (4, 1, False)} <= modes, modes
        kinds = {key.split("/")[-3] for key in objects.list("versions/") if "/c/" in key}
        assert {"mask", "present", "value"} <= kinds
        assert stores[0].verify(deep=True).ok
