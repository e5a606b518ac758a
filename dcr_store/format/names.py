"""Names that users give (docs/spec/v1.md §2), version references, and the key of every object.

Refuses each name outside the pattern before any I/O; names of tensors and files never come here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dcr_store.errors import InvalidInputError

STORE_KEY: Final = "dcr.json"
LINE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PARTICIPANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
TAG: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,127}")
"""What can name a tag; what begins with a digit are numbers of versions."""
_TAGGED: Final = re.compile(rf"([A-Za-z0-9][A-Za-z0-9._-]{{0,127}})@({TAG.pattern})")
_STAMPED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})@(0|[1-9][0-9]{0,11})#([0-9a-f]{8,64})")
VERSION: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})@(0|[1-9][0-9]{0,11})")
KEY: Final = re.compile(r"(?!\.{1,2}(?:/|\Z))[^/\\\0]+(?:/(?!\.{1,2}(?:/|\Z))[^/\\\0]+)*")
"""A key below the store's prefix, as documents may refer to it."""
_ROOT: Final = re.compile(r"[0-9a-f]{8,64}")


def check_line(name: object) -> str:
    """Return `name` if it can name a line, else raise ``InvalidInputError``."""
    if not isinstance(name, str) or not LINE.fullmatch(name):
        raise InvalidInputError(f"{_shown(name)} cannot name a line; use {LINE.pattern}")
    return name


def check_group(name: object) -> str:
    """Return `name` if it can name a group, else raise ``InvalidInputError``."""
    if not isinstance(name, str) or not LINE.fullmatch(name):
        raise InvalidInputError(f"{_shown(name)} cannot name a group; use {LINE.pattern}")
    return name


def check_member(name: object) -> str:
    """Return `name` if it can name a member of a group, else raise ``InvalidInputError``."""
    if not isinstance(name, str) or not PARTICIPANT.fullmatch(name):
        raise InvalidInputError(f"{_shown(name)} cannot name a member; use {PARTICIPANT.pattern}")
    return name


def check_tag(name: object) -> str:
    """Return `name` if it can name a tag, else raise ``InvalidInputError``."""
    if not isinstance(name, str) or not TAG.fullmatch(name):
        raise InvalidInputError(f"{_shown(name)} cannot name a tag; use {TAG.pattern}")
    return name


def check_pin(name: object) -> str:
    """Return `name` if it can name a pin, else raise ``InvalidInputError``."""
    if not isinstance(name, str) or not LINE.fullmatch(name):
        raise InvalidInputError(f"{_shown(name)} cannot name a pin; use {LINE.pattern}")
    return name


def tag_key(line: str, name: str) -> str:
    """Return the key of a tag of a version of a line."""
    return f"tags/{line}/{name}.json"


def pin_key(name: str) -> str:
    """Return the key of a pin."""
    return f"pins/{name}.json"


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 80 else f"{text[:77]}..."


def new_txid() -> str:
    """Return a new transaction or record id: 32 random hex digits."""
    return secrets.token_hex(16)


