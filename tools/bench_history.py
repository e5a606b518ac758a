#!/usr/bin/env python3
"""Measure what a history costs: bytes beside other ways to keep one, reads of any version, of a tensor, of some rows.

    python tools/bench_history.py [--versions 200] [--mib 8] [--rate 0.01] [--latency-ms 20] [--json FILE]

The states are made like training steps (bench_codec.py says how). Sizes are of all versions: whole safetensors, the
same through zstd, a store of chunks that content cuts (FastCDC, each chunk once, through zstd), icechunk (changed
chunks alone, one commit a version), zstd of the XOR with the version before without any anchor, and this store: as
committed, with folds and anchors besides. The packages ``icechunk`` and ``fastcdc`` are used where they are installed.

Reads are counted in front of the object store, which is memory: requests, bytes, milliseconds without latency and with
``--latency-ms`` for each request. Every version is compared with what was published, bit for bit. The log that is
opened has ``--log-versions`` versions, of which the last are appended by the store's own writer. Exit status 1 if a
target was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import secrets
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from long_log import long_log
from metered import Metered, opened
from other_histories import CHUNK_ELEMENTS, ContentChunks, Icechunk, Zstd, states, tensors_of
from plain_table import table

from dcr_store.codec.digest import crc64
from dcr_store.format.canonical import sha256
from dcr_store.format.documents import Base, StoreDocument
from dcr_store.format.fields import now
from dcr_store.format.names import STORE_KEY, new_txid, version_name
from dcr_store.objects.memory import MemoryObjects
from dcr_store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from dcr_store.ports import ObjectStore

    U16 = NDArray[np.uint16]
    State = dict[str, NDArray[Any]]

MOST_REQUESTS = 5
MOST_OPENING_MS = 100.0


# ---------------------------------------------------------------------- this store


@dataclass(frozen=True)
class Publication:
    """What was published.

    Attributes
    ----------
    digests : list of int
        CRC-64 of the bits of each version.
    kept : dict of int to ndarray of uint16
        Some versions, to compare reads with.
    sizes : dict of str to int
        Bytes of each other way.
    """

    digests: list[int]
    kept: dict[int, U16]
    sizes: dict[str, int]


def publish(store: Store, arguments: argparse.Namespace, others: dict[str, Any], kept: set[int]) -> Publication:
    n_elements = arguments.mib * (1 << 20) // 2
    digests, found, full = [], {}, 0
    for number, bits in enumerate(states(n_elements, arguments.rate, arguments.versions)):
        with store.begin(metadata={"step": number}) as transaction:
            for name, tensor in tensors_of(bits).items():
                transaction.write(name, tensor)
        for other in others.values():
            other.add(bits)
        digests.append(crc64(bits))
        full += bits.nbytes + safetensors_header_nbytes(tensors_of(bits))
        if number in kept:
            found[number] = bits
    return Publication(digests, found, {"full safetensors": full} | {name: it.nbytes() for name, it in others.items()})


def safetensors_header_nbytes(state: State) -> int:
    from dcr_store.targets.safetensors_file import make_header

    return len(make_header((name, "BF16", tensor.shape) for name, tensor in state.items()))


def kinds(objects: ObjectStore) -> dict[str, int]:
    """Return the bytes of the store by what they are for."""
    found: Counter[str] = Counter()
    for key, nbytes in objects.list("").items():
        parts = key.split("/")
        is_payload = parts[0] == "versions" and "/c/" in key and "/data/" in key
        found["payload" if is_payload else "log" if parts[0] == "log" else "digests, manifests, journal"] += nbytes
    return dict(found)


@dataclass(frozen=True)
class Read:
    """One read, cold: by a store that was opened for it. ``ms`` without latency, ``waited_ms`` with it."""

    what: str
    requests: int
    nbytes: int
    ms: float
    waited_ms: float

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("what", "requests", "nbytes", "ms", "waited_ms")}


def measured(objects: ObjectStore, what: str, latency_s: float, work: Callable[[Store], Any]) -> tuple[Read, Metered]:
    """Do `work` with the store just opened, opening included, twice without latency and once with it."""
    times_ms = []
    for wait_s in (0.0, 0.0, latency_s):
        metered = Metered(objects, wait_s)
        begun_s = time.perf_counter()
        work(opened(metered))
        times_ms.append(1e3 * (time.perf_counter() - begun_s))
    return Read(what, metered.requests.total(), metered.nbytes, min(times_ms[:2]), times_ms[2]), metered


def require_same(found: State, bits: U16, what: str) -> None:
    for name, tensor in tensors_of(bits).items():
        if name in found and not np.array_equal(found[name].view(np.uint16), tensor.view(np.uint16)):
            raise SystemExit(f"{what}: {name} is wrong")


def reads(objects: ObjectStore, published: Publication, latency_s: float) -> list[Read]:
    """Measure reads of versions, compared with what was published."""
    result = []
    for number, bits in published.kept.items():
        version, expected = version_name("main", number), tensors_of(bits)
        tensor = list(expected)[len(expected) // 2]
        n_rows = min(64, len(expected[tensor]))

        def whole(store: Store, version: str = version, bits: U16 = bits) -> None:
            require_same(store.read(version), bits, version)

        def one(store: Store, version: str = version, bits: U16 = bits, tensor: str = tensor) -> None:
            require_same(store.read(version, [tensor]), bits, version)

        def rows(
            store: Store, version: str = version, expected: State = expected, tensor: str = tensor, n: int = n_rows
        ) -> None:
            found = store.read(version, {tensor: (slice(0, n), ...)})[tensor]
            if not np.array_equal(found.view(np.uint16), expected[tensor][:n].view(np.uint16)):
                raise SystemExit(f"{version}: rows of {tensor} are wrong")

        for what, work in (("whole", whole), ("one tensor", one), (f"{n_rows} rows", rows)):
            result.append(measured(objects, f"{version}, {what}", latency_s, work)[0])
    return result


def walk(objects: ObjectStore, published: Publication) -> Read:
    """Walk over all versions, each compared by its digest."""
    metered = Metered(objects)
    store = opened(metered)
    begun_s = time.perf_counter()
    for number, (_, found) in enumerate(store.iter_states("main")):
        bits = np.concatenate([tensor.reshape(-1).view(np.uint16) for tensor in found.values()])
        if crc64(bits) != published.digests[number]:
            raise SystemExit(f"main@{number} is wrong")
    ms = 1e3 * (time.perf_counter() - begun_s)
    if number + 1 != len(published.digests):
        raise SystemExit("the walk left out versions")
    return Read(f"all {number + 1} versions, one after another", metered.requests.total(), metered.nbytes, ms, ms)


def neighbours(objects: ObjectStore, latency_s: float, numbers: Sequence[int]) -> tuple[list[Read], int]:
    """Compare neighbours; return also how many requests were about weights that an anchor stored."""
    found, n_anchored = [], 0
    store = opened(objects)
    line = store._catalog.log("main")
    line.refresh()
    txids = [edge.txid for edge in line.state.history.edges if edge.base is None]
    txids += [row.txid for row in line.rows() if row.base is None]
    for number in numbers:
        a, b = version_name("main", number - 1), version_name("main", number)
        counted, metered = measured(
            objects, f"diff {a} {b}", latency_s, lambda store, a=a, b=b: store.diff(a, b, only_counts=True)
        )
        found.append(counted)
        n_anchored += sum(
            "/c/" in key and "/data/" in key and any(txid in key for txid in txids) for key in metered.keys
        )
    return found, n_anchored


def openings(n_versions: int, latency_s: float) -> list[Read]:
    """Measure what it takes to open a line: until its head is known, and one version in its middle."""
    result = []
    for n in (n_versions, n_versions + 7):  # the second as far from a log checkpoint as there is
        objects = MemoryObjects(secrets.token_hex(8))
        objects.put(STORE_KEY, StoreDocument(new_txid(), "dcr.delta", 1 << 20, now()).to_bytes())
        long_log(objects, n)

        def head(store: Store, n: int = n) -> None:
            if store._catalog.resolve("main").row.version != n - 1:
                raise SystemExit("the line has another head")

        def middle(store: Store, n: int = n) -> None:
            if store._catalog.resolve(f"main@{n // 2}").base != Base(f"main@{n // 2}", middle_root(n // 2)):
                raise SystemExit("the line has another version in the middle")

        result.append(measured(objects, f"open a line of {n:,} versions", latency_s, head)[0])
        result.append(measured(objects, f"open it and find main@{n // 2}", latency_s, middle)[0])
    return result


def middle_root(number: int) -> str:
    return sha256(str(2 * number + 1).encode())


# ---------------------------------------------------------------------- report


def print_sizes(sizes: dict[str, int], ours: str) -> None:
    full = sizes["full safetensors"]
    rows = [
        (name, f"{nbytes / 1e6:,.1f}", f"{full / nbytes:.1f} x", f"{nbytes / sizes[ours]:.2f} x")
        for name, nbytes in sizes.items()
    ]
    table("Bytes of the whole history", ("way", "MB", "smaller than full", "of this store"), rows)


def print_reads(title: str, found: Sequence[Read], latency_ms: float) -> None:
    rows = [
        (it.what, f"{it.requests}", f"{it.nbytes / 1e6:,.3f}", f"{it.ms:,.0f}", f"{it.waited_ms:,.0f}") for it in found
    ]
    table(title, ("what", "requests", "MB", "ms", f"ms, {latency_ms:g} each"), rows)


def check(name: str, *, met: bool, found: str) -> dict[str, Any]:
    print(f"{'PASS' if met else 'FAIL'} {name}: {found}")
    return {"target": name, "met": met, "found": found}


@contextlib.contextmanager
def other_ways(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Make the other ways, those that are installed."""
    with tempfile.TemporaryDirectory(prefix="dcr-bench-") as directory:
        found: dict[str, Any] = {"zstd of full": Zstd(is_chain=False), "XOR chain, zstd": Zstd(is_chain=True)}
        for name, package, make in (
            ("content-defined chunks", "fastcdc", ContentChunks),
            ("icechunk", "icechunk", lambda: Icechunk(Path(directory))),
        ):
            if package in arguments.without.split(",") or importlib.util.find_spec(package) is None:
                print(f"without {name}: {package} is not installed, or left out")
            else:
                found[name] = make()
        yield found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--mib", type=int, default=8, help="size of the state")
    parser.add_argument("--rate", type=float, default=0.01, help="share of the weights that a version changes")
    parser.add_argument("--fold-every", type=int, default=10, help="versions that a fold joins")
    parser.add_argument("--anchor-every", type=int, default=50, help="versions from one anchor to the next")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="of each request, for the last column")
    parser.add_argument("--log-versions", type=int, default=10_000, help="of the line that is opened")
    parser.add_argument("--without", default="", help="packages not to compare with, with commas")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args(argv)
    last, latency_s = arguments.versions - 1, arguments.latency_ms / 1e3
    objects = MemoryObjects(secrets.token_hex(8))
    objects.put(STORE_KEY, StoreDocument(new_txid(), "dcr.delta", CHUNK_ELEMENTS, now()).to_bytes())
    kept = {last // 2, last}
    with other_ways(arguments) as others, opened(objects) as store:
        published = publish(store, arguments, others, kept)
    sizes, histories, checks = dict(published.sizes), {}, []

    def look(name: str) -> None:
        sizes[name] = sum(objects.list("").values())
        found = reads(objects, published, latency_s)
        told = [it.to_json() for it in found]
        histories[name] = {"nbytes": sizes[name], "kinds": kinds(objects), "reads": told}
        print_reads(f"Reads, {name}", found, arguments.latency_ms)

    look(ours := "this store, as committed")
    with opened(objects) as store:
        for start in range(0, last - arguments.fold_every + 1, arguments.fold_every):
            store.fold(f"main@{start}", f"main@{start + arguments.fold_every}")
    look("and folds")
    with opened(objects) as store:
        for number in range(arguments.anchor_every, last + 1, arguments.anchor_every):
            store.anchor(f"main@{number}")
    look("and anchors")
    walked = walk(objects, published)
    diffs, n_anchored = neighbours(objects, latency_s, sorted({max(1, last // 2), last}))
    print_reads("Along the line", [walked, *diffs], arguments.latency_ms)
    lines = openings(arguments.log_versions, latency_s)
    print_reads("Opening", lines, arguments.latency_ms)
    print_sizes(sizes, ours)
    shares = ", ".join(f"{kind} {nbytes / 1e6:.1f} MB" for kind, nbytes in histories[ours]["kinds"].items())
    print(f"this store, as committed: {shares}")
    n_most, slowest_ms = max(it.requests for it in lines[::2]), max(it.ms for it in lines[::2])
    checks.append(
        check(
            f"a line opens in {MOST_REQUESTS} requests and {MOST_OPENING_MS:g} ms beyond latency",
            met=n_most <= MOST_REQUESTS and slowest_ms <= MOST_OPENING_MS,
            found=f"{n_most} requests, {slowest_ms:.0f} ms",
        )
    )
    checks.append(check("diff of neighbours reads no anchor", met=n_anchored == 0, found=f"{n_anchored} requests"))
    smallest = min(name for name in published.sizes if published.sizes[name] == min(published.sizes.values()))
    checks.append(
        check(
            "the whole history is smaller than any other way",
            met=sizes[ours] < published.sizes[smallest],
            found=f"{published.sizes[smallest] / sizes[ours]:.2f} x smaller than {smallest}",
        )
    )
    if arguments.json:
        result = {
            "versions": arguments.versions,
            "state_nbytes": arguments.mib << 20,
            "rate": arguments.rate,
            "sizes": sizes,
            "histories": histories,
            "walk": walked.to_json(),
            "diff": {"reads": [it.to_json() for it in diffs], "requests_of_anchors": n_anchored},
            "opening": [it.to_json() for it in lines],
            "checks": checks,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    return int(not all(item["met"] for item in checks))


if __name__ == "__main__":
    sys.exit(main())
