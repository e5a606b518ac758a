"""The verb that makes a page of a history: ``report``."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from dcr_store.cli import progress
from dcr_store.cli.arguments import (
    UsageError,
    Verbs,
    directory_name,
    natural,
    open_store,
    version_ref,
    whole,
)
from dcr_store.cli.output import escape, json_to_stdout, to_stdout
from dcr_store.cli.verbs import add_verb
from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.targets.own_directories import refuse_inside_store
from dcr_store.wording import nbytes, some


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "report",
        report,
        help="make a page of a line's history: rates, bytes, metrics, layers",
        description=(
            "Make one HTML page, which loads nothing, of a line from one version to another: how much changed, what "
            "it took, the numbers in the metadata, how much of each layer changed, how far values moved, "
            "partitions, groups' lag."
        ),
    )
    parser.add_argument(
        "--from", dest="start", metavar="A", type=version_ref, help="first version (default: the line's)"
    )
    parser.add_argument("--to", dest="stop", metavar="B", type=version_ref, default="main", help="last (default main)")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=directory_name, help="the page; an older one is replaced"
    )
    parser.add_argument(
        "--sample", metavar="N", type=natural, default=120, help="read N deltas at most, evenly spread (default 120)"
    )
    parser.add_argument(
        "--measure",
        metavar="N",
        type=whole,
        default=8,
        help="compare the values of N versions with those before, for which anchors are read (default 8, 0: none)",
    )


def report(arguments: argparse.Namespace) -> int:
    """Make a page, print the numbers, or both."""
    if arguments.output is None and not arguments.json:
        raise UsageError("-o FILE or --json is needed")
    path = None if arguments.output is None else Path(arguments.output)
    if path is not None:
        _check_place(path)
    with open_store(arguments) as store, progress.shown():
        found = store.report(
            arguments.start, arguments.stop, n_looked_into=arguments.sample, n_measured=arguments.measure
        )
    if path is not None:
        page = found.to_html().encode()
        _write(path, page)
        if not arguments.json:
            n = found.last - found.first + 1
            to_stdout(f"{escape(str(path))} tells of {some(n, 'version')} ({nbytes(len(page))})")
    if arguments.json:
        json_to_stdout(found.to_json())
    return 0


def _check_place(path: Path) -> None:
    """Refuse a place inside a store, and a file that is no page of ours."""
    from dcr_store.report.page import MARK

    refuse_inside_store(path.parent, "the page")
    try:
        with path.open("rb") as file:
            found = file.read(len(MARK))
    except FileNotFoundError:
        if path.parent.is_dir():
            return
        raise InvalidInputError("there is no such directory for the page; make it", key=str(path.parent)) from None
    except OSError as error:
        raise StorageError(f"cannot be replaced by a page: {error.strerror or error}", key=str(path)) from error
    if found not in (MARK.encode(), b""):
        raise InvalidInputError("there is something else than a page of dcr report; choose another name", key=str(path))


def _write(path: Path, page: bytes) -> None:
    """Write a file at once: whoever reads it meanwhile has the old page or the new one."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:32]}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(page)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise StorageError(f"the page cannot be written: {error.strerror or error}", key=str(path)) from error
