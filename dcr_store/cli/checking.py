"""The verb that proves a store, or a directory, right: ``verify``. It repairs nothing."""

from __future__ import annotations

import argparse

from dcr_store.cli import progress, render
from dcr_store.cli.arguments import Verbs, add_json, add_store, open_store
from dcr_store.cli.output import json_to_stdout, to_stdout


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    parser = verbs.add_parser(
        "verify",
        help="check that the store holds what its log says",
        description=(
            "Check that every object that the log leads to is there and is what its reference says. Otherwise the exit "
            "code is 1, and each problem has a line with its key."
        ),
    )
    add_store(parser)
    parser.add_argument("version", metavar="VERSION", nargs="?", help="only this version (default: all of all lines)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--deep", action="store_true", help="also decode every chunk and compare the states' digests")
    how.add_argument("--against", metavar="DIR", help="compare the files in DIR with VERSION instead, bit for bit")
    add_json(parser)
    parser.set_defaults(run=verify, usage_error=parser.error)


def verify(arguments: argparse.Namespace) -> int:
    """Check a store, a version, or a directory against a version."""
    if arguments.against is not None and arguments.version is None:
        arguments.usage_error("--against needs VERSION")
    with open_store(arguments) as store, progress.shown():
        if arguments.against is not None:
            report = store.compare_directory(arguments.version, arguments.against)
        else:
            report = store.verify(arguments.version, deep=arguments.deep)
    if arguments.json:
        json_to_stdout(report.to_json())
    else:
        to_stdout(render.report(report, "object" if arguments.against is None else "file"))
    return 0 if report.ok else 1
