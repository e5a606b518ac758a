"""The rollout worker, a process of its own: pull each version in place, load it as an engine would, sample from it.

Knows the store, a scratch directory and the recipe, never the trainer. Writes one JSON line for each version to its
standard output and ends when its standard input does, so that it cannot outlive the trainer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

import dcr_store
from dcr_store.demo import policy
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.task import ANSWER_TOKENS, PROMPT_TOKENS, make_problems, score
from dcr_store.errors import DcrError

LINE: Final = "main"
_POLL_S: Final = 0.1


def follow(store_url: str, scratch: Path, numbers: range, recipe: Recipe, out: TextIO) -> None:
    """Pull, check and sample the versions with these numbers, each as soon as it is there."""
    problems = make_problems(np.random.default_rng([recipe.seed, 1]), recipe.n_prompts)
    directory = scratch / "policy"
    with dcr_store.open(store_url) as store:
        policy.prepare(recipe)
        for number in numbers:
            while len(store.log(LINE)) <= number:
                time.sleep(_POLL_S)
            version = f"{LINE}@{number}"
            pulled = store.pull(directory, version)
            model = policy.load(directory)
            rollouts = scratch / f"rollouts-{number}.npz"
            reward = roll_out(model, problems, recipe, number, rollouts)
            report = {
                "version": version,
                "pull_s": pulled.seconds,
                "nbytes_fetched": pulled.nbytes_fetched,
                "fingerprint": policy.fingerprint(model, directory),
                "rollouts": str(rollouts),
                "reward": reward,
            }
            print(json.dumps(report), file=out, flush=True)


def roll_out(model: policy.Model, problems: Any, recipe: Recipe, number: int, path: Path) -> float:
    """Sample answers to all prompts, store them with their scores, and return the mean score."""
    repeated = problems.repeat(recipe.n_samples, axis=0)
    prompts, right = repeated[:, :PROMPT_TOKENS], repeated[:, PROMPT_TOKENS:]
    answers = policy.sample(model, prompts, ANSWER_TOKENS, recipe.seed * 1_000_003 + number)
    rewards = score(answers, right)
    groups = (recipe.n_prompts, recipe.n_samples, -1)
    tokens = np.concatenate([prompts, answers], axis=1)
    np.savez(path, tokens=tokens.reshape(groups), rewards=rewards.reshape(groups))
    return float(rewards.mean())


def main(argv: list[str]) -> int:
    """Run as ``python -m dcr_store.demo.follower STORE SCRATCH FIRST LAST RECIPE``."""
    store_url, scratch, first, last, recipe = argv
    # Results alone go to the pipe; whatever a library prints goes where the errors go.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    try:
        follow(store_url, Path(scratch), range(int(first), int(last) + 1), Recipe.from_json(recipe), out)
    except DcrError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        return 1
    return 0


def _end_with_trainer() -> None:
    # Not through sys.stdin: its lock, held by a waiting thread, would abort an interpreter that shuts down.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
