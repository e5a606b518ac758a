"""The verbs of groups: ``group`` (create, show, propose, withdraw, drop, admit) and ``status``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from dcr_store.cli import render_groups
from dcr_store.cli.arguments import (
    UsageError,
    Verbs,
    add_json,
    add_storage_options,
    add_store,
    group_name,
    line_name,
    member_name,
    natural,
    open_store,
    version_ref,
)
from dcr_store.cli.verbs import add_verb, answer

if TYPE_CHECKING:
    from dcr_store.receive.status import GroupStatus
    from dcr_store.store import Store

Act = Callable[["Store", argparse.Namespace], "GroupStatus"]


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    add_verb(
        verbs,
        "status",
        status,
        help="show where all lines and groups are",
        description=(
            "Show the head of each line, and of each group its active version, how far that is behind, what the next "
            "promotion waits for, and what each member is doing, as its acknowledgements say."
        ),
    )

    parser = verbs.add_parser(
        "group",
        help="create and operate groups of receivers",
        description="Create and operate groups: receivers that promote versions together. ACT is one of those below.",
    )
    add_store(parser, options=False)
    acts: Verbs = parser.add_subparsers(dest="act", metavar="ACT", required=True, title="acts")
    _register_create(acts)
    _act(acts, "show", _show, "show a group", "Show a group: its versions, its members, what it waits for.")
    _act(
        acts,
        "propose",
        lambda store, found: store.group(found.group).propose(found.version),
        "propose a version",
        "Propose a version of the group's line, also an older one. It stands until it is promoted or withdrawn.",
    ).add_argument(
        "version", metavar="VERSION", nargs="?", type=version_ref, help="the version (default: the newest of the line)"
    )
    withdraw = _act(
        acts,
        "withdraw",
        lambda store, found: store.group(found.group).withdraw(found.version, found.reason),
        "withdraw the proposal that stands",
        "Withdraw the proposal that stands. Members propose by themselves only versions that come after it.",
    )
    withdraw.add_argument(
        "version", metavar="VERSION", nargs="?", type=version_ref, help="only if it is of this version"
    )
    _add_reason(withdraw, "withdrawn by hand")
    drop = _act(
        acts,
        "drop",
        lambda store, found: store.group(found.group).drop(found.name, found.reason),
        "drop a member",
        "Drop a member, which stops serving when it reads that, or wait no more for one that never came. Started "
        "again, it comes back.",
    )
    drop.add_argument("name", metavar="NAME", type=member_name, help="name of the member")
    _add_reason(drop, "dropped by hand")
    _act(
        acts,
        "admit",
        lambda store, found: store.group(found.group).admit(found.name),
        "let a further receiver in",
        "Let a receiver of this name come into the group from now on. Promotions wait for it once it has come.",
    ).add_argument("name", metavar="NAME", type=member_name, help="name of the receiver")


def _register_create(acts: Verbs) -> None:
    parser = _act(
        acts,
        "create",
        _create,
        "create a group",
        "Create a group. Nothing is promoted before every receiver NAMEd here has come once.",
        check=_check_create,
    )
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        type=member_name,
        default=[],  # without it, argparse would list NAME as required
        help="a receiver that is expected; one at least, or --anyone",
    )
    parser.add_argument(
        "--line", metavar="L", type=line_name, default="main", help="line that the group follows (default main)"
    )
    parser.add_argument("--anyone", action="store_true", help="let receivers of any name come by themselves")
    parser.add_argument(
        "--manual",
        action="store_true",
        help="let no member propose: versions are proposed by hand (dcr group … propose)",
    )
    parser.add_argument(
        "--drop-after",
        metavar="SECONDS",
        type=natural,
        help="let members drop one that has not prepared or applied so long after them (default: wait for ever)",
    )


def _act(
    acts: Verbs,
    name: str,
    act: Act,
    summary: str,
    description: str,
    *,
    check: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.ArgumentParser:
    """Add an act on a group, whose status it shows afterwards; `check` refuses arguments that do not go together."""

    def run(arguments: argparse.Namespace) -> int:
        if check is not None:
            check(arguments)
        with open_store(arguments) as store:
            found = act(store, arguments)
        answer(arguments, found, render_groups.group)
        return 0

    parser: argparse.ArgumentParser = acts.add_parser(name, help=summary, description=description)
    parser.add_argument("group", metavar="GROUP", type=group_name, help="name of the group")
    add_storage_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)
    return parser


def _add_reason(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--reason", metavar="TEXT", default=default, help=f"why (default: {default})")


def _show(store: Store, arguments: argparse.Namespace) -> GroupStatus:
    return store.group(arguments.group).status()


def _check_create(arguments: argparse.Namespace) -> None:
    if not arguments.names and not arguments.anyone:
        raise UsageError("nobody could come into the group; give names, or --anyone")


def _create(store: Store, arguments: argparse.Namespace) -> GroupStatus:
    group = store.create_group(
        arguments.group,
        arguments.names,
        line=arguments.line,
        admission="anyone" if arguments.anyone else "expected",
        proposing="manual" if arguments.manual else "newest",
        drop_after_s=arguments.drop_after,
    )
    return group.status()


def status(arguments: argparse.Namespace) -> int:
    """Show where all lines and groups are."""
    with open_store(arguments) as store:
        found = store.status()
    answer(arguments, found, render_groups.status)
    return 0
