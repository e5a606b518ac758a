"""What all verbs on a store have in common: how they are added, and how they print what came of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from dcr_store.cli.arguments import Verbs, add_json, add_store
from dcr_store.cli.output import json_to_stdout, to_stdout


class Document(Protocol):
    """What has a JSON form."""

    def to_json(self) -> dict[str, Any]:
        """Return it."""


D = TypeVar("D", bound=Document)


def add_verb(
    verbs: Verbs, name: str, run: Callable[[argparse.Namespace], int], *, help: str, description: str
) -> argparse.ArgumentParser:
    """Add a verb that takes STORE first, and options of its backend and ``--json``; return its parser."""
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=help, description=description)
    add_store(parser)
    add_json(parser)
    parser.set_defaults(run=run)
    return parser


def answer(arguments: argparse.Namespace, found: D, text: Callable[[D], str]) -> None:
    """Print what came of a verb, as one JSON document if ``--json`` is given, else as `text` says it."""
    if arguments.json:
        json_to_stdout(found.to_json())
    else:
        to_stdout(text(found))


def tell(arguments: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    """Print a document if ``--json`` is given, else the text."""
    if arguments.json:
        json_to_stdout(document)
    else:
        to_stdout(text)
