"""What tools/simulate_scale.py plans is what writers of the store do; its numbers make sense."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dcr_store
from dcr_store.format.documents import JournalEntry
from dcr_store.layout.coverage import covered
from dcr_store.layout.layout import layout_of
from dcr_store.layout.slices import sharded

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import scale_models
import scale_writer
import simulate_scale

CLOCK = scale_writer.Clock(0.03, 90e6, 6.25e9, 8, 0.1, 2e9, 7e6)


@pytest.mark.parametrize("n_writers", [1, 7, 32])
@pytest.mark.parametrize("topology", ["staged", "flat"])
def test_each_element_is_one_writers(topology: str, n_writers: int) -> None:
    model = scale_models.MODELS["small"]()
    layout = layout_of({name: ("BF16", shape) for name, shape in model.tensors.items()})
    held: dict[str, list[Any]] = {}
    n_elements = 0
    for parts in scale_models.parts_of(model, n_writers, topology).values():
        share = scale_models.share_of(model, layout, parts)
        n_elements += share.n_elements
        for name, boxes in share.boxes.items():
            held.setdefault(name, []).extend(boxes)
    found = covered(held, {entry.name: entry.n_elements for entry in layout.tensors})
    assert (found.n_doubled, found.n_missing) == (0, 0)
    assert n_elements == sum(entry.n_elements for entry in layout.tensors)


@pytest.mark.parametrize(("name", "billions"), [("30B", (30.4, 30.7)), ("235B", (234, 236)), ("1T", (1000, 1050))])
def test_models_have_their_size(name: str, billions: tuple[float, float]) -> None:
    model = scale_models.MODELS[name]()
    n = sum(int(np.prod(shape)) for shape in model.tensors.values())
    assert billions[0] <= n / 1e9 <= billions[1]


@pytest.mark.parametrize("topology", ["staged", "flat"])
def test_writers_store_what_was_planned(topology: str) -> None:
    model, names = scale_models.MODELS["small"](), [f"rank{index:04d}" for index in range(4)]
    layout = layout_of({name: ("BF16", shape) for name, shape in model.tensors.items()})
    parts = scale_models.parts_of(model, len(names), topology)
    rng = np.random.default_rng(0)
    state = {name: rng.normal(0, 1, shape).astype(ml_dtypes.bfloat16) for name, shape in model.tensors.items()}
    with dcr_store.create(f"memory://{secrets.token_hex(8)}") as store:
        for _ in range(2):
            _publish(store, model, parts, names, state)
            for array in state.values():
                bits = array.reshape(-1).view(np.uint16)
                bits[rng.random(bits.size) < 0.02] ^= 1
        located = store._catalog.resolve("main@1")
        manifest = store._catalog.manifest(located)
        planned_manifest = scale_writer.manifest_nbytes(layout, names, 3000)
        assert planned_manifest == pytest.approx(located.row.manifest.nbytes, rel=0.05)
        coding = scale_writer.Coding.at(0.02)
        for index, (name, ref) in enumerate(zip(names, manifest.seals, strict=True)):
            data = store._objects.get(ref.ref.key)
            seal = JournalEntry.from_bytes(data, "k").seal
            assert seal is not None
            assert seal.ownership is not None
            share = scale_models.share_of(model, layout, parts[index])
            planned = scale_writer.written(share, layout, coding, CLOCK, name, is_anchor=False)
            assert len(planned.partitions) == len(seal.partitions)
            assert planned.contributions_nbytes == seal.contributions.nbytes
            assert planned.ownership_nbytes == seal.ownership.nbytes
            # A writer that is soon done seals before it has journaled what is stored.
            assert 1 <= len(seal.journal) + 1 <= planned.n_journal
            assert planned.seal_nbytes == pytest.approx(len(data), rel=0.1)


def _publish(
    store: dcr_store.Store, model: Any, parts: dict[int, list[tuple[str, int, int]]], names: list[str], state: Any
) -> None:
    tensors = {name: ("BF16", shape) for name, shape in model.tensors.items()}
    first = store.begin(writers=names, writer=names[0], tensors=tensors)
    transactions = [first, *(store.join(first.txid, writer=name) for name in names[1:])]
    for index, transaction in enumerate(transactions):
        for name, part, n_parts in parts[index]:
            mapped = sharded(name, "BF16", model.tensors[name], 0, part, n_parts)
            (box,) = mapped.boxes[name]
            values = state[name].reshape(-1)[box.there : box.there_stop].reshape(mapped.shape)
            transaction.write_slice(values, mapped)
        if not transaction.is_committer:
            transaction.seal()
    for transaction in transactions:
        transaction.commit()


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--models", "small", "--writers", "2,16", "--rates", "1,5", "--versions", "25", "--anchor-every", "10"]
    assert simulate_scale.main([*options, "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "Where it saturates" in out
    results = json.loads((tmp_path / "found.json").read_text("utf-8"))["results"]
    assert len(results) == 2 * 2 * 2
    again = [json.loads(json.dumps(item)) for item in simulate_scale.simulated(_arguments(options))]
    assert again == results, "deterministic"
    by_place = {(item["n_writers"], item["topology"], item["rate"]): item for item in results}
    for item in results:
        history = item["history"]
        assert item["seconds"] == pytest.approx(sum(item["stages_s"].values()))
        assert item["bound"] in item["stages_s"]
        assert 0 < item["metadata_nbytes"] < item["nbytes"]
        assert history["n_anchors"] == 1 + 2
        assert history["longest_path"] == 11  # an anchor, and what came since the one before was due
        assert history["kept_nbytes"] <= history["nbytes"] < 25 * item["full"]["nbytes"]
        assert item["dollars"]["total"] == pytest.approx(
            sum(item["dollars"][what] for what in ("requests", "storage", "transfer"))
        )
    for n in (2, 16):
        for topology in ("staged", "flat"):
            low, high = by_place[n, topology, 0.01], by_place[n, topology, 0.05]
            assert low["nbytes"] < high["nbytes"]
            assert low["n_tensors"] == high["n_tensors"]
    assert by_place[16, "flat", 0.01]["n_objects"] > by_place[2, "flat", 0.01]["n_objects"]


def _arguments(options: list[str]) -> Any:
    return simulate_scale.parsed(options)
