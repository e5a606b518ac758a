"""``python -m real_engines ENGINE``: an engine's loaders with 1 and 2 ranks, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from real_engines.shapes import SHAPES, make

_TIMEOUT_S: Final = 3600


def run(name: str, tp: int, directory: Path) -> bool:
    """Run all models with `tp` ranks; return whether all were right."""
    logs = [directory / f"{name}-{tp}-{rank}.log" for rank in range(tp)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-W", "ignore", "-m", "real_engines.rank", name, str(tp), str(rank), str(directory)]
        with log.open("wb") as file:
            ranks.append(subprocess.Popen(command, stderr=file))
    try:
        statuses = [process.wait(_TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for log, status in zip(logs, statuses, strict=True):
        if status not in (0, 1):  # 1: it said itself what is wrong
            print(f"{log.stem} ended with {status}:\n{log.read_text(errors='replace')[-4000:]}", flush=True)
    return not any(statuses)


def main(name: str) -> int:
    with tempfile.TemporaryDirectory(prefix="dcr-engines-") as made:
        for kind in SHAPES:
            make(Path(made), kind)
        were_right = [run(name, tp, Path(made)) for tp in (1, 2)]
    return 0 if all(were_right) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
