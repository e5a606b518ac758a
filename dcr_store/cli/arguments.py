"""Arguments that several verbs share, and the store that they name.

Refuses what can be known to be wrong without looking at a store, names and URLs among it, as mistakes of the command
line; says how to create a store that is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from dcr_store.errors import InvalidInputError, NotFoundError
from dcr_store.format.names import VERSION, VersionRef, check_group, check_line, check_member
from dcr_store.layout.selection import Index, parse
from dcr_store.objects.urls import SCHEME, check_url, takes_options

if TYPE_CHECKING:
    from dcr_store.store import Store

Verbs = Any  # argparse's own type of sub-parsers is private
STORE_VARIABLE: Final = "DCR_STORE"
SIGN_KEY_VARIABLE: Final = "DCR_SIGN_KEY"
TRUST_VARIABLE: Final = "DCR_TRUST"
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_DIGITS: Final = 1000
_NOT_FINITE: Final = re.compile(r"[+-]?(NaN|nan|NAN|Infinity|infinity|Inf|inf|INF)")
_NBYTES: Final = re.compile(r"([0-9]{1,18})(|[KMGT]iB)")
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CONSTANTS: Final = {"true": True, "false": False, "null": None}


class UsageError(Exception):
    """Arguments that do not go together: a mistake of the command line, like one that the parser finds."""


class Pairs(argparse.Action):
    """Collects ``k=v`` into a dict; `const` is the function that reads a value."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: Callable[[str], object], **rest: Any) -> None:
        super().__init__(option_strings, dest, const=const, default={}, metavar="KEY=VALUE", **rest)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Add one pair."""
        name, equals, text = values.partition("=")
        if not name or not equals:
            raise argparse.ArgumentError(self, f"expected KEY=VALUE, found {values!r}")
        pairs = dict(getattr(namespace, self.dest))
        if name in pairs:
            raise argparse.ArgumentError(self, f"{name!r} is given twice")
        try:
            pairs[name] = self.const(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, f"{name}: {error}") from error
        setattr(namespace, self.dest, pairs)


def scalar(text: str) -> object:
    """Return a JSON number, ``true``, ``false`` or ``null`` as such, any other text as it is.

    Numbers that JSON cannot say (as Python and others print them) are refused: as text, nobody could compare them.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    is_number = _NUMBER.fullmatch(text) is not None
    if not is_number and not _NOT_FINITE.fullmatch(text):
        return text
    number = json.loads(text) if is_number and len(text) <= _MAX_DIGITS else math.nan
    if isinstance(number, float) and not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a number that JSON can say, or text, found {text[:40]}")
    return number


def json_or_text(text: str) -> object:
    """Return the JSON value that `text` is, or else `text`."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def nbytes(text: str) -> int:
    """Return a number of bytes, given as 1000000 or 200GiB; an argument type."""
    match = _NBYTES.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, as 1000000 or 200GiB, found {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def natural(text: str) -> int:
    """Return a positive decimal number, for argparse's ``type``."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, found {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Return a decimal number of 0 or more, for argparse's ``type``."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, found {text!r}")
    return int(text)


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return an argument type: the text as it is, if `check` does not refuse it with ``InvalidInputError``."""

    def as_given(text: str) -> str:
        try:
            check(text)
        except InvalidInputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return as_given


def _store_url(text: str) -> str:
    if text == "-":
        text = os.environ.get(STORE_VARIABLE, "")
        if not text:
            raise argparse.ArgumentTypeError(
                f"- stands for the environment variable {STORE_VARIABLE}, which is not set"
            )
    elif not text:
        raise argparse.ArgumentTypeError("expected a path or URL, found nothing")
    return store_url(text)


store_url = checked(check_url)
line_name = checked(check_line)
group_name = checked(check_group)
member_name = checked(check_member)
version_ref = checked(VersionRef.parse)


def tensor_part(text: str) -> tuple[str, Index | None]:
    """Return name and index of ``NAME`` or ``NAME[0:64, ...]``; an argument type."""
    try:
        name, index = parse(text)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not name:
        raise argparse.ArgumentTypeError("expected the name of a tensor, found nothing")
    return name, index


def line_version(text: str) -> str:
    """Return the text if it is LINE@NUMBER; an argument type."""
    if VERSION.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"expected LINE@NUMBER, found {text!r}")
    return text


def group_names(text: str) -> list[str]:
    """Return the names of groups, which commas separate; an argument type."""
    return [group_name(name) for name in text.split(",")]


def seconds(text: str) -> float:
    """Return a number of seconds, 0 or more; an argument type."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, as 600 or 0.5, found {text!r}")
    return float(text)


