"""What the fault tests share: checkpoints with everything that a pull has to move, places of stores, and what to check.

A *strike* is a named point and the how-manieth time that it is reached: ``("log.commit.after", 1)``. Which points there
are is never listed here: a recording run tells, so that a new point in the product is struck without a change of tests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from states import law_step, tree, write_hf

import dcr_store
from dcr_store.format import canonical
from dcr_store.format.documents import StoreDocument
from dcr_store.format.fields import now
from dcr_store.format.names import STORE_KEY, new_txid
from dcr_store.objects.open import open_objects
from dcr_store.ports import ObjectStore
from dcr_store.store import Store

KILLS = int(os.environ.get("DCR_KILLS", "4"))  # random ones per scenario; a campaign takes 100
OCCURRENCES = int(os.environ.get("DCR_OCCURRENCES", "1"))  # of each point; above 1, the last too
SEED = int(os.environ.get("DCR_SEED", "1"))
CHUNK_ELEMENTS = 256
SMALL = {"partition_nbytes": 2048, "journal_partitions": 2, "checkpoint_versions": 3, "delay_s": 0.05}

Strike = tuple[str, int]


def model_series(n_steps: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return states of a model of all widths: BF16 matrices, float32, FP8, int64, an empty tensor and a scalar."""
    rng = np.random.default_rng(seed)
    shapes = {"embed.weight": (67, 48), "layers.0.q.weight": (48, 33), "layers.0.mlp.weight": (48, 101)}
    bits = {n: rng.normal(0, 0.02, s).astype(ml_dtypes.bfloat16).view(np.uint16) for n, s in shapes.items()}
    norm = rng.normal(1, 0.1, 48).astype(np.float32)
    quantised = rng.integers(0, 256, (40, 30)).astype(np.uint8)
    states = []
    for step in range(n_steps):
        states.append(
            {
                **{name: array.copy().view(ml_dtypes.bfloat16) for name, array in bits.items()},
                "norm.weight": norm.copy(),
                "expert.weight": quantised.copy().view(ml_dtypes.float8_e4m3fn),
                "position": np.arange(step, step + 300, dtype=np.int64),
                "nothing": np.zeros((0, 3), np.float32),
                "scale": np.float32(1 + step).reshape(()),
            }
        )
        bits = {name: law_step(array, 0.05, rng) for name, array in bits.items()}
        norm = norm + rng.normal(0, 1e-6, 48).astype(np.float32)
        quantised = np.where(rng.random(quantised.shape) < 0.05, quantised ^ np.uint8(1), quantised)
    return states


