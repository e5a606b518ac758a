"""Discovery that is kept in a directory, and made once for all runs that ask for the same (``layout.discovery``).

What is kept is not believed: it has to be whole, of these slices and this exporter, and hold in a run of the exporter.
Otherwise it counts as missing, and is replaced. Refuses a directory that cannot be used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

from dcr_store import events
from dcr_store.errors import FormatError, InvalidInputError, StorageError
from dcr_store.layout import discovered
from dcr_store.layout import discovery as layout_discovery
from dcr_store.layout.discovery import Discovery, Export, Slices


def discover(
    export: Export,
    slices: Slices | Sequence[Slices],
    *,
    cache: str | os.PathLike[str] | None = None,
    key: str | None = None,
) -> Discovery:
    """Find what an exporter moves, and where to; as ``dcr_store.layout.discovery.discover``, perhaps from a cache.

    Parameters
    ----------
    export : callable
        Takes what `slices` is, of the same shapes and dtypes but other values; returns, or yields, canonical names and
        tensors. Must not keep or change what it is given.
    slices : mapping of str to tensor, or sequence of them
        Those of one rank, or, where the exporter gathers from other ranks, of all. numpy arrays, or torch tensors on
        any device, ``meta`` too: only shapes and dtypes are used. The exporter is given numpy arrays, or torch tensors
        on the CPU.
    cache : path, optional
        A directory, made if it is missing, with a file for each request: what was found for the same names, order,
        dtypes and shapes of slices and the same `key` is read from there, and the exporter is run once, on ordinary
        numbers, to see that it still gives the same tensors and moves the same values. Several processes may use it.
    key : str, optional
        With `cache`: which exporter it is, of which model, in which version. Give another one whenever its code or
        settings change: a single run cannot tell all that the full discovery can.

    Raises
    ------
    InvalidInputError
        If the exporter gives a name twice, no tensors, or other tensors in another run; names the tensor. If `slices`
        or what the exporter gives is something else. If only one of `cache` and `key` is given.
    StorageError
        If the cache cannot be read or written.
    """
    if (cache is None) != (key is None):
        raise InvalidInputError(
            "a cache needs a key that says which exporter it is of, and a key is of use with a cache only",
            key="cache" if cache is None else "key",
        )
    if cache is None or key is None:
        return layout_discovery.discover(export, slices)
    request = discovered.request_of(slices, key)
    path = Path(cache) / f"{request}.json"
    kept = _read(path, export, slices, request)
    if kept is not None:
        return kept
    _make(path.parent)  # before the work, so that who cannot keep it is told at once
    found = layout_discovery.discover(export, slices)
    _write(path, discovered.to_bytes(found, request))
    return found


def _read(path: Path, export: Export, slices: Slices | Sequence[Slices], request: str) -> Discovery | None:
    """Return what is kept, None if there is nothing, or nothing that holds."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"the cache cannot be read: {error.strerror}", key=str(path)) from error
    try:
        found = discovered.from_bytes(data, slices, request, str(path))
    except FormatError as error:
        events.reached("discovery.cache.refused", str(error))
        return None
    difference = layout_discovery.differs(export, slices, found)
    if difference is not None:
        events.reached("discovery.cache.refused", f"{path}: the exporter is another one: {difference}")
        return None
    events.reached("discovery.cache.used", str(path))
    return found


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write")
    except OSError as error:
        raise StorageError(f"the cache cannot be written: {error.strerror}", key=str(directory)) from error


def _write(path: Path, data: bytes) -> None:
    """Put a document in place, whole: of several processes that write the same the last one stays."""
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(data)
                file.flush()
                temporary.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
    except OSError as error:
        raise StorageError(f"the cache cannot be written: {error.strerror}", key=str(path)) from error
