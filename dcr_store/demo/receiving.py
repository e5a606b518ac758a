"""The rollout worker, a process of its own: a receiver in a group that loads each version as an engine would.

Knows the store (or a relay of it), a directory and the recipe. For each version that its group may serve it tells what
it holds, waits for what it is asked to sample, and stamps that with the version of ``Receiver.active``.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dcr_store
from dcr_store import events
from dcr_store.demo import child, policy
from dcr_store.demo.drills import Strike
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.sampling import roll_out
from dcr_store.format.names import version_number
from dcr_store.receive.receiver import Receiver
from dcr_store.receive.results import Active, Applied, Prepared
from dcr_store.store import Store


@dataclass(frozen=True, slots=True)
class Job:
    """What a receiver is started with.

    Attributes
    ----------
    store : str
        URL.
    group, name : str
        Where it is a member.
    scratch : str
        Directory for its checkpoint and its rollouts.
    strike : str or None
        The version in which it kills itself.
    recipe : dict
    """

    store: str
    group: str
    name: str
    scratch: str
    strike: str | None
    recipe: dict[str, Any]

    def to_json(self) -> str:
        """Return the JSON form."""
        return json.dumps(asdict(self))


class Worker:
    """The hooks of a receiver's loop."""

    def __init__(
        self, parent: child.Parent, store: Store, receiver: Receiver, scratch: Path, recipe: Recipe, strike: Strike
    ) -> None:
        self._parent, self._store, self._receiver = parent, store, receiver
        self._scratch, self._recipe, self._strike = scratch, recipe, strike
        self._applied: Applied | None = None

    def on_applying(self, prepared: Prepared) -> None:
        """If the strike is for this version, let it come in the middle."""
        if prepared.version == self._strike.version:
            n_chunks = -(-self._store.show(prepared.version).info.elements // self._store.chunk_elements)
            self._strike.arm(max(1, n_chunks // 2))

    def on_applied(self, applied: Applied) -> None:
        """Remember it."""
        self._applied = applied

    def on_serving(self, active: Active) -> None:
        """Load the version, tell what is in it, sample what is asked for."""
        # All processes of a Linux machine have this clock in common.
        served_at_s, applied = time.monotonic(), self._applied
        assert applied is not None
        directory = self._scratch / "policy"
        model = policy.load(directory)
        self._parent.tell(
            **active.to_json(),
            served_at_s=served_at_s,
            applied=applied.to_json(),
            fingerprint=policy.fingerprint(model, directory),
        )
        number = version_number(active.version)
        paths = {}
        for share in self._parent.asked()["shares"]:
            rollouts = roll_out(model, self._recipe, number, share)
            stamp = self._receiver.active()
            assert stamp is not None
            paths[share] = str(self._scratch / f"rollouts-{number}-{share}.npz")
            rollouts.save(Path(paths[share]), stamp.version, stamp.root)
        self._parent.tell(rollouts=paths)


def work(parent: child.Parent, arguments: list[str]) -> None:
    """Follow the group until the trainer is gone."""
    job = Job(**json.loads(arguments[0]))
    recipe, scratch = Recipe(**job.recipe), Path(job.scratch)
    with ExitStack() as stack:
        store = stack.enter_context(dcr_store.open(job.store))
        policy.prepare()
        strike = Strike(job.strike or "", lambda n_written: parent.tell(struck=n_written))
        stack.enter_context(events.listening(strike))
        receiver = stack.enter_context(store.receiver(scratch / "policy", group=job.group, name=job.name))
        worker = Worker(parent, store, receiver, scratch, recipe, strike)
        receiver.follow(on_applying=worker.on_applying, on_applied=worker.on_applied, on_serving=worker.on_serving)


if __name__ == "__main__":
    child.run(work)
