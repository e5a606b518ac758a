"""One run of the demonstration: the trainer publishes and learns from what the receivers sample with that version."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dcr_store.demo import policy
from dcr_store.demo.cluster import LINE, Cluster
from dcr_store.demo.drills import Drill, make_plan
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.reference import Point, Reference
from dcr_store.demo.rendering import Received, Row
from dcr_store.demo.site import Site, number_of
from dcr_store.demo.training import Trainer, warm_up
from dcr_store.store import Store
from dcr_store.versions.info import VersionInfo

MARK: Final = "demo"
"""Key of the metadata by which a demonstration knows its own versions."""
TASK: Final = "counting on"


@dataclass(frozen=True, slots=True)
class _Published:
    """A version, and what is to be compared with it.

    Attributes
    ----------
    committed_at_s, publish_s : float or None
        None for a version of an earlier run.
    """

    info: VersionInfo
    step: int
    loss: float | None
    fingerprint: dict[str, str]
    committed_at_s: float | None = None
    publish_s: float | None = None


class Session:
    """One run on an open store.

    Parameters
    ----------
    store, store_url : Store, str
    scratch : path
        A directory for everything but the store.
    recipe : Recipe
    told : callable
        Called with what happens.
    """

    def __init__(self, store: Store, store_url: str, scratch: Path, recipe: Recipe, told: Callable[[str], None]):
        self._store, self._store_url, self._scratch, self._recipe = store, store_url, scratch, recipe
        self._told = told
        self._initial = scratch / "initial"

    def run(self, steps: int) -> tuple[list[Row], list[Drill]]:
        """Publish `steps` versions after the first (or the head); return a row for each version, and the drills."""
        versions = self._store.log(LINE)
        head = versions[-1] if versions else None
        first = 0 if head is None else number_of(head.version)
        plan = make_plan(first, steps)
        policy.prepare()
        published: list[_Published] = []
        points: list[Point] = []
        rewards: list[float] = []
        with Cluster(self._store, self._store_url, head, plan, self._scratch, self._recipe, self._told) as cluster:
            published.append(self._first(head))
            trainer = Trainer(policy.load(self._initial), self._recipe)
            reference = Reference(self._initial, self._scratch / "reference", self._recipe)
            for number in range(first, first + steps + 1):
                # The reference takes its turn while the receivers are at work.
                points.append(reference.measure(number))
                if number < first + steps:
                    reference.learn()
                rollouts = cluster.roll_out(published[-1].info.version)
                rewards.append(rollouts.reward)
                if number == first + steps:
                    break
                if number + 1 == plan.cut:
                    cluster.cut(f"{LINE}@{plan.cut}")
                self._told(f"step {number - first + 1} of {steps}: the trainer learns and publishes")
                loss = trainer.learn(rollouts.tokens, rollouts.rewards)
                published.append(self._publish(trainer.model, published[-1], rollouts.reward, loss))
                if number + 1 == plan.back:
                    cluster.reconnect()
            cluster.visit(item.info.version for item in published)
        rows = [
            self._row(item, reward, point, cluster.sites)
            for item, reward, point in zip(published, rewards, points, strict=True)
        ]
        return rows, cluster.drills

    def _first(self, head: VersionInfo | None) -> _Published:
        """Have the initial checkpoint in its directory, and in the store."""
        if head is not None:
            self._told(f"restoring {head.version}")
            self._store.pull(self._initial, head.version)
            found = policy.fingerprint(policy.load(self._initial), self._initial)
            return _Published(head, head.metadata["step"], None, found)
        self._told("warming up")
        policy.save(self._warmed_up(), self._initial)
        return self._publish_checkpoint(policy.load(self._initial), self._initial, None, None, None)

    def _warmed_up(self) -> policy.Model:
        model = policy.make_policy(self._recipe)
        warm_up(model, self._recipe, lambda right: self._told(f"warming up: {right:.0%} of the terms right"))
        return model

    def _publish(self, model: policy.Model, previous: _Published, reward: float, loss: float) -> _Published:
        checkpoint = self._scratch / "checkpoint"
        policy.save(model, checkpoint)
        return self._publish_checkpoint(model, checkpoint, previous, reward, loss)

    def _publish_checkpoint(
        self,
        model: policy.Model,
        checkpoint: Path,
        previous: _Published | None,
        reward: float | None,
        loss: float | None,
    ) -> _Published:
        """Publish; `reward` is that of the samples from which this policy was learned, `loss` of that step."""
        step = 0 if previous is None else previous.step + 1
        begun_s = time.monotonic()
        metadata: dict[str, Any] = {MARK: TASK, "step": step, "reward": reward, "loss": loss}
        message = "after the warm-up" if previous is None else f"after step {step}"
        base = None if previous is None else previous.info.version
        with self._store.begin(
            LINE, base=base, message=message, metadata=metadata, baseline=self._scratch / "baseline"
        ) as transaction:
            transaction.write_checkpoint(checkpoint)
            info = transaction.commit()
        committed_at_s = time.monotonic()
        fingerprint = policy.fingerprint(model, checkpoint)
        return _Published(info, step, loss, fingerprint, committed_at_s, committed_at_s - begun_s)

    def _row(self, published: _Published, reward: float, point: Point, sites: list[Site]) -> Row:
        info = published.info
        return Row(
            info.version,
            published.step,
            reward,
            published.loss,
            point.reward,
            point.loss,
            point.fingerprint == published.fingerprint,
            info.changed,
            info.elements,
            info.nbytes,
            (self._initial / "model.safetensors").stat().st_size,
            published.publish_s,
            {site.group: _received(published, site) for site in sites},
        )


def _received(published: _Published, site: Site) -> Received:
    info, arrival = published.info, site.arrivals[published.info.version]
    since_s = None if arrival.is_return else published.committed_at_s
    return Received(
        None if since_s is None else arrival.served_at_s - since_s,
        arrival.apply_s,
        arrival.is_return,
        (arrival.root, arrival.fingerprint) == (info.root, published.fingerprint),
    )
