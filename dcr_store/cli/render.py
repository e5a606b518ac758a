"""Facts about versions as plain text for people: aligned tables, human units. Pure; never colours, never truncates.

Entries that are left out for one reason are counted where they are many.
Names and messages come from strangers: each is escaped before it meets a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dcr_store.cli.output import escape
from dcr_store.wording import count as count
from dcr_store.wording import nbytes as nbytes
from dcr_store.wording import percent as percent
from dcr_store.wording import some as some
from dcr_store.wording import when as when

if TYPE_CHECKING:
    from dcr_store.history.report import VerifyReport
    from dcr_store.history.written import Written
    from dcr_store.receive.copying import CopyResult
    from dcr_store.receive.pull import PullResult
    from dcr_store.receive.results import Applied
    from dcr_store.versions.info import VersionDetail, VersionInfo

ROOT_DIGITS: Final = 12
_MAX_LEFT_OUT: Final = 4


def first_line(text: str | None) -> str:
    """Return the first line of a message, escaped."""
    lines = (text or "").strip().splitlines()
    return escape(lines[0]) if lines else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Return aligned columns, two spaces apart, without trailing spaces.

    Parameters
    ----------
    header : sequence of str
        One title for each column.
    rows : sequence of sequence of str
        Cells, already escaped.
    right : str
        Titles of the columns to align to the right, separated by spaces.
    """
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    to_right = [title in right.split() for title in header]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, to_right, strict=True)
        ).rstrip()
        for line in lines
    )


def pairs(facts: Sequence[tuple[str, str]]) -> str:
    """Return names and values in two columns."""
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in facts)


def changes(changed: int, elements: int) -> str:
    """Return how much of a state changed."""
    return f"{count(changed)} of {count(elements)} elements ({percent(changed, elements)})"


def log(versions: Sequence[VersionInfo]) -> str:
    """Return a table of versions, newest first; `versions` come oldest first."""
    header = ("version", "base", "created", "changed", "rate", "stored", "root", "message")
    rows = [
        (
            version.version,
            version.base or "-",
            when(version.created_at),
            count(version.changed),
            percent(version.changed, version.elements),
            nbytes(version.nbytes),
            version.root[:ROOT_DIGITS],
            first_line(version.message) if version.is_kept else "(expired) " + first_line(version.message),
        )
        for version in reversed(versions)
    ]
    return table(header, rows, right="changed rate stored")


def published(version: VersionInfo, left_out: Sequence[tuple[str, str]], note: str | None = None) -> str:
    """Return what a publish did."""
    base = f"on {version.base}" if version.base else "stored whole"
    lines = [
        f"published {version.version}, {base}, root {version.root[:ROOT_DIGITS]}",
        f"  {changes(version.changed, version.elements)} changed, {nbytes(version.nbytes)} stored",
    ]
    if note is not None:
        lines.append(f"  {escape(note)}")
    by_reason: dict[str, list[str]] = {}
    for path, reason in left_out:
        by_reason.setdefault(reason, []).append(path)
    for reason, paths in by_reason.items():
        if len(paths) <= _MAX_LEFT_OUT:
            lines += [f"  left out {escape(path)}: {escape(reason)}" for path in paths]
        else:
            lines.append(f"  left out {count(len(paths))} entries, such as {escape(paths[0])}: {escape(reason)}")
    return "\n".join(lines)


