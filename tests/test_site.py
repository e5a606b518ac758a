"""The documentation is a site: it builds without a warning, from what is here alone, and asks for nothing elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
STYLE = r"""<link\b[^>]*href=["']?(?:https?:)?//"""
EXTERNAL = re.compile(f"{SOURCE}|{STYLE}")


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    # Offline for certain: what asks for a network gets none.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9"}
    environment["http_proxy"] = environment["https_proxy"]
    return subprocess.run(
        # Not --quiet: what is not shown is not counted either, and --strict finds nothing.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", out],
        env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs/site/mkdocs.yml", out)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def test_each_document_is_a_page(site: Path) -> None:
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert documents == {path.relative_to(site) for path in site.rglob("*.html")} - {Path("404.html")}


def test_pages_ask_for_nothing_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not EXTERNAL.search(path.read_text("utf-8")), path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text("utf-8")), path


def test_the_reference_has_what_a_user_imports(site: Path) -> None:
    page = (site / "api.html").read_text("utf-8")
    anchors = set(re.findall(r'id="(dcr_store\.[\w.]+)"', page))
    named = set(re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text("utf-8"), re.MULTILINE))
    assert named <= anchors
    assert {f"dcr_store.store.Store.{verb}" for verb in ("begin", "read", "pull", "checkout", "expire")} <= anchors
    assert {"dcr_store.errors.LagError", "dcr_store.layout.slices.qkv"} <= anchors
    assert "What must be the head" in page or "The version that must be the head" in page  # texts, not names alone


def test_links_out_of_the_documents_are_paths(site: Path) -> None:
    page = (site / "spec/v1.html").read_text("utf-8")
    assert "<code>schema</code>" in page
    assert "../../schema" not in page


def test_what_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs/site").mkdir(parents=True)
    for name in ("mkdocs.yml", "hooks.py"):
        text = (ROOT / "docs/site" / name).read_text("utf-8")
        (tmp_path / "docs/site" / name).write_text(text.partition("\nnav:")[0].replace("[../..]", f"[{ROOT}]") + "\n")
    (tmp_path / "docs/concepts.md").write_text("# Concepts\n")
    wrong = ["[x](nowhere.md)", "[x](concepts.md#nobody)", "[x](../nothing)", "[`x`][dcr_store.never]"]
    (tmp_path / "docs/index.md").write_text("# Home\n\n" + "\n\n".join(wrong) + "\n")
    done = build(tmp_path / "docs/site/mkdocs.yml", tmp_path / "out")
    assert done.returncode == 1
    assert all(word in done.stderr for word in ("nowhere.md", "nobody", "../nothing", "dcr_store.never"))
