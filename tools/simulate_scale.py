#!/usr/bin/env python3
"""Say what 1,000 versions of a large model cost and take, and what bounds them, without having the machines.

    python tools/simulate_scale.py [--models 30B,235B,1T] [--rates 1,3,5] [--writers 64,256,1024,2048] [--json FILE]

What is stored is planned by the store's own code: layouts of the models' real shapes, affine maps of each writer's
slices, pieces, partitions, the documents themselves (journal entries, seals, ownership, contributions, manifest), the
log with its cheapest paths, when an anchor is due, what an expiry frees. Bytes of a change are those of the codec on
weights that are made like training steps. Writers are alike: some of them are planned, the others counted like these.

When it happens is simulated, deterministically, with a clock: an object store of a given latency and bandwidth, nodes
with a network card, uploads side by side as the code has them. The defaults are rounded figures of one large object
store in its own region (first byte 30 ms, 90 MB/s a connection), its list prices, and of this code on one server core;
each is an option. Beside it stands the path of full checkpoints over the same store.

Two ways to spread a model: ``staged``, where a stage of layers has writers of its own, experts are whole, and eight
writers share the other tensors, as in Megatron; ``flat``, where all writers share each tensor that is no expert's, as
FSDP does.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plain_table import table
from scale_cost import GB, Prices, bill_of, full_bill, full_seconds
from scale_history import History, history_of
from scale_models import MODELS, parts_of, share_of
from scale_version import version_of
from scale_writer import Clock, Coding

from dcr_store.layout.layout import layout_of
from dcr_store.maintain.retention import Keep
from dcr_store.versions.catalog import CACHE_NBYTES


def sampled(parts: Mapping[int, list[tuple[str, int, int]]], n: int) -> list[list[tuple[str, int, int]]]:
    """Return what some writers hold."""
    golden = (math.sqrt(5) - 1) / 2  # spread over all, and in step with no period of how layers are dealt out
    indices = sorted({int(index * golden % 1 * len(parts)) for index in range(min(n, len(parts)))})
    return [parts[index] for index in indices]


def simulated(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one result for each model, rate, number of writers and topology."""
    clock = Clock(
        arguments.first_byte_ms / 1e3,
        arguments.connection_mb_per_s * 1e6,
        arguments.node_gb_per_s * GB,
        arguments.writers_per_node,
        arguments.list_ms / 1e3,
        arguments.encode_gb_per_s * GB,
        arguments.json_mb_per_s * 1e6,
    )
    prices = Prices(
        arguments.put_dollars / 1000, arguments.get_dollars / 1000, arguments.stored_dollars, arguments.moved_dollars
    )
    codings = [Coding.at(float(rate) / 100) for rate in arguments.rates.split(",")]
    keep = Keep(last=50, every=100)
    histories: dict[float, History] = {}
    for name in arguments.models.split(","):
        model = MODELS[name]()
        layout = layout_of({tensor: ("BF16", shape) for tensor, shape in model.tensors.items()})
        n_elements = sum(entry.n_elements for entry in layout.tensors)
        for n_writers in (int(n) for n in arguments.writers.split(",")):
            for topology in arguments.topologies.split(","):
                parts = parts_of(model, n_writers, topology)
                shares = [
                    share_of(model, layout, some)
                    for some in sampled(parts, max(2, min(arguments.sample, n_writers // 64)))
                ]
                for coding in codings:
                    version = version_of(model, layout, shares, n_writers, topology, coding, clock)
                    anchor = round(n_elements * coding.anchor)
                    if coding.rate not in histories:  # of all models alike, but for their size
                        histories[coding.rate] = history_of(
                            version.nbytes, anchor, arguments.versions, arguments.anchor_every, keep
                        )
                    history = histories[coding.rate].scaled(version.nbytes, anchor)
                    bill = bill_of(version, history, prices, arguments.months, arguments.regions)
                    full = full_bill(
                        2 * n_elements, arguments.versions, n_writers, prices, arguments.months, arguments.regions
                    )
                    sent_s, fetched_s = full_seconds(2 * n_elements, n_writers, clock)
                    yield {
                        **asdict(version),
                        "n_parameters": n_elements,
                        "n_tensors": len(layout.tensors),
                        "n_sampled_elements": sum(share.n_elements for share in shares),
                        "seconds": version.seconds,
                        "receive_seconds": sum(version.receive_stages_s.values()),
                        "bound": version.bound,
                        "dollars": {**asdict(bill), "total": bill.total},
                        "history": asdict(history),
                        "full": {
                            "nbytes": 2 * n_elements,
                            "seconds": sent_s,
                            "receive_seconds": fetched_s,
                            "dollars": {**asdict(full), "total": full.total},
                        },
                    }


def report(results: Sequence[dict[str, Any]], n_versions: int) -> None:
    table(
        "One version",
        ("model", "changed", "writers", "spread", "objects", "GB", "metadata GB", "commit s", "most of it", "fetch s",
         "full: s", "fetch s"),
        [
            (r["model"], f"{100 * r['rate']:g} %", f"{r['n_writers']}", r["topology"], f"{r['n_objects']:,}",
             f"{r['nbytes'] / GB:.2f}", f"{r['metadata_nbytes'] / GB:.3f}", f"{r['seconds']:.1f}", r["bound"],
             f"{r['receive_seconds']:.1f}", f"{r['full']['seconds']:.1f}", f"{r['full']['receive_seconds']:.0f}")
            for r in results
        ],
    )  # fmt: skip
    table(
        f"{n_versions:,} versions, kept for a month",
        ("model", "changed", "writers", "spread", "requests $", "storage $", "between regions $", "all $",
         "full: all $", "TB", "full: TB", "after expiry TB"),
        [
            (r["model"], f"{100 * r['rate']:g} %", f"{r['n_writers']}", r["topology"],
             *(f"{r['dollars'][what]:,.0f}" for what in ("requests", "storage", "transfer", "total")),
             f"{r['full']['dollars']['total']:,.0f}", f"{r['history']['nbytes'] / 1e12:.1f}",
             f"{n_versions * r['full']['nbytes'] / 1e12:.0f}", f"{r['history']['kept_nbytes'] / 1e12:.1f}")
            for r in results
        ],
    )  # fmt: skip
    for line in saturation(results):
        print(line)


def saturation(results: Sequence[dict[str, Any]]) -> list[str]:
    """Say where the design saturates: what bounds the commit, and documents that outgrow what they describe."""
    lines = ["", "Where it saturates"]
    lowest = min(r["rate"] for r in results)
    for r in (r for r in results if r["rate"] == lowest):
        notes = []
        payload = r["nbytes"] - r["metadata_nbytes"]
        if r["bound"] != "encode and upload":
            notes.append(
                f"the commit waits for '{r['bound']}' ({r['stages_s'][r['bound']]:.1f} of {r['seconds']:.1f} s)"
            )
        if r["metadata_nbytes"] > 0.1 * payload:
            notes.append(f"metadata are {100 * r['metadata_nbytes'] / payload:.0f} % of the masks")
        if r["n_objects"] > 100_000:
            notes.append(f"{r['n_objects']:,} objects of {payload / max(1, r['n_objects']) / 1e3:.0f} kB on average")
        if r["contents_nbytes"] > CACHE_NBYTES:
            notes.append(f"a reader's catalog of one version is {r['contents_nbytes'] / 1e6:,.0f} MB, its cache 67 MB")
        if r["slice_nbytes_per_edge"] > 10e6:
            notes.append(f"reading a few rows takes {r['slice_nbytes_per_edge'] / 1e6:,.0f} MB of metadata an edge")
        if r["committer_nbytes"] > 2e9:
            notes.append(f"the committer holds {r['committer_nbytes'] / GB:.1f} GB")
        where = f"{r['model']}, {r['n_writers']} writers, {r['topology']}"
        lines.append(f"  {where}: {'; '.join(notes) if notes else 'bound by encoding and upload'}")
    return lines


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="30B,235B,1T", help=f"of {', '.join(MODELS)}, with commas")
    parser.add_argument("--rates", default="1,3,5", help="percent of the weights that change, with commas")
    parser.add_argument("--writers", default="64,256,1024,2048", help="with commas")
    parser.add_argument("--topologies", default="staged,flat", help="with commas")
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--anchor-every", type=int, default=100)
    parser.add_argument(
        "--sample",
        type=int,
        default=8,
        help="writers that are planned, at most: of few each is much like all; the others are like these",
    )
    parser.add_argument("--first-byte-ms", type=float, default=30.0, help="of a request to the object store")
    parser.add_argument("--list-ms", type=float, default=100.0, help="of a listing of 1,000 keys")
    parser.add_argument("--connection-mb-per-s", type=float, default=90.0, help="of one connection")
    parser.add_argument("--node-gb-per-s", type=float, default=6.25, help="of a node's network card (50 Gbit/s)")
    parser.add_argument("--writers-per-node", type=int, default=8)
    parser.add_argument("--encode-gb-per-s", type=float, default=2.0, help="of weights, by one writer")
    parser.add_argument("--json-mb-per-s", type=float, default=7.0, help="of documents read and checked, by one core")
    parser.add_argument("--put-dollars", type=float, default=0.005, help="for 1,000 puts or listings")
    parser.add_argument("--get-dollars", type=float, default=0.0004, help="for 1,000 gets")
    parser.add_argument("--stored-dollars", type=float, default=0.023, help="for a GB and month")
    parser.add_argument("--moved-dollars", type=float, default=0.02, help="for a GB to another region")
    parser.add_argument("--months", type=float, default=1.0, help="how long all versions are kept")
    parser.add_argument("--regions", type=int, default=2, help="that receive, one of them the store's")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parsed(argv)
    results = list(simulated(arguments))
    report(results, arguments.versions)
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        arguments.json.write_text(json.dumps({"options": options, "results": results}, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
