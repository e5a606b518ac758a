"""Rollouts: answers that a policy samples, and their scores. The prompts are dealt out in shares.

What a share holds depends on the policy's bits, the version's number and the share, not on who samples it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.demo import policy
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.task import ANSWER_TOKENS, PROMPT_TOKENS, Ints, make_problems, score

N_SHARES: Final = 2


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Sampled answers.

    Attributes
    ----------
    tokens : ndarray of int64, shape (prompts, samples, PROMPT_TOKENS + ANSWER_TOKENS)
    rewards : ndarray of float32, shape (prompts, samples, ANSWER_TERMS)
    """

    tokens: Ints
    rewards: NDArray[np.float32]

    @property
    def reward(self) -> float:
        """The share of right terms."""
        return float(self.rewards.mean(dtype=np.float64))

    def save(self, path: Path, version: str, root: str) -> None:
        """Write them, stamped with the version that gave them."""
        np.savez(path, tokens=self.tokens, rewards=self.rewards, version=version, root=root)


def load(path: Path) -> tuple[Rollouts, tuple[str, str]]:
    """Return what ``save`` wrote: rollouts, and the version and root that they are stamped with."""
    with np.load(path) as stored:
        return Rollouts(stored["tokens"], stored["rewards"]), (str(stored["version"]), str(stored["root"]))


def join(shares: Iterable[Rollouts]) -> Rollouts:
    """Return all shares, in this order, as one."""
    every = list(shares)
    return Rollouts(
        np.concatenate([share.tokens for share in every]), np.concatenate([share.rewards for share in every])
    )


def roll_out(model: policy.Model, recipe: Recipe, number: int, share: int) -> Rollouts:
    """Sample answers to the prompts of one share.

    Parameters
    ----------
    number : int
        Of the version; seeds, with the share, what is sampled.
    share : int
        Below N_SHARES.
    """
    problems = make_problems(np.random.default_rng([recipe.seed, 1]), recipe.n_prompts)
    own = np.array_split(problems, N_SHARES)[share]
    repeated = own.repeat(recipe.n_samples, axis=0)
    prompts, right = repeated[:, :PROMPT_TOKENS], repeated[:, PROMPT_TOKENS:]
    seed = int(np.random.SeedSequence([recipe.seed, number, share]).generate_state(1)[0])
    answers = policy.sample(model, prompts, ANSWER_TOKENS, seed)
    groups = (len(own), recipe.n_samples, -1)
    tokens = np.concatenate([prompts, answers], axis=1)
    return Rollouts(tokens.reshape(groups), score(answers, right).reshape(groups))
