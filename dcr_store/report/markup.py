"""HTML from Python: elements whose texts and attributes are escaped unless they are markup already. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final

from dcr_store.wording import escape

_VOID: Final = ("meta",)
MAX_CHARACTERS: Final = 72
"""Names of strangers have up to 65,536 bytes; pages show the beginning and the end of longer ones than this."""


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Parameters
    ----------
    tag : str
    children : Markup, or anything with a text
        Texts are escaped, and control characters in them written out. None is left out.
    attributes : object
        By name; ``class_`` is ``class`` and ``aria_label`` is ``aria-label``. None is left out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(escape(str(value)))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{joined(children)}</{tag}>")


def joined(children: Iterable[object]) -> Markup:
    """Return elements and texts one after the other."""
    return Markup("".join(map(_one, children)))


def shortened(name: str) -> str:
    """Return a name, of a long one the beginning and the end."""
    if len(name) <= MAX_CHARACTERS:
        return name
    half = MAX_CHARACTERS // 2
    return f"{name[:half]} … {name[-half:]}"


def _one(child: object) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Markup) else html.escape(escape(str(child)))
