"""The verbs that ask what changed, where and when, and what a file holds: ``diff``, ``blame``, ``identify``."""

from __future__ import annotations

import argparse
import functools

from dcr_store.cli import progress, render_audit
from dcr_store.cli.arguments import (
    UsageError,
    Verbs,
    directory_name,
    natural,
    open_store,
    tensor_part,
    version_ref,
    whole,
)
from dcr_store.cli.verbs import add_verb, answer, tell


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    parser = add_verb(
        verbs,
        "diff",
        diff,
        help="compare two versions, tensor by tensor",
        description=(
            "Compare two versions, tensor by tensor or module by module: how many elements differ in their bits, how "
            "many values went up and down, and by how many units in the last place at most."
        ),
    )
    parser.add_argument("a", metavar="A", type=version_ref, help="the version before")
    parser.add_argument("b", metavar="B", type=version_ref, help="the version after")
    parser.add_argument(
        "--by", metavar="WHAT", choices=("tensor", "module"), default="tensor", help="tensor (default) or module"
    )
    parser.add_argument(
        "--depth",
        metavar="N",
        type=natural,
        help="with --by module: how many parts of a name are a module, 2 for model.layers (default: all but the last)",
    )
    parser.add_argument(
        "--top",
        metavar="N",
        type=whole,
        help="list the N rows that changed most too; with --json the N of each tensor (default 5)",
    )
    parser.add_argument(
        "--counts", action="store_true", help="only count: neighbours are compared without reading an anchor"
    )

    parser = add_verb(
        verbs,
        "blame",
        blame,
        help="say which version changed each row of a tensor last",
        description=(
            "Say for each row of a tensor (each index of its first dimension) which version changed it last. Reads the "
            "deltas backwards and no anchor: beyond one, the answer is at or before its version."
        ),
    )
    parser.add_argument(
        "tensor",
        metavar="TENSOR",
        type=tensor_part,
        help="NAME, or NAME[0:64, ...] for a part of it; a name that ends in brackets is followed by [...]",
    )
    parser.add_argument(
        "--version", metavar="VERSION", type=version_ref, default="main", help="look back from here (default main)"
    )

    parser = add_verb(
        verbs,
        "identify",
        identify,
        help="say which version a checkpoint holds",
        description=(
            "Say which version the weights in a directory, or in one safetensors file, are, whatever their order and "
            "files; else which is nearest, and which tensors differ. Then the exit code is 1. Digests decide, which "
            "find faults, not forgeries."
        ),
    )
    parser.add_argument("path", metavar="PATH", type=directory_name, help="a directory or a .safetensors file")
    parser.add_argument("--strict", action="store_true", help="compare every bit with the version, read from the store")


def diff(arguments: argparse.Namespace) -> int:
    """Compare two versions."""
    by_module = arguments.by == "module"
    if arguments.depth is not None and not by_module:
        raise UsageError("--depth is for --by module")
    if arguments.top is not None and by_module:
        raise UsageError("--top is for --by tensor")
    n_rows = arguments.top if arguments.top is not None else 5 if arguments.json and not by_module else 0
    with open_store(arguments, signs=False) as store, progress.shown():
        result = store.diff(arguments.a, arguments.b, n_rows=n_rows, only_counts=arguments.counts)
    if by_module:
        found = [item.to_json() for item in result.modules(arguments.depth)]
        facts = {"a": result.a, "b": result.b, "changed": result.changed, "elements": result.elements}
        tell(arguments, {**facts, "modules": found}, render_audit.modules(result, arguments.depth))
    else:
        answer(arguments, result, functools.partial(render_audit.diff, n_rows=n_rows))
    return 0


def blame(arguments: argparse.Namespace) -> int:
    """Say which version changed each row last."""
    name, index = arguments.tensor
    with open_store(arguments, signs=False) as store, progress.shown():
        found = store.blame(arguments.version, name, index)
    answer(arguments, found, render_audit.blame)
    return 0


def identify(arguments: argparse.Namespace) -> int:
    """Say which version a checkpoint holds."""
    with open_store(arguments, signs=False) as store, progress.shown():
        found = store.identify(arguments.path, strict=arguments.strict)
    answer(arguments, found, render_audit.identified)
    return 0 if found.is_exact else 1
