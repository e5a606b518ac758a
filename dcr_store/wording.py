"""Numbers, sizes, times and the names of strangers as text for people, on terminals and pages. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

# C0 but the newline, DEL, C1, line separators, the marks that reorder what is shown, surrogates.
_UNPRINTABLE: Final = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")


def escape(text: str) -> str:
    r"""Return `text` on one line, with control and reordering characters written as ``\n``, ``\x1b``, ``\u202e``."""
    return escape_unprintable(text).replace("\n", "\\n")


def escape_unprintable(text: str) -> str:
    """Return `text` with the characters written out that ``escape`` does, newlines as they are."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def nbytes(n: int) -> str:
    """Return a number of bytes in the largest unit that leaves at least 1."""
    if n < 1024:
        return f"{n} B"
    value, exponent = n / 1024, 0
    while value >= 1023.95 and exponent < len(_UNITS) - 1:
        value, exponent = value / 1024, exponent + 1
    return f"{value:.1f} {_UNITS[exponent]}"


def count(n: int) -> str:
    """Return an integer with thousands separated."""
    return f"{n:,}"


def some(n: int, noun: str) -> str:
    """Return a number with its noun, singular or plural."""
    return f"{count(n)} {noun}" if n == 1 else f"{count(n)} {noun}s"


def first_of(names: Sequence[str], most: int) -> str:
    """Return a list of names, of which only so many are told: ``a, b and 3 more``."""
    n_more = len(names) - most
    return ", ".join(names[:most]) + (f" and {count(n_more)} more" if n_more > 0 else "")


def percent(part: int, whole: int) -> str:
    """Return a share in percent; only nothing is ``0 %`` and only everything is ``100 %``."""
    if part == 0:
        return "0 %"
    if part == whole:
        return "100 %"
    value = 100 * part / whole
    if value < 0.01:
        return "<0.01 %"
    if value > 99.99:
        return ">99.99 %"
    return f"{value:.2f} %"


def when(created_at: str) -> str:
    """Return a time to the second, still UTC."""
    return created_at.replace("T", " ").partition(".")[0].removesuffix("Z") + "Z"
