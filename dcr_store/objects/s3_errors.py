"""What botocore, aiohttp and S3 servers raise, as errors of ``dcr_store``: the one place that knows their words.

Servers word the same answer differently; the HTTP status decides, then the code.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from botocore import exceptions as boto

from dcr_store.errors import DcrError, InvalidInputError, NotFoundError, StorageError
from dcr_store.objects.retry import TransientError
from dcr_store.objects.urls import SCHEME

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRANSIENT_STATUS: Final = {408, 409, 425, 429, 500, 502, 503, 504, 509}
_TRANSIENT_CODES: Final = {
    "BadDigest",  # these four: the payload was damaged or cut on its way
    "IncompleteBody",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_HINTS: Final[Mapping[str, str]] = {
    "InvalidAccessKeyId": "the server does not know the access key: check the credentials and the endpoint",
    "SignatureDoesNotMatch": "the secret key is wrong, or something on the way changed the request",
    "ExpiredToken": "the session token has expired: renew the credentials",
    "InvalidToken": "the session token is not valid: renew the credentials",
    "RequestTimeTooSkewed": "this machine's clock is off by minutes: set it",
    "InvalidObjectState": "the object was moved to an archive class: restore it, and remove the lifecycle rule",
    "PermanentRedirect": "the bucket is in another region: set AWS_DEFAULT_REGION or client_kwargs region_name",
    "AuthorizationHeaderMalformed": "the region is wrong: set AWS_DEFAULT_REGION or client_kwargs region_name",
    "EntityTooLarge": "the server does not take objects of this size in one part",
    "MethodNotAllowed": "the server does not offer this operation",
    "NotImplemented": "the server does not offer this operation, or a header that it needs",
}
_DENIED: Final = (
    "permission denied: the credentials need s3:GetObject, s3:PutObject and s3:DeleteObject on the prefix and "
    "s3:ListBucket on the bucket (without which S3 answers 403 for objects that do not exist)"
)
_READS: Final = {"get", "look up", "delete"}


class OccupiedError(Exception):
    """A conditional put was refused: the key is taken, or is being taken by another put."""


class BeyondEndError(Exception):
    """A range begins at or past the end of the object."""


class RefusedError(StorageError):
    """The server answered with an error that another try would not cure; `code` is the server's word for it."""

    def __init__(self, message: str, *, key: str, code: str) -> None:
        super().__init__(message, key=key)
        self.code = code


def translated(error: Exception, action: str, url: str, key: str) -> Exception:
    """Return the exception that stands for `error`.

    Parameters
    ----------
    error : Exception
        What the client raised.
    action : str
        What was tried: get, look up, list, put, create or delete.
    url, key : str
        Where, for the message.

    Returns
    -------
    Exception
        ``TransientError`` where another try may help; ``OccupiedError`` for a refused ``create``; ``BeyondEndError``
        for a ``get`` of a range outside the object; else an error of ``dcr_store.errors``, or `error` itself where it
        is not the backend's.
    """
    if isinstance(error, DcrError | TransientError):
        return error
    if isinstance(error, boto.ClientError):
        return _answered(error.response, action, url, key)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return StorageError(
            f"cannot {action} at {url}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, "
            "or the storage options key and secret",
            key=key,
        )
    if isinstance(error, boto.CredentialRetrievalError | boto.MetadataRetrievalError):
        return TransientError(f"{url}: {error}", sent=False)
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        return _unanswered(error, action, url, key)
    if isinstance(error, aiohttp.ClientError | TimeoutError | asyncio.TimeoutError | OSError):
        return TransientError(f"{url}: {_described(error)}")
    if isinstance(error, boto.BotoCoreError):
        if type(error).__name__ in ("IncompleteReadError", "ResponseParserError", "ChecksumMismatchError"):
            return TransientError(f"{url}: {error}")
        return InvalidInputError(f"cannot {action} at {url}: {error}; check the URL and the storage options", key=key)
    return error


def _answered(response: Mapping[str, Any], action: str, url: str, key: str) -> Exception:
    """Return the exception for an answer with an error status."""
    code = str(response.get("Error", {}).get("Code", ""))
    text = str(response.get("Error", {}).get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{url} answered {status} {code}" + (f" ({text})" if text and text != code else "")
    if action == "create" and (status in (409, 412) or code in ("PreconditionFailed", "ConditionalRequestConflict")):
        return OccupiedError(said)
    if action == "get" and (status == 416 or code == "InvalidRange"):
        return BeyondEndError(said)
    if status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES:
        return TransientError(said)
    if code == "NoSuchBucket":
        bucket = SCHEME.sub("", url).partition("/")[0]
        return RefusedError(
            f"there is no such bucket here: create {bucket}, or check its name, the endpoint and the region",
            key=url,
            code=code,
        )
    if status == 404 and action in _READS:
        return NotFoundError(f"no such object in {url}", key=key)
    hint = _HINTS.get(code) or (_DENIED if status == 403 else "")
    return RefusedError(f"cannot {action}: {said}" + (f"; {hint}" if hint else ""), key=key, code=code)


def _unanswered(error: boto.BotoCoreError, action: str, url: str, key: str) -> Exception:
    """Return the exception for a request that got no whole answer."""
    cause = error.kwargs.get("error") or error.__context__
    if isinstance(cause, aiohttp.ClientConnectorCertificateError):
        return StorageError(f"cannot {action} at {url}: {cause}; install the server's CA or set AWS_CA_BUNDLE", key=key)
    connecting = (aiohttp.ClientConnectorError, socket.gaierror)
    never_sent = isinstance(error, boto.ConnectTimeoutError | boto.ProxyConnectionError | boto.SSLError) or isinstance(
        cause, connecting
    )
    if never_sent:
        return TransientError(
            f"{url}: no connection: {_described(error)}; check AWS_ENDPOINT_URL or endpoint_url, and the network",
            sent=False,
        )
    return TransientError(f"{url}: {_described(error)}")


def _described(error: BaseException) -> str:
    return str(error) or type(error).__name__
