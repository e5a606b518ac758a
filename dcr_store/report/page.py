"""A report as one HTML page without scripts, that loads nothing: its policy forbids it to. Pure.

Reads well on a phone, in the dark and on paper. Each figure has a sentence that says it and a table of its numbers.
"""

from __future__ import annotations

from importlib.resources import files

from dcr_store.format.names import version_name
from dcr_store.report import sections
from dcr_store.report.figures import Report
from dcr_store.report.markup import Markup, element
from dcr_store.report.scales import share
from dcr_store.wording import count, nbytes, some, when

MARK = "<!doctype html>\n<!-- made by dcr report -->\n"
"""What a page begins with."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report) -> str:
    """Return the page of a report."""
    first, last = version_name(report.line, report.first), version_name(report.line, report.last)
    title = f"{first} to {last}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{title} · dcr report"),
        element("style", Markup(files("dcr_store.report").joinpath("page.css").read_text("utf-8"))),
    )
    body = element(
        "body",
        element(
            "header",
            element("h1", title),
            element("p", f"{report.store} · {when(report.begun_at)} to {when(report.ended_at)}", class_="soft"),
        ),
        _facts(report),
        element(
            "main",
            sections.rates(report),
            sections.sizes(report),
            sections.metrics(report),
            sections.layers(report),
            sections.steps(report),
            sections.partitions(report),
            sections.groups(report),
        ),
        _footer(report),
    )
    return f"{MARK}{element('html', head, body, lang='en')}\n"


def _facts(report: Report) -> Markup:
    total = report.total
    facts = [("versions", count(total.n_versions), _kinds(report))]
    if total.n_deltas:
        low, high = share(total.lowest_rate), share(total.highest_rate)
        facts.append(("change rate", share(total.rate), "" if low == high else f"{low} to {high}"))
        each = nbytes(round(total.nbytes_each or 0))
        facts.append(("a delta", each, f"{share(total.ratio)} of {nbytes(report.state_nbytes)}"))
        if total.changed:
            facts.append(("per changed element", f"{total.nbytes / total.changed:.2f} B", "side files included"))
    stored = total.nbytes + total.whole_nbytes
    facts.append(("stored by commits", nbytes(stored), f"instead of {nbytes(total.dense_nbytes)}"))
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", element("b", value), element("span", rest)))
            for name, value, rest in facts
        ),
        class_="facts",
    )


def _kinds(report: Report) -> str:
    total = report.total
    kinds = [f"{count(total.n_whole)} stored whole"] if total.n_whole else []
    kinds += [f"{count(total.n_expired)} expired"] if total.n_expired else []
    return ", ".join(kinds) or "all deltas"


def _footer(report: Report) -> Markup:
    n, n_columns = report.last - report.first + 1, len(report.columns)
    notes = []
    if n > n_columns:
        notes.append(
            f"The {count(n)} versions share {n_columns} columns: lines are means over the versions of a column, bands "
            "reach from the lowest to the highest, bars are means."
        )
    deltas = some(report.total.n_deltas, "delta")
    notes.append(
        f"Rates, bytes and metrics are of all versions, from the log. Layers and partitions are from "
        f"{some(len(report.looked_into), 'delta')} that were read, of {deltas}"
        + ("." if len(report.looked_into) == report.total.n_deltas else ", evenly spread.")
    )
    notes.append("An element counts as changed if its bits differ from the version before. A rate is changed / all.")
    if report.total.n_whole:
        notes.append("Dashed lines: columns with a version that was stored whole, which has no rate.")
    notes.append("dcr report --json gives the numbers of this page.")
    return element(
        "footer", element("ul", *(element("li", note) for note in notes)), element("p", f"Made {when(report.made_at)}.")
    )
