"""Text of the verbs between stores, and to and from other formats. Pure: values in, lines out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dcr_store.cli.output import escape
from dcr_store.cli.render import nbytes
from dcr_store.wording import some

if TYPE_CHECKING:
    from dcr_store.exchange.copied import Copied
    from dcr_store.exchange.folders import Exported
    from dcr_store.exchange.import_deltas import Imported


_MOST_KEYS: Final = 20


def copied(found: Copied) -> str:
    """Return what a copying brought, one line for each line of the store."""
    lines = []
    for line in found.lines:
        what = some(line.n_versions, "version") if line.n_records else "nothing new"
        span = "no version" if line.head is None else f"up to {line.head}"
        if line.first is not None and line.first != line.head:
            span = f"{line.first} to {line.head}"
        lines.append(f"{line.line}: {what}; the copy has {span}")
    lines.append(f"transferred {some(found.n_objects, 'object')}, {nbytes(found.nbytes)}")
    if found.n_tags:
        lines[-1] += f"; {some(found.n_tags, 'tag')} changed"
    if (repaired := found.repaired) is not None:
        compared = f"{some(repaired.n_compared, 'object')}, {nbytes(repaired.nbytes_compared)}"
        n_keys = len(repaired.keys)
        what = f"put {some(n_keys, 'object')} again" if n_keys else "all are as they have to be"
        lines.append(f"compared {compared}: {what}")
        lines += [f"  {escape(key)}" for key in repaired.keys[:_MOST_KEYS]]
        if n_keys > _MOST_KEYS:
            lines.append(f"  and {n_keys - _MOST_KEYS:,} more; --json names all")
    return "\n".join(lines)


def exported(found: Exported) -> str:
    """Return what an export wrote."""
    lines = [f"wrote {some(len(found.written), 'version')} to {escape(found.directory)}, {nbytes(found.nbytes)}"]
    if found.written:
        lines[0] += (
            f": {found.written[0]} to {found.written[-1]}" if len(found.written) > 1 else f": {found.written[0]}"
        )
    if found.found:
        lines.append(f"{some(len(found.found), 'version')} {'was' if len(found.found) == 1 else 'were'} there already")
    if found.left_out:
        why = "it has expired" if len(found.left_out) == 1 else "they have expired"
        verb = "is" if len(found.left_out) == 1 else "are"
        lines.append(f"{some(len(found.left_out), 'version')} {verb} left out, because {why}")
    return "\n".join(lines)


def imported(found: Imported) -> str:
    """Return what an import published."""
    if not found.versions:
        return f"nothing new: {found.line} has all versions of the series"
    return "\n".join(escape(f"{version} from {place}") for version, place in found.versions)
