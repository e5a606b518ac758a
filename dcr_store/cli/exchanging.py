"""The verbs between stores and other formats: ``copy``, ``detach``, ``export``, ``import``."""

from __future__ import annotations

import argparse
from typing import Final

from dcr_store.cli import progress, render_exchange
from dcr_store.cli.arguments import (
    Pairs,
    UsageError,
    Verbs,
    directory_name,
    json_or_text,
    line_name,
    open_store,
    store_url,
    version_ref,
    whole,
)
from dcr_store.cli.verbs import add_verb, answer, tell
from dcr_store.objects.urls import takes_options

_SERIES: Final = ("slime", "miles", "sglang")


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    _add_copy(verbs)
    _add_detach(verbs)
    _add_export(verbs)
    _add_import(verbs)


def _add_copy(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "copy",
        copy,
        help="copy what is committed into a copy of the store",
        description=(
            "Bring a copy of a store up to date, or make one: the same records, versions, roots and tags, each object "
            "compared with its SHA-256 first. Copies only what the copy lacks; killed at any moment, the same command "
            "goes on. A copy takes no publishes until it is detached. Pins and groups are not copied."
        ),
    )
    parser.add_argument("copy", metavar="COPY", type=store_url, help="an empty place, or a copy of the store")
    parser.add_argument(
        "--line",
        metavar="L",
        type=line_name,
        action="append",
        help="copy this line, and those that it goes on from (repeatable; default: all lines)",
    )
    parser.add_argument(
        "--since",
        metavar="VERSION",
        type=version_ref,
        help=(
            "leave out what comes before, where the line is new in the copy: it begins with the first version from "
            "this one on that is stored whole; in a copy that begins later, bring what lies between, too"
        ),
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help=(
            "also read all that the copy has of these lines, compare it with its SHA-256, and put again what is "
            "missing or damaged there"
        ),
    )
    parser.add_argument(
        "--copy-storage-option",
        dest="copy_storage_options",
        action=Pairs,
        const=json_or_text,
        help="like --storage-option, for COPY (repeatable)",
    )


def _add_detach(verbs: Verbs) -> None:
    add_verb(
        verbs,
        "detach",
        detach,
        help="make a copy a store of its own",
        description=(
            "Make a copy a store that can be published into, because its source is gone or the trainer moves here. "
            "Nothing can be copied into it any more; what was under way in the source is aborted here."
        ),
    )


def _add_export(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "export",
        export,
        help="write a range of versions as folders",
        description=(
            "Write the versions from A to B into a directory, in a folder for each: whole checkpoints, which share the "
            "files that do not change and are to be read only; or delta directories, from which receivers of slime, "
            "miles and SGLang can be fed. Run again, it writes what is not there yet."
        ),
    )
    parser.add_argument("a", metavar="A", type=version_ref, help="the first version")
    parser.add_argument("b", metavar="B", type=version_ref, help="the last version, of the same line")
    parser.add_argument("-o", "--output", metavar="DIR", type=directory_name, required=True, help="where to write them")
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        choices=("safetensors", *_SERIES),
        default="safetensors",
        help=(
            "safetensors: DIR/main@7 as published (default); slime, miles or sglang: DIR/weight_v000007, numbered as "
            "in the store, A whole and the others as deltas"
        ),
    )
    parser.add_argument(
        "--encoding",
        metavar="ENCODING",
        choices=("xor", "overwrite"),
        help="of deltas: xor (default), or overwrite, the changed bytes with their positions",
    )
    parser.add_argument(
        "--checksum",
        metavar="KIND",
        choices=("adler32", "xxh3-128", "blake3"),
        help="of deltas, which receivers compare: adler32 (default), xxh3-128, blake3",
    )
    parser.add_argument(
        "--without-first", action="store_true", help="of deltas: A is what the receivers have, write what follows"
    )


def _add_import(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "import",
        import_,
        help="publish delta directories of slime, miles or SGLang",
        description=(
            "Publish the versions of a series of delta directories (weight_v000001, …), one after the other, each "
            "compared with its checksums first. Run again, it goes on after the newest version of the line."
        ),
    )
    parser.add_argument("directory", metavar="DIR", type=directory_name, help="the directory of the series")
    parser.add_argument("--line", metavar="L", type=line_name, default="main", help="line (default main)")
    parser.add_argument(
        "--base",
        metavar="CHECKPOINT",
        type=directory_name,
        help="the checkpoint on which the first delta builds; it becomes the first version of the line",
    )
    parser.add_argument(
        "--at",
        metavar="N",
        type=whole,
        help="which version of the series the newest version of the line is, where that was published otherwise",
    )


def copy(arguments: argparse.Namespace) -> int:
    """Copy a store."""
    options: dict[str, object] = arguments.copy_storage_options
    if options and not takes_options(arguments.copy):
        raise UsageError(f"--copy-storage-option is for s3:// and http:// stores; {arguments.copy} takes none")
    with open_store(arguments) as store, progress.shown():
        found = store.copy_to(
            arguments.copy,
            lines=arguments.line,
            since=arguments.since,
            repair=arguments.repair,
            storage_options=options or None,
        )
    answer(arguments, found, render_exchange.copied)
    return 0


def detach(arguments: argparse.Namespace) -> int:
    """Make a copy a store of its own."""
    with open_store(arguments) as store:
        lines = store.detach()
    named = ", ".join(lines) or "none yet"
    tell(arguments, {"lines": lines}, f"{arguments.store} is a store of its own now; its lines go on here: {named}")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Write a range of versions as folders."""
    options = {"encoding": arguments.encoding, "checksum": arguments.checksum}
    given = {name: value for name, value in options.items() if value is not None}
    is_series = arguments.format in _SERIES
    if not is_series and (given or arguments.without_first):
        raise UsageError("--encoding, --checksum and --without-first are for --format slime")
    with open_store(arguments) as store, progress.shown():
        found = store.export(
            arguments.a,
            arguments.b,
            arguments.output,
            format="slime" if is_series else arguments.format,
            with_first=not arguments.without_first,
            **given,
        )
    answer(arguments, found, render_exchange.exported)
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Publish a series of delta directories."""
    with open_store(arguments) as store, progress.shown():
        found = store.import_series(arguments.directory, arguments.line, base=arguments.base, at=arguments.at)
    answer(arguments, found, render_exchange.imported)
    return 0
