"""What the policy learns: to go on counting. ``03 10 17 `` continues with ``24 31 38 45 ``, modulo 100. Pure.

Tokens are characters. An answer can be checked without a model of what is good: a term is right or wrong.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

START: Final = "<s>"
VOCABULARY: Final = (START, *"0123456789", " ")
PROMPT_TERMS: Final = 3
ANSWER_TERMS: Final = 4
TERM_TOKENS: Final = 3
PROMPT_TOKENS: Final = 1 + PROMPT_TERMS * TERM_TOKENS
ANSWER_TOKENS: Final = ANSWER_TERMS * TERM_TOKENS

_LARGEST_STEP: Final = 9


def make_problems(rng: np.random.Generator, n: int) -> Ints:
    """Return `n` token sequences, prompt and right answer: int64 of shape (n, PROMPT_TOKENS + ANSWER_TOKENS)."""
    first = rng.integers(0, 100, (n, 1))
    step = rng.integers(1, _LARGEST_STEP + 1, (n, 1))
    terms = (first + step * np.arange(PROMPT_TERMS + ANSWER_TERMS)) % 100
    digit, space = VOCABULARY.index("0"), VOCABULARY.index(" ")
    tokens = np.stack([digit + terms // 10, digit + terms % 10, np.full_like(terms, space)], axis=-1)
    start = np.full((n, 1), VOCABULARY.index(START))
    return np.concatenate([start, tokens.reshape(n, -1)], axis=1)


def score(answers: Ints, right: Ints) -> NDArray[np.float32]:
    """Return 1 for each right term and 0 for each wrong one.

    Parameters
    ----------
    answers, right : ndarray of int64, shape (n, ANSWER_TOKENS)

    Returns
    -------
    ndarray of float32, shape (n, ANSWER_TERMS)
    """
    same = (answers == right).reshape(len(answers), ANSWER_TERMS, TERM_TOKENS)
    scores: NDArray[np.float32] = same.all(axis=-1).astype(np.float32)
    return scores
