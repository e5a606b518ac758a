"""What the site does that the pages, which are read in the repository as well, do not say.

A link that leaves docs/ (to the schemas, say) is shown as the path it names, if that exists: the site has nothing
there. One that leads nowhere is left for MkDocs to complain of.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?:\.\./)+[^)#\s]*)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links out of docs/ by the paths that they name."""
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def path_alone(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, match["target"]))
        if path == "docs" or path.startswith(("docs/", "..")) or not (_ROOT / path).exists():
            return match[0]
        text = match["text"].strip("`")
        return f"`{path}`" if text.rstrip("/") == path else f"{match['text']} (`{path}`)"

    return _LINK.sub(path_alone, markdown)
