"""Which paths the files of a checkpoint may have (docs/spec/v1.md §8): one rule for documents, listings and checkouts.

Refuses what could leave the directory, hide in it, or be shown as something else: absolute paths, ``.``, ``..`` and
``.dcr`` as components, backslashes, control characters, components over 255 bytes, text that is not Unicode.
"""

from __future__ import annotations

import re
from typing import Final

OWN_DIRECTORY: Final = ".dcr"
"""Where a receiver keeps its marker and lock beside a checkpoint's files."""
_MAX_COMPONENT_NBYTES: Final = 255
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def path_problem(path: str) -> str | None:
    """Return why `path` cannot be that of a checkpoint's file, or None if it can."""
    try:
        components = [part.encode() for part in path.split("/")]
    except UnicodeEncodeError:
        return "it is not valid UTF-8"
    if _CONTROL.search(path):
        return "it contains a control character"
    if "\\" in path:
        return "it contains a backslash"
    for part in components:
        if part in (b"", b".", b"..", OWN_DIRECTORY.encode()):
            return f"it has the component {part.decode()!r}"
        if len(part) > _MAX_COMPONENT_NBYTES:
            return f"a component has {len(part)} bytes, over the {_MAX_COMPONENT_NBYTES} allowed"
    return None
