"""The verb that shows the rest: ``demo`` trains a small policy and publishes, pulls, verifies what it learns."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from dcr_store.cli.arguments import Verbs, add_json, natural
from dcr_store.errors import InvalidInputError


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "demo",
        help="train a small policy and publish every step",
        description="Train a small policy on this machine, publish every step, pull and verify. Needs dcr-store[demo].",
    )
    parser.add_argument(
        "--store", metavar="URL", default="demo-store", help="where to create the store (default demo-store)"
    )
    parser.add_argument("--steps", metavar="N", type=natural, default=8, help="training steps (default 8)")
    add_json(parser)
    parser.set_defaults(run=demo)


def demo(arguments: argparse.Namespace) -> int:
    """Run the demonstration."""
    try:
        # By name: demo/ is a sibling on this floor.
        run = import_module("dcr_store.demo.run").run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dcr_store"):
            raise
        raise InvalidInputError(f"the demo needs the package {error.name}; install dcr-store[demo]") from error
    from rich.console import Console

    # With --json, standard output belongs to the document.
    console = Console(stderr=arguments.json, quiet=arguments.json and not sys.stderr.isatty())
    code: int = run(arguments.store, arguments.steps, as_json=arguments.json, console=console)
    return code
