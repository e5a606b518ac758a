"""Files of keys: one private key to sign with (PKCS #8, PEM), and lists of public keys to trust, one a line.

A line of a list is ``ed25519 <64 hex digits> [whose it is]``; empty lines and what follows ``#`` at the beginning of a
line are left out. Refuses to make a key where there is a file, and a list that trusts nobody.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from dcr_store.errors import ConflictError, InvalidInputError, StorageError
from dcr_store.log.signing import Signer, Signing, TrustedKeys, ed25519

_LINE: Final = re.compile(r"ed25519[ \t]+([0-9a-f]{64})(?:[ \t].*)?")
_MAX_NBYTES: Final = 1 << 20
_COMMENT: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{0,200}")
"""Nothing that some reader takes for the end of a line, after which another key could stand."""


class FileSigner:
    """A private key as a file holds it; taken from there when it is used first.

    Parameters
    ----------
    data : bytes
        Of the file.
    name : str
        Of the file, for errors.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._data, self._name = data, name

    @functools.cached_property
    def _key(self) -> Any:
        private_key = ed25519().Ed25519PrivateKey
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(self._data, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, private_key):
            # Nothing of what is in the file is told: it may be a key.
            raise InvalidInputError(
                "is no signing key; make one with: dcr keygen FILE",
                key=self._name,
                expected="an Ed25519 key without a password (PKCS #8, PEM)",
            )
        return key

    @functools.cached_property
    def public_key(self) -> str:
        """The public key, 64 hex digits; ``InvalidInputError`` if the file holds no key."""
        found: str = self._key.public_key().public_bytes_raw().hex()
        return found

    def sign(self, message: bytes) -> bytes:
        """Return the signature of `message`; ``InvalidInputError`` if the file holds no key."""
        signature: bytes = self._key.sign(message)
        return signature


def make_key_file(path: str | os.PathLike[str], comment: str = "") -> str:
    """Make a private key that its owner alone may read; return the line of its public key.

    Raises
    ------
    ConflictError
        If there is a file already.
    """
    _check_comment(comment)
    key = ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization

    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise ConflictError("there is a file already; a key is never overwritten", key=str(path)) from error
    except OSError as error:
        raise StorageError(f"cannot be made: {error.strerror}", key=str(path)) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        Path(path).unlink(missing_ok=True)  # half a key is of no use, and in the way of the next try
        raise StorageError(f"cannot be written: {error.strerror}", key=str(path)) from error
    return public_line(FileSigner(data, str(path)), comment)


def read_signer(path: str | os.PathLike[str]) -> FileSigner:
    """Read a file of a private key; warns of one that others may read.

    Raises
    ------
    InvalidInputError, StorageError
        If there is no file, or it cannot be read.
    """
    data = _read(path, "the signing key")
    if Path(path).stat().st_mode & 0o077:
        warnings.warn(f"{path}: others may read this signing key; chmod 600 it", UserWarning, stacklevel=2)
    return FileSigner(data, str(path))


def public_line(signer: Signer, comment: str = "") -> str:
    """Return the line by which others can trust a key."""
    _check_comment(comment)
    return f"ed25519 {signer.public_key} {comment}".rstrip()


def read_trusted(given: str | os.PathLike[str] | Iterable[str]) -> TrustedKeys:
    """Return the keys to trust: those of a file (a text is its path), or of lines.

    Raises
    ------
    InvalidInputError
        If there is no such file, or no public key in it, or something else.
    StorageError
        If it cannot be read.
    """
    if isinstance(given, (str, os.PathLike)):
        name = str(given)
        try:
            lines = _read(given, "the list of trusted keys").decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                "is no list of public keys", key=name, expected="UTF-8", found=str(error)
            ) from error
    elif isinstance(given, Iterable):
        name, lines = "trust", [str(line) for line in given]
    else:
        raise InvalidInputError("is no list of keys", key="trust", expected="a path, or lines", found=repr(given)[:80])
    keys: set[str] = set()
    for number, line in enumerate(lines, 1):
        told = line.strip()
        if not told or told.startswith("#"):
            continue
        match = _LINE.fullmatch(told)
        if match is None:
            shown = "a private key" if "PRIVATE KEY" in told else repr(told)[:80]
            raise InvalidInputError(
                "is no list of public keys", key=f"{name}:{number}", expected="ed25519 <64 hex digits>", found=shown
            )
        keys.add(match[1])
    if not keys:
        raise InvalidInputError("trusts nobody", key=name, expected="a public key at least", found="none")
    return TrustedKeys(frozenset(keys))


def signing_of(
    sign_with: str | os.PathLike[str] | None, trust: str | os.PathLike[str] | Iterable[str] | None
) -> Signing:
    """Return what ``open`` is told of keys."""
    signer = None if sign_with is None else read_signer(sign_with)
    trusted = None if trust is None else read_trusted(trust)
    if signer is not None and trusted is not None and signer.public_key not in trusted.public_keys:
        raise InvalidInputError(
            "the key to sign with is not among those that are trusted: what is written could not be read back",
            key=str(sign_with),
            expected="a trusted one",
            found=public_line(signer),
        )
    return Signing(signer, trusted)


def _check_comment(comment: str) -> None:
    if not _COMMENT.fullmatch(comment):
        raise InvalidInputError(
            "cannot stand in a line of keys", key="comment", expected="up to 200 characters, no line breaks"
        )


def _read(path: str | os.PathLike[str], what: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_NBYTES + 1)
    except FileNotFoundError as error:
        raise InvalidInputError(f"{what} is not there", key=str(path)) from error
    except OSError as error:
        raise StorageError(f"{what} cannot be read: {error.strerror}", key=str(path)) from error
    if len(data) > _MAX_NBYTES:
        raise InvalidInputError(f"is not {what}", key=str(path), expected="at most 1 MiB", found="more")
    return data
