"""Learning: a supervised warm-up, then a policy gradient from sampled answers.

As in large runs: the policy's weights are BF16, FP32 master weights collect what AdamW adds, and after every step the
policy's weights are the masters, rounded. At a learning rate like this one most roundings give the same bits as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dcr_store.demo.policy import Model
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.task import ANSWER_TERMS, ANSWER_TOKENS, PROMPT_TOKENS, TERM_TOKENS, Ints, make_problems

if TYPE_CHECKING:
    import torch

_RAMP_STEPS = 20
_BETAS = (0.9, 0.95)


def warm_up(model: Model, recipe: Recipe, told: Callable[[float], None]) -> None:
    """Teach a float32 model from right answers until it is right about as often as the recipe says; in place.

    Parameters
    ----------
    told : callable
        Called after each step with the chance that a term comes out right.
    """
    import torch

    rng = np.random.default_rng([recipe.seed, 0])
    optimizer = torch.optim.AdamW(model.parameters(), recipe.warm_up_learning_rate, _BETAS, weight_decay=0.0)
    right = 0.0
    for step in range(recipe.warm_up_steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.warm_up_learning_rate * min(1.0, (step + 1) / _RAMP_STEPS)
        chances = _log_chances(model, make_problems(rng, recipe.warm_up_batch))
        model.zero_grad()
        _differentiate(-chances.mean())
        _step(optimizer)
        terms = chances.detach().reshape(-1, ANSWER_TERMS, TERM_TOKENS).sum(-1).exp()
        right += (float(terms.mean()) - right) / min(5, step + 1)
        told(right)
        if right >= recipe.warm_up_reward:
            return


class Trainer:
    """Moves a model with BF16 weights, in place, by policy gradients.

    Parameters
    ----------
    model : LlamaForCausalLM
        float32, every weight a BF16 number, before each step and after it. The FP32 masters start from these, the
        moments of AdamW from zero.
    """

    def __init__(self, model: Model, recipe: Recipe) -> None:
        import torch

        self.model = model.train()
        self._weights: list[torch.Tensor] = list(model.parameters())
        self._masters = [weight.detach().clone() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, recipe.learning_rate, _BETAS, weight_decay=0.0)

    def learn(self, tokens: Ints, rewards: NDArray[np.float32]) -> float:
        """Make one step from sampled answers: REINFORCE, each term judged against the same term of its group.

        Parameters
        ----------
        tokens : ndarray of int64, shape (prompts, samples, PROMPT_TOKENS + ANSWER_TOKENS)
        rewards : ndarray of float32, shape (prompts, samples, ANSWER_TERMS)

        Returns
        -------
        float
            The loss before the step.
        """
        import torch

        mean, spread = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, keepdims=True)
        advantages = ((rewards - mean) / (spread + 1e-4)).reshape(-1, ANSWER_TERMS).repeat(TERM_TOKENS, axis=1)
        chances = _log_chances(self.model, tokens.reshape(-1, tokens.shape[-1]))
        self.model.zero_grad()
        loss = -(chances * torch.from_numpy(advantages)).mean()
        _differentiate(loss)
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = weight.grad
        _step(self._optimizer)
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master.to(torch.bfloat16))
        return float(loss.detach())


def _log_chances(model: Model, tokens: Ints) -> torch.Tensor:
    """Return the log-probability of each token of the answers: float32, shape (n, ANSWER_TOKENS)."""
    import torch

    whole = torch.from_numpy(tokens)
    logits = model(input_ids=whole[:, :-1], use_cache=False).logits[:, -ANSWER_TOKENS:]
    chosen = whole[:, PROMPT_TOKENS:, None]
    return torch.log_softmax(logits, -1).gather(-1, chosen)[..., 0]


def _differentiate(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _step(optimizer: torch.optim.Optimizer) -> None:
    import torch

    torch.nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 1.0)
    optimizer.step()
