"""Records are signed and checked: keys, what a signature holds for, and that nothing unsigned gets to who trusts."""

from __future__ import annotations

import json
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dcr_store
from dcr_store.cli.main import main
from dcr_store.errors import ConflictError, DcrError, FormatError, IntegrityError, InvalidInputError
from dcr_store.format import canonical
from dcr_store.format.documents import StoreDocument
from dcr_store.format.fields import now
from dcr_store.format.names import (
    STORE_KEY,
    checkpoint_key,
    group_checkpoint_key,
    group_record_key,
    hint_key,
    new_txid,
    record_key,
)
from dcr_store.log import checkpoints
from dcr_store.log.key_files import make_key_file, public_line, read_signer, read_trusted
from dcr_store.log.signing import Signing
from dcr_store.objects.open import open_objects
from dcr_store.store import Store

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with keys of a and b, their public keys, and both as a list."""
    root = tmp_path_factory.mktemp("keys")
    lines = [make_key_file(root / name, f"of {name}") for name in "ab"]
    for name, line in zip("ab", lines, strict=True):
        (root / f"{name}.pub").write_text(line + "\n")
    (root / "both").write_text("# who publishes\n\n" + "\n".join(lines) + "\n")
    return root


def publish(store: Store, n: int, line: str = "main", metadata: object = None) -> None:
    for i in range(n):
        with store.begin(line, metadata={"x": metadata, "i": i}) as transaction:
            transaction.write("a", np.arange(100) + i)


def created(sign_with: Path | None = None) -> Store:
    """Create a store, without the probe of the backend, which takes long and has its own tests."""
    url = f"memory://{secrets.token_hex(8)}"
    document = StoreDocument(new_txid(), "dcr.delta", 64, now())
    assert open_objects(url).put_if_absent(STORE_KEY, document.to_bytes())
    return dcr_store.open(url, sign_with=sign_with)


@pytest.fixture(scope="module")
def template(keys: Path) -> dict[str, bytes]:
    """The objects of a store: 9 signed versions, a fork, a group that has promoted; metadata that is long, and odd."""
    store = created(sign_with=keys / "a")
    publish(store, 9, metadata=[1e300, -0.0, 'é"', 'a,"signature":{"public_key":"', "x" * 2000])
    store.fork("main@4", "exp")
    publish(store, 1, "exp")
    group = store.create_group("eu", ["node0"])
    with store.receiver({"a": np.zeros(100, np.int64)}, group="eu", name="node0") as receiver:
        receiver.prepare(receiver.poll().wanted or "")
        receiver.poll()
        receiver.apply()
    assert group.status().active == "main@8"
    store.close()
    return {key: store._objects.get(key) for key in store._objects.list("")}


@pytest.fixture
def url(template: dict[str, bytes]) -> Iterator[str]:
    url = f"memory://{secrets.token_hex(8)}"
    objects = open_objects(url)
    for key, data in template.items():
        objects.put(key, data)
    yield url
    for key in objects.list(""):
        objects.delete(key)


def test_a_key_file(tmp_path: Path, keys: Path) -> None:
    line = make_key_file(tmp_path / "k", "me@host")
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert line == public_line(read_signer(tmp_path / "k"), "me@host")
    assert read_trusted([line]).public_keys == {line.split()[1]}
    assert len(read_trusted(keys / "both").public_keys) == 2
    with pytest.raises(ConflictError, match="never overwritten"):
        make_key_file(tmp_path / "k")
    (tmp_path / "k").chmod(0o640)
    with pytest.warns(UserWarning, match="others may read"):
        read_signer(tmp_path / "k")
    for ending in ("\n", "\r", "\x85", "\u2028", "\u2029"):
        with pytest.raises(InvalidInputError, match="comment"):
            make_key_file(tmp_path / "k2", f"two{ending}lines")
    # What looks like a line of its own in some reader is none here: no key is trusted that nobody sees.
    (tmp_path / "list").write_text(f"{line}\u2028ed25519 {'0' * 64}\n", "utf-8")
    assert read_trusted(tmp_path / "list").public_keys == {line.split()[1]}
    assert not (tmp_path / "k2").exists()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "trusts nobody"),
        ("# nobody\n", "trusts nobody"),
        ("ed25519 abc\n", ":1: is no list of public keys"),
        (f"\ned25519 {'a' * 64}x\n", ":2: is no list"),
        (f"ssh-ed25519 {'a' * 64}\n", "is no list"),
        ("-----BEGIN PRIVATE KEY-----\nsecret\n", "found a private key"),
    ],
)
def test_lists_that_are_none(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(InvalidInputError, match=match) as caught:
        read_trusted(tmp_path / "list")
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidInputError, match="is not there"):
        read_trusted(tmp_path / "other")


def test_a_file_that_is_no_key_signs_nothing(tmp_path: Path, keys: Path) -> None:
    (tmp_path / "k").write_bytes(b"not a secret to tell")
    (tmp_path / "k").chmod(0o600)
    store = created(sign_with=tmp_path / "k")
    with pytest.raises(InvalidInputError, match="is no signing key") as caught:
        publish(store, 1)
    assert "secret" not in str(caught.value)
    assert store.lines() == []
    with pytest.raises(InvalidInputError, match="not among those that are trusted"):
        dcr_store.open(store.url, sign_with=keys / "a", trust=keys / "b.pub")
    with pytest.raises(InvalidInputError, match="is not there"):
        dcr_store.open(store.url, sign_with=tmp_path / "none")


def test_every_record_is_signed_and_who_knows_of_no_keys_reads_them(url: str, keys: Path) -> None:
    plain, trusting = dcr_store.open(url), dcr_store.open(url, trust=keys / "both")
    records = [key for key in plain._objects.list("") if key.rpartition("/")[2][:1] == "0" and "log/" in key]
    records = [key for key in records if "/checkpoints/" not in key]
    assert len(records) > 25
    assert all(b'"signature":' in plain._objects.get(key) for key in records)
    for store in (plain, trusting):
        assert store.verify(deep=True).ok
        assert [info.version for info in store.log("exp")] == [f"exp@{i}" for i in range(6)]
        assert store.read("exp@5")["a"].tolist() == list(range(100))
        assert store.status().groups[0].active == "main@8"
        assert store.show("main@3").info.metadata["x"][0] == 1e300


def test_unsigned_records_are_what_they_were() -> None:
    store = created()
    publish(store, 1)
    assert b"signature" not in store._objects.get(record_key("main", 1))


def forged(data: bytes, **changed: object) -> bytes:
    """Change fields of a record as somebody without a key would; a signature of None is taken away."""
    document = {**json.loads(data), **changed}
    if document["signature"] is None:
        del document["signature"]
    return canonical.encode(document)


def rewritten(store: Store, line: str, seq: int, data: bytes) -> None:
    """Put another record there, and give those after it the right hash of the one before."""
    objects = store._objects
    objects.put(record_key(line, seq), data)
    while objects.size(record_key(line, seq + 1)) is not None:
        data = forged(objects.get(record_key(line, seq + 1)), prev=canonical.sha256(data))
        seq += 1
        objects.put(record_key(line, seq), data)
    state = checkpoints.LineState(line, seq + 1, canonical.sha256(data))
    checkpoints.write_hint(objects, state, None)
    for key in objects.list(f"log/{line}/checkpoints/"):
        objects.delete(key)


@pytest.mark.parametrize(
    ("what", "match", "changed"),
    [
        ("unsigned", "is not signed", {"signature": None}),
        ("changed", "signature is not of this record", {"created_at": "2020-01-01T00:00:00.000Z"}),
        ("of another key", "by a key that is not trusted", {"signature": {"public_key": "b" * 64, "value": "c" * 128}}),
        ("no signature", "field 'value' is wrong", {"signature": {"public_key": "b" * 64, "value": "c" * 127}}),
    ],
)
def test_a_history_that_was_rewritten_consistently_is_told_by_its_signatures_alone(
    url: str, keys: Path, what: str, match: str, changed: dict[str, object]
) -> None:
    store = dcr_store.open(url)
    key = record_key("main", 7)
    rewritten(store, "main", 7, forged(store._objects.get(key), **changed))
    fork = canonical.sha256(store._objects.get(record_key("main", 18)))
    rewritten(store, "exp", 0, forged(store._objects.get(record_key("exp", 0)), fork_sha256=fork))
    if what != "no signature":
        assert dcr_store.open(url).verify().ok, "consistent"
    with dcr_store.open(url, trust=keys / "a.pub") as trusting:
        for use in (
            lambda: trusting.read("main@0"),
            lambda: trusting.log(),
            lambda: trusting.begin(),
            lambda: trusting.pull("/nowhere", "main@0"),
        ):
            with pytest.raises((IntegrityError, FormatError), match=match) as caught:
                use()
            assert caught.value.key is not None
            assert caught.value.key.startswith(key)
        report = trusting.verify(depth="log")
        assert key in {problem.key for problem in report.problems}


def test_a_record_holds_nowhere_else(url: str, keys: Path) -> None:
    """In another store, on another line, at another number, in a group."""
    store = dcr_store.open(url)
    other = created(sign_with=keys / "a")
    publish(other, 1)
    signing = dcr_store.open(url, trust=keys / "a.pub")._catalog.signing
    data = other._objects.get(record_key("main", 0))
    with pytest.raises(IntegrityError, match="moved here from another place"):
        signing.check(data, "k", store._catalog.store_sha256)
    signing.check(data, "k", other._catalog.store_sha256)
    mine = store._objects.get(record_key("main", 2))
    for changed in ({"line": "exp"}, {"seq": 4}, {"prev": "0" * 64}, {"format": "dcr-group"}):
        with pytest.raises(IntegrityError, match="not of this record"):
            signing.check(forged(mine, **changed), "k", store._catalog.store_sha256)


def test_a_signature_is_at_one_place(url: str, keys: Path) -> None:
    """Written otherwise, or once more inside of metadata, it is nobody's guess what it is of."""
    store = dcr_store.open(url)
    signing = dcr_store.open(url, trust=keys / "a.pub")._catalog.signing
    data = store._objects.get(record_key("main", 0))
    signing.check(data, "k", store._catalog.store_sha256)
    signature = json.loads(data)["signature"]
    twice = forged(data, metadata={"a": 1, "signature": signature})
    spaced = data.replace(b'"signature":{', b'"signature": {')
    for other in (twice, spaced):
        with pytest.raises(FormatError, match="not written as the format says"):
            signing.check(other, "k", store._catalog.store_sha256)


