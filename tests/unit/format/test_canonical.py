"""Canonical JSON: one document, one byte string; what is no strict JSON is refused."""

from __future__ import annotations

import hashlib
import json
import math
from enum import IntEnum
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcr_store.errors import FormatError, IntegrityError, InvalidInputError
from dcr_store.format import canonical

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_round_trip(document: Any) -> None:
    data = canonical.encode(document)
    assert canonical.decode(data, "k") == document
    assert canonical.encode(canonical.decode(data, "k")) == data


@given(st.dictionaries(TEXT, st.integers(), min_size=2))
def test_order_of_insertion_does_not_show(document: dict[str, int]) -> None:
    assert canonical.encode(document) == canonical.encode(dict(reversed(document.items())))


def test_form() -> None:
    assert canonical.encode({"b": [1, 2.5, None, True], "a": {}, "ä": "\u2028é😀"}) == (
        '{"a":{},"b":[1,2.5,null,true],"ä":"\u2028é😀"}'.encode()
    )
    # By code point: the order of UTF-16 would put the second key first.
    assert canonical.encode({"\U00010000": 1, "\uffff": 2}) == '{"\uffff":2,"\U00010000":1}'.encode()


class Text(str):
    """Text of a subclass, which JSON says as any other."""


class Whole(IntEnum):
    """A number with a name."""

    ONE = 1


class Real(float):
    """A float of a subclass."""


class Object(dict[Any, Any]):
    """A dict of a subclass."""


class Row(list[Any]):
    """A list of a subclass."""


KEYS = TEXT | TEXT.map(Text) | st.sampled_from([None, True, 3, 0.5, Whole.ONE, (1,)])
ODD = st.sampled_from([Text("t"), Whole.ONE, Real(0.5), Real("nan"), float("-inf"), b"b", {1}, object(), 1j, dict, ...])
ANYTHING = st.recursive(
    JSON | JSON | ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).flatmap(lambda items: st.sampled_from([items, tuple(items), Row(items)])),
        st.dictionaries(KEYS, inner, max_size=3).flatmap(lambda fields: st.sampled_from([fields, Object(fields)])),
    ),
    max_leaves=8,
)


