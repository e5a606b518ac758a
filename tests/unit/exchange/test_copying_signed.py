"""Copiers believe records as readers do: signed by whom they trust, and those whose hash chain was checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from copies import place, require_prefix
from upkeep import through
from watched import Watched

import dcr_store
from dcr_store.errors import IntegrityError
from dcr_store.exchange import copying
from dcr_store.format import canonical
from dcr_store.format.names import checkpoint_key, record_key
from dcr_store.log import checkpoints
from dcr_store.log.key_files import make_key_file
from dcr_store.store import Store

pytest.importorskip("cryptography")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, list[str]]:
    return tmp_path / "key", [make_key_file(tmp_path / "key", "of the trainer")]


@pytest.fixture
def signed(keys: tuple[Path, list[str]]) -> Store:
    """Nine versions, so that there is a log checkpoint."""
    store = dcr_store.create(place(), chunk_elements=64, sign_with=keys[0])
    publish(store, 9)
    return store


def publish(store: Store, n: int) -> None:
    for _ in range(n):
        with store.begin() as transaction:
            transaction.write("w", np.full(80, len(store.log("main")) if store.lines() else 0, np.int32))


class Lying(Watched):
    """Gives another answer for one key from the second time on that it is asked for."""

    key = ""
    lie = b""

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        if key == self.key and self.count("get", key):
            self._note("get", key)
            return self.lie
        return super().get(key, start, stop, sha256=sha256)


@pytest.mark.parametrize("trusts", [True, False])
@pytest.mark.parametrize("seq", [17, 10])
def test_what_is_adopted_is_what_was_checked(
    signed: Store, keys: tuple[Path, list[str]], trusts: bool, seq: int
) -> None:
    """A source that tells another record when it is asked again: well chained, and unsigned."""
    record = json.loads(signed._objects.get(record_key("main", seq)))
    del record["signature"]
    source = Lying(signed._objects)
    source.key = record_key("main", seq)
    source.lie = canonical.encode({**record, "created_at": "2020-01-01T00:00:00.000Z"})
    reader = through(dcr_store.open(signed.url, trust=keys[1]) if trusts else dcr_store.open(signed.url), source)
    if not trusts:  # so that each record is read a first time
        reader._catalog.log("main").reread()
    url = place()
    target = dcr_store.store._created(url, None, dcr_store.store.copy_document(signed._objects.get("dcr.json")))
    with pytest.raises(IntegrityError) as caught:
        copying.copy(reader._catalog, target._catalog, ["main"])
    assert source.count("get", source.key) >= 2
    assert caught.value.key == source.key
    assert target._objects.list("log/") == {}, "before anything was put"


def test_a_record_that_is_not_signed_is_not_adopted(signed: Store, keys: tuple[Path, list[str]]) -> None:
    url = place()
    signed.copy_to(url)
    copy = dcr_store.open(url, trust=keys[1])
    publish(signed, 1)
    log = copy._catalog.fresh("main")
    record = json.loads(signed._objects.get(record_key("main", log.state.length)))
    del record["signature"]
    with pytest.raises(IntegrityError, match="not signed"):
        log.adopt(canonical.encode(record))
    assert copy._objects.size(record_key("main", 18)) is None


def test_the_copy_is_read_with_the_keys_of_the_source(signed: Store, keys: tuple[Path, list[str]]) -> None:
    """A log checkpoint in the copy that lies, whole by its own hash: who trusts keys takes nothing from it."""
    url = place()
    source = dcr_store.open(signed.url, trust=keys[1])
    source.copy_to(url)
    copy = dcr_store.open(url)
    log = copy._catalog.fresh("main")
    log.reread()
    state = checkpoints.write_checkpoint(copy._objects, log.state, log.store_sha256)
    key = checkpoint_key("main", state.length)
    body = json.loads(copy._objects.get(key))["body"]
    body["head"]["root"] = body["rows"][-1]["root"] = "0" * 64
    copy._objects.put(key, canonical.seal_body(body))
    checkpoints.write_hint(copy._objects, state, state.length)
    publish(signed, 1)
    with pytest.raises(IntegrityError, match="base is not the head"):
        dcr_store.open(signed.url).copy_to(url)
    assert dcr_store.open(signed.url, trust=keys[1]).copy_to(url).lines[0].n_versions == 1
    require_prefix(signed, dcr_store.open(url))
    assert dcr_store.open(url, trust=keys[1]).read("main@9")["w"][0] == 9
    # Repaired, others can use it again.
    mended = source.copy_to(url, repair=True).repaired
    assert mended is not None
    assert key in mended.keys
    assert dcr_store.open(url).verify(deep=True).ok
