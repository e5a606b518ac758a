"""The verbs that prove a store, or a directory, right, and make keys to sign with: ``verify``, ``keygen``.

``verify`` repairs nothing.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from dcr_store.cli import progress, render
from dcr_store.cli.arguments import (
    SIGN_KEY_VARIABLE,
    TRUST_VARIABLE,
    UsageError,
    Verbs,
    directory_name,
    open_store,
    version_ref,
)
from dcr_store.cli.output import to_stdout
from dcr_store.cli.verbs import add_verb, answer


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    parser = add_verb(
        verbs,
        "verify",
        verify,
        help="check that the store holds what its log says",
        description=(
            "Check that every object that the log leads to is there and is what its reference says. Otherwise the exit "
            "code is 1, and each problem has a line with its key. A log whose last records are gone is as sound as it "
            "was before them: see --head. With keys that are trusted, every record has to be signed by one of them."
        ),
    )
    parser.add_argument(
        "version", metavar="VERSION", nargs="?", type=version_ref, help="only this version (default: all of all lines)"
    )
    parser.add_argument(
        "--depth",
        metavar="DEPTH",
        choices=("log", "objects", "replay"),
        help="log: the logs, groups, names and manifests; objects: also every object by its SHA-256, and the roots "
        "(default); replay: also decode every chunk and compare the states' digests",
    )
    parser.add_argument("--deep", action="store_true", help="the same as --depth replay")
    parser.add_argument(
        "--trust",
        metavar="FILE",
        type=directory_name,
        help=f"file of the public keys of which one has to have signed each record (default: ${TRUST_VARIABLE})",
    )
    parser.add_argument(
        "--head",
        metavar="STAMP",
        dest="heads",
        action="append",
        default=[],
        type=stamp,
        help="LINE@NUMBER#ROOT of a version that the store had once and has to have still (repeatable)",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=directory_name,
        help="write what was found to FILE, as JSON; interrupted, the same command goes on from there",
    )
    parser.add_argument(
        "--against",
        metavar="DIR",
        type=directory_name,
        help="compare the files in DIR with VERSION (default: the head of main), bit for bit; with --deep check the "
        "version in the store as well",
    )

    parser = verbs.add_parser(
        "keygen",
        help="make a key to sign log records with",
        description=(
            "Make a private key in FILE, which its owner alone may read, and print the line of its public key, for the "
            f"lists of those who trust it. With ${SIGN_KEY_VARIABLE}=FILE each verb signs the records that it writes."
        ),
    )
    parser.add_argument("file", metavar="FILE", type=directory_name, help="file of the private key")
    parser.add_argument("--comment", metavar="TEXT", default="", help="whose it is: stands behind the public key")
    parser.add_argument("--public", action="store_true", help="only print the public key of a FILE that is there")
    parser.set_defaults(run=keygen)


def stamp(text: str) -> str:
    """Return the stamp of a rollout; an argument type."""
    version_ref(text)
    if "#" not in text:
        raise argparse.ArgumentTypeError(f"expected LINE@NUMBER#ROOT, found {text!r}")
    return text


def verify(arguments: argparse.Namespace) -> int:
    """Check a store, a version, or a directory against a version."""
    if arguments.deep and arguments.depth is not None:
        raise UsageError("--deep is the same as --depth replay; give one of them")
    depth: Any = "replay" if arguments.deep else arguments.depth
    looks_at_store = arguments.against is None or depth is not None
    if not looks_at_store and (arguments.report is not None or arguments.heads):
        raise UsageError("--report and --head are of the store, which --against looks at only with --depth")
    from dcr_store.history.report import VerifyReport

    with open_store(arguments, signs=False) as store, progress.shown():
        version, reports = arguments.version, []
        if arguments.against is not None:
            version = version or "main"
            reports.append(store.compare_directory(version, arguments.against))
        if looks_at_store:
            reports.append(store.verify(version, depth=depth, heads=arguments.heads, report=arguments.report))
    report = functools.reduce(VerifyReport.joined, reports)
    unit = "object" if arguments.against is None else "file"
    answer(arguments, report, functools.partial(render.report, unit=unit))
    return 0 if report.ok else 1


def keygen(arguments: argparse.Namespace) -> int:
    """Make a key, or tell the public part of one."""
    from dcr_store.log.key_files import make_key_file, public_line, read_signer

    if arguments.public:
        to_stdout(public_line(read_signer(arguments.file), arguments.comment))
    else:
        to_stdout(make_key_file(arguments.file, arguments.comment))
    return 0
