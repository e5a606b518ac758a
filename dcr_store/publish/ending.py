"""How transactions end, of a sole writer or of one of several: by leaving a block, by an abort, in a forked process.

What each kind of transaction does to commit, and whom it lets abort, is its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from dcr_store.errors import DcrError, FencedError, InvalidInputError, OutcomeUnknownError
from dcr_store.format.records import Abort
from dcr_store.log.fold import LineState
from dcr_store.log.line import LineLog, next_fields


def abort_record(state: LineState, txid: str, reason: str) -> Abort:
    """Return the record that ends a transaction without a version, next in its log."""
    return Abort(
        **next_fields(state),
        txid=txid,
        reason=reason,
    )


class Ending:
    """What transactions share. As a context manager it commits, unless something was decided; an exception aborts."""

    line: str
    txid: str
    attempt: int
    version: str
    _log: LineLog

    def __init__(self) -> None:
        self._state = "open"
        self._pid = os.getpid()
        self._spoiled: str | None = None  # why what was written is not whole
        self._closed = False

    @property
    def _has_proposed(self) -> bool:
        """Whether a commit was tried: its record may be there."""
        raise NotImplementedError

    @property
    def _is_undecided(self) -> bool:
        return self._state == "open"

    def _require_ours(self, state: LineState) -> None:
        """Raise ``FencedError`` unless the transaction is open, and its attempt is this one."""
        pending = state.open
        if pending is None or (pending.txid, pending.attempt) != (self.txid, self.attempt):
            raise FencedError(
                f"the transaction for {self.version} was taken over or aborted; nothing was committed{self._why()}; "
                "look at the log, then begin again",
                key=self.txid,
                expected=f"attempt {self.attempt} open",
                found="no open transaction" if pending is None else f"{pending.txid} attempt {pending.attempt}",
            )

    def _why(self) -> str:
        """Return what the log says of the transaction's end, for an error that is raised anyway."""
        return ""

    def _require_abortable(self, state: LineState) -> None:
        """Raise ``FencedError`` where it is not this one's to abort."""
        self._require_ours(state)

    def _commit_at_exit(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Let no commit follow what fails inside: part of it may have been taken, part not."""
        try:
            yield
        except BaseException as error:
            self._spoiled = f"{type(error).__name__}: {error}"[:300]
            raise

    def _abort(self, reason: str) -> None:
        """End the transaction without a version. Does nothing if it has ended already."""
        self._require_own_process()
        if not self._is_undecided:
            self._close()
            return

        def decide(state: LineState) -> Abort:
            self._require_abortable(state)
            return abort_record(state, self.txid, reason)

        try:
            self._log.append(decide)
            self._state = "aborted"
        except FencedError:
            self._state = "fenced"
        finally:
            self._close()

    def _require_own_process(self) -> None:
        """Refuse to go on in a forked process: it lacks the threads, and the transaction is its parent's."""
        if os.getpid() != self._pid:
            raise InvalidInputError(
                f"the transaction for {self.version} is that of the process that forked this one; begin another one",
                key=self.txid,
                expected=f"process {self._pid}",
                found=f"process {os.getpid()}",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, OutcomeUnknownError) and self._has_proposed:
            self._close()
        elif error is not None:
            self._give_up(error)
        elif self._is_undecided:
            try:
                self._commit_at_exit()
            except OutcomeUnknownError:
                self._close()
                raise
            except BaseException as failure:
                self._give_up(failure)
                raise

    def _reason(self, error: BaseException) -> str:
        return f"{type(error).__name__}: {error}"

    def _give_up(self, error: BaseException) -> None:
        try:
            self._abort(self._reason(error)[:500])
        except DcrError as second:
            error.add_note(f"the transaction could not be aborted either: {second}")
