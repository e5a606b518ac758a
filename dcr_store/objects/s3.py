"""Objects in an S3 bucket, or on a server that speaks S3, over s3fs.

s3fs gives session, credentials and event loop; requests go to its aiobotocore client one try at a time, so that retries
and the outcome of conditional puts are decided here. Objects are stored by single-part ``PutObject``, created with
``If-None-Match: *``. Nothing is cached. Refuses buckets that are not there, and answers shorter than they say.
Imports s3fs, so it is itself imported only where a store is on S3.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fsspec.asyn import reset_after_fork, sync
from s3fs import S3FileSystem

from dcr_store.errors import InvalidInputError, NotFoundError, StorageError
from dcr_store.objects import s3_rules, threads
from dcr_store.objects.flat import flat
from dcr_store.objects.keys import check_key, check_prefix, check_range, key_problem
from dcr_store.objects.retry import RetryPolicy, TransientError, resolving, retrying
from dcr_store.objects.s3_errors import BeyondEndError, OccupiedError, translated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from dcr_store.ports import Bytes

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 20.0  # between two pieces of an answer
TRY_TIMEOUT_S: Final = 60.0  # for one request, besides its payload
SLOWEST_NBYTES_PER_S: Final = 1_000_000  # of a payload; a transfer below this rate is begun again
LARGE_NBYTES: Final = 1 << 20  # payloads from here on are sent in pieces, after the server has said that it wants them


class S3Objects:
    """An object store below a prefix of a bucket. See ``dcr_store.ports.ObjectStore``.

    Some servers go on to name the "directories" of deleted objects for a while; ``list_names`` passes that on.

    Parameters
    ----------
    url : str
        ``s3://bucket`` or ``s3://bucket/prefix``.
    storage_options : mapping, optional
        As s3fs takes them. ``retries`` of botocore are switched off whatever they say.
    policy : RetryPolicy, optional
        How long failing operations are repeated.

    Raises
    ------
    InvalidInputError
        The URL names no bucket, or its prefix cannot be one.
    """

    is_local = False

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, policy: RetryPolicy | None = None
    ) -> None:
        options = dict(storage_options or {})
        config = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "max_pool_connections": 64,
            # The payload's SHA-256 is part of the signature; older servers stumble over checksum trailers.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **options.pop("config_kwargs", {}),
            "retries": {"total_max_attempts": 1},
        }
        path = S3FileSystem._strip_protocol(url)
        self.bucket, _, prefix = path.partition("/")
        if not self.bucket or "?" in url:
            raise InvalidInputError(f"not a store's URL: {url!r}; give s3://bucket/prefix")
        if prefix:
            check_key(prefix)
        self.prefix = prefix + "/" if prefix else ""
        self.url = f"s3://{path}"
        self._policy = policy or RetryPolicy()
        self._bucket_seen = False
        options.update(config_kwargs=config, skip_instance_cache=True, use_listings_cache=False)
        try:
            self._files = S3FileSystem(**options)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{url}: s3fs does not take these storage options: {error}") from error
        except RuntimeError as error:
            if not threads.is_refusal(error):
                raise
            reset_after_fork()  # else fsspec takes the loop whose thread did not start for a running one, and waits
            raise threads.refused() from error
        self._pid = os.getpid()

    def _name(self, key: str) -> str:
        check_key(key)
        name = self.prefix + key
        if len(name.encode()) > 1024:
            raise InvalidInputError("prefix and key take more than the 1,024 bytes of S3: shorten the prefix", key=name)
        return name

    def call(self, action: str, key: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer of an API operation on the bucket, one without a body, with retries.

        Parameters
        ----------
        action, key : str
            What is done to which object or prefix, for errors.
        operation : str
            A method of botocore's S3 client.
        **arguments
            Of the operation, besides the bucket.
        """

        def attempt() -> dict[str, Any]:
            return self._run(action, key, lambda: self._send(operation, dict(arguments)), TRY_TIMEOUT_S)

        return retrying(self._policy, action, key, attempt)

    def _run(self, action: str, key: str, send: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        if os.getpid() != self._pid:
            # The thread that answers requests, and the connections, are the other process's.
            raise InvalidInputError(
                "the store was opened by the process that forked this one; open it again in this one",
                key=self.url,
                expected=f"process {self._pid}",
                found=f"process {os.getpid()}",
            )

        async def within() -> T:
            async with asyncio.timeout(timeout_s):
                return await send()

        try:
            answer: T = sync(self._files.loop, within)
        except Exception as error:
            meant = translated(error, action, self.url, key)
            if meant is error:
                raise
            raise meant from error
        self._bucket_seen = True
        return answer

    async def _send(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            await self._files.set_session()
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"{self.url}: cannot use these storage options: {error}") from error
        client = await self._files.get_s3(self.bucket)
        shape = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation]).input_shape
        extras = {**self._files.s3_additional_kwargs, **self._files.req_kw}
        for name, value in extras.items():
            if name in shape.members:
                arguments.setdefault(name, value)
        if "IfNoneMatch" in arguments and "IfNoneMatch" not in shape.members:
            raise StorageError('botocore is too old for conditional puts: pip install -U s3fs "aiobotocore>=2.18"')
        answer: dict[str, Any] = await getattr(client, operation)(Bucket=self.bucket, **arguments)
        return answer

    def check_rules(self) -> None:
        """Raise ``StorageError`` if the bucket expires objects of this store; warn of lesser rules."""
        s3_rules.check_rules(self)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of an object; ``NotFoundError`` if there is none."""
        name = self._name(key)
        check_range(key, start, stop)
        if stop == start:
            if self.size(key) is None:
                raise NotFoundError(f"no such object in {self.url}", key=key)
            return b""
        try:
            return retrying(self._policy, "get", key, lambda: self._get_once(key, name, start, stop))
        except BeyondEndError:
            return b""

    def _get_once(self, key: str, name: str, start: int, stop: int | None) -> bytes:
        arguments: dict[str, Any] = {"Key": name}
        whole = start == 0 and stop is None
        if not whole:
            arguments["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"

        async def fetch() -> bytes:
            answer = await self._send("get_object", arguments)
            async with answer["Body"] as body:
                content: bytes = await body.read()
            if len(content) != answer["ContentLength"]:
                raise TransientError(f"the answer ended after {len(content)} of {answer['ContentLength']} bytes")
            if whole:
                return content
            if "ContentRange" not in answer:  # a server without ranges sends everything
                return content[start:stop]
            nbytes = int(answer["ContentRange"].rpartition("/")[2])
            expected = min(nbytes, nbytes if stop is None else stop) - start
            if len(content) != expected:
                raise TransientError(f"the answer holds {len(content)} bytes of a range of {expected}")
            return content

        return self._run("get", key, fetch, TRY_TIMEOUT_S + (1 << 28) / SLOWEST_NBYTES_PER_S)

    def put(self, key: str, data: Bytes) -> None:
        """Store an object, atomically and durably, over whatever is there."""
        name = self._name(key)
        content = _immutable(data)
        retrying(self._policy, "put", key, lambda: self._put_once("put", key, name, content, {}))

    def _put_once(self, action: str, key: str, name: str, content: bytes, condition: dict[str, str]) -> None:
        body = io.BytesIO(content) if len(content) >= LARGE_NBYTES else content
        # A server that checks it keeps nothing of a body that ended early, as when this process is killed: without it
        # an empty log record could stay.
        digest = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
        arguments: dict[str, Any] = {"Key": name, "Body": body, "ContentLength": len(content), "ContentMD5": digest}
        arguments |= condition
        timeout_s = TRY_TIMEOUT_S + len(content) / SLOWEST_NBYTES_PER_S
        self._run(action, key, lambda: self._send("put_object", arguments), timeout_s)

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        """Create an object, atomically and durably, unless the key is taken.

        Returns
        -------
        bool
            True if the key now holds exactly `data`, put there by this call (also when its answer was lost);
            False if it holds something else.

        Raises
        ------
        OutcomeUnknownError
            No answer that tells, until the deadline.
        """
        name = self._name(key)
        content = _immutable(data)

        def create() -> bool:
            try:
                self._put_once("create", key, name, content, {"IfNoneMatch": "*"})
            except OccupiedError:
                return False
            return True

        return resolving(self._policy, key, content, create, lambda: self._get_once(key, name, 0, None))

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → nbytes of every object whose key starts with `prefix`."""
        return {key: int(entry["Size"]) for key, entry in self._entries(prefix)}

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Return key → (nbytes, LastModified) of every object whose key starts with `prefix`; whole seconds."""
        return {key: (int(entry["Size"]), entry["LastModified"].timestamp()) for key, entry in self._entries(prefix)}

    def _entries(self, prefix: str) -> Sequence[tuple[str, dict[str, Any]]]:
        check_prefix(prefix)
        cut = len(self.prefix)
        found = ((entry["Key"][cut:], entry) for page in self._pages(prefix) for entry in page.get("Contents", ()))
        # "Folders" of consoles, and what is not a store's, are left out.
        return sorted((item for item in found if key_problem(item[0]) is None), key=lambda item: item[0])

    def list_names(self, prefix: str) -> Sequence[str]:
        """Return the sorted next path components below `prefix`."""
        check_prefix(prefix)
        cut = len(self.prefix) + len(prefix)
        names = set()
        for page in self._pages(prefix, Delimiter="/"):
            names |= {entry["Key"][cut:] for entry in page.get("Contents", ())}
            names |= {entry["Prefix"][cut:].rstrip("/") for entry in page.get("CommonPrefixes", ())}
        return sorted(name for name in names if key_problem(prefix + name) is None)

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        arguments["Prefix"] = self.prefix + prefix
        while True:
            page = self.call("list", prefix, "list_objects_v2", **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def size(self, key: str) -> int | None:
        """Return an object's nbytes, or None if there is none."""
        name = self._name(key)
        try:
            answer = self.call("look up", key, "head_object", Key=name)
        except NotFoundError:
            if not self._bucket_seen:
                # HEAD has no body to say that it is the bucket which is missing.
                self.call("list", key, "list_objects_v2", Prefix=self.prefix, MaxKeys=1)
            return None
        return int(answer["ContentLength"])

    def delete(self, key: str) -> None:
        """Delete an object; one that does not exist is no error."""
        name = self._name(key)
        try:
            self.call("delete", key, "delete_object", Key=name)
        except NotFoundError:
            return


def _immutable(data: Bytes) -> bytes:
    return data if isinstance(data, bytes) else bytes(flat(data))
