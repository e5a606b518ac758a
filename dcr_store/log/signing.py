"""Sign the records of logs, and check that each was signed by a key that one trusts (docs/spec/v1.md §16).

Whoever trusts no keys reads signed and unsigned records alike. ``cryptography`` is imported only where a record is
signed or checked.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dcr_store.errors import IntegrityError, InvalidInputError
from dcr_store.format import signatures
from dcr_store.format.signatures import Signature

if TYPE_CHECKING:
    from types import ModuleType


def ed25519() -> ModuleType:
    """Import Ed25519; ``InvalidInputError`` says how to get it."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519 as found
    except ImportError as error:
        raise InvalidInputError("signatures need cryptography; pip install dcr-store[sign]", key="signing") from error
    return found


@functools.lru_cache(maxsize=256)
def _loaded(public_key: str) -> Any:
    return ed25519().Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))


class Signer(Protocol):
    """Who signs: a key in a file, or whatever holds one."""

    @property
    def public_key(self) -> str:
        """The public key, 64 hex digits."""

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of the signature of `message`."""


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The keys of which one has to have signed each record that is read.

    Attributes
    ----------
    public_keys : frozenset of str
        64 hex digits each.
    """

    public_keys: frozenset[str]

    def check(self, data: bytes, key: str, store_sha256: str) -> None:
        """Check the signature of a record as stored.

        Raises
        ------
        IntegrityError
            If it has none, one by another key, or one that is not of this record of this store.
        FormatError
            If the signature is none.
        """
        found = signatures.apart(data, key)
        trusted = "a signature by " + (
            "the trusted key" if len(self.public_keys) == 1 else f"one of {len(self.public_keys)} trusted keys"
        )
        if found is None:
            raise IntegrityError(
                "the log record is not signed: it is forged, or its writer has no key; see who wrote it",
                key=key,
                expected=trusted,
                found="none",
            )
        signature, unsigned = found
        if signature.public_key not in self.public_keys:
            raise IntegrityError(
                "the log record is signed by a key that is not trusted; trust it if you know whose it is",
                key=key,
                expected=trusted,
                found=f"ed25519 {signature.public_key}",
            )
        if not verifies(signature, signatures.message(unsigned, store_sha256)):
            raise IntegrityError(
                "the log record's signature is not of this record in this store: it was changed, or moved here from "
                "another place; restore it from a copy of the store",
                key=key,
                expected=trusted,
                found=f"a bad one, by ed25519 {signature.public_key}",
            )


def verifies(signature: Signature, message: bytes) -> bool:
    """Whether a signature is one of `message`."""
    from cryptography.exceptions import InvalidSignature

    try:
        _loaded(signature.public_key).verify(bytes.fromhex(signature.value), message)
    except (InvalidSignature, ValueError):  # the latter: no point of the curve
        return False
    return True


@dataclass(frozen=True, slots=True)
class Signing:
    """How a store that was opened signs what it appends, and what it trusts; None: not at all, and everything."""

    signer: Signer | None = None
    trusted: TrustedKeys | None = None

    def signed(self, data: bytes, store_sha256: str) -> bytes:
        """Return a record as it is to be stored."""
        if self.signer is None:
            return data
        value = self.signer.sign(signatures.message(data, store_sha256))
        return signatures.signed(data, Signature(self.signer.public_key, value.hex()))

    def check_writes(self, key: str) -> None:
        """Refuse to append at `key` without a key where records count only if they are signed.

        Raises
        ------
        InvalidInputError
            If that is so.
        """
        if self.signer is None and self.trusted is not None:
            raise InvalidInputError(
                "you trust keys, and would not trust a record of yours, as you have no key to sign it with: set "
                "DCR_SIGN_KEY, or open(sign_with=)",
                key=key,
                expected="a key",
                found="none",
            )

    def check_goes_on(self, last: bytes, key: str) -> None:
        """Refuse to append at `key` without a key after a record that is signed.

        Raises
        ------
        InvalidInputError
            If that is so.
        """
        if self.signer is None and (found := signatures.apart(last, key)) is not None:
            raise InvalidInputError(
                "the log is signed, and a record without a signature would be its end for all who trust keys; sign "
                "with a key: DCR_SIGN_KEY, or open(sign_with=)",
                key=key,
                expected="a key, as the record before has ed25519 " + found[0].public_key,
                found="none",
            )

    def check(self, data: bytes, key: str, store_sha256: str) -> None:
        """Check a record as it is stored; see ``TrustedKeys.check``."""
        if self.trusted is not None:
            self.trusted.check(data, key, store_sha256)


UNSIGNED = Signing()