def as_json(value: Any, levels: int) -> Any:
    """Return a value with nothing but the types that JSON has; ValueError if there is none."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            if kind is float and not math.isfinite(value):
                raise ValueError(value)
            return kind.__str__(value) if kind is str else kind(value)
    if not isinstance(value, dict | list | tuple) or levels == 0:
        raise ValueError(value)
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(value)
        return {str.__str__(key): as_json(item, levels - 1) for key, item in value.items()}
    return [as_json(item, levels - 1) for item in value]


@settings(max_examples=400)
@given(ANYTHING, st.integers(0, 4))
@example(Object({Text("k"): (Text("t"), Whole.ONE, Real(0.5), Row())}), 3)
def test_what_is_refused_follows_from_types_and_levels(document: Any, levels: int) -> None:
    """Of whatever class a value is; what is not refused is written as the plain value."""
    try:
        plain = as_json(document, levels)
    except ValueError:
        with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
            canonical.encode(document, levels)
        return
    data = canonical.encode(document, levels)
    assert data == json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def nested(levels: int) -> list[Any]:
    document: list[Any] = []
    for _ in range(levels - 1):
        document = [document]
    return document


@pytest.mark.parametrize(
    "document",
    [
        float("nan"),
        [float("inf")],
        {"a": -float("inf")},
        {1: "a"},
        [{None: 1}],
        [({True: 1},)],
        {"a": object()},
        {"a": b"bytes"},
        {"a": {1, 2}},
        "\ud800",
        {"\ud800": 1},
        10**5000,
        nested(canonical.MAX_DEPTH + 1),
        nested(100_000),
    ],
    ids=lambda document: type(document).__name__,
)
def test_refuses_to_write(document: object) -> None:
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        canonical.encode(document)


def test_a_document_that_holds_itself_is_refused() -> None:
    document: list[Any] = []
    document.append(document)
    with pytest.raises(InvalidInputError):
        canonical.encode(document)


def test_levels() -> None:
    assert canonical.encode(nested(canonical.MAX_DEPTH)) == b"[" * 64 + b"]" * 64
    canonical.encode(nested(3), 3)
    with pytest.raises(InvalidInputError, match="levels"):
        canonical.encode(nested(4), 3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{}x",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"a":1,"a":1}',
        b'[{"b":{"a":1,"c":2,"a":3}}]',
        b'{"a":NaN}',
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e999]",
        b'["\\ud800"]',
        b'{"\\udFFF":1}',
        b'["\\ud83d \\ude00"]',
        b"[-1e999]",
        b"[" * 100_000,
        b"1" * 5000,
        b"{'a':1}",
        b'{"a":01}',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_refuses_to_read(data: bytes) -> None:
    with pytest.raises(FormatError, match="some/key"):
        canonical.decode(data, "some/key")


def test_escapes_of_whole_characters_are_text() -> None:
    assert canonical.decode(rb'["\ud83d\ude00", "\u0001", "\\ud800"]', "k") == ["😀", "\x01", "\\ud800"]


def test_a_duplicate_key_is_named() -> None:
    with pytest.raises(FormatError, match="duplicate key 'attempt'"):
        canonical.decode(b'{"attempt":0,"x":1,"attempt":1}', "k")


def test_foreign_documents() -> None:
    assert canonical.decode_object(b'{"format":"dcr-log","x":1}', "k", "dcr-log") == {"format": "dcr-log", "x": 1}
    for data, found in ((b'{"format":"other"}', "other"), (b"{}", None), (b"[]", "list"), (b'"dcr-log"', "str")):
        with pytest.raises(FormatError, match="foreign") as caught:
            canonical.decode_object(data, "k", "dcr-log")
        assert (caught.value.key, caught.value.expected, caught.value.found) == ("k", "dcr-log", found)


def test_sha256() -> None:
    assert canonical.sha256(b"abc") == hashlib.sha256(b"abc").hexdigest()
    canonical.check_sha256(b"abc", canonical.sha256(b"abc"), "k")
    with pytest.raises(IntegrityError) as caught:
        canonical.check_sha256(b"abd", canonical.sha256(b"abc"), "some/key")
    assert caught.value.key == "some/key"
    assert canonical.sha256(b"abc") in str(caught.value)
    assert canonical.sha256(b"abd") in str(caught.value)


class TestDerivedDocuments:
    body: ClassVar = {"format": "x", "n": 1, "s": "é"}

    def test_round_trip(self) -> None:
        data = canonical.seal_body(self.body)
        document = json.loads(data)
        assert document["sha256"] == hashlib.sha256(canonical.encode(document["body"])).hexdigest()
        assert canonical.open_body(data, "k") == self.body

    def test_every_flipped_bit_makes_it_count_as_missing(self) -> None:
        data = canonical.seal_body(self.body)
        for i in range(8 * len(data)):
            damaged = bytearray(data)
            damaged[i // 8] ^= 1 << i % 8
            assert canonical.open_body(bytes(damaged), "k") != self.body or bytes(damaged) == data

    def test_every_truncation_makes_it_count_as_missing(self) -> None:
        data = canonical.seal_body(self.body)
        assert all(canonical.open_body(data[:n], "k") is None for n in range(len(data)))

    @pytest.mark.parametrize(
        "data",
        [
            b"[]",
            b"1",
            b"{}",
            b'{"body":[],"sha256":""}',
            b'{"body":{}}',
            b'{"body":{},"sha256":1}',
            b'{"body":{"a":"\\ud800"},"sha256":"x"}',
            b'{"body":{"a":1e999},"sha256":"x"}',
            b'{"body":' + b'{"a":' * 200 + b"1" + b"}" * 200 + b',"sha256":"x"}',
        ],
    )
    def test_what_is_none_counts_as_missing(self, data: bytes) -> None:
        assert canonical.open_body(data, "k") is None
