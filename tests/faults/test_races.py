"""Several publishers, lost answers, and sleepers: the log stays linear, each commit happens once, everyone is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults.processes import Nursery
from faults.scenes import OCCURRENCES, SEED, SMALL, Place, assert_checkpoint
from servers import FaultProxy, SeaweedS3
from states import assert_same

import dcr_store
from dcr_store.errors import ConflictError, FencedError, InvalidInputError, OutcomeUnknownError
from dcr_store.objects import s3
from dcr_store.objects.retry import RetryPolicy
from dcr_store.publish.transaction import Transaction
from dcr_store.store import Store

N_RACERS = 8


def race(nursery: Nursery, place: Place, n_racers: int, n_commits: int, **options: object) -> int:
    """Let processes race; check that every commit is there once, in order; return how often one was told to wait."""
    children = [nursery.start(do="race", racer=racer, n=n_commits, **place.job, **options) for racer in range(n_racers)]
    outcomes = [child.wait() for child in children]
    assert all(outcome.ok for outcome in outcomes), [outcome.message for outcome in outcomes]
    store = place.open()
    infos = store.log()
    found = [(info.metadata["racer"], info.metadata["nth"]) for info in infos]
    assert sorted(found) == [(racer, nth) for racer in range(n_racers) for nth in range(n_commits)]
    for racer, outcome in enumerate(outcomes):
        own = [info for info in infos if info.metadata["racer"] == racer]
        assert [info.metadata["nth"] for info in own] == list(range(n_commits))
        assert [info.root for info in own] == outcome.told["roots"]
    bases = [info.base for info in infos]
    assert bases == [None, *(info.version for info in infos[:-1])]
    report = store.verify(deep=True)
    assert report.ok, report.problems
    for info in infos[:: max(1, len(infos) // 5)]:
        value = 1000 * info.metadata["racer"] + info.metadata["nth"]
        assert_same(store.read(info.version), {"weight": np.full(256, value, np.int32)})
    return sum(outcome.told["conflicts"] for outcome in outcomes)


def test_eight_publishers_of_one_line(nursery: Nursery, place: Place) -> None:
    place.create()
    n_commits = 4 if place.options is None else OCCURRENCES
    assert race(nursery, place, N_RACERS, n_commits) > 0


def test_answers_are_lost_while_publishers_race(nursery: Nursery, seaweed: SeaweedS3) -> None:
    with FaultProxy(seaweed.endpoint_url, seed=SEED) as proxy:
        place = Place(seaweed.new_url(), seaweed.options_at(proxy.endpoint_url), seaweed.storage_options)
        place.create()
        faults = [
            proxy.add("drop_answer", "PUT", times=None, probability=0.08),
            proxy.add("drop_answer", "PUT", key="/log/", times=None, probability=0.3),
            proxy.add("reset", times=None, probability=0.03),
            proxy.add("answer", times=None, probability=0.03, status=500, code="InternalError"),
            proxy.add("answer", "PUT", times=None, probability=0.05, status=503, code="SlowDown"),
            proxy.add("answer", "PUT", key="/log/", times=None, probability=0.1, status=409, code="OperationAborted"),
            proxy.add("delay", times=None, probability=0.03, delay_s=0.3),
            proxy.add("truncate", "GET", times=None, probability=0.03),
        ]
        race(nursery, place, 3, OCCURRENCES)
        assert sum(fault.hits > 0 for fault in faults) >= 4


# ---------------------------------------------------------------------- outcomes that are not known


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let S3 operations of this process give up after half a second."""
    policy = RetryPolicy(deadline_s=0.5, unreachable_s=0.5, first_delay_s=0.02, longest_delay_s=0.1)
    monkeypatch.setattr(s3, "RetryPolicy", lambda: policy)


@pytest.fixture
def proxy(seaweed: SeaweedS3) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed.endpoint_url, seed=SEED) as proxy:
        yield proxy


@pytest.fixture
def lossy(seaweed: SeaweedS3, proxy: FaultProxy, hasty: None) -> Iterator[tuple[Store, Store]]:
    """A store with one version, reached through the proxy, and the same one reached directly."""
    url = seaweed.new_url()
    direct = Place(url, seaweed.storage_options, seaweed.storage_options).create(chunk_elements=64)
    with direct.begin() as transaction:
        transaction.write("w", np.arange(200, dtype=np.int32))
    store = dcr_store.open(url, storage_options=seaweed.options_at(proxy.endpoint_url))
    yield store, direct
    store.close()
    direct.close()


