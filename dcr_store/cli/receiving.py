"""The verbs that bring a directory to a version: ``checkout`` to a given one, ``pull`` to the newest or a given one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dcr_store.cli import progress, render
from dcr_store.cli.arguments import (
    UsageError,
    Verbs,
    add_mode,
    directory_name,
    keep_of,
    open_store,
    tensor_part,
    version_ref,
)
from dcr_store.cli.output import json_to_stdout, to_stdout
from dcr_store.cli.verbs import add_verb

if TYPE_CHECKING:
    from dcr_store.history.written import Written
    from dcr_store.layout.selection import Index
    from dcr_store.receive.copying import CopyResult
    from dcr_store.receive.pull import PullResult


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    parser = add_verb(
        verbs,
        "checkout",
        checkout,
        help="write a version into a directory",
        description=(
            "Write a version, with all files of its checkpoint, into a directory: a new one, an empty one, or one that "
            "holds another version of the store. Refuses one with other weights, or other files at the same paths. "
            "With --tensor only these tensors, or parts of them, as model.safetensors in a new directory; no more is "
            "fetched than the chunks that hold them."
        ),
    )
    parser.add_argument("version", metavar="VERSION", type=version_ref, help="the version")
    parser.add_argument(
        "directory", metavar="DIR", type=directory_name, help="directory of the checkpoint; created if there is none"
    )
    parser.add_argument(
        "--format",
        choices=("published", "dcp"),
        metavar="FORMAT",
        default="published",
        help="published: byte for byte as it was (default); of tensors, or a folder of torch.distributed.checkpoint, "
        "it gives model.safetensors; dcp: a new folder for torch.distributed.checkpoint",
    )
    parser.add_argument(
        "--tensor",
        dest="tensors",
        metavar="NAME[SLICE]",
        type=tensor_part,
        action="append",
        help="only this tensor, or this part of it, in Python's notation: NAME, NAME[5], NAME[0:64, ..., ::2] "
        "(repeatable); a name that ends in brackets is followed by [...]",
    )
    _add_force(parser)

    parser = add_verb(
        verbs,
        "pull",
        pull,
        help="bring a directory to a version, in place or by copy on write",
        description=(
            "Bring a directory to a version, in place, by fetching and writing only what differs. Interrupted "
            "anywhere, the same command goes on; chunks that are torn or foreign are healed from history. With "
            "--mode copy DIR holds versions side by side: the new one is built in a directory of its own, shares the "
            "files that do not change, and then the link DIR/current leads to it."
        ),
    )
    parser.add_argument(
        "directory", metavar="DIR", type=directory_name, help="directory of the checkpoint; created if there is none"
    )
    parser.add_argument(
        "--version", metavar="VERSION", type=version_ref, help="the version (default: the newest of main)"
    )
    add_mode(parser)
    _add_force(parser)


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="also where the directory holds something that no version accounts for"
    )


def checkout(arguments: argparse.Namespace) -> int:
    """Write a version, or some of its tensors, into a directory."""
    wanted: dict[str, Index | None] = {}
    for name, index in arguments.tensors or ():
        if name in wanted:
            raise UsageError(f"--tensor {name} is given twice; write its parts into directories of their own")
        wanted[name] = index
    if wanted and arguments.format != "published":
        raise UsageError("--tensor is not for --format dcp")
    version, directory, force = arguments.version, arguments.directory, arguments.force
    with open_store(arguments, signs=False) as store, progress.shown():
        written = result = None
        if wanted:
            written = store.checkout(version, directory, force=force, tensors=wanted)
        elif arguments.format == "dcp":
            written = store.checkout(version, directory, force=force, format="dcp")
        else:
            result = store.checkout(version, directory, force=force)
    # Not while progress is drawn: what is printed meanwhile goes to the terminal.
    if written is not None:
        _tell_written(arguments, written)
    if result is not None:
        _tell(arguments, result)
    return 0


def pull(arguments: argparse.Namespace) -> int:
    """Bring a directory to a version."""
    keep = keep_of(arguments)
    with open_store(arguments, signs=False) as store, progress.shown():
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


def _tell_written(arguments: argparse.Namespace, result: Written) -> None:
    if arguments.json:
        json_to_stdout(result.to_json())
    else:
        what = "a distributed checkpoint" if arguments.format == "dcp" else "these tensors alone"
        to_stdout(render.written(result, arguments.directory, what))


def _tell_copied(arguments: argparse.Namespace, result: CopyResult) -> None:
    if arguments.json:
        json_to_stdout(result.to_json())
    else:
        to_stdout(render.copied(result, arguments.directory))
