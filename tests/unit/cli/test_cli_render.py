"""Numbers and tables as people read them, at their edges."""

from __future__ import annotations

import pytest

from dcr_store.cli import render


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**2, "1.0 MiB"),
        (int(1023.9 * 1024**2), "1023.9 MiB"),
        (1024**3 - 1, "1.0 GiB"),
        (3 * 1024**4, "3.0 TiB"),
        (5000 * 1024**5, "5000.0 PiB"),
    ],
)
def test_nbytes(n: int, text: str) -> None:
    assert render.nbytes(n) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "0 %"),
        (0, 10, "0 %"),
        (10, 10, "100 %"),
        (1, 3, "33.33 %"),
        (1, 10**9, "<0.01 %"),
        (10**9 - 1, 10**9, ">99.99 %"),
        (9999, 10000, "99.99 %"),
        (99994, 100000, ">99.99 %"),
        (1, 10000, "0.01 %"),
    ],
)
def test_percent_never_says_nothing_or_all_of_what_is_neither(part: int, whole: int, text: str) -> None:
    assert render.percent(part, whole) == text


def test_when() -> None:
    assert render.when("2026-01-01T02:03:04.567Z") == "2026-01-01 02:03:04Z"
    assert render.when("2026-01-01T02:03:04Z") == "2026-01-01 02:03:04Z"


def test_table_aligns_and_has_no_trailing_spaces() -> None:
    text = render.table(("name", "n", "note"), [("a", "10,000", "x"), ("longer", "7", "")], right="n")
    assert text == "name         n  note\na       10,000  x\nlonger       7"


@pytest.mark.parametrize(
    ("message", "text"),
    [(None, ""), ("", ""), ("  \n", ""), ("one", "one"), ("\n one\ntwo", "one"), ("a\x1b[31mb", "a\\x1b[31mb")],
)
def test_first_line(message: str | None, text: str) -> None:
    assert render.first_line(message) == text
