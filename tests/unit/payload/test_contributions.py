"""contributions.bin: form, order, and damage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr_store.errors import FormatError
from dcr_store.format.documents import SPACES
from dcr_store.payload import contributions

U64 = st.integers(0, 2**64 - 1)
TABLES = st.dictionaries(
    st.sampled_from(SPACES),
    st.lists(st.tuples(U64, U64, U64, U64), unique_by=lambda row: row[0], max_size=5).map(sorted),
)


def rows(table: list[tuple[int, int, int, int]]) -> np.ndarray:
    return np.array(table, np.uint64).reshape(len(table), 4)


def test_bytes() -> None:
    """As the spec words it."""
    data = contributions.encode({"u16": rows([(1, 2, 3, 4), (5, 6, 7, 8)]), "u64": rows([(9, 2**64 - 1, 0, 1)])})
    numbers = [0, 2, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 9, 2**64 - 1, 0, 1]
    assert data == b"dcrcont1" + b"".join(n.to_bytes(8, "little") for n in numbers)


@given(TABLES)
def test_round_trip(tables: dict[str, list[tuple[int, int, int, int]]]) -> None:
    data = contributions.encode({space: rows(table) for space, table in tables.items()})
    found = contributions.decode(data, "k")
    assert list(found) == list(SPACES)
    assert {space: [tuple(row) for row in table.tolist()] for space, table in found.items() if len(table)} == {
        space: table for space, table in tables.items() if table
    }
    assert [row[1:] for row in contributions.by_chunk(found)] == [
        row for space in SPACES for row in tables.get(space, [])
    ]


DATA = contributions.encode({"u8": rows([(0, 1, 2, 3)]), "u32": rows([(1, 1, 1, 1), (7, 1, 1, 1)])})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"dcrcont2" + DATA[8:],
        DATA[:8],
        DATA + b"\0",
        DATA[:8] + (2**61).to_bytes(8, "little") + DATA[16:],
        DATA[:8] + (2**64 - 1).to_bytes(8, "little") + DATA[16:],
        contributions.encode({"u32": rows([(7, 1, 1, 1), (1, 1, 1, 1)])}),
        contributions.encode({"u32": rows([(7, 1, 1, 1), (7, 1, 1, 1)])}),
    ],
    ids=["empty", "magic", "cut", "longer", "too many rows", "wraps", "not ascending", "twice"],
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(FormatError, match="no table of contributions") as caught:
        contributions.decode(data, "some/key")
    assert caught.value.key == "some/key"


def test_every_truncation_is_refused() -> None:
    for n in range(len(DATA)):
        with pytest.raises(FormatError):
            contributions.decode(DATA[:n], "k")
