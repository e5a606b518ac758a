"""Run seeds, in processes of their own::

    python tests/sim/campaign.py --first-seed 0 --seeds 100000                on all cores
    python tests/sim/campaign.py --first-seed 4711 --seeds 1 --trace          what happened in one
    python tests/sim/campaign.py --without "sync before clean"                how soon that is found out; or "each"

A seed always gives the same run, whichever were run before it; each one that fails is told at once.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

TESTS = Path(__file__).resolve().parents[1]
MEMORY = Path("/dev/shm")


@dataclass
class Report:
    """What some seeds gave.

    Attributes
    ----------
    counters : dict of str to int
        How often each kind of fault, and of what it led to, was met; how many seeds chose each scene.
    failures : list of str
        One for each seed in which an invariant did not hold.
    """

    n_seeds: int = 0
    seconds: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.n_seeds += other.n_seeds
        self.seconds += other.seconds
        self.counters = dict(Counter(self.counters) + Counter(other.counters))
        self.failures += other.failures

    def to_text(self) -> str:
        rate = self.seconds / max(self.n_seeds, 1) * 1e3
        counters = "\n".join(f"  {n:9}  {name}" for name, n in sorted(self.counters.items()))
        return f"{self.n_seeds} seeds, {rate:.1f} ms of one core each, {len(self.failures)} failed\n{counters}"


def run(first_seed: int, n_seeds: int, n_processes: int, *options: str) -> Report:
    """Run seeds in `n_processes` new processes; returns when all have been run."""
    firsts = [first_seed + i * n_seeds // n_processes for i in range(n_processes + 1)]
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--first-seed",
                str(a),
                "--seeds",
                str(b - a),
                "--processes",
                "1",
                "--json",
                *options,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for a, b in itertools.pairwise(firsts)
    ]
    report = Report()
    for worker in workers:
        output, _ = worker.communicate()
        if worker.returncode not in (0, 1):
            raise RuntimeError(f"a worker ended with {worker.returncode}")
        report.add(Report(**json.loads(output)))
    return report


class Runner:
    """Runs seeds in this process, which is good for nothing else afterwards."""

    def __init__(self) -> None:
        process.install()
        warnings.simplefilter("error", UserWarning)  # of a damaged base, and none is damaged here
        self._root = Path(tempfile.mkdtemp(prefix="dcr-sim-", dir=MEMORY if MEMORY.is_dir() else None))
        tempfile.tempdir = str(self._root)  # where baselines are that have no place
        self._stage = Stage(self._root)
        gc.collect()
        gc.freeze()
        gc.disable()  # so that nothing is finalized in another actor's turn

    def run(
        self,
        seeds: range,
        scene: str | None,
        *,
        until_failure: bool = False,
        is_traced: bool = False,
        progress: int = 0,
    ) -> Report:
        """Run seeds; says every `progress` seeds how far it has come."""
        report = Report()
        totals: Counter[str] = Counter()
        began_s = time.process_time()
        for seed in seeds:
            name = scene or Random(f"scene {seed}").choices(list(SCENES), [weight for _, weight in SCENES.values()])[0]
            world = SCENES[name][0](self._stage, seed)
            if is_traced:
                world.scheduler.trace = []
            try:
                world.run()
            except Exception as error:
                if until_failure and not isinstance(error, ViolationError):
                    raise  # of the patch, not of the rule
                report.failures.append(f"seed {seed} ({name}): {type(error).__name__}: {error}")
                if not until_failure:
                    print(report.failures[-1], file=sys.stderr, flush=True)
                if is_traced:
                    traceback.print_exception(error)
            if is_traced:
                print("\n".join(world.scheduler.trace or []))
            totals.update(world.counters)
            totals[f"scene: {name}"] += 1
            vars(world).clear()  # all refer to it: so nearly nothing is left that only a collection would find
            report.n_seeds += 1
            if report.failures and until_failure:
                break
            if seed % 1000 == 999:
                gc.collect()
                gc.freeze()  # what is remembered grows, and is not walked again
            if progress and (report.n_seeds % progress == 0 or report.n_seeds == len(seeds)):
                used_s = time.process_time() - began_s
                print(
                    f"{time.strftime('%H:%M:%S')}  {report.n_seeds} of {len(seeds)} seeds, the last {seed}; "
                    f"{used_s / report.n_seeds * 1e3:.1f} ms each; {len(report.failures)} failed",
                    file=sys.stderr,
                    flush=True,
                )
        report.seconds = time.process_time() - began_s
        report.counters = dict(totals)
        return report

    def run_without(self, rule: str, seeds: range) -> Report:
        """Run seeds with one safety rule taken out, until that shows."""
        take_out, scene = REMOVALS[rule]
        with take_out():
            report = self.run(seeds, scene, until_failure=True)
        print(
            f"without {rule!r}: {report.n_seeds} seeds, {report.failures or 'nothing found'}",
            file=sys.stderr,
            flush=True,
        )
        return report

    def close(self) -> None:
        """Remove what is left, and require that nothing remembered has been changed by those who got it."""
        shutil.rmtree(self._root)
        changed = memory.changed()
        if changed:
            raise RuntimeError(f"remembered, and changed since: {changed[0]:.300}")


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--processes", type=int, help="as many as there are cores, where seeds are only run")
    parser.add_argument("--scene", choices=list(SCENES), help="of all seeds, instead of one that each chooses")
    parser.add_argument("--without", choices=[*REMOVALS, "each"], help="take a safety rule out, until that shows")
    parser.add_argument("--trace", action="store_true", help="print every step")
    parser.add_argument("--progress", type=int, default=0, metavar="N", help="say every N seeds how far it has come")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    only_runs = arguments.without is None and not (arguments.trace or arguments.json)
    n_processes = arguments.processes or (len(os.sched_getaffinity(0)) if only_runs else 1)
    n_processes = min(n_processes, len(seeds))
    if n_processes > 1:
        options = [] if arguments.scene is None else ["--scene", arguments.scene]
        options += ["--progress", str(arguments.progress)]
        report = run(seeds.start, len(seeds), n_processes, *options)
    else:
        runner = Runner()
        try:
            if arguments.without is not None:
                rules = list(REMOVALS) if arguments.without == "each" else [arguments.without]
                found = {rule: runner.run_without(rule, seeds) for rule in rules}
                print(json.dumps({rule: asdict(report) for rule, report in found.items()}, indent=1))
                return 0 if all(report.failures for report in found.values()) else 1
            report = runner.run(seeds, arguments.scene, is_traced=arguments.trace, progress=arguments.progress)
        finally:
            runner.close()
    print(json.dumps(asdict(report)) if arguments.json else report.to_text(), flush=True)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    from sim import memory, process
    from sim.removals import REMOVALS
    from sim.scenes import SCENES, Stage
    from sim.scheduler import ViolationError

    sys.exit(main())
