"""The verb that shows the rest: ``demo`` trains a small policy, publishes, and has it followed by two receivers."""

from __future__ import annotations

import argparse
import io
import sys

from dcr_store.cli.arguments import Verbs, add_json, natural


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "demo",
        help="train a small policy and publish every step",
        description=(
            "Train a small policy on this machine and publish every step; two receivers in two groups, one of them "
            "behind a relay, follow and sample from it. One is killed while it applies a version, one is cut off for "
            "two versions. The exit code is 1 unless every version arrives bit for bit and the training curve equals "
            "that of a run without a store. A store that the demo made is continued, any other is refused. Needs "
            "dcr-store[demo]."
        ),
    )
    parser.add_argument(
        "--store", metavar="URL", default="demo-store", help="where to create the store (default demo-store)"
    )
    parser.add_argument("--steps", metavar="N", type=natural, default=12, help="training steps (default 12)")
    add_json(parser)
    parser.set_defaults(run=demo)


def demo(arguments: argparse.Namespace) -> int:
    """Run the demonstration."""
    from rich.console import Console

    from dcr_store.demo.run import run

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a row as soon as it is known, into pipes and files too
    # With --json, standard output belongs to the document.
    console = Console(stderr=arguments.json, quiet=arguments.json and not sys.stderr.isatty())
    return run(arguments.store, arguments.steps, as_json=arguments.json, console=console)
