"""The dtype table against docs/spec/v1.md §5, and sizes that must not wrap."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcr_store.errors import FormatError, InvalidInputError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import DTYPES, MAX_ELEMENTS, aligned, dtype, n_elements, shown, uint_dtype, width

SPEC = Path(__file__).parents[3] / "docs" / "spec" / "v1.md"


def test_table_is_that_of_the_spec() -> None:
    rows = re.findall(r"^\| (\d) (?:byte)? *\| `(u\d+)` \| (.*) \|$", SPEC.read_text(), re.MULTILINE)
    assert [space for _, space, _ in rows] == list(SPACES)
    spec = {name: (space, int(nbytes)) for nbytes, space, names in rows for name in re.findall(r"`([A-Z]\w+)`", names)}
    assert spec == {name: (row.space, row.width) for name, row in DTYPES.items()}


@pytest.mark.parametrize("space", SPACES)
def test_spaces(space: str) -> None:
    assert uint_dtype(space).itemsize == width(space)
    assert uint_dtype(space).str.lstrip("<|") == f"u{width(space)}"
    assert aligned(0, space) == 0
    assert aligned(1, space) * width(space) == 64
    assert aligned(64 // width(space), space) * width(space) == 64


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="expected u8"):
        width("u128")
    with pytest.raises(InvalidInputError, match=r"a\.weight.*found F128"):
        dtype("F128", key="a.weight")
    with pytest.raises(FormatError, match="found None"):
        dtype(None, error=FormatError)
    with pytest.raises(FormatError):
        dtype(["BF16"], error=FormatError)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("BF16", (), 1),
        ("BF16", (0,), 0),
        ("BF16", (3, 5), 15),
        ("C128", (3,), 6),
        ("C64", (3,), 3),
        ("F4", (), 1),
        ("F4", (3,), 2),
        ("F4", (4,), 2),
        ("F6_E2M3", (4,), 3),
        ("F6_E2M3", (5,), 4),
        ("F6_E3M2", (1,), 1),
        ("BOOL", (7,), 7),
        ("U8", (1 << 31,), 1 << 31),
        ("BF16", (1 << 33, 3), 3 << 33),
        ("BF16", (1 << 52,), 1 << 52),
        ("F4", (1 << 52, 2), 1 << 52),
        ("F64", ((1 << 63) - 1, (1 << 63) - 1, 0), 0),
        ("F64", (0, *[(1 << 63) - 1] * 100), 0),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], expected: int) -> None:
    assert n_elements(DTYPES[name], shape) == expected


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("BF16", (-1,), "found -1"),
        ("BF16", (True,), "found True"),
        ("BF16", (2.0,), r"found 2\.0"),
        ("BF16", ("2",), "found 2"),
        ("BF16", (1 << 63,), "found 9223372036854775808"),
        ("BF16", (0, -1), "found -1"),
        ("BF16", (1 << 32, 1 << 32), "at most 2\\^52"),
        ("BF16", (1 << 52, 2), "at most 2\\^52"),
        ("C128", (1 << 52,), "at most 2\\^52"),
        ("F4", (1 << 52, 3), "at most 2\\^52"),
        ("U8", ((1 << 63) - 1,) * 50, "at most 2\\^52"),
        ("U8", (1 << 20_000,), "a number of 20001 bits"),
    ],
)
def test_impossible_shapes_are_refused(name: str, shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        n_elements(DTYPES[name], shape)


def test_values_are_shown_on_one_short_line() -> None:
    assert shown("a.weight") == "a.weight"
    assert shown("a\nb") == "'a\\nb'"
    assert shown([1 << 70, "x"]) == f"[{1 << 70}, 'x']"
    assert len(shown("x" * 1000)) == 120
    assert len(shown(list(range(1_000_000)))) <= 120
    assert MAX_ELEMENTS < 1 << 53
