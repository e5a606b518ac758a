"""The verbs that write to a store: ``init`` and ``publish``. Neither creates what it was not asked to create."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcr_store.cli import progress, render
from dcr_store.cli.arguments import (
    Pairs,
    UsageError,
    Verbs,
    directory_name,
    group_names,
    line_name,
    natural,
    open_store,
    scalar,
    seconds,
    storage_options,
)
from dcr_store.cli.output import json_to_stdout, to_stdout
from dcr_store.cli.verbs import add_verb
from dcr_store.errors import ConflictError, LagError, NotFoundError

if TYPE_CHECKING:
    from dcr_store.publish.transaction import Transaction
    from dcr_store.store import Store
    from dcr_store.versions.info import VersionInfo


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    parser = add_verb(
        verbs,
        "init",
        init,
        help="create a store",
        description="Create an empty store. Refuses a place where one is, and storage that cannot do put-if-absent.",
    )
    parser.add_argument(
        "--codec",
        choices=("dcr.delta", "portable"),
        metavar="CODEC",
        default="dcr.delta",
        help="how payload is encoded: dcr.delta (default) or portable, which needs only the core codecs of Zarr",
    )
    parser.add_argument(
        "--chunk-elements",
        type=_chunk_elements,
        metavar="N",
        help="elements in a chunk, a power of two from 64 to 16777216 (default 1048576)",
    )

    parser = add_verb(
        verbs,
        "publish",
        publish,
        help="publish a checkpoint as the next version of a line",
        description="Publish a checkpoint (a directory of safetensors files, or a torch distributed checkpoint) as the "
        "next version of a line.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=directory_name,
        help="an HF directory of safetensors files, one such file, or a folder of torch.distributed.checkpoint",
    )
    parser.add_argument("--line", metavar="L", type=line_name, default="main", help="line to publish on (default main)")
    parser.add_argument("--message", metavar="M", help="what this version is, for people")
    parser.add_argument(
        "--meta",
        action=Pairs,
        const=scalar,
        help="metadata of the version (repeatable); VALUE is a JSON number, true, false, null, or else text",
    )
    parser.add_argument(
        "--baseline",
        metavar="DIR",
        type=directory_name,
        help="keep the published bits in DIR, so that the next publish need not read them back (default: .dcr-baseline "
        "beside CHECKPOINT)",
    )
    parser.add_argument(
        "--owner", metavar="O", help="run id; who publishes again under the same one takes up what it left unfinished"
    )
    parser.add_argument("--takeover", action="store_true", help="take over a transaction that another owner left open")
    parser.add_argument(
        "--wait-for",
        metavar="G,G",
        type=group_names,
        default=[],
        help="after the commit, wait until these groups have promoted the version, or a later one",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        help="with --wait-for: fail if that takes longer; the version stays committed (default: wait for ever)",
    )
    parser.add_argument(
        "--max-ahead",
        metavar="K",
        type=natural,
        help="refuse to begin a version that comes more than K after the active one of a group of --ahead-of",
    )
    parser.add_argument(
        "--ahead-of", metavar="G,G", type=group_names, help="groups for --max-ahead (default: those of --wait-for)"
    )


def _chunk_elements(text: str) -> int:
    n = natural(text)
    if not 64 <= n <= 1 << 24 or n & (n - 1):
        raise argparse.ArgumentTypeError(f"expected a power of two from 64 to 16777216, found {text}")
    return n


def init(arguments: argparse.Namespace) -> int:
    """Create a store."""
    import dcr_store

    options: dict[str, Any] = {}
    if arguments.chunk_elements is not None:
        options["chunk_elements"] = arguments.chunk_elements
    store = dcr_store.create(
        arguments.store, codec=arguments.codec, storage_options=storage_options(arguments), **options
    )
    if arguments.json:
        json_to_stdout(
            {
                "url": store.url,
                "store_id": store.store_id,
                "codec": store.codec,
                "chunk_elements": store.chunk_elements,
            }
        )
    else:
        to_stdout(
            f"created a store at {store.url}\n"
            f"  id {store.store_id}, codec {store.codec}, chunks of {render.count(store.chunk_elements)} elements"
        )
    return 0


def publish(arguments: argparse.Namespace) -> int:
    """Publish a checkpoint."""
    from dcr_store.targets.dcp import open_source

    ahead_of = _ahead_of(arguments)
    # Not resolved: beside a link means beside the link.
    checkpoint = Path(os.path.abspath(arguments.checkpoint))  # noqa: PTH100
    if not checkpoint.exists():
        raise NotFoundError("there is no such checkpoint; check the path", key=arguments.checkpoint)
    # Before anything is begun, and a baseline fetched: what is no checkpoint, or not whole, leaves no trace.
    with open_source(arguments.checkpoint):
        pass
    with open_store(arguments) as store, progress.shown():
        beside = checkpoint.parent / ".dcr-baseline" / f"{store.store_id[:16]}-{arguments.line}"
        transaction = _begun(store, arguments, arguments.baseline or beside, ahead_of)
        late: LagError | None = None
        with transaction:
            summary = transaction.write_checkpoint(arguments.checkpoint)
            try:
                version = transaction.commit(wait_for=arguments.wait_for, timeout_s=arguments.timeout)
            except LagError as error:
                # Not what the API advises: a second publish would commit another version.
                error.advice = f"dcr status {shlex.quote(arguments.store)} shows who it waits for"
                late, version = error, store.show(transaction.version).info
        note = _layout_change(store, version)
    if arguments.json:
        left_out = [{"path": path, "reason": reason} for path, reason in summary.left_out]
        json_to_stdout({**version.to_json(), "left_out": left_out})
    else:
        to_stdout(render.published(version, summary.left_out, note))
    if late is not None:
        raise late
    return 0


def _begun(store: Store, arguments: argparse.Namespace, baseline: str | Path, ahead_of: list[str]) -> Transaction:
    """Begin the version; what the errors of the API advise is said in terms of the command line."""
    try:
        return store.begin(
            arguments.line,
            message=arguments.message,
            metadata=arguments.meta,
            owner=arguments.owner,
            takeover=arguments.takeover,
            baseline=baseline,
            max_ahead=arguments.max_ahead,
            ahead_of=ahead_of,
        )
    except LagError as error:
        error.advice = "publish again when they have caught up"
        raise
    except ConflictError as error:
        if error.advice is not None:
            error.advice = "wait for it, or take over with --takeover if you know that it is dead"
        raise


def _ahead_of(arguments: argparse.Namespace) -> list[str]:
    """Return for which groups ``--max-ahead`` counts; refuse options that say nothing without another one."""
    if arguments.timeout is not None and not arguments.wait_for:
        raise UsageError("--timeout is how long to wait for the groups of --wait-for")
    if arguments.max_ahead is None:
        if arguments.ahead_of is not None:
            raise UsageError("--ahead-of is for --max-ahead")
        return []
    groups: list[str] = arguments.wait_for if arguments.ahead_of is None else arguments.ahead_of
    if not groups:
        raise UsageError("--max-ahead needs groups: --ahead-of, or --wait-for")
    return groups


def _layout_change(store: Store, version: VersionInfo) -> str | None:
    """Say why a version that is not a line's first is stored whole: which tensors are not those of the one before."""
    line, _, number = version.version.rpartition("@")
    if version.base is not None or number == "0":
        return None
    before = {name: rest for name, *rest in store.show(f"{line}@{int(number) - 1}").tensors}
    now = {name: rest for name, *rest in store.show(version.version).tensors}
    changes = {
        "gone": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
        "of another dtype or shape": [name for name in now if name in before and now[name] != before[name]],
    }
    told = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for what, names in changes.items()
        if names
    ]
    return f"its tensors are not those of {line}@{int(number) - 1}: {'; '.join(told) or 'other ties'}"
