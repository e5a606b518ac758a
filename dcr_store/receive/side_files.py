"""The side files of a version: fetched and written side by side, each whole or not at all under its name.

Bounded: at most ``TOGETHER_NBYTES`` of files, or one file, are in memory at once, whatever their number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from dcr_store import events
from dcr_store.errors import StorageError
from dcr_store.format.documents import CheckpointFile
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.objects.transfer import map_bounded
from dcr_store.payload.version import fetch
from dcr_store.ports import ObjectStore
from dcr_store.receive import structure
from dcr_store.targets.paths import fsync_directory, path_inside

STAGE: Final = "sides"
TOGETHER_NBYTES: Final = 64 << 20


def write_sides(objects: ObjectStore, root: Path, sides: Sequence[CheckpointFile]) -> int:
    """Bring the side files in a directory up to date, durably; files that are right are not written.

    Returns
    -------
    int
        Bytes fetched.

    Raises
    ------
    IntegrityError
        If a file is missing in the store, or damaged.
    StorageError
        If one cannot be written.
    """
    stage = root / OWN_DIRECTORY / STAGE

    def write(item: tuple[int, CheckpointFile]) -> int:
        index, file = item
        place = path_inside(root, file.path)
        data = fetch(objects, file.ref)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with (stage / str(index)).open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            # A crash just before leaves what was there, just after the new file; its name is durable once synced below.
            (stage / str(index)).replace(place)
        except OSError as error:
            raise StorageError(f"cannot be written: {error.strerror}", key=str(place)) from error
        events.reached("pull.side.stored", str(place))
        return len(data)

    stage.mkdir(exist_ok=True)
    wrong = (file for file in sides if not structure.holds(path_inside(root, file.path), file))
    nbytes = sum(n for batch in _batches(wrong) for n in map_bounded(write, enumerate(batch)))
    # Also those of files that were right: an earlier run may have been killed before it got here.
    for directory in sorted({parent for file in sides for parent in (root / file.path).parents} - {*root.parents}):
        fsync_directory(directory)
    return nbytes


def _batches(sides: Iterable[CheckpointFile]) -> Iterator[list[CheckpointFile]]:
    """Cut files into lists where the files would not fit into memory together."""
    batch: list[CheckpointFile] = []
    nbytes = 0
    for file in sides:
        if batch and nbytes + file.nbytes > TOGETHER_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(file)
        nbytes += file.nbytes
    if batch:
        yield batch
