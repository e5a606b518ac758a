"""The verbs that keep a history: ``anchor``, ``fold``, ``expire``, ``gc``; ``tag``, ``pin``, ``fork``."""

from __future__ import annotations

import argparse
import functools
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from dcr_store.cli import progress, render_history
from dcr_store.cli.arguments import (
    UsageError,
    Verbs,
    checked,
    line_name,
    natural,
    open_store,
    version_ref,
)
from dcr_store.cli.verbs import add_verb, answer, tell
from dcr_store.format.names import check_pin, check_tag

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
tag_name = checked(check_tag)
pin_name = checked(check_pin)


def duration(text: str) -> float:
    """Return seconds from ``90s``, ``15m``, ``12h``, ``30d`` or ``2w``; an argument type."""
    if not re.fullmatch(r"[0-9]{1,9}[smhdw]", text):
        raise argparse.ArgumentTypeError(f"expected a duration, as 90s, 15m, 12h, 30d or 2w, found {text!r}")
    return float(int(text[:-1]) * _UNITS[text[-1]])


def until(text: str) -> datetime:
    """Return a time: a duration from now, or an ISO date or time, in UTC unless it says otherwise; an argument type."""
    try:
        if re.fullmatch(r"[0-9]{1,9}[smhdw]", text):
            return datetime.now(UTC) + timedelta(seconds=duration(text))
        found = datetime.fromisoformat(text)
        found = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:  # the latter: after the year 9999
        raise argparse.ArgumentTypeError(f"expected a duration (30d) or a date (2027-01-31), found {text!r}") from error
    if found <= datetime.now(UTC):
        raise argparse.ArgumentTypeError(f"expected a time to come, found {text!r}, which is over")
    return found


