"""What a store's log says must be there and may go, told from the raw documents; shares no code with the package.

Also a way to a store that dies at a request, as a process does.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.store import Store

if TYPE_CHECKING:
    from dcr_store.ports import ObjectStore

Document = dict[str, Any]


@dataclass
class LineFacts:
    """What the records of one line say.

    Attributes
    ----------
    commits, edges : dict
        The commits by version; the anchors and folds by txid.
    expired, dead : set of int
        Versions that are gone; versions whose commits lead nowhere any more.
    open : set of str
        Txids of transactions and works that have not ended.
    """

    commits: dict[int, Document] = field(default_factory=dict)
    edges: dict[str, Document] = field(default_factory=dict)
    expired: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    open: set[str] = field(default_factory=set)


def facts(objects: ObjectStore, line: str) -> LineFacts:
    """Read a line's log from its first record."""
    found, seq = LineFacts(), 0
    while objects.size(f"log/{line}/{seq:020d}.json") is not None:
        record = json.loads(objects.get(f"log/{line}/{seq:020d}.json"))
        seq += 1
        kind, txid = record["kind"], record.get("txid")
        if kind in ("begin", "intent"):
            found.open.add(txid)
        elif kind in ("commit", "abort", "anchor", "fold", "expire"):
            found.open.discard(txid)
        if kind == "commit":
            found.commits[record["version"]] = record
        elif kind in ("anchor", "fold"):
            found.edges[txid] = record
        elif kind == "expire":
            found.expired |= {n for first, last in record["versions"] for n in range(first, last + 1)}
            found.dead |= {n for first, last in record["deltas"] for n in range(first, last + 1)}
            for ended in record["edges"]:
                del found.edges[ended]
    return found


def edges_that_lead_on(found: LineFacts) -> list[tuple[int, int | None]]:
    """Return the edges of a line that have not ended, as (version, number of the base or None)."""
    alive = [record for number, record in found.commits.items() if number not in found.dead]
    return [
        (record["version"], None if record["base"] is None else int(record["base"]["version"].rpartition("@")[2]))
        for record in (*alive, *found.edges.values())
    ]


def needed_keys(objects: ObjectStore, found: LineFacts) -> set[str]:
    """Return the keys of a line that what is kept leads to."""
    keys: set[str] = set()
    for number, record in found.commits.items():
        if number not in found.dead:
            keys |= edge_keys(objects, record)
        elif number not in found.expired:
            keys |= version_keys(objects, record)
            if number == max(found.commits):
                keys |= head_keys(objects, record)
    for record in found.edges.values():
        keys |= edge_keys(objects, record)
    return keys


def _refs(document: Any) -> set[str]:
    """Return all keys of objects that a document names, at any depth."""
    if isinstance(document, dict):
        own = {document["key"]} if {"key", "nbytes", "sha256"} <= set(document) else set()
        return own.union(*map(_refs, document.values()))
    return set().union(*map(_refs, document)) if isinstance(document, list) else set()


def version_keys(objects: ObjectStore, record: Document) -> set[str]:
    manifest = json.loads(objects.get(record["manifest"]["key"]))
    return {record["manifest"]["key"]} | _refs(manifest["digests"]) | _refs(manifest["files"])


def head_keys(objects: ObjectStore, record: Document) -> set[str]:
    """Return the keys of a head to which its own delta leads no more: who owns what stays, for the next version."""
    manifest, keys = json.loads(objects.get(record["manifest"]["key"])), version_keys(objects, record)
    for ref in manifest["seals"]:
        ownership = json.loads(objects.get(ref["key"]))["seal"]["ownership"]
        keys |= {ref["key"]} | _refs(ownership)
    return keys


def edge_keys(objects: ObjectStore, record: Document) -> set[str]:
    key = record["manifest"]["key"]
    prefix = key[: key.index("/attempts/")]
    manifest = json.loads(objects.get(key))
    keys = {key} | _refs(manifest)
    for ref in manifest["seals"]:
        seal = json.loads(objects.get(ref["key"]))["seal"]
        keys |= _refs(seal) | {
            f"{prefix}/data/{ref['writer']}.{item['incarnation']}/{item['array']}/c/{item['index']}"
            for item in seal["partitions"]
        }
    return keys


def require_no_waste(store: Store) -> None:
    """Require that all that is needed is there, and under ``versions/`` nothing else but what is under way."""
    objects = store._objects
    found = {line: facts(objects, line) for line in store.lines()}
    there = set(objects.list("versions/"))
    needed = set().union(*(needed_keys(objects, item) for item in found.values()))
    assert needed <= there, f"lost: {sorted(needed - there)}"
    begun = set().union(*(item.open for item in found.values()))
    left = [key for key in there - needed if key.split("/")[2].partition("-")[2] not in begun]
    assert not left, f"left: {sorted(left)}"


class KilledError(BaseException):
    """The process has died."""


class Mortal(Watched):
    """A process's way to a store, which ends at its n-th request, before or after that takes effect; ``Dated``, too."""

    def __init__(self, inner: ObjectStore, dies_at: int, *, after: bool = False) -> None:
        super().__init__(inner)
        self._left, self._after = dies_at, after
        self._life = threading.Lock()
        self.before = self._live

    def _live(self, method: str, key: str) -> None:
        with self._life:
            self._left -= 1
            if self._left == 0 and self._after and method in ("put", "put_if_absent", "delete"):
                return  # takes effect; the next request is the end
            if self._left <= 0:
                raise KilledError(f"{method} {key}")

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        self._note("dated", prefix)
        return self.inner.dated(prefix)  # type: ignore[attr-defined, no-any-return]


def through(store: Store, objects: ObjectStore) -> Store:
    """Return the same store as another process sees it that has `objects` as its way there."""
    document, signing = store._document, store._catalog.signing
    return dcr_store.store.Store(objects, document, store._catalog.store_sha256, signing=signing)


def when(name: str, act: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """Let something happen when a point is reached first."""
    done: list[bool] = []

    def listen(event: events.Event) -> None:
        if event.name == name and not done:
            done.append(True)
            act()

    return events.listening(listen)
