"""Transactions: what may be written, what a version then is, and who may begin when."""

from __future__ import annotations

import gc
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import assert_same, series, write_hf
from watched import Watched

import dcr_store
from dcr_store.errors import (
    ConflictError,
    FencedError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutcomeUnknownError,
    StorageError,
)
from dcr_store.format.records import Abort, Begin, Resume
from dcr_store.publish.chunk_encoding import encode_anchor, encode_delta
from dcr_store.publish.state import DeltaWriter
from dcr_store.publish.transaction import Transaction
from dcr_store.store import Store

STATES = series(4, seed=1)


@pytest.fixture
def store() -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=256) as store:
        yield store


def bits(array: Any) -> Any:
    return np.frombuffer(array.tobytes(), f"u{array.itemsize}")


def write(transaction: Transaction, state: dict[str, Any]) -> None:
    for name, array in state.items():
        transaction.write(name, array)


def publish(store: Store, state: dict[str, Any], **options: Any) -> Any:
    with store.begin(**options) as transaction:
        write(transaction, state)
    return transaction.commit()


def kinds(store: Store, line: str = "main") -> list[str]:
    return [record.kind for record, _ in store._catalog.log(line).records()]


class TestWriting:
    def test_what_commit_returns(self, store: Store) -> None:
        info = publish(store, STATES[0], message="m", metadata={"step": 1})
        assert (info.version, info.base, info.message, info.metadata) == ("main@0", None, "m", {"step": 1})
        assert info.changed == info.elements == sum(np.asarray(a).size for a in STATES[0].values())
        info = publish(store, STATES[1])
        assert (info.version, info.base) == ("main@1", "main@0")
        assert info.changed == sum(
            int(np.count_nonzero(bits(new) != bits(STATES[0][name]))) for name, new in STATES[1].items()
        )
        assert store.log()[-1] == info == store.show("main@1").info

    def test_nbytes_is_what_was_added(self, store: Store) -> None:
        before = set(store._objects.list(""))
        info = publish(store, STATES[0])
        added = {
            key: n for key, n in store._objects.list("versions/").items() if key not in before and "manifest" not in key
        }
        assert info.nbytes == sum(added.values())

    def test_an_unchanged_version_adds_no_partition(self, store: Store) -> None:
        publish(store, STATES[0])
        info = publish(store, STATES[0])
        assert (info.changed, info.base) == (0, "main@0")
        assert info.root == store.show("main@0").info.root
        assert store.show("main@1").n_partitions == 0
        assert_same(store.read("main@1"), STATES[0])

    def test_nothing_at_all_is_refused(self, store: Store) -> None:
        transaction = store.begin()
        with pytest.raises(InvalidInputError, match="main@0 has no tensors"):
            transaction.commit()
        transaction.write("a", np.zeros(3))
        assert transaction.commit().version == "main@0"

    def test_a_name_twice(self, store: Store) -> None:
        with store.begin() as transaction:
            transaction.write("a", np.zeros(3))
            with pytest.raises(InvalidInputError, match="'a' was already written"):
                transaction.write("a", np.zeros(3))
            transaction.write("b", np.zeros(3))
        assert set(store.read()) == {"a", "b"}

    @pytest.mark.parametrize(
        "tensor", [[1, 2], None, "text", 3.5, np.array(["a"]), np.array([object()]), memoryview(b"")]
    )
    def test_no_tensor(self, store: Store, tensor: object) -> None:
        with store.begin() as transaction:
            transaction.write("a", np.arange(3))
            with pytest.raises(InvalidInputError) as caught:
                transaction.write("b", tensor)
            assert caught.value.key == "b"
        assert_same(store.read(), {"a": np.arange(3)})

    def test_only_empty_tensors(self, store: Store) -> None:
        publish(store, {"a": np.zeros((0, 3), np.float32)})
        publish(store, {"a": np.zeros((0, 3), np.float32)})
        publish(store, {"a": np.zeros((0, 3), np.float32), "b": np.float32(1)})
        assert store.read("main@1")["a"].shape == (0, 3)
        assert store.read("main@2")["b"] == 1
        assert [info.base is None for info in store.log()] == [True, False, True]

    @pytest.mark.parametrize("first", ["empty", "full"])
    def test_an_empty_tensor_beside_others_in_any_order(self, store: Store, first: str) -> None:
        """Its start lies in a chunk that it has no part in."""
        full, empty = np.arange(10, dtype=np.int16), np.zeros((2, 0), np.int16)
        state = {"full": full, "empty": empty}
        publish(store, state)
        changed = {"full": full + 1, "empty": empty}
        order = sorted(changed, key=lambda name: name != first)
        publish(store, {name: changed[name] for name in order})
        assert_same(store.read("main@1"), changed)
        assert store.verify(deep=True).ok

    def test_checkpoint_and_tensors_do_not_mix(self, store: Store, tmp_path: Path) -> None:
        directory = write_hf(tmp_path / "hf", STATES[0])
        with store.begin() as transaction:
            transaction.write("a", np.zeros(3))
            with pytest.raises(InvalidInputError, match="which has tensors already"):
                transaction.write_checkpoint(directory)
            transaction.abort()
        with store.begin() as transaction:
            transaction.write_checkpoint(directory)
            with pytest.raises(InvalidInputError, match="was written from a checkpoint"):
                transaction.write("a", np.zeros(3))
            with pytest.raises(InvalidInputError):
                transaction.write_checkpoint(directory)
        assert_same(store.read(), STATES[0])

    def test_no_checkpoint(self, store: Store, tmp_path: Path) -> None:
        with store.begin() as transaction:
            with pytest.raises(NotFoundError):
                transaction.write_checkpoint(tmp_path / "missing")
            (tmp_path / "x.safetensors").write_bytes(b"rubbish")
            with pytest.raises(FormatError):
                transaction.write_checkpoint(tmp_path)
            transaction.write("a", np.arange(3))
        assert list(store.read()) == ["a"]


