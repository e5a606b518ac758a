"""When to try again, for how long, and what a put-if-absent without an answer means. The one place for all backends.

A backend translates what another try may cure to ``TransientError`` and everything else to the errors of
``dcr_store.errors``; it makes one try a call and leaves the rest to ``retrying`` and ``resolving``. Refuses to guess:
where the deadline passes before the outcome of a conditional put is known, that is an ``OutcomeUnknownError``, never
"lost" and never "done".
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dcr_store.errors import IntegrityError, NotFoundError, OutcomeUnknownError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long an operation goes on after its first failure, and how it waits between tries.

    Attributes
    ----------
    deadline_s : float
        Seconds after the first failure in which new tries are begun.
    unreachable_s : float
        The same where no connection came about at all, so that a wrong address is reported soon.
    first_delay_s, longest_delay_s : float
        The wait before the second try, and the wait that doubling ends at. Each wait is drawn between half of its
        length and the whole, so that clients which failed together do not come back together.
    """

    deadline_s: float = 60.0
    unreachable_s: float = 10.0
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0


class TransientError(Exception):
    """One try failed, and another may not.

    Parameters
    ----------
    message : str
        What happened, for the error that is raised in the end.
    sent : bool
        Whether the request may have reached the backend, so that a write may have taken effect or still may.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


def is_transient(error: StorageError) -> bool:
    """Return whether `error` ended a series of tries of which the next might have succeeded."""
    return isinstance(error.__cause__, TransientError)


class Backoff:
    """The waits of one operation. Not shared between threads.

    Parameters
    ----------
    policy : RetryPolicy
        Limits and waits.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failed_at: float | None = None
        self._delay_s = policy.first_delay_s
        self.n_tries = 0

    def wait(self, *, unreachable: bool = False) -> bool:
        """Note a failure and sleep before the next try; return False, at once, if there is no time for one."""
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
        self.n_tries += 1
        delay_s = self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, self._policy.longest_delay_s)
        limit_s = min(self._policy.unreachable_s, self._policy.deadline_s) if unreachable else self._policy.deadline_s
        if now + delay_s - self._failed_at > limit_s:
            return False
        time.sleep(delay_s)
        return True


def retrying(policy: RetryPolicy, action: str, key: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` until it returns, while it raises ``TransientError`` and the policy allows.

    Parameters
    ----------
    policy : RetryPolicy
        Limits and waits.
    action, key : str
        What is done to which object, for the error.
    attempt : callable
        One try. Must be idempotent.

    Raises
    ------
    StorageError
        The tries are used up. Any other error of `attempt` passes through at once.
    """
    backoff = Backoff(policy)
    while True:
        try:
            return attempt()
        except TransientError as error:
            if not backoff.wait(unreachable=not error.sent):
                raise StorageError(f"cannot {action}: {error} (tries: {backoff.n_tries})", key=key) from error


def resolving(
    policy: RetryPolicy, key: str, data: bytes | memoryview, create: Callable[[], bool], read: Callable[[], bytes]
) -> bool:
    """Run a put-if-absent until its outcome is known (docs/spec/v1.md, section 1).

    Success is success. Occupied: read back; equal bytes mean that an earlier try of this call took effect, others a
    lost race. Everything else is unknown: the identical bytes are put again until the key is occupied, then compared. A
    read-back that finds nothing proves nothing, since the earlier put may still land.

    Parameters
    ----------
    policy : RetryPolicy
        Limits and waits.
    key : str
        The object, for errors.
    data : bytes or memoryview
        What `create` puts.
    create : callable
        One try: True if it created the object, False if the key was occupied.
    read : callable
        One try to read the whole object.

    Returns
    -------
    bool
        True if the key holds `data`, False if it holds something else.

    Raises
    ------
    OutcomeUnknownError
        The deadline passed after a try that may have taken effect.
    StorageError, IntegrityError
        No try can have taken effect, and the backend is unreachable or refuses.
    """
    backoff = Backoff(policy)
    unknown = False
    while True:
        try:
            if create():
                return True
            unknown = True  # what is there may be an earlier try of this call, until it is read
            return read() == data
        except NotFoundError as error:
            last: Exception = error
        except TransientError as error:
            unknown |= error.sent
            last = error
        except (StorageError, IntegrityError) as error:
            if not unknown:
                raise
            last = error
        unreachable = isinstance(last, TransientError) and not last.sent
        if not backoff.wait(unreachable=unreachable and not unknown):
            if not unknown:
                raise StorageError(f"cannot create: {last} (tries: {backoff.n_tries})", key=key) from last
            raise OutcomeUnknownError(
                f"whether the object was created is not known after {backoff.n_tries} tries, the last one: {last}; "
                "read it back before anything else is written",
                key=key,
            ) from last
