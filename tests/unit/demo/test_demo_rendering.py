"""What the demonstration says of a run, and that it says so where something differs."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dcr_store.demo.drills import Drill, Plan, make_plan
from dcr_store.demo.rendering import Outcome, Received, Row, drill_table, table, verdict

SAME = Received(0.5, 0.1, False, True)
ROW = Row("main@1", 1, 0.5, 0.25, 0.5, 0.25, True, 100, 10_000, 2_048, 20_480, 0.2, {"eu": SAME, "us": SAME})


def outcome(**changes: Any) -> Outcome:
    return Outcome("store", (ROW, replace(ROW, **changes)), (Drill("main@1", "eu", "killed"),), 1.0)


def shown(found: Outcome) -> str:
    out = io.StringIO()
    console = Console(file=out, width=79)
    console.print(table(found))
    console.print(drill_table(found))
    return out.getvalue()


def test_equal_runs_are_called_equal() -> None:
    found = outcome(version="main@2")
    assert found.equal
    assert found.to_json()["equal"]
    lines = shown(found).splitlines()
    assert " ".join(lines[-2].split()) == "main@2 0.5000 0.5000 equal 100 2 10.0% 0.20 0.50 0.50 equal"
    assert lines[-1].split() == ["main@1", "eu", "killed"]
    assert verdict(found).startswith("All 2 versions equal in 2 receivers, bit for bit")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward": 0.5000001}, "0 of 2 versions in the receivers, 1 points of the training curve"),
        ({"loss": None}, "0 of 2 versions in the receivers, 1 points of the training curve"),
        ({"reference_equal": False}, "0 of 2 versions in the receivers, 1 points of the training curve"),
        ({"receivers": {"eu": SAME, "us": replace(SAME, equal=False)}}, "1 of 2 versions in the receivers, 0 points"),
    ],
)
def test_any_difference_is_told(changes: dict[str, Any], says: str) -> None:
    found = outcome(**changes)
    assert not found.equal
    assert not found.to_json()["equal"]
    assert verdict(found) == f"DIFFERENT: {says}" + ("" if says.endswith("curve") else " of the training curve") + "."
    assert shown(found).count("DIFFER") == 1


def test_versions_of_earlier_runs_and_those_jumped_over_have_no_seconds() -> None:
    later = replace(SAME, promote_s=None, jumped_over=True)
    earlier = replace(SAME, promote_s=None)
    text = shown(outcome(publish_s=None, receivers={"eu": earlier, "us": later}))
    assert "10.0% - - later equal" in " ".join(text.split())


def test_a_table_fits_into_79_columns() -> None:
    wide = outcome(version="main@128", changed=2_219_776, nbytes=2_928_640, publish_s=123.45, reward=0.25)
    assert all(len(line) <= 79 for line in shown(wide).splitlines())
    assert "2,219,776" in shown(wide)
    assert "123.45" in shown(wide)


@pytest.mark.parametrize(
    ("first", "steps", "plan"),
    [
        (0, 1, Plan()),
        (0, 2, Plan(1, 1, 2)),
        (5, 3, Plan(6, 6, 8)),
        (0, 12, Plan(4, 6, 8)),
        (12, 12, Plan(16, 18, 20)),
    ],
)
def test_drills_fit_into_any_run(first: int, steps: int, plan: Plan) -> None:
    assert make_plan(first, steps) == plan
