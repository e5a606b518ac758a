"""The documents agree with what they describe."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_cli_reference_is_current() -> None:
    from dcr_store.cli.reference import reference

    found = (ROOT / "docs/cli.md").read_text("utf-8")
    assert found == reference(), "run: python -m dcr_store.cli.reference > docs/cli.md"
