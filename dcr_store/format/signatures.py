"""Signatures of log records (docs/spec/v1.md §16): where one stands in a record, and what it is of. Pure.

A record is signed as the bytes that it would have without its signature, bound to one store by the SHA-256 of its
``dcr.json``; line or group, number and the SHA-256 of the record before are fields of every record. Refuses a record in
which the signature is not found exactly once as it is written, because what it is of would be anybody's guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dcr_store.errors import FormatError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields

FIELD: Final = "signature"
_CONTEXT: Final = b"dcr-record-1"


@dataclass(frozen=True, slots=True)
class Signature:
    """An Ed25519 signature: `public_key` as 64 hex digits, `value` as 128."""

    public_key: str
    value: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"public_key": self.public_key, "value": self.value}

    @classmethod
    def from_json(cls, fields: Fields) -> Signature:
        """Parse; ``FormatError`` names the field."""
        return cls(fields.hex("public_key", 64), fields.hex("value", 128))


def check_form(fields: Fields) -> None:
    """Refuse a record whose signature is none by its form, whether or not it is going to be checked."""
    if FIELD in fields.document:
        Signature.from_json(fields.object(FIELD))


def message(unsigned: bytes, store_sha256: str) -> bytes:
    """Return what is signed.

    Parameters
    ----------
    unsigned : bytes
        The record as it is stored, without a signature.
    store_sha256 : str
        SHA-256 of the store's ``dcr.json``.
    """
    return _CONTEXT + bytes.fromhex(store_sha256) + unsigned


def signed(unsigned: bytes, signature: Signature) -> bytes:
    """Return a record with its signature, as it is stored."""
    document = canonical.decode(unsigned, "record")
    return canonical.encode({**document, FIELD: signature.to_json()})


def apart(data: bytes, key: str) -> tuple[Signature, bytes] | None:
    """Take a stored record apart.

    Returns
    -------
    (Signature, bytes) or None
        The signature, and the record as it was without it; None if it has none.

    Raises
    ------
    FormatError
        If the signature is none, or does not stand there once.
    """
    fields = Fields.of(canonical.decode(data, key), key)
    if FIELD not in fields.document:
        return None
    signature = Signature.from_json(fields.object(FIELD))
    # Never the first field: others come before it in every record.
    part = b',"' + FIELD.encode() + b'":' + canonical.encode(signature.to_json())
    if data.count(part) != 1:
        raise FormatError(
            "the signature is not written as the format says", key=key, expected="once", found=data.count(part)
        )
    return signature, data.replace(part, b"")
