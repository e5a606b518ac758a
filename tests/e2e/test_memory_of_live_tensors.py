"""Live tensors are brought along without a second copy of them: on the host, by the way of devices, and as patches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import dcr_store
from dcr_store.publish import partitions

MIB = 1 << 20
N_MIB = 256
# The buffers' bounds, divided by 16, so that a copy of the state stands out.
CHILD = """
import json, os, re, sys, threading, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # each thread has its buffers
os.environ["DCR_STORE_KERNELS"] = "numpy"  # numba's compiler takes memory of its own
import dcr_store
import torch
from dcr_store.targets import live_tensor
from dcr_store.versions import pairs, prefetch, replay, workers
for module, name in (
    (prefetch, "AHEAD_NBYTES"), (replay, "GROUP_NBYTES"), (workers, "_KEEP_NBYTES"),
    (pairs, "BATCH_NBYTES"), (pairs, "KEPT_NBYTES"),
):
    setattr(module, name, getattr(module, name) // 16)
if sys.argv[2] == "device":
    live_tensor.is_on_host = lambda tensor: False

def now():
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", file.read())[1]) << 10

def watch():
    while not done.is_set():
        found.append(now())
        time.sleep(0.002)

store = dcr_store.open(sys.argv[1])
state = {name: torch.zeros(shape, dtype=torch.int16) for name, dtype, shape in store.show("main@0").tensors}
for tensor in state.values():
    tensor.fill_(1)
before, found, done = now(), [], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
try:
    for version in ("main@1", "main@0"):
        if sys.argv[2] == "patches":
            for patch in store.patches("main@0", version, framework="torch"):
                flat = state[patch.name].view(-1)
                flat[patch.indices.long()] = patch.values
        else:
            store.load_into(state, version)
finally:
    done.set()
    thread.join()
print(json.dumps([before, max(found), [int(tensor.view(-1)[:1000].long().sum()) for tensor in state.values()]]))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """A store of two versions of 256 MiB, and sums over tensors of the first."""
    place = str(tmp_path_factory.mktemp("large") / "store")
    rng = np.random.default_rng(0)
    array = np.tile(rng.integers(-(2**15), 2**15, MIB // 8, np.int16), 64)
    small = patch.object(partitions, "PARTITION_NBYTES", partitions.PARTITION_NBYTES // 16)
    with dcr_store.create(place) as store, small:
        for version in (array, array ^ (rng.random(array.size) < 0.01)):
            with store.begin() as transaction:
                for number in range(N_MIB * MIB // array.nbytes):
                    transaction.write(f"{number}.weight", (version ^ number).reshape(-1, 1024))  # one alone is tied
    return place, [int((array[:1000] ^ number).astype(int).sum()) for number in range(N_MIB * MIB // array.nbytes)]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("way", ["host", "device", "patches"])
def test_live_tensors_are_not_copied(store: tuple[str, list[int]], way: str) -> None:
    place, expected = store
    run = subprocess.run([sys.executable, "-c", CHILD, place, way], capture_output=True, text=True, check=True)
    before, peak, sums = json.loads(run.stdout)
    if way != "patches":
        assert sums == expected
    assert before > N_MIB * MIB
    assert peak <= before + 128 * MIB, f"{before / MIB:.0f} MiB before, {peak / MIB:.0f} MiB at most"
