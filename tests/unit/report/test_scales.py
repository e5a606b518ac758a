"""Axes, classes, layers and metrics: the arithmetic of the page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcr_store.layout.layout import layout_of
from dcr_store.report.gather import cut, spread
from dcr_store.report.layers import LayerTally, layer_of
from dcr_store.report.metrics import Metrics
from dcr_store.report.scales import Classes, axis, number, share


@given(
    st.lists(st.floats(-1e299, 1e299), min_size=1, max_size=5),
    st.sampled_from(["number", "share", "nbytes"]),
    st.booleans(),
)
@example([5e-324], "number", True)
@example([-1e-323, 0.0], "number", False)
def test_axes_hold_their_values(values: list[float], unit: Any, from_zero: bool) -> None:
    found = axis(values, unit, from_zero=from_zero)
    assert all(-1e-6 <= found.place(value) <= 1 + 1e-6 for value in values)
    assert 2 <= len(found.ticks) <= 6
    assert (found.low, found.high) == (found.ticks[0][0], found.ticks[-1][0])
    assert len({text for _, text in found.ticks}) == len(found.ticks) or max(map(abs, values)) > 1e5


@pytest.mark.parametrize(
    ("values", "unit", "texts"),
    [
        ([0.017, 0.096], "share", ["0 %", "5 %", "10 %"]),
        ([0.0002, 0.00035], "share", ["0.00 %", "0.01 %", "0.02 %", "0.03 %", "0.04 %"]),
        ([460_000, 1_800_000], "nbytes", ["0", "0.5 MiB", "1.0 MiB", "1.5 MiB", "2.0 MiB"]),
        ([3, 700], "nbytes", ["0", "200 B", "400 B", "600 B", "800 B"]),
        ([0.2, 0.68], "number", ["0.2", "0.4", "0.6", "0.8"]),
        ([-1.5, 2.5], "number", ["-2", "-1", "0", "1", "2", "3"]),
        ([5.0], "number", ["2", "4", "6", "8"]),
    ],
)
def test_ticks_are_round(values: list[float], unit: Any, texts: list[str]) -> None:
    assert [text for _, text in axis(values, unit, from_zero=unit != "number").ticks] == texts


def test_classes_grow_evenly() -> None:
    found = Classes([0.0, 0.001, 0.512])
    assert [found.of(value) for value in (0.0, 0.0005, 0.001, 0.0025, 0.1, 0.511, 0.512)] == [0, 1, 1, 2, 7, 9, 9]
    assert [Classes([0.2]).of(0.2), Classes([]).of(0.0), Classes([0.0]).of(0.0)] == [5, 0, 0]


def test_classes_pass_over_few_that_are_low() -> None:
    values = [1e-6, *(0.01 + n / 1000 for n in range(30))]
    assert Classes(values).low == values[1]
    assert len({Classes(values).of(value) for value in values}) == Classes.N
    assert Classes([1e-9, 0.9]).low == 0.0009


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0 %"), (1, "100 %"), (0.0174, "1.74 %"), (0.000123, "0.0123 %"), (1e-9, "1e-07 %"), (None, "–")],
)
def test_shares(value: float | None, expected: str) -> None:
    assert share(value) == expected


def test_numbers() -> None:
    assert [number(x) for x in (3.0, 12345678.0, 0.123456, 1e20)] == ["3", "12,345,678", "0.12346", "1e+20"]


@given(st.integers(1, 300), st.integers(1, 40))
def test_cuts_are_even(n: int, n_most: int) -> None:
    runs = cut(range(n), n_most)
    assert [item for run in runs for item in run] == list(range(n))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert len(spread(range(n), n_most)) == min(n, n_most)
    assert spread(range(n), n_most)[-1] == n - 1
    assert cut([], 3) == []


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.17.mlp.experts.3.up_proj.weight", "model.layers.17"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head", "lm_head"),
        ("h.0", "h.0"),
        ("blocks.²", "blocks"),
        (".", "."),
    ],
)
def test_layers(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_layers_stand_in_the_order_of_their_numbers_and_share_rows() -> None:
    names = [f"l.{n}.w" for n in range(200)]
    layout = layout_of(dict.fromkeys(sorted(names), ("U8", (4,))))
    tally = LayerTally(layout, 1)
    tally.add(0, layout, {"l.0.w": 1, "l.199.w": 4})
    found = tally.result()
    assert [item.name for item in found[:2]] == ["l.0 … l.1", "l.2 … l.3"]
    assert (len(found), sum(item.n_layers for item in found), sum(item.elements for item in found)) == (96, 200, 800)
    assert (found[0].changed, found[0].rate, found[-1].changed) == (1, 1 / 8, 4)


def test_layers_of_other_layouts_are_counted_together() -> None:
    now, before = (
        layout_of({"a.w": ("U8", (4,))}),
        layout_of({"a.w": ("U8", (4,)), "b.w": ("U8", (8,)), "0": ("U8", ())}),
    )
    tally = LayerTally(now, 2)
    tally.add(0, before, {"b.w": 2})
    tally.add(1, now, {"a.w": 1})
    assert [(item.name, item.rates) for item in tally.result()] == [
        ("a", (0.0, 0.25)), ("(other layers)", (2 / 9, None))
    ]  # fmt: skip


def test_metrics_pass_over_what_is_no_number() -> None:
    found = Metrics(1)
    found.add(0, {"a": 1, "b": True, "c": "x", "d": None, "e": {"f": 2.5, "g": [1]}, "h": 10**400, "i": 1e301})
    assert {item.name: item.found[0].mean for item in found.result()} == {"a": 1.0, "e.f": 2.5}


def test_metrics_are_bounded() -> None:
    found = Metrics(2)
    for n in range(2):
        found.add(n, {f"m{i}": i for i in range(5000)})
    found.add(1, {"m200": 1})
    assert (found.n_names, len(found.result())) == (256, 24)
    assert found.result()[-1].name == "m200", "which most versions have"
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"x": deep, "y": 1}
    found = Metrics(1)
    found.add(0, deep)
    assert [item.name for item in found.result()] == ["x.x.x.y", "x.x.y", "x.y", "y"]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_means(values: list[float]) -> None:
    found = Metrics(1)
    for value in values:
        found.add(0, {"a": value})
    (spread,) = found.result()[0].found
    assert (spread.n, spread.lowest, spread.highest) == (len(values), min(values), max(values))
    assert math.isclose(spread.mean, float(np.mean(values)), rel_tol=1e-9, abs_tol=1e-3)
