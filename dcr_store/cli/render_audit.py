"""Text of the verbs that ask what changed, where and when. Pure: values in, lines out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcr_store.cli.output import escape
from dcr_store.cli.render import ROOT_DIGITS, changes, count, nbytes, percent, shape_text, some, table

if TYPE_CHECKING:
    from dcr_store.history.blame import Blame, BlameRun
    from dcr_store.history.changed import Diff, Measured, ModuleDiff, TensorDiff
    from dcr_store.history.identify import Identified

_MEASURED = ("up", "down", "max-ulp")


def diff(result: Diff, n_rows: int) -> str:
    """Return what differs between two versions, one tensor a line; tensors that are the same are only counted.

    Parameters
    ----------
    n_rows : int
        How many rows that changed most, of all tensors, to list.
    """
    same = sum(item.status == "same" for item in result.tensors)
    rows = [
        (
            item.status,
            *_counts(item),
            *_measured(item.measured),
            nbytes(item.nbytes),
            item.dtype,
            shape_text(item.shape),
            escape(item.name),
        )
        for item in result.tensors
        if item.status != "same"
    ]
    lines = [_title(result)]
    if rows:
        header = ("status", "changed", "rate", *_MEASURED, "size", "dtype", "shape", "tensor")
        lines.append(table(header, rows, right="changed rate up down max-ulp size"))
    lines.append(f"{some(same, 'tensor')} unchanged")
    top = [(row, item) for item in result.tensors for row in item.top_rows]
    top.sort(key=lambda pair: -pair[0].changed)
    if n_rows and top:
        cells = [(count(row.changed), str(row.row), escape(item.name)) for row, item in top[:n_rows]]
        lines += ["", table(("changed", "row", "tensor"), cells, right="changed row")]
    return "\n".join(lines)


def modules(result: Diff, depth: int | None) -> str:
    """Return what differs, one module a line; modules that are the same are only counted."""
    found = result.modules(depth)
    rows = [
        (
            f"{item.n_changed}/{item.n_tensors}",
            *_counts(item),
            *_measured(item.measured),
            nbytes(item.nbytes),
            _name(item),
        )
        for item in found
        if item.n_changed
    ]
    lines = [_title(result)]
    if rows:
        header = ("tensors", "changed", "rate", *_MEASURED, "size", "module")
        lines.append(table(header, rows, right="tensors changed rate up down max-ulp size"))
    lines.append(f"{some(sum(not item.n_changed for item in found), 'module')} unchanged")
    return "\n".join(lines)


def _title(result: Diff) -> str:
    return f"{result.a} .. {result.b}: {changes(result.changed, result.elements)} changed"


def _counts(item: TensorDiff | ModuleDiff) -> tuple[str, str]:
    return count(item.changed), percent(item.changed, item.elements)


def _measured(measured: Measured | None) -> tuple[str, str, str]:
    if measured is None:
        return "-", "-", "-"
    return count(measured.up), count(measured.down), count(measured.largest_ulp)


def _name(item: ModuleDiff) -> str:
    return escape(item.name) if item.name else "(no module)"


def identified(found: Identified) -> str:
    """Return which version a checkpoint holds, or which is nearest and what differs."""
    path = escape(found.path)
    if found.version is None:
        lines = [f"{path} holds no version, and no tensor of one that is kept"]
    elif found.is_exact:
        proof = "bit for bit" if found.is_proven else "by its digests"
        lines = [f"{path} holds {found.version}, {proof}, root {found.root[:ROOT_DIGITS] if found.root else '-'}"]
        if len(found.versions) > 1:
            lines.append(f"  the same weights: {', '.join(found.versions[1:])}")
        if found.expired:
            lines.append(f"  expired, so that only the log knows of it: {', '.join(found.expired)}")
    else:
        lines = [
            f"{path} holds no version; nearest is {found.version}, "
            f"of which it has {count(found.chunks_equal)} of {some(found.n_chunks, 'chunk')}"
        ]
    rows = [
        (item.status, count(item.differing), percent(item.differing, item.elements), escape(item.name))
        for item in found.tensors
    ]
    if rows:
        lines.append(table(("status", "differing", "rate", "tensor"), rows, right="differing rate"))
    return "\n".join(lines)


def blame(found: Blame) -> str:
    """Return which version changed which rows last, one run of rows a line."""
    rows = [(_rows(run.start, run.stop, run.step), _changed_by(run)) for run in found.runs]
    title = f"{escape(found.tensor)} at {found.version}: {some(found.n_rows, 'row')}, {some(len(rows), 'run')}"
    return "\n".join([title, table(("rows", "changed last"), rows)] if rows else [title])


def _rows(start: int, stop: int, step: int) -> str:
    if stop - start <= step:
        return str(start)
    return f"{start}:{stop}" if step == 1 else f"{start}:{stop}:{step}"


def _changed_by(run: BlameRun) -> str:
    before, after = "" if run.is_exact else "at or before ", "" if run.is_kept else " (expired)"
    return f"{before}{run.version}{after}"