def new_incarnation() -> str:
    """Return a new incarnation: 16 random hex digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class VersionRef:
    """How a user addresses a version: by line and number, by a tag, by the head of a line, or by a root's prefix.

    Where both number and prefix are there, the version has to have that root: the stamp of a rollout.
    """

    line: str | None
    number: int | None
    root_prefix: str | None
    tag: str | None = None

    @classmethod
    def parse(cls, text: object) -> VersionRef:
        """Parse ``main@42``, ``main@tag``, ``main@42#root``, ``main`` (the head) or a root's prefix of 8 to 64 digits.

        Text that could be either is taken for a root's prefix first, as the line if no root has it.
        """
        if isinstance(text, str):
            if match := VERSION.fullmatch(text):
                return cls(match[1], int(match[2]), None)
            if match := _STAMPED.fullmatch(text):
                return cls(match[1], int(match[2]), match[3])
            if match := _TAGGED.fullmatch(text):
                return cls(match[1], None, None, match[2])
            prefix = text if _ROOT.fullmatch(text) else None
            if LINE.fullmatch(text):
                return cls(text, None, prefix)
        raise InvalidInputError(
            f"{_shown(text)} is no version; use LINE@NUMBER, LINE@NUMBER#ROOT, LINE@TAG, LINE, or at least 8 hex "
            "digits of a state root"
        )


def check_writers(names: object) -> tuple[str, ...]:
    """Return names of writers, each once; ``InvalidInputError`` unless they are some that can be."""
    given = [] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    found = [name for name in given if isinstance(name, str) and PARTICIPANT.fullmatch(name)]
    if not given or len(set(found)) != len(given):
        raise InvalidInputError(
            "these cannot be the writers of a version",
            key="writers",
            expected=f"distinct names like {PARTICIPANT.pattern}",
            found=repr(names)[:80],
        )
    return tuple(found)


def version_name(line: str, number: int) -> str:
    """Return ``line@number``."""
    return f"{line}@{number}"


def version_number(version: str) -> int:
    """Return the number in ``line@number``."""
    return int(version.rpartition("@")[2])


def layout_key(sha256: str) -> str:
    """Return the key of a layout."""
    return f"layouts/{sha256}.json"


def record_key(line: str, seq: int) -> str:
    """Return the key of a log record."""
    return f"log/{line}/{seq:020d}.json"


def hint_key(line: str) -> str:
    """Return the key of a line's hint."""
    return f"log/{line}/latest.json"


def checkpoint_key(line: str, seq: int) -> str:
    """Return the key of the log checkpoint that folds records ``0 … seq-1``."""
    return f"log/{line}/checkpoints/{seq:020d}.json"


def numbered(key: str, prefix: str) -> int | None:
    """Return the number by which a record, or a log checkpoint, lies below `prefix`; None if the key is of neither."""
    name = key.removeprefix(prefix).removesuffix(".json")
    is_one = key == f"{prefix}{name}.json" and len(name) == 20 and name.isascii() and name.isdecimal()
    return int(name) if is_one else None


def group_record_key(group: str, seq: int) -> str:
    """Return the key of a record of a group's log."""
    return f"groups/{group}/log/{seq:020d}.json"


def group_checkpoint_key(group: str) -> str:
    """Return the key of the fold of a group's log."""
    return f"groups/{group}/log/latest.json"


def ack_prefix(group: str, version: str, kind: str) -> str:
    """Return the prefix of a group's acknowledgements of one kind for ``line@number``, ending in ``/``."""
    return f"groups/{group}/acks/{version}/{kind}/"


@dataclass(frozen=True, slots=True)
class TransactionKeys:
    """The keys of one transaction's objects."""

    line: str
    version: int
    txid: str

    @property
    def prefix(self) -> str:
        """The prefix of all of them, ending in ``/``."""
        return f"versions/{self.line}/{self.version:012d}-{self.txid}/"

    def journal(self, writer: str, incarnation: str, seq: int) -> str:
        """Return the key of a journal entry."""
        return f"{self.prefix}journal/{writer}.{incarnation}.{seq:06d}.json"

    def data(self, writer: str, incarnation: str) -> str:
        """Return the prefix of what one incarnation of a writer stores, ending in ``/``."""
        return f"{self.prefix}data/{writer}.{incarnation}/"

    def partition(self, writer: str, incarnation: str, array: str, index: int) -> str:
        """Return the key of a partition; `array` is e.g. ``u16/mask``."""
        return f"{self.data(writer, incarnation)}{array}/c/{index}"

    def attempt(self, attempt: int) -> str:
        """Return the prefix of a committer's attempt, ending in ``/``."""
        return f"{self.prefix}attempts/{attempt}/"

    def manifest(self, attempt: int) -> str:
        """Return the key of an attempt's manifest."""
        return f"{self.attempt(attempt)}manifest.json"
