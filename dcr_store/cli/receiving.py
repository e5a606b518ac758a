"""The verbs that bring a directory to a version: ``checkout`` to a given one, ``pull`` to the newest or a given one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dcr_store.cli import progress, render
from dcr_store.cli.arguments import (
    Verbs,
    add_json,
    add_mode,
    add_store,
    directory_name,
    keep_of,
    open_store,
    version_ref,
)
from dcr_store.cli.output import json_to_stdout, to_stdout

if TYPE_CHECKING:
    from dcr_store.receive.copying import CopyResult
    from dcr_store.receive.pull import PullResult


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    parser = verbs.add_parser(
        "checkout",
        help="write a version into a directory",
        description=(
            "Write a version, with all files of its checkpoint, into a directory: a new one, an empty one, or one that "
            "holds another version of the store. Refuses one with other weights, or other files at the same paths."
        ),
    )
    add_store(parser)
    parser.add_argument("version", metavar="VERSION", type=version_ref, help="the version")
    parser.add_argument(
        "directory", metavar="DIR", type=directory_name, help="directory of the checkpoint; created if there is none"
    )
    parser.add_argument(
        "--format",
        choices=("published", "dcp"),
        metavar="FORMAT",
        default="published",
        help="published: byte for byte as it was (default); dcp: a new folder for torch.distributed.checkpoint",
    )
    _add_force(parser)
    add_json(parser)
    parser.set_defaults(run=checkout)

    parser = verbs.add_parser(
        "pull",
        help="bring a directory to a version, in place or by copy on write",
        description=(
            "Bring a directory to a version, in place, by fetching and writing only what differs. Interrupted "
            "anywhere, the same command goes on; chunks that are torn or foreign are healed from history. With "
            "--mode copy DIR holds versions side by side: the new one is built in a directory of its own, shares the "
            "files that do not change, and then the link DIR/current leads to it."
        ),
    )
    add_store(parser)
    parser.add_argument(
        "directory", metavar="DIR", type=directory_name, help="directory of the checkpoint; created if there is none"
    )
    parser.add_argument(
        "--version", metavar="VERSION", type=version_ref, help="the version (default: the newest of main)"
    )
    add_mode(parser)
    _add_force(parser)
    add_json(parser)
    parser.set_defaults(run=pull)


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="also where the directory holds something that no version accounts for"
    )


def checkout(arguments: argparse.Namespace) -> int:
    """Write a version into a directory."""
    with open_store(arguments) as store, progress.shown():
        if arguments.format == "dcp":
            written = store.checkout(arguments.version, arguments.directory, force=arguments.force, format="dcp")
            if arguments.json:
                json_to_stdout(written.to_json())
            else:
                to_stdout(render.written(written, arguments.directory))
            return 0
        result = store.checkout(arguments.version, arguments.directory, force=arguments.force)
    _tell(arguments, result)
    return 0


def pull(arguments: argparse.Namespace) -> int:
    """Bring a directory to a version."""
    keep = keep_of(arguments)
    with open_store(arguments) as store, progress.shown():
        if keep is not None:
            copied = store.pull(
                arguments.directory, version=arguments.version, mode="copy", keep=keep, force=arguments.force
            )
            _tell_copied(arguments, copied)
            return 0
        result = store.pull(arguments.directory, version=arguments.version, force=arguments.force)
    _tell(arguments, result)
    return 0


def _tell(arguments: argparse.Namespace, result: PullResult) -> None:
    if arguments.json:
        json_to_stdout(result.to_json())
    else:
        to_stdout(render.pulled(result, arguments.directory))


def _tell_copied(arguments: argparse.Namespace, result: CopyResult) -> None:
    if arguments.json:
        json_to_stdout(result.to_json())
    else:
        to_stdout(render.copied(result, arguments.directory))