def make_checkpoints(root: Path) -> list[Path]:
    """Write checkpoints of one run: in one file, in three, with side files that come, go and change, of two layouts."""
    states = model_series(7)
    states[5]["extra.weight"] = np.arange(500, dtype=np.float32)
    for step in (3, 4):
        states[step]["nothing"] = states[step]["nothing"].copy()
    n_files = [1, 3, 3, 2, 2, 2, 1]
    checkpoints = []
    for step, (state, n) in enumerate(zip(states, n_files, strict=True)):
        place = write_hf(root / f"step{step}", state, n, step=step)
        (place / "generation.json").write_text(json.dumps({"temperature": step // 2}))
        if step % 2:
            (place / "tokenizer" / "merges.txt").write_text(f"a b\n{step}\n")
        if step == 4:
            # The same files under other names: a pull renames them.
            for path in sorted(place.glob("model-*.safetensors")):
                path.rename(place / path.name.replace("model-", "weights-"))
            (place / "model.safetensors.index.json").unlink()
        checkpoints.append(place)
    return checkpoints


@functools.lru_cache(maxsize=1)
def _objects(url: str, options: str) -> ObjectStore:
    return open_objects(url, json.loads(options))


@dataclass(frozen=True)
class Place:
    """Where a store is, for children (`options`) and for this process (`own_options`), which needs no relay."""

    url: str
    options: Mapping[str, Any] | None = None
    own_options: Mapping[str, Any] | None = None
    relay: str | None = None

    @property
    def job(self) -> dict[str, Any]:
        """What a job says about it."""
        return {"store": self.url_of_children, "options": None if self.relay else self.options}

    @property
    def url_of_children(self) -> str:
        """Where children find it."""
        return self.relay or self.url

    @property
    def is_slow(self) -> bool:
        """Whether a request takes long: of a server's stores, only campaigns do all that there is to do."""
        return self.own_options is not None

    def create(self, codec: str = "dcr.delta", chunk_elements: int = CHUNK_ELEMENTS) -> Store:
        """Create the store; without the probe of the backend, which takes seconds and has its own tests."""
        document = StoreDocument(new_txid(), codec, chunk_elements, now())
        assert _objects(self.url, json.dumps(self.own_options)).put_if_absent(STORE_KEY, document.to_bytes())
        return self.open()

    def open(self) -> Store:
        """Open the store anew: nothing remembered but connections, which take longest to make."""
        objects = _objects(self.url, json.dumps(self.own_options))
        data = objects.get(STORE_KEY)
        return Store(objects, StoreDocument.from_bytes(data), canonical.sha256(data))


@contextlib.contextmanager
def behind_relay(place: Place, cache: Path) -> Iterator[Place]:
    """Let children reach a store through a relay only."""
    from relays import RelayThread

    with RelayThread(place.url, cache, storage_options=place.own_options, access="publish") as relay:
        yield replace(place, relay=relay.url)


def strikes(points: Mapping[str, int], occurrences: int = OCCURRENCES) -> list[Strike]:
    """Return what to strike at, given how often a recording run reached each point."""
    chosen = []
    for name, count in points.items():
        last = {count} if occurrences > 1 else set()
        chosen += [(name, nth) for nth in sorted({*range(1, min(occurrences, count) + 1), *last})]
    return chosen


def every(chosen: Sequence[Strike], step: int, nth: int = 0) -> Sequence[Strike]:
    """Return every `step`-th strike, all in a campaign; which ones changes with the seed and with `nth` scenario."""
    return chosen if OCCURRENCES > 1 else chosen[(SEED + nth) % step :: step]


def rename_side_file(objects: ObjectStore, path: str) -> str:
    """Give a side file of main@0 another path, as who forges a store would; return the manifest's key."""
    key = "log/main/00000000000000000001.json"
    record = json.loads(objects.get(key))
    manifest = json.loads(objects.get(record["manifest"]["key"]))
    next(file for file in manifest["files"] if file["kind"] == "side")["path"] = path
    data = canonical.encode(manifest)
    record["manifest"].update(sha256=canonical.sha256(data), nbytes=len(data))
    manifest_key: str = record["manifest"]["key"]
    objects.put(manifest_key, data)
    objects.put(key, canonical.encode(record))
    return manifest_key


def roots(store: Store, line: str = "main") -> list[str]:
    """Return the roots of a line's versions, by a fresh read of the log."""
    if line not in store.lines():
        return []
    try:
        return [info.root for info in store.log(line)]
    except dcr_store.errors.NotFoundError:
        return []


PartitionPlace = tuple[str, str, int]


def stored_partitions(store: Store, line: str) -> dict[PartitionPlace, set[str]]:
    """Return (prefix of the writer's data, array, index) → incarnations under which the partition is stored."""
    found: dict[PartitionPlace, set[str]] = {}
    for key in store._objects.list(f"versions/{line}/"):
        prefix, _, rest = key.partition("/data/")
        parts = rest.split("/")
        if len(parts) == 5 and parts[3] == "c":
            writer, _, incarnation = parts[0].rpartition(".")
            place = (f"{prefix}/data/{writer}", f"{parts[1]}/{parts[2]}", int(parts[4]))
            found.setdefault(place, set()).add(incarnation)
    return found


def journaled_partitions(store: Store, line: str) -> dict[PartitionPlace, set[str]]:
    """Return the stored partitions that journal entries name: nothing may add to these."""
    objects = store._objects
    named = set()
    transactions = objects.list_names(f"versions/{line}/")
    for key in [key for name in transactions[-2:] for key in objects.list(f"versions/{line}/{name}/")]:
        prefix, is_journal, _ = key.partition("/journal/")
        if is_journal:
            entry = json.loads(objects.get(key))
            data = f"{prefix}/data/{entry['writer']}"
            named |= {(data, item["array"], item["index"]) for item in entry["partitions"]}
    stored = stored_partitions(store, line)
    return {place: stored[place] for place in named}


def assert_nothing_twice(store: Store, line: str, before: Mapping[PartitionPlace, set[str]]) -> None:
    """Assert that no partition that was journaled `before` has been stored again."""
    stored = stored_partitions(store, line)
    for place, incarnations in before.items():
        assert stored[place] == incarnations, f"{place}: journaled, and stored again"


def assert_checkpoint(directory: Path, checkpoint: Path, *, own: bool = True) -> None:
    """Assert that a directory is a checkpoint, byte for byte, with nothing left over (`own`: in ``.dcr`` either)."""
    found, expected = tree(directory), tree(checkpoint)
    assert sorted(found) == sorted(expected), sorted(set(found) ^ set(expected))
    differing = [path for path in expected if found[path] != expected[path]]
    assert not differing
    notes = {path.name for path in (directory / ".dcr").iterdir()}
    assert not own or notes == {"lock", "marker.json"}, notes


def rounds(n: int, struck: Sequence[bool], n_enough: int) -> Iterator[int]:
    """Count `n` rounds of a test that kills at random, and further ones until `n_enough` were `struck`."""
    for nth in range(20 + 10 * n):
        if nth >= n and sum(struck) >= n_enough:
            return
        yield nth
    raise AssertionError("they end before they are killed")


class Instants:
    """When to kill what takes about `lasts_s`: at random in that time, of which more is known with each that was.

    It may have been measured in a busy moment, and from then on all would end before they are killed.
    """

    def __init__(self, rng: random.Random, lasts_s: float) -> None:
        self._rng, self._lasts_s, self._after_s = rng, lasts_s, 0.0

    def next(self, part: float = 1.0) -> float:
        """Return after how many seconds to kill the next one: up to `part` of the time, which may be above 1."""
        self._after_s = self._rng.uniform(0.0, part * self._lasts_s)
        return self._after_s

    def note(self, *, struck: bool) -> None:
        """Note whether the last one was killed before its end."""
        self._lasts_s = 1.1 * self._lasts_s if struck else min(self._lasts_s, max(self._after_s, 0.001))


def seeded(*names: object) -> random.Random:
    """Return a generator for one scenario, from the seed of the session."""
    return random.Random(f"{SEED} {names}")


def cycle(items: list[Path], start: int = 0) -> Iterator[Path]:
    """Go round and round."""
    while True:
        yield items[start % len(items)]
        start += 1