def directory_name(text: str) -> str:
    """Return a path as given; the empty one is a usage error: an unset variable must not mean this directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, found nothing")
    return text


def add_store(parser: argparse.ArgumentParser, *, options: bool = True) -> None:
    """Add the positional STORE and, unless a verb below has it, ``--storage-option``."""
    parser.add_argument(
        "store", metavar="STORE", type=_store_url, help=f"path or URL of the store; - for ${STORE_VARIABLE}"
    )
    if options:
        add_storage_options(parser)


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--storage-option``."""
    parser.add_argument(
        "--storage-option",
        dest="storage_options",
        action=Pairs,
        const=json_or_text,
        help="an option of the storage backend (repeatable); VALUE is read as JSON where it is JSON",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_mode(parser: argparse.ArgumentParser) -> None:
    """Add ``--mode`` and ``--keep``."""
    parser.add_argument(
        "--mode",
        metavar="MODE",
        choices=("in-place", "copy"),
        default="in-place",
        help="in-place: write the files of DIR (default); copy: build the version beside the others in DIR",
    )
    parser.add_argument(
        "--keep",
        metavar="N",
        type=whole,
        help="with --mode copy: keep the last N versions that were current before (default: 1)",
    )


def keep_of(arguments: argparse.Namespace) -> int | None:
    """Return how many older versions ``--mode copy`` keeps; None in place.

    Raises
    ------
    UsageError
        If ``--keep`` is given without it.
    """
    keep: int | None = arguments.keep
    if arguments.mode == "copy":
        return 1 if keep is None else keep
    if keep is not None:
        raise UsageError("--keep is for --mode copy")
    return None


def storage_options(arguments: argparse.Namespace) -> dict[str, object] | None:
    """Return what ``--storage-option`` says; None if that is nothing.

    Raises
    ------
    UsageError
        If a store at such a place takes no options.
    """
    options: dict[str, object] = arguments.storage_options
    if options and not takes_options(arguments.store):
        raise UsageError(f"--storage-option is for s3:// and http:// stores; {arguments.store} takes none")
    return options or None


def open_store(arguments: argparse.Namespace, *, signs: bool = True) -> Store:
    """Open the store that the arguments name, with the keys that the environment does, or ``--trust``.

    Parameters
    ----------
    signs : bool
        Whether the verb writes records, perhaps; otherwise the key to sign with is none of its business.

    Raises
    ------
    NotFoundError
        If there is none; the message says which command creates it.
    InvalidInputError
        If it is a file.
    """
    import dcr_store

    try:
        return dcr_store.open(
            arguments.store,
            storage_options=storage_options(arguments),
            sign_with=(os.environ.get(SIGN_KEY_VARIABLE) or None) if signs else None,
            trust=getattr(arguments, "trust", None) or os.environ.get(TRUST_VARIABLE) or None,
        )
    except NotFoundError as error:
        # Of a long or strange name os.path says no where Path raises.
        if SCHEME.match(arguments.store) is None and os.path.isfile(arguments.store):  # noqa: PTH113
            raise InvalidInputError("is a file; give the directory of a store", key=arguments.store) from error
        command = f"dcr init {shlex.quote(arguments.store)}"
        raise NotFoundError(f"there is no store at {arguments.store}; to create one: {command}") from error
