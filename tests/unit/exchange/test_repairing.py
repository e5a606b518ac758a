"""What a copy has lost, or has damaged, is repaired from its source; what may be a line gone on by itself is not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copies import (
    cloned,
    copied,
    readable,
    require_no_waste,
    require_prefix,
    require_same_objects,
    step,
)
from histories import Past
from upkeep import KilledError, Mortal, through
from watched import Watched

import dcr_store
from dcr_store.cli.main import main
from dcr_store.errors import ConflictError, FormatError, IntegrityError, InvalidInputError
from dcr_store.exchange import copying
from dcr_store.exchange.copied import Copied, Repaired
from dcr_store.format import canonical
from dcr_store.format.names import hint_key, record_key
from dcr_store.log import checkpoints, line
from dcr_store.store import Store

HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
    "cut": lambda data: data[:-1],
    "lost": lambda data: None,
}
KINDS: dict[str, Callable[[str], bool]] = {
    "partition": lambda key: "/mask/c/" in key,
    "manifest": lambda key: key.endswith("manifest.json"),
    "seal": lambda key: "/journal/" in key,
    "contributions": lambda key: key.endswith("contributions.bin"),
    "digest table": lambda key: "/digests/" in key and "/c/" in key,
    "metadata of an array": lambda key: key.endswith("zarr.json"),
    "layout": lambda key: key.startswith("layouts/"),
    "first record": lambda key: key == record_key("exp", 0),
    "record": lambda key: key == record_key("main", 7),
    "last record": lambda key: key == record_key("main", 24),
    "hint": lambda key: key == hint_key("main"),
    "hint of a fork": lambda key: key == hint_key("exp"),
    "log checkpoint": lambda key: "/checkpoints/" in key,
    "what is absent": lambda key: key == "absent/main.json",
}


def harm(store: Store, key: str, how: str) -> None:
    data = HARMS[how](store._objects.get(key))
    if data is None:
        store._objects.delete(key)
    else:
        store._objects.put(key, data)


def repaired(source: Store, url: str, **options: Any) -> tuple[Copied, Repaired]:
    found = dcr_store.open(source.url).copy_to(url, repair=True, **options)
    assert found.repaired is not None
    return found, found.repaired


def require_sound(past: Past, url: str) -> None:
    copy = dcr_store.open(url)
    require_prefix(past.store, copy)
    require_same_objects(past.store, copy)
    require_no_waste(copy)
    report = copy.verify()
    assert (report.problems, report.unreferenced) == ([], [])
    assert readable(past, copy) == past.kept()


@pytest.fixture
def whole(past: Past) -> Store:
    """A copy of all."""
    return copied(past)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_damage_is_mended(past: Past, whole: Store, kind: str) -> None:
    keys = [key for key in sorted(whole._objects.list("")) if KINDS[kind](key)]
    for nth, how in enumerate(HARMS):
        key = keys[nth % len(keys)]
        harm(whole, key, how)
        if nth == 0:
            assert not dcr_store.open(whole.url).verify().ok
        found, mended = repaired(past.store, whole.url)
        if (kind, how) not in (("what is absent", "lost"), ("log checkpoint", "lost")):
            assert mended.keys == (key,)
        assert all(item.n_records == 0 for item in found.lines)
    require_sound(past, whole.url)
    assert repaired(past.store, whole.url)[1].keys == ()


def test_all_at_once_and_what_is_new_besides(past: Past, whole: Store) -> None:
    rng = random.Random(5)
    step(past)
    keys = sorted(key for key in whole._objects.list("") if key.split("/")[0] in ("versions", "layouts", "log"))
    keep = {record_key("exp", 4), hint_key("main"), hint_key("exp")}
    hit = [key for key in keys if key not in keep and rng.random() < 0.4]
    for key in hit:
        harm(whole, key, rng.choice(sorted(HARMS)))
    found, mended = repaired(past.store, whole.url)
    assert set(hit) - set(mended.keys) == {key for key in hit if "/checkpoints/" in key and key not in mended.keys}
    assert [item.n_versions for item in found.lines] == [1, 0]
    assert found.n_objects > sum(key.startswith("versions/") for key in hit)
    require_sound(past, whole.url)


def test_without_repair_nothing_is_read_that_is_there(past: Past, whole: Store) -> None:
    key = next(filter(KINDS["partition"], sorted(whole._objects.list("versions/"))))
    harm(whole, key, "flipped")
    assert past.store.copy_to(whole.url).repaired is None
    assert not whole.verify().ok
    harm(whole, record_key("main", 3), "lost")
    for checkpoint in whole._objects.list("log/main/checkpoints/"):
        whole._objects.delete(checkpoint)
    with pytest.raises(IntegrityError, match="in the copy, the log record is missing") as caught:
        past.store.copy_to(whole.url)
    assert caught.value.key == record_key("main", 3)
    assert "--repair" in str(caught.value)
    repaired(past.store, whole.url)
    require_sound(past, whole.url)


def test_a_sound_copy_is_compared_and_nothing_is_put(past: Past, whole: Store) -> None:
    target = Watched(whole._objects)
    found = copying.copy(past.store._catalog, through(whole, target)._catalog, past.store.lines(), repair=True)
    assert found.repaired is not None
    n_read = sum(key.startswith(("versions/", "layouts/")) for key in set(whole._objects.list("")))
    assert (found.repaired.n_compared, found.repaired.keys, found.n_objects) == (n_read, (), 0)
    assert found.repaired.nbytes_compared == sum(whole._objects.list("versions/").values()) + sum(
        whole._objects.list("layouts/").values()
    )
    assert {method for method, _ in target.requests} <= {"get", "list", "size", "list_names"}


def test_a_copy_that_begins_later_stays_so(past: Past) -> None:
    later = copied(past, since="main@3")
    expected = readable(past, later)
    for key in filter(KINDS["partition"], list(later._objects.list("versions/"))):
        harm(later, key, "lost")
    assert repaired(past.store, later.url, since="main@3")[1].keys
    assert readable(past, dcr_store.open(later.url)) == expected
    # Without what says what is absent it is asked for anew; it can be said again.
    later._objects.put("absent/main.json", b"{}")
    with pytest.raises(FormatError, match=r"absent/main\.json"):
        past.store.copy_to(later.url, lines=["main"])
    assert repaired(past.store, later.url, since="main@3")[1].keys == ("absent/main.json",)
    assert readable(past, dcr_store.open(later.url)) == expected
    assert dcr_store.open(later.url).verify(deep=True).ok


def test_what_a_killed_copying_left_is_not_believed_by_its_size(past: Past, whole: Store) -> None:
    step(past)
    row = past.store._catalog.fresh("main").state.head
    assert row is not None
    prefix = row.manifest.key.rpartition("/attempts/")[0]
    key = next(filter(KINDS["partition"], sorted(past.store._objects.list(prefix + "/"))))
    flipped = HARMS["flipped"](past.store._objects.get(key))
    assert flipped is not None
    whole._objects.put(key, flipped)
    repaired(past.store, whole.url)
    require_sound(past, whole.url)


def foreign(past: Past, seq: int) -> bytes:
    return canonical.encode({**json.loads(past.store._objects.get(record_key("main", seq))), "owner": "another"})


def test_a_line_that_may_have_gone_on_by_itself_is_not_overwritten(past: Past, whole: Store) -> None:
    length = whole._catalog.fresh("main").state.length
    step(past)
    for seq in (length, length + 1):
        whole._objects.put(record_key("main", seq), foreign(past, seq))
    before = {key: whole._objects.get(key) for key in whole._objects.list("")}
    with pytest.raises(ConflictError, match="gone on by itself") as caught:
        repaired(past.store, whole.url)
    assert caught.value.key == record_key("main", length)
    assert {key: whole._objects.get(key) for key in whole._objects.list("")} == before


def test_the_last_record_is_mended_if_the_hint_knows_it(past: Past, whole: Store) -> None:
    length = whole._catalog.fresh("main").state.length
    whole._objects.put(record_key("main", length - 1), foreign(past, length - 1))
    assert repaired(past.store, whole.url)[1].keys == (record_key("main", length - 1),)
    require_sound(past, whole.url)
    whole._objects.put(record_key("main", length - 1), foreign(past, length - 1))
    whole._objects.delete(hint_key("main"))
    with pytest.raises(ConflictError, match="delete it there and copy again") as caught:
        repaired(past.store, whole.url)
    assert caught.value.key == record_key("main", length - 1)
    whole._objects.delete(record_key("main", length - 1))
    repaired(past.store, whole.url)
    require_sound(past, whole.url)


def test_a_copy_that_is_ahead_of_a_source_that_was_set_back(past: Past, whole: Store) -> None:
    older = cloned(past.store)
    step(past)
    past.store.copy_to(whole.url)
    harm(whole, record_key("main", 5), "lost")
    with pytest.raises(ConflictError, match="log is longer"):
        repaired(older, whole.url)
    repaired(past.store, whole.url)
    require_sound(past, whole.url)


def test_what_the_source_has_damaged_too_is_named_and_not_put(past: Past, whole: Store) -> None:
    key = next(filter(KINDS["partition"], sorted(whole._objects.list("versions/"))))
    sound = past.store._objects.get(key)
    harm(whole, key, "lost")
    harm(past.store, key, "flipped")
    with pytest.raises(IntegrityError) as caught:
        repaired(past.store, whole.url)
    assert caught.value.key == key
    assert whole._objects.size(key) is None
    # The other way round, a source is no copy, whose objects are restored from one by hand.
    with pytest.raises(InvalidInputError):
        repaired(whole, past.store.url)
    past.store._objects.put(key, sound)
    repaired(past.store, whole.url)
    require_sound(past, whole.url)


def test_killed_at_any_request_it_goes_on(past: Past, whole: Store) -> None:
    rng = random.Random(1)
    for key in sorted(whole._objects.list("versions/")):
        if rng.random() < 0.05:
            harm(whole, key, rng.choice(sorted(HARMS)))
    for seq in (3, 9, 10):
        harm(whole, record_key("main", seq), rng.choice(sorted(HARMS)))
    harm(whole, hint_key("exp"), "cut")
    dies_at, n_killed = 3, 0
    while True:
        target = cloned(whole)
        try:
            mortal = Mortal(target._objects, dies_at, after=dies_at % 2 == 0)
            copying.copy(past.store._catalog, through(target, mortal)._catalog, past.store.lines(), repair=True)
        except KilledError:
            n_killed += 1
            repaired(past.store, target.url)
            require_sound(past, target.url)
            dies_at += 90
            continue
        break
    assert n_killed >= 3


def test_segments_of_a_long_line(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoints, line):
        monkeypatch.setattr(module, "SEGMENT_VERSIONS", 4)
    for _ in range(6):
        step(past, rate=0.01)
    copy = copied(past, lines=["main"])
    keys = sorted(copy._objects.list("log/main/checkpoints/"))
    assert len(keys) >= 3
    for key, how in ((keys[0], "lost"), (keys[1], "flipped")):
        harm(copy, key, how)
    document = json.loads(copy._objects.get(keys[2]))
    document["body"]["rows"] = document["body"]["rows"][:-1]  # whole by its own hash
    copy._objects.put(keys[2], canonical.seal_body(document["body"]))
    mended = repaired(past.store, copy.url, lines=["main"])[1]
    assert set(mended.keys) == set(keys[:3])
    log = dcr_store.open(copy.url)._catalog.fresh("main")
    assert [row.version for row in log.rows()] == list(range(16))
    assert dcr_store.open(copy.url).verify(depth="log").ok


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
        for number in range(2):
            with store.begin() as transaction:
                transaction.write("w", np.arange(99, dtype=np.int32) * number)
    source, copy = str(tmp_path / "store"), str(tmp_path / "copy")
    assert main(["copy", source, copy]) == 0
    capsys.readouterr()
    assert main(["copy", source, copy, "--repair"]) == 0
    n_objects = sum(
        path.is_file() for name in ("versions", "layouts") for path in (tmp_path / "copy" / name).rglob("*")
    )
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "transferred 0 objects, 0 B"
    assert said[2].startswith(f"compared {n_objects} objects, ")
    assert said[2].endswith(": all are as they have to be")
    hit = next((tmp_path / "copy").rglob("c/0"))
    hit.write_bytes(b"x" * hit.stat().st_size)
    assert main(["verify", copy]) == 1
    capsys.readouterr()
    assert main(["copy", source, copy, "--repair"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2].endswith(": put 1 object again")
    assert said[3:] == [f"  {hit.relative_to(tmp_path / 'copy')}"]
    assert main(["verify", copy]) == 0
    capsys.readouterr()
    (tmp_path / "copy" / record_key("main", 1)).unlink()
    (tmp_path / "copy" / hint_key("main")).unlink()
    assert main(["copy", source, copy, "--repair", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["repaired"]["keys"] == [record_key("main", 1), hint_key("main")]
    assert found["repaired"]["n_compared"] == n_objects