def _begun(store: Store) -> Transaction:
    transaction = store.begin(message="next")
    transaction.write("w", np.arange(200, dtype=np.int32) * 3)
    return transaction


def _assert_committed_once(direct: Store) -> None:
    infos = dcr_store.Store(direct._objects, direct._document, direct._catalog.store_sha256).log()
    assert [info.message for info in infos] == [None, "next"]
    assert direct.verify(deep=True).ok
    assert_same(direct.read(), {"w": np.arange(200, dtype=np.int32) * 3})


RECORD = r"/log/main/\d{20}\.json"
COMMIT_OF_1 = r"/log/main/0{19}3\.json"


@pytest.mark.parametrize("kind", ["drop_answer", "reset", "land_late", "answer"])
def test_one_lost_answer_is_no_conflict(lossy: tuple[Store, Store], proxy: FaultProxy, kind: str) -> None:
    store, direct = lossy
    transaction = _begun(store)
    fault = proxy.add(kind, "PUT", key=RECORD, times=1, status=500, delay_s=0.2)  # type: ignore[arg-type]
    assert transaction.commit().version == "main@1"
    assert fault.hits == 1
    _assert_committed_once(direct)


@pytest.mark.parametrize("kind", ["drop_answer", "reset", "land_late"])
def test_an_unknown_commit_is_told_as_unknown_and_found_out_later(
    lossy: tuple[Store, Store], proxy: FaultProxy, kind: str
) -> None:
    store, direct = lossy
    transaction = _begun(store)
    proxy.add(kind, "PUT", key=RECORD, times=None, delay_s=1.0)  # type: ignore[arg-type]
    proxy.add("reset", "GET", key=COMMIT_OF_1, times=None, skip=1)  # the look before the put succeeds
    with pytest.raises(OutcomeUnknownError) as caught:
        transaction.commit()
    assert caught.value.key is not None
    with pytest.raises(InvalidInputError, match="commit was tried"):
        transaction.write("v", np.zeros(3, np.int32))
    with pytest.raises(OutcomeUnknownError):
        transaction.commit()
    proxy.clear()
    assert transaction.commit().version == "main@1"
    assert transaction.commit().version == "main@1"
    _assert_committed_once(direct)


@pytest.mark.parametrize("kind", ["drop_answer", "reset"])
def test_an_unknown_commit_cannot_be_aborted_behind_its_back(
    lossy: tuple[Store, Store], proxy: FaultProxy, kind: str
) -> None:
    """The commit is put until it is there; only then another record is decided."""
    store, direct = lossy
    transaction = _begun(store)
    proxy.add(kind, "PUT", key=RECORD, times=None)  # type: ignore[arg-type]
    proxy.add("reset", "GET", key=COMMIT_OF_1, times=None, skip=1)  # the look before the put succeeds
    with pytest.raises(OutcomeUnknownError):
        transaction.commit()
    proxy.clear()
    transaction.abort()
    _assert_committed_once(direct)
    with store.begin(message="third") as third:
        third.write("w", np.zeros(200, np.int32))
    assert [info.message for info in direct.log()] == [None, "next", "third"]


def test_an_unknown_commit_that_somebody_followed_up(lossy: tuple[Store, Store], proxy: FaultProxy) -> None:
    store, direct = lossy
    transaction = _begun(store)
    proxy.add("drop_answer", "PUT", key=RECORD, times=None)
    proxy.add("reset", "GET", key=COMMIT_OF_1, times=None, skip=1)  # the look before the put succeeds
    with pytest.raises(OutcomeUnknownError):
        transaction.commit()
    with direct.begin(message="third") as third:
        third.write("w", np.zeros(200, np.int32))
    proxy.clear()
    assert transaction.commit().version == "main@1"
    assert [info.message for info in direct.log()] == [None, "next", "third"]
    assert direct.verify(deep=True).ok


def test_an_unknown_begin_is_taken_up_by_the_next(lossy: tuple[Store, Store], proxy: FaultProxy) -> None:
    store, direct = lossy
    proxy.add("drop_answer", "PUT", key=RECORD, times=None)
    proxy.add("reset", "GET", key=r"/log/main/0{19}2\.json", times=None, skip=1)
    with pytest.raises(OutcomeUnknownError):
        store.begin(message="next")
    proxy.clear()
    _begun(store).commit()
    _assert_committed_once(direct)


