"""Numbers and tables as people read them, at their edges."""

from __future__ import annotations

import pytest

from dcr_store.cli import render, render_history
from dcr_store.format.marks import Named
from dcr_store.maintain.collect import Collected
from dcr_store.maintain.retention import Expiry


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


@pytest.mark.parametrize(
    ("names", "is_dry", "text"),
    [
        ((), True, "0 versions of main would expire"),
        (("main@0",), True, "1 version of main would expire: main@0"),
        (("main@0",), False, "1 version of main has expired: main@0"),
        (("main@0", "main@1"), False, "2 versions of main have expired: main@0, main@1"),
    ],
)
def test_versions_that_expire_are_counted(names: tuple[str, ...], is_dry: bool, text: str) -> None:
    assert render_history.expiry(Expiry("main", names, (), (), 0, {}), is_dry=is_dry).splitlines()[0] == text


def test_what_is_stored_before_an_expiry() -> None:
    found = Expiry("main", ("main@0",), ("main@1",), (("main@1", "main@3"),), 0, {})
    assert render_history.expiry(found, is_dry=False).splitlines()[1:3] == [
        "stored whole first: main@1",
        "folded first: main@1 to main@3",
    ]
    assert "would fold first: main@1 to main@3" in render_history.expiry(found, is_dry=True)


def test_objects_that_are_collected_are_counted() -> None:
    assert render_history.collected(Collected(["k"], 1, 1, 2, ["u"]), is_dry=False).splitlines() == [
        "deleted 1 object, 1 B",
        "1 object, 2 B, waits for the end of the grace period",
        "1 object of no transaction that the logs know was left alone",
    ]
    assert render_history.collected(Collected(), is_dry=True) == "would delete 0 objects, 0 B"


def test_pins_have_an_end_and_tags_none() -> None:
    facts = ("best", "main@2", "0" * 64, None, "2026-01-01T00:00:00Z")
    assert render_history.names([Named("tag", *facts)]).splitlines()[0] == "name  version  root              message"
    lines = render_history.names([Named("pin", *facts), Named("pin", *facts, "2026-02-01T00:00:00Z")]).splitlines()
    assert [line.split()[3] for line in lines] == ["until", "-", "2026-02-01T00:00:00Z"]
