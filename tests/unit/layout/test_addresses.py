"""The table of tensors: addresses, lookups, comparison, and documents that must be refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_store.errors import FormatError, InvalidInputError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import DTYPES, width
from dcr_store.layout.layout import Layout, LayoutBuilder

EXAMPLES = Path(__file__).parents[3] / "schema" / "examples"


def small() -> Layout:
    builder = LayoutBuilder()
    builder.add("embed.weight", "BF16", (8, 4))
    builder.add("empty", "BF16", (0, 4))
    builder.add("norm", "F32", (3,))
    builder.add("scale", "F32", ())
    builder.add("bias", "BF16", (33,))
    builder.add("packed", "F4", (5,))
    builder.add("complex", "C128", (2,))
    builder.add_alias("lm_head.weight", "embed.weight")
    builder.add_alias("output.weight", "lm_head.weight")
    return builder.build()


def test_addresses_are_handed_out_in_order_and_aligned() -> None:
    places = {entry.name: (entry.space, entry.start, entry.n_elements) for entry in small().tensors}
    assert places == {
        "embed.weight": ("u16", 0, 32),
        "empty": ("u16", 32, 0),
        "norm": ("u32", 0, 3),
        "scale": ("u32", 16, 1),
        "bias": ("u16", 32, 33),
        "packed": ("u8", 0, 3),
        "complex": ("u64", 0, 4),
    }
    assert small().spaces == {"u8": 64, "u16": 96, "u32": 32, "u64": 8}


def test_an_address_is_final_when_it_is_given() -> None:
    builder = LayoutBuilder()
    given = [builder.add(f"t{i}", name, (i, 3)) for i, name in enumerate(DTYPES)]
    assert list(builder.build().tensors) == given


def test_document_of_the_spec() -> None:
    builder = LayoutBuilder()
    builder.add("embed.weight", "BF16", (8, 12))
    builder.add_alias("lm_head.weight", "embed.weight")
    assert builder.build().to_json_bytes() == (
        b'{"format":"dcr-layout","spaces":{"u16":96,"u32":0,"u64":0,"u8":0},"tensors":[{"aliases":["lm_head.weight"],'
        b'"dtype":"BF16","name":"embed.weight","shape":[8,12],"space":"u16","start":0}]}'
    )


def test_document_round_trip() -> None:
    layout = small()
    again = Layout.from_json_bytes(layout.to_json_bytes())
    assert again.tensors == layout.tensors
    assert again.spaces == layout.spaces
    assert again.sha256 == layout.sha256
    assert Layout.from_json_bytes(LayoutBuilder().build().to_json_bytes()).tensors == ()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("valid/layout.*json")), ids=lambda path: path.name)
def test_valid_examples_of_the_schema_are_read(path: Path) -> None:
    document = json.loads(path.read_text())["document"]
    layout = Layout.from_json_bytes(canonical.encode(document))
    assert len(layout.tensors) == len(document["tensors"])
    assert layout._encoded == layout.to_json_bytes()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("invalid/layout.*json")), ids=lambda path: path.name)
def test_invalid_examples_of_the_schema_are_refused(path: Path) -> None:
    with pytest.raises(FormatError):
        Layout.from_json_bytes(canonical.encode(json.loads(path.read_text())["document"]))


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.glob("valid/layout.*json"))) >= 3
    assert len(list(EXAMPLES.glob("invalid/layout.*json"))) >= 10


def test_unknown_fields_are_ignored_and_digested() -> None:
    document = json.loads(small().to_json_bytes())
    document["from_the_future"] = 1
    document["tensors"][0]["too"] = 2
    data = json.dumps(document).encode()
    layout = Layout.from_json_bytes(data)
    assert layout.tensors == small().tensors
    assert layout.to_json_bytes() == data
    assert layout.sha256 != small().sha256


def edit(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(small().to_json_bytes())
    change(document)
    return json.dumps(document).encode()


def tensor(index: int, **fields: Any) -> bytes:
    return edit(lambda document: document["tensors"][index].update(fields))


# Tensors: 0 embed.weight, 1 empty, 2 norm, 3 scale, 4 bias, 5 packed, 6 complex.
HOSTILE = {
    "no JSON": (b"{", "no JSON|not a JSON"),
    "not UTF-8": (b'{"format":"\xff"}', "not a JSON"),
    "foreign": (b'{"format":"dcr-log"}', "expected dcr-layout, found dcr-log"),
    "a list": (b"[]", "foreign"),
    "duplicate key": (b'{"format":"dcr-layout","format":"dcr-layout"}', "duplicate key 'format'"),
    "no spaces": (edit(lambda d: d.pop("spaces")), "spaces"),
    "space missing": (edit(lambda d: d["spaces"].pop("u64")), "u8, u16, u32, u64"),
    "space too many": (edit(lambda d: d["spaces"].update(u128=0)), "u8, u16, u32, u64"),
    "space length negative": (edit(lambda d: d["spaces"].update(u8=-64)), "found -64"),
    "space length unaligned": (edit(lambda d: d["spaces"].update(u8=65)), "multiple of 64.*found 65"),
    "space length huge": (edit(lambda d: d["spaces"].update(u8=1 << 70)), f"found {1 << 70}"),
    "space length bool": (edit(lambda d: d["spaces"].update(u8=False)), "found False"),
    "space length float": (edit(lambda d: d["spaces"].update(u8=64.0)), r"found 64\.0"),
    "space too long": (edit(lambda d: d["spaces"].update(u16=128)), "expected 96, found 128"),
    "space too short": (edit(lambda d: d["spaces"].update(u16=64)), r"bias.*leaves space u16.*found 32 \+ 33"),
    "empty space too long": (edit(lambda d: d["tensors"].pop(6)), "u64 is wrong.*no tensor.*expected 0, found 8"),
    "no tensors": (edit(lambda d: d.pop("tensors")), "tensors"),
    "tensor is text": (edit(lambda d: d["tensors"].__setitem__(1, "x")), "tensor 1 is no object"),
    "name missing": (edit(lambda d: d["tensors"][2].pop("name")), "tensor 2.*not text"),
    "name number": (tensor(2, name=3), "tensor 2.*not text"),
    "name empty": (tensor(2, name=""), "tensor 2.*empty"),
    "name NUL": (tensor(2, name="a\0b"), "NUL"),
    "name surrogate": (tensor(2, name="\ud800"), "not valid Unicode"),
    "name too long": (tensor(2, name="é" * 32769), "65538 bytes"),
    "name twice": (tensor(2, name="scale"), "scale.*two tensors"),
    "name is an alias": (tensor(2, name="lm_head.weight"), "lm_head.weight.*two tensors"),
    "alias twice": (tensor(2, aliases=["x", "x"]), "#x.*two tensors"),
    "alias of two": (tensor(2, aliases=["lm_head.weight"]), "lm_head.weight.*two tensors"),
    "alias is own name": (tensor(2, aliases=["norm"]), "norm.*two tensors"),
    "alias number": (tensor(2, aliases=[1]), "norm.*alias 1"),
    "alias NUL": (tensor(2, aliases=["\0"]), "norm.*NUL"),
    "aliases text": (tensor(2, aliases="lm_head"), "norm.*aliases are wrong.*a list"),
    "aliases missing": (edit(lambda d: d["tensors"][2].pop("aliases")), "norm.*aliases"),
    "dtype unknown": (tensor(2, dtype="F128"), "norm.*found F128"),
    "dtype list": (tensor(2, dtype=["F32"]), "norm.*dtype"),
    "dtype of another space": (tensor(2, dtype="BF16"), "norm.*BF16.*expected u16, found u32"),
    "space wrong": (tensor(2, space="u16"), "norm.*expected u32, found u16"),
    "space unknown": (tensor(2, space=[]), "norm.*expected u32"),
    "shape missing": (edit(lambda d: d["tensors"][2].pop("shape")), "norm.*shape is wrong.*a list"),
    "shape number": (tensor(2, shape=3), "norm.*shape is wrong.*a list"),
    "shape negative": (tensor(2, shape=[-3]), "norm.*found -3"),
    "shape float": (tensor(2, shape=[3.0]), r"norm.*found 3\.0"),
    "shape bool": (tensor(2, shape=[True]), "norm.*found True"),
    "shape nested": (tensor(2, shape=[[3]]), "norm.*whole numbers"),
    "shape wraps to its size": (tensor(2, shape=[(1 << 32) + 1, (1 << 32) * 3 + 3]), "norm.*at most 2"),
    "shape huge": (tensor(2, shape=[1 << 64]), "norm.*found 18446744073709551616"),
    "start negative": (tensor(2, start=-16), "norm.*found -16"),
    "start bool": (tensor(2, start=False), "norm.*found False"),
    "start float": (tensor(2, start=0.0), r"norm.*found 0\.0"),
    "start huge": (tensor(2, start=1 << 64), "norm.*found 18446744073709551616"),
    "start text": (tensor(2, start="0"), "norm.*found 0"),
    "start unaligned": (tensor(3, start=17), "scale.*not aligned.*expected 16, found 17"),
    "overlap": (tensor(4, start=0), "bias.*overlaps tensor empty.*expected 32, found 0"),
    "overlap of whole tensors": (tensor(3, start=0), "scale.*overlaps tensor norm.*expected 16, found 0"),
    "gap": (tensor(2, start=16), "norm.*unused.*expected 0, found 16"),
    "start of an empty tensor": (tensor(1, start=0), "empty.*overlaps.*expected 32, found 0"),
    "end past the space": (tensor(3, shape=[17]), r"scale.*leaves space u32.*found 16 \+ 17"),
    "end past 2^52": (tensor(3, shape=[1 << 52], start=1 << 52), "scale.*leaves space"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_documents_are_refused(case: str) -> None:
    data, match = HOSTILE[case]
    with pytest.raises(FormatError, match=match) as caught:
        Layout.from_json_bytes(data, "layouts/x.json")
    assert "layouts/x.json" in str(caught.value)


def test_descending_addresses_are_refused() -> None:
    data = edit(lambda d: d["tensors"].reverse())
    with pytest.raises(FormatError, match=r"bias.*unused"):
        Layout.from_json_bytes(data)


@pytest.mark.parametrize("name", ["", "a\0", "\udc80", "x" * 65_537, None, 3, b"x"])
def test_bad_names_are_refused(name: Any) -> None:
    builder = LayoutBuilder()
    builder.add("x", "F32", ())
    with pytest.raises(InvalidInputError, match="cannot name a tensor"):
        builder.add(name, "F32", ())
    with pytest.raises(InvalidInputError, match="cannot name a tensor"):
        builder.add_alias(name, "x")


def test_names_of_all_kinds_are_kept() -> None:
    builder = LayoutBuilder()
    names = ["x" * 65_536, "../../etc/passwd", "層.重み", "a\nb", " ", "é", "e\u0301"]
    for name in names:
        builder.add(name, "F32", ())
    assert Layout.from_json_bytes(builder.build().to_json_bytes()).names() == names


def test_a_name_is_given_once() -> None:
    builder = LayoutBuilder()
    builder.add("a", "F32", ())
    builder.add_alias("b", "a")
    for name in ("a", "b"):
        with pytest.raises(InvalidInputError, match="two tensors"):
            builder.add(name, "F32", ())
        with pytest.raises(InvalidInputError, match="two tensors"):
            builder.add_alias(name, "a")
    with pytest.raises(InvalidInputError, match="alias of 'c'"):
        builder.add_alias("d", "c")
    with pytest.raises(InvalidInputError, match="F128"):
        builder.add("e", "F128", ())
    builder.add("e", "F32", ())
    assert builder.build().names() == ["a", "e", "b"]


def test_a_space_has_a_limit() -> None:
    builder = LayoutBuilder()
    builder.add("a", "U8", ((1 << 52) - 64,))
    builder.add("b", "U8", (64,))
    with pytest.raises(InvalidInputError, match="no room left"):
        builder.add("c", "U8", (1,))
    layout = builder.build()
    assert Layout.from_json_bytes(layout.to_json_bytes()).spaces["u8"] == 1 << 52
    assert [piece[1:] for piece in layout.pieces("u8", (1 << 52) - 65, 1 << 52)] == [
        ((1 << 52) - 65, (1 << 52) - 64, 0),
        (0, 64, 1),
    ]


@pytest.mark.parametrize("power", [31, 32, 33])
def test_addresses_beyond_32_bits_are_exact(power: int) -> None:
    builder = LayoutBuilder()
    builder.add("first", "BF16", (3,))
    builder.add("large", "BF16", ((1 << power) + 5,))
    builder.add("last", "BF16", (7,))
    layout = Layout.from_json_bytes(builder.build().to_json_bytes())
    last = layout.entry("last")
    assert last.start == 32 + (1 << power) + 32
    [piece] = layout.pieces("u16", (1 << power) + 1, (1 << power) + 9)
    assert piece == (layout.entry("large"), (1 << power) - 31, (1 << power) - 23, 0)
    chunk = 1 << 20
    occupied = layout.occupied("u16", chunk)
    assert occupied.sum() == 3 + (1 << power) + 5 + 7
    assert occupied[0] == chunk - 29
    assert set(occupied[1:-1].tolist()) == {chunk}
    assert occupied[-1] == 32 + 5 + 7


def test_lookups() -> None:
    layout = small()
    assert layout.names() == [*(entry.name for entry in layout.tensors), "lm_head.weight", "output.weight"]
    assert layout.entry("lm_head.weight") is layout.entry("embed.weight")
    assert layout.find("nothing") is None
    with pytest.raises(NotFoundError, match=r"did you mean lm_head\.weight"):
        layout.entry("lm_head.weights")
    with pytest.raises(NotFoundError, match="has 7 tensors"):
        layout.entry("completely different")
    assert layout.n_chunks("u16", 64) == 2
    assert layout.n_chunks("u8", 64) == 1
    assert LayoutBuilder().build().n_chunks("u8", 64) == 0
    assert "7 tensors" in repr(layout)


def test_pieces_and_occupied_of_gaps_and_ends() -> None:
    layout = small()
    assert layout.pieces("u16", 0, 0) == []
    assert layout.pieces("u32", 3, 16) == []
    assert [(p.entry.name, *p[1:]) for p in layout.pieces("u32", 2, 100)] == [("norm", 2, 3, 0), ("scale", 0, 1, 14)]
    assert [(p.entry.name, *p[1:]) for p in layout.pieces("u16", 31, 33)] == [
        ("embed.weight", 31, 32, 0),
        ("bias", 0, 1, 1),
    ]
    assert layout.occupied("u16", 64).tolist() == [64, 1]
    assert layout.occupied("u32", 64).tolist() == [4]
    assert LayoutBuilder().build().occupied("u8", 64).tolist() == []
    assert layout.occupied("u16", 64).dtype == np.int64


def test_fifty_thousand_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    builder = LayoutBuilder()
    names = list(DTYPES)
    for i in range(50_000):
        builder.add(f"model.layers.{i % 61}.mlp.experts.{i}.weight", names[i % len(names)], (i % 3, 5))
    layout = builder.build()
    data = layout.to_json_bytes()
    began = time.perf_counter()
    again = Layout.from_json_bytes(data)
    seconds = time.perf_counter() - began
    with capsys.disabled():
        print(f"\n50,000 tensors, {len(data) / 1e6:.1f} MB of JSON, read and checked in {seconds:.2f} s")
    assert again.tensors == layout.tensors
    for space in SPACES:
        occupied = again.occupied(space, 1024)
        assert occupied.sum() == sum(entry.n_elements for entry in layout.tensors if entry.space == space)
        assert occupied.size == -(-layout.spaces[space] // 1024)
        assert layout.spaces[space] * width(space) % 64 == 0
    with pytest.raises(NotFoundError, match=r"did you mean model\.layers"):
        again.entry("model.layers.12.mlp.experts.12.weigth")
