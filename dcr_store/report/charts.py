"""Charts as inline SVG that fills its place, with texts in HTML so that these keep their size on every screen. Pure.

Each chart is one image to who cannot see it; the table beside it says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from dcr_store.report.markup import Markup, element, joined, shortened
from dcr_store.report.scales import Axis, Classes

_N_TICKS: Final = 5
_N_DOTS: Final = 40
"""Up to so many columns each value is a dot too, and cells stand apart."""


class Value(NamedTuple):
    """What one column shows: a value between the lowest and the highest, and what to say of it."""

    value: float
    low: float
    high: float
    text: str


Values = Sequence["Value | None"]


def lines(label: str, values: Values, names: Sequence[str], axis: Axis, marks: Sequence[int] = ()) -> Markup:
    """Return values by column, joined where they are neighbours, with the range around them.

    Parameters
    ----------
    label : str
        What the chart shows, in a sentence.
    names : sequence of str
        Of the columns, for their axis.
    marks : sequence of int
        Columns with a version that was stored whole.
    """
    band, line, dots = [], [], []
    for run in _runs(values):
        points = [(column + 0.5, item) for column, item in run]
        there = [f"{x:g} {_y(axis, item.high)}" for x, item in points]
        back = [f"{x:g} {_y(axis, item.low)}" for x, item in reversed(points)]
        if any(item.low < item.high for _, item in points):
            band.append(f"M{'L'.join(there + back)}z" if len(run) > 1 else f"M{there[0]}L{back[0]}")
        line.append("M" + "L".join(f"{x:g} {_y(axis, item.value)}" for x, item in points))
        if len(values) <= _N_DOTS or len(run) == 1:
            dots += [f"M{x:g} {_y(axis, item.value)}h0" for x, item in points]
    shapes = [
        element("path", class_="band", d="".join(band)) if band else None,
        element("path", class_="line", d="".join(line)) if line else None,
        element("path", class_="dots", d="".join(dots)) if dots else None,
    ]
    return _plot(label, shapes, values, names, axis, marks)


def bars(label: str, values: Values, names: Sequence[str], axis: Axis, marks: Sequence[int] = ()) -> Markup:
    """Return values by column, as bars from 0; see ``lines``."""
    shape = "".join(
        f"M{column + 0.12:g} {_y(axis, 0)}V{_y(axis, item.value)}h.76V{_y(axis, 0)}z"
        for column, item in enumerate(values)
        if item is not None
    )
    return _plot(label, [element("path", class_="bar", d=shape) if shape else None], values, names, axis, marks)


def heat(
    label: str, rows: Sequence[tuple[str, Sequence[float | None]]], names: Sequence[str], classes: Classes
) -> Markup:
    """Return shares by row and column, as cells of a colour for each class; those that are not known have one, too.

    Parameters
    ----------
    rows : sequence of (str, sequence of float or None)
        Their names, and a share for each column.
    """
    paths: dict[str, list[str]] = {}
    for y, (_, shares) in enumerate(rows):
        for x, share in enumerate(shares):
            name = "unknown" if share is None else f"q{classes.of(share)}"
            paths.setdefault(name, []).append(f"M{x} {y}h1v1h-1z")
    drawn = [element("path", class_=name, d="".join(cells)) for name, cells in sorted(paths.items())]
    kind = "heat apart" if len(names) <= _N_DOTS else "heat"
    image = _svg(label, len(names), len(rows), drawn)
    titles = element("div", *(element("span", shortened(name), title=name[:1000]) for name, _ in rows), class_="rows")
    return element("div", titles, image, _across(names), class_=kind, style=f"--rows:{len(rows)}")


def legend(classes: Classes, low: str, high: str) -> Markup:
    """Return the colours of ``heat`` with what the first begins and the last ends with."""
    swatches = [element("i", class_=f"s{n}") for n in range(1, classes.N + 1)]
    return element(
        "p",
        element("span", low, " ", element("span", *swatches, class_="swatches"), " ", high) if classes.low else None,
        element("span", element("i", class_="s0"), " nothing"),
        element("span", element("i", class_="unknown"), " not known"),
        class_="legend",
    )


def meter(share: float) -> Markup:
    """Return a bar in a line of a table; its number stands beside it."""
    return element("span", element("i", style=f"width:{100 * share:.4g}%"), class_="meter", aria_hidden="true")


def ticks(n_columns: int) -> list[int]:
    """Return the columns whose names are said on the axis: at even steps, the first among them."""
    return list(range(0, n_columns, -(-n_columns // _N_TICKS)))


def _plot(
    label: str, shapes: Sequence[Markup | None], values: Values, names: Sequence[str], axis: Axis, marks: Sequence[int]
) -> Markup:
    n = len(values)
    grid = "".join(f"M0 {_y(axis, value)}h{n}" for value, _ in axis.ticks)
    whole = "".join(f"M{column + 0.5:g} 0v100" for column in marks)
    hits = [
        element("rect", element("title", item.text), class_="hit", x=column, y=0, width=1, height=100)
        for column, item in enumerate(values)
        if item is not None
    ]
    image = _svg(
        label,
        n,
        100,
        [
            element("path", class_="grid", d=grid),
            element("path", class_="whole", d=whole) if whole else None,
            *shapes,
            *hits,
        ],
    )
    up = [element("span", text, style=f"bottom:{100 * axis.place(value):.4g}%") for value, text in axis.ticks]
    return element("div", element("div", *up, class_="up", aria_hidden="true"), image, _across(names), class_="plot")


def _svg(label: str, width: int, height: int, shapes: Sequence[Markup | None]) -> Markup:
    return element(
        "svg",
        joined(shapes),
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )


def _across(names: Sequence[str]) -> Markup:
    n = len(names)
    said = [element("span", names[column], style=f"left:{100 * (column + 0.5) / n:.4g}%") for column in ticks(n)]
    return element("div", *said, class_="across", aria_hidden="true")


def _runs(values: Values) -> list[list[tuple[int, Value]]]:
    """Return neighbouring columns that have values together."""
    runs: list[list[tuple[int, Value]]] = []
    for column, item in enumerate(values):
        if item is None:
            continue
        if not runs or runs[-1][-1][0] != column - 1:
            runs.append([])
        runs[-1].append((column, item))
    return runs


def _y(axis: Axis, value: float) -> str:
    return f"{100 * (1 - axis.place(value)):.4g}"
