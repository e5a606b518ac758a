"""What ``resolving`` makes of each answer: an outcome is told only when it is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcr_store.errors import DcrError, IntegrityError, OutcomeUnknownError, StorageError
from dcr_store.objects.retry import RetryPolicy, TransientError, resolving

SHORT = RetryPolicy(deadline_s=0.05, unreachable_s=0.05, first_delay_s=0.001, longest_delay_s=0.01)
LOST = TransientError("no answer", sent=True)


def outcome(*answers: bool | Exception, there: bytes | Exception = b"mine") -> bool:
    """Put where each try is answered by the next of `answers`, and by the last one ever after."""
    left: Iterator[bool | Exception] = iter(answers)
    last = answers[-1]

    def create() -> bool:
        answer = next(left, last)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read() -> bytes:
        if isinstance(there, Exception):
            raise there
        return there

    return resolving(SHORT, "key", b"mine", create, read)


@pytest.mark.parametrize("error", [StorageError, IntegrityError])
def test_what_refuses_while_the_outcome_is_unknown_leaves_it_unknown(error: type[DcrError]) -> None:
    """An upstream that answers wrongly says nothing of what an earlier try did elsewhere."""
    refused = error("answers with other bytes", key="key")
    with pytest.raises(OutcomeUnknownError, match="answers with other bytes"):
        outcome(LOST, refused)
    with pytest.raises(OutcomeUnknownError, match="answers with other bytes"):
        outcome(False, there=refused)
    assert outcome(LOST, refused, True) is True
    assert outcome(LOST, refused, False) is True
    assert outcome(LOST, refused, False, there=b"another's") is False


@pytest.mark.parametrize("error", [StorageError, IntegrityError])
def test_what_refuses_the_first_try_is_told_at_once(error: type[DcrError]) -> None:
    with pytest.raises(error, match="refused"):
        outcome(error("refused", key="key"))