def _ratio(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or float(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, found {text!r}")
    return float(text)


def register(verbs: Verbs) -> None:
    """Add the verbs of this group."""
    _add_anchor(verbs)
    _add_fold(verbs)
    _add_expire(verbs)
    _add_gc(verbs)
    _add_tag(verbs)
    _add_pin(verbs)
    _add_fork(verbs)


def _add_anchor(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "anchor",
        anchor,
        help="store a version whole",
        description=(
            "Store a version whole, so that reading it, and what comes after it, needs nothing before it. May be done "
            "at any time, beside publishers and readers; interrupted, the same command goes on."
        ),
    )
    parser.add_argument(
        "version", metavar="VERSION", nargs="?", type=version_ref, help="the version; without: the head, if it is due"
    )
    parser.add_argument("--line", metavar="L", type=line_name, help="line to look at (default main)")
    parser.add_argument(
        "--every", metavar="N", type=natural, help="due if its path begins at least N versions before it"
    )
    parser.add_argument("--cost", metavar="X", type=_ratio, help="due if its path takes more than X anchors' bytes")
    _add_takeover(parser)


def _add_fold(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "fold",
        fold,
        help="store the deltas from one version to another as one",
        description="Store the deltas from version A to version B as one, for readers and receivers that come from A.",
    )
    parser.add_argument("a", metavar="A", type=version_ref, help="the version where it starts")
    parser.add_argument("b", metavar="B", type=version_ref, help="the version to which it leads")
    _add_takeover(parser)


def _add_expire(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "expire",
        expire,
        help="let old versions of a line go",
        description=(
            "Let versions of a line expire: they cannot be read any more, and gc deletes later what only they need. "
            "Never expires the newest version, nor what a pin, a group, a fork or a work of maintenance needs. What "
            "is kept is stored whole, or as a fold, first where that is needed to let go of the rest. Takes at least "
            "one of --older-than, --keep-every and --keep-last."
        ),
    )
    parser.add_argument("--line", metavar="L", type=line_name, default="main", help="line (default main)")
    parser.add_argument(
        "--older-than", metavar="AGE", type=duration, help="only versions committed before that long: 30d, 12h, 90s"
    )
    parser.add_argument(
        "--keep-tagged",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep versions that have a tag (default), or let them expire, too",
    )
    parser.add_argument("--keep-every", metavar="N", type=natural, help="keep versions whose number is a multiple")
    parser.add_argument(
        "--keep-last", metavar="N", type=natural, help="keep the newest N versions (1 with another rule)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    _add_takeover(parser)


def _add_gc(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "gc",
        gc,
        help="delete what expired or was aborted",
        description=(
            "Delete the objects of versions that expired and of transactions that were aborted, a grace period after "
            "that by the object store's own clock. Touches nothing that the log does not call dead."
        ),
    )
    parser.add_argument(
        "--grace",
        metavar="AGE",
        type=duration,
        default=86400.0,
        help="how long after its end something is deleted (default 24h); longer than the longest read",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def _add_tag(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "tag",
        tag,
        help="name a version, or list the names of a line",
        description=(
            "Give a version a name: LINE@NAME then stands for it, and it does not expire. Without VERSION: list the "
            "tags of a line."
        ),
    )
    parser.add_argument("version", metavar="VERSION", nargs="?", type=version_ref, help="the version")
    parser.add_argument("name", metavar="NAME", nargs="?", type=tag_name, help="the name; begins with a letter")
    parser.add_argument("--line", metavar="L", type=line_name, help="line to list (default main)")
    parser.add_argument("--message", metavar="TEXT", help="a note")
    parser.add_argument("--delete", metavar="NAME", type=tag_name, help="take a tag of the line away")


def _add_pin(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "pin",
        pin,
        help="keep a version from expiring, or list the pins",
        description="Keep a version from expiring, for ever or until a time. Without VERSION: list the pins.",
    )
    parser.add_argument("version", metavar="VERSION", nargs="?", type=version_ref, help="the version")
    parser.add_argument("name", metavar="NAME", nargs="?", type=pin_name, help="the name of the pin")
    parser.add_argument(
        "--until", metavar="TIME", type=until, help="when it ends: a duration (30d) or a date in UTC (2027-01-31)"
    )
    parser.add_argument("--message", metavar="TEXT", help="a note")
    parser.add_argument("--delete", metavar="NAME", type=pin_name, help="take a pin away")


def _add_fork(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "fork",
        fork,
        help="begin a line that goes on from a version",
        description="Begin another line that goes on from a version and shares everything before: nothing is copied.",
    )
    parser.add_argument("version", metavar="VERSION", type=version_ref, help="the version")
    parser.add_argument("name", metavar="NAME", type=line_name, help="the new line")


def _add_takeover(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--takeover", action="store_true", help="go on with what another process began, if you know that it is dead"
    )


def anchor(arguments: argparse.Namespace) -> int:
    """Store a version whole, or the head if that is due."""
    asks = arguments.every is not None or arguments.cost is not None
    if (arguments.version is None) != asks:
        raise UsageError("name a VERSION, or say by --every or --cost when the head is due")
    if not asks:
        _refuse(arguments, "line", "is for --every and --cost")
    line = arguments.line or "main"
    with open_store(arguments) as store, progress.shown():
        if asks:
            found = store.anchor_if_due(line, every=arguments.every, cost=arguments.cost, takeover=arguments.takeover)
            if found is None:
                tell(arguments, {"version": None}, f"no anchor of {line} is due")
                return 0
            made = found
        else:
            made = store.anchor(arguments.version, takeover=arguments.takeover)
    answer(arguments, made, render_history.edge)
    return 0


def fold(arguments: argparse.Namespace) -> int:
    """Store several deltas as one."""
    with open_store(arguments) as store, progress.shown():
        made = store.fold(arguments.a, arguments.b, takeover=arguments.takeover)
    answer(arguments, made, render_history.edge)
    return 0


def expire(arguments: argparse.Namespace) -> int:
    """Let versions go."""
    if (arguments.older_than, arguments.keep_every, arguments.keep_last) == (None, None, None):
        raise UsageError("say what is to be kept: --keep-last N, --keep-every N or --older-than AGE")
    with open_store(arguments) as store, progress.shown():
        found = store.expire(
            arguments.line,
            keep_last=arguments.keep_last or 1,
            keep_every=arguments.keep_every,
            older_than_s=arguments.older_than,
            keep_tagged=arguments.keep_tagged,
            dry_run=arguments.dry_run,
            takeover=arguments.takeover,
        )
    answer(arguments, found, functools.partial(render_history.expiry, is_dry=arguments.dry_run))
    return 0


def gc(arguments: argparse.Namespace) -> int:
    """Delete what is dead."""
    with open_store(arguments) as store, progress.shown():
        found = store.gc(grace_s=arguments.grace, dry_run=arguments.dry_run)
    answer(arguments, found, functools.partial(render_history.collected, is_dry=arguments.dry_run))
    return 0


def tag(arguments: argparse.Namespace) -> int:
    """Name a version, take a name away, or list names."""
    _check_mark(arguments, "message")
    if arguments.version is not None:
        _refuse(arguments, "line", "says which tags to list, or to delete from; VERSION says its line")
    line = arguments.line or "main"
    with open_store(arguments) as store:
        if arguments.delete is not None:
            store.delete_tag(line, arguments.delete)
            tell(arguments, {"deleted": arguments.delete}, f"deleted the tag {line}@{arguments.delete}")
        elif arguments.version is None:
            found = store.tags(line)
            tell(arguments, {"tags": [item.to_json() for item in found]}, render_history.names(found))
        else:
            named = store.tag(arguments.version, _name(arguments), arguments.message)
            answer(arguments, named, render_history.named)
    return 0


def pin(arguments: argparse.Namespace) -> int:
    """Keep a version, let it go again, or list what is kept."""
    _check_mark(arguments, "message", "until")
    with open_store(arguments) as store:
        if arguments.delete is not None:
            store.delete_pin(arguments.delete)
            tell(arguments, {"deleted": arguments.delete}, f"deleted the pin {arguments.delete}")
        elif arguments.version is None:
            found = store.pins()
            tell(arguments, {"pins": [item.to_json() for item in found]}, render_history.names(found))
        else:
            named = store.pin(arguments.version, _name(arguments), until=arguments.until, message=arguments.message)
            answer(arguments, named, render_history.named)
    return 0


def fork(arguments: argparse.Namespace) -> int:
    """Begin a line."""
    with open_store(arguments) as store:
        made = store.fork(arguments.version, arguments.name)
    tell(arguments, {"version": made}, f"{arguments.name} goes on from {made}")
    return 0


def _refuse(arguments: argparse.Namespace, option: str, why: str) -> None:
    """Refuse an option that would do nothing."""
    if getattr(arguments, option) is not None:
        raise UsageError(f"--{option} {why}")


def _check_mark(arguments: argparse.Namespace, *options: str) -> None:
    """Refuse what does not go together: one of VERSION and ``--delete``, and `options` with VERSION alone."""
    if arguments.version is None:
        for option in options:
            _refuse(arguments, option, "is for a VERSION and its NAME")
    elif arguments.delete is not None:
        raise UsageError("--delete NAME stands alone; leave VERSION out")


def _name(arguments: argparse.Namespace) -> str:
    if arguments.name is None:
        raise UsageError("VERSION needs a NAME")
    name: str = arguments.name
    return name
