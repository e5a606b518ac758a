"""Ownership documents: what they say, and that boxes and digests of all writers together are the whole layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcr_store.codec.digest import crc64, linear
from dcr_store.errors import FormatError, IntegrityError
from dcr_store.layout.boxes import Box, Dim, box
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.publish.ownership import Ownership, check_ownership, ones_of

CHUNK = 64


@pytest.fixture
def layout() -> Layout:
    builder = LayoutBuilder()
    builder.add("w", "F32", (20, 10))
    builder.add("b", "BF16", (7,))
    return builder.build()


def owner(layout: Layout, writer: str, boxes: dict[str, tuple[Box, ...]]) -> Ownership:
    return Ownership(layout.sha256, writer, boxes, ones_of(layout, boxes, CHUNK))


def columns(start: int, n: int) -> Box:
    """Some columns of w."""
    return box(0, start, [Dim(20, n, 10), Dim(n, 1, 1)])


@pytest.fixture
def pair(layout: Layout) -> list[Ownership]:
    return [
        owner(layout, "a", {"w": (columns(0, 4),), "b": (box(0, 0, [Dim(7, 1, 1)]),)}),
        owner(layout, "b", {"w": (columns(4, 6),)}),
    ]


def test_digests_are_of_ones_at_the_owned_places(layout: Layout, pair: list[Ownership]) -> None:
    mine = np.zeros((20, 10), np.uint32)
    mine[:, :4] = 0xFFFFFFFF
    bits = np.zeros(256, np.uint32)
    bits[:200] = mine.reshape(-1)
    expected = [[n, linear(crc64(chunk.copy()), 4 * CHUNK)] for n, chunk in enumerate(bits.reshape(4, CHUNK))]
    assert pair[0].ones["u32"].tolist() == expected
    assert Ownership.from_bytes(pair[0].to_bytes(), "k").to_bytes() == pair[0].to_bytes()
    check_ownership(layout, [Ownership.from_bytes(item.to_bytes(), "k") for item in pair], CHUNK)


def test_digests_that_are_not_those_of_the_boxes_are_refused(layout: Layout, pair: list[Ownership]) -> None:
    for index, space in ((0, "u16"), (1, "u32")):
        for change in (lambda ones: ones[:-1], lambda ones: ones ^ np.array([0, 1], np.uint64)):
            wrong = list(pair)
            wrong[index] = replace(pair[index], ones={**pair[index].ones, space: change(pair[index].ones[space])})
            with pytest.raises(IntegrityError, match=f"do not make up chunk . of {space}"):
                check_ownership(layout, wrong, CHUNK)


def test_boxes_have_to_be_of_the_layout(layout: Layout, pair: list[Ownership]) -> None:
    with pytest.raises(IntegrityError, match="another layout"):
        check_ownership(layout, [pair[0], replace(pair[1], layout="0" * 64)], CHUNK)
    for boxes in ({"v": (columns(4, 6),)}, {"w": (columns(5, 6),)}):
        with pytest.raises(IntegrityError, match="writer b owns what the layout does not have"):
            check_ownership(layout, [pair[0], replace(pair[1], boxes=boxes)], CHUNK)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"dims":[[20,10]', b'"dims":[[20,0]'),
        (b'"dims":[[20,10]', b'"dims":[[20]'),
        (b'"start":4', b'"start":-4'),
        (b'"ones":{', b'"ones":{"u128":[],"x":'),
        (b'"u32":[[0,', b'"u32":[[9,'),
        (b'"writer":"b"', b'"writer":"b.c"'),
        (b'"format":"dcr-ownership"', b'"format":"dcr-journal"'),
    ],
)
def test_damaged_documents_are_refused(pair: list[Ownership], old: bytes, new: bytes) -> None:
    data = pair[1].to_bytes()
    assert old in data
    with pytest.raises(FormatError):
        Ownership.from_bytes(data.replace(old, new), "k")
