"""A group in the hands of its operator: propose, withdraw, admit, drop, look. What receivers do is in ``member``.

Refuses versions that are not committed on the group's line.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcr_store.errors import InvalidInputError
from dcr_store.format.fields import MAX_COUNT
from dcr_store.format.groups import ADMISSIONS, PROPOSING, Policy, VersionRoot
from dcr_store.format.names import check_line
from dcr_store.receive.status import GroupStatus, group_status
from dcr_store.versions.catalog import Catalog


class Group:
    """A group that exists. Each act returns where the group is after it.

    Raises
    ------
    NotFoundError
        If there is none of this name.
    """

    def __init__(self, catalog: Catalog, name: str) -> None:
        self.name = name
        self._catalog = catalog
        self._log = catalog.group_log(name)
        self.line = self._log.existing().line

    def __repr__(self) -> str:
        return f"<dcr_store.Group {self.name} in {self._catalog.objects.url}>"

    def status(self) -> GroupStatus:
        """Return where the group is."""
        return group_status(self._catalog, self.name)

    def propose(self, version: str | None = None) -> GroupStatus:
        """Propose a version of the line, also an older one; by default the newest.

        Raises
        ------
        ConflictError
            If a proposal stands, or the version is active already.
        NotFoundError
            If there is no such version, or it has expired.
        """
        located = self._catalog.resolve(self.line if version is None else version)
        if located.line != self.line:
            raise InvalidInputError(
                f"group {self.name} follows another line", key=version, expected=self.line, found=located.name
            )
        self._catalog.check_kept(located)
        self._log.propose(VersionRoot(located.name, located.row.root))
        return self.status()

    def withdraw(self, version: str | None = None, reason: str = "withdrawn by hand") -> GroupStatus:
        """Withdraw the proposal that stands, if it is (where given) of this version.

        Raises
        ------
        ConflictError
            If none stands, or another one.
        """
        self._log.withdraw(reason, version=None if version is None else self._catalog.resolve(version).name)
        return self.status()

    def drop(self, name: str, reason: str = "dropped by hand") -> GroupStatus:
        """Drop a member, or wait no more for an expected one. Started again, it may come back.

        Raises
        ------
        ConflictError
            If it is neither.
        """
        self._log.drop(name, reason)
        return self.status()

    def admit(self, name: str) -> GroupStatus:
        """Let a receiver of this name in from now on; nobody waits for it."""
        self._log.admit(name)
        return self.status()


def create_group(
    catalog: Catalog,
    name: str,
    expected: Iterable[str],
    *,
    line: str,
    admission: str,
    proposing: str,
    drop_after_s: int | None,
) -> Group:
    """Create a group; see ``Store.create_group``."""
    check_line(line)
    for key, found, choices in (("admission", admission, ADMISSIONS), ("proposing", proposing, PROPOSING)):
        if found not in choices:
            raise InvalidInputError(f"unknown {key}", key=key, expected=" or ".join(choices), found=found)
    is_seconds = isinstance(drop_after_s, int) and not isinstance(drop_after_s, bool) and 1 <= drop_after_s <= MAX_COUNT
    if drop_after_s is not None and not is_seconds:
        raise InvalidInputError(
            "is no number of seconds", key="drop_after_s", expected="an integer of 1 or more", found=drop_after_s
        )
    if isinstance(expected, str) or not isinstance(expected, Iterable):
        raise InvalidInputError("is no list of names", key="expected", expected="names in a list", found=repr(expected))
    names, log = list(expected), catalog.group_log(name)
    if not names and admission == "expected":
        raise InvalidInputError(
            f"nobody could come into group {name}; give the names of receivers, or admission 'anyone'",
            key="expected",
            expected="a name or more",
            found="none",
        )
    log.create(line, names, Policy(admission, proposing, drop_after_s))
    return Group(catalog, name)
