"""Options of the verbs that keep a history that would do nothing are refused, before any store is asked."""

from __future__ import annotations

import pytest

from dcr_store.cli.main import USAGE, main


@pytest.mark.parametrize(
    "words",
    [
        "anchor nowhere",
        "anchor nowhere main@1 --every 10",
        "anchor nowhere main@1 --line exp",
        "tag nowhere main@1 best --line exp",
        "tag nowhere main@1 best --delete old",
        "tag nowhere --message why",
        "tag nowhere --delete best --message why",
        "pin nowhere --until 30d",
        "pin nowhere --message why",
        "pin nowhere --delete mine --until 30d",
    ],
)
def test_what_does_not_go_together(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == USAGE
    assert capsys.readouterr().err.count("\n") == 1
