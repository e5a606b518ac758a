"""What a relay's URL and its options may be: refuses URLs that hold a secret, and never shows one."""

from __future__ import annotations

import os
import re
import ssl
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dcr_store.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

OPTIONS: Final = ("relay_token", "relay_token_file", "relay_ca_file")
_TOKEN: Final = re.compile(r"[!-~]{16,512}")


def split(url: str) -> urllib.parse.SplitResult:
    """Return the parts of a relay's URL."""
    shown = _without_secret(url)
    if "@" in url:
        raise InvalidInputError(
            f"not a relay's URL: {shown!r} holds a user or a password, and URLs are shown; use the storage option "
            "relay_token_file"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # labels that no resolver takes
    except ValueError:
        usable = False
    if not usable or "?" in url or "#" in url or re.search(r"[^\x21-\x7e]", url):
        raise InvalidInputError(f"not a relay's URL: {shown!r}; give http://host:port or https://host:port")
    return parts


def _without_secret(url: str) -> str:
    """Return scheme and host alone: a path or a query may hold a secret, and what stands before an ``@`` is one."""
    scheme, separator, rest = url.partition("://")
    host = re.split(r"[/?#]", rest)[0]
    return scheme + separator + ("…" if "@" in rest else host if host == rest else f"{host}/…")


def options(url: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the options given, and for the others what the environment says."""
    unknown = sorted(set(map(str, given)) - set(OPTIONS))
    if unknown:
        raise InvalidInputError(f"{url} takes the storage options {', '.join(OPTIONS)}, but {unknown} were given")
    found = {name: given.get(name, os.environ.get(f"DCR_{name.upper()}") or None) for name in OPTIONS}
    for name, value in found.items():
        if not (value is None or (isinstance(value, str) and value)):
            raise InvalidInputError("is no text", key=name, expected="text", found=type(value).__name__)
    return {name: value for name, value in found.items() if value is not None}


def token(options: Mapping[str, str]) -> str | None:
    """Return the token that the options tell, if any."""
    if "relay_token" in options:
        return check_token(options["relay_token"], "relay_token")
    if "relay_token_file" in options:
        return read_token(options["relay_token_file"])
    return None


def read_token(path: str) -> str:
    """Return the token that a file holds, without the white space around it.

    Raises
    ------
    InvalidInputError
        The file cannot be read, or holds no token.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(f"the token file cannot be read: {error}", key=path) from error
    return check_token(text.strip(), path)


def check_token(token: str, where: str) -> str:
    """Return `token` if it is one; the error does not show it."""
    if not _TOKEN.fullmatch(token):
        raise InvalidInputError(
            "is no token",
            key=where,
            expected="16 to 512 printable ASCII characters without spaces",
            found=f"{len(token)} characters",
        )
    return token


def tls(ca_file: str | None) -> ssl.SSLContext:
    """Return the context for a connection that trusts the authorities of a file, or those of the system."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInputError(
            f"is no file of certificates: {error}", key=ca_file, expected="PEM", found="something else"
        ) from error
