"""Write some tensors of a version, or parts of them, as one safetensors file in a directory of its own.

Fetches no more than the chunks that hold them. Refuses names and indices that do not fit before anything is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from dcr_store import events
from dcr_store.errors import DcrError, InvalidInputError, StorageError
from dcr_store.format import canonical
from dcr_store.history.read import read
from dcr_store.history.written import Written
from dcr_store.layout.dtypes import DTYPES, n_elements
from dcr_store.layout.layout import Layout
from dcr_store.layout.selection import Index, select, text_of
from dcr_store.targets.file_bytes import write_exactly
from dcr_store.targets.new_directory import in_place_of
from dcr_store.targets.paths import fsync_directory, local_path
from dcr_store.targets.safetensors_file import make_header, parse_header, read_header
from dcr_store.versions.catalog import Catalog, Located

FILE: Final = "model.safetensors"
_VERSION: Final = "dcr.version"
_TOGETHER_NBYTES: Final = 256 << 20


def checkout_tensors(
    catalog: Catalog,
    located: Located,
    directory: str | os.PathLike[str],
    tensors: Iterable[str] | Mapping[str, Index | None],
    *,
    force: bool = False,
) -> Written:
    """Write tensors of a version, or parts of them, into a directory, as ``model.safetensors``.

    Parameters
    ----------
    directory : path
        New or empty.
    tensors : iterable of str, or mapping of str to index
        Names, aliases among them, each with the part that is wanted, by NumPy's basic indices; None for all of it.
    force : bool
        Also where such a checkout is, which is replaced.

    Returns
    -------
    Written

    Raises
    ------
    NotFoundError
        If there is no such tensor, or the version has expired.
    InvalidInputError
        If nothing is wanted, an index does not fit, or a safetensors file cannot hold it: complex128, and parts of
        values that are smaller than a byte.
    ConflictError
        If something else is in the directory.
    StorageError
        If it cannot be written.

    Notes
    -----
    The file has each tensor under its name, of the shape that NumPy's index gives; names that the version ties are
    tensors of their own. Its metadata say which version and root they are of, and of parts which, of what shape.
    At most 256 MiB of small tensors, or one that is larger, are in memory at a time.
    """
    start = time.monotonic()
    wanted = dict(tensors) if isinstance(tensors, Mapping) else dict.fromkeys(tensors)
    if not wanted:
        raise InvalidInputError("name the tensors to check out", key="tensors", expected="one at least", found="none")
    layout = catalog.layout(located.row.layout)
    rows = [(name, layout.entry(name).dtype, _shape(layout, name, index)) for name, index in wanted.items()]
    header = make_header(rows, _metadata(catalog, located, layout, wanted))
    nbytes = {name: n_elements(DTYPES[dtype], shape) * DTYPES[dtype].width for name, dtype, shape in rows}
    with in_place_of(local_path(directory, "directory"), "a checkout of tensors", _is_one, force=force) as place:
        _write(place / FILE, header, nbytes, _read(catalog, located, wanted, nbytes))
        fsync_directory(place)
    total = len(header) + sum(nbytes.values())
    return Written(located.name, located.row.root, len(wanted), total, time.monotonic() - start)


def _shape(layout: Layout, name: str, index: Index | None) -> tuple[int, ...]:
    entry = layout.entry(name)
    if index is None:
        return entry.shape
    if DTYPES[entry.dtype].packed:
        raise InvalidInputError(
            f"values of {entry.dtype} are smaller than a byte; check out the whole tensor", key=name
        )
    return select(name, entry.shape, index).shape


def _metadata(catalog: Catalog, located: Located, layout: Layout, wanted: Mapping[str, Index | None]) -> dict[str, str]:
    parts = {
        name: {"index": text_of(index), "shape": list(layout.entry(name).shape)}
        for name, index in wanted.items()
        if index is not None
    }
    told = {
        "format": "pt",
        _VERSION: located.name,
        "dcr.root": located.row.root,
        "dcr.store": catalog.document.store_id,
    }
    return told | ({"dcr.parts": canonical.encode(parts).decode()} if parts else {})


def _read(
    catalog: Catalog, located: Located, wanted: Mapping[str, Index | None], nbytes: Mapping[str, int]
) -> Iterator[tuple[str, Any]]:
    """Yield what is wanted, name by name, small ones read together."""
    batch: dict[str, Index | None] = {}
    batch_nbytes = n_done = 0
    for name, index in wanted.items():
        if batch and batch_nbytes + nbytes[name] > _TOGETHER_NBYTES:
            yield from read(catalog, located, batch).items()
            n_done += len(batch)
            events.progress(f"checkout {located.name}", n_done, len(wanted))
            batch, batch_nbytes = {}, 0
        batch[name] = index
        batch_nbytes += nbytes[name]
    yield from read(catalog, located, batch).items()
    events.progress(f"checkout {located.name}", len(wanted), len(wanted))


def _write(path: Path, header: bytes, nbytes: Mapping[str, int], arrays: Iterable[tuple[str, Any]]) -> None:
    """Write the file, and make it durable."""
    parsed = parse_header(header, len(header) + sum(nbytes.values()), str(path))
    begins = {tensor.name: tensor.begin for tensor in parsed.tensors}
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_exactly(fd, 0, [memoryview(header)], str(path))
            for name, array in arrays:
                octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                write_exactly(fd, begins[name], [octets.data], str(path))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"cannot be written: {error.strerror}", key=str(path)) from error


def _is_one(directory: Path) -> bool:
    """Return whether a directory is a checkout of tensors, and nothing besides."""
    if [path.name for path in directory.iterdir()] != [FILE]:
        return False
    try:
        return _VERSION in read_header(directory / FILE).metadata
    except DcrError:
        return False
