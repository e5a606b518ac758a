"""What a relay passes on, and which keys are final (docs/spec/relay.md, sections 3 and 4). Pure."""

from __future__ import annotations

import re
from typing import Final

from dcr_store.errors import FormatError
from dcr_store.format.groups import Ack, parse_group_record
from dcr_store.format.names import group_record_key

MEMBERS: Final = "members"
PUBLISH: Final = "publish"
ALL: Final = "all"
ACCESSES: Final = (MEMBERS, PUBLISH, ALL)

_BODY_NBYTES: Final = {MEMBERS: 16 << 20, PUBLISH: 640 << 20, ALL: 640 << 20}
_NAME: Final = r"[^/]+"
_RECORD: Final = re.compile(rf"(?:log/{_NAME}|groups/{_NAME}/log)/[0-9]{{20}}\.json")
_JOURNAL: Final = re.compile(rf"versions/{_NAME}/{_NAME}/journal/{_NAME}\.json")
_ACK: Final = re.compile(rf"groups/{_NAME}/acks/{_NAME}/{_NAME}/{_NAME}\.json")
_GROUP_RECORD: Final = re.compile(rf"groups/{_NAME}/log/[0-9]{{20}}\.json")
_HINT: Final = re.compile(rf"groups/{_NAME}/log/latest\.json")


def may_create(access: str, key: str) -> bool:
    """Return whether a put-if-absent at `key` is passed on; with access to groups only, see also ``body_problem``."""
    return access != MEMBERS or any(form.fullmatch(key) for form in (_GROUP_RECORD, _ACK))


def body_problem(access: str, key: str, body: bytes) -> str | None:
    """Return why `body` is not created at `key`, or None if it is.

    A garbage record would end a group's log for everybody, and whoever has access to groups only decides no more than
    what the records and acknowledgements of a group say.
    """
    if access != MEMBERS:
        return None
    try:
        if _ACK.fullmatch(key):
            right = Ack.from_bytes(body, key).key
        else:
            record = parse_group_record(body, key)
            right = group_record_key(record.group, record.seq)
    except FormatError as error:
        return str(error)
    return None if right == key else f"the body belongs at {right}"


def may_overwrite(access: str, key: str, sha256: str | None) -> bool:
    """Return whether a put at `key`, of a body of `sha256` over whatever is there, is passed on.

    With no access at records and ``dcr.json``: what creates them names its condition, and without it something on the
    way has dropped it.
    """
    if key == "dcr.json" or _RECORD.fullmatch(key):
        return False
    if access == MEMBERS:
        return _HINT.fullmatch(key) is not None
    if access == PUBLISH and key.startswith("layouts/"):
        return key == f"layouts/{sha256}.json"  # what is there already is the same
    return True


def may_delete(access: str) -> bool:
    """Return whether deletes are passed on."""
    return access == ALL


def longest_body_nbytes(access: str) -> int:
    """Return how long a body may be."""
    return _BODY_NBYTES[access]


def is_final(key: str) -> bool:
    """Return whether what stands at `key` never changes: a record, an entry of a journal, an acknowledgement."""
    return any(form.fullmatch(key) for form in (_RECORD, _JOURNAL, _ACK))
