"""What an error says of itself: its facts where it has them, and no None."""

from __future__ import annotations

import pickle

from dcr_store.errors import ConflictError, DcrError


def test_sides_that_are_not_there_are_not_told() -> None:
    assert str(DcrError("is wrong", key="k")) == "k: is wrong"
    assert str(DcrError("is wrong", key="k", expected=1)) == "k: is wrong (expected 1)"
    assert str(DcrError("is wrong", key="k", found=0)) == "k: is wrong (found 0)"
    assert str(DcrError("is wrong", expected="", found=False)) == "is wrong (expected , found False)"


def test_advice_stands_behind_the_message_and_may_be_replaced() -> None:
    error = ConflictError("is wrong", key="k", expected=1, found=2, advice="call again")
    assert str(error) == "k: is wrong; call again (expected 1, found 2)"
    error.advice = "run it again"
    assert str(pickle.loads(pickle.dumps(error))) == "k: is wrong; run it again (expected 1, found 2)"
