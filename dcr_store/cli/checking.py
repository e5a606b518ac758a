"""The verb that proves a store, or a directory, right: ``verify``. It repairs nothing."""

from __future__ import annotations

import argparse

from dcr_store.cli import progress, render
from dcr_store.cli.arguments import Verbs, add_json, add_store, directory_name, open_store, version_ref
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
    parser.add_argument(
        "version", metavar="VERSION", nargs="?", type=version_ref, help="only this version (default: all of all lines)"
    )
    parser.add_argument("--deep", action="store_true", help="also decode every chunk and compare the states' digests")
    parser.add_argument(
        "--against",
        metavar="DIR",
        type=directory_name,
        help="compare the files in DIR with VERSION (default: the head of main), bit for bit; with --deep check the "
        "version in the store as well",
    )
    add_json(parser)
    parser.set_defaults(run=verify)


def verify(arguments: argparse.Namespace) -> int:
    """Check a store, a version, or a directory against a version."""
    with open_store(arguments) as store, progress.shown():
        if arguments.against is None:
            report = store.verify(arguments.version, deep=arguments.deep)
        else:
            version = arguments.version or "main"
            report = store.compare_directory(version, arguments.against)
            if arguments.deep:
                report = report.joined(store.verify(version, deep=True))
    if arguments.json:
        json_to_stdout(report.to_json())
    else:
        to_stdout(render.report(report, "object" if arguments.against is None else "file"))
    return 0 if report.ok else 1
