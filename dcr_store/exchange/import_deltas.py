"""Move a series of delta directories (slime, miles, SGLang) into a line: each becomes a version, one after the other.

A delta is applied to a checkpoint of its base in a temporary directory and every changed tensor compared with its
checksum; only then is it published. Interrupted, the same call goes on after the newest version of the line. Refuses a
delta whose base is missing, or has other bits in a tensor that it changes; those that no delta changes are compared
with nothing, because the series says nothing of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dcr_store import events
from dcr_store.errors import ConflictError, FormatError, InvalidInputError, NotFoundError
from dcr_store.exchange.delta_directory import Delta, Octets, check, directory_name, list_series, patch, read_delta
from dcr_store.format.paths import OWN_DIRECTORY
from dcr_store.objects.transfer import map_bounded
from dcr_store.receive import copy_building
from dcr_store.receive.pull import pull
from dcr_store.targets.dcp import open_source
from dcr_store.targets.paths import local_path
from dcr_store.targets.safetensors_file import FileTensor, read_header
from dcr_store.versions.catalog import Catalog, Located

if TYPE_CHECKING:
    from dcr_store.publish.transaction import Transaction

METADATA: Final = "imported"
"""Under which a version says which one of the series it is."""
_N_PARALLEL: Final = 4


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import published.

    Attributes
    ----------
    versions : tuple of (str, str)
        ``line@number``, and the directory of the series, or the base checkpoint.
    """

    line: str
    versions: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"line": self.line, "versions": [{"version": name, "from": place} for name, place in self.versions]}


def import_deltas(
    catalog: Catalog,
    begin: Callable[..., Transaction],
    directory: str | os.PathLike[str],
    line: str,
    *,
    base: str | os.PathLike[str] | None = None,
    at: int | None = None,
) -> Imported:
    """Publish what a series has beyond the newest version of a line.

    Parameters
    ----------
    begin : callable
        ``Store.begin``.
    base : path, optional
        The checkpoint on which the first delta builds: of a line that has no version yet, or that an import began
        with it.
    at : int, optional
        Which version of the series the newest version of the line is, where the line was not imported.

    Raises
    ------
    InvalidInputError
        If the base is missing, or given for a line that begins with something else.
    FormatError, IntegrityError
        If a directory is none of a series, a blob is damaged, or builds on another base, as far as the
        tensors that it changes tell; names file and tensor.
    """
    root = local_path(directory, "directory")
    series = list_series(root)
    if not series:
        raise InvalidInputError(
            "holds no series", key=str(root), expected="directories like weight_v000001", found="none"
        )
    publisher = _Publisher(begin, line)
    current = _current(catalog, line, at)
    if current is None:
        current = _begin_line(publisher, series, base)
    elif base is not None:
        _check_begun(catalog, line, local_path(base, "base"))
    with tempfile.TemporaryDirectory(prefix="dcr-import-") as scratch:
        work = Path(scratch) / "checkpoint"
        for version, place in series.items():
            if version > current:
                _import(catalog, publisher, version, place, current, work)
                current = version
    return Imported(line, tuple(publisher.done))


class _Publisher:
    """Publishes on a line, and keeps what it published, as of ``Imported``."""

    def __init__(self, begin: Callable[..., Transaction], line: str) -> None:
        self._begin, self.line = begin, line
        self.done: list[tuple[str, str]] = []

    def publish(self, place: Path, version: int, found: str) -> None:
        """Publish a checkpoint as a version of the series, which was found in a directory of that name."""
        metadata = {METADATA: {"version": version, "directory": found}}
        with self._begin(self.line, metadata=metadata, message=f"imported from {found}") as transaction:
            transaction.write_checkpoint(place)
            self.done.append((transaction.commit().version, found))


def _begin_line(publisher: _Publisher, series: Mapping[int, Path], base: str | os.PathLike[str] | None) -> int:
    """Publish the base, if there is one; return which version of the series the line is at then."""
    first = next(iter(series))
    delta = read_delta(series[first])
    if delta is not None and base is None:
        raise InvalidInputError(
            "the series begins with a delta; give the checkpoint on which it builds",
            key=str(series[first]),
            expected=f"the checkpoint of version {delta.base_version}",
            found="no base",
        )
    current = first - 1 if delta is None else delta.base_version
    if base is not None:
        place = local_path(base, "base")
        if delta is not None:
            _prove(delta, place)
        publisher.publish(place, current, str(base))
    return current


def _prove(delta: Delta, base: Path) -> None:
    """Apply a delta to copies of a checkpoint's tensors: a wrong base is to be no version."""
    with open_source(base) as checkpoint:

        def copy(name: str) -> Octets:
            return checkpoint.bits(name).view(np.uint8).copy()

        sizes = {name: tensor.end - tensor.begin for name, (_, tensor) in checkpoint.tensors.items()}
        _apply(delta, sizes, copy, f"check {delta.place.name}")


