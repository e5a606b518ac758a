"""What the command line says of copies and exports: numbers with their nouns, also of one and of thousands."""

from __future__ import annotations

from dcr_store.cli import render_exchange
from dcr_store.exchange.folders import Exported


def test_exports_of_one_and_of_many() -> None:
    one = ("main@3",)
    many = tuple(f"main@{number}" for number in range(1234))
    assert render_exchange.exported(Exported("/x", one, (), one, 5)).splitlines() == [
        "wrote 1 version to /x, 5 B: main@3",
        "1 version is left out, because it has expired",
    ]
    assert render_exchange.exported(Exported("/x", (), one, many, 0)).splitlines() == [
        "wrote 0 versions to /x, 0 B",
        "1 version was there already",
        "1,234 versions are left out, because they have expired",
    ]
    assert render_exchange.exported(Exported("/x", many, many, (), 0)).splitlines() == [
        "wrote 1,234 versions to /x, 0 B: main@0 to main@1233",
        "1,234 versions were there already",
    ]
