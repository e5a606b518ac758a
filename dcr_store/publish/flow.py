"""Flow control: a publisher that waits for groups, or does not run far ahead of them (docs/spec/v1.md §12).

Refuses groups that do not exist or follow another line, before anything is begun or committed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from dcr_store.errors import InvalidInputError, LagError
from dcr_store.format.names import check_group, version_name
from dcr_store.log.acks import AckReader
from dcr_store.log.group_progress import Progress, read_progress
from dcr_store.publish.waiting import tries
from dcr_store.versions.catalog import Catalog


class Flow:
    """Some groups, as a publisher of a line sees them. Nothing is read before ``require_followers``.

    Raises
    ------
    InvalidInputError
        If `groups` are no names of groups.
    """

    def __init__(self, catalog: Catalog, line: str, groups: Iterable[str]) -> None:
        if isinstance(groups, str) or not isinstance(groups, Iterable):
            raise InvalidInputError("is no list of groups", key="groups", expected="names in a list", found=groups)
        self.line = line
        self.groups = list(dict.fromkeys(map(check_group, groups)))
        self._groups = [(catalog.group_log(group), AckReader(catalog.objects, group)) for group in self.groups]

    def check_max_ahead(self, max_ahead: int | None) -> None:
        """Refuse a distance without groups, groups without a distance, and what is no distance."""
        if (max_ahead is None) == bool(self.groups):
            raise InvalidInputError(
                "max_ahead and ahead_of go together",
                key="max_ahead",
                expected="both or neither",
                found=f"max_ahead {max_ahead}, ahead_of {', '.join(self.groups) or 'no group'}",
            )
        if max_ahead is not None and (isinstance(max_ahead, bool) or not isinstance(max_ahead, int) or max_ahead < 1):
            raise InvalidInputError("is no distance", key="max_ahead", expected="1 or more", found=max_ahead)

    def require_followers(self) -> None:
        """Refuse groups that do not follow the line.

        Raises
        ------
        NotFoundError
            If a group does not exist.
        InvalidInputError
            If a group follows another line.
        """
        for log, _ in self._groups:
            state = log.existing()
            if state.line != self.line:
                raise InvalidInputError(
                    f"{log.name} does not follow the line that is published",
                    key=log.group,
                    expected=self.line,
                    found=state.line,
                )

    def require_near(self, next_version: int, max_ahead: int) -> None:
        """Refuse to begin a version that is more than `max_ahead` after a group's active one.

        Raises
        ------
        LagError
            Names the groups, and what each waits for.
        """
        behind = []
        for progress in self._progress():
            active = progress.state.active
            if next_version - (-1 if active is None else active.number) > max_ahead:
                behind.append(progress)
        if behind:
            raise LagError(
                f"{version_name(self.line, next_version)} would be more than {max_ahead} ahead: "
                f"{_told(behind, next_version - 1)}",
                key=self.line,
                advice="begin again when they have caught up",
            )

    def wait(self, number: int, timeout_s: float | None) -> None:
        """Wait until every group has promoted a version, or one after it.

        Raises
        ------
        LagError
            If that takes longer than `timeout_s`; names the groups, and what each waits for.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        behind: list[Progress] = []
        for _ in tries(deadline):
            behind = [progress for progress in self._progress() if not progress.has_promoted(number)]
            if not behind:
                return
        raise LagError(
            f"{version_name(self.line, number)} is committed, but not promoted everywhere after {timeout_s:g} s"
            f": {_told(behind, number)}",
            key=version_name(self.line, number),
            advice="commit again to go on waiting",
        )

    def _progress(self) -> list[Progress]:
        return [read_progress(log, acks) for log, acks in self._groups]


def _told(behind: list[Progress], newest: int) -> str:
    return "; ".join(
        f"group {item.state.group} is at {'no version' if item.state.active is None else item.state.active.version} "
        f"and waits for {item.waits_for(newest)}"
        for item in behind
    )
