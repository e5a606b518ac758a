"""The numbers of the demonstration, in one value that travels to the follower."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What model, how it is warmed up, how it learns. The same recipe gives the same bits on the same machine.

    Attributes
    ----------
    n_threads : int
        Threads of each process; trainer and follower take turns. Sums depend on it, so it does not follow the machine.
    warm_up_reward : float
        Supervised learning ends when a term comes out right with this chance, given right ones before it, or after
        `warm_up_steps`; so something is left to learn.
    n_prompts, n_samples : int
        Prompts, the same in every step, and answers sampled for each of them.
    learning_rate : float
        Of the policy gradient; constant. With weights of this size it changes 2 to 3 % of them per step in BF16.
    """

    seed: int = 0
    n_threads: int = 2
    n_layers: int = 3
    hidden: int = 256
    intermediate: int = 704
    n_heads: int = 8
    n_kv_heads: int = 4
    initial_std: float = 0.1
    warm_up_steps: int = 150
    warm_up_batch: int = 64
    warm_up_learning_rate: float = 1e-3
    warm_up_reward: float = 0.65
    n_prompts: int = 16
    n_samples: int = 24
    learning_rate: float = 6e-6

    def to_json(self) -> str:
        """Return the JSON form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Return the recipe that ``to_json`` wrote."""
        return cls(**json.loads(text))
