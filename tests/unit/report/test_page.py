"""The page of a report: well formed, by itself, and safe whatever strangers call their tensors."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from dcr_store.history.changed import Measured
from dcr_store.receive.status import GroupStatus, MemberStatus
from dcr_store.report.charts import ticks
from dcr_store.report.figures import Column, Layer, Metric, Moved, Report, Spread, StoredPartition
from dcr_store.report.markup import Markup, element
from dcr_store.report.page import MARK

HOSTILE = "\"'><script>alert(1)</script><img src=//evil.example/x>&amp;\x1b[2J\u202e\n\0"


def made(n_columns: int = 7, n_layers: int = 5, name: str = "net") -> Report:
    """Return a report of 10 versions a column, the first of them whole, with a name of strangers everywhere."""
    columns = [
        Column(
            10 * n, 10 * n + 9, int(n == 0), 0, 1000 * (n + 1), 100_000, 0.001, 0.2, 5000 * (n + 1), 200_000, 0, 2000
        )
        for n in range(n_columns)
    ]
    spreads = tuple(None if n == 1 else Spread(10, n / 7, n / 8, n / 6) for n in range(n_columns))
    constant = tuple(Spread(10, 7.0, 7.0, 7.0) for _ in range(n_columns))
    rates = [None, 0.0, *(0.001 * n for n in range(n_columns))][:n_columns]
    layers = tuple(Layer(f"{name}.{n}", 1, 3, 10, 1000, tuple(rates)) for n in range(n_layers))
    partition = StoredPartition(12, "w0", "u16/mask", 3, 123456, 2.5, 9, f"{name}.a", f"{name}.b")
    members = [MemberStatus("r1", None, None, f"waits for {name}")]
    group = GroupStatus(
        "eu", "main", "main@69", "main@60", "0" * 64, None, 9, name, "expected", "newest", None, members
    )
    return Report(
        store=f"s3://bucket/{name}", line="main", first=0, last=10 * n_columns - 1, made_at="2026-01-03T00:00:00.000Z",
        begun_at="2026-01-01T00:00:00.000Z", ended_at="2026-01-02T00:00:00.000Z", state_nbytes=2000,
        columns=tuple(columns), metrics=(Metric(name, spreads), Metric(f"{name}.seed", constant)), n_metrics=2,
        looked_into=tuple(range(9, 10 * n_columns, 10)), layers=layers,
        moved=(Moved(9, Measured(30, 25, 300, (50, 0, 4, 0, 0, 0, 0, 0, 1))),), largest=(partition,),
        slowest=(partition,), groups=(group,),
    )  # fmt: skip


class Reader(HTMLParser):
    """Requires that elements are closed in their order, and notes what there is."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.mark.parametrize("name", ["net", HOSTILE, "x" * 65_536, "…\u00e9\U0001f600"])
