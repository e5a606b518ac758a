"""Names, version references and keys: what the pattern does not match is refused before any I/O."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr_store.errors import InvalidInputError
from dcr_store.format import names
from dcr_store.format.names import TransactionKeys, VersionRef

GOOD = ["main", "a", "0", "A.b_c-d", "x" * 128, "exp.1", "deadbeef", "a..b"]
BAD: list[object] = [
    "",
    ".",
    "..",
    ".a",
    "-a",
    "_a",
    "a/b",
    "../a",
    "a\0",
    "a\n",
    "a\\b",
    "ä",
    "a b",
    "a@1",
    "x" * 129,
    "x" * 10_000,
    None,
    1,
    b"main",
    ["main"],
    "a%2f",
    "a:b",
    "~",
    "*",
]


@pytest.mark.parametrize("name", GOOD)
def test_lines(name: str) -> None:
    assert names.check_line(name) == name


@pytest.mark.parametrize("name", BAD, ids=lambda name: repr(name)[:20])
def test_bad_lines(name: object) -> None:
    with pytest.raises(InvalidInputError, match="cannot name a line; use") as caught:
        names.check_line(name)
    assert len(str(caught.value)) < 250


@given(st.text(max_size=5))
def test_a_line_is_one_harmless_component(name: str) -> None:
    try:
        names.check_line(name)
    except InvalidInputError:
        return
    assert name.isascii()
    assert not set(name) & set("/\\\0\n@ ")
    assert name[0] not in ".-_"


@pytest.mark.parametrize(
    ("text", "line", "number", "prefix"),
    [
        ("main", "main", None, None),
        ("main@0", "main", 0, None),
        ("main@42", "main", 42, None),
        ("a.b@999999999999", "a.b", 999_999_999_999, None),
        ("deadbeef", "deadbeef", None, "deadbeef"),
        ("dead", "dead", None, None),
        ("f" * 64, "f" * 64, None, "f" * 64),
        ("f" * 65, "f" * 65, None, None),
        ("DEADBEEF", "DEADBEEF", None, None),
        ("12345678", "12345678", None, "12345678"),
    ],
)
def test_version_references(text: str, line: str, number: int | None, prefix: str | None) -> None:
    assert VersionRef.parse(text) == VersionRef(line, number, prefix)


def test_references_by_tag_and_by_stamp() -> None:
    assert VersionRef.parse("main@best-1.0") == VersionRef("main", None, None, "best-1.0")
    assert VersionRef.parse("main@x") == VersionRef("main", None, None, "x")
    assert VersionRef.parse("main@42#deadbeef") == VersionRef("main", 42, "deadbeef")
    for text in ("main@42#", "main@42#dead", "main#deadbeef", "main@best#deadbeef", "main@42#deadbeefX"):
        with pytest.raises(InvalidInputError, match="is no version"):
            VersionRef.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "main@",
        "main@-1",
        "main@01",
        "main@1.0",
        "@1",
        "main@1@2",
        "main@1000000000000",
        "a/b@1",
        "main@1\n",
        "..",
        None,
        1,
        b"main",
        "main@ 1",
        "x" * 10_000,
    ],
    ids=lambda text: repr(text)[:20],
)
def test_what_is_no_version(text: object) -> None:
    with pytest.raises(InvalidInputError, match="is no version; use LINE@NUMBER") as caught:
        VersionRef.parse(text)
    assert len(str(caught.value)) < 250


def test_keys() -> None:
    keys = TransactionKeys("main", 42, "a" * 32)
    prefix = f"versions/main/000000000042-{'a' * 32}/"
    assert keys.prefix == prefix
    assert keys.journal("w0", "b" * 16, 3) == f"{prefix}journal/w0.{'b' * 16}.000003.json"
    assert keys.partition("w0", "b" * 16, "u16/mask", 7) == f"{prefix}data/w0.{'b' * 16}/u16/mask/c/7"
    assert keys.data("w0", "b" * 16) == f"{prefix}data/w0.{'b' * 16}/"
    assert keys.manifest(2) == f"{prefix}attempts/2/manifest.json"
    assert names.record_key("main", 5) == "log/main/00000000000000000005.json"
    assert names.hint_key("main") == "log/main/latest.json"
    assert names.checkpoint_key("main", 16) == "log/main/checkpoints/00000000000000000016.json"
    assert names.layout_key("c" * 64) == f"layouts/{'c' * 64}.json"
    assert names.version_name("main", 3) == "main@3"
    assert names.group_record_key("eu", 5) == "groups/eu/log/00000000000000000005.json"
    assert names.group_checkpoint_key("eu") == "groups/eu/log/latest.json"
    assert names.ack_prefix("eu", "main@3", "prepared") == "groups/eu/acks/main@3/prepared/"


def test_ids_are_new_each_time() -> None:
    assert len({names.new_txid() for _ in range(100)}) == 100
    assert all(len(names.new_txid()) == 32 and len(names.new_incarnation()) == 16 for _ in range(10))


@pytest.mark.parametrize(
    "key", ["a", "a/b", "..a", "a/..b/c", "...", "a/....", "layouts/x.json", "a b", "ä", ".hidden/x", "a/.b"]
)
def test_keys_that_documents_may_name(key: str) -> None:
    assert names.KEY.fullmatch(key)


@pytest.mark.parametrize(
    "key",
    ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "./a", "a/./b", "a\\b", "a\0b", "a/.", "..\\a"],
)
def test_keys_that_documents_may_not_name(key: str) -> None:
    assert not names.KEY.fullmatch(key)
