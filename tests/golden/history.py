"""The history that the golden stores hold, published with ids and times that are counted up.

Two stores, in the two codecs of format 1, and ``expected.json``: what they hold, taken from what was written and not
from reading it back. The same libraries make the same bytes, and other versions of zstd the same content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

from golden.by_hand import from_dense, overwriting, publish_by_hand, to_dense
from golden.contents import (
    CHECKPOINT,
    CHUNK_ELEMENTS,
    OTHER_CHECKPOINT,
    TENSORS,
    TIED,
    Files,
    Random,
    State,
    checkpoint,
    make_state,
    on_disk,
    step,
    with_special_bits_changed,
)
from numcodecs import blosc
from numcodecs.zstd import Zstd

import dcr_store
from dcr_store.format import fields as format_fields
from dcr_store.format import names as format_names
from dcr_store.layout.tensors import to_array
from dcr_store.objects.threads import Threads
from dcr_store.publish import encoders, partitions, uploads
from dcr_store.publish.transaction import Transaction
from dcr_store.store import Store

STORES = {"v1-delta": "dcr.delta", "v1-portable": "portable"}
LINES = ("main", "exp-1.x")


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """Count ids and times up, make partitions small and upload them one by one."""
    drawn = 0
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def token_hex(nbytes: int) -> str:
        nonlocal drawn
        drawn += 1
        return hashlib.sha256(f"golden id {drawn}".encode()).hexdigest()[: 2 * nbytes]

    def tick(zone: object) -> datetime:
        nonlocal start
        start += timedelta(milliseconds=250)
        return start

    with (
        mock.patch.object(format_names, "secrets", SimpleNamespace(token_hex=token_hex)),
        mock.patch.object(format_fields, "datetime", SimpleNamespace(now=tick)),
        mock.patch.object(partitions, "MAX_PARTITION_CHUNKS", 4),
        mock.patch.object(partitions, "JOURNAL_FIRST_PARTITIONS", 2),
        mock.patch.object(partitions, "JOURNAL_PARTITIONS", 2),
        mock.patch.object(partitions, "JOURNAL_INTERVAL_S", float("inf")),
        mock.patch.object(uploads, "N_UPLOADS", 1),
        mock.patch.object(encoders, "worker_pool", lambda name: Threads(1, name)),  # in the order of the chunks
    ):
        yield


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Expected:
    """What the versions of each line hold, in order."""

    lines: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {line: [] for line in LINES})
    firsts: Mapping[str, int] = field(default_factory=dict)
    """By line that goes on from another one: its first number."""

    def add(
        self,
        line: str,
        state: State,
        files: Files | None = None,
        aliases: Mapping[str, str] | None = None,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        tied = dict(aliases or {})
        tensors = {**state, **{alias: state[name] for alias, name in tied.items()}}
        self.lines[line].append(
            {
                "version": f"{line}@{self.firsts.get(line, 0) + len(self.lines[line])}",
                "message": message,
                "metadata": dict(metadata or {}),
                "aliases": tied,
                "tensors": {
                    name: {"dtype": t.dtype, "shape": list(t.shape), "sha256": sha256(t.bits.tobytes())}
                    for name, t in tensors.items()
                },
                "files": {path: {"nbytes": len(data), "sha256": sha256(data)} for path, data in (files or {}).items()},
            }
        )

    def of_store(self, store: Store) -> dict[str, Any]:
        """Return the expectations, with the names that the log has for them: roots, layouts and bases."""
        logs = {line: store._catalog.log(line) for line in self.lines}
        for line, versions in self.lines.items():
            for version, row in zip(versions, logs[line].rows(), strict=True):
                base = None if row.base is None else row.base.version
                version.update({"root": row.root, "layout": row.layout, "base": base})
        pending = {line: log.refresh().open for line, log in logs.items()}
        return {
            "lines": self.lines,
            "records": {line: [record.kind for record, _ in log.records()] for line, log in logs.items()},
            "open": {line: None if found is None else found.txid for line, found in pending.items()},
        }


class History:
    """Publishes versions into a store and notes what they hold."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.expected = Expected()

    def begin(self, line: str = "main", **told: Any) -> Transaction:
        return self.store.begin(line, owner=told.pop("owner", "trainer-1"), **told)

    def files(self, state: State, files: Files, **told: Any) -> None:
        with self.begin(**told) as transaction, on_disk(files) as directory:
            transaction.write_checkpoint(directory)
        told = {name: value for name, value in told.items() if name in ("message", "metadata")}
        self.expected.add("main", state, files, **told)

    def tensors(self, state: State, tied: Mapping[str, str], line: str = "main", **told: Any) -> None:
        with self.begin(line, **told) as transaction:
            write(transaction, state, tied)
        self.expected.add(line, state, aliases=tied, **told)


def write(transaction: Transaction, state: State, tied: Mapping[str, str] | None = None) -> None:
    given = {name: to_array(t.bits, t.dtype, t.shape) for name, t in state.items()}
    for name, array in given.items():
        transaction.write(name, array)
    for alias, name in (tied or {}).items():
        transaction.write(alias, given[name])  # the same memory


def settle(transaction: Transaction) -> None:
    """Wait until everything is stored that is under way: how much else is there at the end depends on the machine."""
    transaction._writer.drain()
    for future in transaction._writer.partitions._uploads.futures:
        future.result()


def crash(transaction: Transaction) -> None:
    """Leave a transaction as a killed process does."""
    settle(transaction)
    transaction._close()


