"""The numbers of the demonstration, in one value that travels to the receivers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What model, how it is warmed up, how it learns. The same recipe gives the same bits on the same machine.

    Attributes
    ----------
    chunk_elements : int
        Of a new store. Small, so that a version of this size has chunks enough to be killed between them.
    warm_up_reward : float
        Supervised learning ends when a term comes out right with this chance, given right ones before it, or after
        `warm_up_steps`; so something is left to learn.
    n_prompts, n_samples : int
        Prompts, the same in every step, and answers sampled for each of them.
    learning_rate : float
        Of the policy gradient; constant. With weights of this size it changes 2 to 5 % of them per step in BF16.
    """

    seed: int = 0
    chunk_elements: int = 1 << 16
    n_layers: int = 3
    hidden: int = 192
    intermediate: int = 512
    n_heads: int = 6
    n_kv_heads: int = 3
    initial_std: float = 0.1
    warm_up_steps: int = 150
    warm_up_batch: int = 32
    warm_up_learning_rate: float = 2e-3
    warm_up_reward: float = 0.65
    n_prompts: int = 16
    n_samples: int = 20
    learning_rate: float = 6e-6