@pytest.mark.parametrize("n_columns", [1, 41])
def test_well_formed_and_by_itself(name: str, n_columns: int) -> None:
    page = made(n_columns, name=name).to_html()
    assert page.startswith(MARK)
    found = Reader(page)
    used = {tag for tag, _ in found.tags}
    assert used <= {
        "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "p", "dl", "div", "dt", "dd", "b",
        "span", "i", "main", "section", "svg", "path", "rect", "details", "summary", "table", "caption", "thead",
        "tbody", "tr", "th", "td", "footer", "ul", "li",
    }  # fmt: skip
    attributes = {(tag, key) for tag, given in found.tags for key in given}
    assert not {key for _, key in attributes} & {"src", "href", "srcset", "action", "data", "onload", "xlink:href"}
    assert not any(key.startswith("on") for _, key in attributes)
    css = re.search("<style>(.*?)</style>", page, re.DOTALL)
    assert css is not None
    assert not re.search(r"url\(|@import|//", css[1])
    policy = next(item["content"] for item in found.all("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    ids = [given["id"] for _, given in found.tags if "id" in given]
    assert len(ids) == len(set(ids))
    assert {given["aria-labelledby"] for given in found.all("section")} == set(ids)


def test_names_of_strangers_are_text() -> None:
    page = made(name=HOSTILE).to_html()
    found = Reader(page)
    assert "<script" not in page
    assert "<img" not in page
    shown = HOSTILE[:20]
    assert shown in found.text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page)
    assert "\\x1b[2J\\u202e\\n\\x00" in found.text


def test_long_names_are_shortened() -> None:
    found = Reader(made(name="a" * 40_000 + "z").to_html())
    assert "a" * 36 + " … " in found.text
    assert "a" * 37 not in found.text.replace(made(name="a" * 40_000 + "z").store, "")


def test_each_image_says_what_it_shows_and_has_a_table() -> None:
    found = Reader(made().to_html())
    images = found.all("svg")
    assert len(images) == 5, "rate, bytes, ratio, one metric that is not constant, layers"
    assert all(item["role"] == "img" and item["aria-label"] for item in images)
    assert len(found.all("details")) == 6
    assert all(item.get("scope") in ("col", "row") for item in found.all("th"))


def cells(page: str, caption: str) -> list[list[str]]:
    """Return the texts of a table's rows."""
    table = page[page.index(f"<caption>{caption}</caption>") :]
    rows = re.findall("<tr>(.*?)</tr>", table[: table.index("</table>")])
    return [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_the_tables_have_the_numbers() -> None:
    page = made().to_html()
    assert cells(page, "By column")[1] == ["0 to 9", "1,000", "100,000", "1.00 %", "0.1 %", "20.00 %"]
    assert cells(page, "Units in the last place")[3][2:] == ["7.27 %", "4"]
    assert [row[0] for row in cells(page, "Units in the last place")[-2:]] == ["128 to 255", "256 to 511"]
    assert cells(page, "By version")[1] == ["9", "30", "25", "90.91 %", "300"]
    assert cells(page, "Slowest")[1] == ["12", "120.6 KiB", "2.5 s", "w0", "u16/mask", "3", "net.a … net.b (9)"]
    assert cells(page, "Mean by column")[:3] == [["version", "net"], ["0 to 9", "0"], ["10 to 19", "–"]]
    heat = cells(page, "Change rate of each layer, by the last version of a column")
    assert heat[0] == ["layer", "tensors", "mean", "9", "19", "29", "39", "49", "59", "69"]
    assert heat[1] == ["net.0", "3", "1.00 %", "–", "0 %", "0 %", "0.1 %", "0.2 %", "0.3 %", "0.4 %"]


def test_what_is_not_there_is_left_out() -> None:
    whole = Column(0, 0, 1, 0, 0, 0, None, None, 0, 0, 1000, 2000)
    empty = replace(
        made(), last=0, columns=(whole,), metrics=(), n_metrics=0, looked_into=(), layers=(), moved=(), largest=(),
        slowest=(), groups=(),
    )  # fmt: skip
    found = Reader(empty.to_html())
    assert found.all("section") == []
    assert "nan" not in found.text


def test_numbers_without_a_length() -> None:
    """Deltas that change nothing, metrics of one value, values that are all negative or tiny."""
    column = Column(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0)
    for value in (0.0, -5.0, 1e-290, -1e299, 7.25):
        metric = Metric("m", (Spread(1, value, value, value),))
        moved = Moved(0, Measured(0, 0, 0, ()))
        page = replace(made(), last=0, columns=(column,), metrics=(metric,), layers=(), moved=(moved,)).to_html()
        assert not re.search(r"\b(nan|inf)\b", Reader(page).text)
        assert "nan" not in page


def test_pages_stay_small() -> None:
    assert len(made(120, 97, "model.layers").to_html()) < 1 << 20


@pytest.mark.parametrize("n", [1, 2, 5, 6, 8, 120])
def test_ticks_are_few_and_even(n: int) -> None:
    found = ticks(n)
    assert found[0] == 0
    assert len(found) <= 5
    assert len({b - a for a, b in itertools.pairwise(found)}) <= 1


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (element("p", "a<b", None, Markup("<i></i>"), 3), "<p>a&lt;b<i></i>3</p>"),
        (element("p", class_='"x', aria_label=None, tabindex=0), '<p class="&quot;x" tabindex="0"></p>'),
        (element("meta", charset="utf-8"), '<meta charset="utf-8">'),
        (element("p", "\x07\n"), "<p>\\x07\\n</p>"),
    ],
)
def test_markup(found: Any, expected: str) -> None:
    assert found == expected