def detail(version: VersionDetail) -> str:
    """Return everything about one version."""
    info = version.info
    facts = [
        ("version", info.version if info.is_kept else f"{info.version} (expired): its weights cannot be read any more"),
        ("root", info.root),
        ("base", info.base or "none: stored whole"),
        ("created", when(info.created_at)),
        ("changed", changes(info.changed, info.elements)),
        ("stored", f"{nbytes(info.nbytes)} in {some(version.n_partitions, 'partition')}"),
        ("codec", version.codec),
        ("layout", version.layout),
        ("transaction", version.txid),
    ]
    if not info.is_kept:
        facts.append(("expired", "its weights are not kept any more"))
    parts = [pairs(facts)]
    if info.message and info.message.strip():
        parts.append("\n".join(f"    {escape(line)}" for line in info.message.strip().splitlines()))
    if info.metadata:
        parts.append(pairs([(escape(name), escape(_plain(value))) for name, value in sorted(info.metadata.items())]))
    if version.files:
        files = [(nbytes(size), escape(path)) for path, size in version.files]
        parts.append(table(("size", "file"), files, right="size"))
    tensors = [(dtype, shape_text(shape), escape(name)) for name, dtype, shape in version.tensors]
    parts.append(table(("dtype", "shape", f"tensor ({count(version.n_tensors)})"), tensors))
    return "\n\n".join(parts)


def pulled(result: PullResult, directory: str) -> str:
    """Return what a checkout or pull did."""
    was = "" if result.previous is None else f" (was {result.previous})"
    return (
        f"{escape(directory)} is at {result.version}{was}, root {result.root[:ROOT_DIGITS]}\n"
        f"  fetched {nbytes(result.nbytes_fetched)}, wrote {some(result.chunks_written, 'chunk')}"
        f" ({count(result.chunks_healed)} healed) in {result.seconds:.1f} s"
    )


def written(result: Written, directory: str, what: str) -> str:
    """Return what a checkout into new files did; `what` says as what the version is there."""
    return (
        f"{escape(directory)} holds {result.version}, root {result.root[:ROOT_DIGITS]}, as {what}\n"
        f"  wrote {some(result.n_tensors, 'tensor')}, {nbytes(result.nbytes)} in {result.seconds:.1f} s"
    )


def copied(result: CopyResult, directory: str) -> str:
    """Return what a pull by copy on write did."""
    was = "" if result.previous is None else f" (was {result.previous})"
    return (
        f"{escape(directory)}/current is at {result.version}{was}, root {result.root[:ROOT_DIGITS]}\n"
        f"  fetched {nbytes(result.nbytes_fetched)}, wrote {some(result.chunks_written, 'chunk')}"
        f" ({count(result.chunks_healed)} healed) in {result.seconds:.1f} s;"
        f" shares {some(result.files_linked, 'file')}, took up to {nbytes(result.nbytes_needed)} of disk"
    )


def applied(result: Applied, directory: str) -> str:
    """Return what a receiver did."""
    place = f"{escape(directory)} is at {result.version}"
    if result.previous == result.version and not result.chunks_written:
        return f"{place}, root {result.root[:ROOT_DIGITS]}"
    was = "" if result.previous is None else f" (was {result.previous})"
    return (
        f"{place}{was}, root {result.root[:ROOT_DIGITS]}\n"
        f"  had {nbytes(result.nbytes_spooled)}, fetched {nbytes(result.nbytes_fetched)}, wrote "
        f"{some(result.chunks_written, 'chunk')} ({count(result.chunks_healed)} healed) in {result.seconds:.1f} s"
    )


def report(result: VerifyReport, unit: str) -> str:
    """Return the problems, one a line, and what was looked at; `unit` is what ``n_objects`` counts."""
    lines = []
    for problem in result.problems:
        line = f"{escape(problem.key)}: {escape(problem.what)}"
        if problem.expected is not None or problem.found is not None:
            line += f" (expected {escape(str(problem.expected))}, found {escape(str(problem.found))})"
        lines.append(line)
    verdict = "all right" if result.ok else some(len(result.problems), "problem")
    looked_at = f"{some(len(result.versions), 'version')}, {some(result.n_objects, unit)}, {nbytes(result.nbytes)}"
    lines.append(f"{verdict}: {looked_at}")
    if result.unreferenced:
        lines.append(f"{some(len(result.unreferenced), 'object')} of no version (--json lists them)")
    return "\n".join(lines)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape, as ``[40,30]``."""
    return "[" + ",".join(map(str, shape)) + "]"
