"""Command lines: what is a mistake, and how values are read. Nothing here opens a store."""

from __future__ import annotations

import argparse
import warnings

import pytest

from dcr_store.cli import arguments
from dcr_store.cli.main import main, one_line
from dcr_store.cli.parser import build
from dcr_store.errors import IntegrityError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-2.50", -2.5),
        ("1e-6", 1e-6),
        ("true", True),
        ("null", None),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        # text: not what JSON calls a number or constant, or nothing that JSON can say
        ("True", "True"),
        ("01", "01"),
        ("+1", "+1"),
        ("1_000", "1_000"),
        ("1.", "1."),
        (" 1", " 1"),
        ("٣", "٣"),
        ("Nancy", "Nancy"),
        ("1e999x", "1e999x"),
        ("-Infinite", "-Infinite"),
        ("[1]", "[1]"),
        ('"x"', '"x"'),
        ("a=b", "a=b"),
        ("", ""),
        ("9" * 1000, int("9" * 1000)),
        ("9" * 5000 + "x", "9" * 5000 + "x"),
    ],
)
def test_meta_values(text: str, value: object) -> None:
    found = arguments.scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_pairs_are_collected() -> None:
    line = ["publish", "S", "C", "--meta", "a=1", "--meta", "b=x=y", "--storage-option", 'c={"d":[1]}']
    parsed = build().parse_args([*line, "--storage-option", "e=f"])
    assert parsed.meta == {"a": 1, "b": "x=y"}
    assert parsed.storage_options == {"c": {"d": [1]}, "e": "f"}
    assert build().parse_args(["log", "S"]).storage_options == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ([], "VERB"),
        (["brew"], "invalid choice: 'brew'"),
        (["log"], "STORE"),
        (["log", ""], "argument STORE: expected a path or URL, found nothing"),
        (["log", "-"], "DCR_STORE, which is not set"),
        (["log", "S", "--lin", "x"], "unrecognized arguments: --lin x"),
        (["log", "S", "--where", "step = 3"], "argument --where: the filter is wrong at character 6 (expected == to"),
        (
            ["blame", "S", "x[0:2"],
            "argument TENSOR: x[0:2: the closing bracket of the index is missing (expected NAME[",
        ),
        (
            ["checkout", "S", "main", "D", "--tensor", "x["],
            "argument --tensor: x[: the closing bracket of the index is",
        ),
        (["log", "S", "T"], "unrecognized arguments: T"),
        (["publish", "S"], "CHECKPOINT"),
        (["publish", "S", "C", "--meta", "novalue"], "argument --meta: expected KEY=VALUE, found 'novalue'"),
        (["publish", "S", "C", "--meta", "=1"], "argument --meta: expected KEY=VALUE, found '=1'"),
        (["publish", "S", "C", "--meta", "a=1", "--meta", "a=1"], "argument --meta: 'a' is given twice"),
        *(
            (
                ["publish", "S", "C", "--meta", f"step={text}"],
                f"argument --meta: step: expected a number that JSON can say, or text, found {text[:40]}; see",
            )
            for text in ("NaN", "nan", "-nan", "Infinity", "-Infinity", "inf", "+inf", "1e999", "-1e999", "9" * 5000)
        ),
        (["log", "S", "--storage-option", "foo=1"], "--storage-option is for s3:// and http:// stores; S takes none"),
        (["init", "memory://x", "--storage-option", "foo=1"], "memory://x takes none; see: dcr init --help"),
        (["status", "file:///a,file:///b", "--storage-option", "foo=1"], "takes none"),
        (
            [
                "relay",
                "--upstream",
                "S",
                "--listen",
                "h:1",
                "--cache",
                "C",
                "--max-bytes",
                "1",
                "--storage-option",
                "a=1",
            ],
            "--storage-option is for s3:// and http:// stores, and no --upstream is one; see: dcr relay --help",
        ),
        (["log", "S", "--storage-option", "a"], "argument --storage-option: expected KEY=VALUE"),
        (["init", "S", "--codec", "gzip"], "argument --codec: invalid choice: 'gzip'"),
        (["init", "S", "--chunk-elements", "1e6"], "argument --chunk-elements: expected a number"),
        (["init", "S", "--chunk-elements", "0"], "argument --chunk-elements: expected a number"),
        (["init", "S", "--chunk-elements", "100"], "argument --chunk-elements: expected a power of two"),
        (["init", "S", "--chunk-elements", "33554432"], "argument --chunk-elements: expected a power of two"),
        (["demo", "--steps", "-1"], "argument --steps: expected"),
        (["log", "S", "--line", "a/b"], "argument --line: 'a/b' cannot name a line"),
        (["publish", "S", "C", "--line", "../x"], "argument --line: '../x' cannot name a line"),
        (["show", "S", "main@"], "argument VERSION: 'main@' is no version"),
        (["diff", "S", "main@0", "a b"], "argument B: 'a b' is no version"),
        (["checkout", "S", "..", "D"], "argument VERSION: '..' is no version"),
        (["pull", "S", "D", "--version", "@1"], "argument --version: '@1' is no version"),
        (["pull", "S", "D", "--keep", "2"], "--keep is for --mode copy; see: dcr pull --help"),
        (["follow", "S", "D", "--keep", "2"], "--keep is for --mode copy; see: dcr follow --help"),
        (["follow", "S", "D", "--group", "eu"], "--group and --name go together"),
        (["follow", "S", "D", "--group", "a/b", "--name", "r"], "argument --group: 'a/b' cannot name a group"),
        (["follow", "S", "D", "--group", "eu", "--name", "r.1"], "argument --name: 'r.1' cannot name a member"),
        (["follow", "S", "D", "--until", "bla"], "argument --until: expected LINE@NUMBER, found 'bla'"),
        (["follow", "S", "D", "--line", "a", "--until", "b@1"], "--until b@1 is no version of line a"),
        (
            ["follow", "S", "D", "--until", "b@1"],
            "--until b@1 is no version of line main; give the --line that it is of",
        ),
        (["pin", "S", "main@1", "p", "--until", "999999999w"], "argument --until: expected a duration (30d) or a date"),
        (["pin", "S", "main@1", "p", "--until", "9999-12-31T23:59:59-23:00"], "argument --until: expected a duration"),
        (["follow", "S", "D", "--engine", "foo"], "argument --engine: foo: is no kind of engine"),
        (["follow", "S", "D", "--engine", "sglang=ftp://x"], "argument --engine: ftp://x: is no address"),
        (["follow", "S", "D", "--on-applied", " "], "argument --on-applied: "),
        (["verify", "S", "x y"], "argument VERSION: 'x y' is no version"),
        (["group", "S", "create", "a/b"], "argument GROUP: 'a/b' cannot name a group"),
        (["group", "S", "create", "eu", "a.b"], "argument NAME: 'a.b' cannot name a member"),
        (["group", "S", "create"], "the following arguments are required: GROUP; see"),
        (["group", "S", "create", "eu", "--line", "l"], "nobody could come into the group; give names, or --anyone"),
        (["group", "S", "propose", "eu", "@"], "argument VERSION: '@' is no version"),
        (["publish", "S", "C", "--wait-for", "eu,"], "argument --wait-for: '' cannot name a group"),
        (["publish", "S", "C", "--timeout", "5"], "--timeout is how long to wait for the groups of --wait-for"),
        (
            ["publish", "S", "C", "--wait-for", "eu", "--timeout", "soon"],
            "argument --timeout: expected a number of sec",
        ),
        (["publish", "S", "C", "--max-ahead", "2"], "--max-ahead needs groups: --ahead-of, or --wait-for"),
        (["publish", "S", "C", "--max-ahead", "0", "--ahead-of", "eu"], "argument --max-ahead: expected a number"),
        (["publish", "S", "C", "--ahead-of", "eu"], "--ahead-of is for --max-ahead"),
        (["log", "ftp://host/x"], "argument STORE: cannot keep a store at 'ftp://host/x': protocol 'ftp'"),
        (["log", "s3:///x"], "argument STORE: not a store's URL"),
        (["log", "http://user:word@host"], "argument STORE: not a relay's URL"),
        (["log", "http://host:1,/data/store"], "'/data/store' in a list of URLs is no URL"),
        (["log", "http://host:1,data/store"], "'data/store' in a list of URLs is no URL"),
        (["log", "s3://bucket/x,../store"], "'../store' in a list of URLs is no URL"),
        (["status", "file:///a,~/store"], "a directory too: file:///PATH"),
        (
            ["relay", "--upstream", "gs://x", "--listen", "h:1", "--cache", "C", "--max-bytes", "1"],
            "argument --upstream",
        ),
        (["publish", "S", "C", "--meta", "a\nb"], "found 'a\\nb'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    line: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DCR_STORE", raising=False)
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dcr: ")
    assert err.count("\n") == 1
    assert says in err
    assert err.endswith("--help\n")


