"""The verb ``follow``: keep a directory at the newest version, or at what a group decides, until told to stop."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dcr_store.cli import render
from dcr_store.cli.arguments import (
    UsageError,
    Verbs,
    add_mode,
    checked,
    directory_name,
    group_name,
    keep_of,
    line_name,
    line_version,
    member_name,
    nbytes,
    open_store,
)
from dcr_store.cli.output import json_to_stdout, one_line, to_stderr, to_stdout
from dcr_store.cli.verbs import add_verb
from dcr_store.errors import NotFoundError
from dcr_store.format.names import version_number

if TYPE_CHECKING:
    from dcr_store.errors import DcrError
    from dcr_store.receive.receiver import Receiver
    from dcr_store.receive.results import Applied
    from dcr_store.store import Store


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "follow",
        follow,
        help="keep a directory at the newest version",
        description=(
            "Keep a directory at the newest version of a line, or at the version that a group decides. What a version "
            "that is still being written has stored is fetched already. Failures are told and tried again; killed "
            "anywhere, the same command goes on. SIGTERM ends it after what it is applying just now. Commands are run "
            "by the shell with DCR_VERSION, DCR_ROOT, DCR_DIRECTORY and DCR_PREVIOUS in their environment."
        ),
    )
    parser.add_argument(
        "directory", metavar="DIR", type=directory_name, help="directory of the checkpoint; created if there is none"
    )
    parser.add_argument(
        "--group", metavar="G", type=group_name, help="change versions together with the other receivers of this group"
    )
    parser.add_argument("--name", metavar="R", type=member_name, help="name of this receiver in the group")
    parser.add_argument("--line", metavar="L", type=line_name, help="line to follow (default: the group's, or main)")
    parser.add_argument(
        "--until",
        metavar="LINE@NUMBER",
        type=line_version,
        help="end once the directory holds this version, or a later one",
    )
    parser.add_argument(
        "--once", action="store_true", help="end once there is nothing more to do now; fail at the first failure"
    )
    parser.add_argument(
        "--spool",
        metavar="DIR",
        type=directory_name,
        help="where to keep what is fetched ahead (default: in the directory itself); receivers may share it",
    )
    parser.add_argument(
        "--spool-bytes",
        metavar="N",
        type=nbytes,
        help="the most bytes to keep there, e.g. 20GiB (default: a tenth of the disk, 16 GiB at least)",
    )
    add_mode(parser)
    parser.add_argument(
        "--engine",
        metavar="KIND=URL",
        type=checked(_check_engine),
        action="append",
        default=[],
        help="let an engine take each version from the directory: sglang, vllm or vllm-reload (repeatable)",
    )
    parser.add_argument(
        "--on-prepared",
        metavar="CMD",
        type=checked(_check_command),
        action="append",
        default=[],
        help="a command to run when a version is about to be applied (repeatable)",
    )
    parser.add_argument(
        "--on-applied",
        metavar="CMD",
        type=checked(_check_command),
        action="append",
        default=[],
        help="a command to run when the directory holds a version, after the engines; again if it fails (repeatable)",
    )


def _check_engine(text: str) -> None:
    from dcr_store.receive.engines import engine

    engine(text)


def _check_command(text: str) -> None:
    from dcr_store.receive.announcing import Command

    Command(text)


def follow(arguments: argparse.Namespace) -> int:
    """Keep a directory at the newest version."""
    if (arguments.group is None) != (arguments.name is None):
        raise UsageError("--group and --name go together")
    line = arguments.line or (None if arguments.group else "main")  # a group tells its own
    if None not in (line, arguments.until) and arguments.until.rpartition("@")[0] != line:
        raise UsageError(f"--until {arguments.until} is no version of line {line}; give the --line that it is of")
    from dcr_store.receive.announcing import announcer
    from dcr_store.receive.copying import CopyBringer

    keep = keep_of(arguments)
    copies = None if keep is None else CopyBringer(arguments.directory, keep=keep)
    shown: list[tuple[str, str]] = []

    def place() -> Path:
        return Path(os.path.realpath(arguments.directory)) if copies is None else copies.place

    def told(applied: Applied) -> None:
        if (applied.version, applied.root) not in shown:  # not again, if an engine is told again
            shown[:] = [(applied.version, applied.root)]
            if arguments.json:
                json_to_stdout(applied.to_json())
            else:
                to_stdout(render.applied(applied, arguments.directory + ("" if copies is None else "/current")))
        if hooks is not None:
            hooks.on_applied(applied)

    def failed(error: DcrError, wait_s: float) -> None:
        to_stderr(f"dcr: {one_line(str(error))}; trying again in {wait_s:.1f} s")

    def failed_before(error: DcrError) -> None:
        to_stderr(f"dcr: {one_line(str(error))}")

    hooks = announcer(place, arguments.engine, arguments.on_prepared, arguments.on_applied, failed_before)
    with (
        open_store(arguments) as store,
        store.receiver(
            arguments.directory if copies is None else copies,
            group=arguments.group,
            name=arguments.name,
            line=arguments.line,
            spool=arguments.spool,
            spool_nbytes=arguments.spool_bytes,
        ) as receiver,
        _stopped_by_sigterm(receiver),
    ):
        receiver.follow(
            until=arguments.until,
            once=arguments.once,
            on_prepared=None if hooks is None else hooks.on_prepared,
            on_applied=told,
            on_serving=None if hooks is None else hooks.on_serving,
            on_failure=failed,
        )
        if arguments.once and arguments.group is None:
            _require_version(store, receiver, arguments.until)
    return 0


def _require_version(store: Store, receiver: Receiver, until: str | None) -> None:
    """Refuse to call it a success that there is no such line, or not yet the version."""
    active = receiver.active()
    if active is None:
        store.log(receiver.line)  # refuses a line that is not there beside others
    if until is not None and (active is None or version_number(active.version) < version_number(until)):
        found = "no version" if active is None else active.version
        raise NotFoundError("the version is not there yet", key=until, expected=until, found=found)


@contextmanager
def _stopped_by_sigterm(receiver: Receiver) -> Iterator[None]:
    """Let SIGTERM stop the receiver in time; elsewhere than in the main thread nothing can be let."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: receiver.stop())
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
