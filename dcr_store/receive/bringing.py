"""What a receiver keeps at a version, seen as one thing: a *bringer*, which knows what it holds and brings it further.

Refuses targets of kinds that it does not know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.receive.memory_bringer import StateDictBringer
from dcr_store.receive.pull import held, pull
from dcr_store.receive.spool import SPOOL
from dcr_store.targets.paths import local_path
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.prefetch import Fetch
from dcr_store.versions.replay import Outcome


class NoRoomError(StorageError):
    """A disk has not enough room to bring a target further; nothing was brought on the way."""


@runtime_checkable
class Bringer(Protocol):
    """Brings one target, local files or live tensors, from version to version. Used by one thread at a time."""

    @property
    def is_atomic(self) -> bool:
        """Whether the old version is there, and whole, until the new one is, so that it may be served meanwhile."""

    @property
    def spool_directory(self) -> Path | None:
        """Where partitions may be kept beside the target; None if there is no place for them."""

    def held(self, catalog: Catalog) -> Located | None:
        """Return the version that the target surely holds; None if it is empty, torn, or holds something unknown."""

    def ready(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> None:
        """Do ahead what ``bring`` can do without touching the target, or nothing; called again, do it once.

        Raises
        ------
        DcrError
            As ``bring``.
        """

    def bring(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> Outcome:
        """Bring the target to `goal`, from whatever state it is in.

        After a crash at any point the target is old, new, or known to be neither; doing it again ends right.

        Parameters
        ----------
        fetcher : callable or None
            Returns a partition's verified bytes; None reads the store. What it returns counts as fetched.

        Raises
        ------
        NoRoomError
            If that can be tried again at once when there is more room.
        DcrError
            If that fails; a later call may succeed.
        """

    def close(self) -> None:
        """Let go of the target, which stays as it is. May be called twice."""


class DirectoryBringer:
    """Keeps a directory of safetensors files at a version, in place; see ``receive.pull``.

    Parameters
    ----------
    directory : path
        Missing, empty, or with a checkpoint.
    force : bool
        Replace weights that no version of the store has.
    """

    is_atomic = False

    def __init__(self, directory: str | os.PathLike[str], *, force: bool = False) -> None:
        self._directory = local_path(directory, "directory")
        self._force = force

    def __repr__(self) -> str:
        return f"DirectoryBringer({str(self._directory)!r})"

    @property
    def spool_directory(self) -> Path | None:
        """A place in the directory, unless it may turn out to be somebody else's."""
        own = self._directory / OWN_DIRECTORY
        try:
            is_ours = own.is_dir() if self._directory.is_dir() and any(self._directory.iterdir()) else True
        except OSError:
            return None
        return own / SPOOL if is_ours and not own.is_symlink() else None

    def held(self, catalog: Catalog) -> Located | None:
        """Return the version that the directory's marker names, None if it is not clean or of another store."""
        return held(catalog, self._directory)

    def ready(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> None:
        """Do nothing: chunks are read and written one by one."""

    def bring(self, catalog: Catalog, goal: Located, fetcher: Fetch | None) -> Outcome:
        """Bring the directory to `goal`; errors are those of ``pull``."""
        result = pull(catalog, goal, self._directory, force=self._force, fetcher=fetcher)
        return Outcome(result.nbytes_fetched, result.chunks_written, result.chunks_healed)

    def close(self) -> None:
        """Do nothing: the directory is locked only while it is written."""


def bringer_of(target: object) -> Bringer:
    """Return the bringer for a target: a path's directory, live tensors, an engine's loader; a bringer is its own.

    Raises
    ------
    InvalidInputError
        If there is none for this kind of target.
    """
    if isinstance(target, (str, os.PathLike)):
        return DirectoryBringer(target)
    if isinstance(target, Bringer):
        return target
    native = sys.modules.get("dcr_store.targets.native.target")  # who has such a target has imported it, and torch
    if native is not None and isinstance(target, native.NativeLoaderTarget):
        from dcr_store.receive.native_bringer import NativeBringer

        return NativeBringer(target)
    torch_module = sys.modules.get("torch")
    if isinstance(target, Mapping) or (torch_module is not None and isinstance(target, torch_module.nn.Module)):
        return StateDictBringer(target)
    raise InvalidInputError(
        "nothing that can be kept at a version",
        key="target",
        expected="a directory, a mapping of names to tensors, a torch module, or an engine's loader",
        found=type(target).__name__,
    )
