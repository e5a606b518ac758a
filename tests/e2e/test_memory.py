"""A publisher and a receiver hold a bounded number of partitions, whatever the model's size."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

MIB = 1 << 20
# The bounds, divided by 16: the smallest model that reaches them is 16 times smaller, and the test takes seconds.
SMALL = """
import sys
import dcr_store
from dcr_store.publish import partitions, spool, uploads
from dcr_store.receive import transfers
from dcr_store.versions import prefetch, replay, workers
for module, name in (
    (partitions, "PARTITION_NBYTES"), (uploads, "IN_FLIGHT_NBYTES"), (spool, "SPOOL_NBYTES"),
    (transfers, "IN_FLIGHT_NBYTES"),
    (prefetch, "AHEAD_NBYTES"), (replay, "GROUP_NBYTES"), (workers, "_KEEP_NBYTES"),
):
    setattr(module, name, getattr(module, name) // 16)
store = dcr_store.open(sys.argv[2])
if sys.argv[1] == "publish":
    with store.begin(baseline=sys.argv[2] + "-baseline") as transaction:
        transaction.write_checkpoint(sys.argv[3])
elif sys.argv[1] == "pull":
    store.pull(sys.argv[3])
else:
    with store.receiver(sys.argv[3]) as receiver:
        receiver.follow(once=True)
"""


def peak(*arguments: str) -> int:
    """Return the largest anonymous memory of a child, in bytes; pages of files are the system's to take back."""
    found = [0]
    with subprocess.Popen([sys.executable, "-c", SMALL, *arguments]) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            found += [int(number) << 10 for number in re.findall(r"RssAnon:\s+(\d+) kB", status)]
            time.sleep(0.001)
    assert process.returncode == 0
    return max(found)


def write(path: Path, bits: np.ndarray, n_mib: int) -> None:
    from dcr_store.targets.safetensors_file import make_header

    n_tensors = n_mib * MIB // bits.nbytes
    with path.open("wb") as file:
        file.write(make_header([(f"{i}.weight", "BF16", bits.shape) for i in range(n_tensors)]))
        for _ in range(n_tensors):
            file.write(bits.data)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    import dcr_store

    rng = np.random.default_rng(0)
    anchor = rng.integers(0, 1 << 16, 2 * MIB, np.uint16)  # incompressible: partitions are as large as they get
    peaks: dict[str, list[int]] = {}
    for n_mib in (32, 128):
        store, checkpoint, target = (str(tmp_path / f"{name}{n_mib}") for name in ("store", "model", "target"))
        dcr_store.create(store, chunk_elements=1 << 16)
        delta = anchor ^ (rng.random(anchor.size) < 0.01).astype(np.uint16)
        everything = delta ^ rng.integers(1, 1 << 16, anchor.size, np.uint16)
        for what, bits in (("anchor", anchor), ("delta", delta), ("everything", everything)):
            write(Path(checkpoint).with_suffix(".safetensors"), bits, n_mib)
            # Followed from the version before: all of it goes through the spool.
            verbs = [("publish", f"{checkpoint}.safetensors"), ("follow" if what == "everything" else "pull", target)]
            for verb, place in verbs:
                peaks.setdefault(f"{verb} {what}", []).append(peak(verb, store, place))
    for what, (small, large) in peaks.items():
        # Four times the model. Chunks wait in threads, as luck will have it, and rows of each chunk are kept.
        assert large <= small + 16 * MIB, f"{what}: {small / MIB:.0f} MiB, {large / MIB:.0f} MiB"
        assert large <= 120 * MIB, f"{what}: {large / MIB:.0f} MiB"
