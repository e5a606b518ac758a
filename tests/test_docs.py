"""The documents agree with what they describe."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_design_note_has_a_number_of_its_own() -> None:
    notes = sorted((ROOT / "docs/design").glob("*.md"))
    assert [int(note.name[:3]) for note in notes] == list(range(1, len(notes) + 1))
    for note in notes:
        assert note.read_text("utf-8").startswith(f"# {note.name[:3]}: ")


def test_cli_reference_is_current() -> None:
    from dcr_store.cli.reference import reference

    found = (ROOT / "docs/cli.md").read_text("utf-8")
    assert found == reference(), "run: python -m dcr_store.cli.reference > docs/cli.md"
