"""Run a relay until it is told to stop: sockets, TLS, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.objects.fallback import FallbackObjects
from dcr_store.objects.retry import RetryPolicy
from dcr_store.ports import ObjectStore
from dcr_store.relay import rules
from dcr_store.relay.cache import Cache
from dcr_store.relay.server import Relay

UPSTREAM_POLICY: Final = RetryPolicy(deadline_s=4.0, unreachable_s=2.0, first_delay_s=0.05, longest_delay_s=0.5)
"""How long upstreams are tried for one request: less than a client waits. The client's own tries are what lasts."""
STOP_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 512
_LOGGER: Final = logging.getLogger("dcr_store.relay.http")
_LOGGER.addHandler(logging.NullHandler())  # what clients do wrong is theirs; what goes wrong here is told
_LOGGER.propagate = False


@dataclass(frozen=True, slots=True)
class Settings:
    """How a relay is run.

    Attributes
    ----------
    host, port : str, int
        Where it listens; port 0 takes a free one.
    directory : str
        Of its cache.
    max_nbytes : int
        How much the cache keeps.
    access : {"members", "publish", "all"}
        Which writes are passed on.
    token : str or None
        What clients must show.
    tls_cert, tls_key : str or None
        Files in PEM format; both or neither.
    policy : RetryPolicy
        How long upstreams are tried for one request.
    """

    host: str
    port: int
    directory: str
    max_nbytes: int
    access: str = rules.MEMBERS
    token: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    policy: RetryPolicy = UPSTREAM_POLICY


@contextlib.asynccontextmanager
async def serving(
    settings: Settings, upstreams: Sequence[ObjectStore], tell: Callable[[str], None]
) -> AsyncIterator[str]:
    """Serve while the context is open; its value is the relay's URL.

    Parameters
    ----------
    settings : Settings
    upstreams : sequence of ObjectStore
        Ways to one store, in order of preference.
    tell : callable
        Called with a sentence for what the operator should know, from any thread.

    Raises
    ------
    StorageError
        The address cannot be listened at, or the cache not be used.
    InvalidInputError
        The TLS files are wrong.
    """
    tls = _tls(settings)
    cache = Cache(settings.directory, settings.max_nbytes)
    upstream = FallbackObjects(upstreams, settings.policy, tell)
    relay = Relay(upstream, cache, access=settings.access, token=settings.token, tell=tell)
    runner = web.ServerRunner(
        web.Server(relay.handle, access_log=None, logger=_LOGGER),
        handle_signals=False,
        shutdown_timeout=STOP_TIMEOUT_S,
    )
    try:
        await runner.setup()
        listener = _listener(settings)
        try:
            await web.SockSite(runner, listener, ssl_context=tls, backlog=_BACKLOG).start()
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            yield f"{'https' if tls else 'http'}://{shown}:{port}"
        finally:
            relay.stop()
            await runner.cleanup()  # requests under way are answered before what answers them is closed
            relay.close()
            listener.close()
    finally:
        upstream.close()
        cache.close()


def run(
    settings: Settings, upstreams: Sequence[ObjectStore], started: Callable[[str], None], tell: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `started` is called with the relay's URL."""

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with serving(settings, upstreams, tell) as url:
            started(url)
            await stop.wait()

    asyncio.run(until_stopped())


def _listener(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StorageError(
            f"cannot listen: {error.strerror or error}; choose another --listen", key=f"{settings.host}:{settings.port}"
        ) from error


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInputError(
            f"certificate and key cannot be used together: {error}", key=settings.tls_cert
        ) from error
    return context
