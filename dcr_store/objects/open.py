"""From a URL to the object store behind it.

Parses with fsspec, but for plain paths and relays, so that a command on them need not import it; refuses every protocol
but ``file``, ``memory``, ``s3``, ``http`` and ``https``. Several URLs of one store are separated by commas.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.objects.local import LocalObjects
from dcr_store.objects.memory import MemoryObjects
from dcr_store.objects.retry import RetryPolicy
from dcr_store.objects.urls import RELAYED, SCHEME, not_a_url, unknown_protocol, ways

if TYPE_CHECKING:
    from dcr_store.ports import ObjectStore


def open_objects(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    retry: RetryPolicy | None = None,
) -> ObjectStore:
    """Return the object store at `url`. No I/O takes place; a store need not exist there yet.

    Parameters
    ----------
    url : str or os.PathLike
        A path, ``file://…``, ``memory://name``, ``s3://bucket/prefix``, or ``http://host:port`` (``https://…``) of a
        relay. Several ways to one store, in order of preference, are separated by commas, each but the first a whole
        URL: ``http://relay1:8080,http://relay2:8080,s3://bucket/prefix``.
    storage_options : mapping, optional
        For S3, what ``fsspec.filesystem("s3", …)`` takes: key, secret, token, endpoint_url, client_kwargs, profile,
        anon, …; what is not given comes from the usual AWS environment variables and files. For relays,
        ``relay_token``, ``relay_token_file`` and ``relay_ca_file`` (see ``HttpObjects``). The other protocols take
        none. Of several URLs each gets the options of its own protocol.
    retry : RetryPolicy, optional
        How long failing operations are repeated.

    Raises
    ------
    InvalidInputError
        Another protocol, no bucket, or options that the protocol does not take.
    StorageError
        The package that the protocol needs is not installed.
    """
    try:
        text = os.fspath(url)
    except TypeError:
        text = None
    if not isinstance(text, str) or text in ("", "file://", "local://") or "\0" in text:
        raise not_a_url(url)
    if not (storage_options is None or isinstance(storage_options, Mapping)):
        found = type(storage_options).__name__  # not what it holds: that may be a secret
        raise InvalidInputError("are no options", key="storage_options", expected="a mapping", found=found)
    urls = ways(text)
    if len(urls) == 1:
        return _open_one(text, storage_options, retry)
    from dcr_store.objects.fallback import FallbackObjects

    return FallbackObjects(open_upstreams(urls, storage_options), retry)


def open_upstreams(urls: Sequence[str], storage_options: Mapping[str, Any] | None = None) -> list[ObjectStore]:
    """Return the object stores at several URLs of one store, each of which gives up soon, for ``FallbackObjects``."""
    from dcr_store.objects.fallback import EACH_POLICY

    options = dict(storage_options or {})
    for_relays = {name: options.pop(name) for name in list(options) if name.startswith("relay_")}
    takers: dict[str, dict[str, Any]] = {"http://": for_relays, "https://": for_relays, "s3://": options}
    upstreams, taken = [], []
    for url in [one for several in urls for one in ways(several)]:
        scheme = SCHEME.match(url)
        own = takers.get(scheme[0].lower()) if scheme else None
        taken.append(own)
        upstreams.append(_open_one(url, own, EACH_POLICY, is_one_of_several=True))
    for own in (for_relays, options):
        if own and not any(own is other for other in taken):
            raise InvalidInputError(f"none of {', '.join(urls)} takes the storage options {sorted(own)}")
    return upstreams


def _open_one(
    text: str, storage_options: Mapping[str, Any] | None, retry: RetryPolicy | None, *, is_one_of_several: bool = False
) -> ObjectStore:
    text = SCHEME.sub(lambda match: match[0].lower(), text)
    if text.startswith(RELAYED):
        from dcr_store.objects.http import EACH_TIMEOUTS_S, TIMEOUTS_S, HttpObjects

        return HttpObjects(text, storage_options, retry, EACH_TIMEOUTS_S if is_one_of_several else TIMEOUTS_S)
    if ":" not in text and not text.startswith("~") and not storage_options:
        return LocalObjects(str(Path(text).absolute()), retry)
    from fsspec.core import split_protocol
    from fsspec.implementations.local import LocalFileSystem

    protocol, path = split_protocol(text)
    if protocol == "s3":
        try:
            from dcr_store.objects.s3 import S3Objects
        except ImportError as error:
            raise StorageError(
                f'{text!r} needs the extra s3, which is not here: pip install s3fs "aiobotocore>=2.18"'
            ) from error
        return S3Objects(text, storage_options, retry)
    if protocol not in (None, "file", "local", "memory"):
        raise unknown_protocol(text, protocol)
    if storage_options:
        raise InvalidInputError(f"{text!r} takes no storage options, but {sorted(storage_options)} were given")
    if protocol == "memory":
        return MemoryObjects(path)
    path = LocalFileSystem._strip_protocol(text)
    if not path.startswith("/"):  # what cannot be expanded stays as it is
        user = path.partition("/")[0][1:]
        raise InvalidInputError(
            f"cannot keep a store at {text!r}: there is no user {user!r} here; give the whole path, or ./~… for a "
            "directory of that name"
        )
    return LocalObjects(path, retry)
