"""Copies of stores: the same records and bits, only what is new; what is absent says so, damage is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from copies import (
    cloned,
    copied,
    copy_through,
    document,
    place,
    readable,
    require_no_waste,
    require_prefix,
    require_same_objects,
    require_state,
    require_whole_or_not_yet,
    step,
)
from histories import Past, first_state
from states import write_hf
from upkeep import KilledError, Mortal, through
from watched import Watched

import dcr_store
from dcr_store.errors import ConflictError, DcrError, FormatError, IntegrityError, InvalidInputError, NotFoundError
from dcr_store.exchange import copying
from dcr_store.format import canonical
from dcr_store.format.copies import Absent, chain_sha256, copy_document
from dcr_store.log import checkpoints, line
from dcr_store.ports import ObjectStore
from dcr_store.store import Store


def test_a_copy_has_the_same_records_bits_stamps_and_names(past: Past) -> None:
    copy = copied(past)
    require_prefix(past.store, copy)
    require_same_objects(past.store, copy)
    require_no_waste(copy)
    assert readable(past, copy) == set(past.names())
    for info in [*past.store.log("main"), *past.store.log("exp")]:
        stamp = f"{info.version}#{info.root[:12]}"
        assert copy._catalog.resolve(stamp).row.root == info.root
    assert copy.store_id == past.store.store_id
    assert [tag.to_json() for tag in copy.tags("main")] == [tag.to_json() for tag in past.store.tags("main")]
    assert [(tag.name, tag.version) for tag in copy.tags("exp")] == [("best", "exp@7")]
    assert copy.pins() == []
    report = copy.verify(deep=True)
    assert (report.problems, report.unreferenced) == ([], [])
    assert len(copy.log("main")) == 10
    source, mine = (json.loads(store._objects.get("dcr.json")) for store in (past.store, copy))
    assert mine == {**source, "features": ["copy"], "copy_of": canonical.sha256(past.store._objects.get("dcr.json"))}


def test_again_it_copies_nothing(past: Past) -> None:
    copy = copied(past)
    source, target = Watched(past.store._objects), Watched(copy._objects)
    found = copy_through(through(past.store, source), through(copy, target))
    assert (found.n_objects, found.nbytes, found.n_tags) == (0, 0, 0)
    assert [line.n_records for line in found.lines] == [0, 0]
    assert {method for method, _ in target.requests} <= {"get", "list", "size", "list_names"}
    assert not source.count(part="versions/")
    # Of each line: hint, checkpoint, last record, next one; on top what is absent, the hint again, the tags.
    assert len(source.requests) <= 25
    assert len(target.requests) <= 25


def test_what_came_since_is_all_that_is_copied(past: Past) -> None:
    copy = copied(past)
    step(past)
    source, target = Watched(past.store._objects), Watched(copy._objects)
    found = copy_through(through(past.store, source), through(copy, target))
    assert [(line.line, line.n_records, line.n_versions) for line in found.lines] == [("main", 2, 1), ("exp", 0, 0)]
    put = [key for method, key in target.requests if method in ("put", "put_if_absent") and key.startswith("versions/")]
    assert len(put) == len(set(put)) == found.n_objects
    assert {key.split("/")[2].partition("-")[0] for key in put} == {f"{10:012d}"}
    assert source.count("get", "versions/") <= 2 * len(put)
    assert readable(past, dcr_store.open(copy.url)) == set(past.names())


def test_files_that_versions_share_are_put_once(tmp_path: Path) -> None:
    state = {"w": np.arange(200, dtype=np.float32)}
    store = dcr_store.create(place(), chunk_elements=64)
    for number in range(3):
        state = {"w": state["w"] + number}
        with store.begin() as transaction:
            transaction.write_checkpoint(write_hf(tmp_path / f"{number}", state, 1, step=1))
    url = place()
    store.copy_to(url, lines=["main"])
    copy = dcr_store.open(url)
    with store.begin() as transaction:
        transaction.write_checkpoint(write_hf(tmp_path / "3", {"w": state["w"] + 1}, 1, step=1))
    target = Watched(copy._objects)
    copy_through(store, through(copy, target))
    assert target.count("put", "/files/") == 0, "they are in the copy since the first version"
    copy.checkout("main", tmp_path / "out")
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "3/config.json").read_bytes()


def test_since_begins_with_the_first_version_that_is_stored_whole(past: Past) -> None:
    copy = copied(past, since="main@3")
    assert copy.lines() == ["main"], "a version names its line"
    require_prefix(past.store, copy)
    assert readable(past, copy) == {f"main@{number}" for number in range(5, 10)}
    absent = document(copy, "absent/main.json")
    assert (absent["since"], absent["versions"], absent["deltas"]) == (3, [[0, 4]], [[0, 5]])
    assert len(absent["edges"]) == 1, "the fold leads to what is left out"  # type: ignore[arg-type]
    report = copy.verify(deep=True)
    assert (report.problems, report.unreferenced) == ([], [])
    assert copy._catalog.resolve(f"main@2#{past.store.log('main')[2].root}").name == "main@2", "a stamp still resolves"
    with pytest.raises(NotFoundError, match="not in this copy"):
        copy.diff("main@2", "main@6")
    # What follows comes without what is before; the fork goes on from what is there.
    step(past)
    past.store.copy_to(copy.url)
    copy = dcr_store.open(copy.url)
    assert readable(past, copy) == {*(f"main@{n}" for n in range(5, 11)), *(f"exp@{n}" for n in range(5, 9))}
    # Earlier than what was left out: brought after all, and again nothing is left to do.
    past.store.copy_to(copy.url, since="main@0")
    copy = dcr_store.open(copy.url)
    assert readable(past, copy) == set(past.names())
    require_no_waste(copy)
    assert past.store.copy_to(copy.url).n_objects == 0


def test_what_is_left_out_has_its_layout_in_the_copy(tmp_path: Path) -> None:
    past = Past(dcr_store.create(place()))
    state = first_state(np.random.default_rng(5))
    del state["c"]  # safetensors have no complex128
    past.publish("main", state)
    past.publish("main", {**state, "more": np.arange(9)})
    copy = copied(past, since="main@1")
    assert copy._objects.list("layouts/").keys() == past.store._objects.list("layouts/").keys()
    with pytest.raises(NotFoundError, match="not in this copy"):
        copy.read("main@0")
    found = copy.identify(write_hf(tmp_path / "old", state))
    assert (found.versions, found.expired, found.is_exact) == (("main@0",), ("main@0",), True)
    assert copy.report("main@0").first == 0


def test_since_a_version_that_nothing_whole_follows(past: Past) -> None:
    with pytest.raises(InvalidInputError, match="dcr anchor SOURCE main@9"):
        past.store.copy_to(place(), since="main@7")
    past.store.anchor("main@8")
    copy = copied(past, since="main@7")
    assert readable(past, copy) == {"main@8", "main@9"}


def test_a_fork_brings_the_line_that_it_goes_on_from(past: Past) -> None:
    past.fork("exp", 8, "more")
    step(past, "more")
    copy = copied(past, lines=["more"])
    assert copy.lines() == ["exp", "main", "more"]
    assert readable(past, copy) == set(past.names())
    with pytest.raises(NotFoundError, match="no version on line 'other'"):
        past.store.copy_to(place(), lines=["other"])


def test_expired_versions_stay_expired_and_their_ends_are_collected_in_the_copy_too(past: Past) -> None:
    early = copied(past)
    past.store.expire("main", keep_last=2, keep_every=4)
    past.store.gc(grace_s=0)
    late = copied(past)
    kept = past.kept()
    assert readable(past, late) == kept
    require_no_waste(late)
    # A copy from before has what expired since, and lets go of it by its own clock.
    past.store.copy_to(early.url)
    early = dcr_store.open(early.url)
    assert readable(past, early) == kept
    n_records = len(early._objects.list("log/main/"))
    assert early.gc(grace_s=3600).keys == []
    assert early.gc(grace_s=0, dry_run=True).nbytes == early.gc(grace_s=0).nbytes > 0
    assert len(early._objects.list("log/main/")) == n_records, "a copy's log has its source's records alone"
    require_no_waste(early)
    for copy in (early, late):
        assert copy.verify(deep=True).ok
        assert set(copy._objects.list("layouts/")) == set(past.store._objects.list("layouts/"))


def test_what_expires_and_is_collected_under_the_copying(past: Past) -> None:
    source, target = Watched(past.store._objects), dcr_store.open(copied(past, lines=["main"]).url)
    url = place()
    past.store.copy_to(url, lines=["exp"])
    for _ in range(3):
        step(past)
    n_objects = [0]

    def before(method: str, key: str) -> None:
        if method == "get" and key.startswith("versions/main/000000000011"):
            source.before = None
            n_objects[0] += 1
            past.store.expire("main", keep_last=1)
            past.store.gc(grace_s=0)

    source.before = before
    copy_through(through(past.store, source), target, ["main"])
    assert n_objects == [1]
    copy = dcr_store.open(target.url)
    assert readable(past, copy) == {name for name in past.kept() if name.startswith("main")}
    assert copy.verify(deep=True).ok


def test_at_each_moment_it_is_a_store_and_killed_it_goes_on(past: Past) -> None:
    """Each request of a copying in turn is its last; what is there then reads right or says that it is not here."""
    begun = copied(past, lines=["main"], since="main@4")  # with less, so that all branches are met
    past.store.expire("main", keep_last=3)
    past.store.gc(grace_s=0)
    step(past)
    kept = {name for name in past.kept() if name.startswith("main")}
    assert kept - readable(past, begun)
    dies_at, n_looked, first = 1, 0, past.store._catalog.resolve("main@2")
    while True:
        target = cloned(begun)
        try:
            mortal = Mortal(target._objects, dies_at, after=dies_at % 2 == 0)
            copying.copy(past.store._catalog, through(target, mortal)._catalog, ["main"], first)
        except KilledError:
            require_prefix(past.store, target)
            n_looked += 1
            require_whole_or_not_yet(past, dcr_store.open(target.url))
            past.store.copy_to(target.url, lines=["main"], since="main@0")
            copy = dcr_store.open(target.url)
            copy.gc(grace_s=0)
            require_no_waste(copy)
            if dies_at % 4 == 0:
                assert readable(past, copy) == kept
            dies_at += 5
            continue
        break
    assert n_looked >= 10


DAMAGE = {
    "partition flip": lambda key: "/mask/c/" in key,
    "partition lose": lambda key: "/mask/c/" in key,
    "manifest flip": lambda key: key.endswith("manifest.json"),
    "manifest lose": lambda key: key.endswith("manifest.json"),
    "seal flip": lambda key: "/journal/" in key,
    "contributions cut": lambda key: key.endswith("contributions.bin"),
    "digests flip": lambda key: "/digests/" in key and "/c/" in key,
    "record flip": None,
    "record lose": None,
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_in_the_source_is_named_and_goes_no_further(past: Past, case: str) -> None:
    objects, is_it, harm = past.store._objects, DAMAGE[case], case.rpartition(" ")[2]
    of_version = [key for key in sorted(objects.list("versions/main/")) if "000000000007" in key]
    key = "log/main/00000000000000000015.json" if is_it is None else next(filter(is_it, of_version))
    data = objects.get(key)
    if harm == "lose":
        objects.delete(key)
    else:
        objects.put(key, data[:-1] if harm == "cut" else data[:20] + bytes([data[20] ^ 1]) + data[21:])
    url = place()
    source = dcr_store.open(past.store.url)
    with pytest.raises((IntegrityError, FormatError)) as caught:
        source.copy_to(url)
    assert key in str(caught.value)
    copy = dcr_store.open(url)
    assert key not in copy._objects.list("")
    # The log's own end is another matter: without its records no line is copied at all.
    if key.startswith("versions/"):
        assert {info.version for info in copy.log("main")} <= {f"main@{number}" for number in range(7)}
        require_whole_or_not_yet(past, copy)
    objects.put(key, data)
    dcr_store.open(past.store.url).copy_to(url)
    require_no_waste(dcr_store.open(url))


def test_a_manifest_that_names_no_object_of_a_version(past: Past) -> None:
    """A hostile source cannot have records, or a store document, put in the copy past its log."""
    copy = copied(past)
    step(past)
    row = past.store._catalog.resolve("main").row
    manifest = json.loads(past.store._objects.get(row.manifest.key))
    victim = "log/main/99999999999999999999.json"
    past.store._objects.put(victim, b"{}")
    manifest["digests"]["u16"]["zarr"] = {"key": victim, "sha256": canonical.sha256(b"{}"), "nbytes": 2}
    data = canonical.encode(manifest)
    past.store._objects.put(row.manifest.key, data)
    seq = row.seq
    record = json.loads(past.store._objects.get(f"log/main/{seq:020d}.json"))
    record["manifest"] |= {"sha256": canonical.sha256(data), "nbytes": len(data)}
    past.store._objects.put(f"log/main/{seq:020d}.json", canonical.encode(record))
    for key in past.store._objects.list("log/main/checkpoints/"):
        past.store._objects.delete(key)
    past.store._objects.delete("log/main/latest.json")
    with pytest.raises(FormatError, match="below versions/"):
        dcr_store.open(past.store.url).copy_to(copy.url)
    assert victim not in copy._objects.list("log/")


def test_a_line_that_has_gone_on_in_the_copy(past: Past) -> None:
    copy = copied(past)
    step(past)
    length = copy._catalog.fresh("main").state.length
    record = json.loads(past.store._objects.get(f"log/main/{length:020d}.json"))
    copy._objects.put(f"log/main/{length:020d}.json", canonical.encode({**record, "owner": "another"}))
    with pytest.raises(ConflictError, match="gone on in the copy by itself") as caught:
        past.store.copy_to(copy.url)
    assert f"log/main/{length:020d}.json" in str(caught.value)
    step(past)
    with pytest.raises(ConflictError, match="gone on in the copy by itself") as caught:
        past.store.copy_to(copy.url)
    assert f"log/main/{length:020d}.json" in str(caught.value)


def test_a_record_put_by_somebody_else_meanwhile(past: Past) -> None:
    copy = copied(past)
    step(past)
    log = copy._catalog.fresh("main")
    data = past.store._objects.get(f"log/main/{log.state.length:020d}.json")
    other = canonical.encode({**json.loads(data), "owner": "another"})
    copy._objects.put(f"log/main/{log.state.length:020d}.json", other)
    with pytest.raises(ConflictError, match="another record than the source"):
        log.adopt(data)


def test_a_source_that_was_set_back(past: Past) -> None:
    earlier = {key: past.store._objects.get(key) for key in past.store._objects.list("")}
    url = place()
    older = dcr_store.store.open_objects(url)
    for key, data in earlier.items():
        older.put(key, data)
    copy = copied(past)
    step(past)
    past.store.copy_to(copy.url)
    with pytest.raises(ConflictError, match="log is longer"):
        dcr_store.open(url).copy_to(copy.url)


def test_places_that_are_no_copy_of_the_source(past: Past, tmp_path: Path) -> None:
    copy = copied(past)
    other = dcr_store.create(place(), chunk_elements=64)
    with pytest.raises(InvalidInputError, match="is a store, and no copy"):
        past.store.copy_to(other.url)
    with pytest.raises(InvalidInputError, match="swapped"):
        copy.copy_to(past.store.url)
    with pytest.raises(InvalidInputError, match="copy of another store"):
        other.copy_to(copy.url)
    with pytest.raises(InvalidInputError, match="is the source"):
        past.store.copy_to(past.store.url)
    with pytest.raises(InvalidInputError, match="of another line"):
        past.store.copy_to(place(), lines=["exp"], since="main@5")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(InvalidInputError, match="this is a checkpoint"):
        past.store.copy_to(tmp_path)


REFUSED: dict[str, Callable[[Store], object]] = {
    "begin": lambda store: store.begin(),
    "join": lambda store: store.join(writer="w1", timeout_s=0),
    "anchor": lambda store: store.anchor("main@3"),
    "fold": lambda store: store.fold("main@3", "main@8"),
    "expire": lambda store: store.expire("main"),
    "tag": lambda store: store.tag("main@3", "x"),
    "delete_tag": lambda store: store.delete_tag("main", "early"),
    "pin": lambda store: store.pin("main@3", "x"),
    "fork": lambda store: store.fork("main@3", "x"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_copy_takes_nothing_of_its_own_until_it_is_detached(past: Past, what: str) -> None:
    copy = copied(past)
    before = {key: copy._objects.get(key) for key in copy._objects.list("")}
    with pytest.raises(InvalidInputError, match="the store is a copy") as caught:
        REFUSED[what](copy)
    assert "dcr detach" in str(caught.value)
    assert {key: copy._objects.get(key) for key in copy._objects.list("")} == before


def test_a_group_of_the_copys_own(past: Past) -> None:
    copy = copied(past)
    copy.create_group("eu", ["r0"], line="main")
    target = {name: np.zeros_like(array) for name, array in past.state("main@9").items()}
    with copy.receiver(target, group="eu", name="r0") as receiver:
        receiver.follow(once=True)
    require_state(target, past.state("main@9"))
    past.store.copy_to(copy.url)
    assert dcr_store.open(copy.url).verify().ok


def test_detached_it_goes_on_as_a_store_of_its_own(past: Past) -> None:
    left_open = past.store.begin("exp", owner="somebody")
    copy = copied(past, since="main@3")
    past.store.copy_to(copy.url)
    assert dcr_store.open(copy.url)._catalog.fresh("exp").state.open is not None
    assert dcr_store.open(copy.url).detach() == ["exp", "main"]
    assert dcr_store.open(copy.url).detach() == ["exp", "main"], "again after a crash"
    mine = Past(dcr_store.open(copy.url))
    mine.states = {line: list(states) for line, states in past.states.items()}
    step(mine, "main")
    step(mine, "exp")
    mine.store.expire("main", keep_last=2)
    mine.store.gc(grace_s=0)
    mine.store.tag("main@10", "ours")
    assert readable(mine, mine.store) == {*(f"exp@{n}" for n in range(6, 10)), "main@6", "main@9", "main@10"}
    assert mine.store.verify(deep=True).ok
    with pytest.raises(ConflictError, match="was detached"):
        past.store.copy_to(copy.url)
    with pytest.raises(InvalidInputError, match="is no copy"):
        past.store.detach()
    left_open.abort("over")


def test_a_copy_of_a_copy(past: Past) -> None:
    first = copied(past, since="main@3")
    url = place()
    first.copy_to(url)
    second = dcr_store.open(url)
    assert readable(past, second) == readable(past, first)
    assert document(second, "dcr.json") == document(first, "dcr.json")
    past.store.copy_to(url, lines=["exp"])
    assert readable(past, dcr_store.open(url)) > readable(past, first)


def test_tags_follow(past: Past) -> None:
    copy = copied(past)
    past.store.delete_tag("main", "early")
    past.store.tag("main@4", "early")
    past.store.delete_tag("exp", "best")
    assert past.store.copy_to(copy.url).n_tags == 2
    assert copy._catalog.resolve("main@early").name == "main@4"
    assert copy.tags("exp") == []


def test_two_copyings_at_once(past: Past) -> None:
    url, failed = place(), []
    past.store.copy_to(url, lines=["main"])
    for _ in range(6):
        step(past)
    barrier = threading.Barrier(3)

    def run() -> None:
        barrier.wait()
        try:
            dcr_store.open(past.store.url).copy_to(url)
        except DcrError as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    copy = dcr_store.open(url)
    require_prefix(past.store, copy)
    assert readable(past, copy) == set(past.names())


def test_a_long_line_opens_by_checkpoints(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SEGMENT_VERSIONS", 4)
    monkeypatch.setattr(line, "SEGMENT_VERSIONS", 4)
    for _ in range(12):
        step(past, rate=0.01)
    copy = copied(past, lines=["main"])
    watched = Watched(copy._objects)
    log = through(copy, watched)._catalog.fresh("main")
    assert len(log.state.segments) == 5
    assert watched.count("get", "/0000") <= 8, "by its checkpoints, not record by record"
    assert [row.version for row in log.rows()] == list(range(22))
    assert copy.verify().problems == []


def test_documents_of_copies() -> None:
    source = canonical.encode({"format": "dcr-store", "features": [], "version": "1.0"})
    made = copy_document(source)
    assert copy_document(made) == made
    assert chain_sha256(made) == chain_sha256(source) == canonical.sha256(source)
    for wrong in (
        made.replace(b'"1.0"', b'"1.1"'),
        made.replace(canonical.sha256(source).encode(), b"0" * 64),
        source.replace(b"[]", b'["copy"]'),
    ):
        with pytest.raises(FormatError):
            chain_sha256(wrong)
    with pytest.raises(FormatError, match="without what makes it one"):
        copy_document(source + b" ")
    absent = Absent("main", 3)
    assert Absent.from_bytes(absent.to_bytes(), "k") == absent


class Clocked(Watched):
    """A store whose clock a test sets: when each object was stored, by what its key ends in."""

    def __init__(self, inner: ObjectStore, times: dict[str, float]) -> None:
        super().__init__(inner)
        self.times = times

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        found = self.inner.list(prefix)
        return {
            key: (size, next((when for part, when in self.times.items() if part in key), 0.0))
            for key, size in found.items()
        }


def test_what_a_copying_has_just_brought_is_not_collected(past: Past) -> None:
    """It may lie under a prefix that ended long ago, and the record that counts on it is not there yet."""
    copy = copied(past, lines=["main"])
    past.store.expire("main", keep_last=1)
    past.store.copy_to(copy.url, lines=["main"])
    doomed = dcr_store.open(copy.url).gc(grace_s=0, dry_run=True).keys
    recent = next(key for key in doomed if key.endswith("contributions.bin"))
    clocked = Clocked(copy._objects, {recent: 950.0, "latest.json": 1000.0})
    found = through(dcr_store.open(copy.url), clocked).gc(grace_s=100)
    assert sorted(found.keys) == sorted(set(doomed) - {recent})
    assert found.n_waiting == 1


def test_what_is_absent_is_of_its_line(past: Past) -> None:
    copy = copied(past, since="main@3")
    copy._objects.put("absent/main.json", Absent("other").to_bytes())
    with pytest.raises(FormatError, match="of another line"):
        dcr_store.open(copy.url).read("main@6")
    assert [problem.key for problem in dcr_store.open(copy.url).verify().problems][:1] == ["absent/main.json"]


@pytest.fixture
def sharing(tmp_path: Path) -> tuple[Store, str]:
    """Four versions that share files, stored with version 0, which has expired; a copy from version 3 on."""
    store = dcr_store.create(place(), chunk_elements=64)
    for number in range(4):
        state = {"w": np.arange(200, dtype=np.float32) + number}
        with store.begin() as transaction:
            transaction.write_checkpoint(write_hf(tmp_path / f"{number}", state, 1, step=1))
    store.anchor("main@1")
    store.anchor("main@3")
    store.expire("main", keep_last=3)
    store.gc(grace_s=0)
    url = place()
    store.copy_to(url, since="main@3")
    return store, url


def shared_files(store: Store) -> set[str]:
    found = {key for key in store._objects.list("versions/main/") if "/000000000000-" in key}
    assert found
    assert all("/files/" in key for key in found)
    return found


def test_gc_in_a_store_that_stays_open_sees_what_a_copying_has_brought_since(sharing: tuple[Store, str]) -> None:
    """A copying of older versions appends no record; their objects lie under prefixes that ended long ago."""
    store, url = sharing
    copy = dcr_store.open(url)
    copy.gc(grace_s=0)
    with pytest.raises(NotFoundError, match="not in this copy"):
        copy.read("main@1")
    store.copy_to(url, since="main@1")
    assert np.array_equal(copy.read("main@1")["w"], np.arange(200, dtype=np.float32) + 1)
    assert shared_files(store).isdisjoint(copy.gc(grace_s=0).keys)
    assert dcr_store.open(url).verify(deep=True).ok


def test_readers_of_stores_that_are_no_copies_ask_for_nothing_more(sharing: tuple[Store, str]) -> None:
    store, url = sharing
    for each, n_asked in ((store, 0), (dcr_store.open(url), 2)):
        watched = Watched(each._objects)
        reader = through(each, watched)
        reader.read("main@3")
        reader.read("main@3")
        assert watched.count("get", "absent/") == n_asked
