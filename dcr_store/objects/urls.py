"""What a store's URL may be: one place, or several ways to one store, separated by commas. Pure, opens nothing.

Refuses what can be known to be no URL of a store without asking anybody: other protocols, and lists with a plain path
behind a URL, whose comma would be taken for a part of that URL.
"""

from __future__ import annotations

import re
from typing import Final

from dcr_store.errors import InvalidInputError

SCHEME: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")
FORMS: Final = "a path, file://, memory://, s3://bucket/prefix, or http://host:port of a relay"
RELAYED: Final = ("http://", "https://")
_WITH_OPTIONS: Final = ("s3://", *RELAYED)
PROTOCOLS: Final = ("file", "local", "memory", "s3", "http", "https")
_NEXT_URL: Final = re.compile(r",(?=(?:https?|s3|file)://)", re.IGNORECASE)
_COMMA: Final = re.compile(",")
_PATH_BEHIND: Final = re.compile(r",(?=\.{0,2}/|~)")


def ways(text: str) -> list[str]:
    """Return the URLs of a list, in order; one is a list too.

    Raises
    ------
    InvalidInputError
        If something follows a comma that is no whole URL.
    """
    found = _NEXT_URL.split(text)
    for url in found:
        scheme = SCHEME.match(url)
        if scheme is None:
            continue
        # Hosts have no commas; a prefix or a directory may, but hardly one that a path follows.
        parts = (_COMMA if scheme[0].lower() in RELAYED else _PATH_BEHIND).split(url, maxsplit=1)
        if len(parts) > 1:
            raise InvalidInputError(
                f"{parts[1]!r} in a list of URLs is no URL; of several ways to a store each but the first is a whole "
                "URL, a directory too: file:///PATH"
            )
    return found


def takes_options(text: str) -> bool:
    """Return whether one of the ways to a store takes storage options; directories and memory do not."""
    schemes = [SCHEME.match(url) for url in ways(text)]
    return any(scheme is not None and scheme[0].lower() in _WITH_OPTIONS for scheme in schemes)


def check_url(text: str) -> None:
    """Refuse a text that is no store's URL, as far as it tells.

    Raises
    ------
    InvalidInputError
        Another protocol, no host, a secret in a URL, or a list that is none.
    """
    if text in ("", "file://", "local://") or "\0" in text:
        raise not_a_url(text)
    for url in ways(text):
        scheme = SCHEME.match(url)
        if scheme is None:
            continue
        protocol = scheme[0].lower().removesuffix("://")
        if protocol not in PROTOCOLS:
            raise unknown_protocol(url, protocol)
        if protocol in ("http", "https"):
            from dcr_store.objects.http_options import split

            split(scheme[0].lower() + url[scheme.end() :])
        elif protocol == "s3" and url[scheme.end() :].split("/")[0] == "":
            raise InvalidInputError(f"not a store's URL: {url!r}; give s3://bucket/prefix")


def not_a_url(url: object) -> InvalidInputError:
    """Return the refusal of what is no URL at all."""
    return InvalidInputError(f"not a store's URL: {url!r}; give {FORMS}")


def unknown_protocol(url: str, protocol: str) -> InvalidInputError:
    """Return the refusal of a protocol that stores cannot be kept by."""
    return InvalidInputError(
        f"cannot keep a store at {url!r}: protocol {protocol!r} has no atomic put-if-absent here; use {FORMS}"
    )