def test_checkpoints_smuggle_nothing_past_who_trusts(url: str, keys: Path) -> None:
    """A checkpoint tells another root; it is whole, and the last record that it folds is the signed one."""
    store = dcr_store.open(url)
    objects, key = store._objects, checkpoint_key("main", 16)
    body = canonical.open_body(objects.get(key), key)
    assert body is not None
    body["rows"][3]["root"] = "0" * 64
    objects.put(key, canonical.seal_body(body))
    group_key = group_checkpoint_key("eu")
    body = canonical.open_body(objects.get(group_key), group_key)
    assert body is not None
    body["active"]["version"] = "main@7"
    objects.put(group_key, canonical.seal_body(body))
    plain, trusting = dcr_store.open(url), dcr_store.open(url, trust=keys / "a.pub")
    assert plain.log()[3].root == "0" * 64, "the test would show nothing"
    assert plain.status().groups[0].active == "main@7", "the test would show nothing"
    assert trusting.log()[3].root != "0" * 64
    assert trusting.status().groups[0].active == "main@8"
    assert key in {problem.key for problem in trusting.verify(depth="log").problems}


def test_a_publisher_that_trusts_goes_on(url: str, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also past segments, which it keeps in memory: what stands in the store may be another one by then."""
    monkeypatch.setattr(checkpoints, "SEGMENT_VERSIONS", 8)
    with dcr_store.open(url, sign_with=keys / "a", trust=keys / "both") as store:
        publish(store, 8)
        assert store._catalog.log("main").state.segments
        for key in store._objects.list("log/main/checkpoints/"):
            store._objects.put(key, b"{}")
        assert [info.version for info in store.log()] == [f"main@{i}" for i in range(17)]
    assert len(dcr_store.open(url, trust=keys / "a.pub").log()) == 17


def test_two_keys_and_one_that_was_not_trusted(url: str, keys: Path) -> None:
    with dcr_store.open(url, sign_with=keys / "b") as store:
        publish(store, 1)
    assert dcr_store.open(url, trust=keys / "both").verify(deep=True).ok
    report = dcr_store.open(url, trust=keys / "a.pub").verify()
    assert {record_key("main", seq) for seq in (19, 20)} <= {problem.key for problem in report.problems}
    with dcr_store.open(url, sign_with=keys / "a", trust=keys / "a.pub") as store, pytest.raises(IntegrityError):
        publish(store, 1)


def test_nobody_goes_on_without_a_key(url: str, keys: Path) -> None:
    """Who trusts keys would read no further, for good."""
    length = len(dcr_store.open(url).log())
    for act in (
        lambda store: publish(store, 1),
        lambda store: store.anchor("main@2"),
        lambda store: store.expire("main", keep_last=1),
        lambda store: store.fork("main@1", "other"),
        lambda store: store.group("eu").drop("node0", "unsigned"),
    ):
        store = dcr_store.open(url)
        before = store._objects.list("")
        with pytest.raises(InvalidInputError, match=r"the log is signed.*DCR_SIGN_KEY"):
            act(store)
        assert {key for key in store._objects.list("") if "/log/" in f"/{key}"} == {
            key for key in before if "/log/" in f"/{key}"
        }
    trusting = dcr_store.open(url, sign_with=keys / "a", trust=keys / "a.pub")
    publish(trusting, 1)
    assert len(trusting.log()) == length + 1
    assert trusting.verify(deep=True).ok


def test_who_trusts_keys_writes_nothing_that_he_would_not_trust(url: str, keys: Path) -> None:
    trusting = dcr_store.open(url, trust=keys / "a.pub")
    with pytest.raises(InvalidInputError, match=r"no key to sign it with.*DCR_SIGN_KEY"):
        publish(trusting, 1)


def test_groups_are_signed_too(url: str, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dcr_store.open(url)
    monkeypatch.setattr(Signing, "check_goes_on", lambda *_: None)  # as another implementation may
    store.group("eu").drop("node0", "unsigned")
    length = len(store._objects.list("groups/eu/log/")) - 1
    key = group_record_key("eu", length - 1)
    trusting = dcr_store.open(url, trust=keys / "a.pub")
    with pytest.raises(IntegrityError, match="is not signed") as caught:
        trusting.status()
    assert caught.value.key == key
    assert [problem.key for problem in trusting.verify(depth="log").problems] == [key]


def test_a_log_that_was_set_back_is_told_by_a_head_that_somebody_remembers(url: str, keys: Path) -> None:
    store = dcr_store.open(url)
    heads = [f"main@{info.version.rpartition('@')[2]}#{info.root}" for info in store.log()[-2:]]
    assert store.verify(depth="log", heads=heads).ok
    objects = store._objects
    for seq in (17, 18):
        objects.delete(record_key("main", seq))
    last = objects.get(record_key("main", 16))
    checkpoints.write_hint(objects, checkpoints.LineState("main", 17, canonical.sha256(last)), 16)
    trusting = dcr_store.open(url, trust=keys / "a.pub")
    others = {problem.key for problem in trusting.verify(depth="log").problems}
    assert others <= {group_record_key("eu", 2), record_key("main", 18)}, "what follows from what is gone"
    found = trusting.verify(depth="log", heads=heads).problems
    assert "main@8" in {problem.key for problem in found}
    assert "main@7" not in {problem.key for problem in found}
    with pytest.raises(InvalidInputError, match="no head to look for"):
        trusting.verify(heads=["main@8"])


def test_the_commands(
    tmp_path: Path, keys: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, place = str(tmp_path / "key"), str(tmp_path / "s")
    assert main(["keygen", key, "--comment", "ci"]) == 0
    line = capsys.readouterr().out
    assert main(["keygen", key, "--public", "--comment", "ci"]) == 0
    assert capsys.readouterr().out == line
    assert main(["keygen", key]) == 1
    (tmp_path / "trust").write_text(line)
    trust = str(tmp_path / "trust")
    assert main(["init", place, "--chunk-elements", "64"]) == 0
    monkeypatch.setenv("DCR_SIGN_KEY", key)
    with dcr_store.open(place, sign_with=key) as store:
        publish(store, 2)
    assert main(["anchor", place, "main@1"]) == 0
    assert main(["verify", place, "--trust", trust, "--depth", "replay"]) == 0
    root = dcr_store.open(place).log()[1].root
    assert main(["verify", place, "--trust", trust, "--head", f"main@1#{root}"]) == 0
    assert main(["verify", place, "--head", f"main@2#{root}"]) == 1
    assert "main@2: the store does not have this version, and is said to have had it" in capsys.readouterr().out
    assert main(["verify", place, "--trust", str(keys / "a.pub")]) == 1
    assert record_key("main", 0) in capsys.readouterr().out
    monkeypatch.setenv("DCR_TRUST", str(keys / "a.pub"))
    assert main(["anchor", place, "main@1"]) == 1
    assert "not among those that are trusted" in capsys.readouterr().err
    assert main(["log", place]) == 1
    assert "signed by a key that is not trusted" in capsys.readouterr().err
    for wrong in (["--head", "main@1"], ["--depth", "deep"], ["--deep", "--depth", "log"], ["--trust", ""]):
        assert main(["verify", place, *wrong]) == 2
    assert main(["verify", place, "--trust", str(tmp_path / "none")]) == 1
    assert "is not there" in capsys.readouterr().err


def test_cryptography_is_imported_only_where_it_is_used(tmp_path: Path, keys: Path) -> None:
    code = (
        "import sys, dcr_store; s = dcr_store.open(sys.argv[1], sign_with=sys.argv[2]); s.log(); s.lines();"
        "print([m for m in sys.modules if m.startswith('cryptography')])"
    )
    with dcr_store.create(tmp_path / "s", chunk_elements=64) as store:
        publish(store, 1)
    command = [sys.executable, "-c", code, str(tmp_path / "s"), str(keys / "a")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_without_cryptography(keys: Path, monkeypatch: pytest.MonkeyPatch, template: dict[str, bytes]) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(InvalidInputError, match=r"pip install dcr-store\[sign\]"):
        make_key_file(keys / "never")
    assert not (keys / "never").exists()
    assert hint_key("main") in template
    assert issubclass(InvalidInputError, DcrError)
