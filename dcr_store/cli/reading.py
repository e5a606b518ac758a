"""The verbs that ask about history: ``log``, ``show``. They write nothing anywhere."""

from __future__ import annotations

import argparse

from dcr_store.cli import render
from dcr_store.cli.arguments import Verbs, line_name, natural, open_store, version_ref
from dcr_store.cli.output import json_to_stdout, to_stdout
from dcr_store.cli.verbs import add_verb, answer
from dcr_store.errors import InvalidInputError


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    parser = add_verb(
        verbs,
        "log",
        log,
        help="list the versions of a line",
        description="List the versions of a line, newest first; with --json oldest first.",
    )
    parser.add_argument("--line", metavar="L", type=line_name, default="main", help="line to list (default main)")
    parser.add_argument(
        "--where",
        metavar="FILTER",
        type=_filter,
        help="only versions of which this holds: 'step >= 100 and not reward < 0.5'; names are those of the metadata, "
        "and version, base, root, changed, elements, rate, nbytes, created_at, message, kept",
    )
    parser.add_argument("--limit", metavar="N", type=natural, help="at most N versions, the newest")

    parser = add_verb(
        verbs,
        "show",
        show,
        help="show one version",
        description="Show one version: what it is based on, its files, its tensors.",
    )
    parser.add_argument("version", metavar="VERSION", type=version_ref, help="the version")


def _filter(text: str) -> str:
    from dcr_store.history.where import parse

    try:
        parse(text)
    except InvalidInputError as error:
        # The option is named already.
        raise argparse.ArgumentTypeError(str(error).removeprefix("where: ")) from error
    return text


def log(arguments: argparse.Namespace) -> int:
    """List the versions of a line."""
    with open_store(arguments, signs=False) as store:
        versions = store.log(arguments.line, where=arguments.where, limit=arguments.limit)
    if arguments.json:
        json_to_stdout({"versions": [version.to_json() for version in versions]})
    else:
        to_stdout(render.log(versions))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Show one version."""
    with open_store(arguments, signs=False) as store:
        detail = store.show(arguments.version)
    answer(arguments, detail, render.detail)
    return 0
