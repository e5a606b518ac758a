"""The demonstration itself: train, publish, and learn from what the follower sampled with exactly that version.

A store that an earlier demonstration made is gone on with: the policy is its head, restored from the store. Refuses
every other store that holds anything, and a directory that is no store and not empty.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import dcr_store
from dcr_store.demo import policy, rendering
from dcr_store.demo.follower import LINE
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.rendering import Outcome, Row
from dcr_store.demo.training import Trainer, warm_up
from dcr_store.demo.worker import Follower
from dcr_store.errors import InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from dcr_store.store import Store
    from dcr_store.versions.info import VersionInfo

MARK: Final = "demo"
"""Key of the metadata by which a demonstration knows its own versions."""
TASK: Final = "counting on"


def run(store_url: str, steps: int, *, as_json: bool, console: Console, recipe: Recipe | None = None) -> int:
    """Run the demonstration and print what came of it.

    Parameters
    ----------
    store_url : str
        Where to create the store; one that a demonstration made gets further versions.
    steps : int
        Training steps, each of which publishes a version.
    as_json : bool
        Print one JSON document to standard output instead of the table.
    console : rich.console.Console
        Where progress and the table go.

    Returns
    -------
    int
        0 if every version arrived bit for bit, else 1.

    Raises
    ------
    InvalidInputError
        If a package is missing, or something else is where the store should be.
    DcrError
        If the store or the follower fails.
    """
    recipe = recipe or Recipe()
    begun_s = time.perf_counter()
    policy.require_packages()
    with (
        console.status("starting") as status,
        _open(store_url) as store,
        tempfile.TemporaryDirectory(prefix="dcr-demo-") as scratch,
    ):
        rows = _Session(store, Path(scratch), recipe, status.update).run(store_url, steps)
    outcome = Outcome(store_url, tuple(rows), time.perf_counter() - begun_s)
    if as_json:
        print(json.dumps(outcome.to_json()))
    else:
        _print(outcome, console)
    return 0 if outcome.equal else 1


def _print(outcome: Outcome, console: Console) -> None:
    console.print(rendering.introduction(outcome), end="\n\n", highlight=False)
    console.print(rendering.table(outcome))
    console.print(f"\n{outcome.seconds:.0f} s in all. Go on with:", highlight=False)
    for command, remark in rendering.next_commands(outcome):
        console.print(
            f"  {command}" + (f"    # {remark}" if remark else ""), markup=False, highlight=False, soft_wrap=True
        )


def _open(store_url: str) -> Store:
    """Open or create the store; refuse what is not ours."""
    if store_url.startswith("memory:"):
        raise InvalidInputError("no other process sees a store in memory; name another place (--store)", key=store_url)
    try:
        store = dcr_store.open(store_url)
    except NotFoundError:
        local = Path(store_url.removeprefix("file://"))
        if local.is_dir() and any(local.iterdir()):
            raise InvalidInputError(
                "the directory is not empty and no store; name another one (--store)", key=store_url
            ) from None
        return dcr_store.create(store_url)
    others = set(store.lines()) - {LINE}
    head = None if others else _head(store)
    if others or (head is not None and MARK not in head.metadata):
        store.close()
        raise InvalidInputError("the store was not made by the demo; name another one (--store)", key=store_url)
    return store


def _head(store: Store) -> VersionInfo | None:
    versions = store.log(LINE)
    return versions[-1] if versions else None


@dataclass(frozen=True, slots=True)
class _Published:
    """A version whose report is still to come."""

    info: VersionInfo
    step: int
    publish_s: float | None
    fingerprint: dict[str, str]


class _Session:
    """One run on an open store."""

    def __init__(self, store: Store, scratch: Path, recipe: Recipe, told: Callable[[str], None]) -> None:
        self._store, self._scratch, self._recipe, self._told = store, scratch, recipe, told
        self._checkpoint = scratch / "checkpoint"

    def run(self, store_url: str, steps: int) -> list[Row]:
        """Publish `steps` versions after the first (or the head) and return a row for each version."""
        head = _head(self._store)
        first = 0 if head is None else int(head.version.rpartition("@")[2])
        rows = []
        with Follower(store_url, self._scratch / "follower", range(first, first + steps + 1), self._recipe) as follower:
            policy.prepare(self._recipe)
            if head is None:
                model = self._warmed_up()
                published = self._publish(model, None, None)
            else:
                model, published = self._restored(head)
            trainer = Trainer(model, self._recipe)
            for step in range(steps + 1):
                self._told(f"{step} of {steps}: the follower pulls {published.info.version} and samples")
                report = follower.next_report()
                rows.append(self._row(published, report))
                if step == steps:
                    break
                self._told(f"{step + 1} of {steps}: the trainer learns from the samples and publishes")
                with np.load(report["rollouts"]) as rollouts:
                    trainer.learn(rollouts["tokens"], rollouts["rewards"])
                published = self._publish(model, published, report["reward"])
        return rows

    def _warmed_up(self) -> policy.Model:
        import torch

        self._told("warming up")
        model = policy.make_policy(self._recipe)
        warm_up(model, self._recipe, lambda right: self._told(f"warming up: {right:.0%} of the terms right"))
        return model.to(torch.bfloat16)

    def _restored(self, head: VersionInfo) -> tuple[policy.Model, _Published]:
        self._told(f"restoring {head.version}")
        self._store.pull(self._checkpoint, head.version)
        model = policy.load(self._checkpoint)
        return model, _Published(head, head.metadata["step"], None, policy.fingerprint(model, self._checkpoint))

    def _publish(self, model: policy.Model, previous: _Published | None, reward: float | None) -> _Published:
        """Save the model as a checkpoint and publish it; `reward` is that of the samples it learned from."""
        step = 0 if previous is None else previous.step + 1
        policy.save(model, self._checkpoint)
        begun_s = time.perf_counter()
        metadata: dict[str, Any] = {MARK: TASK, "step": step, "reward": reward}
        message = "after the warm-up" if previous is None else f"after step {step}"
        base = None if previous is None else previous.info.version
        with self._store.begin(
            LINE, base=base, message=message, metadata=metadata, baseline=self._scratch / "baseline"
        ) as transaction:
            transaction.write_checkpoint(self._checkpoint)
            info = transaction.commit()
        publish_s = time.perf_counter() - begun_s
        return _Published(info, step, publish_s, policy.fingerprint(model, self._checkpoint))

    def _row(self, published: _Published, report: dict[str, Any]) -> Row:
        info = published.info
        return Row(
            info.version,
            published.step,
            report["reward"],
            info.changed,
            info.elements,
            info.nbytes,
            (self._checkpoint / "model.safetensors").stat().st_size,
            published.publish_s,
            report["pull_s"],
            report["version"] == info.version and report["fingerprint"] == published.fingerprint,
        )
