"""Each ``dcr …`` of the documents is a command line that the parser takes: no verb or option that is not there.

Whole lines of code blocks are parsed; what is only mentioned, or has an ellipsis, must name a verb, or an act of
``dcr group``, and options that it has.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcr_store.cli.parser import build
from dcr_store.cli.reference import parsers

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/cli.md"})
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DCR = re.compile(r"(?:\S*/)?dcr")
VARIABLE = re.compile(r"[A-Z_]+=\S*")
NAMES = {path.relative_to(ROOT).as_posix(): path for path in DOCUMENTS}


def words_of(line: str) -> Iterator[list[str]]:
    """Yield the command lines of ``dcr`` in a line of shell, each as its words."""
    lexer = shlex.shlex(re.sub(r"\s#\s.*", "", line), posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    command: list[str] = []
    is_target = False
    for word in [*lexer, ";"]:
        if set(word) <= set("<>&") and set(word) & set("<>"):
            is_target = True
            if command and command[-1].isdigit():  # 2>&1
                command.pop()
        elif set(word) <= set(";|&()"):
            while command and VARIABLE.fullmatch(command[0]):
                command = command[1:]
            if command and DCR.fullmatch(command[0]):
                yield command[1:]
            command = []
        elif is_target:
            is_target = False
        else:
            command.append(word)


def commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """Yield the words behind each ``dcr`` of a document, and whether they stand alone in a block."""
    for language, block in FENCE.findall(text):
        if language in ("console", "sh", "bash", "text", ""):
            for line in block.replace("\\\n", " ").splitlines():
                prompt, dollar, rest = line.partition("$ ")
                shown = rest if dollar and not prompt.strip() else line if language in ("sh", "bash", "") else ""
                for words in words_of(shown) if re.search(r"\bdcr ", shown) else ():
                    yield words, "…" not in shown
    for mention in re.findall(r"`((?:\S*/)?dcr [^`]+)`", FENCE.sub("", text)):
        for words in words_of(mention.replace("\n", " ").replace("'", "")):
            yield words, False


def mentioned(words: list[str]) -> str | None:
    """Return what is wrong with the verb and the options of an incomplete command line."""
    parser: argparse.ArgumentParser = build()
    verbs = parsers(parser)
    if words[0].startswith("-"):
        return None
    if words[0] not in verbs:
        return f"there is no verb {words[0]}"
    parser = verbs[words[0]]
    acts = parsers(parser)
    if acts:
        named = [word for word in words[1:] if re.fullmatch(r"[a-z]+", word) and word in acts]
        if not named and len(words) > 3:
            return "no act"
        known = {option for act in (acts[name] for name in named) for option in act._option_string_actions}
    else:
        known = set(parser._option_string_actions)
    unknown = {word for word in words if word.startswith("--")} - known - {"--help"}
    return f"no such option: {', '.join(sorted(unknown))}" if unknown else None


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_ones(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_STORE", "weights")
    parser = build()
    wrong = []
    for words, is_whole in commands(NAMES[name].read_text("utf-8")):
        if is_whole:
            try:
                parser.parse_args(words)
            except SystemExit as stop:
                if stop.code:
                    wrong.append(f"dcr {shlex.join(words)}: {capsys.readouterr().err.strip()}")
        elif problem := mentioned(words):
            wrong.append(f"dcr {shlex.join(words)}: {problem}")
    assert not wrong


def test_wrong_ones_would_be_seen() -> None:
    block = "$ dcr log s | head -3 # x\nout\n$ A=b dcr pul s d & dcr gc s --grase 1h >out 2>&1\n"
    assert list(commands(f"```console\n{block}```\n`dcr expire --x`")) == [
        (["log", "s"], True),
        (["pul", "s", "d"], True),
        (["gc", "s", "--grase", "1h"], True),
        (["expire", "--x"], False),
    ]
    assert mentioned(["expire", "--x"]) == "no such option: --x"
    assert mentioned(["expired"]) == "there is no verb expired"
    assert mentioned(["group", "s", "propose", "eu", "--json"]) is None
    with pytest.raises(SystemExit):
        build().parse_args(["gc", "s", "--grase", "1h"])


def test_there_are_many() -> None:
    n_whole = sum(is_whole for path in DOCUMENTS for _, is_whole in commands(path.read_text("utf-8")))
    assert n_whole > 60
