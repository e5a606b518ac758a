"""What reaches a terminal or a pipe, whatever the text and whatever the stream."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from dcr_store.cli import output
from dcr_store.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é ✓ 权重", "plain é ✓ 权重"),
        ("a\nb", "a\\nb"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("tab\there", "tab\\there"),
        ("\u202eevil", "\\u202eevil"),
        ("\udcff", "\\udcff"),
        ("family 👩\u200d👧", "family 👩\u200d👧"),
    ],
)
def test_escape(text: str, shown: str) -> None:
    assert output.escape(text) == shown


def test_lines_of_a_text_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    output.to_stdout("a\nb\x00")
    assert capsys.readouterr().out == "a\nb\\x00\n"


def test_json_is_one_ascii_line(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"name": "é\n\x9b\u202e\udcff", "n": 2**53}
    output.json_to_stdout(document)
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.count("\n") == 1
    assert json.loads(out) == document


def test_what_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.to_stdout("é")
    assert raw.getvalue() == b"\\xe9\n"


def test_a_full_disk_is_an_error_with_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(StorageError, match=r"standard output cannot be written: No space left on device"):
            output.to_stdout("x")


def test_standard_error_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    output.to_stderr("nobody listens")