def test_a_commit_whose_answer_was_lost_while_another_owner_waits(
    lossy: tuple[Store, Store], proxy: FaultProxy
) -> None:
    """The lost answer of a begin is no licence for a second transaction: the other is refused."""
    store, direct = lossy
    proxy.add("drop_answer", "PUT", key=RECORD, times=1)
    transaction = _begun(store)
    with pytest.raises(ConflictError):
        direct.begin(message="intruder", owner="intruder")
    transaction.commit()
    _assert_committed_once(direct)


def test_puts_say_what_their_body_is(lossy: tuple[Store, Store], proxy: FaultProxy) -> None:
    """SeaweedFS stores an empty object when a client dies between head and body, unless the head holds a digest.

    An empty log record would stop the line for good.
    """
    store, _ = lossy
    _begun(store).commit()
    puts = [request for request in proxy.requests if request.method == "PUT" and request.nbytes < 1 << 20]
    assert len(puts) > 5
    for put in puts:
        digests = {name for name in put.headers if name == "content-md5" or name.startswith("x-amz-checksum-")}
        assert digests, put.path


# ---------------------------------------------------------------------- sleepers


SLEEPS = [
    (point, ending)
    for point in ("publish.partition.stored", "publish.proposal.stored", "log.commit.before")
    for ending in ("resumed", "replaced", "aborted")
]
SLOW = SLEEPS if OCCURRENCES > 1 else [("log.commit.before", "resumed")]  # the server is slow


@pytest.mark.parametrize(
    ("place", "point", "ending"),
    [*(("directory", *item) for item in SLEEPS), *(("s3", *item) for item in SLOW)],
    indirect=["place"],
)
def test_a_sleeper_never_commits(
    nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path], point: str, ending: str
) -> None:
    store = place.create()
    with store.begin() as transaction:
        transaction.write_checkpoint(checkpoints[0])
    job = {"do": "publish", **place.job, **SMALL, "message": "sleeper"}
    sleeper = nursery.start(**job, checkpoint=str(checkpoints[1]), stop=[point, 1])
    sleeper.wait_stopped()
    refused = nursery.run(**{**job, "message": "other"}, checkpoint=str(checkpoints[2]))
    assert (refused.ok, refused.kind) == (False, ConflictError.kind)
    if ending == "aborted":
        place.open().begin(message="other", takeover=True).abort()
        expected = [checkpoints[0]]
    else:
        message = "sleeper" if ending == "resumed" else "other"
        nursery.finish(**{**job, "message": message}, checkpoint=str(checkpoints[2]), takeover=True)
        expected = [checkpoints[0], checkpoints[2]]
    sleeper.signal(signal.SIGCONT)
    outcome = sleeper.wait()
    assert (outcome.ok, outcome.kind) == (False, FencedError.kind), outcome
    assert "taken over or aborted" in outcome.message
    fresh = place.open()
    assert fresh.verify(deep=True).ok
    assert len(fresh.log()) == len(expected)
    fresh.pull(scratch / "target")
    assert_checkpoint(scratch / "target", expected[-1])
    # The line goes on.
    nursery.finish(**job, checkpoint=str(checkpoints[1]))
    fresh.pull(scratch / "target")
    assert_checkpoint(scratch / "target", checkpoints[1])


def test_a_sleeper_whose_number_nobody_took_commits_late_and_once(
    nursery: Nursery, place: Place, scratch: Path, checkpoints: list[Path]
) -> None:
    place.create()
    sleeper = nursery.start(
        do="publish", **place.job, **SMALL, checkpoint=str(checkpoints[1]), stop=["log.commit.before", 1]
    )
    sleeper.wait_stopped()
    sleeper.signal(signal.SIGCONT)
    assert sleeper.wait().ok
    store = place.open()
    assert len(store.log()) == 1
    store.pull(scratch / "target")
    assert_checkpoint(scratch / "target", checkpoints[1])


def test_the_same_owner_fences_itself(nursery: Nursery, scratch: Path, checkpoints: list[Path]) -> None:
    """A launcher restarts a run that is not dead: the older process is told, the newer one commits."""
    place = Place(str(scratch / "store"))
    place.create()
    job = {"do": "publish", **place.job, **SMALL, "owner": "run-7", "checkpoint": str(checkpoints[0])}
    older = nursery.start(**job, stop=["publish.seal.before", 1])
    older.wait_stopped()
    points = nursery.finish(**job).points
    assert points["log.resume.after"] == 1
    assert "publish.partition.stored" not in points or points["publish.partition.stored"] < 3  # adopted
    older.signal(signal.SIGCONT)
    assert older.wait().kind == FencedError.kind
    store = place.open()
    assert len(store.log()) == 1
    assert store.verify(deep=True).ok
