"""What a relay passes on, and which keys are final (docs/spec/relay.md, sections 3 and 4). Pure."""

from __future__ import annotations

import re
from typing import Final

MEMBERS: Final = "members"
PUBLISH: Final = "publish"
ALL: Final = "all"
ACCESSES: Final = (MEMBERS, PUBLISH, ALL)

_BODY_NBYTES: Final = {MEMBERS: 16 << 20, PUBLISH: 640 << 20, ALL: 640 << 20}
_NAME: Final = r"[^/]+"
_RECORD: Final = re.compile(rf"(?:log/{_NAME}|groups/{_NAME}/log)/[0-9]{{20}}\.json")
_JOURNAL: Final = re.compile(rf"versions/{_NAME}/{_NAME}/journal/{_NAME}\.json")
_ACK: Final = re.compile(rf"groups/{_NAME}/acks/{_NAME}/{_NAME}/{_NAME}\.json")
_HINT: Final = re.compile(rf"groups/{_NAME}/log/(?:latest|checkpoints/{_NAME})\.json")


def may_create(access: str, key: str) -> bool:
    """Return whether a put-if-absent at `key` is passed on."""
    return access != MEMBERS or key.startswith("groups/")


def may_overwrite(access: str, key: str, sha256: str | None) -> bool:
    """Return whether a put at `key`, of a body of `sha256` over whatever is there, is passed on."""
    if access == MEMBERS:
        return _HINT.fullmatch(key) is not None
    if access == PUBLISH and key.startswith("layouts/"):
        return key == f"layouts/{sha256}.json"  # what is there already is the same
    return access == ALL or not (key == "dcr.json" or _RECORD.fullmatch(key))


def may_delete(access: str) -> bool:
    """Return whether deletes are passed on."""
    return access == ALL


def longest_body_nbytes(access: str) -> int:
    """Return how long a body may be."""
    return _BODY_NBYTES[access]


def is_final(key: str) -> bool:
    """Return whether what stands at `key` never changes: a record, an entry of a journal, an acknowledgement."""
    return any(form.fullmatch(key) for form in (_RECORD, _JOURNAL, _ACK))
