"""tools/bench_history.py at a tiny size: what it says of the store is so, and a wrong bit ends it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_store.objects.memory import MemoryObjects
from dcr_store.store import Store

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bench_history

TINY = ["--versions", "8", "--mib", "1", "--fold-every", "3", "--anchor-every", "6", "--log-versions", "60"]
TINY += ["--latency-ms", "1", "--rate", "0.02"]


def test_the_numbers_are_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[MemoryObjects] = []

    class Kept(MemoryObjects):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            made.append(self)

    monkeypatch.setattr(bench_history, "MemoryObjects", Kept)
    monkeypatch.setattr(bench_history, "MOST_OPENING_MS", 1e6)  # of this, nothing depends on how busy the machine is
    code = bench_history.main([*TINY, "--without", "icechunk", "--json", str(tmp_path / "found.json")])
    out = capsys.readouterr().out
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text("utf-8"))
    store = Store(made[0], *_document(made[0]))
    assert len(store.log("main")) == 8
    assert found["sizes"]["and anchors"] == sum(made[0].list("").values())
    for name, history in found["histories"].items():
        assert sum(history["kinds"].values()) == history["nbytes"] == found["sizes"][name]
        assert all(read["requests"] > 0 and read["nbytes"] > 0 for read in history["reads"])
        whole, tensor, rows = (read["nbytes"] for read in history["reads"][-3:])
        assert whole > tensor >= rows
    chain, folds, anchors = (found["histories"][name]["reads"][-1]["requests"] for name in found["histories"])
    assert chain > folds > anchors
    sizes = found["sizes"]
    assert 8 * (1 << 20) < sizes["full safetensors"] < 8 * (1 << 20) + 8 * 10_000
    assert sizes["this store, as committed"] < sizes["and folds"] < sizes["and anchors"]
    assert sizes["zstd of full"] < sizes["full safetensors"]
    assert found["diff"]["requests_of_anchors"] == 0
    assert [item["requests"] for item in found["opening"]] == [5, 5, 5, 5]
    checks = {item["target"]: item["met"] for item in found["checks"]}
    assert list(checks.values())[:2] == [True, True]
    assert code == (0 if all(checks.values()) else 1)
    assert "without icechunk" in out


def _document(objects: MemoryObjects) -> tuple[Any, str]:
    from dcr_store.format.canonical import sha256
    from dcr_store.format.documents import StoreDocument

    data = objects.get("dcr.json")
    return StoreDocument.from_bytes(data), sha256(data)


def test_a_wrong_bit_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Store.read

    def wrong(self: Store, *arguments: Any, **options: Any) -> dict[str, Any]:
        found = read(self, *arguments, **options)
        next(reversed(found.values())).reshape(-1).view(np.uint16)[-1] ^= 1
        return found

    monkeypatch.setattr(Store, "read", wrong)
    with pytest.raises(SystemExit, match=r"main@1.* is wrong"):
        bench_history.main(["--versions", "3", "--mib", "1", "--without", "icechunk,fastcdc", "--latency-ms", "0"])
