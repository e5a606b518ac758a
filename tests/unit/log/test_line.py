"""A line's log in a store: open, follow, append, lost races, unknown outcomes."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

import pytest
from log_records import STORE_SHA256, Writer, abort, begin, commit, digits, empty, holding_store, resume
from watched import Watched

from dcr_store.errors import (
    ConflictError,
    DcrError,
    FormatError,
    IntegrityError,
    NotFoundError,
    OutcomeUnknownError,
    StorageError,
)
from dcr_store.format.names import checkpoint_key, hint_key, new_txid, record_key
from dcr_store.format.records import Begin, Record
from dcr_store.log import line as line_module
from dcr_store.log.checkpoints import read_hint, write_hint
from dcr_store.log.fold import LineState
from dcr_store.log.line import LineLog
from dcr_store.objects.open import open_objects
from dcr_store.ports import ObjectStore


@pytest.fixture
def objects() -> Watched:
    return Watched(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store")))


def opened(objects: Watched, line: str = "main") -> LineLog:
    return LineLog(objects, line, STORE_SHA256)


def _refuse() -> Record:
    raise ConflictError("is open", key="main")


def publish(log: LineLog, n: int) -> None:
    for _ in range(n):
        log.append(begin)
        log.append(commit)


class TestReading:
    def test_an_empty_line(self, objects: Watched) -> None:
        log = opened(objects)
        assert log.refresh() == empty()
        assert (log.rows(), log.row(0), list(log.records())) == ([], None, [])

    def test_without_hint_and_checkpoint(self, objects: Watched) -> None:
        writer = Writer(objects)
        writer.versions(20)
        log = opened(objects)
        assert log.refresh() == writer.state
        assert log.rows() == list(writer.state.rows)
        assert [record.seq for record, _ in log.records()] == list(range(40))

    def test_follows(self, objects: Watched) -> None:
        writer, log = Writer(objects), opened(objects)
        for n in (0, 1, 3):
            writer.versions(n)
            assert log.refresh() == writer.state
        before = len(objects.requests)
        log.refresh()
        assert objects.requests[before:] == [("get", record_key("main", 8))], (
            "one request says that there is nothing new"
        )

    def test_lines_are_apart(self, objects: Watched) -> None:
        Writer(objects, "main").versions(2)
        Writer(objects, "exp").versions(1)
        assert opened(objects, "main").refresh().length == 4
        assert opened(objects, "exp").refresh().length == 2

    def test_row(self, objects: Watched) -> None:
        writer, log = Writer(objects), opened(objects)
        writer.versions(5)
        log.refresh()
        assert [log.row(n) for n in range(5)] == list(writer.state.rows)
        assert log.row(5) is None

    def test_illegal_record_is_named(self, objects: Watched) -> None:
        writer = Writer(objects)
        writer.versions(2)
        objects.put(record_key("main", 4), commit(writer.state, txid="9" * 32).to_bytes())
        with pytest.raises(IntegrityError, match="its transaction is not open") as caught:
            opened(objects).refresh()
        assert caught.value.key == record_key("main", 4)

    @pytest.mark.parametrize("seq", [0, 1, 2, 3])
    def test_damaged_record_is_named(self, objects: Watched, seq: int) -> None:
        writer = Writer(objects)
        writer.versions(2)
        for damage in (b"", b"{", b"[]", objects.get(record_key("main", seq)).replace(b"dcr-log", b"dcr-hog")):
            copy = Watched(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store")))
            for other in range(4):
                copy.put(record_key("main", other), damage if other == seq else objects.get(record_key("main", other)))
            with pytest.raises(FormatError) as caught:
                opened(copy).refresh()
            assert caught.value.key == record_key("main", seq)

    def test_changed_record_breaks_the_chain(self, objects: Watched) -> None:
        writer = Writer(objects)
        writer.versions(2)
        key = record_key("main", 1)
        objects.put(key, objects.get(key).replace(b'"changed":1', b'"changed":2'))
        with pytest.raises(IntegrityError, match="the hash chain is broken") as caught:
            opened(objects).refresh()
        assert caught.value.key == record_key("main", 2)

    def test_the_log_of_another_store(self, objects: Watched) -> None:
        Writer(objects).versions(1)
        with pytest.raises(IntegrityError, match="the hash chain is broken"):
            LineLog(objects, "main", "0" * 64).refresh()

    def test_long_metadata_is_read_from_its_record(self, objects: Watched) -> None:
        long = {"a": "x" * 5000}
        writer, log = Writer(objects), opened(objects)
        writer.versions(1, metadata=long, message="m")
        writer.versions(1, metadata={"b": 1})
        log.refresh()
        first, second = log.rows()
        assert (first.message, first.metadata) == (None, None)
        assert (log.complete(first).message, log.complete(first).metadata) == ("m", long)
        assert log.complete(second) is second
        objects.delete(record_key("main", 0))
        with pytest.raises(IntegrityError, match="missing"):
            log.complete(first)
        objects.put(record_key("main", 0), begin(empty(), txid="0" * 32).to_bytes())
        with pytest.raises(IntegrityError, match="is not the record that began the version"):
            log.complete(first)


class TestAppending:
    def test_append(self, objects: Watched) -> None:
        log = opened(objects)
        record = log.append(begin)
        assert isinstance(record, Begin)
        assert objects.get(record_key("main", 0)) == record.to_bytes()
        assert log.state.open is not None
        assert opened(objects).refresh() == log.state

    def test_what_decide_raises_goes_to_the_caller(self, objects: Watched) -> None:
        def refuse(state: LineState) -> Record:
            raise ConflictError("no")

        log = opened(objects)
        with pytest.raises(ConflictError, match="no"):
            log.append(refuse)
        assert objects.list("log/") == {}

    @pytest.mark.parametrize(
        "changed", [{"owner": ""}, {"owner": 5}, {"writers": ()}, {"created_at": "now"}, {"id": "x"}, {"message": 1}]
    )
    def test_what_no_reader_would_accept_is_not_put(self, objects: Watched, changed: dict[str, object]) -> None:
        log = opened(objects)
        with pytest.raises(FormatError):
            log.append(lambda state: begin(state, **changed))
        assert objects.list("log/") == {}

    def test_what_is_illegal_is_not_put(self, objects: Watched) -> None:
        log = opened(objects)
        for make in (commit, resume, abort, lambda state: begin(state, seq=state.length + 1)):
            with pytest.raises(IntegrityError, match="illegal"):
                log.append(make)
        assert objects.list("log/") == {}

    def test_a_lost_race_is_decided_again(self, objects: Watched) -> None:
        """Another process takes the number between decision and put: the loser decides on what is there then."""
        log, other = opened(objects), opened(objects)
        seen: list[int] = []

        def decide(state: LineState) -> Record:
            seen.append(state.length)
            if len(seen) == 1:
                other.append(lambda s: begin(s, owner="other"))
                other.append(lambda s: abort(s))
            return begin(state, owner="me")

        log.append(decide)
        assert seen == [0, 2]
        assert log.state.open is not None
        assert (log.state.open.owner, log.state.open.seq) == ("me", 2)
        assert other.refresh() == log.state

    def test_a_lost_race_may_end_in_a_conflict(self, objects: Watched) -> None:
        log, other = opened(objects), opened(objects)

        def decide(state: LineState) -> Record:
            if state.open is not None:
                raise ConflictError("taken")
            if state.length == 0:
                other.append(lambda s: begin(s, owner="other"))
            return begin(state)

        with pytest.raises(ConflictError, match="taken"):
            log.append(decide)
        assert log.state == other.state

    def test_many_at_once(self, tmp_path: Path) -> None:
        """Threads with a log each and one with a shared one: every append lands once, in one sequence."""
        store = holding_store(open_objects(tmp_path))
        logs = [LineLog(store, "main", STORE_SHA256) for _ in range(4)]
        errors: list[BaseException] = []

        def work(log: LineLog) -> None:
            try:
                for _ in range(5):
                    log.append(lambda state: (begin if state.open is None else abort)(state, id=new_txid()))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(log,)) for log in [*logs, logs[0]]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert LineLog(store, "main", STORE_SHA256).refresh().length == 25


class Lost(Watched):
    """Loses the answers of conditional puts."""

    def __init__(self, inner: Watched) -> None:
        super().__init__(inner)
        self.lose: list[str] = []

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        fate = self.lose.pop(0) if self.lose else ""
        if fate == "before":
            raise OutcomeUnknownError("no answer", key=key)
        result = super().put_if_absent(key, data)
        if fate == "after":
            raise OutcomeUnknownError("no answer", key=key)
        return result


class TestUnknownOutcome:
    @pytest.mark.parametrize("fate", ["before", "after"])
    def test_the_next_append_finds_out_first(self, objects: Watched, fate: str) -> None:
        store = Lost(objects)
        log = opened(store)
        store.lose = [fate]
        with pytest.raises(OutcomeUnknownError):
            log.append(begin)
        seen: list[LineState] = []

        def decide(state: LineState) -> Record:
            seen.append(state)
            return commit(state)

        record = log.append(decide)
        assert record.seq == 1, "the put that got no answer was repeated and stands"
        assert [state.length for state in seen] == [1]
        assert opened(objects).refresh() == log.state

    def test_nothing_else_is_appended_meanwhile(self, objects: Watched) -> None:
        store = Lost(objects)
        log = opened(store)
        store.lose = ["before"] * 3
        decided: list[int] = []

        def decide(state: LineState) -> Record:
            decided.append(state.length)
            return begin(state)

        for _ in range(3):
            with pytest.raises(OutcomeUnknownError):
                log.append(decide)
        assert decided == [0], "nothing was decided while the first put was open"
        assert objects.list("log/") == {}

    def test_somebody_else_has_taken_the_number_meanwhile(self, objects: Watched) -> None:
        store = Lost(objects)
        log, other = opened(store), opened(objects)
        store.lose = ["before"]
        with pytest.raises(OutcomeUnknownError):
            log.append(lambda state: begin(state, owner="me"))
        other.append(lambda state: begin(state, owner="other", id="f" * 32))
        record = log.append(lambda state: abort(state))
        assert record.seq == 1
        assert [item.kind for item, _ in other.records()] == ["begin", "abort"]

    def test_the_late_put_does_not_count_twice(self, objects: Watched) -> None:
        store = Lost(objects)
        log = opened(store)
        store.lose = ["after"]
        with pytest.raises(OutcomeUnknownError):
            log.append(begin)
        assert log.refresh().length == 1, "reading shows what happened"
        log.append(abort)
        assert log.refresh().length == 2


class TestHintAndCheckpoint:
    def test_every_commit_leaves_a_hint_and_every_eighth_a_checkpoint(self, objects: Watched) -> None:
        log = opened(objects)
        publish(log, 17)
        assert sorted(objects.list("log/main/checkpoints/")) == [checkpoint_key("main", n) for n in (16, 32)]
        assert objects.count("put", hint_key("main")) == 17

    def test_failing_to_write_them_is_no_error(self, objects: Watched) -> None:
        def fail(method: str, key: str) -> None:
            if method == "put":
                raise StorageError("full", key=key)

        log = opened(objects)
        objects.before = fail
        publish(log, 9)
        objects.before = None
        assert opened(objects).refresh().length == 18

    @pytest.mark.parametrize("error", [StorageError, IntegrityError, NotFoundError, ConflictError])
    def test_whatever_becomes_of_them_the_record_stands(self, objects: Watched, error: type[DcrError]) -> None:
        """A relay that answers 502 to the hint must not make a commit seem to have failed."""

        def fail(method: str, key: str) -> None:
            if method == "put":
                raise error("refused", key=key)

        log = opened(objects)
        objects.before = fail
        publish(log, 8)
        assert opened(objects).refresh() == log.state

    def test_opening_takes_a_handful_of_requests(self, objects: Watched) -> None:
        log = opened(objects)
        publish(log, 16)
        objects.requests.clear()
        assert opened(objects).refresh() == log.state
        assert objects.requests == [
            ("get", hint_key("main")),
            ("get", checkpoint_key("main", 32)),
            ("get", record_key("main", 31)),
            ("get", record_key("main", 32)),
        ]

    def test_opening_between_checkpoints(self, objects: Watched) -> None:
        log = opened(objects)
        publish(log, 23)
        objects.requests.clear()
        assert opened(objects).refresh() == log.state
        assert len(objects.requests) == 4
        write_hint(objects, log.state, 32)  # without a tail, as writers may
        objects.requests.clear()
        assert opened(objects).refresh() == log.state
        assert len(objects.requests) == 3 + 14 + 1
        assert objects.count("list") == objects.count("list_names") == 0

    @pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 16, 20])
    def test_the_same_state_whatever_is_lost(self, objects: Watched, n: int) -> None:
        log = opened(objects)
        publish(log, n)
        rows = log.rows()
        for delete in (["hint"], ["checkpoints"], ["hint", "checkpoints"], ["newest"], ["newest", "hint"]):
            copy = Watched(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store")))
            for key in objects.list(""):
                copy.put(key, objects.get(key))
            if "hint" in delete:
                copy.delete(hint_key("main"))
            checkpoints = sorted(copy.list("log/main/checkpoints/"))
            for key in checkpoints if "checkpoints" in delete else checkpoints[-1:] if "newest" in delete else []:
                copy.delete(key)
            reopened = opened(copy)
            assert reopened.refresh() == log.state
            assert reopened.rows() == rows

    def damage(self, objects: Watched, key: str, how: str) -> None:
        data = objects.get(key)
        changed = {
            "cut": data[: len(data) // 2],
            "flipped": data[:40] + bytes([data[40] ^ 1]) + data[41:],
            "empty": b"",
            "foreign": b"hello",
            "other JSON": b'{"body":{"format":"dcr-log-hint"},"sha256":"x"}',
            "no Unicode": b'{"body":{"format":"\\ud800"},"sha256":"x"}',
        }[how]
        objects.put(key, changed)

    @pytest.mark.parametrize("how", ["cut", "flipped", "empty", "foreign", "other JSON", "no Unicode"])
    @pytest.mark.parametrize("what", ["hint", "checkpoint", "both"])
    def test_damaged_ones_count_as_missing(self, objects: Watched, what: str, how: str) -> None:
        log = opened(objects)
        publish(log, 17)
        if what != "checkpoint":
            self.damage(objects, hint_key("main"), how)
        if what != "hint":
            self.damage(objects, checkpoint_key("main", 32), how)
        reopened = opened(objects)
        assert reopened.refresh() == log.state
        assert reopened.rows() == log.rows()
        publish(reopened, 8)
        assert opened(objects).refresh() == reopened.state, "and the next publisher renews them"
        objects.requests.clear()
        opened(objects).refresh()
        assert len(objects.requests) < 8

    def test_a_stale_hint_is_fine(self, objects: Watched) -> None:
        log = opened(objects)
        publish(log, 8)
        stale = objects.get(hint_key("main"))
        publish(log, 12)
        objects.put(hint_key("main"), stale)
        assert opened(objects).refresh() == log.state

    @pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 21])
    def test_opening_takes_four_requests_whatever_came_since_the_checkpoint(self, objects: Watched, n: int) -> None:
        log = opened(objects)
        publish(log, n)
        objects.requests.clear()
        reopened = opened(objects)
        assert reopened.refresh() == log.state
        assert len(objects.requests) <= 4  # hint, checkpoint, last record, none after it
        publish(reopened, 3)
        objects.requests.clear()
        assert opened(objects).refresh() == reopened.state, "whoever opened by it goes on with it"
        assert len(objects.requests) <= 4

    def test_a_tail_that_is_not_the_log_is_given_up(self, objects: Watched) -> None:
        from dcr_store.format import canonical

        log = opened(objects)
        publish(log, 11)
        hint = read_hint(objects, "main")
        assert hint is not None
        assert [canonical.sha256(data) for data in hint.tail][-1] == hint.last_sha256
        assert len(hint.tail) == 6
        other = Watched(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store")))
        for _ in range(11):
            log_of_other = opened(other)
            log_of_other.append(lambda state: begin(state, owner="somebody else"))
            log_of_other.append(commit)
        its = read_hint(other, "main")
        assert its is not None
        wrong = [
            hint.tail[1:],
            hint.tail[:-1],
            (*hint.tail[:2], *hint.tail[4:]),
            (*hint.tail[:-1], b"{}"),
            (*hint.tail[:-1], its.tail[-1]),
            its.tail,
            (*hint.tail, begin(log.state).to_bytes()),
        ]
        for tail in wrong:
            write_hint(objects, log.state, 16, tail)
            assert opened(objects).refresh() == log.state
        # Whole in itself, with its checkpoint, but not the records that are there.
        for key in (hint_key("main"), checkpoint_key("main", 16)):
            objects.put(key, other.get(key))
        assert opened(objects).refresh() == log.state

    def test_a_tail_that_is_long_is_left_out(self, objects: Watched) -> None:
        log = opened(objects)
        log.append(lambda state: begin(state, metadata={"note": "x" * 70_000}))
        log.append(commit)
        hint = read_hint(objects, "main")
        assert hint is not None
        assert hint.tail == ()
        assert opened(objects).refresh() == log.state

    def test_a_record_that_lost_its_number_is_in_no_tail(self, objects: Watched) -> None:
        one, two = opened(objects), opened(objects)
        one.refresh(), two.refresh()
        one.append(lambda state: begin(state, owner="one"))
        with pytest.raises(ConflictError):
            two.append(lambda state: begin(state) if state.open is None else _refuse())
        two.append(commit)
        objects.requests.clear()
        assert opened(objects).refresh() == two.state
        assert len(objects.requests) <= 4

    def test_hint_and_checkpoint_of_another_line_are_ignored(self, objects: Watched) -> None:
        one, two = opened(objects, "one"), opened(objects, "two")
        publish(one, 8)
        publish(two, 9)
        objects.put(hint_key("two"), objects.get(hint_key("one")))
        objects.put(checkpoint_key("two", 16), objects.get(checkpoint_key("one", 16)))
        assert opened(objects, "two").refresh() == two.state

    @pytest.mark.parametrize("n", [8, 12])
    def test_a_checkpoint_that_says_something_else_is_ignored(self, objects: Watched, n: int) -> None:
        """Whole by its own SHA-256, but of another history: the records decide, also where none comes after it."""
        log = opened(objects)
        publish(log, n)
        other = Watched(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store")))
        log_of_other = opened(other)
        for _ in range(8):
            log_of_other.append(lambda state: begin(state, owner="somebody else"))
            log_of_other.append(commit)
        objects.put(checkpoint_key("main", 16), other.get(checkpoint_key("main", 16)))
        reopened = opened(objects)
        assert reopened.refresh() == log.state
        assert reopened.rows() == log.rows()

    def test_a_checkpoint_of_rows_alone_that_is_wrong_breaks_the_chain_and_is_given_up(self, objects: Watched) -> None:
        from dcr_store.format import canonical

        log = opened(objects)
        publish(log, 12)
        key = checkpoint_key("main", 16)
        body = canonical.open_body(objects.get(key), key)
        assert body is not None
        body["head"] = body["rows"][3]
        objects.put(key, canonical.seal_body(body))
        reopened = opened(objects)
        assert reopened.refresh() == log.state, "the begin after it names another head"
        assert reopened.rows() == log.rows()

    @pytest.mark.parametrize("n", [3, 8, 12])
    def test_a_log_that_lost_its_end_is_an_error(self, objects: Watched, n: int) -> None:
        log = opened(objects)
        publish(log, n)
        objects.delete(record_key("main", 2 * n - 1))
        with pytest.raises(IntegrityError, match="the log record is missing") as caught:
            opened(objects).refresh()
        assert caught.value.key == record_key("main", 2 * n - 1)

    def test_a_log_that_lost_everything_is_an_error(self, objects: Watched) -> None:
        log = opened(objects)
        publish(log, 8)
        for seq in range(16):
            objects.delete(record_key("main", seq))
        with pytest.raises(IntegrityError, match="missing"):
            opened(objects).refresh()

    def test_a_hint_that_promises_too_much_is_an_error(self, objects: Watched) -> None:
        log = opened(objects)
        publish(log, 2)
        write_hint(objects, LineState("main", 10**15, "0" * 64), None)
        objects.requests.clear()
        with pytest.raises(IntegrityError, match="at least 1000000000000000 records") as caught:
            opened(objects).refresh()
        assert "delete log/main/latest.json, which is derived" in str(caught.value)
        assert len(objects.requests) < 40, "whatever it promises"
        objects.delete(hint_key("main"))
        assert opened(objects).refresh() == log.state


class Cached(Watched):
    """Gives wrong records until it is asked past its cache."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.wrong: dict[str, bytes] = {}
        self.doubts: list[float] = []

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        return self.wrong[key] if key in self.wrong else super().get(key, start, stop, sha256=sha256)

    def doubt(self, for_s: float) -> None:
        self.doubts.append(for_s)
        self.wrong.clear()


