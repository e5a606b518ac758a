"""The relay, a process of its own: what ``dcr relay`` runs, on the loopback, until the trainer is gone."""

from __future__ import annotations

import sys

from dcr_store.demo import child
from dcr_store.objects.open import open_upstreams
from dcr_store.relay.serving import Settings, run

_CACHE_NBYTES = 1 << 30


def relay(parent: child.Parent, arguments: list[str]) -> None:
    """Serve a store: URL, directory of the cache, port (0 for a free one)."""
    url, directory, port = arguments
    settings = Settings("127.0.0.1", int(port), directory, _CACHE_NBYTES)
    run(
        settings,
        open_upstreams([url], None),
        lambda own: parent.tell(url=own),
        lambda message: print(message, file=sys.stderr),
    )


if __name__ == "__main__":
    child.run(relay)
