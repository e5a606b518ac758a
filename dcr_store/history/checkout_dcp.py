"""Write a version as a torch distributed checkpoint (DCP). Tied names become tensors of their own there."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from dcr_store import events
from dcr_store.errors import NotFoundError
from dcr_store.history.read import read
from dcr_store.history.written import Written
from dcr_store.layout.dtypes import width
from dcr_store.layout.layout import Layout
from dcr_store.targets.dcp_directory import write_dcp
from dcr_store.targets.paths import local_path
from dcr_store.versions.catalog import Catalog, Located

_TOGETHER_NBYTES: Final = 256 << 20


def checkout_dcp(
    catalog: Catalog, located: Located, directory: str | os.PathLike[str], *, force: bool = False
) -> Written:
    """Write a version into a directory, as ``torch.distributed.checkpoint`` loads it.

    Parameters
    ----------
    directory : path
        New or empty.
    force : bool
        Also where a distributed checkpoint is, which is replaced.

    Notes
    -----
    At most 256 MiB of small tensors, or one that is larger, are in memory at a time.
    """
    start = time.monotonic()
    layout = catalog.layout(located.row.layout)
    names = layout.names()
    tensors = {name: (layout.entry(name).dtype, layout.entry(name).shape) for name in names}
    reader = _Reader(catalog, located, layout, names)
    nbytes = write_dcp(local_path(directory, "directory"), tensors, reader.take, force=force)
    return Written(located.name, located.row.root, len(names), nbytes, time.monotonic() - start)


class _Reader:
    """Reads tensors one by one, those that follow each other together."""

    def __init__(self, catalog: Catalog, located: Located, layout: Layout, names: list[str]) -> None:
        self._catalog, self._located, self._layout, self._names = catalog, located, layout, names
        self._place = {name: place for place, name in enumerate(names)}
        self._read: dict[str, Any] = {}
        self._n_taken = 0

    def take(self, name: str) -> Any:
        """Return a tensor, once."""
        if name not in self._place:
            raise NotFoundError("there is no such tensor", key=name)
        if name not in self._read:
            self._read.clear()
            chosen: list[str] = []
            nbytes = 0
            for further in self._names[self._place[name] :]:
                nbytes += self._nbytes(further)
                if chosen and nbytes > _TOGETHER_NBYTES:
                    break
                chosen.append(further)
            self._read = read(self._catalog, self._located, chosen, "torch")
        self._n_taken += 1
        events.progress(f"checkout {self._located.name}", self._n_taken, len(self._names))
        return self._read.pop(name)

    def _nbytes(self, name: str) -> int:
        entry = self._layout.entry(name)
        return entry.n_elements * width(entry.space)