class TestWrongAnswers:
    """A cache, or a backend, once said something else than the record that stands."""

    @pytest.fixture
    def objects(self) -> Cached:
        return Cached(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store")))

    def other(self, n: int) -> bytes:
        """Return record `n`, a begin, of another history."""
        writer = Writer(Watched(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store"))))
        writer.versions(n // 2)
        return begin(writer.state, owner="somebody else").to_bytes()

    @pytest.mark.parametrize("n", [0, 4])
    def test_a_wrong_last_record_is_not_kept(self, objects: Cached, n: int) -> None:
        """It is legal where it stands: what comes after it shows that it is wrong."""
        writer = Writer(objects.inner)
        writer.versions(n // 2)
        writer.put(begin(writer.state))
        objects.wrong[record_key("main", n)] = self.other(n)
        log = opened(objects)
        assert log.refresh().last_sha256 != writer.state.last_sha256
        if n:  # by a backend, once; else by a cache
            objects.wrong.clear()
        writer.put(commit(writer.state))
        assert log.refresh() == writer.state
        assert (log.rows(), len(objects.doubts)) == (list(writer.state.rows), 3), "the hint, and the records twice"

    @pytest.mark.parametrize("data", [b"damaged", b"", b'{"format":"dcr-log"}'])
    @pytest.mark.parametrize("seq", [0, 3, 5])
    def test_a_damaged_answer_is_asked_for_again(self, objects: Cached, seq: int, data: bytes) -> None:
        writer = Writer(objects.inner)
        writer.versions(3)
        objects.wrong[record_key("main", seq)] = data
        log = opened(objects)
        assert log.refresh() == writer.state
        requests = len(objects.requests)
        log.refresh()
        assert len(objects.requests) == requests + 1

    def test_a_record_said_to_be_missing_is_asked_for_again(self, objects: Cached) -> None:
        log = opened(Watched(objects.inner))
        publish(log, 3)

        def forget(method: str, key: str) -> None:
            if key == record_key("main", 5) and not objects.doubts:
                raise NotFoundError("not yet", key=key)

        objects.before = forget
        assert opened(objects).refresh() == log.state

    def test_a_log_that_is_wrong_indeed_leaves_the_state(self, objects: Cached) -> None:
        """Whatever was folded stays readable, and the next refresh tries again."""
        log = opened(objects)
        publish(log, 9)
        reader = opened(objects)
        state = reader.refresh()
        key = record_key("main", 3)
        right = objects.get(key)
        objects.put(key, b"damaged")
        objects.put(record_key("main", 18), b"damaged too")
        for _ in range(2):
            with pytest.raises(FormatError) as caught:
                reader.refresh()
            assert caught.value.key == key
            assert reader.state == state
        objects.delete(record_key("main", 18))
        publish(log, 1)
        assert reader.refresh().length == 20, "from where it was: what is before its checkpoint is not read"
        objects.put(key, right)
        assert opened(objects).refresh() == reader.state


N = 10_000


@pytest.fixture(scope="module")
def long() -> tuple[Watched, Writer]:
    """10,000 versions, their records written directly, and the derived documents that publishing would leave."""
    from dcr_store.log import checkpoints

    objects = Watched(holding_store(open_objects(f"memory://{secrets.token_hex(8)}/store")))
    writer = Writer(objects)
    state, newest = empty(), None
    for n in range(N):
        writer.versions(1)
        state = LineState("main", writer.state.length, writer.state.last_sha256, writer.state.head, None,
                          (*state.rows, writer.state.rows[-1]), state.segments)  # fmt: skip
        # Keeps the test quick: the writer's own rows are not needed.
        writer.state = LineState("main", writer.state.length, writer.state.last_sha256, writer.state.head)
        if (n + 1) % 512 == 0 or n + 1 == N // 8 * 8:
            newest = state.length
            state = checkpoints.write_checkpoint(objects, state, STORE_SHA256)
    checkpoints.write_hint(objects, state, newest)
    return objects, writer


class TestLongLine:
    def test_opens_from_its_checkpoint(self, long: tuple[Watched, Writer]) -> None:
        objects, writer = long
        objects.requests.clear()
        log = opened(objects)
        state = log.refresh()
        assert len(objects.requests) <= 6
        assert state.length == 2 * N
        assert state.head == writer.state.head
        assert len(state.segments) == N // 512
        assert len(state.rows) == N % 512

    def test_the_next_version_costs_no_more(self, long: tuple[Watched, Writer]) -> None:
        objects, _ = long
        copy = Watched(objects.inner)
        log = opened(copy)
        log.append(begin)
        log.append(abort)
        assert len(copy.requests) <= 12

    def test_all_versions(self, long: tuple[Watched, Writer]) -> None:
        objects, _ = long
        log = opened(objects)
        log.refresh()
        objects.requests.clear()
        assert [row.version for row in log.rows()] == list(range(N))
        assert len(objects.requests) == N // 512
        log.rows()
        assert len(objects.requests) == N // 512, "segments are kept"

    @pytest.mark.parametrize("version", [0, 511, 512, 513, 5000, 9727, 9728, 9999])
    def test_one_version(self, long: tuple[Watched, Writer], version: int) -> None:
        objects, _ = long
        log = opened(objects)
        log.refresh()
        objects.requests.clear()
        row = log.row(version)
        assert row is not None
        assert (row.version, row.seq, row.root) == (version, 2 * version + 1, digits(f"main@{version}", 64))
        assert log.row(N) is None
        assert len(objects.requests) <= 5, "bisected"

    @pytest.mark.parametrize("how", ["missing", "damaged"])
    def test_a_lost_segment_is_folded_again(self, objects: Watched, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        monkeypatch.setattr("dcr_store.log.checkpoints.SEGMENT_VERSIONS", 16)
        log = opened(objects)
        publish(log, 60)
        assert log.state.segments == (32, 64, 96)
        expected = [row.version for row in log.rows()]
        assert expected == list(range(60))
        for key in (checkpoint_key("main", 32), checkpoint_key("main", 64)):
            if how == "missing":
                objects.delete(key)
            else:
                objects.put(key, b"damaged")
        reopened = opened(objects)
        reopened.refresh()
        assert reopened.rows() == log.rows()
        assert [reopened.row(n) for n in range(60)] == log.rows()

    def test_segments_through_publishing(self, objects: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
        """As 512 and 8 in the product, with 4 and 2: rows never stand twice, none is left out."""
        monkeypatch.setattr("dcr_store.log.checkpoints.SEGMENT_VERSIONS", 4)
        monkeypatch.setattr(line_module, "CHECKPOINT_VERSIONS", 2)
        writer = opened(objects)
        for n in range(1, 30):
            publish(writer, 1)
            assert [row.version for row in writer.rows()] == list(range(n))
            reader = opened(objects)
            assert reader.refresh() == writer.state
            assert reader.rows() == writer.rows()
        assert len(writer.state.segments) == 7

    def test_segments_that_leave_a_version_out_are_an_error(
        self, objects: Watched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from dcr_store.format import canonical

        monkeypatch.setattr("dcr_store.log.checkpoints.SEGMENT_VERSIONS", 8)
        log = opened(objects)
        publish(log, 20)
        key = checkpoint_key("main", 16)
        body = canonical.open_body(objects.get(key), key)
        assert body is not None
        del body["rows"][3]
        objects.put(key, canonical.seal_body(body))
        reopened = opened(objects)
        reopened.refresh()
        with pytest.raises(IntegrityError, match="leave out a version"):
            reopened.row(5)
