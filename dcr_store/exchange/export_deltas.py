"""Write versions as a series of delta directories, from which receivers of slime, miles and SGLang can be fed.

The first version is written whole, unless the receivers have it; so is one after versions that have expired, and one
whose tensors are others. A directory gets its name when all of it is there; run again, only new versions are written.
Refuses to go on with a series of another store, and a directory to which somebody else is exporting.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from dcr_store import events
from dcr_store.errors import ConflictError, InvalidInputError, StorageError
from dcr_store.exchange.delta_directory import (
    CHECKSUMS,
    ENCODINGS,
    INDEX,
    Octets,
    checksum,
    directory_name,
    hasher,
    index_document,
    list_series,
    make_blob,
)
from dcr_store.exchange.export_lock import only_export
from dcr_store.exchange.folders import Exported, open_directory, versions_between, write_folders
from dcr_store.format import canonical
from dcr_store.receive import copy_building
from dcr_store.targets.file_sharing import link
from dcr_store.targets.paths import fsync_directory
from dcr_store.targets.safetensors_file import FileTensor, make_header, read_header
from dcr_store.versions.catalog import Catalog, Located

FILE_NBYTES: Final = 1 << 30
"""Receivers read a file whole."""
_PARTIAL: Final = ".partial-series"


@dataclass(frozen=True, slots=True)
class _Blob:
    name: str
    nbytes: int
    checksum: str


def export_deltas(
    catalog: Catalog,
    first: Located,
    last: Located,
    directory: str | os.PathLike[str],
    *,
    encoding: str = "xor",
    checksum: str = "adler32",
    with_first: bool = True,
) -> Exported:
    """Write the versions from `first` to `last` as ``DIRECTORY/weight_v000001``, numbered as in the store.

    Parameters
    ----------
    encoding : {"xor", "overwrite"}
    checksum : {"adler32", "xxh3-128", "blake3"}
        What receivers compare each changed tensor with; the last two take the packages xxhash and blake3.
    with_first : bool
        Write `first` whole; otherwise it is what the receivers have, and the first delta builds on it.

    Raises
    ------
    InvalidInputError
        If the two are no range, or an option is unknown.
    ConflictError
        If the directory holds a version of another series, or another export writes there.
    """
    if encoding not in ENCODINGS:
        raise InvalidInputError("unknown encoding", key="encoding", expected=" or ".join(ENCODINGS), found=encoding)
    if checksum not in CHECKSUMS:
        raise InvalidInputError("unknown checksum", key="checksum", expected=" or ".join(CHECKSUMS), found=checksum)
    hasher(checksum, "checksum")  # before anything is written, if it takes a package that is not here
    kept, gone = versions_between(catalog, first, last)
    directory_name(last.row.version)
    root = open_directory(directory, "the series")
    with only_export(root):
        written, found, nbytes = _export(catalog, kept, root, encoding, checksum, None if with_first else first)
    return Exported(
        str(root),
        tuple(written),
        tuple(located.name for located in found),
        tuple(located.name for located in gone),
        nbytes,
    )


def _export(
    catalog: Catalog, kept: list[Located], root: Path, encoding: str, algorithm: str, given: Located | None
) -> tuple[list[str], list[Located], int]:
    """Write what a series lacks but `given`; return what was written, what was there, and what the new files take."""
    there = list_series(root)
    found = [located for located in kept if located.row.version in there]
    for located in found:
        _check_ours(catalog, located, there[located.row.version])
    wanted = [located for located in kept if located not in found]
    if given is not None and given in wanted:
        wanted.remove(given)
    written: list[str] = []
    nbytes = 0
    if wanted:
        scratch = root / _PARTIAL
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # of an export that was killed
            scratch.mkdir()
            for located, base, new, old in _pairs(catalog, kept[max(0, kept.index(wanted[0]) - 1) :], scratch):
                if located in wanted:
                    nbytes += _write(root, located, base, new, old, encoding, algorithm)
                    written.append(located.name)
            shutil.rmtree(scratch)
        except OSError as error:
            raise StorageError(f"cannot be written: {error.strerror or error}", key=str(root)) from error
    return written, found, nbytes


def _pairs(
    catalog: Catalog, versions: list[Located], scratch: Path
) -> Iterator[tuple[Located, Located | None, Path, Path | None]]:
    """Yield versions with the one before and the folders of both; there are never more than two folders."""
    before: tuple[Located, Path] | None = None
    for located, _, place in write_folders(catalog, versions, scratch):
        base, old = (None, None) if before is None else before
        yield located, base, place, old
        if old is not None:
            shutil.rmtree(old)
        before = located, place


def _check_ours(catalog: Catalog, located: Located, place: Path) -> None:
    """Refuse a directory that is not of this version."""
    metadata: Any = None
    index = place / INDEX
    if index.exists():
        try:
            data = index.read_bytes()
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", key=str(index)) from error
        document = canonical.decode(data, str(index))
        metadata = document.get("metadata") if isinstance(document, dict) else None
    if isinstance(metadata, dict) and "delta_encoding" in metadata:
        is_ours, found = metadata.get("dcr_root") == located.row.root, str(metadata.get("dcr_root"))
    else:
        is_ours, found = copy_building.is_version(catalog, located, place), "another checkpoint"
    if not is_ours:
        raise ConflictError(
            "is of another series, in which this number is another version; export to an empty directory",
            key=str(place),
            expected=f"{located.name} {located.row.root[:16]}",
            found=found[:16],
        )


def _write(
    root: Path, located: Located, base: Located | None, new: Path, old: Path | None, encoding: str, algorithm: str
) -> int:
    """Write one directory of the series; return what its files take."""
    partial = root / _PARTIAL / "version"
    partial.mkdir()
    number = located.row.version
    is_delta = base is not None and old is not None and base.row.version == number - 1 and _alike(old, new)
    if is_delta:
        assert old is not None
        _write_delta(partial, located, new, old, encoding, algorithm)
    else:
        _share(new, partial)
    nbytes = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    fsync_directory(partial)
    events.reached("export.built", located.name)
    partial.rename(root / directory_name(number))
    fsync_directory(root)
    events.reached("export.version", located.name)
    return nbytes


def _share(folder: Path, place: Path) -> None:
    """Give the files of a folder a place in another one, too; durable but for the names in `place` itself."""
    for path in sorted(folder.rglob("*")):
        there = place / path.relative_to(folder)
        if path.is_dir():
            there.mkdir(exist_ok=True)
        elif not link(path, there):
            with path.open("rb") as source, there.open("xb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
    for path in place.rglob("*"):
        if path.is_dir():
            fsync_directory(path)


def _places(folder: Path) -> dict[str, tuple[Path, FileTensor]]:
    """Return the tensors of a checkpoint, each with its file."""
    return {
        tensor.name: (path, tensor)
        for path in sorted(folder.glob("*.safetensors"))
        for tensor in read_header(path).tensors
    }


def _alike(old: Path, new: Path) -> bool:
    """Whether two checkpoints have the same tensors: a delta tells receivers bytes, no dtypes and no shapes."""
    one, other = _places(old), _places(new)
    return one.keys() == other.keys() and all(
        (one[name][1].dtype, one[name][1].shape) == (other[name][1].dtype, other[name][1].shape) for name in one
    )


def _write_delta(partial: Path, located: Located, new: Path, old: Path, encoding: str, algorithm: str) -> None:
    before, after = _places(old), _places(new)
    with tempfile.TemporaryFile(dir=partial.parent) as spool:
        blobs: list[_Blob] = []
        for done, (name, (path, tensor)) in enumerate(after.items(), 1):
            old_path, old_tensor = before[name]
            if path.samefile(old_path) and tensor.begin == old_tensor.begin:
                continue  # the file is a second name of the old one
            bytes_before, bytes_now = _octets(old_path, old_tensor), _octets(path, tensor)
            frame = make_blob(bytes_before, bytes_now, encoding, name)
            if frame is not None:
                spool.write(frame)
                blobs.append(_Blob(name, len(frame), checksum(algorithm, bytes_now, name)))
            events.progress(f"export {located.name}", done, len(after))
        spool.seek(0)
        weight_map = _write_files(partial, blobs, spool)
    number = located.row.version
    document = canonical.decode(index_document(number, number - 1, encoding, algorithm, weight_map), INDEX)
    # Not read by receivers; by it a series is known to be of this version.
    document["metadata"] |= {"dcr_version": located.name, "dcr_root": located.row.root}
    _put(partial / INDEX, canonical.encode(document))


def _octets(path: Path, tensor: FileTensor) -> Octets:
    nbytes = tensor.end - tensor.begin
    return np.memmap(path, np.uint8, "r", tensor.begin, (nbytes,)) if nbytes else np.zeros(0, np.uint8)


def _write_files(partial: Path, blobs: list[_Blob], spool: IO[bytes]) -> dict[str, str]:
    """Write blobs into files of about ``FILE_NBYTES``; return which file has which."""
    groups: list[list[_Blob]] = []
    for blob in blobs:
        if not groups or sum(item.nbytes for item in groups[-1]) + blob.nbytes > FILE_NBYTES:
            groups.append([])
        groups[-1].append(blob)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header = make_header(
            [(blob.name, "U8", [blob.nbytes]) for blob in group], {blob.name: blob.checksum for blob in group}
        )
        with (partial / name).open("wb") as file:
            file.write(header)
            for blob in group:
                file.write(spool.read(blob.nbytes))
            file.flush()
            os.fsync(file.fileno())
        weight_map |= {blob.name: name for blob in group}
    return weight_map


def _put(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