def test_a_dash_is_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DCR_STORE", "/somewhere")
    assert build().parse_args(["log", "-"]).store == "/somewhere"
    monkeypatch.setenv("DCR_STORE", "")
    assert main(["log", "-"]) == 2
    assert "DCR_STORE" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["--help"], ["--version"], ["log", "--help"]])
def test_help_and_version_succeed(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert out
    assert err == ""


@pytest.mark.parametrize(
    ("text", "line"), [("a\nb", "a b"), (" a \r\n\n  b ", "a b"), ("a  b", "a  b"), ("a\u2028b\x85c", "a b c")]
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line


class _Verb:
    """Stands in for the parser: a verb that fails as told."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def parse_args(self, argv: object) -> argparse.Namespace:
        return argparse.Namespace(run=self.run)

    def run(self, parsed: argparse.Namespace) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            IntegrityError("is\n  damaged", key="a/b", expected=1, found="\x1b"),
            1,
            "dcr: a/b: is damaged (expected 1, found \\x1b)",
        ),
        (ZeroDivisionError("x\ny"), 1, "dcr: unexpected ZeroDivisionError: x y; please report"),
        (KeyboardInterrupt(), 130, "dcr: interrupted"),
        (RecursionError(), 1, "dcr: unexpected RecursionError; please report"),
    ],
)
def test_every_failure_is_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dcr_store.cli.main.build", lambda: _Verb(error))
    monkeypatch.delenv("DCR_DEBUG", raising=False)
    assert main([]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1
    if code == 1:
        monkeypatch.setenv("DCR_DEBUG", "1")
        assert main([]) == 1
        err = capsys.readouterr().err
        assert err.startswith("Traceback")
        assert line in err


def test_our_warnings_are_lines_and_those_of_libraries_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class LibraryWarning(UserWarning):
        pass

    def warn(parsed: argparse.Namespace) -> int:
        for category, module in [
            (UserWarning, "dcr_store.objects.probe"),
            (UserWarning, "zarr.core"),
            (LibraryWarning, "dcr_store.payload.arrays"),
            (RuntimeWarning, "dcr_store.codec.chunk"),
        ]:
            warnings.warn_explicit(f"of\n {category.__name__} in {module}", category, "file.py", 1, module)
        return 0

    verb = _Verb(KeyboardInterrupt())
    verb.run = warn  # type: ignore[method-assign]
    monkeypatch.setattr("dcr_store.cli.main.build", lambda: verb)
    shown = warnings.showwarning
    assert main([]) == 0
    assert capsys.readouterr().err == "dcr: warning: of UserWarning in dcr_store.objects.probe\n"
    assert warnings.showwarning is shown
