"""What a caller of ``Store.begin`` wants, checked before anything is asked of the store. Pure.

Refuses what cannot be stored, naming the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcr_store.errors import ConflictError, InvalidInputError
from dcr_store.format import canonical
from dcr_store.format.names import VersionRef, check_line, version_name
from dcr_store.log.fold import LineState
from dcr_store.publish.opening import Intent
from dcr_store.publish.owner import default_owner


def intent_of(
    line: str,
    base: str | None,
    message: str | None,
    metadata: Mapping[str, Any] | None,
    owner: str | None,
    *,
    takeover: bool,
) -> Intent:
    """Return the intent that the arguments of ``Store.begin`` are; ``InvalidInputError`` if they are none."""
    check_line(line)
    if base is not None:
        VersionRef.parse(base)
    if message is not None and not isinstance(message, str):
        raise InvalidInputError("the message is no text", key="message", expected="text", found=type(message).__name__)
    if owner is not None and not (isinstance(owner, str) and owner):
        raise InvalidInputError("the owner is no text", key="owner", expected="text, not empty", found=repr(owner))
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidInputError("the metadata is no mapping", key="metadata", found=type(metadata).__name__)
    return Intent(owner or default_owner(), message, _as_stored(metadata or {}), base, takeover)


def check_base(state: LineState, base: str | None) -> None:
    """Refuse to begin on a head other than `base`."""
    if base is None:
        return
    ref, head = VersionRef.parse(base), state.head
    is_head = head is not None and (
        (ref.number is not None and (ref.line, ref.number) == (state.line, head.version))
        or (ref.root_prefix is not None and head.root.startswith(ref.root_prefix))
        or (ref.number is None and ref.line == state.line)
    )
    if not is_head:
        raise ConflictError(
            f"the head of line {state.line} is not the base you named; look at what was published and begin again",
            key=state.line,
            expected=base,
            found="no version" if head is None else f"{version_name(state.line, head.version)} {head.root[:16]}",
        )


def _as_stored(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as it will come back, so that a transaction that is taken up compares equal.

    ``InvalidInputError`` names the key whose value JSON cannot say.
    """
    try:
        data = canonical.encode(dict(metadata), canonical.MAX_METADATA_DEPTH)
    except InvalidInputError as error:
        for name, value in metadata.items():
            try:
                canonical.encode({name: value}, canonical.MAX_METADATA_DEPTH)
            except InvalidInputError as its:
                raise InvalidInputError(str(its.args[0]), key=f"metadata {name!r:.80}") from error
        raise
    told: dict[str, Any] = canonical.decode(data, "metadata")
    return told
