"""The reference run: the same training without a store. Each step saves a full checkpoint and loads it to sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcr_store.demo import policy
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.sampling import N_SHARES, Rollouts, join, roll_out
from dcr_store.demo.training import Trainer


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a training curve.

    Attributes
    ----------
    reward : float
        Of the samples of this policy.
    loss : float or None
        Of the step that made it; None where no step did.
    fingerprint : dict
        Of its files and tensors; see ``policy.fingerprint``.
    """

    reward: float
    loss: float | None
    fingerprint: dict[str, str]


class Reference:
    """A run from a checkpoint on.

    Parameters
    ----------
    initial : path
        The checkpoint; is left as it is.
    directory : path
        Where checkpoints are saved.
    recipe : Recipe
    """

    def __init__(self, initial: Path, directory: Path, recipe: Recipe) -> None:
        self._checkpoint, self._directory, self._recipe = initial, directory, recipe
        self._trainer = Trainer(policy.load(initial), recipe)
        self._loss: float | None = None
        self._rollouts: Rollouts | None = None

    def measure(self, number: int) -> Point:
        """Load the checkpoint, whole, and sample from it; `number` seeds that as a version's does."""
        model = policy.load(self._checkpoint)
        self._rollouts = join(roll_out(model, self._recipe, number, share) for share in range(N_SHARES))
        return Point(self._rollouts.reward, self._loss, policy.fingerprint(model, self._checkpoint))

    def learn(self) -> None:
        """Make the step from the samples measured last, and save the checkpoint."""
        assert self._rollouts is not None
        self._loss = self._trainer.learn(self._rollouts.tokens, self._rollouts.rewards)
        policy.save(self._trainer.model, self._directory)
        self._checkpoint = self._directory
