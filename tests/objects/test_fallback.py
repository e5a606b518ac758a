"""Several ways to one store: what is asked of whom, and what a put means that begins at one and ends at another."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

import pytest
from watched import Watched

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError, OutcomeUnknownError, StorageError
from dcr_store.objects.fallback import FallbackObjects
from dcr_store.objects.open import open_objects
from dcr_store.objects.retry import RetryPolicy, TransientError

IMPATIENT = RetryPolicy(deadline_s=0.5, unreachable_s=0.5, first_delay_s=0.02, longest_delay_s=0.1)
RIGHT = hashlib.sha256(b"right").hexdigest()


def unreachable(method: str, key: str) -> None:
    raise StorageError("no connection (injected)", key=key) from TransientError("no connection", sent=False)


def refused(method: str, key: str) -> None:
    raise StorageError("permission denied (injected)", key=key)


def unanswered(method: str, key: str) -> None:
    if method == "put_if_absent":
        raise OutcomeUnknownError("no answer (injected)", key=key)


class Ways:
    """Two ways to one store, each of which can be broken."""

    def __init__(self) -> None:
        url = f"memory://{secrets.token_hex(8)}"
        self.first, self.second = Watched(open_objects(url)), Watched(open_objects(url))
        self.told: list[str] = []
        self.objects = FallbackObjects([self.first, self.second], IMPATIENT, self.told.append)
        self.store = open_objects(url)


@pytest.fixture
def ways() -> Ways:
    return Ways()


def test_the_first_is_asked_while_it_works(ways: Ways) -> None:
    ways.objects.put("a", b"right")
    assert ways.objects.get("a") == b"right"
    assert ways.objects.size("a") == 5
    assert ways.objects.list("") == {"a": 5}
    assert list(ways.objects.list_names("")) == ["a"]
    assert ways.second.requests == []
    with pytest.raises(NotFoundError):
        ways.objects.get("b")
    assert ways.second.requests == []


def test_one_that_failed_is_named_and_asked_last_for_a_while(ways: Ways) -> None:
    ways.store.put("a", b"right")
    ways.first.before = unreachable
    for _ in range(3):
        assert ways.objects.get("a") == b"right"
    assert ways.first.count(None, "a") == 0
    assert len(ways.first.requests) == 1  # its store document; then it was passed by
    assert len(ways.told) == 1
    assert "no connection" in ways.told[0]


def test_an_object_of_known_content_is_looked_for_everywhere(ways: Ways) -> None:
    ways.first.inner = open_objects(f"memory://{secrets.token_hex(8)}")
    ways.store.put("a", b"right")
    assert ways.objects.get("a", sha256=RIGHT) == b"right"
    assert b"".join(ways.objects.stream("a", RIGHT)) == b"right"
    with pytest.raises(NotFoundError):
        ways.objects.get("b", sha256=RIGHT)
    with pytest.raises(NotFoundError):
        list(ways.objects.stream("b", RIGHT))


def test_wrong_bytes_are_named_and_the_right_ones_found(ways: Ways) -> None:
    ways.first.inner = open_objects(f"memory://{secrets.token_hex(8)}")
    ways.first.inner.put("a", b"wrong")
    ways.store.put("a", b"right")
    assert ways.objects.get("a", sha256=RIGHT) == b"right"
    assert len(ways.told) == 1
    assert hashlib.sha256(b"wrong").hexdigest() in ways.told[0]


def test_a_stream_of_wrong_bytes_fails_and_the_next_one_is_right(ways: Ways) -> None:
    ways.first.inner = open_objects(f"memory://{secrets.token_hex(8)}")
    ways.first.inner.put("a", b"wrong")
    ways.store.put("a", b"right")
    with pytest.raises(IntegrityError) as caught:
        list(ways.objects.stream("a", RIGHT))
    assert caught.value.found == hashlib.sha256(b"wrong").hexdigest()
    assert list(ways.objects.stream("a", RIGHT)) == [b"right"]


def test_a_wrong_hash_of_a_caller_does_not_discredit_who_is_honest(ways: Ways) -> None:
    ways.store.put("a", b"right")
    wrong = hashlib.sha256(b"what nobody has").hexdigest()
    for call in (lambda: list(ways.objects.stream("a", wrong)), lambda: ways.objects.get("a", sha256=wrong)):
        with pytest.raises(IntegrityError):
            call()
    assert ways.told == []
    ways.objects.get("a")
    assert ways.first.requests[-1] == ("get", "a")
    assert ways.objects.get("a", sha256=RIGHT) == b"right"


def test_wrong_bytes_of_a_stream_are_named_once_another_has_the_right_ones(ways: Ways) -> None:
    ways.first.inner = open_objects(f"memory://{secrets.token_hex(8)}")
    ways.first.inner.put("a", b"wrong")
    ways.store.put("a", b"right")
    with pytest.raises(IntegrityError):
        list(ways.objects.stream("a", RIGHT))
    assert ways.told == []
    assert list(ways.objects.stream("a", RIGHT)) == [b"right"]
    assert len(ways.told) == 1
    assert hashlib.sha256(b"wrong").hexdigest() in ways.told[0]
    ways.objects.get("a")
    assert ways.second.requests[-1] == ("get", "a")  # the first one is passed by for a while


def test_wrong_bytes_everywhere_are_an_error_at_once(ways: Ways) -> None:
    ways.store.put("a", b"wrong")
    with pytest.raises(IntegrityError):
        ways.objects.get("a", sha256=RIGHT)
    for _ in range(3):
        with pytest.raises(IntegrityError):
            list(ways.objects.stream("a", RIGHT))
    assert ways.first.count("get", "a") == ways.second.count("get", "a") == 2  # the third stream asked nobody


@pytest.mark.parametrize("break_", [unreachable, refused])
def test_nobody_answers(ways: Ways, break_: Callable[[str, str], None]) -> None:
    ways.first.before = ways.second.before = break_
    for call in (
        lambda: ways.objects.get("a"),
        lambda: list(ways.objects.stream("a", RIGHT)),
        lambda: ways.objects.list(""),
        lambda: ways.objects.put("a", b""),
        lambda: ways.objects.put_if_absent("a", b""),
    ):
        before = len(ways.first.requests)
        with pytest.raises(StorageError, match=r"\(injected\)"):
            call()
        # Another try does not help who is refused.
        assert (len(ways.first.requests) == before + 1) == (break_ is refused)


# ---------------------------------------------------------------------- conditional puts


def test_a_put_of_which_the_first_lost_the_answer_is_ours(ways: Ways) -> None:
    def land_and_lose(method: str, key: str) -> None:
        if method == "put_if_absent":
            assert ways.store.put_if_absent(key, b"mine")
            raise OutcomeUnknownError("no answer (injected)", key=key)

    ways.first.before = land_and_lose
    assert ways.objects.put_if_absent("log/7", b"mine")
    assert ways.second.count("put_if_absent") == 1


def test_a_put_that_another_was_faster_with_is_a_conflict(ways: Ways) -> None:
    ways.first.before = unanswered
    ways.second.before = lambda method, key: method == "put_if_absent" and ways.store.put(key, b"other")
    assert not ways.objects.put_if_absent("log/7", b"mine")


def test_a_lost_answer_stays_unknown_while_nobody_knows(ways: Ways) -> None:
    ways.first.before, ways.second.before = unanswered, unreachable
    with pytest.raises(OutcomeUnknownError):
        ways.objects.put_if_absent("log/7", b"mine")


def test_a_put_that_nobody_was_sent_is_not_unknown(ways: Ways) -> None:
    ways.first.before = ways.second.before = unreachable
    with pytest.raises(StorageError, match="cannot create"):
        ways.objects.put_if_absent("log/7", b"mine")


def test_one_that_only_refuses_to_write_goes_on_to_be_read_from(ways: Ways) -> None:
    """A relay that passes no versions on, before the bucket itself."""

    def forbid(method: str, key: str) -> None:
        if method.startswith("put"):
            refused(method, key)

    ways.first.before = forbid
    ways.store.put("b", b"right")
    assert ways.objects.get("b") == b"right"
    assert ways.objects.put_if_absent("log/7", b"mine")
    ways.objects.put("a", b"right")
    ways.objects.get("b")
    ways.objects.get("b")
    assert ways.first.requests[-1] == ("get", "b")
    assert ways.told == []


# ---------------------------------------------------------------------- one store


def test_stores_that_differ_are_refused(ways: Ways) -> None:
    ways.first.inner = open_objects(f"memory://{secrets.token_hex(8)}")
    ways.first.inner.put("dcr.json", b"one")
    ways.store.put("dcr.json", b"another")
    assert ways.objects.get("dcr.json") == b"one"
    ways.first.before = unreachable
    for call in (lambda: ways.objects.get("a"), lambda: ways.objects.put_if_absent("a", b"")):
        with pytest.raises(InvalidInputError, match="different stores"):
            call()
    assert ways.store.list("") == {"dcr.json": 7}


def test_short_lived_answers_of_the_next_are_doubted(ways: Ways) -> None:
    """They may be older than what the first one told."""
    doubted: list[float] = []
    ways.second.doubt = doubted.append  # type: ignore[attr-defined]
    ways.store.put("a", b"right")
    ways.objects.get("a")
    assert doubted == []
    ways.first.before = unreachable
    asked: list[int] = []
    ways.second.before = lambda method, key: asked.append(len(doubted))
    ways.objects.get("a")
    assert doubted
    assert min(doubted) >= 1
    assert min(asked) >= 1  # its first answer as well, that of whether it is of the same store too
    n_doubts = len(doubted)
    ways.objects.get("a")
    assert len(doubted) == n_doubts


@pytest.mark.parametrize("known", [RIGHT, None])
def test_short_lived_answers_of_the_first_are_doubted_when_it_is_back(
    ways: Ways, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcr_store.objects import fallback

    monkeypatch.setattr(fallback, "AWAY_S", 0.05)
    doubted: list[float] = []
    ways.first.doubt = doubted.append  # type: ignore[attr-defined]
    ways.store.put("a", b"right")
    ways.first.before = unreachable
    ways.objects.get("a")
    time.sleep(0.06)
    asked: list[int] = []
    ways.first.before = lambda method, key: asked.append(len(doubted))
    if known:
        assert list(ways.objects.stream("a", known)) == [b"right"]
    else:
        assert ways.objects.get("a") == b"right"
    assert min(asked) >= 1


def test_an_empty_place_beside_a_store_is_passed_by(ways: Ways) -> None:
    """A bucket's prefix with a typo, a directory that is not mounted: nothing is put there, nothing is missing."""
    empty = open_objects(f"memory://{secrets.token_hex(8)}")
    ways.second.inner = empty
    ways.store.put("dcr.json", b"store")
    ways.store.put("log/0", b"record")
    assert ways.objects.get("log/0") == b"record"
    ways.first.before = unreachable
    for call in (
        lambda: ways.objects.get("log/0"),
        lambda: ways.objects.size("log/0"),
        lambda: ways.objects.list("log/"),
        lambda: ways.objects.put("log/1", b"mine"),
        lambda: ways.objects.put_if_absent("log/1", b"mine"),
        lambda: list(ways.objects.stream("log/0", RIGHT)),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert not isinstance(caught.value, NotFoundError)
    assert empty.list("") == {}
    assert any("holds no store" in told for told in ways.told)
    ways.first.before = None
    assert ways.objects.get("log/0") == b"record"


def test_a_store_is_created_where_there_is_none_yet(ways: Ways) -> None:
    ways.first.before = unreachable
    assert ways.objects.put_if_absent("dcr.json", b"store")
    ways.first.before = None
    assert ways.objects.get("dcr.json") == b"store"


def test_no_upstream_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no upstream"):
        FallbackObjects([])
