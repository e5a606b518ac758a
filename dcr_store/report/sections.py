"""The sections of the page: a heading, what the figure says in a sentence, the figure, its numbers as a table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dcr_store.report.charts import Value, bars, heat, legend, lines, meter
from dcr_store.report.figures import Column, Metric, Report, StoredPartition
from dcr_store.report.markup import Markup, element, shortened
from dcr_store.report.scales import Classes, axis, number, share
from dcr_store.wording import count, nbytes, percent, some

if TYPE_CHECKING:
    from dcr_store.receive.status import GroupStatus


def rates(report: Report) -> Markup | None:
    """Return how much changed from version to version."""
    if not report.total.n_deltas:
        return None
    values = [_value(item, item.rate, item.lowest_rate, item.highest_rate, share) for item in report.columns]
    low, high, mean = (share(rate) for rate in (report.total.lowest_rate, report.total.highest_rate, report.total.rate))
    says = f"Of all elements {mean} changed from a version to the next on average, {low} at least and {high} at most."
    known = axis([item.high for item in values if item is not None], "share")
    return _section(
        "Change rate", says, lines(f"Change rate by version. {says}", values, _names(report), known, _whole(report)),
        _columns_table(
            report,
            ("version", "changed", "of", "rate", "lowest", "highest"),
            lambda item: (
                count(item.changed),
                count(item.elements),
                *map(share, (item.rate, item.lowest_rate, item.highest_rate)),
            ),
        ),
    )  # fmt: skip


def sizes(report: Report) -> Markup | None:
    """Return what versions added to the store, in bytes and as a share of a whole state."""
    total = report.total
    if not total.n_deltas or not total.dense_nbytes:  # states without a value have no share
        return None
    each = [_value(item, item.nbytes_each, None, None, lambda n: nbytes(round(n))) for item in report.columns]
    ratios = [_value(item, item.ratio, None, None, share) for item in report.columns]
    says = (
        f"A delta added {nbytes(round(total.nbytes_each or 0))} to the store on average, {share(total.ratio)} of a "
        f"whole state. All versions together took {nbytes(total.nbytes + total.whole_nbytes)}, "
        f"{percent(total.nbytes + total.whole_nbytes, total.dense_nbytes)} of what they would take whole."
    )
    names = _names(report)
    up = axis([item.value for item in each if item is not None], "nbytes")
    across = axis([item.value for item in ratios if item is not None], "share")
    return _section(
        "Bytes of a delta",
        says,
        bars(f"Bytes that a version added to the store. {says}", each, names, up, _whole(report)),
        element("h3", "Ratio: as a share of the whole state"),
        element("div", lines(f"Ratio by version. {says}", ratios, names, across, _whole(report)), class_="low"),
        _columns_table(
            report,
            ("version", "deltas", "bytes of each", "in all", "ratio"),
            lambda item: (
                count(item.n_deltas),
                nbytes(round(item.nbytes_each or 0)),
                nbytes(item.nbytes),
                share(item.ratio),
            ),
        ),
    )


def metrics(report: Report) -> Markup | None:
    """Return the numbers of the metadata."""
    drawn = [item for item in report.metrics if not item.is_constant]
    if not report.metrics:
        return None
    constant = ", ".join(
        f"{shortened(item.name)} = {number(item.found[0].mean)}" for item in report.metrics if item.is_constant
    )
    says = f"What versions carry in their metadata: {some(report.n_metrics, 'number')}"
    if report.n_metrics > len(report.metrics):
        says += f", of which these {len(report.metrics)} are there most often"
    says += f". The same in all: {constant}." if constant else "."
    charts = [element("div", element("h3", shortened(item.name)), _metric(item, report)) for item in drawn]
    rows = [(_span(column), *(_of_metric(item, at) for item in drawn)) for at, column in enumerate(report.columns)]
    header = ("version", *(shortened(item.name) for item in drawn))
    table = _table("Mean by column", header, rows, right=header) if drawn else None
    return _section("Metrics", says, element("div", *charts, class_="many") if charts else None, _details(table))


def _metric(item: Metric, report: Report) -> Markup:
    values = [
        None if found is None else _value(column, found.mean, found.lowest, found.highest, number)
        for found, column in zip(item.columns, report.columns, strict=True)
    ]
    found = item.found
    low, high = min(one.lowest for one in found), max(one.highest for one in found)
    known = axis([low, high], "number", from_zero=False)
    return lines(f"{shortened(item.name)}, from {number(low)} to {number(high)}", values, _names(report), known)


def _of_metric(item: Metric, at: int) -> str:
    found = item.columns[at]
    return "–" if found is None else number(found.mean)


def layers(report: Report) -> Markup | None:
    """Return how much of each layer changed, by version."""
    if not report.layers:
        return None
    known = [rate for item in report.layers for rate in item.rates if rate is not None]
    classes = Classes(known)
    most, least = max(report.layers, key=lambda item: item.rate), min(report.layers, key=lambda item: item.rate)
    says = (
        f"{shortened(most.name)} changed most, {share(most.rate)} on average; {shortened(least.name)} least, "
        f"{share(least.rate)}."
    )
    n_joined = sum(item.n_layers for item in report.layers)
    if n_joined > len(report.layers):
        says += f" {count(n_joined)} layers share {len(report.layers)} rows."
    rows = [(item.name, item.rates) for item in report.layers]
    header = ("layer", "tensors", "mean", *(str(column.last) for column in report.columns))
    cells = [
        (shortened(item.name), count(item.n_tensors), share(item.rate), *(share(rate) for rate in item.rates))
        for item in report.layers
    ]
    table = _table("Change rate of each layer, by the last version of a column", header, cells, right=header[1:])
    return _section(
        "Change by layer",
        says,
        heat(f"Heat map of change rates by layer and version. {says}", rows, _names(report), classes),
        legend(classes, f"up to {share(classes.low)}", share(classes.high)),
        _details(table),
    )


def steps(report: Report) -> Markup | None:
    """Return how far values moved, in units in the last place."""
    if not report.moved:
        return None
    n = max(len(item.measured.steps) for item in report.moved)
    counts = [sum(item.measured.steps[k] for item in report.moved if k < len(item.measured.steps)) for k in range(n)]
    total, largest = sum(counts), max(item.measured.largest_ulp for item in report.moved)
    up = sum(item.measured.up for item in report.moved)
    says = (
        f"In {some(len(report.moved), 'version')} that were compared with those before, bit for bit: "
        f"{percent(counts[0] if counts else 0, total)} of the changes are one unit in the last place, the largest is "
        f"{count(largest)}; {percent(up, total)} went up."
    )
    rows = [(_range(k), meter(n / max(counts)), percent(n, total), count(n)) for k, n in enumerate(counts)]
    header = ("units", "", "share", "changes")
    each = [
        (
            str(item.version),
            count(item.measured.up),
            count(item.measured.down),
            percent(item.measured.steps[0] if item.measured.steps else 0, sum(item.measured.steps)),
            count(item.measured.largest_ulp),
        )
        for item in report.moved
    ]
    columns = ("version", "up", "down", "one unit", "largest")
    return _section(
        "Sizes of changes",
        says,
        element("p", "A value that changes its sign passes all that lie between.", class_="says"),
        _table("Units in the last place", header, rows, right=("share", "changes"), class_="sizes") if counts else None,
        _details(_table("By version", columns, each, right=columns[1:])),
    )  # fmt: skip


def _range(k: int) -> str:
    if k < 20:
        return "1" if k == 0 else f"{count(1 << k)} to {count((2 << k) - 1)}"
    return f"2^{k} to below 2^{k + 1}"


def partitions(report: Report) -> Markup | None:
    """Return the largest and the slowest partitions."""
    if not report.largest:
        return None
    top, slow = report.largest[0], report.slowest
    says = f"Of the deltas that were read the largest partition takes {nbytes(top.nbytes)} ({top.version}). "
    if slow and slow[0].seconds is not None:
        says += (
            f"The last to be stored was there {slow[0].seconds:.1f} s after its version was begun ({slow[0].version}). "
            "No duration is recorded: this is from the record that began the version to the partition, by the times "
            "of the object store."
        )
    else:
        says += "The object store does not tell when it stored what."
    header = ("version", "size", "stored after", "writer", "array", "index", "tensors")
    found = [_table("Largest", header, [_partition(item) for item in report.largest], right=header[1:3])]
    if slow:
        found.append(_table("Slowest", header, [_partition(item) for item in slow], right=header[1:3]))
    return _section("Partitions", says, *found)


def _partition(item: StoredPartition) -> tuple[object, ...]:
    names = [shortened(item.first)] if item.n_tensors < 2 else [shortened(item.first), "…", shortened(item.last)]
    return (
        str(item.version),
        nbytes(item.nbytes),
        "–" if item.seconds is None else f"{item.seconds:.1f} s",
        item.writer,
        item.array,
        str(item.index),
        " ".join(names) + (f" ({count(item.n_tensors)})" if item.n_tensors > 2 else ""),
    )


def groups(report: Report) -> Markup | None:
    """Return where the groups of the line are."""
    if not report.groups:
        return None
    longest = max(item.lag for item in report.groups)
    late = [item.group for item in report.groups if item.lag]
    says = (
        f"{count(len(report.groups) - len(late))} of {some(len(report.groups), 'group')} at the head of the line; the "
        f"longest lag is {some(longest, 'version')}."
    )
    header = ("group", "active", "lag", "", "proposed", "waits for")
    rows = [
        (
            item.group,
            item.active or "–",
            count(item.lag),
            meter(item.lag / longest if longest else 0),
            item.proposed or "–",
            shortened(item.waits_for),
        )
        for item in report.groups
    ]
    table = _table("Lag: how many versions the active one is behind the head", header, rows, right=("lag",))
    return _section("Groups", says, table, _details(_members(report.groups), "Members"))


def _members(found: Sequence[GroupStatus]) -> Markup:
    rows = [
        (item.group, member.name, member.version or "–", shortened(member.doing))
        for item in found
        for member in item.members
    ]
    return _table("What members have said last", ("group", "member", "version", "doing"), rows)


# ---------------------------------------------------------------------- parts of sections


def _section(title: str, says: str, *children: Markup | None) -> Markup:
    name, says = title.lower().replace(" ", "-"), says.replace(" %", "\N{NO-BREAK SPACE}%")
    return element(
        "section", element("h2", title, id=name), element("p", says, class_="says"), *children, aria_labelledby=name
    )


def _details(table: Markup | None, title: str = "As a table") -> Markup | None:
    return None if table is None else element("details", element("summary", title), table)


def _columns_table(
    report: Report, header: Sequence[str], cells: Callable[[Column], tuple[object, ...]]
) -> Markup | None:
    """Return a row for each column; the header begins with ``version``."""
    rows = [
        (_span(item), *(cells(item) if item.n_deltas else ("stored whole", *("–" for _ in header[2:]))))
        for item in report.columns
    ]
    return _details(_table("By column", header, rows, right=header[1:]))


def _table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str] = (),
    class_: str | None = None,
) -> Markup:
    """Return a table that scrolls by itself where it is too wide; the first cell of each row names it."""
    numeric = [title in right for title in header]
    head = [
        element("th", title, scope="col", class_="n" if n else None) for title, n in zip(header, numeric, strict=True)
    ]
    body = [
        element("tr", element("th", row[0], scope="row"), *map(_cell, row[1:], header[1:], numeric[1:])) for row in rows
    ]
    table = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", *body),
        class_=class_,
    )
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(cell: object, title: str, is_numeric: bool) -> Markup:
    kind = "n" if is_numeric else "wide" if not title else "name" if title == "tensors" else None
    return element("td", cell, class_=kind)


def _value(
    column: Column, value: float | None, low: float | None, high: float | None, text: Callable[[float], str]
) -> Value | None:
    if value is None:
        return None
    low, high = value if low is None else low, value if high is None else high
    around = f" ({text(low)} to {text(high)})" if low < high else ""
    return Value(value, low, high, f"{_span(column)}: {text(value)}{around}")


def _span(column: Column) -> str:
    return str(column.first) if column.first == column.last else f"{column.first} to {column.last}"


def _names(report: Report) -> list[str]:
    """Return what the columns are called on an axis: a version of each, the first and the last of all among them."""
    return [str(column.first) for column in report.columns[:-1]] + [str(report.last)]


def _whole(report: Report) -> list[int]:
    return [at for at, column in enumerate(report.columns) if column.n_whole]