def _import(catalog: Catalog, publisher: _Publisher, version: int, place: Path, current: int, work: Path) -> None:
    """Publish the next one of a series; `work` holds the checkpoint of the `current` one, or nothing yet."""
    delta = read_delta(place)
    if delta is None:
        publisher.publish(place, version, place.name)
        shutil.rmtree(work, ignore_errors=True)
        return
    if delta.base_version != current:
        raise InvalidInputError(
            "the delta builds on a version that is not there; what was imported so far stays",
            key=str(place),
            expected=f"base_version {directory_name(max(current, 0))[8:]}",
            found=f"{delta.base_version:06d}",
        )
    if not work.exists():
        _check_out(catalog, publisher.line, work)
    _apply_in_place(delta, work)
    publisher.publish(work, version, place.name)


def _current(catalog: Catalog, line: str, at: int | None) -> int | None:
    """Return which version of the series the newest one of a line is; None if the line has none."""
    head = catalog.log(line).refresh().head
    if head is None:
        if at is not None:
            raise InvalidInputError(
                "the line has no version yet that could be of the series", key=line, found=f"at {at}"
            )
        return None
    metadata = catalog.complete(Located(line, head)).row.metadata or {}
    told = metadata.get(METADATA)
    known = told.get("version") if isinstance(told, dict) else None
    if at is None and not isinstance(known, int):
        raise InvalidInputError(
            "the newest version of the line was not imported; say which version of the series it is, or import into "
            "another line",
            key=f"{line}@{head.version}",
        )
    if at is not None and isinstance(known, int) and known != at:
        raise ConflictError(
            "the newest version of the line was imported as another one of the series",
            key=f"{line}@{head.version}",
            expected=at,
            found=known,
        )
    return at if at is not None else known


def _check_begun(catalog: Catalog, line: str, base: Path) -> None:
    """Refuse a base of a line that has versions, unless an import began it with this one, as told by its bits."""
    if not base.is_dir():
        raise NotFoundError("there is no such base", key=str(base))
    first = catalog.complete(Located(line, catalog.rows(line)[0]))
    is_imported = not catalog.is_expired(first) and METADATA in (first.row.metadata or {})
    if is_imported and copy_building.is_version(catalog, first, base):
        return
    raise InvalidInputError(
        "the line has versions, which do not begin with this base: leave the base out, and the series goes on after "
        "the newest one, or import into another line",
        key=line,
        expected=f"{first.name} {first.row.root[:16]}",
        found=str(base),
    )


def _check_out(catalog: Catalog, line: str, work: Path) -> None:
    head = catalog.fresh(line).state.head
    assert head is not None
    pull(catalog, Located(line, head), work)
    shutil.rmtree(work / OWN_DIRECTORY)  # what it says will not be so any more


def _apply_in_place(delta: Delta, work: Path) -> None:
    """Apply a delta to a checkpoint, and prove every tensor that it changes."""
    places = {
        tensor.name: (path, tensor)
        for path in sorted(work.glob("*.safetensors"))
        for tensor in read_header(path).tensors
    }

    def mapped(name: str) -> Octets:
        path, tensor = places[name]
        return np.memmap(path, np.uint8, "r+", tensor.begin, (sizes[name],)) if sizes[name] else np.zeros(0, np.uint8)

    sizes = {name: tensor.end - tensor.begin for name, (_, tensor) in places.items()}
    _apply(delta, sizes, mapped, f"import {delta.place.name}")


def _apply(delta: Delta, sizes: Mapping[str, int], region_of: Callable[[str], Octets], task: str) -> None:
    """Apply a delta to the bytes of tensors, and prove each of them.

    Parameters
    ----------
    sizes : mapping of str to int
        In bytes, of all tensors that there are.
    region_of : callable
        Returns the bytes of a tensor, to be changed in place.
    """
    for path, blob, _ in delta.blobs:
        if blob.name not in sizes:
            raise FormatError(
                "changes a tensor that its base does not have", key=f"{path}#{blob.name}", expected="one of the base's"
            )

    def apply(item: tuple[Path, FileTensor, str]) -> int:
        path, blob, expected = item
        key = f"{path}#{blob.name}"
        region, frame = region_of(blob.name), memoryview(b"")
        if blob.end > blob.begin:
            frame = np.memmap(path, np.uint8, "r", blob.begin, (blob.end - blob.begin,)).data
        patch(frame, delta.encoding, region, key)
        check(delta.checksum, region, expected, key)
        return len(region)

    done, total = 0, sum(sizes[blob.name] for _, blob, _ in delta.blobs)
    for nbytes in map_bounded(apply, delta.blobs, n_parallel=_N_PARALLEL):
        done += nbytes
        events.progress(task, done, total)
