"""The table of what broke elsewhere (docs/design/007): each test is there, under its number, and none is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
TABLE = HERE.parents[1] / "docs" / "design" / "007-what-broke-elsewhere.md"
MODULES = [
    "test_field_regressions",
    "test_receiver_regressions",
    "test_field_live_tensors",
    "test_field_receivers",
    "test_field_publishers",
]
ITEMS = set(range(1, 26))
PUBLISHING = {4, 6, 9, 10, 11, 12, 13, 14, 18, 20, 21, 22, 24, 25}


def numbers(name: str) -> set[int]:
    """Return the items that a test's name begins with."""
    match = re.match(r"test_((?:[0-9]{2}_)+)", name)
    return set() if match is None else {int(digits) for digits in match[1].split("_") if digits}


def written() -> dict[str, set[int]]:
    """Return the tests that there are, and their items."""
    found = {}
    for module in MODULES:
        tree = ast.parse((HERE / f"{module}.py").read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[f"{module}::{node.name}"] = numbers(node.name)
    return found


def test_the_table_is_that_of_the_tests() -> None:
    rows = re.findall(r"^\| ([0-9]+) \| .* \| (.*) \|$", TABLE.read_text("utf-8"), re.MULTILINE)
    told = {int(item): set(re.findall(r"`([^`]+)`", tests)) for item, tests in rows}
    assert set(told) == ITEMS
    tests = written()
    there = {item: {name for name, items in tests.items() if item in items} for item in ITEMS}
    assert told == there


def test_what_concerns_publishers_is_tried_with_slices() -> None:
    found = [items for name, items in written().items() if name.startswith("test_field_publishers::")]
    assert set().union(*found) == PUBLISHING