class TestTies:
    def test_the_same_memory_is_stored_once(self, store: Store) -> None:
        embed = torch.randn(40, 8)
        publish(store, {"embed": embed, "head": embed, "view": embed[:20]})
        detail = store.show("main")
        assert detail.n_tensors == 2
        assert [name for name, *_ in detail.tensors] == ["embed", "head", "view"]
        found = store.read(framework="torch")
        assert found["head"].data_ptr() == found["embed"].data_ptr()
        assert torch.equal(found["head"], embed)
        embed += 1
        info = publish(store, {"head": embed, "view": embed[:20], "embed": embed})
        assert info.base == "main@0", "written by the other name first, and still a delta"
        assert torch.equal(store.read(framework="torch")["embed"], embed)

    def test_a_tie_that_breaks_makes_an_anchor(self, store: Store) -> None:
        a = np.arange(100.0)
        publish(store, {"x": a, "y": a})
        info = publish(store, {"x": a, "y": a + 1})
        assert info.base is None
        assert_same(store.read("main@1"), {"x": a, "y": a + 1})
        assert_same(store.read("main@0"), {"x": a, "y": a})
        assert publish(store, {"x": a, "y": a + 2}).base == "main@1"

    def test_two_of_three_stay_tied(self, store: Store) -> None:
        a = np.arange(100.0)
        publish(store, {"x": a, "y": a, "z": a})
        publish(store, {"x": a, "y": a - 1, "z": a})
        assert_same(store.read("main@1"), {"x": a, "y": a - 1, "z": a})

    def test_a_buffer_used_again_is_no_tie(self, store: Store) -> None:
        buffer = np.empty(1000, np.float32)
        expected = {}
        with store.begin() as transaction:
            for i in range(5):
                buffer[:] = i
                expected[f"t{i}"] = buffer.copy()
                transaction.write(f"t{i}", buffer)
        assert_same(store.read(), expected)
        with store.begin() as transaction:
            for i in range(5):
                buffer[:] = i * i
                expected[f"t{i}"] = buffer.copy()
                transaction.write(f"t{i}", buffer)
        assert_same(store.read(), expected)

    def test_memory_that_was_freed_is_no_tie(self, store: Store) -> None:
        expected = {}
        with store.begin() as transaction:
            for i in range(50):
                tensor = np.full(5000, i, np.int64)
                expected[f"t{i}"] = tensor.copy()
                transaction.write(f"t{i}", tensor)
                del tensor
        assert_same(store.read(), expected)

    def test_the_caller_may_change_tensors_after_the_call(self, store: Store) -> None:
        for _ in range(2):
            tensor = np.random.default_rng(0).normal(size=(64, 65)).astype(np.float32)
            expected = tensor.copy()
            with store.begin() as transaction:
                transaction.write("a", tensor)
                tensor[:] = -1
                transaction.write("b", tensor)
            assert_same(store.read(), {"a": expected, "b": np.full_like(expected, -1)})