def publish_all(store: Store) -> dict[str, Any]:
    """Publish the history; return what it holds."""
    history, random = History(store), Random("golden")
    long_metadata = {"step": 3, "notes": "größer " * 160, "reward": 0.1, "rate": 3e-06, "nested": {"ok": [True, None]}}

    # 0 to 2: a checkpoint, a small delta with other bits in NaNs and zeros, no change at all.
    a = make_state(CHECKPOINT, random)
    history.files(a, checkpoint(a, 0), message="first", metadata={"step": 0})
    a = with_special_bits_changed(step(a, random, 0.02))
    history.files(a, checkpoint(a, 1), metadata={"step": 1, "reward": -1.5e-07, "tag": 'a "quoted"\tline\n'})
    history.files(a, checkpoint(a, 1), message="unchanged")
    # Two attempts at 3 that come to nothing: given up, and replaced by somebody who begins with another message.
    given_up = history.begin(message="given up")
    with on_disk(checkpoint(step(a, random, 0.5), 2)) as directory:
        given_up.write_checkpoint(directory)
    settle(given_up)
    given_up.abort("a loss of NaN")
    crash(history.begin(message="lost"))
    a = step(a, random, 0.2)
    history.files(a, checkpoint(a, 3), takeover=True, owner="trainer-2", message="more", metadata=long_metadata)
    # 4: begun, written in part, resumed by another owner with other bits in one space.
    other = a = step(a, random, 0.05)
    crashed = history.begin(metadata={"step": 4})
    with on_disk(checkpoint(a, 4)) as directory:
        crashed.write_checkpoint(directory)
    crash(crashed)
    a = step(other, random, 0.9, ["quant.codes", "quant.mask", "bytes"])
    history.files(a, checkpoint(a, 4), takeover=True, owner="trainer-2", metadata={"step": 4})
    # 5: other tensors, hence an anchor, one by one, two of them tied.
    b = make_state(TENSORS, random)
    history.tensors(b, TIED, message="other tensors")
    # 6 and 7: overwrites, and two writers. 7 is the eighth version: the log gets a checkpoint.
    layout = store._catalog.layout(store._catalog.log("main").rows()[-1].layout)
    dense = to_dense(layout, b)
    parts = [overwriting("w0", layout, dense, random, 0, 1, shard_chunks=2)]
    dense = publish_by_hand(store, layout, parts, dense)
    history.expected.add("main", b := from_dense(layout, dense, b), aliases=TIED, message="by hand")
    parts = [overwriting(f"tp{i}", layout, dense, random, i, 2, shard_chunks=2 + 3 * i, split=i == 1) for i in (0, 1)]
    dense = publish_by_hand(store, layout, parts, dense)
    history.expected.add("main", b := from_dense(layout, dense, b), aliases=TIED, message="by hand")
    # 8 and 9: a delta on top of overwrites, and one in which everything changes.
    history.tensors(b := step(b, random, 0.01), TIED)
    history.tensors(b := {n: t.changed(~t.bits) for n, t in step(b, random, 1).items()}, TIED, metadata={"step": 9})
    # 10 and 11: a checkpoint again, and its next step in one file.
    c = make_state(OTHER_CHECKPOINT, random)
    history.files(c, checkpoint(c, 10))
    c = step(c, random, 0.1)
    history.files(c, checkpoint(c, 11, n_files=1), message="one file")
    # Another line, with a transaction left open at its end.
    line = LINES[1]
    d = make_state({"w": ("BF16", (60, 20)), "b": ("C128", (7,))}, random)
    history.tensors(d, {}, line)
    history.tensors(d := step(d, random, 0.1), {}, line, message="\u2028 last", metadata={"": []})
    left_open = history.begin(line, metadata={"open": True})
    write(left_open, step(d, random, 0.1))
    crash(left_open)
    return history.expected.of_store(store)


def make_store(
    codec: str, chunk_elements: int, publish: Callable[[Store], dict[str, Any]]
) -> tuple[Files, dict[str, Any]]:
    """Return the objects of a golden store by key, and what it holds: `publish` publishes and says it."""
    with fixed(), dcr_store.create(
        f"memory://golden-{secrets.token_hex(8)}", codec=codec, chunk_elements=chunk_elements
    ) as store:  # fmt: skip
        expected = publish(store)
        objects = store._objects
        files = {key: objects.get(key) for key in objects.list("")}
        for key in files:
            objects.delete(key)
    return files, expected


def probes() -> dict[str, str]:
    """Return what the compressors make of known bytes: where they make something else, stores come out otherwise."""
    data = Random("probe").weights(4096).tobytes()
    made = {
        "dcr.delta": Zstd(level=1).encode(data),
        "portable": blosc.compress(data, b"zstd", 1, blosc.SHUFFLE, 1 << 19),
    }
    return {codec: sha256(bytes(frame)) for codec, frame in made.items()}


def make() -> tuple[dict[str, Files], dict[str, Any]]:
    """Return the objects of all stores by name, and what each of them holds."""
    stores, found = {}, []
    for name, codec in STORES.items():
        stores[name], expected = make_store(codec, CHUNK_ELEMENTS, publish_all)
        found.append(expected)
    if any(item != found[0] for item in found):
        raise SystemExit("the stores hold different things")
    return stores, {"chunk_elements": CHUNK_ELEMENTS, "probes": probes(), **found[0]}


def to_json(expected: Mapping[str, Any]) -> bytes:
    """Return ``expected.json``."""
    return (json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
