"""The parser of ``dcr``: all verbs, one line for each mistake. Imports no verb's machinery."""

from __future__ import annotations

import argparse
import sys
from typing import Final, NoReturn

from dcr_store import __version__
from dcr_store.cli import (
    auditing,
    checking,
    demonstrating,
    exchanging,
    following,
    grouping,
    keeping,
    publishing,
    reading,
    receiving,
    relaying,
    reporting,
)
from dcr_store.cli.arguments import Verbs
from dcr_store.cli.output import to_stderr, to_stdout

_GROUPS: Final = (
    publishing,
    reading,
    auditing,
    reporting,
    receiving,
    following,
    grouping,
    relaying,
    checking,
    keeping,
    exchanging,
    demonstrating,
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are one line and whose options are never abbreviated."""

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Say what is wrong on one line of standard error, and exit with 2."""
        to_stderr(f"dcr: {message}; see: {self.prog} --help")
        sys.exit(2)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        to_stdout(f"dcr {__version__}")
        parser.exit(0)


def build() -> Parser:
    """Return the parser; it sets ``run``, a function of the namespace that returns the exit code."""
    parser = Parser(
        prog="dcr",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Bit-exact, delta-compressed, transactional history of policy weights on an object store.",
        epilog=(
            "STORE is a path, a URL (s3://bucket/prefix, http://host:port of a relay), several URLs of one store\n"
            "separated by commas, or - for the environment variable DCR_STORE.\n"
            "VERSION is LINE@NUMBER (main@3), LINE@TAG, LINE (its newest version), LINE@NUMBER#ROOT (the stamp of a\n"
            "rollout), or a state root; of a root, the first 8 digits at least."
        ),
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version of dcr_store")
    verbs: Verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs", parser_class=Parser)
    for group in _GROUPS:
        group.register(verbs)
    return parser