class TestWorkers:
    """A worker gets several chunks at a time, but no more than leaves others their part."""

    def use(self, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("publish.encoders", "versions.workers"):
            monkeypatch.setattr(f"dcr_store.{module}.n_workers", lambda: n)

    def test_all_have_a_part_of_one_tensor(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(4, monkeypatch)
        all_at_work = threading.Barrier(4, timeout=10)

        def waiting(encode: Callable[..., Any]) -> Callable[..., Any]:
            def encode_when_all_are_here(*arguments: Any) -> Any:
                all_at_work.wait()
                return encode(*arguments)

            return encode_when_all_are_here

        monkeypatch.setattr("dcr_store.publish.state.encode_anchor", waiting(encode_anchor))
        monkeypatch.setattr("dcr_store.publish.state.encode_delta", waiting(encode_delta))
        for i in range(2):
            publish(store, {"a": np.full(4 * 256, i + 1, np.uint16)})
        assert_same(store.read(), {"a": np.full(4 * 256, 2, np.uint16)})

    @pytest.mark.parametrize("n_workers", [1, 2, 3])
    def test_chunks_that_are_left_over_are_read_too(
        self, store: Store, n_workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those that make up no whole batch, before the caller goes on."""
        self.use(n_workers, monkeypatch)
        rng = np.random.default_rng(n_workers)
        for n_chunks in (1, 2, 7, 40, 43):
            expected = rng.integers(0, 9, n_chunks * 256, np.uint16)
            for _ in range(2):
                tensor = expected.copy()
                with store.begin() as transaction:
                    transaction.write("a", tensor)
                    tensor[:] = 77
                assert_same(store.read(), {"a": expected})
                expected = expected + np.uint16(1)

    def test_a_source_that_fails_ends_the_wait_for_it(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Though nobody reads what comes after it in the same batch."""
        self.use(1, monkeypatch)
        publish(store, {"a": np.zeros(8 * 256, np.uint16)})
        transaction = store.begin()
        writer, entry = transaction._writer, transaction._base_layout.entry("a")
        read = []

        def fail(start: int, stop: int, out: Any) -> None:
            read.append(start // 256)
            if start == 5 * 256:
                raise StorageError("cannot be read", key="a")
            out[:] = 1

        writer.write(entry, fail, settles=True)
        with pytest.raises(StorageError, match="cannot be read"):  # noqa: PT012 - whichever of the two notices first
            writer.settle()
            writer.drain()
        assert read == [0, 1, 2, 3, 4, 5]
        transaction.abort()


class TestLayouts:
    @pytest.mark.parametrize("how", ["added", "removed", "reshaped", "dtype", "renamed", "removed and added"])
    @pytest.mark.parametrize("order", ["first", "last"])
    def test_another_layout_makes_an_anchor(self, store: Store, how: str, order: str) -> None:
        """Whenever the difference shows, at the first tensor or only at commit."""
        publish(store, STATES[0])
        state = dict(STATES[1])
        if how in ("added", "removed and added"):
            state["new"] = np.arange(7, dtype=np.uint8)
        if how in ("removed", "removed and added"):
            del state["layers.0.q.weight"]
        if how == "reshaped":
            state["head"] = state["head"].reshape(7, 5)
        if how == "dtype":
            state["head"] = state["head"].view(np.int16)
        if how == "renamed":
            state["tail"] = state.pop("head")
        names = list(state)
        if order == "first":
            names.reverse()
        info = publish(store, {name: state[name] for name in names})
        assert info.base is None
        assert info.changed == info.elements
        assert_same(store.read("main@1"), state)
        assert_same(store.read("main@0"), STATES[0])
        assert publish(store, state).base == "main@1"
        assert store.verify(deep=True).ok

    def test_many_chunks_move_to_an_anchor(self, store: Store) -> None:
        """What was encoded against the base is decoded again, by several threads at once."""
        rng = np.random.default_rng(0)
        big = rng.integers(0, 2**16, 100 * 256, np.uint16)
        publish(store, {"big": big})
        big = np.where(rng.random(big.size) < 0.2, big + 1, big).astype(np.uint16)
        state = {"big": big, "new": np.arange(3)}
        publish(store, state)
        assert_same(store.read(), state)

    def test_many_small_tensors_move_to_an_anchor(self, store: Store) -> None:
        """Each chunk is decoded once, not once for each tensor in it."""
        state = {f"t{i}": np.full(3, i, np.float32) for i in range(1000)}
        publish(store, state)
        state = {name: array + 1 for name, array in state.items()}
        decoded: list[int] = []
        real = DeltaWriter._complete

        def complete(self: DeltaWriter, space: str, chunk: int, out: Any) -> None:
            decoded.append(chunk)
            real(self, space, chunk, out)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeltaWriter, "_complete", complete)
            publish(store, {**state, "new": np.arange(3)})
        assert len(decoded) == len(set(decoded)) > 50
        assert_same(store.read(), {**state, "new": np.arange(3)})

    def test_another_order_is_no_other_layout(self, store: Store) -> None:
        publish(store, STATES[0])
        names = list(STATES[1])
        for i, order in enumerate((names[::-1], names[2:] + names[:2])):
            info = publish(store, {name: STATES[i + 1][name] for name in order})
            assert info.base == f"main@{i}"
            assert_same(store.read(), STATES[i + 1])
        assert len(store._objects.list("layouts/")) == 1


class TestDeciding:
    def test_a_context_manager_commits_once(self, store: Store) -> None:
        with store.begin() as transaction:
            write(transaction, STATES[0])
            info = transaction.commit()
            assert transaction.commit() is info
        assert kinds(store) == ["begin", "commit"]

    def test_an_exception_aborts(self, store: Store) -> None:
        def fail() -> None:
            with store.begin() as transaction:
                write(transaction, STATES[0])
                raise ValueError("out")

        with pytest.raises(ValueError, match="out"):
            fail()
        records = [record for record, _ in store._catalog.log("main").records()]
        assert isinstance(records[-1], Abort)
        assert records[-1].reason == "ValueError: out"
        publish(store, STATES[1])
        assert_same(store.read("main@0"), STATES[1])

    def test_abort_in_the_context(self, store: Store) -> None:
        with store.begin() as transaction:
            write(transaction, STATES[0])
            transaction.abort("because")
        transaction.abort()
        assert kinds(store) == ["begin", "abort"]

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_after_the_end(self, store: Store, end: str) -> None:
        transaction = store.begin()
        transaction.write("a", np.zeros(3))
        getattr(transaction, end)()
        with pytest.raises(InvalidInputError, match="begin another one"):
            transaction.write("b", np.zeros(3))
        if end == "abort":
            with pytest.raises(InvalidInputError, match="is aborted"):
                transaction.commit()
        transaction.abort()
        assert kinds(store)[-1] == end

    def test_a_fenced_publisher_commits_nothing(self, store: Store) -> None:
        publish(store, STATES[0])
        first = store.begin(owner="one")
        write(first, STATES[1])
        second = store.begin(owner="two", takeover=True)
        with pytest.raises(FencedError, match="taken over or aborted"):
            first.commit()
        with pytest.raises(InvalidInputError, match="is fenced"):
            first.commit()
        first.abort()
        write(second, STATES[2])
        second.commit()
        assert_same(store.read("main@1"), STATES[2])
        assert kinds(store) == ["begin", "commit", "begin", "resume", "commit"]

    def test_an_old_transaction_leaves_a_new_one_alone(self, store: Store) -> None:
        """Ending it again does nothing, though both had the same baseline."""
        publish(store, STATES[0])
        old = store.begin()
        old.abort()
        tied = np.arange(2000.0)
        with store.begin() as new:
            new.write("x", tied)
            old.abort()
            new.write("y", tied)
        assert_same(store.read("main@1"), {"x": tied, "y": tied})
        assert publish(store, {"x": tied, "y": tied}).base == "main@1"

    def test_a_fenced_publisher_lets_go(self, store: Store, tmp_path: Path) -> None:
        first = store.begin(owner="one", baseline=tmp_path)
        write(first, STATES[0])
        store.begin(owner="two", takeover=True).abort()
        with pytest.raises(FencedError):
            first.commit()
        publish(store, STATES[1], baseline=tmp_path)

    def test_a_fenced_context_manager(self, store: Store) -> None:
        def lose() -> None:
            with store.begin(owner="one") as first:
                write(first, STATES[0])
                store.begin(owner="two", takeover=True).abort()

        with pytest.raises(FencedError):
            lose()
        assert kinds(store) == ["begin", "resume", "abort"]

    @pytest.mark.parametrize("error", [StorageError, IntegrityError])
    def test_a_failed_commit_lets_go_of_everything(self, store: Store, tmp_path: Path, error: type) -> None:
        """In the same process, with the same baseline, the next try just works."""
        publish(store, STATES[0], baseline=tmp_path)
        watched = store._catalog.objects = Watched(store._objects)

        def fail(method: str, key: str) -> None:
            if method == "put" and "manifest" in key:
                raise error("no", key=key)

        watched.before = fail
        with pytest.raises(error, match="no"), store.begin(baseline=tmp_path) as transaction:
            write(transaction, STATES[1])
        watched.before = None
        info = publish(store, STATES[2], baseline=tmp_path)
        assert info.version == "main@1"
        assert_same(store.read("main@1"), STATES[2])
        assert transaction.version == "main@1"

    @pytest.mark.parametrize("how", ["gone", "cut"])
    def test_what_was_sealed_has_to_be_there(self, store: Store, how: str) -> None:
        """Something takes an object away between seal and commit: no version comes of it."""
        publish(store, STATES[0])
        inner, lost = store._objects, []
        watched = store._catalog.objects = Watched(inner)

        def take(method: str, key: str) -> None:
            if method == "list" and not lost:
                lost.extend(name for name in inner.list(key) if "/u16/mask/c/" in name)
                for name in lost:
                    data = inner.get(name)
                    inner.delete(name)
                    if how == "cut":
                        inner.put(name, data[:-1])

        transaction = store.begin()
        write(transaction, STATES[1])
        watched.before = take
        with pytest.raises(IntegrityError, match="a sealed object is not in the store") as caught:
            transaction.commit()
        watched.before = None
        assert caught.value.key in lost
        transaction.abort()
        assert len(store.log()) == 1
        publish(store, STATES[1])
        assert_same(store.read("main@1"), STATES[1])

    @pytest.mark.parametrize("lands", [False, True])
    @pytest.mark.parametrize("then", ["commit again", "begin"])
    def test_a_commit_of_unknown_outcome(self, store: Store, tmp_path: Path, lands: bool, then: str) -> None:
        """It is never called a failure; who asks again, or begins next, finds out and goes on from what is there."""
        publish(store, STATES[0], baseline=tmp_path)
        log = store._catalog.log("main")
        log.objects = silent = Silent(store._objects, lands)
        with pytest.raises(OutcomeUnknownError), store.begin(baseline=tmp_path) as transaction:
            write(transaction, STATES[1])
        assert silent.count("lost") == 1
        if then == "commit again":
            assert transaction.commit().version == "main@1"
        info = publish(store, STATES[2], baseline=tmp_path)
        assert info.version == "main@2", "the put without an answer was repeated and stands"
        assert_same(store.read("main@1"), STATES[1])
        assert_same(store.read("main@2"), STATES[2])
        if then == "begin":
            assert transaction.commit().version == "main@1", "and it may still be asked"


class Silent(Watched):
    """Loses the first commit record, or the answer to its put."""

    def __init__(self, inner: Any, lands: bool) -> None:
        super().__init__(inner)
        self.lands = lands

    def put_if_absent(self, key: str, data: Any) -> bool:
        if b'"kind":"commit"' in bytes(data) and not self.count("lost"):
            self.requests.append(("lost", key))
            if self.lands:
                self.inner.put_if_absent(key, data)
            raise OutcomeUnknownError("no answer", key=key)
        return super().put_if_absent(key, data)


class TestBeginning:
    def test_another_owner_is_refused(self, store: Store) -> None:
        first = store.begin(owner="one")
        with pytest.raises(ConflictError, match="another publisher has the transaction for main@0 open") as caught:
            store.begin(owner="two")
        assert caught.value.found == "owner one"
        assert kinds(store) == ["begin"]
        first.abort()
        store.begin(owner="two").abort()

    def test_lines_do_not_meet(self, store: Store) -> None:
        with store.begin("a") as one, store.begin("b") as two:
            one.write("x", np.zeros(3))
            two.write("x", np.ones(3))
        assert store.read("a")["x"][0] == 0
        assert store.read("b")["x"][0] == 1

    def test_the_same_owner_in_the_same_process_is_still_at_it(self, store: Store) -> None:
        first = store.begin(owner="run")
        with pytest.raises(ConflictError):
            store.begin(owner="run")
        first.abort()

    def test_an_owner_comes_back(self, store: Store) -> None:
        """The same owner, whose transaction nobody works on any more: it is resumed."""
        first = store.begin(owner="run", metadata={"step": 1})
        txid = first.txid
        del first
        gc.collect()
        second = store.begin(owner="run", metadata={"step": 1})
        assert (second.txid, second.attempt) == (txid, 1)
        write(second, STATES[0])
        second.commit()
        assert kinds(store) == ["begin", "resume", "commit"]

    def test_an_owner_comes_back_with_something_else(self, store: Store) -> None:
        """Message and metadata stand in the begin record: with others it is another transaction."""
        first = store.begin(owner="run", metadata={"step": 1})
        del first
        gc.collect()
        with store.begin(owner="run", metadata={"step": 2}) as second:
            write(second, STATES[0])
        records = [record for record, _ in store._catalog.log("main").records()]
        assert [type(record) for record in records[:3]] == [Begin, Abort, Begin]
        assert store.log()[0].metadata == {"step": 2}

    def test_a_process_that_died_is_taken_over(self, tmp_path: Path) -> None:
        """Nobody has to say so: its owner's name tells that it is gone."""
        with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
            script = (
                f"import os, dcr_store; dcr_store.open({str(tmp_path / 'store')!r}).begin(message='m'); os._exit(0)"
            )
            subprocess.run([sys.executable, "-c", script], check=True)
            with store.begin(message="m") as transaction:
                assert transaction.attempt == 1
                write(transaction, STATES[0])
            assert kinds(store) == ["begin", "resume", "commit"]

    @pytest.mark.parametrize(
        ("value", "says"),
        [(np.float32(1), "float32"), (float("nan"), "Out of range"), ([{1: 2}], "the key 1 is no string")],
    )
    def test_metadata_that_json_cannot_say_are_named(self, store: Store, value: object, says: str) -> None:
        with pytest.raises(InvalidInputError, match=rf"metadata 'reward': cannot be written as JSON: .*({says})"):
            store.begin(metadata={"step": 1, "reward": value, "z": 2})
        with pytest.raises(InvalidInputError, match=r"metadata 3: .*the key 3 is no string; use str\(3\)"):
            store.begin(metadata={"step": 1, 3: 4})  # type: ignore[dict-item]
        assert store._catalog.log("main").refresh().length == 0

    def test_metadata_that_json_changes_still_match(self, store: Store) -> None:
        metadata: dict[str, Any] = {"shape": (1, 2), "nested": {"b": 1, "a": [1.5]}}
        first = store.begin(owner="run", metadata=metadata)
        txid = first.txid
        del first
        gc.collect()
        second = store.begin(owner="run", metadata=metadata)
        assert second.txid == txid
        second.abort()

    def test_takeover_resumes(self, store: Store) -> None:
        first = store.begin(owner="one")
        second = store.begin(owner="two", takeover=True)
        assert (second.txid, second.attempt) == (first.txid, 1)
        records = [record for record, _ in store._catalog.log("main").records()]
        assert isinstance(records[1], Resume)
        assert records[1].owner == "two"
        second.abort()

    def test_base(self, store: Store) -> None:
        publish(store, STATES[0])
        publish(store, STATES[1])
        root = store.show("main").info.root
        for base in ("main@1", "main", root, root[:8]):
            store.begin(base=base).abort()
        for base in ("main@0", "main@2", "other@1", "other", "0" * 64):
            with pytest.raises(ConflictError, match="the head of line main is not the base you named"):
                store.begin(base=base)
        with pytest.raises(ConflictError) as caught:
            store.begin("fresh", base="fresh@0")
        assert caught.value.found == "no version"

    @pytest.mark.parametrize(
        "options",
        [
            {"line": "../x"},
            {"line": ""},
            {"line": "a/b"},
            {"line": None},
            {"message": 5},
            {"message": b"m"},
            {"message": "\ud800"},
            {"metadata": [1]},
            {"metadata": {"a": float("nan")}},
            {"metadata": {1: 2}},
            {"metadata": {"a": {2: 3}}},
            {"metadata": {"a": np.float32(1)}},
            {"metadata": {"a": object()}},
            {"owner": ""},
            {"owner": 5},
            {"base": "a/b"},
            {"base": 7},
        ],
        ids=lambda options: repr(options)[:40],
    )
    def test_arguments_that_cannot_be_stored(self, store: Store, options: dict[str, Any]) -> None:
        before = store._objects.list("")
        with pytest.raises(InvalidInputError):
            store.begin(**options)
        assert store._objects.list("") == before
        publish(store, STATES[0])

    def test_large_metadata(self, store: Store) -> None:
        metadata = {"log": "x" * (1 << 20), "deep": [[[[{"a": []}]]]], "big": 2**60, "neg": -0.0, "é": "😀\u2028"}
        publish(store, STATES[0], metadata=metadata, message="m" * 5000)
        publish(store, STATES[1])
        info = dcr_store.open(store.url).log()[0]
        assert info.metadata == metadata
        assert info.message == "m" * 5000

    def test_metadata_is_as_it_was_at_begin(self, store: Store) -> None:
        metadata = {"a": [1]}
        with store.begin(metadata=metadata) as transaction:
            metadata["a"].append(2)
            write(transaction, STATES[0])
        assert store.log()[0].metadata == {"a": [1]}
