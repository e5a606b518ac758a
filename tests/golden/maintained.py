"""The history of ``v1-history``: versions that were anchored, folded, let go and collected beside others that go on.

Anchors and folds, one of them taken up again after a crash, an expiry, a collection, tags, pins, a line that goes on
from a version of another, a group that promoted. In the words of ``history``, whose ids, times and random bits it uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from unittest import mock

from golden.contents import TENSORS, TIED, Files, Random, State, make_state, step
from golden.history import Expected, make_store, probes, write

from dcr_store import events
from dcr_store.events import Event
from dcr_store.layout.tensors import to_array
from dcr_store.maintain import edges
from dcr_store.store import Store

STORE = "v1-history"
CHUNK_ELEMENTS = 128
FORKED_FROM = 4
UNTIL = datetime(2126, 1, 1, tzinfo=UTC)
"""Of a pin that is not over."""


class _CrashError(BaseException):
    """Ends a work of maintenance as a kill does."""


@contextlib.contextmanager
def crashing(name: str) -> Iterator[None]:
    """Have a work of maintenance end where it reaches `name`, and leave everything as it is."""

    def listener(event: Event) -> None:
        if event.name == name:
            raise _CrashError

    with contextlib.suppress(_CrashError), events.listening(listener), mock.patch.object(edges, "_abandon"):
        yield


def publish(store: Store, expected: Expected, line: str, state: State, **told: Any) -> None:
    with store.begin(line, owner="trainer-1", **told) as transaction:
        write(transaction, state, TIED)
    expected.add(line, state, aliases=TIED, **told)


def promote(store: Store, group: str, state: State) -> None:
    """Have a group of one member promote the head of main, from which it starts with other bits."""
    store.create_group(group, ["a"])
    target = {name: to_array(t.bits ^ t.bits, t.dtype, t.shape) for name, t in state.items()}
    target |= {alias: target[name] for alias, name in TIED.items()}
    with store.receiver(target, group=group, name="a") as receiver:
        receiver.follow(until="main@7")


def publish_all(store: Store) -> dict[str, Any]:
    """Publish the history, and look after it as its keepers do; return what it holds."""
    random, expected = Random("golden history"), Expected({"main": [], "exp": []}, {"exp": FORKED_FROM + 1})
    state = make_state(TENSORS, random)
    for number in range(8):
        publish(store, expected, "main", state, metadata={"step": number})
        if number == FORKED_FROM:
            at_fork = state
            store.tag("main@4", "before-the-fork", "what exp goes on from")
            store.fork("main@4", "exp")
        state = step(state, random, 0.01)
    for _ in range(2):
        publish(store, expected, "exp", at_fork := step(at_fork, random, 0.1), message="exp")
    store.pin("main@1", "for-ever")
    store.pin("main@2", "until", until=UNTIL, message="until 2126")
    promote(store, "eu", state)
    with crashing("publish.seal.before"):
        store.anchor("main@3", owner="keeper")
    store.anchor("main@3", owner="keeper")
    store.fold("main@4", "main@7", owner="keeper")
    lost = store.begin("main", owner="trainer-1")
    write(lost, state, TIED)
    lost.abort("a loss of NaN")
    store.expire("main", keep_last=2, owner="keeper")
    collected = store.gc(grace_s=0)
    # It goes on: a fold over one that expired, and a checkpoint of the log that tells all this.
    for number in range(8, 16):
        publish(store, expected, "main", state, metadata={"step": number})
        state = step(state, random, 0.01, ["gain", "codes"])
        if number == 8:
            store.fold("main@4", "main@8", owner="keeper")
    return {
        **expected.of_store(store),
        "expired": [info.version for info in store.log("main") if not info.is_kept],
        "edges": [
            [None if edge.base is None else edge.base.version, edge.version]
            for edge in store._catalog.log("main").refresh().history.edges
        ],
        "n_collected": len(collected.keys),
        "tags": [named.name for named in store.tags("main")],
        "pins": {named.name: named.version for named in store.pins()},
    }


def make() -> tuple[Files, dict[str, Any]]:
    """Return the objects of the store by key, and what it holds."""
    files, expected = make_store("dcr.delta", CHUNK_ELEMENTS, publish_all)
    probed = {codec: probe for codec, probe in probes().items() if codec == "dcr.delta"}
    return files, {"chunk_elements": CHUNK_ELEMENTS, "probes": probed, **expected}
