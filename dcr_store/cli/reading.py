"""The verbs that ask about history: ``log``, ``show``, ``diff``. They write nothing anywhere."""

from __future__ import annotations

import argparse

from dcr_store.cli import progress, render
from dcr_store.cli.arguments import Verbs, add_json, add_store, line_name, open_store, version_ref
from dcr_store.cli.output import json_to_stdout, to_stdout


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    parser = verbs.add_parser(
        "log",
        help="list the versions of a line",
        description="List the versions of a line, newest first; with --json oldest first.",
    )
    add_store(parser)
    parser.add_argument("--line", metavar="L", type=line_name, default="main", help="line to list (default main)")
    add_json(parser)
    parser.set_defaults(run=log)

    parser = verbs.add_parser(
        "show",
        help="show one version",
        description="Show one version: what it is based on, its files, its tensors.",
    )
    add_store(parser)
    parser.add_argument("version", metavar="VERSION", type=version_ref, help="the version")
    add_json(parser)
    parser.set_defaults(run=show)

    parser = verbs.add_parser(
        "diff",
        help="compare two versions, tensor by tensor",
        description=(
            "Compare two versions, tensor by tensor: how many elements differ in their bits, and by how many units in "
            "the last place at most."
        ),
    )
    add_store(parser)
    parser.add_argument("a", metavar="A", type=version_ref, help="the version before")
    parser.add_argument("b", metavar="B", type=version_ref, help="the version after")
    add_json(parser)
    parser.set_defaults(run=diff)


def log(arguments: argparse.Namespace) -> int:
    """List the versions of a line."""
    with open_store(arguments) as store:
        versions = store.log(arguments.line)
    if arguments.json:
        json_to_stdout({"versions": [version.to_json() for version in versions]})
    else:
        to_stdout(render.log(versions))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Show one version."""
    with open_store(arguments) as store:
        detail = store.show(arguments.version)
    if arguments.json:
        json_to_stdout(detail.to_json())
    else:
        to_stdout(render.detail(detail))
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Compare two versions."""
    with open_store(arguments) as store, progress.shown():
        result = store.diff(arguments.a, arguments.b)
    if arguments.json:
        json_to_stdout(result.to_json())
    else:
        to_stdout(render.diff(result))
    return 0
