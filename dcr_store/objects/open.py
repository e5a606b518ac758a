"""From a URL to the object store behind it.

Parses with fsspec, but for plain paths, so that a command on them need not import it; refuses every protocol but
``file``, ``memory`` and ``s3``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.objects.local import LocalObjects
from dcr_store.objects.memory import MemoryObjects
from dcr_store.objects.retry import RetryPolicy

if TYPE_CHECKING:
    from dcr_store.ports import ObjectStore

_SCHEME: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")


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
        A path, ``file://…``, ``memory://name``, or ``s3://bucket/prefix``.
    storage_options : mapping, optional
        For S3, what ``fsspec.filesystem("s3", …)`` takes: key, secret, token, endpoint_url, client_kwargs, profile,
        anon, …; what is not given comes from the usual AWS environment variables and files. The other protocols
        take none.
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
    if isinstance(text, str):
        text = _SCHEME.sub(lambda match: match[0].lower(), text)
    if not isinstance(text, str) or text in ("", "file://", "local://") or "\0" in text:
        raise InvalidInputError(f"not a store's URL: {url!r}; give a path, file://, memory:// or s3://bucket/prefix")
    if not (storage_options is None or isinstance(storage_options, Mapping)):
        found = type(storage_options).__name__  # not what it holds: that may be a secret
        raise InvalidInputError("are no options", key="storage_options", expected="a mapping", found=found)
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
        raise InvalidInputError(
            f"cannot keep a store at {text!r}: protocol {protocol!r} has no atomic put-if-absent here; "
            "use a path, file://, memory:// or s3://"
        )
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
