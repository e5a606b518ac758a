"""The verb that serves a store to others: ``relay``."""

from __future__ import annotations

import argparse
import re
from typing import Final

from dcr_store.cli.arguments import UsageError, Verbs, add_storage_options, directory_name, nbytes, store_url
from dcr_store.cli.output import to_stderr, to_stdout
from dcr_store.errors import NotFoundError, StorageError
from dcr_store.format.names import STORE_KEY
from dcr_store.objects.urls import takes_options

_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]/\s]+)):([0-9]{1,5})")


def register(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "relay",
        help="serve a store over HTTP to many readers",
        description=(
            "Serve a store over HTTP: many readers ask the relay, the relay asks its upstream once, keeps what it got, "
            "and passes on what is just arriving. Readers name it as http://HOST:PORT; another relay may, too. Runs "
            "until SIGTERM. Needs dcr-store[relay]; see docs/relay.md."
        ),
    )
    parser.add_argument(
        "--upstream",
        metavar="STORE",
        type=store_url,
        action="append",
        required=True,
        help="the store, or another relay (repeatable: ways to the same store, the first that works is used)",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", type=_address, required=True, help="where to listen; port 0 takes a free one"
    )
    parser.add_argument("--cache", metavar="DIR", type=directory_name, required=True, help="directory of the cache")
    parser.add_argument(
        "--max-bytes", metavar="N", type=nbytes, required=True, help="how much the cache keeps, e.g. 200GiB"
    )
    parser.add_argument(
        "--access",
        metavar="ACCESS",
        choices=("members", "publish", "all"),
        default="members",
        help=(
            "which writes are passed on: members (default; acknowledgements and decisions of groups), publish (new "
            "versions too), all (deletes too, as creating a store needs)"
        ),
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the secret that readers must show")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM); with --tls-key: serve https")
    parser.add_argument("--tls-key", metavar="FILE", help="its private key (PEM)")
    add_storage_options(parser)
    parser.set_defaults(run=relay)


def _address(text: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, found {text!r}")
    return match[1] or match[2], int(match[3])


def relay(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from dcr_store.objects.http_options import read_token
    from dcr_store.objects.open import open_upstreams

    try:
        from dcr_store.relay.serving import Settings, run
    except ImportError as error:
        raise StorageError('a relay needs the extra relay, which is not here: pip install "aiohttp>=3.10"') from error
    host, port = arguments.listen
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together")
    settings = Settings(
        host,
        port,
        arguments.cache,
        arguments.max_bytes,
        arguments.access,
        None if arguments.token_file is None else read_token(arguments.token_file),
        arguments.tls_cert,
        arguments.tls_key,
    )
    if arguments.storage_options and not any(map(takes_options, arguments.upstream)):
        raise UsageError("--storage-option is for s3:// and http:// stores, and no --upstream is one")
    upstreams = open_upstreams(arguments.upstream, arguments.storage_options)
    for upstream in upstreams:
        # Not asked over a network: a relay starts, and serves what it has kept, while its upstream is away.
        if arguments.access != "all" and upstream.is_local and upstream.size(STORE_KEY) is None:
            raise NotFoundError("there is no store here to relay; create one with: dcr init STORE", key=upstream.url)
    if settings.token is None and host not in ("127.0.0.1", "::1", "localhost"):
        to_stderr("dcr: warning: everybody who can reach this relay can read the store; see --token-file")

    def started(url: str) -> None:
        to_stdout(f"{url} serves {', '.join(upstream.url for upstream in upstreams)}")

    run(settings, upstreams, started, lambda message: to_stderr(f"dcr: {message}"))
    return 0
