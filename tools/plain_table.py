"""Tables that need no terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a plain table, the first column to the left."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(head))]
    print(f"\n{title}")
    for row in cells:
        print(
            "  ".join(
                cell.rjust(width) if at else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )
